"""The gradient of a reward model by two ways: the learner's, and autodiff of TRL's formula with one sequence per row."""

from __future__ import annotations

import dataclasses

import gradient_arms as arms
import jax
import jax.numpy as jnp
import made_groups
import numpy as np
from dense_attend import dense, in_order

from jaxrl_post.config import AlgorithmConfig
from jaxrl_post.models import decoder

MODEL = dataclasses.replace(made_groups.MODEL, scalar=True)


def algorithm(**changes) -> AlgorithmConfig:
    given = dict(loss_mode="bradley_terry", adv_estimator="pairs", loss_agg_mode="seq-mean-token-sum")
    return AlgorithmConfig(**(given | dict(center_rewards_coefficient=0.3) | changes))


def weights(dtype=np.float32) -> dict:
    """Those of made_groups with a head that is not 0."""
    head = np.random.default_rng(7).standard_normal((MODEL.embed, 1)).astype(dtype)
    return made_groups.weights(0, dtype, MODEL) | {"score": head}


def groups() -> list:
    """Pairs, every second of them with a margin. A rollout of the second pair is unscored."""
    found = made_groups.groups(size=2)
    margins = [{} if g % 2 else {"margin": 0.7} for g in range(len(found))]
    prompts = [dataclasses.replace(g.prompt, extra=extra) for g, extra in zip(found, margins, strict=True)]
    return [
        dataclasses.replace(
            group, prompt=prompt, rollouts=tuple(dataclasses.replace(r, prompt=prompt) for r in group.rollouts)
        )
        for group, prompt in zip(found, prompts, strict=True)
    ]


def learner(given: AlgorithmConfig, dtype=np.float32, **more):
    how = dict(given=given, kind=arms.Uncommitted, temperature=1.0, reference=False) | more
    return arms.learner(dtype, model=MODEL, policy=weights(dtype), **how)


def gradient(found, given: AlgorithmConfig, dtype=np.float32, **more):
    """The divided gradient of the model that the learner began with."""
    with arms.precision(dtype):
        one = learner(given, dtype, **more)
        one.prepare(found)
        one.accumulate(found)
        return jax.device_get(one.gradient())


def plain_rewards(params, model, texts):
    """The number that the head gives the last token of each text, one text per row."""
    tokens = np.zeros((len(texts), max(map(len, texts))), np.int32)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = text
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    dtype = jax.tree.leaves(params)[0].dtype
    how = dict(dtype=dtype, recur=in_order)
    h, _ = decoder.hidden(params, model, jnp.asarray(tokens), positions, dense(positions), None, **how)
    ends = np.array([len(text) - 1 for text in texts])
    return jnp.sum(h[np.arange(len(texts)), ends] * params["score"][:, 0], axis=-1)


def texts(found) -> list:
    """Prompt and rollout of every rollout, in order."""
    return [np.concatenate([r.prompt.tokens, r.tokens]) for group in found for r in group.rollouts]


def plain_gradient(found, given: AlgorithmConfig):
    """In float64, as TRL's reward_trainer.py writes it: over pairs whose two rollouts are scored."""
    found = [group for group in found if group.scored.all()]
    margins = np.array([group.prompt.extra.get("margin", 0.0) for group in found])
    with arms.precision(np.float64):

        def mean(params):
            chosen, rejected = plain_rewards(params, MODEL, texts(found)).reshape(-1, 2).T
            loss = -jnp.mean(jax.nn.log_sigmoid(chosen - rejected - margins))
            return loss + given.center_rewards_coefficient * jnp.mean((chosen + rejected) ** 2)

        return jax.device_get(jax.jit(jax.grad(mean))(jax.tree.map(jnp.asarray, weights(np.float64))))
