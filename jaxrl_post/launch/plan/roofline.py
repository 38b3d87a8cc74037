"""Predicts the seconds of one optimizer step on a slice that is not there, by part, from shapes and peak figures.

Invariant: every second is bytes or FLOPs over a published rate times one of the shares below. No part hides another:
the sum is of a step whose parts follow each other.
"""

from __future__ import annotations

import math

import jax

from jaxrl_post.config import Config
from jaxrl_post.engine.step_cost import DecodeCost
from jaxrl_post.kernels.eight_bits import AUTO
from jaxrl_post.launch.parts import adapter
from jaxrl_post.launch.plan import activations, memory_plan
from jaxrl_post.launch.plan.chips import Slice
from jaxrl_post.models import cache_kinds, decoder, lora

# Shares of the peak that good programs reach. They are assumptions: nothing here was measured.
TRAIN, PREFILL, MEMORY, LINKS = 0.45, 0.5, 0.85, 0.85
SUM_S = 15e-6  # latency of one sum of activations over the devices of a replica
DISPATCH_S, SLOT_S = 1e-3, 2e-6  # host's part of a dispatch, and of each live slot in it
BF16, F32 = 2, 4  # bytes

ASSUMED = (
    f"predicted, not measured: {TRAIN:.0%} of peak FLOP/s in training, {PREFILL:.0%} in prefill; {MEMORY:.0%} of memory bandwidth; "
    f"{LINKS:.0%} of links; no part overlaps another"
)


def seconds(
    config: Config, model: decoder.ModelConfig, where: Slice, prompt: int, mean: float = 0.0
) -> dict[str, float]:
    """Returns the seconds of one optimizer step by part, and of all together.

    Weights are read at every engine step and KV at every token, or arithmetic takes longer. A replica takes steps until
    its last rollout ends, and at least until its slots did all work.

    Args:
      prompt: tokens of a prompt.
      mean: tokens of a rollout, on average, with lengths spread evenly to both sides; 0: half of the longest.
    """
    cost, most = engine_step(config, model, where, prompt), min(config.sampling.max_tokens, config.engine.max_length)
    mean = mean or most / 2
    rollouts = config.rollouts_per_step / config.scheduler.mini_batches
    each = rollouts / config.replicas
    steps = max(most, each * mean / config.engine.slots)
    spread = min(mean, most - mean)
    context = prompt * mean + (mean**2 + spread**2 / 3) / 2  # summed over the tokens of a rollout, on average
    trained = rollouts * config.scheduler.ppo_epochs
    batches = math.ceil(rollouts * packed_tokens(config, prompt, mean) / (config.batch.rows * config.batch.tokens))
    live = min(config.engine.slots, each) * config.replicas
    parts = {
        "decode": max(steps * cost.weights_s + each * context * cost.token_s, each * mean * cost.row_s),
        "prefill": each * prompt * cost.prefill_s,
        "train": trained * _gradient(config, model, where, prompt, mean),
        "collectives of decode": steps * _sums(config, model),
        "collectives of training": train_collectives(config, model, where, batches * config.scheduler.ppo_epochs),
        "publish": publish(config, model, where),
        "host": steps / config.engine.steps_per_dispatch * (DISPATCH_S + SLOT_S * live),
    }
    return parts | {"all": sum(parts.values())}


def engine_step(config: Config, model: decoder.ModelConfig, where: Slice, prompt: int) -> DecodeCost:
    """Returns the seconds of an engine step of all replicas together, by rows and context of the fullest one.

    Devices that divide the experts do all else alike, and so count as one.

    Args:
      prompt: tokens of a prompt.
    """
    m, ways = config.mesh, config.mesh.engine_parts
    size, steps = _weight_size(config, model), config.engine.steps_per_dispatch
    position = memory_plan.position_bytes(config, cache_kinds.read(model.kept), cache_kinds.read_scales(model.kept))
    memory, arithmetic = where.chip.bandwidth * MEMORY * ways, where.chip.flops * PREFILL * ways
    prompt = max(prompt, 1)
    return DecodeCost(
        weights_s=size * (_held(model, m.engine_experts) - model.row_weights) / memory,
        token_s=position / memory,
        row_s=2 * used(model) / arithmetic,
        fixed_s=_sums(config, model) + DISPATCH_S / steps,
        request_s=SLOT_S * config.replicas / steps
        + 2 * F32 * _matrices(model) / memory,  # each state is read and written
        prefill_s=_forward(model, prompt) / prompt / arithmetic,
        source=f"roofline of {where.name}",
    )


def _sums(config: Config, model: decoder.ModelConfig) -> float:
    """Returns the latency of an engine step's sums over the devices of a replica: two a layer."""
    return 2 * model.layers * SUM_S if config.mesh.replica > 1 else 0.0


def trained_token(config: Config, model: decoder.ModelConfig, where: Slice, prompt: float, answer: float) -> float:
    """Returns the seconds of a token of a sequence of prompt and answer each time that it is trained on, links included."""
    links = train_collectives(config, model, where, 1) / (config.batch.rows * config.batch.tokens)
    whole = _gradient(config, model, where, prompt, answer) + links * packed_tokens(config, prompt, answer)
    return whole / (prompt + answer)


def packed_tokens(config: Config, prompt: float, answer: float) -> float:
    """Returns the tokens of packed rows that a rollout takes. A group that shares its prompt has it once (shared_prompts.py)."""
    if not config.batch.shared_prompts:
        return prompt + answer
    return 1 + answer + max(prompt - 1, 0) / _together(config, prompt, answer)


def _together(config: Config, prompt: float, answer: float) -> float:
    """Returns how many rollouts of a group share a prompt in a row."""
    return min(config.scheduler.group_size, max((config.batch.tokens - prompt + 1) // (1 + answer), 1))


def _gradient(config: Config, model: decoder.ModelConfig, where: Slice, prompt: float, answer: float) -> float:
    """Returns the seconds of a rollout's gradient on all devices that learn, by its useful FLOPs.

    A gradient costs three forward passes, or two where the weights are frozen. A shared prompt counts once for a group."""
    passes, flops = 2 if config.lora.rank else 3, _forward(model, prompt + answer)
    if config.batch.shared_prompts:
        once = _forward(model, prompt)
        flops = _forward(model, prompt + answer + 1) - once + once / _together(config, prompt, answer)
    return passes * flops / (config.mesh.learner * where.chip.flops * TRAIN)


def _forward(model: decoder.ModelConfig, tokens: float) -> float:
    """Returns FLOPs of a forward pass over a causal sequence."""
    attention = 2 * model.heads * sum(one.head_dim for one in cache_kinds.paged(model.kept)) * tokens**2
    # A token decays a state, reads it twice and adds to it: two operations for each of its numbers, three times.
    recurrence = 6 * _matrices(model) * tokens
    return 2 * used(model) * tokens + attention + recurrence


def _matrices(model: decoder.ModelConfig) -> int:
    """Returns the numbers of a sequence's recurrent states in all layers."""
    return sum(one.matrices for one in cache_kinds.states(model.kept))


def parameters(model: decoder.ModelConfig) -> int:
    """Returns the number of weights."""
    return sum(leaf.size for leaf in jax.tree.leaves(decoder.abstract(model)))


def _held(model: decoder.ModelConfig, parts: int) -> int:
    """Returns the number of weights on each of `parts` devices that divide the experts and nothing else."""
    count = model.experts.count if model.experts else 0
    return parameters(model) - (count - count // parts) * _expert(model)


def _weight_size(config: Config, model: decoder.ModelConfig) -> float:
    """Returns the bytes of one of the engine's weights, on average."""
    return memory_plan.engine_weights(config, model) / parameters(model)


def used(model: decoder.ModelConfig) -> int:
    """Returns the number of weights that a token is multiplied by: of the experts, those that it goes to."""
    e = model.experts
    return parameters(model) - model.row_weights - ((e.count - e.per_token) * _expert(model) if e else 0)


def _expert(model: decoder.ModelConfig) -> int:
    """Returns the number of weights of one expert, in all layers together."""
    e = model.experts
    return 3 * model.embed * e.ffw * len(model.expert_layers) if e else 0


def _trained(config: Config, model: decoder.ModelConfig) -> int:
    """Returns the number of weights that are trained."""
    if not config.lora.rank:
        return parameters(model)
    return sum(leaf.size for leaf in jax.tree.leaves(lora.abstract(adapter.adapting(config.lora, model)).adapter))


def train_collectives(config: Config, model: decoder.ModelConfig, where: Slice, batches: int) -> float:
    """Returns the seconds of links in `batches` micro-batches of the learner.

    A device sends weights twice and gradients once a micro-batch, and the activations of a divided layer. Devices that divide
    the experts send each other rows, and get float32 sums back. Those that share rows gather keys and values twice, and sum
    their gradients."""
    m, held = config.mesh, _held(model, config.mesh.expert) - model.row_weights
    trained = _trained(config, model) if config.lora.rank else held
    spread = (m.fsdp - 1) / m.fsdp / m.tensor * (2 * BF16 * held + BF16 * trained)
    seconds = batches * spread / (where.link(m.fsdp * m.tensor) * LINKS)
    tokens = config.batch.rows // m.shards * config.batch.tokens // m.context
    if m.context > 1:
        entries = sum(one.entry for one in cache_kinds.paged(model.kept) if one.of is None) / m.tensor
        seconds += batches * 3 * (m.context - 1) * tokens * entries * BF16 / (where.link(m.fsdp * m.tensor) * LINKS)
    if m.tensor > 1:  # two sums a layer, forward, again and backward; a sum sends twice its bytes
        sums = 6 * model.layers * 2 * (m.tensor - 1) / m.tensor * tokens * model.embed * BF16
        seconds += batches * sums / (where.link(m.tensor) * LINKS)
    if m.expert > 1 and model.experts:  # forward, again and backward
        rows = 3 * (model.layers - len(model.experts.dense_layers)) * (m.expert - 1) * tokens * model.embed * (BF16 + 4)
        seconds += batches * rows / (where.link(m.expert * m.tensor) * LINKS)
    if m.fsdp * m.tensor > 1:  # the head's activations: gathered twice, and their gradient comes back
        head = 3 * tokens * m.fsdp * model.embed * BF16
        seconds += batches * head / (where.link(m.fsdp * m.tensor) * LINKS)
    if m.copies > 1:
        sums = trained / (m.fsdp * m.tensor) * activations.SIZES[config.optimizer.sums_dtype]
        seconds += batches * 2 * (m.copies - 1) / m.copies * sums / (where.link(m.learner) * LINKS)
    return seconds


def publish(config: Config, model: decoder.ModelConfig, where: Slice) -> float:
    """Returns the seconds in which new weights reach the engine.

    Each device gets its part of a replica's weights, less what it has. The nearest copy is of fsdp x tensor devices."""
    m, size = config.mesh, _weight_size(config, model)
    held = _held(model, m.engine_experts)
    if m.fsdp == 1 and not m.engine and m.alike:
        return held / m.engine_parts * (4 + size) / (where.chip.bandwidth * MEMORY)  # a cast in place
    got = held * size / m.engine_parts
    if (
        config.lora.rank and config.engine.weights == AUTO
    ):  # additions travel in float32; matrices are merged where they are
        merged = held / m.engine_parts * (activations.SIZES[config.lora.base_dtype] + size)
        got = 4 * _trained(config, model) / m.engine_parts
        return got / (where.link(m.fsdp * m.tensor) * LINKS) + merged / (where.chip.bandwidth * MEMORY)
    return got / (where.link(m.fsdp * m.tensor) * LINKS)
