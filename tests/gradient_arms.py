"""One gradient by several ways: packed, one sequence per row, in several accumulates, on eight devices. tests/ and
scripts/shows/sums.py compare them."""

from __future__ import annotations

import contextlib
import dataclasses

import jax
import made_groups
import numpy as np

from jaxrl_post import config
from jaxrl_post.algorithms import advantages
from jaxrl_post.parallel import mesh
from jaxrl_post.trainer import programs
from jaxrl_post.trainer.learner import Learner, LearnerSettings

MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "prompt-mean")
LOSSES = ("gspo", "cispo", "sapo")  # beside vanilla
MAX_TOKENS = 24
OPTIONAL = {"written", "remat", "remat_policy", "scan_layers", "attention", "context"}  # of LearnerSettings


def algorithm(mode: str = "token-mean", **changes) -> config.AlgorithmConfig:
    """Every term at once, with bounds narrow enough that many tokens are clipped."""
    given = dict(loss_agg_mode=mode, clip_ratio_low=0.02, clip_ratio_high=0.03, kl_loss_coef=0.3, entropy_coef=0.1)
    return config.AlgorithmConfig(**(given | changes))


def precision(dtype):
    """The context in which `dtype` exists."""
    return jax.enable_x64(True) if dtype == np.float64 else contextlib.nullcontext()


class Uncommitted(Learner):
    """Is asked for its gradient alone: the optimizer's program is not compiled."""

    def jitted(self):
        return {name: program for name, program in super().jitted().items() if name != "commit"}


def learner(
    dtype=np.float32,
    *,
    mode="token-mean",
    sizes=(1, 1, 1),
    rows=4,
    tokens=48,
    policy=None,
    reference=True,
    optimizer=None,
    model=made_groups.MODEL,
    given=None,
    kind=Learner,
    **more,
) -> Learner:
    settings = LearnerSettings(
        algorithm=given or algorithm(mode),
        optimizer=optimizer or config.OptimizerConfig(),
        batch=config.BatchConfig(
            rows=rows,
            tokens=tokens,
            head_chunk=more.pop("head_chunk", 64),
            split_head=more.pop("split_head", "auto"),
            shared_prompts=more.pop("shared_prompts", False),
        ),
        temperature=more.pop("temperature", 0.8),
        steps=more.pop("steps", 10),
        max_tokens=MAX_TOKENS,
        compute_dtype=np.dtype(dtype).name,
        **{name: more.pop(name) for name in OPTIONAL & more.keys()},
    )
    return kind(
        model,
        made_groups.weights(0, dtype, model) if policy is None else policy,
        mesh.make_mesh(*sizes),
        settings,
        reference=made_groups.moved(made_groups.weights(0, dtype, model), 2) if reference else None,
        **more,
    )


def gradient(groups, dtype=np.float32, *, parts: int = 1, one: Learner | None = None, **kwargs):
    """prepare at one policy, then accumulate `groups` in `parts` at another: the divided gradient, on the host. `one`: a
    learner for which `again` was called; others are made of `kwargs`."""
    with precision(dtype):
        one = one or learner(dtype, kind=Uncommitted, **kwargs)
        one.prepare(groups)
        shift(one, dtype)
        for part in np.array_split(np.arange(len(groups)), parts):
            one.accumulate([groups[g] for g in part])
        return jax.device_get(one.gradient())


def again(one: Learner, dtype, **changes) -> Learner:
    """The learner with the weights and the step that it began with, nothing summed, and changes of its algorithm that only the host
    knows of: the aggregation, the estimator of advantages."""
    with precision(dtype):
        one.compile()
        one._algorithm, one._sums = dataclasses.replace(one._algorithm, **changes), one._programs["zeros"]()
        one._step = 0
        one._begin_round()
        one._begin_step()
        start = mesh.put(made_groups.weights(0, dtype), jax.tree.map(lambda x: x.sharding, one.params))
        one.state = dataclasses.replace(one.state, params={**one.state.params, "policy": start})
    return one


def shift(one: Learner, dtype) -> None:
    """Moves the policy as if a commit had happened, so that ratios are not 1."""
    one._old.settle(one.logprobs)
    one._old.committed = True
    policy = made_groups.moved(made_groups.weights(0, dtype, one._recipe.model), 1)
    placed = mesh.put(policy, jax.tree.map(lambda x: x.sharding, one.params))
    one.state = dataclasses.replace(one.state, params={**one.state.params, "policy": placed})


def plain_gradient(
    groups,
    dtype=np.float32,
    *,
    mode="token-mean",
    temperature=0.8,
    loss_mode="vanilla",
    given=None,
    values=None,
    at_start=False,
):
    """The same from tests/made_groups.py: no packing, no chunks, no sums; one division per formula. `given`: its bounds and
    coefficients count. `values`: advantages by group and rollout; None: those of GRPO.
    `at_start`: the policy is still the old one."""
    a = given or algorithm(mode)
    values = values or [
        advantages.grpo(group.rewards, group.scored, np.array([len(r) for r in group.rollouts])) for group in groups
    ]
    with precision(dtype):
        old = made_groups.weights(0, dtype)
        policy, reference = (jax.tree.map(jax.numpy.asarray, made_groups.moved(old, seed)) for seed in (1, 2))

        return jax.device_get(
            made_groups.plain_gradient(
                jax.tree.map(jax.numpy.asarray, old) if at_start else policy,
                made_groups.MODEL,
                groups,
                values,
                old,
                reference,
                mode=mode,
                low=a.clip_ratio_low,
                high=a.clip_ratio_high,
                kl_coef=a.kl_loss_coef,
                entropy_coef=a.entropy_coef,
                max_tokens=MAX_TOKENS,
                temperature=temperature,
                loss_mode=loss_mode,
            )
        )


def host(tree):
    return jax.tree.map(np.array, jax.device_get(tree))


def turn(one, groups):
    """Metrics of a round of one step."""
    one.prepare(groups)
    one.accumulate(groups)
    return {name: float(value) for name, value in one.commit().items()}


def same(a, b) -> bool:
    """Whether two trees have the same bits."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(x.tobytes() == y.tobytes() for x, y in pairs)


def worst(a, b) -> float:
    """The largest per-leaf relative 2-norm distance."""
    return max(made_groups.distances(a, b).values())


def mean_per_micro_batch(monkeypatch):
    """Plants a fault: whatever is summed, a micro-batch or a piece, is divided by its own count."""
    whole = programs.numerator

    def divided(*given):
        total, (sums, logps) = whole(*given)
        return total / sums.count, (dataclasses.replace(sums, count=jax.numpy.ones_like(sums.count)), logps)

    monkeypatch.setattr(programs, "numerator", divided)
