"""Past rollouts of each prompt: tokens, lengths, rewards and versions of its last epochs.

Invariant: the history holds at most `max_bytes`. What was recorded first is dropped first, one group at a time. A
prompt keeps at most the groups of its last `epochs` epochs. The history is a function of the groups recorded and their
order, so every process of a job holds the same. It is host numpy only. Evaluation is never recorded.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from jaxrl_post.ring.types import Group, Rollout, frozen, saved_name

OVERHEAD = 2048  # bytes; an upper bound of what Python and numpy add to the arrays of a group


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """The G rollouts of a prompt in one epoch, by sample index. M is the sum of their lengths."""

    epoch: int  # of the group
    tokens: np.ndarray  # int32[M], laid end to end
    argmax_tokens: np.ndarray  # int32[M], the argmax token at each position
    offsets: np.ndarray  # int64[G + 1], where each rollout begins and ends
    rewards: np.ndarray  # f32[G]
    scored: np.ndarray  # bool[G]. False: the reward is no verdict
    versions: np.ndarray  # int32[G], the version of each last sampled token

    @property
    def lengths(self) -> np.ndarray:
        """Returns int64[G], tokens of each rollout."""
        return np.diff(self.offsets)

    def rollout_tokens(self, index: int) -> np.ndarray:
        """Returns int32[T], the tokens of one rollout."""
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]

    @property
    def texts_to_learn(self) -> list[np.ndarray]:
        """Returns the argmax tokens of each rollout."""
        return np.split(self.argmax_tokens, self.offsets[1:-1])

    @property
    def token_lists(self) -> list[np.ndarray]:
        """Returns the tokens of all rollouts, by sample index."""
        return [self.rollout_tokens(index) for index in range(self.rewards.size)]

    @property
    def nbytes(self) -> int:
        return sum(getattr(self, name).nbytes for name in _KINDS)


_KINDS = {
    "tokens": np.int32,
    "argmax_tokens": np.int32,
    "offsets": np.int64,
    "rewards": np.float32,
    "scored": bool,
    "versions": np.int32,
}


class History:
    """Records by (prompt id, epoch).

    Args:
      epochs: epochs that a prompt keeps. 0 records nothing.
      max_bytes: upper bound of all records.
    """

    def __init__(self, *, epochs: int, max_bytes: int):
        self._epochs, self._max_bytes = epochs, max_bytes
        self._groups: OrderedDict[tuple[str, int], Past] = OrderedDict()  # in order of recording
        self._of: dict[str, list[int]] = {}  # prompt -> epochs held, oldest record first
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._groups)

    def of(self, prompt_id: str) -> tuple[Past, ...]:
        """Returns the records of a prompt, newest first."""
        return tuple(self._groups[prompt_id, epoch] for epoch in reversed(self._of.get(prompt_id, ())))

    def record(self, group: Group) -> None:
        """Records a scored group. It replaces a group of the same prompt and epoch."""
        if self._epochs > 0:
            self._keep(
                group.prompt.id,
                Past(
                    epoch=group.rollouts[0].id.epoch,
                    rewards=group.rewards,
                    scored=group.scored,
                    tokens=frozen(np.concatenate([rollout.tokens for rollout in group.rollouts])),
                    argmax_tokens=frozen(np.concatenate([rollout.argmax_tokens for rollout in group.rollouts])),
                    offsets=frozen(np.cumsum([0, *map(len, group.rollouts)], dtype=np.int64)),
                    versions=frozen(np.array([_version(rollout) for rollout in group.rollouts], np.int32)),
                ),
            )

    def _keep(self, prompt_id: str, past: Past) -> None:
        """Stores a record and drops the oldest ones beyond the bounds."""
        if (prompt_id, past.epoch) in self._groups:
            self._drop(prompt_id, past.epoch)
        self._groups[prompt_id, past.epoch] = past
        self._of.setdefault(prompt_id, []).append(past.epoch)
        self.nbytes += _cost(prompt_id, past)
        known = self._of[prompt_id]
        for epoch in [e for e in known if e <= max(known) - self._epochs]:
            self._drop(prompt_id, epoch)
        while self.nbytes > self._max_bytes:
            self._drop(*next(iter(self._groups)))

    def _drop(self, prompt_id: str, epoch: int) -> None:
        self.nbytes -= _cost(prompt_id, self._groups.pop((prompt_id, epoch)))
        self._of[prompt_id].remove(epoch)
        if not self._of[prompt_id]:
            del self._of[prompt_id]

    def metrics(self) -> dict[str, float]:
        return {"history/num_groups": float(len(self)), "history/bytes": float(self.nbytes)}

    def state_dict(self) -> dict:
        """Returns every group in order of recording, laid end to end, as plain values and arrays."""
        pasts = list(self._groups.values())
        out = {
            saved_name(name): np.concatenate([np.zeros(0, kind), *(getattr(past, name) for past in pasts)]).astype(kind)
            for name, kind in _KINDS.items()
        }
        return out | {
            "prompts": [prompt_id for prompt_id, _ in self._groups],
            "epochs": [past.epoch for past in pasts],
            "sizes": [past.rewards.size for past in pasts],
        }

    def load_state_dict(self, state: Mapping) -> None:
        """Replaces all records. With a smaller bound than in the run that saved the state, the oldest groups are
        dropped.
        """
        self._groups, self._of, self.nbytes = OrderedDict(), {}, 0
        rollout = token = offset = 0
        for prompt_id, epoch, size in zip(state["prompts"], state["epochs"], state["sizes"], strict=True):
            offsets = state["offsets"][offset : offset + size + 1]
            mine = {name: state[name][rollout : rollout + size] for name in ("rewards", "scored", "versions")}
            mine |= {
                name: state[saved_name(name)][token : token + int(offsets[-1])] for name in ("tokens", "argmax_tokens")
            }
            mine |= {"offsets": offsets}
            self._keep(prompt_id, Past(epoch=epoch, **{name: frozen(array.copy()) for name, array in mine.items()}))
            rollout, offset, token = rollout + size, offset + size + 1, token + int(offsets[-1])


def _version(rollout: Rollout) -> int:
    """Returns the version of the last sampled token, or -1 if none was sampled."""
    sampled = rollout.versions[rollout.sampled]
    return int(sampled[-1]) if sampled.size else -1


def _cost(prompt_id: str, past: Past) -> int:
    """Returns the bytes that a record counts for."""
    return past.nbytes + len(prompt_id.encode()) + OVERHEAD
