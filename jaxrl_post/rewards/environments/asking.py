"""What an environment is asked: how a conversation goes on behind the policy's last turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jaxrl_post.ring.types import Rollout


class Asking(NamedTuple):
    """A turn of the policy that an environment is to follow.

    key: names the conversation.
    row: the columns of its data row.
    said: what the policy said in each turn, as messages.
    seen: the messages that followed each turn but the last.
    rollout: the conversation as tokens, up to the end of the last turn.
    """

    key: str
    row: Mapping
    said: Sequence[Mapping]
    seen: Sequence[Sequence[Mapping]]
    rollout: Rollout


def spans(sampled: np.ndarray) -> list[tuple[int, int]]:
    """Returns the first place and the end of each turn: of each run of true values in bool[T]."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], sampled, [False]]).astype(np.int8)))
    return [(int(begin), int(end)) for begin, end in edges.reshape(-1, 2)]
