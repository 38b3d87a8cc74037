"""Train steps of Qwen2.5-1.5B on packed rows of 4,096 and 8,192 tokens, by the learner that a run builds.

The model is whole: weights, moments, sums and a new gradient in float32 are 20 bytes a weight, 29 GiB of 1.54 billion.
Qwen2.5-7B would need 142 GiB. Products with weights and outputs of attention are kept for the backward pass, so that
only cheap parts are computed twice.

MFU is useful FLOPs over seconds and the chip's published peak. Useful are 6 FLOPs for each weight of a product and
token, and causal attention inside each sequence. Seconds are those of prepare, accumulate and commit.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gpu import timing, weights
from gpu.part import Part

from jaxrl_post.config import default, resolve
from jaxrl_post.launch.parts import build
from jaxrl_post.launch.plan import chips, device_less
from jaxrl_post.models import decoder
from jaxrl_post.models.presets import PRESETS
from jaxrl_post.parallel import mesh
from jaxrl_post.ring.types import Finish, Group, Prompt, Rollout, RolloutId
from jaxrl_post.trainer.learner import Learner

PRESET = "qwen2_5_1_5b"
ROWS = {4096: 4, 8192: 2}  # tokens of a row -> rows of a micro-batch
MICRO_BATCHES, TURNS = 4, 2
PROMPT = 64
# What each section changes. A head in larger pieces moves fewer bytes, and so do layers that no scan stacks.
SETTINGS = {
    "train": (),
    "train_head_chunk": ("batch.head_chunk=4096",),
    "train_no_scan": ("batch.head_chunk=4096", "model.scan_layers=no"),
}


def steps(
    part: Part,
    model: decoder.ModelConfig = PRESETS[PRESET],
    shapes: Mapping[int, int] = ROWS,
    preset: str = PRESET,
    section: str = "train",
    chips: int = 1,
) -> None:
    """Times optimizer steps with one sequence in a row, and with four, with the settings of the section.

    chips: devices over which weights and rows are divided. MFU is a share of the peak of all."""
    settings = (*SETTINGS[section], f"mesh.fsdp={chips}")
    for tokens, rows in shapes.items():
        keys = {count: f"{section}.{preset}.{tokens}_tokens_{count}_sequences" for count in (1, 4)}
        again = f"{section}.{preset}.{tokens}_tokens.gradient_bits_equal_again"
        if not part.wants(again, 45.0):
            continue
        trainer = learner(model, preset, rows, tokens, settings)
        for count, key in keys.items():
            if part.wants(key, 10.0):
                sequences = groups(model, MICRO_BATCHES * rows * count, tokens // count)
                took = [one_step(trainer, sequences) for _ in range(1 + TURNS)]
                part.figure(key, rates(model, MICRO_BATCHES * rows * [tokens // count] * count, took[1:], chips))
        part.figure(again, twice(trainer, groups(model, rows, tokens)), equals=True)
        del trainer
        gc.collect()  # its weights, before the next one's


def learner(model: decoder.ModelConfig, preset: str, rows: int, tokens: int, more: Sequence[str] = ()) -> Learner:
    """Returns the learner of a run with these settings and `more`, compiled, on random weights."""
    config = resolve(default(), options(preset, rows, tokens, more))
    devices = build.DevicePlan(learner=mesh.make_mesh(fsdp=config.mesh.fsdp), engine={}, lent=None)
    made = build.learner(config, model, lambda homes: weights.drawn(model, jnp.float32, homes), devices)
    made.compile()
    return made


def planned(model: decoder.ModelConfig, preset: str, rows: int, tokens: int, more: Sequence[str] = ()) -> Learner:
    """Returns the same learner for one H100 that is not there."""
    place = device_less.mesh(chips.read("h100"), (1, 1, 1, 1))
    devices = build.DevicePlan(learner=place, engine={}, lent=None)
    return build.learner(
        resolve(default(), options(preset, rows, tokens, more)), model, decoder.abstract(model), devices
    )


def options(preset: str, rows: int, tokens: int, more: Sequence[str]) -> list[str]:
    return [
        f"model.preset={preset}",
        "model.compute_dtype=bfloat16",
        "model.remat=true",
        "model.remat_policy=projections",
        "engine.dtype=bfloat16",
        "optimizer.lr=0",  # so that a micro-batch has the same gradient after a commit
        f"engine.max_length={tokens}",
        f"sampling.max_tokens={tokens - PROMPT}",
        f"batch.rows={rows}",
        f"batch.tokens={tokens}",
        *more,
    ]


def groups(model: decoder.ModelConfig, count: int, tokens: int) -> list[Group]:
    """Returns `count` rollouts of random tokens, in groups of two of which one is right.

    tokens: of prompt and rollout together."""
    noise, out = np.random.default_rng(count), []
    for index in range(count // 2):
        prompt = Prompt(id=str(index), tokens=noise.integers(0, model.vocab_size, PROMPT))
        pair = [_rollout(prompt, sample, noise, model.vocab_size, tokens - PROMPT) for sample in range(2)]
        out.append(Group(prompt=prompt, rollouts=tuple(pair), rewards=[0.0, 1.0], scored=[True, True]))
    return out


def _rollout(prompt: Prompt, sample: int, noise: np.random.Generator, vocab: int, tokens: int) -> Rollout:
    return Rollout(
        id=RolloutId(0, "train", 0, prompt.id, sample),
        prompt=prompt,
        tokens=noise.integers(0, vocab, tokens),
        sampled=[True] * tokens,
        logprobs=[-10.0] * tokens,
        entropies=[10.0] * tokens,
        versions=[0] * tokens,
        drafted=[False] * tokens,
        finish=Finish.LENGTH,
        start_clock=0,
        finish_clock=1,
    )


def one_step(trainer: Learner, sequences: Sequence[Group]) -> dict[str, float]:
    """Returns the seconds of each stage of an optimizer step, waited for."""
    marks = [time.perf_counter()]
    trainer.prepare(sequences)
    marks.append(time.perf_counter())
    trainer.accumulate(sequences)
    while trainer.at_work:
        time.sleep(1e-4)
    marks.append(time.perf_counter())
    trainer.commit()
    jax.block_until_ready(trainer.params)
    marks.append(time.perf_counter())
    names = ("prepare_s", "accumulate_s", "commit_s")
    return {name: after - before for name, before, after in zip(names, marks, marks[1:])} | {
        "step_s": marks[-1] - marks[0]
    }


def rates(
    model: decoder.ModelConfig, lengths: Sequence[int], turns: Sequence[dict[str, float]], chips: int = 1
) -> dict[str, Any]:
    """Returns the seconds of the fastest step, its tokens per second, and the share of the peak of all chips."""
    best = min(turns, key=lambda one: one["step_s"])
    flops = useful(model, lengths)
    return best | {
        "tokens_per_s": sum(lengths) / best["step_s"],
        "useful_tflops": flops / best["step_s"] / 1e12,
        "mfu": timing.share_of_peak(flops / chips, best["step_s"]),
        "mfu_without_commit": timing.share_of_peak(flops / chips, best["accumulate_s"]),
    }


def useful(model: decoder.ModelConfig, lengths: Sequence[int]) -> float:
    """Returns FLOPs that training on sequences of these lengths needs."""
    m = model
    layer = m.embed * m.head_dim * 2 * (m.heads + m.kv_heads) + 3 * m.embed * m.ffw
    products = m.layers * layer + m.embed * m.vocab_size
    attention = 6.0 * m.layers * m.heads * m.head_dim
    return sum(6.0 * products * length + attention * length**2 for length in lengths)


def twice(trainer: Learner, sequences: Sequence[Group]) -> bool:
    """Returns whether a micro-batch has the same gradient a second time, to the bit. The learning rate must be 0."""
    found = []
    for _ in range(2):
        trainer.prepare(sequences)
        trainer.accumulate(sequences)
        found.append(jax.device_get(_digest(trainer.gradient())))
        trainer.commit()
    return found[0] == found[1]


@jax.jit
def _digest(tree: Any) -> list[jax.Array]:
    """Returns a number for each leaf that depends on all of its bits."""
    return [_sum_of_bits(x) for x in jax.tree.leaves(tree)]


def _sum_of_bits(x: jax.Array) -> jax.Array:
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32).reshape(-1)
    return jnp.sum(bits * (2 * jnp.arange(bits.size, dtype=jnp.uint32) + 1), dtype=jnp.uint32)
