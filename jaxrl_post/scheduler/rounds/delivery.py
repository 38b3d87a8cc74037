"""When a round's groups are scored and handed to the learner: all at once, or as they come.

Invariant: which groups a round trains on is no matter of delivery, and neither is their sum: only the order of its terms
is. In every round the weights stand still from the first accumulation to the commit.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from jaxrl_post.scheduler.groups import Open
from jaxrl_post.types import Group, Part


class Delivery(Protocol):
    """What happens to groups once they are whole."""

    def due(self, whole: Sequence[Open], over: bool) -> Sequence[Open]:
        """Which to score now, of those whole and not asked for; `over`: none of this wave is still to come."""

    def settled(self, scored: Open, wave: Collection[Open], last: bool) -> Sequence[Open]:
        """Which leave the wave now that `scored` has its rewards, the `last` of the wave to get them."""

    def parts(self, kept: Sequence[Open], full: bool, batches: int) -> list[Part]:
        """What to hand out of the groups kept and not handed out yet; `full`: they complete the round, which is one of so
        many batches. If any, all."""


class WholeRounds:
    """Once the round is full, it is trained on in `mini_batches` equal slices of each batch, in order, one optimizer step
    each, `ppo_epochs` times over: all of it is fresh in the first part, every part commits, the last one publishes."""

    def __init__(self, mini_batches: int = 1, ppo_epochs: int = 1):
        self._mini_batches, self._ppo_epochs = mini_batches, ppo_epochs

    def due(self, whole: Sequence[Open], over: bool) -> Sequence[Open]:
        """All of the wave at once, when its last rollout is in: until then graders and engine work side by side, and the
        ring waits for neither."""
        return whole if over else ()

    def settled(self, scored: Open, wave: Collection[Open], last: bool) -> Sequence[Open]:
        return list(wave) if last else ()

    def parts(self, kept: Sequence[Open], full: bool, batches: int) -> list[Part]:
        if not full:
            return []
        batch = tuple(opened.group for opened in kept)
        size = len(batch) // (batches * self._mini_batches)
        slices = [batch[at : at + size] for _ in range(self._ppo_epochs) for at in range(0, len(batch), size)]
        return [
            Part(fresh=batch if n == 0 else (), groups=groups, commit=True, publish=n == len(slices) - 1)
            for n, groups in enumerate(slices)
        ]


class Streamed:
    """As soon as `size` groups are whole they are scored and handed out, while the others are still generated; the last ones
    of the round commit and publish. On one mesh that the learner shares with the engine this moves work, it removes
    none. A round is one batch: a commit in its midst would move the weights that generate."""

    def __init__(self, size: int):
        self._size = size

    def due(self, whole: Sequence[Open], over: bool) -> Sequence[Open]:
        return whole if over or len(whole) >= self._size else ()

    def settled(self, scored: Open, wave: Collection[Open], last: bool) -> Sequence[Open]:
        return (scored,)

    def parts(self, kept: Sequence[Open], full: bool, batches: int) -> list[Part]:
        assert batches == 1, f"a streamed round of {batches} batches"
        groups: tuple[Group, ...] = tuple(opened.group for opened in sorted(kept, key=lambda opened: opened.rank))
        return [Part(fresh=groups, groups=groups, commit=full, publish=full)] if groups else []
