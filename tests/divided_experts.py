"""Experts over several devices beside one device: their layer alone, and the learner's gradient. tests/ and
scripts/shows/expert_parallel.py compare them."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import engine_lab as lab
import gradient_arms as arms
import jax
import jax.numpy as jnp
import made_groups
import numpy as np

from jaxrl_post.models import experts
from jaxrl_post.models.layer import EXPERT_AXES
from jaxrl_post.models.model_config import Experts
from jaxrl_post.parallel import mesh as meshes

OWN = Experts(8, 3, 24, biased=True)
MODEL = dataclasses.replace(made_groups.MODEL, experts=Experts(8, 2, 24, shared_ffw=16))
SAMPLED = dataclasses.replace(lab.TINY, experts=Experts(8, 2, 24, renormalised=False, shared_ffw=16))  # by the engine
ROUTERS = dict(router_aux_loss_coef=0.01, router_z_loss_coef=0.001)
ROWS, WIDTH, RANK = 32, 16, 3
MIXED = functools.partial(experts.mixed, experts=OWN, activation="silu", lora_scale=0.7)


def sizes(name: str) -> dict[str, int]:
    """Returns the sizes of a mesh, of a name like "expert2-tensor2"."""
    return {part.rstrip("0123456789"): int(part.lstrip("adefnoprstx")) for part in name.split("-")}


def in_order(where: dict[str, int]) -> tuple:
    """Returns sizes of a mesh in the order of make_mesh's arguments."""
    return (*(where.get(axis, 1) for axis in ("data", "fsdp", "tensor")), None, where.get("expert", 1))


@functools.cache
def given(dtype) -> tuple:
    """Returns rows [M, D], chosen experts [M, k], their gates [M, k] and all matrices. All rows go to few experts."""
    noise, count = np.random.default_rng(0), OWN.count
    some = np.where(np.arange(count) < 5, 0.0, 0.7)  # the last experts come late, so their devices have few rows
    ids = np.argsort(noise.random((ROWS, count)) + some, axis=-1)[:, : OWN.per_token].astype(np.int32)
    outputs = {"gate": (WIDTH, OWN.ffw), "up": (WIDTH, OWN.ffw), "down": (OWN.ffw, WIDTH)}
    shapes = {name: (count, *pair) for name, pair in outputs.items()}
    shapes |= {f"{name}_bias": (count, OWN.ffw) for name in ("gate", "up")}
    shapes |= {f"{name}_a": (count, inputs, RANK) for name, (inputs, _) in outputs.items()}
    shapes |= {f"{name}_b": (count, RANK, size) for name, (_, size) in outputs.items()}
    matrices = {name: noise.normal(size=shape).astype(dtype) for name, shape in shapes.items()}
    return noise.normal(size=(ROWS, WIDTH)).astype(dtype), ids, noise.random(ids.shape).astype(dtype), matrices


def layer(dtype, where: dict[str, int] | None, learns: bool = True) -> dict[str, Any]:
    """Returns the weighted sums of the experts and, where rows are split as in the learner, the gradients of all that they
    depend on, low-rank additions too. where: sizes of the mesh; None: no mesh."""
    with arms.precision(dtype):
        x, ids, gates, matrices = given(dtype)
        run = MIXED
        if where is not None:
            names = {name: EXPERT_AXES[name] for name in matrices}
            run = meshes.by_experts(meshes.make_mesh(**where), run, names, meshes.ROWS if learns else ())
        if not learns:
            return {"sums": jax.device_get(jax.jit(run)(x, ids, gates, matrices))}
        probe = np.random.default_rng(1).normal(size=x.shape).astype(dtype)

        def total(x, gates, matrices):
            out = run(x, jnp.asarray(ids), gates, matrices)
            return jnp.sum(out * probe), out

        (_, sums), slopes = jax.jit(jax.value_and_grad(total, (0, 1, 2), has_aux=True))(x, gates, matrices)
        return jax.device_get({"sums": sums, "x": slopes[0], "gates": slopes[1], **slopes[2]})


def program(where: dict[str, int]) -> str:
    """Returns the jaxpr of the layer, with rows split as in the learner."""
    x, ids, gates, matrices = given(np.float32)
    names = {name: EXPERT_AXES[name] for name in matrices}
    run = meshes.by_experts(meshes.make_mesh(**where), MIXED, names, meshes.ROWS)
    return str(jax.make_jaxpr(run)(x, ids, gates, matrices))


def gradient(dtype, where: dict[str, int]) -> Any:
    """Returns the learner's divided gradient of a model with experts, on the host."""
    groups = made_groups.groups()
    with arms.precision(dtype):
        one = arms.learner(
            dtype, kind=arms.Uncommitted, model=MODEL, sizes=in_order(where), rows=8, given=arms.algorithm(**ROUTERS)
        )
        one.prepare(groups)
        one.accumulate(groups)
        return jax.device_get(one.gradient())


def gaps(got: Any, want: Any) -> dict[str, float]:
    """Returns the relative 2-norm distance of each leaf."""
    return made_groups.distances(got, want)
