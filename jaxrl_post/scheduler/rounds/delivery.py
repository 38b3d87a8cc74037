"""When complete groups of a round are scored and handed to the learner: all at once, or as they become complete.

Invariant: delivery never changes which groups a round trains on. It only changes the order of the terms of the gradient
sum. In every round the weights stay fixed from the first accumulation to the commit.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from jaxrl_post.scheduler.groups import Open
from jaxrl_post.types import Part


class Delivery(Protocol):
    """Decides what happens to groups after they are complete."""

    def due(self, whole: Sequence[Open], over: bool) -> Sequence[Open]:
        """Returns groups to score now.

        Args:
          whole: complete groups whose score was not requested yet.
          over: whether the wave has no incomplete group left that it waits for.
        """

    def settled(self, scored: Open, wave: Collection[Open], last: bool) -> Sequence[Open]:
        """Returns groups that leave the wave now that `scored` has its rewards.

        Args:
          scored: the group that was scored.
          wave: all groups of the wave.
          last: whether this was the last score of the wave.
        """

    def parts(self, kept: Sequence[Open], full: bool, batches: int) -> list[Part]:
        """Returns parts for the learner: either all kept groups, or none.

        Args:
          kept: groups that were kept and not handed out yet.
          full: whether the kept groups complete the round.
          batches: batches of the round.
        """


class WholeRounds:
    """A Delivery that hands out a round once it is full.

    Each batch is cut into `mini_batches` equal slices, in order, with one optimizer step each. The whole is repeated
    `ppo_epochs` times. All groups are fresh in the first part. Every part commits, and the last one publishes.
    """

    def __init__(self, mini_batches: int = 1, ppo_epochs: int = 1):
        self._mini_batches, self._ppo_epochs = mini_batches, ppo_epochs

    def due(self, whole: Sequence[Open], over: bool) -> Sequence[Open]:
        """Returns all groups of the wave once its last rollout has finished. Until then engine and graders work at the
        same time, and the ring does not wait for graders.
        """
        return whole if over else ()

    def settled(self, scored: Open, wave: Collection[Open], last: bool) -> Sequence[Open]:
        """Returns the whole wave after its last score."""
        return list(wave) if last else ()

    def parts(self, kept: Sequence[Open], full: bool, batches: int) -> list[Part]:
        """Returns the slices of a full round, or nothing."""
        if not full:
            return []
        batch = tuple(opened.scored_group for opened in kept)
        size = len(batch) // (batches * self._mini_batches)
        slices = [batch[at : at + size] for _ in range(self._ppo_epochs) for at in range(0, len(batch), size)]
        return [
            Part(fresh=batch if n == 0 else (), groups=groups, commit=True, publish=n == len(slices) - 1)
            for n, groups in enumerate(slices)
        ]


class Streamed:
    """A Delivery that scores and hands out groups as soon as `size` of them are complete.

    Other groups are still generated meanwhile. The last part of the round commits and publishes. On devices that
    learner and engine share, this moves work and removes none. A round is one batch, because a commit within a round
    would change the weights that generate.
    """

    def __init__(self, size: int):
        self._size = size

    def due(self, whole: Sequence[Open], over: bool) -> Sequence[Open]:
        """Returns complete groups once there are `size` of them, or the wave is over."""
        return whole if over or len(whole) >= self._size else ()

    def settled(self, scored: Open, wave: Collection[Open], last: bool) -> Sequence[Open]:
        """Returns the scored group."""
        return (scored,)

    def parts(self, kept: Sequence[Open], full: bool, batches: int) -> list[Part]:
        """Returns one part with all kept groups, in order of admission."""
        assert batches == 1, f"a streamed round of {batches} batches"
        groups = tuple(opened.scored_group for opened in sorted(kept, key=lambda opened: opened.rank))
        return [Part(fresh=groups, groups=groups, commit=full, publish=full)] if groups else []
