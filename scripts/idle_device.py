"""A RowDevice that computes nothing: every running slot settles a token a step, and rollouts end at random.

With it only the host's part of a dispatch takes time. It measures its own seconds, and those between the start of a
dispatch and the wait for it, in which a real device would be at work.
"""

from __future__ import annotations

import time

import numpy as np

from jaxrl_post.engine.host import wire as c

EOS, VOCABULARY = 2, 1000


class IdleDevice:
    """See above. `mean`: tokens of a rollout on average.

    Attributes:
      own_s: CPU seconds of this device, since the last `clear`.
      meanwhile_s: CPU seconds of the host while a dispatch runs.
    """

    watched = 0

    def __init__(self, sizes: c.EngineSettings, mean: float):
        self._sizes, self._chance, self._noise = sizes, sizes.steps_per_dispatch / mean, np.random.default_rng(0)
        self.clear()

    def clear(self) -> None:
        self.own_s = self.meanwhile_s = 0.0

    def put(self, entry, drafts):
        """Joins the arrays, as a real device does before it sends them."""
        entry.joined()

    def dispatch(self, order):
        """Returns a function that gives the result. It is computed before, outside of the host's seconds."""
        begun = time.thread_time()
        result = self._result(order.packed)
        started = time.thread_time()
        self.own_s += started - begun

        def wait():
            self.meanwhile_s += time.thread_time() - started
            return result

        return wait

    def _result(self, packed: np.ndarray) -> c.DispatchResult:
        sizes, noise = self._sizes, self._noise
        active, before = packed[..., c.ACTIVE] > 0, packed[..., c.NUM_TOKENS]
        room = np.minimum(packed[..., c.LIMIT], packed[..., c.MAPPED] + 1) - before
        prefill = packed[..., c.NUM_COMPUTED] < before - 1
        new = np.where(active, np.clip(np.where(prefill, 1, sizes.steps_per_dispatch), 0, room), 0)
        out = np.zeros((sizes.replicas, sizes.slots, c.OUT_WINDOW + c.BLOCKS * sizes.emit), np.int32)
        out[..., c.OUT_NUM_TOKENS] = before + new
        out[..., c.OUT_NUM_COMPUTED] = np.where(active, before + new - 1, 0)
        blocks = out[..., c.OUT_WINDOW :].reshape(*active.shape, c.BLOCKS, sizes.emit)
        tokens = noise.integers(EOS + 1, VOCABULARY, (*active.shape, sizes.emit), np.int32)
        ends = active & (new > 0) & (noise.random(active.shape) < self._chance)
        tokens[(*np.nonzero(ends), new[ends] - 1)] = EOS
        blocks[:, :, 0] = blocks[:, :, 4] = tokens
        blocks[:, :, 1:3] = np.full(1, -0.5, np.float32).view(np.int32)
        blocks[:, :, 3] = 2 * np.arange(sizes.emit)
        uses = np.zeros((sizes.replicas, len(c.USES)), np.int64)
        uses[:, c.USES.index("decode")] = new.sum(axis=1)
        nothing = np.zeros(sizes.replicas, np.int64)
        offers, counts = np.zeros((sizes.replicas, c.OFFERS), np.int64), np.zeros((sizes.replicas, 2, 0), np.int64)
        return c.DispatchResult(out, uses, sizes.steps_per_dispatch, offers, nothing, counts)
