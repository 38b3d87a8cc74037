"""What one process of a job found out about answers, in every process.

Invariant: all processes ask for the same answers in the same order, and all know what has come: so they agree on when something
must be sent. A message goes when a record is wanted that has not come, and brings all that are ready with it: graders that keep up
have many groups in one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from jaxrl_post.types import RolloutId

HEAD = 4096  # bytes of the first part of a message, which says how long the whole is
_SIZE = 8  # bytes of that number


class Sharing:
    """Records by answer, as process 0 finds them.

    Args:
      share: uint8 vector, of the same length in all processes -> process 0's.
    """

    def __init__(self, share: Callable[[np.ndarray], np.ndarray]):
        self._share = share
        self._come: dict[RolloutId, Mapping] = {}

    def forget(self, rollout: RolloutId) -> None:
        """An answer that is asked about anew: what has come of it is no longer so."""
        self._come.pop(rollout, None)

    def take(
        self, rollouts: Sequence[RolloutId], find: Callable[[list[RolloutId]], Sequence[Mapping]] | None
    ) -> list[Mapping]:
        """Their records, once. `find`: process 0's, which is asked for those that have not come, may wait for them, and may give
        others too; None in the other processes."""
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
