"""What a run will need, before anything is placed: batch arithmetic, memory per device, memory of the process.

Invariant: no array is made. The first two are computed from shapes and ask for no device, so a run for many devices can
be planned on none; weights, optimizer, gradient and KV pages are exact, activations are an estimate and say so. The
memory of the process takes what compiled programs say of themselves in place of the estimate.
"""

from __future__ import annotations

import math
import resource
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType

from jaxrl_post.config import Config
from jaxrl_post.models import decoder
from jaxrl_post.parallel import mesh as meshes

WEIGHTS, ESTIMATE = "weights (learner, float32)", "activations (estimate)"
SAVED = "copy of weights and moments for a checkpoint"
MOMENTS = "optimizer (two moments, float32)"
ENGINE, PAGES, DRAFTING = "weights (engine", "KV pages", "drafting (tables of one replica)"
_GENERATES = ENGINE, PAGES, DRAFTING
LENT, _WHILE_LENT = "lent: ", "device while it is lent"  # the first begins what lies on the second


def arithmetic(config: Config, prompts: int, longest_prompt: int) -> dict[str, int | float]:
    """How many of what a step is made of. `prompts`: per epoch; `longest_prompt`: tokens."""
    c = config
    rollouts_per_row = max(c.batch.tokens // (longest_prompt + c.sampling.max_tokens), 1)
    slots = c.engine.slots * c.replicas
    return {
        "devices": c.devices,
        "engine replicas": c.replicas,
        "prompts per round": c.scheduler.prompts,
        "answers per prompt": c.scheduler.group_size,
        "rollouts per round": c.rollouts_per_step,
        "engine slots in all": slots,
        "times the slots are filled per round": round(c.rollouts_per_step / slots, 2),
        "longest prompt, tokens": longest_prompt,
        "longest answer, tokens": c.sampling.max_tokens,
        "micro-batch, rows": c.batch.rows,
        "micro-batch, tokens": c.batch.rows * c.batch.tokens,
        "optimizer steps per round": c.scheduler.updates,
        "most micro-batches per step": math.ceil(
            c.rollouts_per_step // c.scheduler.mini_batches / (c.batch.rows * rollouts_per_row)
        ),
        "steps": c.steps,
        "epochs": round(c.rounds * c.scheduler.prompts / prompts, 3),
        "rollouts per evaluation": c.eval.prompts * (c.eval.samples + 1),
    }


def memory(config: Config, model: decoder.ModelConfig, drafting: int = 0) -> dict[str, int]:
    """Bytes on each device, by what they hold; `drafting`: those of the drafter's tables. Where the engine has devices of its
    own, `by_kind` tells which of it lies where.

    Raises:
      ValueError: the mesh does not divide the model.
    """
    mesh = AbstractMesh(
        (config.mesh.data, config.mesh.fsdp, config.mesh.tensor),
        (meshes.DATA, meshes.FSDP, meshes.TENSOR),
        axis_types=(AxisType.Auto,) * 3,
    )
    shapes, axes = decoder.abstract(model), decoder.axes(model)
    counts = {"heads": model.heads, "kv_heads": model.kv_heads}
    meshes.check_divisible(mesh, axes, shapes, "learner", counts)
    meshes.check_divisible(
        mesh, axes, shapes, "engine", counts
    )  # split over tensor alone, which both meshes have alike
    learner, engine = (_elements(shapes, meshes.param_shardings(mesh, axes, room)) for room in ("learner", "engine"))
    case, dtype = swap_case(config), config.engine.dtype
    out = {
        WEIGHTS: 4 * learner,
        MOMENTS: 8 * learner,
        "gradient (float32)": 4 * learner,
        "gradient of lent devices, as it is added (float32)": 4 * learner if config.lent else 0,
        f"{ENGINE}, {dtype}, {case})": _bytes(dtype) * engine if case != "shared" or config.engine.layouts else 0,
        "weights (reference, float32)": 4 * learner if config.algorithm.needs_reference else 0,
        f"{PAGES} ({config.pages} of {config.engine.page_size} tokens, {dtype})": _cache(config, model),
        DRAFTING: drafting,
        ESTIMATE: _activations(config, model, config.mesh.shards),
    }
    return out | {"all": sum(out.values())} | (_lent(config, model) if config.lent else {})


def _lent(config: Config, model: decoder.ModelConfig) -> dict[str, int]:
    """Bytes on a device while it is lent; `memory` on its mesh: mesh.divided."""
    shards, shapes, axes = config.lent // config.mesh.tensor, decoder.abstract(model), decoder.axes(model)
    mesh = AbstractMesh(
        (*meshes.along(shards, config.mesh.fsdp), config.mesh.tensor),
        (meshes.DATA, meshes.FSDP, meshes.TENSOR),
        axis_types=(AxisType.Auto,) * 3,
    )
    weights = 4 * _elements(shapes, meshes.param_shardings(mesh, axes, "learner"))
    there = config.mesh.engine == 0 and config.mesh.fsdp == 1  # the learner's own are the same
    return {
        f"{LENT}weights (lent, float32)": 0 if there else weights,
        f"{LENT}gradient (lent, float32)": weights,
        LENT + ESTIMATE: _activations(config, model, shards),
    }


def by_kind(config: Config, held: Mapping[str, int]) -> dict[str, dict[str, int]]:
    """What `memory` says, by the kind of device that it lies on: one where learner and engine share them. A device that is lent
    holds meanwhile nothing that generates, and what is said of it beside."""
    parts: dict[str, dict[str, int]] = {}
    for name, size in held.items():
        for kind in _kinds(config, name) if name != "all" else ():
            parts.setdefault(kind, {})[name.removeprefix(LENT)] = size
    return {kind: part | {"all": sum(part.values())} for kind, part in parts.items()}


def _kinds(config: Config, name: str) -> tuple[str, ...]:
    generates, shared = name.startswith(_GENERATES), config.mesh.engine == 0
    if name.startswith(LENT):
        return (_WHILE_LENT,)
    if shared:
        return ("device", _WHILE_LENT) if config.lent and not generates and ESTIMATE not in name else ("device",)
    return ("device that generates",) if generates else ("device that learns",)


def process(
    config: Config, held: Mapping[str, int], temporaries: Mapping[str, int], resident: int, on_host: bool
) -> dict[str, int]:
    """Bytes of this process at its highest, by what they hold.

    Args:
      held: what `memory` says, per device.
      temporaries: bytes that each program needs on a device beside what is held, by its name.
      resident: of the process with everything imported, read and compiled, but no weights.
      on_host: the devices are the CPU, whose memory is the process's own; else it holds one copy of the weights, at the
        beginning and at the end, and what lies on a device is said per device.

    While a checkpoint is written the process holds a copy of weights and moments; no program runs then, so the larger of
    the two needs counts. An export reads what is there: on the CPU the arrays themselves.
    """
    kept = {name: size for name, size in held.items() if not name.endswith(("all", ESTIMATE)) and size}
    kinds = by_kind(config, kept).values()
    largest, shards = max(temporaries, key=temporaries.get), config.mesh.fsdp * config.mesh.tensor
    saved = {SAVED: (held[WEIGHTS] + held[MOMENTS]) * shards} if config.checkpoint.every else {}
    if not on_host:
        staged = saved or {"weights on their way (float32)": held[WEIGHTS] * shards}
        inside = {"process itself (compiled, no weights yet)": resident, **staged}
        return inside | {
            "process at its highest": sum(inside.values()),
            "each device at its highest": max(kind["all"] for kind in kinds) + temporaries[largest],
        }
    program = {f"largest program beside it ({largest})": temporaries[largest] * config.devices}
    totals = [_on_all(config, kept, lent) for lent in (0, config.lent)]
    inside = {
        "process itself (compiled, no weights yet)": resident,
        **max(totals, key=lambda lines: sum(lines.values())),
        **max(program, saved, key=lambda line: sum(line.values())),
    }
    return inside | {"process at its highest": sum(inside.values())}


def _on_all(config: Config, held: Mapping[str, int], lent: int) -> dict[str, int]:
    """`held`, which is per device, on all of them together while so many are lent."""
    count = {
        "device": config.devices - lent,
        "device that learns": config.mesh.learner,
        _WHILE_LENT: lent,
        "device that generates": config.generating - lent,
    }
    out: Counter[str] = Counter()
    for kind, part in by_kind(config, held).items():
        for name, size in part.items():
            out[name] += size * count[kind] if name != "all" else 0
    return dict(+out)


def resident() -> int:
    """Bytes of memory that this process has now; where the system does not say, the most it had so far."""
    status = Path("/proc/self/status")
    if status.is_file():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmRSS:"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def swap_case(config: Config) -> str:
    """How weights reach the engine: shared, cast or relayout (another sharding)."""
    if config.mesh.fsdp > 1 or config.mesh.engine:
        return "relayout"
    return "shared" if config.engine.dtype == "float32" else "cast"


def _bytes(dtype: str) -> int:
    return {"float32": 4, "bfloat16": 2}[dtype]


def _elements(shapes: Any, shardings: Any) -> int:
    """Of the weights on one device."""
    leaves = zip(jax.tree.leaves(shapes), jax.tree.leaves(shardings), strict=True)
    return sum(int(np.prod(sharding.shard_shape(shape.shape))) for shape, sharding in leaves)


def _cache(config: Config, model: decoder.ModelConfig) -> int:
    """Keys and values of one replica's pages; kv_heads are split over tensor."""
    positions = config.pages * config.engine.page_size
    heads = model.kv_heads // config.mesh.tensor
    return 2 * model.layers * positions * heads * model.head_dim * _bytes(config.engine.dtype)


def _activations(config: Config, model: decoder.ModelConfig, shards: int) -> int:
    """Of one micro-batch's backward pass: per layer the residual stream twice, q, k, v, o, the two halves of the gated
    feed-forward and the attention weights (with remat one layer of that and the stream of each), and the head's
    logits with their gradient, head_chunk at a time."""
    tokens = config.batch.rows // shards * config.batch.tokens
    ways = config.mesh.tensor
    inner = (2 * model.heads + 2 * model.kv_heads) * model.head_dim // ways + 3 * model.ffw // ways
    weights = model.heads // ways * config.batch.tokens
    layer = tokens * (2 * model.embed + inner + weights)
    layers = layer + model.layers * tokens * model.embed if config.model.remat else model.layers * layer
    head = 2 * min(config.batch.head_chunk, tokens) * model.vocab_size // ways * 4
    return layers * _bytes(config.model.compute_dtype) + head


def text(title: str, rows: dict, unit: str = "") -> str:
    """A titled table; bytes (unit "B") in MiB."""
    shown = {name: f"{value / 2**20:,.1f} MiB" if unit == "B" else f"{value:,}" for name, value in rows.items()}
    wide = max(map(len, shown))
    return "\n".join([title, *(f"  {name:<{wide}}  {value:>14}" for name, value in shown.items())])
