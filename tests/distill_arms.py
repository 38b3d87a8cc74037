"""On-policy distillation by two ways: the learner's packed programs, and plain code with one sequence per row.

The teacher has another shape than the policy. tests/test_trainer_teacher.py compares both.
"""

from __future__ import annotations

import gradient_arms as arms
import jax
import jax.numpy as jnp
import made_groups
import numpy as np
from dense_attend import dense

from jaxrl_post.algorithms import advantages
from jaxrl_post.config import AlgorithmConfig
from jaxrl_post.models import decoder
from jaxrl_post.parallel import mesh as meshes
from jaxrl_post.trainer.teacher import Teacher

MODEL = decoder.ModelConfig(
    vocab_size=40, used_vocab=32, embed=24, layers=1, heads=2, kv_heads=2, head_dim=8, ffw=32, max_length=64, tied=False
)
MOVED = 0.1  # of the teacher's weights, so that it is not near uniform
TEMPERATURE = 0.8
VOCAB = 32  # of the tokenizer; the teacher has more rows


def algorithm(estimator: str = "distill", **changes) -> AlgorithmConfig:
    given = dict(adv_estimator=estimator, clip_ratio_low=0.02, clip_ratio_high=0.03)
    return AlgorithmConfig(**(given | changes))


def weights(dtype):
    return made_groups.moved(made_groups.weights(9, dtype, MODEL), 4, MOVED)


def learner(dtype=np.float32, *, given: AlgorithmConfig | None = None, sizes=(1, 1, 1), **more):
    teacher = Teacher(MODEL, weights(dtype), meshes.make_mesh(*sizes))
    more = {"kind": arms.Uncommitted} | more
    return arms.learner(dtype, given=given or algorithm(), sizes=sizes, reference=False, teacher=teacher, **more)


def gradient(groups, dtype=np.float32, *, parts: int = 1, **more):
    """prepare at one policy, then accumulate at another: the divided gradient, on the host."""
    with arms.precision(dtype):
        return arms.gradient(groups, dtype, parts=parts, one=learner(dtype, **more))


# ---- the plain side


def plain_gains(groups, dtype):
    """tokens, mask, members, log-probs of the first policy, and log teacher - log policy, [n, T] each."""
    tokens, mask, members = made_groups.unpacked(groups)
    old, teacher = (
        made_groups.plain_scores(jax.tree.map(jnp.asarray, params), model, tokens, TEMPERATURE)[0]
        for params, model in ((made_groups.weights(0, dtype), made_groups.MODEL), (weights(dtype), MODEL))
    )
    return tokens, mask, members, old, teacher - old


def plain_gradient(groups, dtype=np.float64, *, given: AlgorithmConfig | None = None):
    """PPO's clipped loss at the second policy, every token with its own advantage; the mean over tokens."""
    a = given or algorithm()
    with arms.precision(dtype):
        tokens, mask, members, old, gains = plain_gains(groups, dtype)
        own = np.zeros(len(members))
        if a.adv_estimator != "distill":
            rewards = [advantages.grpo(g.rewards, g.scored, np.array([len(r) for r in g.rollouts])) for g in groups]
            own = np.array([rewards[g][i] for g, i in members])
        coefficient = 1.0 if a.adv_estimator == "distill" else a.opd_kl_coef
        total = jnp.asarray(own[:, None].astype(dtype)) + coefficient * gains
        policy = jax.tree.map(jnp.asarray, made_groups.moved(made_groups.weights(0, dtype), 1))

        def loss(params):
            logps, _ = made_groups.plain_scores(params, made_groups.MODEL, tokens, TEMPERATURE)
            ratio = jnp.exp(logps - old)
            held = jnp.clip(ratio, 1 - a.clip_ratio_low, 1 + a.clip_ratio_high)
            return jnp.sum(jnp.where(mask, -jnp.minimum(ratio * total, held * total), 0)) / mask.sum()

        return jax.device_get(jax.jit(jax.grad(loss))(policy))


def exact(beta: float) -> AlgorithmConfig:
    return AlgorithmConfig(adv_estimator="distill", loss_mode="gkd", gkd_beta=beta)


def plain_law(params, model, tokens):
    """Probabilities of the token after each, [n, T, V]."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    dtype = jax.tree.leaves(params)[0].dtype
    h, _ = decoder.hidden(params, model, jnp.asarray(tokens), positions, dense(positions), None, dtype=dtype)
    return jax.nn.softmax(decoder.logits(params, model, h)[..., :VOCAB] / TEMPERATURE)


def plain_divergence(p, q, beta: float):
    """TRL's generalised JSD of two laws [..., V], from probabilities."""
    if beta in (0.0, 1.0):
        a, b = (q, p) if beta == 0 else (p, q)
        return jnp.sum(a * jnp.log(a / b), axis=-1)
    m = beta * q + (1 - beta) * p
    return jnp.sum(beta * q * jnp.log(q / m) + (1 - beta) * p * jnp.log(p / m), axis=-1)


def plain_exact(groups, beta: float, dtype=np.float64):
    """The gradient of the mean divergence over tokens at the second policy, and the mean reverse KL there."""
    with arms.precision(dtype):
        tokens, mask, _ = made_groups.unpacked(groups)
        q = plain_law(jax.tree.map(jnp.asarray, weights(dtype)), MODEL, tokens)
        policy = jax.tree.map(jnp.asarray, made_groups.moved(made_groups.weights(0, dtype), 1))

        def mean(params, kind):
            found = plain_divergence(plain_law(params, made_groups.MODEL, tokens), q, kind)
            return jnp.sum(jnp.where(mask[:, 1:], found[:, :-1], 0)) / mask.sum()

        return jax.device_get((jax.jit(jax.grad(lambda params: mean(params, beta)))(policy), mean(policy, 1.0)))
