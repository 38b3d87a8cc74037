"""The train step of a run at full depth: seconds of the compiler, memory, and what crosses chips, against bounds.

The learner is built as a run builds it (launch/parts/build.py), with the kernels that the target runs. Seconds are CPU seconds
of this process, and scripts/shows/compile.py judges them. Bytes and FLOPs are counted in the compiled text
(scripts/traffic.py), loops by their turns, kernels by formulas (scripts/kernel_costs.py).
"""

from __future__ import annotations

import dataclasses
import re
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
import serial_loops
from targets import GIB, memory, shard_bytes

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import kernel_costs
import traffic

from jaxrl_post.config import default, resolve
from jaxrl_post.kernels import choice
from jaxrl_post.launch.parts import build
from jaxrl_post.launch.plan import chips, device_less
from jaxrl_post.models import decoder
from jaxrl_post.models.presets import PRESETS
from jaxrl_post.parallel import mesh as meshes
from jaxrl_post.trainer import split_head

MIB = 1 << 20
LOOP_MIB, MOVED_GIB, HEAD_MIB = 24, 0.6, 512  # of a collective in the loop over chunks; of the vocabulary; temporaries
ATTENTION = {4096: (300, 1.0), 32768: (2048, None)}  # tokens -> MiB of temporaries, GB of traffic on v5e
USEFUL = 1.35  # FLOPs over those that training needs: 6 a weight and token, and causal attention


@dataclasses.dataclass(frozen=True)
class Step:
    """One train step and its bounds: CPU seconds and MiB of temporaries; None is only reported.

    rows: of a device, or of devices that share them.
    context: devices that share rows.
    shared: texts of a group share their prompt.
    turns: how often the step is compiled with 2 layers and with all, by turns. The least seconds of each count, because
    other work on the machine only adds to them. 0: it is compiled once, with all layers.
    """

    model: str
    where: str
    mesh: tuple[int, int, int]
    tokens: int
    cpu_s: float | None = None
    temp_mib: float | None = None
    turns: int = 0
    rows: int = 1
    context: int = 1
    shared: bool = False

    def __str__(self) -> str:
        return f"{self.model} {self.where} {'x'.join(map(str, self.mesh))} {self.tokens}"


STEPS = [
    Step("qwen2_5_7b", "v5e-16", (1, 16, 1), 4096, 120, 6144, turns=1),
    Step("qwen2_5_7b", "v5e-16", (1, 4, 4), 8192, 120, 7400),
    Step("qwen2_5_7b", "v6e-16", (1, 16, 1), 4096, 170, 7000),
    Step("qwen2_5_7b", "tpu7x-8", (1, 8, 1), 4096),
    Step("qwen3_32b", "v5p-64", (1, 32, 1), 4096),
    Step("qwen2_5_7b", "8xh100", (1, 8, 1), 4096, 30, 5800, turns=3),
    Step("qwen2_5_7b", "8xh100", (1, 8, 1), 8192, 30, 8000),
    Step("qwen3_32b", "4x8xh100", (1, 32, 1), 4096),
]


def learner_of(step: Step, layers: int | None = None):
    """Returns the learner that a run of this shape builds, over a slice that is not there."""
    model = PRESETS[step.model]
    model = model if layers is None else dataclasses.replace(model, layers=layers, windows=())
    return on_mesh(step, model, device_less.mesh(chips.read(step.where), (*step.mesh[:2], 1, step.mesh[2]))), model


def on_mesh(step: Step, model: decoder.ModelConfig, mesh: jax.sharding.Mesh):
    """Returns the learner that a run of this shape builds."""
    data, fsdp, tensor = step.mesh
    given = (
        f"model.preset={step.model}",
        "model.compute_dtype=bfloat16",
        "model.remat=true",
        "engine.dtype=bfloat16",
        "engine.max_length=512",
        "sampling.max_tokens=256",
        f"mesh.data={data}",
        f"mesh.fsdp={fsdp}",
        f"mesh.tensor={tensor}",
        f"mesh.context={step.context}",
        f"batch.rows={step.rows * data * fsdp // step.context}",
        f"batch.tokens={step.tokens}",
        f"batch.shared_prompts={step.shared}",
    )
    devices = build.DevicePlan(learner=mesh, engine={}, lent=None)
    return build.learner(resolve(default(), list(given)), model, decoder.abstract(model), devices)


def compiled(step: Step, layers: int | None = None):
    """Returns the compiled gradient step, its CPU seconds, the model, and the bytes of the optimizer's moments.

    The target's compiler is started by a small program before, so that its start counts for no step.
    """
    learner, model = learner_of(step, layers)
    programs = learner.jitted()
    small, none = programs["zeros"]
    small.lower(*none).compile()
    program, shapes = programs["accumulate"]
    begun = time.process_time()
    made = program.lower(*shapes).compile()
    return made, time.process_time() - begun, model, moments(learner)


def moments(learner) -> int:
    """Returns the bytes on one device of the learner's state beside its weights."""
    return shard_bytes(learner.state) - shard_bytes(learner.params)


def useful(model, tokens: int) -> float:
    """Returns FLOPs of training on one packed row: 6 a weight of a product and token, and causal attention."""
    m = model
    layer = m.embed * m.head_dim * 2 * (m.heads + m.kv_heads) + 3 * m.embed * m.ffw
    products = m.layers * layer + m.embed * m.vocab_size
    return 6.0 * products * tokens + 6.0 * m.layers * m.heads * m.head_dim * tokens**2


@pytest.mark.parametrize(
    "step", [pytest.param(step, marks=[pytest.mark.timed] * (step.cpu_s is not None)) for step in STEPS], ids=str
)
def test_step(step, table):
    shallow, deep = [], []
    for _ in range(step.turns):
        shallow.append(compiled(step, 2)[1])
        deep.append(compiled(step))
    made, seconds, model, kept = min(deep or [compiled(step)], key=lambda one: one[1])
    there, used, found = chips.read(step.where), memory(made), traffic.count(made.as_text(), kernel_costs.PACKED_ROWS)
    shards = step.mesh[1] * step.mesh[2]
    padded = -(-model.vocab_size // shards) * shards
    sizes = (model.vocab_size, padded, padded // shards)
    looped = [one for one in found.collectives if one.loops]
    head = [one for one in looped if one.has_size(padded // shards) or "head" in " ".join(one.loops)]
    moved = sum(one.bytes * one.turns for one in found.collectives if one.has_size(*sizes))
    share = useful(model, step.tokens) / step.mesh[2]
    row = dict(
        seconds=round(seconds, 1),
        seconds_bound=step.cpu_s or "",
        two_layers_seconds=round(min(shallow), 1) if shallow else "",
        deeper=round(seconds / min(shallow), 3) if shallow else "",
        temp_mib=used["temp"] / MIB,
        temp_bound_mib=step.temp_mib or "",
        total_mib=used["total"] / MIB,
        with_moments_mib=(used["total"] + kept) / MIB,
        hbm_mib=there.chip.memory / MIB,
        vocabulary_gib=moved / GIB,
        flops_over_useful=found.flops() / share,
        traffic_gb=found.bytes() / 1e9,
        collectives_gib=found.linked / GIB,
    )
    table(f"train {step}", step.where, **row)
    assert not found.unknown
    assert there.chip.platform != "gpu" or not added_in_any_order(made.as_text())
    assert there.chip.platform != "tpu" or not serial_loops.found(made.as_text(), ())
    assert not head, "a collective in the loop over chunks has the vocabulary's size"
    assert max((one.bytes for one in chunked(found)), default=0) <= LOOP_MIB * MIB
    assert moved <= MOVED_GIB * GIB
    assert found.flops() <= USEFUL * share
    assert used["total"] + kept <= there.chip.memory
    assert step.temp_mib is None or used["temp"] <= step.temp_mib * MIB


def added_in_any_order(text: str) -> list[str]:
    """Returns the lines by which a GPU adds fractions to one place with atomic operations, in any order."""
    fractions = re.compile(r"= b?f\d+\[[\d,]*\]\S* scatter\(")
    return [line for line in text.splitlines() if fractions.search(line) and "unique_indices=true" not in line]


def chunked(found) -> list:
    """Returns the collectives of the loops over chunks of tokens: those whose lines stand in the split head's scope."""
    loops = {one.loops for one in found.costs if "split_head" in one.scope and one.loops}
    return [one for one in found.collectives if one.loops in loops]


@pytest.mark.parametrize("step", [STEPS[0], STEPS[5]], ids=str)
def test_commit(step, table):
    """The optimizer's step changes weights and moments in place. On sm_90 XLA copies one matrix of each layer."""
    learner, _ = learner_of(step)
    program, shapes = learner.jitted()["commit"]
    begun = time.process_time()
    used = memory(program.lower(*shapes).compile())
    table(f"commit {step}", step.where, seconds=round(time.process_time() - begun, 1), total_mib=used["total"] / MIB)
    assert used["alias"] >= 0.9 * (shard_bytes(learner.state) + shard_bytes(learner.params))
    assert used["total"] <= chips.read(step.where).chip.memory


@pytest.mark.parametrize("where", ["t4", "a100", "l4", "b200"])
def test_other_gpus(where, table):
    """The train step of Qwen2.5-0.5B, with the kernel from Ampere on."""
    step, model, chip = Step("qwen2_5_0_5b", where, (1, 1, 1), 2048), PRESETS["qwen2_5_0_5b"], chips.read(where).chip
    mesh = device_less.mesh(chips.read(where), (1, 1, 1, 1))
    learner = on_mesh(step, model, mesh)
    program, shapes = learner.jitted()["accumulate"]
    begun = time.process_time()
    text = program.lower(*shapes).compile().as_text()
    table("train qwen2_5_0_5b  1x1x1 2048", chip.target, seconds=round(time.process_time() - begun, 1))
    assert ("flash_forward" in text) == chip.flash
    assert not added_in_any_order(text)


@pytest.mark.parametrize("where, mesh", [("v5e-16", (1, 16, 1)), ("8xh100", (1, 8, 1))])
def test_head(where, mesh, table):
    """The split head alone, forward and backward."""
    model, tokens = PRESETS["qwen2_5_7b"], 4096
    placed = device_less.mesh(chips.read(where), (*mesh[:2], 1, mesh[2]))
    rows = meshes.batch_sharding(placed)
    home = meshes.param_shardings(placed, decoder.axes(model), "learner")["head"]

    def total(policy, hidden, targets):
        found = split_head.chosen(policy, model, hidden, targets, temperature=1.0, chunk=1024, mesh=placed)
        return sum(map(jnp.sum, found))

    def shape(dims, dtype, sharding):
        return jax.ShapeDtypeStruct(dims, dtype, sharding=sharding)

    hidden = shape((mesh[1], tokens, model.embed), jnp.bfloat16, rows)
    policy = {"head": shape((model.embed, model.vocab_size), jnp.float32, home)}
    begun = time.process_time()
    program = jax.jit(jax.grad(total, argnums=(0, 1)), out_shardings=({"head": home}, rows))
    used = memory(program.lower(policy, hidden, shape(hidden.shape[:2], jnp.int32, rows)).compile())
    seconds = time.process_time() - begun
    table("7B head", where, seconds=round(seconds, 1), temp_mib=used["temp"] / MIB, temp_bound_mib=HEAD_MIB)
    assert used["temp"] <= HEAD_MIB * MIB


@pytest.mark.parametrize("tokens", ATTENTION)
@pytest.mark.parametrize("where", ["v5e-1", "h100"])
def test_attention(where, tokens, table):
    """Attention of one layer and one row, forward and backward."""
    model, bound = PRESETS["qwen2_5_7b"], ATTENTION[tokens]
    mesh = device_less.mesh(chips.read(where), (1, 1, 1, 1))
    sizes = dict(heads=model.heads, kv_heads=model.kv_heads, head_dim=model.head_dim, tokens=tokens)
    kernel, line = choice.of_packed_rows(mesh.devices.flat[0], jnp.bfloat16, **sizes)
    assert kernel is not None, line
    home = meshes.heads_sharding(mesh)
    run = meshes.by_rows_and_heads(
        home, lambda q, k, v, ids: kernel(q, k, v, ids, scale=model.scale_of(0), window=None, soft_cap=None)
    )

    def both(q, k, v, ids, slope):
        out, back = jax.vjp(lambda *x: run(*x, ids), q, k, v)
        return out, back(slope)

    q, k = (
        jax.ShapeDtypeStruct((1, tokens, heads, model.head_dim), jnp.bfloat16, sharding=home)
        for heads in (model.heads, model.kv_heads)
    )
    ids = jax.ShapeDtypeStruct((1, tokens), jnp.int32, sharding=meshes.batch_sharding(mesh))
    begun = time.process_time()
    made = jax.jit(both).lower(q, k, k, ids, q).compile()
    seconds, used = time.process_time() - begun, memory(made)
    found = traffic.count(made.as_text(), kernel_costs.PACKED_ROWS)
    table(
        f"7B attention of a layer, {tokens} tokens",
        where,
        seconds=round(seconds, 1),
        temp_mib=used["temp"] / MIB,
        temp_bound_mib=bound[0],
        traffic_gb=found.bytes() / 1e9,
    )
    assert not found.unknown and used["temp"] <= bound[0] * MIB
    assert bound[1] is None or where != "v5e-1" or found.bytes() <= bound[1] * 1e9
