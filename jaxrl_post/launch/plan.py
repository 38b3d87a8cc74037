"""What a run will need, computed from shapes before anything is placed: batch arithmetic and memory per device.

Invariant: no array is made and no device is asked for, so a run for many devices can be planned on none. Weights,
optimizer, gradient and KV pages are exact; activations are an estimate and say so.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType

from jaxrl_post import mesh as meshes
from jaxrl_post.config import Config
from jaxrl_post.models import decoder


def arithmetic(config: Config, prompts: int, longest_prompt: int) -> dict[str, int | float]:
    """How many of what a step is made of. `prompts`: per epoch; `longest_prompt`: tokens."""
    c = config
    rollouts_per_row = max(c.batch.tokens // (longest_prompt + c.sampling.max_tokens), 1)
    slots = c.engine.slots * c.replicas
    return {
        "devices": c.devices,
        "engine replicas": c.replicas,
        "prompts per step": c.scheduler.prompts,
        "answers per prompt": c.scheduler.group_size,
        "rollouts per step": c.rollouts_per_step,
        "engine slots in all": slots,
        "times the slots are filled per step": round(c.rollouts_per_step / slots, 2),
        "longest prompt, tokens": longest_prompt,
        "longest answer, tokens": c.sampling.max_tokens,
        "micro-batch, rows": c.batch.rows,
        "micro-batch, tokens": c.batch.rows * c.batch.tokens,
        "most micro-batches per step": math.ceil(c.rollouts_per_step / (c.batch.rows * rollouts_per_row)),
        "steps": c.steps,
        "epochs": round(c.steps * c.scheduler.prompts / prompts, 3),
        "rollouts per evaluation": c.eval.prompts * (c.eval.samples + 1),
    }


def memory(config: Config, model: decoder.ModelConfig) -> dict[str, int]:
    """Bytes on each device, by what they hold.

    Raises:
      ValueError: the mesh does not divide the model.
    """
    mesh = AbstractMesh((config.mesh.data, config.mesh.fsdp, config.mesh.tensor),
                        (meshes.DATA, meshes.FSDP, meshes.TENSOR), axis_types=(AxisType.Auto,) * 3)
    shapes, axes = decoder.abstract(model), decoder.axes(model)
    counts = {"heads": model.heads, "kv_heads": model.kv_heads}
    meshes.check_divisible(mesh, axes, shapes, "learner", counts)
    meshes.check_divisible(mesh, axes, shapes, "engine", counts)
    learner, engine = (_elements(shapes, meshes.param_shardings(mesh, axes, room)) for room in ("learner", "engine"))
    case, dtype = swap_case(config), config.engine.dtype
    out = {
        "weights (learner, float32)": 4 * learner,
        "optimizer (two moments, float32)": 8 * learner,
        "gradient (float32)": 4 * learner,
        f"weights (engine, {dtype}, {case})": 0 if case == "shared" else _bytes(dtype) * engine,
        "weights (reference, float32)": 4 * learner if config.algorithm.kl_loss_coef > 0 else 0,
        f"KV pages ({config.pages} of {config.engine.page_size} tokens, {dtype})": _cache(config, model),
        "activations (estimate)": _activations(config, model),
    }
    return out | {"all": sum(out.values())}


def swap_case(config: Config) -> str:
    """How weights reach the engine: shared, cast or relayout (another sharding)."""
    if config.mesh.fsdp > 1:
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


def _activations(config: Config, model: decoder.ModelConfig) -> int:
    """Of one micro-batch's backward pass: per layer the residual stream twice, q, k, v, o, the two halves of the gated
    feed-forward and the attention weights (with remat one layer of that and the stream of each), and the head's
    logits with their gradient, head_chunk at a time."""
    tokens = config.batch.rows // config.replicas * config.batch.tokens
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
