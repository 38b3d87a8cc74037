"""Estimates what the backward pass of one micro-batch takes on a device, and what each remat policy keeps for it.

Invariant: everything follows from shapes. What layers keep is exact; what is at work beside it is an estimate. Its counts
PAIR, SUMS, the layers of `_matrices` and a TPU's copies were read from compiled programs (compile_tier/memories.py), and those of
`_compared` from programs for CPUs.
"""

from __future__ import annotations

import math

import jax.numpy as jnp

from jaxrl_post.config import Config, on
from jaxrl_post.kernels import choice
from jaxrl_post.models import cache_kinds, decoder
from jaxrl_post.trainer import attention

SIZES = {"float32": 4, "bfloat16": 2}  # bytes of a number
OFF = "all (no remat)"
# Bytes of a query and a key in attention: a float32 score, and beside TPUs its weight twice in bfloat16.
PAIR = {"tpu": 4, "gpu": 8, "cpu": 8}
# Bytes of a query in a kernel: float32 sums of its row and of its slope. A TPU repeats a number along 128 lanes.
SUMS = {"tpu": 4 * 128, "gpu": 2 * 4}


def kept(config: Config, model: decoder.ModelConfig, shards: int) -> dict[str, int]:
    """Returns the bytes that all layers keep on a device from the forward to the backward pass, by remat policy.

    Each policy keeps the residual stream before a layer, [tokens, D]. "attention" keeps the output of attention too.
    "projections" keeps that, q, k, v, both halves of the gated feed-forward and the stream between, and both products with a
    layer's own embeddings. "offload" has the streams of two layers on the device at a time, and the others in host memory.
    """
    m, ways, tokens = model, config.mesh.tensor, _tokens(config, shards)
    states = cache_kinds.states(m.kept)
    read = sum(m.heads * one.head_dim for one in cache_kinds.paged(m.kept)) + sum(one.values for one in states)
    stream, attended = m.embed, read // ways
    mixed = sum(one.inputs + one.values + 2 * one.value_heads for one in states)  # with decays and rates
    products = attended + cache_kinds.held(m.kept, ways) + mixed // ways
    added = m.layer_embeds + m.embed if m.layer_embeds else 0
    projected = products + m.layers * (2 * m.widest // ways + m.embed + added)
    # Without remat the keys and values that other devices have are kept too.
    others = (config.mesh.context - 1) * cache_kinds.held(m.kept, ways)
    values = {
        "full": m.layers * stream,
        "attention": m.layers * stream + attended,
        "projections": m.layers * stream + attended + projected,
        "offload": min(m.layers, 2) * stream,
        OFF: m.layers * _one_layer(config, model) + others,
    }
    return {name: count * tokens * SIZES[config.model.compute_dtype] for name, count in values.items()}


def offloaded(config: Config, model: decoder.ModelConfig) -> int:
    """Returns the bytes of one device's activations that wait in host memory."""
    if not config.model.remat or config.model.remat_policy != "offload":
        return 0
    return kept(config, model, config.mesh.shards)["full"]


def estimate(config: Config, model: decoder.ModelConfig, shards: int, platform: str, flash: bool = True) -> int:
    """Returns an estimate of the bytes of one micro-batch's gradient on a device, without the stacks of `stacked`.

    Each layer keeps what the policy says. Beside that is the larger of what is never there together:

    - the head: its logits and its gradient, while the gradient of the layers' stack does not exist yet.
    - one layer at work: values and matrices, scores of attention, and the new gradient of all that is not stacked.
    - the gradient of the embeddings of each layer, which comes last. The rows of all layers, their products and their slopes
      are there with every layer.

    Args:
      shards: devices, or groups of mesh.context devices, among which the micro-batch's rows are divided.
      platform: of the devices, as jax names it. It decides the forms that are set to "auto".
      flash: the devices run the kernels of packed rows.
    """
    held = kept(config, model, shards)
    layers = held[config.model.remat_policy] if config.model.remat else held[OFF]
    working = _matrices(config, model, platform) + _attention(config, model, shards, platform, flash)
    if config.model.remat:
        copies = 2 if platform == "tpu" else 1  # a TPU keeps values in another tiling too
        working += copies * _tokens(config, shards) * _one_layer(config, model) * SIZES[config.model.compute_dtype]
    if platform == "tpu" and on(config.model.scan_layers, platform):  # a pair of products beside its halves
        working += 2 * _tokens(config, shards) * model.widest // config.mesh.tensor * SIZES[config.model.compute_dtype]
    logits, slope = _head(config, model, shards, platform)
    rows = SIZES[config.model.compute_dtype] * _tokens(config, shards) * model.layers * model.layer_embeds
    if config.lora.rank:  # frozen weights have no gradient
        return layers + rows + max(working, logits)
    scanned = on(config.model.scan_layers, platform)
    parts = math.gcd(shards * config.mesh.context, config.mesh.fsdp) * config.mesh.tensor
    own = model.layers * _layer_weights(model, config.mesh.expert) // parts
    stack = stacked(config, own, platform)
    # Layers that are not stacked have a new gradient too, each leaf its own. `stacked` counts that of the others.
    apart = 0 if scanned else SIZES["float32"] * own
    table = SIZES["float32"] * model.row_weights // (config.mesh.fsdp * config.mesh.tensor)
    largest = max(working + slope + apart, logits + slope - stack // 2)
    return 3 * rows + max(layers + largest, table + slope + apart)


def stacked(config: Config, layers: int, platform: str) -> int:
    """Returns the bytes of the stack of all layers, and of its gradient where they are trained.

    Args:
      layers: weights of all layers on a device.
    """
    copies = 1 if config.lora.rank else 2
    return copies * SIZES[config.model.compute_dtype] * layers if on(config.model.scan_layers, platform) else 0


def _layer_weights(model: decoder.ModelConfig, parts: int) -> int:
    """Returns the weights of the matrices of the largest layer, on one of `parts` devices that divide its experts."""
    m, e = model, model.experts
    inner = m.width_of(e.count // parts if e else 0)
    return m.embed * (_projected(m) + 3 * inner + 2 * m.layer_embeds)


def _projected(model: decoder.ModelConfig) -> int:
    """Returns the numbers of a token's query, key, value, gate and output, in the layer with most of them."""
    heads = model.heads * (3 if model.attn_gate else 2)
    paged = [heads * one.head_dim + one.entry * (one.of is None) for one in cache_kinds.paged(model.kept)]
    return max(paged + [one.inputs + 2 * one.values for one in cache_kinds.states(model.kept)])


def _tokens(config: Config, shards: int) -> int:
    return config.batch.rows // shards * config.batch.tokens // config.mesh.context


def _matrices(config: Config, model: decoder.ModelConfig, platform: str) -> int:
    """Returns the bytes of the gathered matrices of the layer at work.

    A TPU fetches those of the next one meanwhile, and adds up gradients over the devices: five layers in all.
    """
    if config.mesh.fsdp == 1:
        return 0
    size = SIZES[config.model.compute_dtype] * _layer_weights(model, config.mesh.expert)
    return 5 * size if platform == "tpu" else size // config.mesh.tensor


def _one_layer(config: Config, model: decoder.ModelConfig) -> int:
    """Returns the values of a token in one layer.

    They are the residual stream twice, q, k, v, o, both halves of the gated feed-forward and their product. With embeddings of
    each layer also the gate, what it opens and their product. With experts also the token's copies that go to its experts and
    come back. A device that has a part of the experts has room for all tokens of those with the other parts.
    """
    m, ways = model, config.mesh.tensor
    copies = 2 * m.experts.per_token * m.embed if m.experts else 0
    gathered = config.mesh.expert * (copies + 3 * m.widest // ways)
    return 2 * m.embed + gathered + _projected(m) // ways + 3 * m.layer_embeds


def _attention(config: Config, model: decoder.ModelConfig, shards: int, platform: str, flash: bool) -> int:
    """Returns the bytes of one layer's attention beside queries, keys and values.

    A kernel keeps sums of each query. Otherwise there are scores: of blocks of queries with the keys up to their end,
    or, in a loop, of one block with all keys. Where devices share rows, keys and values of whole rows are gathered, and their
    gradients are there too.
    """
    tokens, ways, context = config.batch.tokens, config.mesh.tensor, config.mesh.context
    rows = config.batch.rows // shards
    heads, own = rows * model.heads // ways, tokens // context
    kernels = choice.OF_BRANCHES if config.branches else choice.OF_PACKED_ROWS
    kernel = kernels.get("cuda" if platform == "gpu" else platform)
    dtype, shapes = jnp.dtype(config.model.compute_dtype), cache_kinds.shapes(model.kept)
    gathered = 0
    if context > 1:
        gathered = 2 * rows * tokens * max(2 * K * H for K, H in shapes) // ways * SIZES[config.model.compute_dtype]
    part = own // 2 if context > 1 else own
    if flash and kernel and all(kernel.serves(dtype, model.heads // ways, K // ways, H, part) for K, H in shapes):
        # The kernel of TPUs walks them head by head, which is a copy.
        return heads * own * SUMS[platform] + (2 if platform == "tpu" else 1) * gathered
    if own > attention.WRITTEN_OUT:
        return heads * attention.LOOPED * tokens * PAIR[platform] + gathered
    size = max(attention.BLOCK, -(-own // attention.BLOCKS))
    met = [tokens if context > 1 else min(end, tokens) for end in range(size, own + size, size)]
    return heads * sum(size * keys for keys in met) * PAIR[platform] + gathered


def _head(config: Config, model: decoder.ModelConfig, shards: int, platform: str) -> tuple[int, int]:
    """Returns the bytes of a chunk's logits and their gradient with the matrix, and those of the matrix's gradient.

    Where data copies the weights, the gradient and its sum over them are there together.
    """
    ways, size = config.mesh.tensor, SIZES[config.model.compute_dtype]
    parts, devices = config.mesh.fsdp * ways, shards * config.mesh.context
    compared = _compared(config)
    if parts == 1 or compared or not on(config.batch.split_head, platform):
        chunk = min(-(-config.batch.head_chunk // devices), _tokens(config, shards))
        part = model.vocab_size // ways
    else:
        part = -(-model.vocab_size // parts)
        chunk = min(-(-config.batch.head_chunk // config.mesh.copies), _tokens(config, shards) * config.mesh.fsdp)
    copies = 2 if devices > math.gcd(devices, config.mesh.fsdp) else 1
    return (2 + compared) * chunk * part * 4 + part * model.embed * size, copies * part * model.embed * 4


def _compared(config: Config) -> int:
    """Returns how many numbers of a token and an id are kept for the teacher, beside logits and their gradient.

    They are its log-probs and, strictly between the ends of gkd_beta, those of the mixture and a slope.
    """
    if config.algorithm.loss_mode != "gkd":
        return 0
    return 3 if 0 < config.algorithm.gkd_beta < 1 else 1
