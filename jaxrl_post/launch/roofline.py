"""Predicts the seconds of one optimizer step on a slice that is not there, by part, from shapes and peak figures.

Invariant: every second is bytes or FLOPs over a published rate times one of the shares below. No part hides another:
the sum is of a step whose parts follow each other.
"""

from __future__ import annotations

import math

import jax

from jaxrl_post.config import Config
from jaxrl_post.engine.step_cost import DecodeCost
from jaxrl_post.launch import activations, adapter
from jaxrl_post.launch.chips import Slice
from jaxrl_post.models import decoder, lora

# Shares of the peak that good programs reach. They are assumptions: nothing here was measured.
TRAIN, PREFILL, MEMORY, LINKS = 0.45, 0.5, 0.85, 0.85
SUM_S = 15e-6  # latency of one sum of activations over the devices of a replica
DISPATCH_S, SLOT_S = 1e-3, 2e-6  # host's part of a dispatch, and of each live slot in it
BF16 = 2  # bytes

ASSUMED = (
    f"predicted, not measured: {TRAIN:.0%} of peak FLOP/s in training, {PREFILL:.0%} in prefill; {MEMORY:.0%} of memory bandwidth; "
    f"{LINKS:.0%} of links; no part overlaps another"
)


def seconds(
    config: Config, model: decoder.ModelConfig, where: Slice, prompt: int, mean: float = 0.0
) -> dict[str, float]:
    """Returns the seconds of one optimizer step by part, and of all together.

    Args:
      prompt: tokens of a prompt.
      mean: tokens of a rollout, on average; 0: half of the longest.
    """
    mean = mean or longest(config) / 2
    parts = {
        "decode": _decode(config, model, where, prompt, mean),
        "prefill": _prefill(config, model, where, prompt),
        "train": _train(config, model, where, prompt + mean),
        "collectives of decode": _decode_sums(config, model, mean),
        "collectives of training": train_collectives(config, model, where, _micro_batches(config, prompt + mean)),
        "publish": publish(config, model, where),
        "host": _host(config, mean),
    }
    return parts | {"all": sum(parts.values())}


def engine_step(config: Config, model: decoder.ModelConfig, where: Slice, prompt: int) -> DecodeCost:
    """Returns the seconds of an engine step of all replicas together, by rows and context of the fullest one.

    Args:
      prompt: tokens of a prompt.
    """
    ways, size, steps = config.mesh.replica, activations.SIZES[config.engine.dtype], config.engine.steps_per_dispatch
    memory, arithmetic = where.chip.bandwidth * MEMORY * ways, where.chip.flops * PREFILL * ways
    return DecodeCost(
        weights_s=size * parameters(model) / memory,
        token_s=2 * model.layers * model.kv_heads * model.head_dim * size / memory,
        row_s=2 * parameters(model) / arithmetic,
        fixed_s=(2 * model.layers * SUM_S if ways > 1 else 0.0) + DISPATCH_S / steps,
        request_s=SLOT_S * config.replicas / steps,
        prefill_s=_forward(model, prompt) / prompt / arithmetic,
        source=f"roofline of {where.name}",
    )


def trained_token(config: Config, model: decoder.ModelConfig, where: Slice, tokens: float) -> float:
    """Returns the seconds of a token of a sequence of `tokens` tokens each time that it is trained on, links included."""
    flops = _passes(config) * _forward(model, tokens) / tokens
    links = train_collectives(config, model, where, 1)
    return flops / (config.mesh.learner * where.chip.flops * TRAIN) + links / (config.batch.rows * config.batch.tokens)


def parameters(model: decoder.ModelConfig) -> int:
    """Returns the number of weights."""
    return sum(leaf.size for leaf in jax.tree.leaves(decoder.abstract(model)))


def _trained(config: Config, model: decoder.ModelConfig) -> int:
    """Returns the number of weights that are trained."""
    if not config.lora.rank:
        return parameters(model)
    return sum(leaf.size for leaf in jax.tree.leaves(lora.abstract(adapter.adapting(config.lora, model)).adapter))


def _rollouts(config: Config) -> float:
    """Of one optimizer step."""
    return config.rollouts_per_step / config.scheduler.mini_batches


def longest(config: Config) -> int:
    """Returns the tokens of the longest rollout."""
    return min(config.sampling.max_tokens, config.engine.max_length)


def _turns(config: Config, mean: float) -> float:
    """Returns the engine steps of a replica: until its last rollout ends, and at least until its slots did all work."""
    each = _rollouts(config) / config.replicas
    return max(longest(config), each * mean / config.engine.slots)


def _decode(config: Config, model: decoder.ModelConfig, where: Slice, prompt: int, mean: float) -> float:
    """Weights are read at every step and KV at every token, or arithmetic takes longer. Lengths are spread evenly."""
    ways, size = config.mesh.replica, activations.SIZES[config.engine.dtype]
    each = _rollouts(config) / config.replicas
    weights = _turns(config, mean) * size * parameters(model) / ways
    spread = min(mean, longest(config) - mean)  # to both sides of the mean
    context = prompt * mean + (mean**2 + spread**2 / 3) / 2  # summed over the tokens of a rollout, on average
    cache = each * context * 2 * model.layers * model.kv_heads * model.head_dim * size / ways
    flops = each * mean * 2 * parameters(model) / ways
    return max((weights + cache) / (where.chip.bandwidth * MEMORY), flops / (where.chip.flops * PREFILL))


def _prefill(config: Config, model: decoder.ModelConfig, where: Slice, prompt: int) -> float:
    flops = _rollouts(config) * _forward(model, prompt)
    return flops / (config.generating * where.chip.flops * PREFILL)


def _forward(model: decoder.ModelConfig, tokens: float) -> float:
    """Returns FLOPs of a forward pass over a causal sequence."""
    attention = 2 * model.layers * model.heads * model.head_dim * tokens**2
    return 2 * parameters(model) * tokens + attention


def _train(config: Config, model: decoder.ModelConfig, where: Slice, tokens: float) -> float:
    """Useful FLOPs, whatever is computed again. `tokens`: of a sequence."""
    flops = _passes(config) * _rollouts(config) * config.scheduler.ppo_epochs * _forward(model, tokens)
    return flops / (config.mesh.learner * where.chip.flops * TRAIN)


def _passes(config: Config) -> int:
    """Returns what a gradient costs in forward passes: three, or two where the weights are frozen."""
    return 2 if config.lora.rank else 3


def _decode_sums(config: Config, model: decoder.ModelConfig, mean: float) -> float:
    """Two sums a layer, where a replica has several devices."""
    return _turns(config, mean) * 2 * model.layers * SUM_S if config.mesh.replica > 1 else 0.0


def _micro_batches(config: Config, tokens: float) -> int:
    """Of one optimizer step, all epochs. `tokens`: of a sequence."""
    return (
        math.ceil(_rollouts(config) * tokens / (config.batch.rows * config.batch.tokens)) * config.scheduler.ppo_epochs
    )


def train_collectives(config: Config, model: decoder.ModelConfig, where: Slice, batches: int) -> float:
    """Returns the seconds of links in `batches` micro-batches of the learner.

    A device sends weights twice and gradients once a micro-batch, and the activations of a divided layer."""
    m = config.mesh
    trained = _trained(config, model)
    spread = (m.fsdp - 1) / m.fsdp / m.tensor * (2 * BF16 * parameters(model) + BF16 * trained)
    seconds = batches * spread / (where.link(m.fsdp * m.tensor) * LINKS)
    tokens = config.batch.rows // m.shards * config.batch.tokens
    if m.tensor > 1:  # two sums a layer, forward, again and backward; a sum sends twice its bytes
        sums = 6 * model.layers * 2 * (m.tensor - 1) / m.tensor * tokens * model.embed * BF16
        seconds += batches * sums / (where.link(m.tensor) * LINKS)
    if m.fsdp * m.tensor > 1:  # the head's activations: gathered twice, and their gradient comes back
        head = 3 * tokens * m.fsdp * model.embed * BF16
        seconds += batches * head / (where.link(m.fsdp * m.tensor) * LINKS)
    if m.data > 1:
        held = trained / (m.fsdp * m.tensor) * activations.SIZES[config.optimizer.sums_dtype]
        seconds += batches * 2 * (m.data - 1) / m.data * held / (where.link(m.learner) * LINKS)
    return seconds


def publish(config: Config, model: decoder.ModelConfig, where: Slice) -> float:
    """Returns the seconds in which new weights reach the engine.

    Each device gets its part of a replica's weights, less what it has. The nearest copy is of fsdp x tensor devices."""
    m, size = config.mesh, activations.SIZES[config.engine.dtype]
    if m.fsdp == 1 and not m.engine and m.replica == m.tensor:
        return parameters(model) / m.replica * (4 + size) / (where.chip.bandwidth * MEMORY)  # a cast in place
    got = parameters(model) * size / m.replica
    if config.lora.rank:  # additions travel as float32; then matrices are read and written where they are
        merged = parameters(model) / m.replica * (activations.SIZES[config.lora.base_dtype] + size)
        got = 4 * _trained(config, model) / m.replica
        return got / (where.link(m.fsdp * m.tensor) * LINKS) + merged / (where.chip.bandwidth * MEMORY)
    return got / (where.link(m.fsdp * m.tensor) * LINKS)


def _host(config: Config, mean: float) -> float:
    dispatches = _turns(config, mean) / config.engine.steps_per_dispatch
    live = min(config.engine.slots, _rollouts(config) / config.replicas) * config.replicas
    return dispatches * (DISPATCH_S + SLOT_S * live)
