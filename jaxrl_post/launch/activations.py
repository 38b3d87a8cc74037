"""Estimates what the backward pass of one micro-batch takes on a device, and what each remat policy keeps for it.

Invariant: everything follows from shapes. What layers keep is exact; what is at work beside it is an estimate.
"""

from __future__ import annotations

from jaxrl_post.config import Config, on
from jaxrl_post.models import decoder

SIZES = {"float32": 4, "bfloat16": 2}  # bytes of a number
OFF = "no remat"


def kept(config: Config, model: decoder.ModelConfig, shards: int) -> dict[str, int]:
    """Returns the bytes that all layers keep on a device from the forward to the backward pass, by remat policy.

    Each policy keeps the residual stream before a layer, [tokens, D]. "attention" keeps the output of attention too.
    "projections" keeps that, q, k, v, both halves of the gated feed-forward and the stream between. "offload" has the
    streams of two layers on the device at a time, and the others in host memory.
    """
    m, ways, tokens = model, config.mesh.tensor, _tokens(config, shards)
    stream, attended = m.embed, m.heads * m.head_dim // ways
    projected = (m.heads + 2 * m.kv_heads) * m.head_dim // ways + 2 * m.ffw // ways + m.embed
    values = {
        "full": m.layers * stream,
        "attention": m.layers * (stream + attended),
        "projections": m.layers * (stream + attended + projected),
        "offload": min(m.layers, 2) * stream,
        OFF: m.layers * _one_layer(config, model),
    }
    return {name: count * tokens * SIZES[config.model.compute_dtype] for name, count in values.items()}


def offloaded(config: Config, model: decoder.ModelConfig) -> int:
    """Returns the bytes of one device's activations that wait in host memory."""
    if not config.model.remat or config.model.remat_policy != "offload":
        return 0
    return kept(config, model, config.mesh.shards)["full"]


def estimate(config: Config, model: decoder.ModelConfig, shards: int, platform: str) -> int:
    """Returns an estimate of the bytes of one micro-batch's backward pass on a device.

    - Layers: what the policy keeps, and with remat one layer at work.
    - The head: logits and their gradient, `head_chunk` tokens at a time.

    Args:
      shards: devices among which the micro-batch's rows are divided.
      platform: of the devices, as jax names it. It decides the forms that are set to "auto".
    """
    held = kept(config, model, shards)
    working = _tokens(config, shards) * _one_layer(config, model) * SIZES[config.model.compute_dtype]
    layers = held[config.model.remat_policy] + working if config.model.remat else held[OFF]
    return layers + _head(config, model, shards, platform)


def stacked(config: Config, layers: int, platform: str) -> int:
    """Returns the bytes of the stack of all layers and of its gradient. `layers`: weights of all layers on a device."""
    return 2 * SIZES[config.model.compute_dtype] * layers if on(config.model.scan_layers, platform) else 0


def _tokens(config: Config, shards: int) -> int:
    return config.batch.rows // shards * config.batch.tokens


def _one_layer(config: Config, model: decoder.ModelConfig) -> int:
    """Returns the values of a token in one layer.

    They are the residual stream twice, q, k, v, o, both halves of the gated feed-forward and their product, and
    attention weights.
    """
    m, ways = model, config.mesh.tensor
    inner = (2 * m.heads + 2 * m.kv_heads) * m.head_dim // ways + 3 * m.ffw // ways
    return 2 * m.embed + inner + m.heads // ways * config.batch.tokens


def _head(config: Config, model: decoder.ModelConfig, shards: int, platform: str) -> int:
    ways = config.mesh.tensor
    parts = config.mesh.fsdp * ways
    if parts == 1 or not on(config.batch.split_head, platform):
        return 2 * min(config.batch.head_chunk, _tokens(config, shards)) * model.vocab_size // ways * 4
    part = -(-model.vocab_size // parts)
    chunk = min(-(-config.batch.head_chunk // config.mesh.data), _tokens(config, shards) * config.mesh.fsdp)
    # Logits and their gradient, the matrix where its part lies, and its gradient as it is added up and handed back.
    return 2 * chunk * part * 4 + part * model.embed * (SIZES[config.model.compute_dtype] + 2 * 4)
