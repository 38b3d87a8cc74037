"""The shape and variant of a decoder, and the angles by which its layers rotate."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import numpy as np

from jaxrl_post.models.cache_kinds import Kind, Pages, RecurrentState, shapes
from jaxrl_post.models.rope import RopeScaling

ACTIVATIONS: dict[str, Callable] = {
    "silu": jax.nn.silu,
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
}


class Lora(NamedTuple):
    """Low-rank additions to matrices of every layer (LoRA, arXiv 2106.09685): W becomes W + scale A B.

    - rank: columns of A and rows of B
    - alpha: of the scale
    - targets: the matrices, as a layer names them: q, k, v, o, gate, up, down. In a layer with experts the last three mean
      those of each expert, and of the shared one. In a layer with a gated delta rule: linear_qkv, linear_z, linear_rate,
      linear_decay, linear_o, or linear_qkvz, linear_ba and linear_o, as its checkpoint has the matrices (models/layer.py).
    - rslora: the scale is alpha / sqrt(rank) (arXiv 2312.03732), else alpha / rank
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]
    rslora: bool = False

    @property
    def scale(self) -> float:
        """Returns the factor of A B."""
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)


class FullAttention(NamedTuple):
    """What layers without a window have in the place of ModelConfig's own fields (Gemma 4).

    - kv_heads, head_dim: as there
    - values_are_keys: values are the product of the keys, before its norm and rotation. There are no weights v.
    - turned: the part of a head's pairs that rotate, the first ones, by the frequencies of the whole head. Others stay.
    """

    kv_heads: int
    head_dim: int
    values_are_keys: bool = False
    turned: float = 1.0


class LinearAttention(NamedTuple):
    """Layers with a gated delta rule in the place of attention (Qwen3-Next, Qwen3.5; arXiv 2412.06464).

    - key_heads, value_heads: the latter are a multiple of the former. Each key head serves as many value heads
    - key_dim, value_dim: numbers of a key and of a query, and of a value
    - width: positions that the causal convolution over queries, keys and values reads
    - layers: the numbers of these layers
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    width: int
    layers: tuple[int, ...]

    def check(self, layers: int) -> None:
        """Raises ValueError where a decoder of so many layers cannot have these."""
        if min(self[:5]) < 1 or self.value_heads % self.key_heads:
            raise ValueError(
                f"model: linear needs sizes of at least 1, and value_heads={self.value_heads} that are a multiple of "
                f"key_heads={self.key_heads}, got {tuple(self[:5])}"
            )
        if any(not 0 <= layer < layers for layer in self.layers) or not 0 < len(set(self.layers)) < layers:
            raise ValueError(
                f"model: linear.layers={self.layers} must name layers from 0 to {layers - 1}, at least one and not all"
            )


class Experts(NamedTuple):
    """Several gated feed-forwards in the place of one or beside it. Each token uses the few that its router scores highest.

    - count: of experts. per_token: of those that a token uses
    - ffw: hidden width of an expert
    - renormalised: the gates of a token are the softmax over its chosen scores. Else they are the chosen entries of the
      softmax over all (Switch, arXiv 2101.03961 eq. 2).
    - shared_ffw: hidden width of an expert that every token uses, times a sigmoid of its own (Qwen2-MoE); 0: none
    - dense_layers: the layers that have one feed-forward, of width ModelConfig.ffw, and no router
    - biased: router and matrices of the experts have biases (gpt-oss, arXiv 2508.10925)
    - limit: gate and up are clipped to it, and the inner product is (up + 1) * gate * sigmoid(1.702 gate) (gpt-oss);
      None: it is activation(gate) * up
    - beside: every layer has one feed-forward too, of width ModelConfig.ffw. Experts and router read the stream before it, each
      behind a norm of its own, and both outputs are normed before they are added. A gate is multiplied by a number of its
      expert (Gemma 4).
    """

    count: int
    per_token: int
    ffw: int
    renormalised: bool = True
    shared_ffw: int = 0
    dense_layers: tuple[int, ...] = ()
    biased: bool = False
    limit: float | None = None
    beside: bool = False


class EightBits(NamedTuple):
    """Matrices of layers have 8 bits (kernels/eight_bits.py).

    - name: of the format
    - stored: weights are codes, with a scale beside each matrix. Else they are as ever, and each product rounds its matrix.
    """

    name: str
    stored: bool


class RowBlocks(NamedTuple):
    """Products with weights, norms and draws run such that no bit depends on the number of rows (kernels/row_blocks.py).

    - platforms: those whose kernels may be used
    """

    platforms: frozenset[str]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape and variant of a decoder.

    - ffw: hidden width of the gated feed-forward.
    - windows: one entry per layer, the number of latest positions that a token sees (itself included) or None for all.
      Empty: None everywhere.
    - full: None, or what differs in layers without a window.
    - shared_layers: so many of the last layers have no keys and values. Each reads those of the last layer before them that
      has the same window (Gemma 3n and 4).
    - shared_ffw: hidden width of the feed-forward in those layers; 0: ffw
    - linear: None, or the layers that have a gated delta rule in the place of attention.
    - rotary_dim: so many numbers of a head rotate, the first ones, in pairs (i, i + rotary_dim / 2). None: all
    - attn_gate: the product of queries is twice as wide, each head's query and then its gate. The output of attention is
      multiplied by the sigmoid of the gate (Qwen3.5).
    - v_norm: each head's values are normed, without a weight (Gemma 4).
    - layer_scalars: the stream behind each layer is multiplied by a number of the layer, which is not trained (Gemma 4).
    - layer_embeds: width of a second embedding that each token has for every layer, added behind the feed-forward (Gemma 3n
      and 4); 0: none
    - query_scale: factor of q.k; None means head_dim ** -0.5, with the head_dim of the layer.
    - attn_soft_cap, final_soft_cap: None, or c in c * tanh(x / c).
    - local_rope_theta: None, or layers with a window rotate by this theta, unscaled (Gemma 3, arXiv 2503.19786).
    - norm_offset: 1.0 makes norms multiply by 1 + weight (Gemma).
    - post_norms: the outputs of attention and feed-forward are normed before they are added to the stream (Gemma).
    - embed_scale: factor of the embedded tokens, rounded to the dtype of the computation (Gemma).
    - experts: None, or what stands in the place of the feed-forward, or beside it (mixture of experts).
    - sinks: each query head has a learned number that joins the scores of its softmax. Its share of the weights is dropped
      (gpt-oss, arXiv 2508.10925; after StreamingLLM, arXiv 2309.17453). `query_scale` and `attn_soft_cap` leave it alone.
    - o_bias: a bias is added to the output product of attention (gpt-oss).
    - lora: None, or additions with weights of their own, which the learner trains in place of all others
    - eight_bits: None, or how the matrices of layers have 8 bits
    - row_blocks: None, or how products and norms are computed such that no bit depends on the number of rows
    - scalar: the head is one number for each token, not the scores of all tokens: a reward model
    - family: the family that it was read as (models/families.py), used when it is written. It changes no computation.
    """

    vocab_size: int
    embed: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffw: int
    max_length: int
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    local_rope_theta: float | None = None
    norm_eps: float = 1e-5
    norm_offset: float = 0.0
    post_norms: bool = False
    embed_scale: float = 1.0
    activation: str = "silu"
    tied: bool = False
    windows: tuple[int | None, ...] = ()
    full: FullAttention | None = None
    shared_layers: int = 0
    shared_ffw: int = 0
    linear: LinearAttention | None = None
    rotary_dim: int | None = None
    attn_gate: bool = False
    v_norm: bool = False
    layer_scalars: bool = False
    layer_embeds: int = 0
    attn_soft_cap: float | None = None
    final_soft_cap: float | None = None
    used_vocab: int = 0  # ids from here on have rows but no meaning, and are never sampled; 0: no such ids
    qk_norm: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    sinks: bool = False
    query_scale: float | None = None
    experts: Experts | None = None
    lora: Lora | None = None
    eight_bits: EightBits | None = None
    row_blocks: RowBlocks | None = None
    scalar: bool = False
    family: str = field(default="", compare=False)

    def __post_init__(self):
        object.__setattr__(self, "windows", tuple(self.windows) or (None,) * self.layers)
        for name in ("vocab_size", "embed", "layers", "heads", "kv_heads", "head_dim", "ffw", "max_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"model: {name} must be at least 1, got {getattr(self, name)}")
        if len(self.windows) != self.layers:
            raise ValueError(
                f"model: windows has {len(self.windows)} entries, expected one for each of {self.layers} "
                f"layers, or none"
            )
        if any(window is not None and window < 1 for window in self.windows):
            raise ValueError(f"model: every window must be None or at least 1, got {self.windows}")
        own = self.windows[: self.layers - self.shared_layers]
        if self.shared_layers < 0 or not set(self.windows) <= set(own):
            raise ValueError(
                f"model: shared_layers={self.shared_layers} must leave a layer of each window before them, got windows "
                f"{self.windows}"
            )
        if self.full and (min(self.full[:2]) < 1 or not 0 <= self.full.turned <= 1):
            raise ValueError(
                f"model: full needs kv_heads and head_dim of at least 1, and turned from 0 to 1, got {tuple(self.full)}"
            )
        for name in ("shared_ffw", "layer_embeds"):
            if getattr(self, name) < 0:
                raise ValueError(f"model: {name}={getattr(self, name)} must be at least 0")
        if self.linear is not None:
            self.linear.check(self.layers)
        if self.rotary_dim is not None and not (2 <= self.rotary_dim <= self.head_dim and self.rotary_dim % 2 == 0):
            raise ValueError(
                f"model: rotary_dim={self.rotary_dim} must be even and from 2 to head_dim={self.head_dim}; the nearest valid "
                f"value is {min(max(self.rotary_dim // 2 * 2, 2), self.head_dim // 2 * 2)}"
            )
        for kv_heads, head_dim in shapes(self.kept):
            if self.heads % kv_heads:
                raise ValueError(f"model: heads={self.heads} must be a multiple of kv_heads={kv_heads}")
            if head_dim % 2:
                raise ValueError(
                    f"model: head_dim={head_dim} must be even, because rotation works on pairs; nearest "
                    f"valid value is {head_dim + 1}"
                )
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"model: activation={self.activation!r} is not one of {', '.join(ACTIVATIONS)}")
        if self.rope_scaling is not None:
            self.rope_scaling.check(self.rotary_dim or self.head_dim, self.rope_theta)
        if self.experts is not None:
            _check_experts(self.experts, self.layers)

    def experts_of(self, layer: int) -> Experts | None:
        """Returns the experts of a layer, or None where it has one feed-forward."""
        return None if self.experts is None or layer in self.experts.dense_layers else self.experts

    @functools.cached_property
    def kept(self) -> tuple[Kind, ...]:
        """Returns what each layer keeps of the tokens before."""
        plain = FullAttention(self.kv_heads, self.head_dim)
        own, out = self.layers - self.shared_layers, []
        for index, window in enumerate(self.windows):
            if self.linear is not None and index in self.linear.layers:
                sizes = self.linear._asdict()
                del sizes["layers"]
                out.append(RecurrentState(**sizes))
                continue
            heads = self.full if self.full and window is None else plain
            of = max(at for at in range(own) if self.windows[at] == window) if index >= own else None
            out.append(Pages(kv_heads=heads.kv_heads, head_dim=heads.head_dim, window=window, of=of))
        return tuple(out)

    def sides(self, layer: int) -> tuple[str, ...]:
        """Returns which of q, k and v a layer has weights for. Those of a gated delta rule have other names."""
        if isinstance(self.kept[layer], RecurrentState):
            return ()
        if self.kept[layer].of is not None:
            return ("q",)
        whole = self.full is not None and self.windows[layer] is None
        return ("q", "k") if whole and self.full.values_are_keys else ("q", "k", "v")

    def ffw_of(self, layer: int) -> int:
        """Returns the hidden width of a layer's feed-forward, where it has one."""
        return self.ffw if self.kept[layer].of is None else self.shared_ffw or self.ffw

    @property
    def expert_layers(self) -> tuple[int, ...]:
        """Returns the numbers of the layers that have experts."""
        return tuple(layer for layer in range(self.layers) if self.experts_of(layer))

    @property
    def widest(self) -> int:
        """Returns the most inner values that a token has in a layer's feed-forward, over the layers."""
        return self.width_of(self.experts.per_token if self.experts else 0)

    def width_of(self, experts: int) -> int:
        """Returns the hidden width of so many experts and what a layer has beside them, in the widest layer."""
        e, whole = self.experts, max(map(self.ffw_of, range(self.layers)))
        if e is None:
            return whole
        some = experts * e.ffw + e.shared_ffw
        return some + whole if e.beside else max(some, self.ffw if e.dense_layers else 0)

    @property
    def row_weights(self) -> int:
        """Returns the number of weights that a token reads a row of and is not multiplied by: the embeddings of each layer."""
        return self.vocab_size * self.layers * self.layer_embeds

    def head_dim_of(self, layer: int) -> int:
        """Returns the numbers of a key in a layer with attention. In one without, those of most others."""
        kept = self.kept[layer]
        return kept.head_dim if isinstance(kept, Pages) else self.head_dim

    def scale_of(self, layer: int) -> float:
        """Returns the factor of q.k in a layer."""
        return self.head_dim_of(layer) ** -0.5 if self.query_scale is None else self.query_scale


def _check_experts(experts: Experts, layers: int) -> None:
    if experts.count < 2 or experts.ffw < 1 or experts.shared_ffw < 0:
        raise ValueError(
            f"model: experts need a count of at least 2, a width of at least 1 and a shared width of at least 0, got "
            f"{experts.count}, {experts.ffw} and {experts.shared_ffw}"
        )
    if not 1 <= experts.per_token <= experts.count:
        raise ValueError(
            f"model: experts.per_token={experts.per_token} must be from 1 to experts.count={experts.count}; the nearest "
            f"valid value is {min(max(experts.per_token, 1), experts.count)}"
        )
    if any(not 0 <= layer < layers for layer in experts.dense_layers) or len(set(experts.dense_layers)) == layers:
        raise ValueError(
            f"model: experts.dense_layers={experts.dense_layers} must name layers from 0 to {layers - 1}, and not all"
        )


def frequencies(config: ModelConfig, layer: int) -> np.ndarray:
    """Returns float64[P]: the scaled angle per position of each of P rotated pairs (rotary, arXiv 2104.09864 eq. 15)."""
    head_dim = config.rotary_dim or config.head_dim_of(layer)
    steps = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    local = _local(config, layer)
    base = (config.local_rope_theta if local else config.rope_theta) ** -steps
    if config.full is not None and config.windows[layer] is None:
        base[int(config.full.turned * head_dim // 2) :] = 0
    scaling = config.rope_scaling
    if scaling is None or local or scaling.kind == "dynamic":
        return base
    if scaling.kind == "linear":
        return base / scaling.factor
    if scaling.kind == "longrope":
        within = config.max_length <= scaling.original_length
        return base / np.array(scaling.short_factors if within else scaling.long_factors)
    if scaling.kind == "yarn":
        kept = _kept_by_yarn(config, scaling, head_dim)
    else:
        turns = scaling.original_length * base / (2 * np.pi)
        low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
        kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return base * (kept + (1 - kept) / scaling.factor)


def turn_scale(config: ModelConfig, layer: int) -> float:
    """Returns the factor of a layer's cosines and sines: 1 except for yarn and longrope.

    Without an `attention_factor` it is that of the papers: 0.1 ln(factor) + 1 (arXiv 2309.00071), and
    sqrt(1 + ln(factor) / ln(original_length)) (arXiv 2402.13753).
    """
    scaling = config.rope_scaling
    if scaling is None or scaling.kind not in ("yarn", "longrope") or _local(config, layer):
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    longer = math.log(scaling.factor)
    return 0.1 * longer + 1 if scaling.kind == "yarn" else math.sqrt(1 + longer / math.log(scaling.original_length))


def _local(config: ModelConfig, layer: int) -> bool:
    return config.local_rope_theta is not None and config.windows[layer] is not None


def _kept_by_yarn(config: ModelConfig, scaling: RopeScaling, head_dim: int) -> np.ndarray:
    """Returns float64[H/2]: the part of each pair's frequency that is not divided, from 1 to 0 between two indices."""

    def index(turns: float) -> float:  # of the pair, here a fraction, that turns so often in original_length positions
        length = scaling.original_length / (2 * math.pi * turns)
        return head_dim * math.log(length) / (2 * math.log(config.rope_theta))

    first, last = index(scaling.beta_fast), index(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    # transformers bounds the last index by head_dim too, although there are half as many pairs.
    first, last = max(first, 0), min(last, head_dim - 1)
    width = last - first or 0.001
    return 1 - np.clip((np.arange(head_dim // 2) - first) / width, 0.0, 1.0)
