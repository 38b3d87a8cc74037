"""One layer of the decoder: attention and a gated feed-forward, experts, or both. And the same with paired products.

Norms, rotation and scores are computed in float32 or wider.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from jaxrl_post.kernels import eight_bits, row_blocks
from jaxrl_post.models import experts as mixture
from jaxrl_post.models.layer_loop import PROJECTED, STREAM, Callbacks, named
from jaxrl_post.models.model_config import ACTIVATIONS, Experts, Lora, ModelConfig

# Axes that each matrix contracts, and axes that it makes, as letters.
PRODUCTS = {
    "q": ("d", "nh"),
    "k": ("d", "kh"),
    "v": ("d", "kh"),
    "o": ("nh", "d"),
    "gate": ("d", "f"),
    "up": ("d", "f"),
    "down": ("f", "d"),
    "linear_q": ("d", "nh"),
    "linear_k": ("d", "nh"),
    "linear_v": ("d", "nh"),
    "linear_z": ("d", "nh"),
    "linear_rate": ("d", "n"),
    "linear_decay": ("d", "n"),
    "linear_o": ("nh", "d"),
}
# Targets of low-rank additions to several matrices, which a checkpoint has as one. They share an A.
_TOGETHER = {
    "linear_qkv": ("linear_q", "linear_k", "linear_v"),
    "linear_qkvz": ("linear_q", "linear_k", "linear_v", "linear_z"),
    "linear_ba": ("linear_rate", "linear_decay"),
}
_HEADS = {"q": "heads", "k": "kv_heads", "v": "kv_heads"}
FEED_FORWARD = ("gate", "up", "down")
EXPERT_AXES = {
    "gate": ("expert", "embed", "ffw"),
    "up": ("expert", "embed", "ffw"),
    "down": ("expert", "ffw", "embed"),
    "gate_bias": ("expert", "ffw"),
    "up_bias": ("expert", "ffw"),
    "down_bias": ("expert", "embed"),
    "gate_a": ("expert", "embed", None),
    "gate_b": ("expert", None, "ffw"),
    "up_a": ("expert", "embed", None),
    "up_b": ("expert", None, "ffw"),
    "down_a": ("expert", "ffw", None),
    "down_b": ("expert", None, "embed"),
}

_SCALE_AXES = {"gate_scale": ("expert", "ffw"), "up_scale": ("expert", "ffw"), "down_scale": ("expert", "embed")}
# Matrices that may have 8 bits. Decays and rates of a recurrent state, and routers, keep the bits that they have.
EIGHT_BITS = (
    *(name for name in PRODUCTS if name not in ("linear_rate", "linear_decay")),
    *(f"{which}_{name}" for which in ("experts", "shared") for name in FEED_FORWARD),
)


def product(leaf: str) -> str:
    """Returns the product in which a matrix takes part: of experts_gate and shared_gate it is gate."""
    return leaf if leaf in PRODUCTS else leaf.rpartition("_")[2]


def adapted(target: str) -> tuple[str, ...]:
    """Returns the matrices that a target of low-rank additions names. A layer has some of them."""
    if target in FEED_FORWARD:
        return target, f"experts_{target}", f"shared_{target}"
    return _TOGETHER.get(target, (target,))


def with_additions(lora: Lora) -> tuple[str, ...]:
    """Returns the matrices with low-rank additions. A layer has some: with experts, those of a feed-forward have other names."""
    return tuple(name for target in lora.targets for name in adapted(target))


def low_rank(matrix: str, lora: Lora) -> tuple[str, str]:
    """Returns the names of A and B of a matrix."""
    owner = next((target for target in lora.targets if matrix in _TOGETHER.get(target, ())), matrix)
    return f"{owner}_a", f"{matrix}_b"


def leading(leaf: str) -> int:
    """Returns the number of axes before those of a product: one in a stack of experts."""
    return int(leaf.startswith("experts_"))


def input_axes(leaf: str) -> tuple[int, ...]:
    """Returns the axes of a matrix that its product sums over."""
    first = leading(leaf)
    return tuple(range(first, first + len(PRODUCTS[product(leaf)][0])))


def _wide(x: Array) -> Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def norm(x: Array, weight: Array, config: ModelConfig) -> Array:
    """Returns the root-mean-square norm over the last axis (arXiv 1910.07467 eq. 4) in x's dtype.

    It is computed in float32 or wider.
    """

    def plain(rows: Array, weight: Array) -> Array:
        wide = _wide(rows)
        unit = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + config.norm_eps)
        return (unit * (weight.astype(wide.dtype) + config.norm_offset)).astype(rows.dtype)

    if config.row_blocks is None:
        return plain(x, weight)
    return row_blocks.norm(plain, x, weight, config.norm_eps, config.norm_offset, config.row_blocks.platforms)


def _rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Rotates pairs (i, i + P) of each head: x [..., heads, H], cos and sin [..., P]. Numbers from 2P on stay."""
    turned = 2 * cos.shape[-1]
    a, b = jnp.split(_wide(x[..., :turned]), 2, axis=-1)
    cos, sin = cos[..., None, :], sin[..., None, :]
    out = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
    return out if turned == x.shape[-1] else jnp.concatenate([out, x[..., turned:]], axis=-1)


def param(
    shape: tuple[int, ...], axes: tuple[str | None, ...], *, std: float = 0.0, mean: float = 0.0, own: Any = None
) -> nnx.Param:
    """Returns a weight without an array: its shape, its logical axes, and the law of its random values.

    own: its dtype, where it is not that of all weights."""
    return nnx.Param(jax.ShapeDtypeStruct(shape, jnp.float32), axes=axes, std=std, mean=mean, own=own)


def _low_rank_of(whole: nnx.Param, rank: int, first: int, inputs: int) -> tuple[nnx.Param, nnx.Param]:
    """Returns A [..., inputs, r] and B [..., r, outputs] of a matrix [..., inputs, outputs].

    first: axes before those of the inputs: of experts, or of a pair. inputs: axes of the inputs."""
    shape, axes, last = whole.get_value().shape, whole.get_metadata()["axes"], first + inputs
    return (
        param((*shape[:last], rank), (*axes[:last], None)),
        param((*shape[:first], rank, *shape[last:]), (*axes[:first], None, *axes[last:])),
    )


class Layer(nnx.Module):
    """Attention and gated feed-forward, each added to the stream.

    The input of each is normed. Where the config says so, the output is normed too.
    """

    @property
    def pairs(self) -> Mapping[str, tuple[str, str]]:
        """Returns the weights that are one here, and two in the tree of params."""
        return {}

    def __init__(self, config: ModelConfig, index: int):
        c = config
        self.config, self.index = config, index
        self.kept, self.sides = config.kept[index], config.sides(index)
        ffw = config.ffw_of(index)
        one, into, out = 1.0 - c.norm_offset, c.embed**-0.5, (2 * c.layers) ** -0.5
        self.attn_norm = param((c.embed,), (None,), mean=one)
        self._add_mixer(c, into, out)
        if c.post_norms:
            self.attn_post_norm = param((c.embed,), (None,), mean=one)
            self.ffw_post_norm = param((c.embed,), (None,), mean=one)
        if c.layer_scalars:
            self.layer_scalar = param((1,), (None,), mean=1.0)
        if P := c.layer_embeds:
            self.layer_gate = param((c.embed, P), ("embed", None), std=into)
            self.layer_up = param((P, c.embed), (None, "embed"), std=out * P**-0.5)
            self.layer_post_norm = param((c.embed,), (None,), mean=one)
        self.ffw_norm = param((c.embed,), (None,), mean=one)
        if self.dense:
            self._add_inner("", ffw, into)
            self.down = param((ffw, c.embed), ("ffw", "embed"), std=out * ffw**-0.5)
        if self.experts is not None:
            self._add_experts(self.experts, c.embed, into, out)
            if self.experts.beside:
                self.router_scale = param((c.embed,), (None,), mean=1.0)
                self.expert_scale = param((self.experts.count,), (None,), mean=1.0)
                for name in ("dense_post_norm", "moe_norm", "moe_post_norm"):
                    setattr(self, name, param((c.embed,), (None,), mean=one))
        if c.lora:
            self._add_low_rank(c.lora)
        if c.eight_bits and c.eight_bits.stored:
            self._store_codes(eight_bits.FORMATS[c.eight_bits.name].dtype)

    def _store_codes(self, dtype: Any) -> None:
        """Makes codes of the matrices, and a scale for each of their outputs."""
        for name in EIGHT_BITS:
            if hasattr(self, name):
                summed, whole = input_axes(name), getattr(self, name)
                shape, axes = whole.get_value().shape, whole.get_metadata()["axes"]
                outputs = [at for at in range(len(shape)) if at not in summed]
                setattr(self, name, param(shape, axes, own=dtype))
                scale = tuple(shape[at] for at in outputs), tuple(axes[at] for at in outputs)
                setattr(self, f"{name}_scale", param(*scale, mean=1.0, own=jnp.dtype(jnp.float32)))

    def _add_mixer(self, c: ModelConfig, into: float, out: float) -> None:
        """Makes what the layer has for other rows: attention."""
        H, one = self.kept.head_dim, 1.0 - c.norm_offset
        self._project(c, into)
        self.o = param((c.heads, H, c.embed), ("heads", "head_dim", "embed"), std=out * (c.heads * H) ** -0.5)
        if c.qkv_bias:
            for side in self.sides:
                setattr(self, f"{side}_bias", param(self._sizes(side), (_HEADS[side], "head_dim")))
        if c.o_bias:
            self.o_bias = param((c.embed,), (None,))
        if c.sinks:
            self.sinks = param((c.heads,), ("heads",))
        if c.qk_norm:
            self.q_norm = param((H,), (None,), mean=one)
            if self.kept.of is None:
                self.k_norm = param((H,), (None,), mean=one)

    @property
    def experts(self) -> Experts | None:
        """Returns the experts of this layer, if any."""
        return self.config.experts_of(self.index)

    @property
    def dense(self) -> bool:
        """Returns whether the layer has one feed-forward that every token uses."""
        return self.experts is None or self.experts.beside

    def _add_experts(self, e: Experts, embed: int, into: float, out: float) -> None:
        """Makes router and experts, and the shared expert with its gate where there is one."""
        self.router = param((embed, e.count), ("embed", None), std=into)
        sides = {"gate": (embed, e.ffw, into), "up": (embed, e.ffw, into), "down": (e.ffw, embed, out * e.ffw**-0.5)}
        for name, (inputs, outputs, std) in sides.items():
            setattr(self, f"experts_{name}", param((e.count, inputs, outputs), EXPERT_AXES[name], std=std))
            if e.biased:
                setattr(self, f"experts_{name}_bias", param((e.count, outputs), EXPERT_AXES[f"{name}_bias"]))
        if e.biased:
            self.router_bias = param((e.count,), (None,))
        if e.shared_ffw:
            self._add_inner("shared_", e.shared_ffw, into)
            self.shared_down = param((e.shared_ffw, embed), ("ffw", "embed"), std=out * e.shared_ffw**-0.5)
            self.shared_router = param((embed,), (None,), std=into)

    def _add_low_rank(self, lora: Lora) -> None:
        """Makes the low-rank additions to the matrices that the layer has."""
        for name in with_additions(lora):
            if hasattr(self, name):
                first, inputs = leading(name), len(PRODUCTS[product(name)][0])
                made = _low_rank_of(getattr(self, name), lora.rank, first, inputs)
                for one, weight in zip(low_rank(name, lora), made, strict=True):
                    setattr(self, one, weight)

    def _project(self, c: ModelConfig, std: float) -> None:
        """Makes the weights of attention's products from the normed stream."""
        for side in self.sides:
            setattr(self, side, param((c.embed, *self._sizes(side)), ("embed", _HEADS[side], "head_dim"), std=std))

    def _add_inner(self, which: str, ffw: int, std: float) -> None:
        """Makes the weights of a feed-forward's products from the normed stream. which: "shared_", or nothing."""
        for name in ("gate", "up"):
            setattr(self, f"{which}{name}", param((self.config.embed, ffw), ("embed", "ffw"), std=std))

    def _sizes(self, side: str) -> tuple[int, int]:
        """Returns heads and numbers of a head of q, k or v. With a gate, q has twice those of a query."""
        if side == "q":
            return self.config.heads, self.kept.head_dim * (2 if self.config.attn_gate else 1)
        return self.kept.kv_heads, self.kept.head_dim

    def __call__(
        self, h: Array, turn: tuple[Array, Array], calls: Callbacks, cache: Any, given: Array | None = None
    ) -> tuple[Array, Any]:
        """Returns the stream after this layer, and the cache.

        Args:
          h: [..., D].
          turn: cosines and sines, [..., P] each.
          given: the layer's own embeddings of the rows [..., P], where the config has some.
        """
        c, dtype = self.config, h.dtype
        h = named(h, STREAM)
        out, cache = self._mixed_rows(norm(h, self.attn_norm[...], c), turn, calls, cache)
        with jax.named_scope("attend"):
            h = h + (norm(out, self.attn_post_norm[...], c) if c.post_norms else out)
        with jax.named_scope("ffw"):
            e, x = self.experts, norm(h, self.ffw_norm[...], c)
            if self.dense:
                out = self._product("down", mixture.inner(*self._gate_up("", x), None, c.activation))
            if e is not None and e.beside:
                scored = norm(h, self.router_scale[...] * c.embed**-0.5 - c.norm_offset, c)
                more, cache = self._mixed(norm(h, self.moe_norm[...], c), scored, e, calls.routing, cache)
                out = norm(out, self.dense_post_norm[...], c) + norm(more, self.moe_post_norm[...], c)
            elif e is not None:
                out, cache = self._mixed(x, x, e, calls.routing, cache)
            h = h + (norm(out, self.ffw_post_norm[...], c) if c.post_norms else out)
        if given is not None:
            with jax.named_scope("layer_embed"):
                gate = named(jnp.einsum("...d,dp->...p", h, self.layer_gate[...].astype(dtype)), PROJECTED)
                out = ACTIVATIONS[c.activation](gate) * given
                out = named(jnp.einsum("...p,pd->...d", out, self.layer_up[...].astype(dtype)), PROJECTED)
                h = h + norm(out, self.layer_post_norm[...], c)
        return h * jax.lax.stop_gradient(self.layer_scalar[...]).astype(dtype) if c.layer_scalars else h, cache

    def _mixed_rows(self, x: Array, turn: tuple[Array, Array], calls: Callbacks, cache: Any) -> tuple[Array, Any]:
        """Returns what each row takes from the rows before, [..., D], and the cache. x: the normed stream.

        A layer that reads another's pages has queries alone."""
        c, dtype, gate = self.config, x.dtype, None
        with jax.named_scope("qkv"):
            made = self._heads(x)
            if c.attn_gate:
                made["q"], gate = jnp.split(made["q"], 2, axis=-1)
            if c.qkv_bias:
                made = {side: one + getattr(self, f"{side}_bias")[...].astype(dtype) for side, one in made.items()}
            q, k = made["q"], made.get("k")
            v = made.get("v", k)
            if c.qk_norm:
                q, k = norm(q, self.q_norm[...], c), None if k is None else norm(k, self.k_norm[...], c)
            if c.v_norm and v is not None:
                v = norm(v, jnp.full(1, 1.0 - c.norm_offset), c)
            q, k = _rotate(q, *turn), None if k is None else _rotate(k, *turn)
        with jax.named_scope("attend"):
            how = dict(scale=c.scale_of(self.index), window=self.kept.window, soft_cap=c.attn_soft_cap)
            how |= dict(sinks=self.sinks[...]) if c.sinks else {}
            how |= {} if self.kept.of is None else dict(of=self.kept.of)
            out, cache = calls.attend(self.index, q, k, v, cache, **how)
            out = out.astype(dtype) if gate is None else out.astype(dtype) * jax.nn.sigmoid(gate)
            out = self._product("o", out)
            return out + self.o_bias[...].astype(dtype) if c.o_bias else out, cache

    def _heads(self, x: Array) -> dict[str, Array]:
        """Returns queries [..., N, H], keys and values [..., K, H], of the normed stream x [..., D], as the layer has them."""
        return {side: self._product(side, x) for side in self.sides}

    def _mixed(self, x: Array, scored: Array, e: Experts, routing: mixture.Routing, cache: Any) -> tuple[Array, Any]:
        """Returns the sum of each row's experts, and the cache. Scores and gates are float32 or wider. scored: what the router reads."""
        with jax.named_scope("router"):
            wide, router = jnp.promote_types(x.dtype, jnp.float32), self.router[...].astype(x.dtype)
            how = dict(precision=jax.lax.Precision.HIGHEST, preferred_element_type=wide)
            scores = jnp.einsum("...d,de->...e", scored, router, **how)
            scores = scores + self.router_bias[...].astype(wide) if e.biased else scores
            ids, cache = routing.choose(self.index, scores, e.per_token, cache)
            gates = mixture.gates(scores, ids, e)
            gates = gates * mixture.taken(jnp.asarray(self.expert_scale[...], wide), ids) if e.beside else gates
        axes = EXPERT_AXES | _SCALE_AXES
        names = [name for name in axes if hasattr(self, f"experts_{name}")]
        matrices = {name: jnp.asarray(getattr(self, f"experts_{name}")[...]) for name in names}
        if self.config.eight_bits and not self.config.eight_bits.stored:  # here, because scales are of whole matrices
            for name in FEED_FORWARD:
                matrices[name], matrices[f"{name}_scale"] = self._matrix(f"experts_{name}", x.dtype)
        last = matrices.pop("down_bias", None)
        with jax.named_scope("experts"):
            scale = self.config.lora.scale if self.config.lora else 0.0
            fixed = dict(experts=e, activation=self.config.activation, lora_scale=scale, multiply=routing.multiply)
            run = functools.partial(mixture.mixed, **fixed)
            run = routing.spread(run, {name: axes[name] for name in matrices})
            out = run(x, ids, gates, matrices)
            if last is not None:  # once, and not in each part of a matrix that is split
                out = out + jnp.einsum("...k,...kd->...d", gates, last.astype(wide)[ids])
        if e.shared_ffw:
            with jax.named_scope("shared_expert"):
                inner = mixture.inner(*self._gate_up("shared_", x), None, self.config.activation)
                shared = self._product("shared_down", inner)
                opened = jnp.einsum("...d,d->...", x, self.shared_router[...].astype(x.dtype), **how)
                out = out + jax.nn.sigmoid(opened)[..., None] * shared.astype(wide)
        return named(out.astype(x.dtype), PROJECTED), cache

    def _gate_up(self, which: str, x: Array) -> tuple[Array, Array]:
        """Returns both products of a gated feed-forward, [..., F] each. which: as in `_add_inner`."""
        return self._product(f"{which}gate", x), self._product(f"{which}up", x)

    def _product(self, name: str, x: Array) -> Array:
        """Returns x times a matrix, with its low-rank addition where it has one."""
        inputs, outputs = PRODUCTS[product(name)]
        matrix, scale = self._matrix(name, x.dtype)
        if self.config.row_blocks is None:
            out = jnp.einsum(f"...{inputs},{inputs}{outputs}->...{outputs}", x, matrix)
        else:
            rows, size = x.shape[: x.ndim - len(inputs)], math.prod(matrix.shape[: len(inputs)])
            flat = x.reshape(*rows, size), matrix.reshape(size, -1)
            out = row_blocks.product(*flat, x.dtype, self.config.row_blocks.platforms)
            out = out.reshape(*rows, *matrix.shape[len(inputs) :])
        out = _scaled(out, scale)
        return self._with_addition(named(out, PROJECTED), name, x)

    def _matrix(self, name: str, dtype: Any) -> tuple[Array, Array | None]:
        """Returns a matrix in the dtype of its use. Where it has 8 bits, it is codes, and the scales of its outputs follow."""
        matrix, bits = getattr(self, name)[...], self.config.eight_bits
        if bits is None or name not in EIGHT_BITS:
            return matrix.astype(dtype), None
        if bits.stored:
            return matrix.astype(dtype), getattr(self, f"{name}_scale")[...]
        return eight_bits.rounded(matrix.astype(dtype), input_axes(name), bits.name)

    def _with_addition(self, out: Array, name: str, x: Array) -> Array:
        """Returns `out`, the product of x with a matrix, plus that of its low-rank addition where it has one."""
        (inputs, outputs), lora = PRODUCTS[product(name)], self.config.lora
        if lora is None or not hasattr(self, f"{name}_b"):
            return out
        with jax.named_scope("lora"):
            a, b = (getattr(self, one)[...].astype(x.dtype) for one in low_rank(name, lora))
            low = named(jnp.einsum(f"...{inputs},{inputs}r->...r", x, a), PROJECTED)
            return out + jnp.asarray(lora.scale, x.dtype) * jnp.einsum(f"...r,r{outputs}->...{outputs}", low, b)

    def paired(self) -> PairedLayer:
        """Returns the layer that computes the same from pairs of the weights, without its weights."""
        return PairedLayer(self.config, self.index)


class PairedInner(Layer):
    """A layer with one product for gate and up, of a shared expert too. Their weights lie behind one another.

    Where both matrices of a pair have low-rank additions, their B are a pair too. So are their A, if no other matrix has the same.
    """

    @property
    def matrix_pairs(self) -> Mapping[str, tuple[str, str]]:
        """Returns the matrices that are one here: two of equal shapes, both multiplied with the normed stream."""
        which = ("",) if self.dense else ()
        which += ("shared_",) if self.experts is not None and self.experts.shared_ffw else ()
        return {f"{one}gate_up": (f"{one}gate", f"{one}up") for one in which}

    @property
    def pairs(self) -> Mapping[str, tuple[str, str]]:
        """Returns the weights that are one here: matrices, A and B."""
        low = {name: halves for pair in self.matrix_pairs for name, halves in self._low_pairs(pair).items()}
        return dict(self.matrix_pairs) | low

    def _low_pairs(self, pair: str) -> dict[str, tuple[str, str]]:
        """Returns the A and B that are one."""
        lora, (one, other) = self.config.lora, self.matrix_pairs[pair]
        if lora is None or not {one, other}.issubset(with_additions(lora)):
            return {}
        (a, b), (other_a, other_b) = low_rank(one, lora), low_rank(other, lora)
        alone = (a, other_a) == (f"{one}_a", f"{other}_a")
        return {f"{pair}_b": (b, other_b)} | ({f"{pair}_a": (a, other_a)} if alone else {})

    def _add_low_rank(self, lora: Lora) -> None:
        super()._add_low_rank(lora)
        for pair, halves in self.matrix_pairs.items():
            whole, low = getattr(self, pair), self._low_pairs(pair)
            joined = {name for both in low.values() for name in both}
            one = param(whole.get_value().shape[1:], whole.get_metadata()["axes"][1:])
            a, b = _low_rank_of(whole, lora.rank, first=1, inputs=1)
            made = {name: {f"{pair}_a": a, f"{pair}_b": b}[name] for name in low}
            for half in (half for half in halves if half in with_additions(lora)):
                singles = zip(low_rank(half, lora), _low_rank_of(one, lora.rank, first=0, inputs=1), strict=True)
                made |= {name: weight for name, weight in singles if name not in joined}
            for name, weight in made.items():
                setattr(self, name, weight)

    def _add_inner(self, which: str, ffw: int, std: float) -> None:
        setattr(self, f"{which}gate_up", param((2, self.config.embed, ffw), (None, "embed", "ffw"), std=std))

    def _gate_up(self, which: str, x: Array) -> tuple[Array, Array]:
        return self._both(f"{which}gate_up", x)

    def _both(self, name: str, x: Array) -> tuple[Array, Array]:
        """Returns the products of x with both matrices of a pair, with their low-rank additions."""
        rest = "hk"[: getattr(self, name).get_value().ndim - 2]
        halves, low, lora = self.matrix_pairs[name], self._low_pairs(name), self.config.lora
        both, scales, bits = getattr(self, name)[...].astype(x.dtype), (None, None), self.config.eight_bits
        if bits and halves[0] in EIGHT_BITS:
            both, scales = eight_bits.rounded(both, (1,), bits.name)
        made = jnp.einsum(f"p...d,pd{rest}->p...{rest}", _twice(x), both)
        first, second = (named(_scaled(*one), PROJECTED) for one in zip(made, scales, strict=True))
        if lora is None or not low:
            return self._with_addition(first, halves[0], x), self._with_addition(second, halves[1], x)
        with jax.named_scope("lora"):
            if f"{name}_a" in low:
                inner = jnp.einsum("p...d,pdr->p...r", _twice(x), getattr(self, f"{name}_a")[...].astype(x.dtype))
            else:
                owners = [low_rank(half, lora)[0] for half in halves]
                each = {a: jnp.einsum("...d,dr->...r", x, getattr(self, a)[...].astype(x.dtype)) for a in owners}
                inner = jnp.stack([each[a] for a in owners])
            b = getattr(self, f"{name}_b")[...].astype(x.dtype)
            added = jnp.asarray(lora.scale, x.dtype) * jnp.einsum(
                f"p...r,pr{rest}->p...{rest}", named(inner, PROJECTED), b
            )
            return first + added[0], second + added[1]


class PairedLayer(PairedInner):
    """A layer with one product for keys and values, and one for gate and up.

    It computes what `Layer` does. With full remat a layer has 19 instead of 27 products with weights, for each of which a
    TPU's compiler searches tiles.
    """

    @property
    def matrix_pairs(self) -> Mapping[str, tuple[str, str]]:
        """Returns the pair of keys and values, and those of gate and up, where the layer has them."""
        return ({"k_v": ("k", "v")} if "v" in self.sides else {}) | dict(super().matrix_pairs)

    def _project(self, c: ModelConfig, std: float) -> None:
        for side in self.sides if "v" not in self.sides else ("q",):
            setattr(self, side, param((c.embed, *self._sizes(side)), ("embed", _HEADS[side], "head_dim"), std=std))
        if "v" in self.sides:
            shape = (2, c.embed, *self._sizes("k"))
            self.k_v = param(shape, (None, "embed", "kv_heads", "head_dim"), std=std)

    def _heads(self, x: Array) -> dict[str, Array]:
        if "v" not in self.sides:
            return super()._heads(x)
        q = self._product("q", x)
        k, v = self._both("k_v", x)
        return {"q": q, "k": k, "v": v}


def _scaled(out: Array, scale: Array | None) -> Array:
    """Returns the product with codes [..., *outputs], times the scale of each output; None: of a matrix without codes."""
    return out if scale is None else (_wide(out) * scale).astype(out.dtype)


def _twice(x: Array) -> Array:
    """Returns `x` along a new axis. As a free axis of the weights alone, a TPU's compiler wants them in another order."""
    return jnp.broadcast_to(x, (2, *x.shape))
