"""Where the weights of a policy lie on the learner's mesh, and what a mesh must divide."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from jaxrl_post import config
from jaxrl_post.models import decoder, lora
from jaxrl_post.parallel import mesh as meshes
from jaxrl_post.trainer import optimizer as optimizers


def of_policy(model: decoder.ModelConfig, mesh: Mesh) -> tuple[Any, Any]:
    """Returns the sharding of every leaf of a policy, and which trained weights decay. Additions all do, as in PEFT."""
    if model.lora is None:
        axes = decoder.axes(model)
        return meshes.param_shardings(mesh, axes, "learner"), optimizers.matrices(axes)
    axes = lora.axes(model)
    homes = (meshes.param_shardings(mesh, part, "learner") for part in (axes.base, axes.adapter))
    where = lora.Adapted(*homes, model.lora)
    return where, jax.tree.map(lambda _: True, where.adapter)


def check(
    model: decoder.ModelConfig,
    every: Sequence[Mesh],
    algorithm: config.AlgorithmConfig,
    batch: config.BatchConfig,
    context: int,
    reference: Any,
    teacher: Any = None,
) -> None:
    """Refuses what a learner cannot train.

    That is a mesh which cannot divide the model or its micro-batch, and shared prompts of layers with a state. It is also a KL
    term without a reference, and a teacher that is not there.

    Raises:
      ValueError: one sentence with the nearest valid value.
    """
    for mesh in every:
        meshes.check_divisible(mesh, decoder.axes(model), decoder.abstract(model), "learner")
        ways = meshes.shards(mesh) // context
        if batch.rows % ways:
            shared = "/mesh.context" if context > 1 else ""
            raise ValueError(
                f"batch.rows={batch.rows} must be a multiple of mesh.data*mesh.fsdp*mesh.expert{shared}={ways}; the nearest valid "
                f"value is {-(-batch.rows // ways) * ways}"
            )
    if batch.tokens % (2 * context) and context > 1:
        raise ValueError(
            f"batch.tokens={batch.tokens} must be a multiple of 2*mesh.context={2 * context}, the parts of a row; the nearest "
            f"valid value is {-(-batch.tokens // (2 * context)) * 2 * context}"
        )
    check_states(model, every, batch, context)
    if algorithm.needs_reference and reference is None:
        raise ValueError(
            f"algorithm.kl_loss_coef={algorithm.kl_loss_coef} with algorithm.use_kl_in_reward="
            f"{algorithm.use_kl_in_reward} needs a reference model and none was given; the nearest valid "
            f"values are 0 and False"
        )
    if algorithm.needs_teacher and teacher is None:
        raise ValueError(
            f"algorithm.adv_estimator={algorithm.adv_estimator!r} with algorithm.opd_kl_coef={algorithm.opd_kl_coef} needs a "
            "teacher and none was given; the nearest valid values are 'grpo' and 0"
        )


def check_states(
    model: decoder.ModelConfig, every: Sequence[Mesh], batch: config.BatchConfig, context: int, whose: str = ""
) -> None:
    """Refuses recurrent layers whose rows share prompts, and whose heads devices that share rows cannot divide.

    whose: words behind a layer, for a model that is not the policy.

    Raises:
      ValueError: one sentence with the nearest valid value.
    """
    if model.linear is None:
        return
    if batch.shared_prompts:
        raise ValueError(
            f"batch.shared_prompts={batch.shared_prompts} needs layers that read earlier tokens by attention, and layer "
            f"{model.linear.layers[0]}{whose} hands on a recurrent state; the nearest valid value is False"
        )
    tensor = every[0].shape["tensor"]
    heads = math.gcd(*(mesh.shape["fsdp"] for mesh in every), model.linear.key_heads // tensor)
    if heads % context:
        raise ValueError(
            f"mesh.context={context} must divide mesh.fsdp and the {model.linear.key_heads} key heads of recurrent layers{whose} "
            f"over mesh.tensor={tensor}; the nearest valid value is {_nearest_divisor(heads, context)}"
        )


def _nearest_divisor(number: int, asked: int) -> int:
    return min((n for n in range(1, number + 1) if number % n == 0), key=lambda n: (abs(n - asked), n))
