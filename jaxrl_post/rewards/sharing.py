"""Sends the scores that process 0 finds to every process of a job.

Invariant: all processes ask for the same scores in the same order and know which they have received. So they agree on
when a message must be sent. A message is sent when a missing record is needed, and carries all records that are ready.
If graders keep up, one message carries many groups.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from jaxrl_post.types import RolloutId

HEAD = 4096  # bytes of the first part of a message, which begins with the length of the body
_SIZE = 8  # bytes of the length


class Sharing:
    """Records of scores, as process 0 finds them.

    Args:
      share: maps a uint8 vector, of the same length in all processes, to process 0's.
    """

    def __init__(self, share: Callable[[np.ndarray], np.ndarray]):
        self._share = share
        self._come: dict[RolloutId, Mapping] = {}

    def forget(self, rollout: RolloutId) -> None:
        """Drops the record of a rollout that is scored again."""
        self._come.pop(rollout, None)

    def take(
        self, rollouts: Sequence[RolloutId], find: Callable[[list[RolloutId]], Sequence[Mapping]] | None
    ) -> list[Mapping]:
        """Returns the records and drops them.

        `find`: process 0's function for missing records, None in the other processes. It may wait, and may return
        further records.
        """
        missing = [rollout for rollout in rollouts if rollout not in self._come]
        if missing:
            for record in self._sent(find(missing) if find else None):
                self._come[RolloutId(*(record[name] for name in RolloutId._fields))] = record
        return [self._come.pop(rollout) for rollout in rollouts]

    def _sent(self, records: Sequence[Mapping] | None) -> list[dict]:
        body = b"" if records is None else json.dumps(list(records)).encode()
        body = len(body).to_bytes(_SIZE, "big") + body
        head = self._share(np.frombuffer(body[:HEAD].ljust(HEAD, b"\0"), np.uint8)).tobytes()
        size = _SIZE + int.from_bytes(head[:_SIZE], "big")
        rest = np.frombuffer(body[HEAD:] or bytes(max(0, size - HEAD)), np.uint8)
        whole = head + (self._share(rest).tobytes() if rest.size else b"")
        return json.loads(whole[_SIZE:size])
