"""A layer with a gated delta rule in the place of attention (Qwen3-Next, Qwen3.5; models/gated_delta.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxrl_post.models.gated_delta import Inputs
from jaxrl_post.models.layer import Layer, PairedInner, param
from jaxrl_post.models.layer_loop import ATTENDED, Callbacks, named
from jaxrl_post.models.model_config import ModelConfig

_AXES = ("kv_heads", "head_dim")
_PAIRS = (("q", "k"), ("v", "z"), ("rate", "decay"))  # of equal shapes
_SMALL_DECAY = -2.0  # of dt_bias at random weights: a state keeps about 0.88 of itself for each token


class LinearLayer(Layer):
    """A layer whose rows meet earlier rows in a state of one size, and not in pages. All else is as in `Layer`."""

    def _add_mixer(self, c: ModelConfig, into: float, out: float) -> None:
        s = self.kept
        keys, values, rates = (s.key_heads, s.key_dim), (s.value_heads, s.value_dim), (s.value_heads,)
        for name, sizes in (("q", keys), ("k", keys), ("v", values)):
            setattr(self, f"conv_{name}", param((s.width, *sizes), (None, *_AXES), std=s.width**-0.5))
        for name, sizes in (("q", keys), ("k", keys), ("v", values), ("z", values), ("rate", rates), ("decay", rates)):
            self._add_projection(f"linear_{name}", c, sizes, into)
        self.dt_bias = param((s.value_heads,), ("kv_heads",), mean=_SMALL_DECAY)
        self.a_log = param((s.value_heads,), ("kv_heads",))
        self.linear_norm = param((s.value_dim,), (None,), mean=1.0)
        std = out * (s.value_heads * s.value_dim) ** -0.5
        self.linear_o = param((*values, c.embed), ("kv_heads", "head_dim", "embed"), std=std)

    def _add_projection(self, name: str, c: ModelConfig, sizes: tuple[int, ...], std: float) -> None:
        """Makes the weights of a product of the normed stream."""
        setattr(self, name, param((c.embed, *sizes), ("embed", *_AXES[: len(sizes)]), std=std))

    def _projected(self, x: Array) -> dict[str, Array]:
        """Returns the products of the normed stream, by the part of their names behind `linear_`."""
        return {name: self._product(f"linear_{name}", x) for name in (*"qkvz", "rate", "decay")}

    def _mixed_rows(self, x: Array, turn: tuple[Array, Array], calls: Callbacks, cache: Any) -> tuple[Array, Any]:
        """Returns what each row reads of its state, [..., D]. Decay, rate, rule and norm are float32 or wider."""
        c, dtype, wide = self.config, x.dtype, jnp.promote_types(x.dtype, jnp.float32)
        assert calls.recur is not None, "a layer with a recurrent state needs `recur`"
        with jax.named_scope("qkv"):
            made = self._projected(x)
            inputs = Inputs(*(made[name] for name in "qkv"))
            weights = Inputs(*(getattr(self, f"conv_{name}")[...].astype(wide) for name in "qkv"))
            z, rate, decay = (made[name].astype(wide) for name in ("z", "rate", "decay"))
            g = -jnp.exp(self.a_log[...].astype(wide)) * jax.nn.softplus(decay + self.dt_bias[...].astype(wide))
        with jax.named_scope("attend"):
            out, cache = calls.recur(self.index, inputs, g, jax.nn.sigmoid(rate), weights, cache)
            out = named(out, ATTENDED)
            unit = out * jax.lax.rsqrt(jnp.mean(out * out, axis=-1, keepdims=True) + c.norm_eps)
            out = (unit * self.linear_norm[...].astype(wide) * jax.nn.silu(z)).astype(dtype)
            return self._product("linear_o", out), cache

    def paired(self) -> PairedLinearLayer:
        """Returns the layer that computes the same from pairs of the weights, without its weights."""
        return PairedLinearLayer(self.config, self.index)


class PairedLinearLayer(LinearLayer, PairedInner):
    """A layer with one product for queries and keys, one for values and z, one for both rates, and one for gate and up.

    It computes what `LinearLayer` does. With full remat a layer has 23 instead of 39 products with weights."""

    @property
    def matrix_pairs(self) -> Mapping[str, tuple[str, str]]:
        own = {f"linear_{a}_{b}": (f"linear_{a}", f"linear_{b}") for a, b in _PAIRS}
        return own | dict(super().matrix_pairs)

    def _add_projection(self, name: str, c: ModelConfig, sizes: tuple[int, ...], std: float) -> None:
        for pair, (first, _) in self.matrix_pairs.items():
            if name == first:
                setattr(self, pair, param((2, c.embed, *sizes), (None, "embed", *_AXES[: len(sizes)]), std=std))

    def _projected(self, x: Array) -> dict[str, Array]:
        both = {pair: self._both(f"linear_{'_'.join(pair)}", x) for pair in _PAIRS}
        return {name: one for pair, each in both.items() for name, one in zip(pair, each, strict=True)}
