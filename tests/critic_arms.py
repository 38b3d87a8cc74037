"""PPO with a critic by two ways: the learner's packed programs, and plain code with one sequence per row.

The plain side has dense attention, GAE by its definition as a sum of discounted errors, and the papers' losses.
tests/test_trainer_critic.py compares both.
"""

from __future__ import annotations

import dataclasses

import gradient_arms as arms
import jax
import jax.numpy as jnp
import made_groups
import numpy as np
from dense_attend import dense

from jaxrl_post import config
from jaxrl_post.models import decoder
from jaxrl_post.parallel import mesh as meshes
from jaxrl_post.trainer.critic import Critic
from jaxrl_post.trainer.learner import Learner

ALGORITHM = config.AlgorithmConfig(
    adv_estimator="gae", gamma=0.97, lam=0.9, clip_ratio_low=0.02, clip_ratio_high=0.03, entropy_coef=0.1
)
CRITIC = config.CriticConfig(cliprange_value=0.05, loss_coef=0.3)
UNTIED = dataclasses.replace(made_groups.MODEL, tied=False)


def head(seed: int, dtype, model=made_groups.MODEL) -> dict:
    """A head whose values differ from token to token."""
    rng = np.random.default_rng(seed)
    return {"value": (0.3 * rng.standard_normal(model.embed)).astype(dtype), "bias": np.asarray(0.1, dtype)}


def weights(seed: int, dtype, trunk: str, model=made_groups.MODEL) -> dict:
    """The critic's whole tree; its trunk is another one than the policy's."""
    out = head(seed, dtype, model)
    if trunk == "own":
        made = made_groups.weights(5, dtype, model)
        out |= {"trunk": made_groups.moved({name: part for name, part in made.items() if name != "head"}, seed)}
    return out


def learner(
    dtype=np.float32,
    *,
    given=ALGORITHM,
    settings=CRITIC,
    optimizer=None,
    sizes=(1, 1, 1),
    model=made_groups.MODEL,
    steps=10,
    **more,
) -> Learner:
    """A learner whose critic has `weights(3, ...)` instead of a head of zeros."""
    optimizer = optimizer or config.OptimizerConfig()
    start, mesh = made_groups.weights(0, dtype, model), meshes.make_mesh(*sizes)
    critic = Critic(model, start, mesh, settings=settings, optimizer=optimizer, steps=steps)
    one = arms.learner(
        dtype,
        given=given,
        reference=given.needs_reference,
        optimizer=optimizer,
        sizes=sizes,
        model=model,
        steps=steps,
        critic=critic,
        **more,
    )
    put_critic(one, weights(3, dtype, settings.trunk, model))
    return one


def put_critic(one: Learner, tree: dict) -> None:
    """Replaces the critic's weights."""
    placed = meshes.put(tree, jax.tree.map(lambda x: x.sharding, one.state.params["critic"]))
    one.state = dataclasses.replace(one.state, params={**one.state.params, "critic": placed})


def gradients(groups, dtype=np.float32, *, parts: int = 1, trunk="own", model=made_groups.MODEL, **more):
    """prepare at some weights, accumulate at others: the divided gradients of policy and critic, on the host."""
    with arms.precision(dtype):
        settings = dataclasses.replace(more.pop("settings", CRITIC), trunk=trunk)
        one = learner(dtype, settings=settings, model=model, **more)
        one.prepare(groups)
        shift(one, dtype, model)
        put_critic(one, made_groups.moved(weights(3, dtype, trunk, model), 7))
        for part in np.array_split(np.arange(len(groups)), parts):
            one.accumulate([groups[g] for g in part])
        return jax.device_get((one.gradient(), one._critic.gradient()))


def shift(one: Learner, dtype, model) -> None:
    """Moves the policy as if a commit had happened."""
    one._old.settle(one.logprobs)
    one._old.committed = True
    policy = made_groups.moved(made_groups.weights(0, dtype, model), 1)
    placed = meshes.put(policy, jax.tree.map(lambda x: x.sharding, one.params))
    one.state = dataclasses.replace(one.state, params={**one.state.params, "policy": placed})


# ---- the plain side


def plain_gradients(
    groups, dtype=np.float32, *, trunk="own", given=ALGORITHM, settings=CRITIC, model=made_groups.MODEL
):
    """The same gradients, of one loss for each of the two trees."""
    with arms.precision(dtype):
        policy, critic = made_groups.weights(0, dtype, model), weights(3, dtype, trunk, model)
        tokens, mask, members = made_groups.unpacked(groups)
        before = np.asarray(plain_values(critic, policy, model, tokens), float)
        advantages, returns = plain_estimates(groups, before, mask, members, given)
        old, _ = made_groups.plain_scores(_arrays(policy), model, tokens, 0.8)
        wide = jax.tree.leaves(policy)[0].dtype
        a, g, v = (jnp.asarray(np.asarray(x, wide)) for x in (advantages, returns, before))
        count = mask.sum()

        def value_loss(critic, policy):
            now = plain_values(critic, policy, model, tokens)
            near = v + jnp.clip(now - v, -settings.cliprange_value, settings.cliprange_value)
            worse = jnp.maximum(jnp.square(now - g), jnp.square(near - g))
            return 0.5 * jnp.sum(jnp.where(mask, worse, 0)) / count

        def loss(policy, critic):
            logps, entropies = made_groups.plain_scores(policy, model, tokens, 0.8)
            low, high = given.clip_ratio_low, given.clip_ratio_high
            losses = made_groups.plain_policy_loss(given.loss_mode, logps, logps - old, mask, a, low, high)
            total = jnp.sum(jnp.where(mask, losses - given.entropy_coef * entropies, 0)) / count
            return total + (settings.loss_coef * value_loss(critic, policy) if trunk == "policy" else 0.0)

        now, later = made_groups.moved(policy, 1), made_groups.moved(critic, 7)
        of_policy = jax.jit(jax.grad(loss))(_arrays(now), _arrays(later))
        return jax.device_get((of_policy, jax.jit(jax.grad(value_loss))(_arrays(later), _arrays(now))))


def plain_values(critic: dict, policy, model, tokens):
    """The value before every token, [n, T]; 0 before the first."""
    trunk, shape = policy, model
    if "trunk" in critic:
        trunk, shape = critic["trunk"], dataclasses.replace(model, tied=True)
    tokens = jnp.asarray(tokens)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    dtype = jax.tree.leaves(trunk)[0].dtype
    h, _ = decoder.hidden(_arrays(trunk), shape, tokens, positions, dense(positions), None, dtype=dtype)
    found = jnp.sum(h * critic["value"], axis=-1) + critic["bias"]
    return jnp.concatenate([jnp.zeros_like(found[:, :1]), found[:, :-1]], axis=1)


def plain_estimates(groups, values, mask, members, given):
    """Whitened advantages and returns, [n, T], from the definition: A_t is the sum of (gamma lam)^k delta_{t+k}."""
    advantages, returns = np.zeros(mask.shape), np.zeros(mask.shape)
    for n, (g, i) in enumerate(members):
        at = np.flatnonzero(mask[n])
        if not at.size:
            continue
        turns = np.split(at, np.flatnonzero(np.diff(at) > 1) + 1)
        acts = turns if given.adv_estimator == "gae_turn" else [np.array([t]) for t in at]
        v = np.array([values[n, act[0]] for act in acts])
        rewards = np.zeros(len(acts))
        rewards[-1] = groups[g].rewards[i]
        delta = [r + given.gamma * after - mine for r, after, mine in zip(rewards, [*v[1:], 0.0], v, strict=True)]
        for t, act in enumerate(acts):
            value = sum((given.gamma * given.lam) ** k * error for k, error in enumerate(delta[t:]))
            advantages[n, act], returns[n, act] = value, value + v[t]
    seen = advantages[mask]
    white = (advantages - seen.mean()) / np.sqrt(np.sum((seen - seen.mean()) ** 2) / (seen.size - 1) + 1e-8)
    return np.where(mask, white, 0.0), returns


def _arrays(tree):
    return jax.tree.map(jnp.asarray, tree)
