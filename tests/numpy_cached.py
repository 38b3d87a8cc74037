"""A cached numpy decoder of one text whose weights may change in the middle: the oracle of swaps that keep KV.

Plain Llama, with experts or with layers that have a gated delta rule (rotation of halves, SiLU, tied or not). Keys, values, states
and inputs of a convolution stay as the weights of their time made them. What comes after uses the new weights over them.
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
        self.inputs = [[] for _ in range(config.layers)]
        self.states: dict[tuple[int, int], np.ndarray] = {}
        self.fed = 0

    def feed(self, params, token: int) -> np.ndarray:
        """Scores [V] after `token`, which takes the next position, computed with `params`."""
        c, position = self.config, self.fed
        self.fed += 1
        x = np.asarray(params["embed"], np.float64)[token]
        for index in range(c.layers):
            w = {
                name: np.asarray(leaf, np.float64)
                for name, leaf in numpy_llama.matrices(params["layers"][str(index)]).items()
            }
            normed = self._norm(x, w["attn_norm"])
            x = x + (self._recur(index, w, normed) if "a_log" in w else self._attend(index, w, normed, position))
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
        self.keys[index].append(numpy_llama.kept(self._turn(k, position)))
        self.values[index].append(numpy_llama.kept(v))
        q, keys, values = self._turn(q, position), np.array(self.keys[index]), np.array(self.values[index])
        out = np.zeros(c.embed)
        for head in range(c.heads):
            shared = head * c.kv_heads // c.heads
            scores = keys[:, shared] @ q[head] * c.head_dim**-0.5
            weights = np.exp(scores - scores.max())
            out += (weights / weights.sum()) @ values[:, shared] @ w["o"][head]
        return out

    def _recur(self, index, w, x):
        sizes, out = self.config.linear, np.zeros(self.config.embed)
        self.inputs[index].append([np.tensordot(x, w[f"linear_{name}"], 1) for name in "qkv"])
        latest = self.inputs[index][-sizes.width :]
        made = [
            sum(
                each[at] * w[f"conv_{name}"][len(w[f"conv_{name}"]) - len(latest) + back]
                for back, each in enumerate(latest)
            )
            for at, name in enumerate("qkv")
        ]
        q, k, v = (each / (1 + np.exp(-each)) for each in made)
        q, k = (each / np.sqrt((each**2).sum(-1, keepdims=True) + 1e-6) for each in (q, k))
        rate = 1 / (1 + np.exp(-x @ w["linear_rate"]))
        decay = np.exp(-np.exp(w["a_log"]) * np.log1p(np.exp(x @ w["linear_decay"] + w["dt_bias"])))
        gate = np.tensordot(x, w["linear_z"], 1)
        for head in range(sizes.value_heads):
            shared = head * sizes.key_heads // sizes.value_heads
            state = decay[head] * self.states.get((index, head), np.zeros((sizes.key_dim, sizes.value_dim)))
            state = state + np.outer(k[shared], rate[head] * (v[head] - k[shared] @ state))
            self.states[index, head] = state
            read = q[shared] @ state * sizes.key_dim**-0.5
            read = read / np.sqrt((read**2).mean() + self.config.norm_eps) * w["linear_norm"]
            out += (read * gate[head] / (1 + np.exp(-gate[head]))) @ w["linear_o"][head]
        return out

    def _turn(self, x, position):
        half = self.config.head_dim // 2
        angle = position * self.config.rope_theta ** (-2 * np.arange(half) / self.config.head_dim)
        a, b = x[:, :half], x[:, half:]
        return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], -1)
