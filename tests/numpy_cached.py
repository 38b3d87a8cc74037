"""A cached numpy decoder of one text whose weights may change in the middle: the oracle of swaps that keep KV.

Plain Llama, or with experts (rotation of halves, SiLU, tied or not). Keys and values stay as the weights of their time made them;
what comes after uses the new weights over the old entries.
"""

from __future__ import annotations

import numpy as np
import numpy_llama


class Cached:
    """Feeds one token after another; each call may bring other weights."""

    def __init__(self, config):
        self.config = config
        self.keys = [[] for _ in range(config.layers)]
        self.values = [[] for _ in range(config.layers)]

    def feed(self, params, token: int) -> np.ndarray:
        """Scores [V] after `token`, which takes the next position, computed with `params`."""
        c, position = self.config, len(self.keys[0])
        x = np.asarray(params["embed"], np.float64)[token]
        for index in range(c.layers):
            w = {name: np.asarray(leaf, np.float64) for name, leaf in params["layers"][str(index)].items()}
            x = x + self._attend(index, w, self._norm(x, w["attn_norm"]), position)
            h = self._norm(x, w["ffw_norm"])
            ffw = numpy_llama.experts if "router" in w else numpy_llama.feed_forward
            x = x + ffw(w, c, h[None])[0]
        x = self._norm(x, np.asarray(params["final_norm"], np.float64))
        return x @ (np.asarray(params["embed"], np.float64).T if c.tied else np.asarray(params["head"], np.float64))

    def _norm(self, x, weight):
        return x / np.sqrt((x**2).mean() + self.config.norm_eps) * weight

    def _attend(self, index, w, x, position):
        c = self.config
        q, k, v = (np.tensordot(x, w[name], 1) for name in "qkv")
        self.keys[index].append(self._turn(k, position))
        self.values[index].append(v)
        q, keys, values = self._turn(q, position), np.array(self.keys[index]), np.array(self.values[index])
        out = np.zeros(c.embed)
        for head in range(c.heads):
            shared = head * c.kv_heads // c.heads
            scores = keys[:, shared] @ q[head] * c.head_dim**-0.5
            weights = np.exp(scores - scores.max())
            out += (weights / weights.sum()) @ values[:, shared] @ w["o"][head]
        return out

    def _turn(self, x, position):
        half = self.config.head_dim // 2
        angle = position * self.config.rope_theta ** (-2 * np.arange(half) / self.config.head_dim)
        a, b = x[:, :half], x[:, half:]
        return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], -1)
