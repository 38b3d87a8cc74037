"""A layer with a gated delta rule in the place of attention (Qwen3-Next, Qwen3.5; models/gated_delta.py)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxrl_post.models.gated_delta import Inputs
from jaxrl_post.models.layer import Layer, param
from jaxrl_post.models.layer_loop import ATTENDED, Callbacks, named
from jaxrl_post.models.model_config import ModelConfig

_SMALL_DECAY = -2.0  # of dt_bias at random weights: a state keeps about 0.88 of itself for each token


class LinearLayer(Layer):
    """A layer whose rows meet earlier rows in a state of one size, and not in pages. All else is as in `Layer`."""

    def _add_mixer(self, c: ModelConfig, into: float, out: float) -> None:
        s = self.kept
        keys, values = (s.key_heads, s.key_dim), (s.value_heads, s.value_dim)
        for name, sizes in (("q", keys), ("k", keys), ("v", values)):
            axes = ("kv_heads", "head_dim")
            setattr(self, f"linear_{name}", param((c.embed, *sizes), ("embed", *axes), std=into))
            setattr(self, f"conv_{name}", param((s.width, *sizes), (None, *axes), std=s.width**-0.5))
        self.linear_z = param((c.embed, *values), ("embed", "kv_heads", "head_dim"), std=into)
        self.linear_rate = param((c.embed, s.value_heads), ("embed", "kv_heads"), std=into)
        self.linear_decay = param((c.embed, s.value_heads), ("embed", "kv_heads"), std=into)
        self.dt_bias = param((s.value_heads,), ("kv_heads",), mean=_SMALL_DECAY)
        self.a_log = param((s.value_heads,), ("kv_heads",))
        self.linear_norm = param((s.value_dim,), (None,), mean=1.0)
        std = out * (s.value_heads * s.value_dim) ** -0.5
        self.linear_o = param((*values, c.embed), ("kv_heads", "head_dim", "embed"), std=std)

    def _mixed_rows(self, x: Array, turn: tuple[Array, Array], calls: Callbacks, cache: Any) -> tuple[Array, Any]:
        """Returns what each row reads of its state, [..., D]. Decay, rate, rule and norm are float32 or wider."""
        c, dtype, wide = self.config, x.dtype, jnp.promote_types(x.dtype, jnp.float32)
        assert calls.recur is not None, "a layer with a recurrent state needs `recur`"
        with jax.named_scope("qkv"):
            inputs = Inputs(*(self._product(f"linear_{name}", x) for name in "qkv"))
            weights = Inputs(*(getattr(self, f"conv_{name}")[...].astype(wide) for name in "qkv"))
            z, rate, decay = (self._product(f"linear_{name}", x).astype(wide) for name in ("z", "rate", "decay"))
            g = -jnp.exp(self.a_log[...].astype(wide)) * jax.nn.softplus(decay + self.dt_bias[...].astype(wide))
        with jax.named_scope("attend"):
            out, cache = calls.recur(self.index, inputs, g, jax.nn.sigmoid(rate), weights, cache)
            out = named(out, ATTENDED)
            unit = out * jax.lax.rsqrt(jnp.mean(out * out, axis=-1, keepdims=True) + c.norm_eps)
            out = (unit * self.linear_norm[...].astype(wide) * jax.nn.silu(z)).astype(dtype)
            return self._product("linear_o", out), cache

    def paired(self) -> LinearLayer:
        """Returns the layer itself without its weights: none of its products are paired."""
        return LinearLayer(self.config, self.index)
