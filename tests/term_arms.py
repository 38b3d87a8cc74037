"""The terms, rules and advantages of single papers by two ways: the learner's packed programs, and plain code.

The plain side has one sequence per row, dense attention, loops over tokens in the place of ranks of arrays, and float64.
tests/test_trainer_terms.py compares both. The loss is a mean over tokens.
"""

from __future__ import annotations

import dataclasses
import statistics

import gradient_arms as arms
import jax
import jax.numpy as jnp
import made_groups
import numpy as np
from dense_attend import dense

from jaxrl_post import config
from jaxrl_post.algorithms import advantages
from jaxrl_post.models import decoder

TEMPERATURE = 0.8  # of gradient_arms
NO_REFERENCE = dict(kl_loss_coef=0.0, entropy_coef=0.0)
CASES = {  # settings of the algorithm, each with bounds that many of the made-up tokens pass
    "dro": dict(loss_mode="dro", old_kl_coef=3.0),
    "prime_ipo": dict(loss_mode="prime_ipo", clip_ratio_low=4e-4, clip_ratio_high=8e-4, old_kl_coef=2.0),
    "clip_cov": dict(loss_mode="clip_cov", clip_cov_ratio=1.0, clip_cov_lb=0.05, clip_cov_ub=0.6),
    "kl_cov": dict(loss_mode="kl_cov", kl_cov_ratio=0.3, ppo_kl_coef=0.7),
    "high_entropy": dict(top_entropy_quantile=0.4),
    "opsm": dict(opsm_delta=1e-4),
    "positive_nll": dict(positive_nll_coef=0.3),
    "m2po": dict(rollout_rs="m2po", rollout_rs_threshold=(1.5,)),
    "k3_unbiased": dict(kl_loss_coef=0.5, use_bias_correction_kl=True),
    "k3_plus": dict(kl_loss_coef=0.5, kl_loss_type="k3+"),
    "abs": dict(kl_loss_coef=0.5, kl_loss_type="abs"),
    "gdpo": dict(adv_estimator="gdpo", gdpo_reward_keys=("right", "short"), gdpo_reward_weights=(1.0, 0.25)),
    "rae": dict(adv_estimator="rae", rae_decay=0.7),
    "optimal_token_baseline": dict(adv_estimator="optimal_token_baseline"),
}


def algorithm(**changes) -> config.AlgorithmConfig:
    """Narrow bounds, and no term beside the policy's loss."""
    return arms.algorithm(**(NO_REFERENCE | changes))


def groups() -> list:
    """Made-up groups with entropies, two sources, and two components of the reward."""
    rng, out = np.random.default_rng(11), []
    for g, group in enumerate(made_groups.groups()):
        prompt = dataclasses.replace(group.prompt, source=f"role {g % 2}")
        rollouts = tuple(
            dataclasses.replace(r, prompt=prompt, entropies=3 * rng.random(len(r))) for r in group.rollouts
        )
        right, short = rng.integers(0, 2, len(rollouts)), rng.random(len(rollouts))
        parts = {"right": right, "short": short}
        out.append(dataclasses.replace(group, prompt=prompt, rollouts=rollouts, components=parts))
    return out


def gradient(found, given):
    """The learner's, in float32."""
    return arms.gradient(found, given=given, reference=given.kl_loss_coef > 0)


def plain_gradient(found, given):
    """The same by plain code."""
    with arms.precision(np.float64):
        old = made_groups.weights(0, np.float64)
        policy, reference = (jax.tree.map(jnp.asarray, made_groups.moved(old, seed)) for seed in (1, 2))
        tokens, mask, members = made_groups.unpacked(found)
        before, ref = (made_groups.plain_scores(p, made_groups.MODEL, tokens, TEMPERATURE)[0] for p in (old, reference))
        gains = laid_out(_gains(found, given, old), members, found, mask.shape)
        facts = _facts(found, given, gains, mask, members, np.asarray(before))

        def loss(weights):
            logps, _ = made_groups.plain_scores(weights, made_groups.MODEL, tokens, TEMPERATURE)
            losses = _losses(logps, before, ref, mask, given, facts)
            return jnp.sum(jnp.where(mask, losses, 0)) / mask.sum()

        return jax.device_get(jax.jit(jax.grad(loss))(policy))


def laid_out(values, members, found, shape) -> np.ndarray:
    """[n, T] of vectors by group and rollout, each behind its prompt."""
    out = np.zeros(shape)
    for n, (g, i) in enumerate(members):
        start = found[g].rollouts[i].prompt.tokens.size
        out[n, start : start + len(values[g][i])] = values[g][i]
    return out


def _gains(found, given, old) -> list:
    """Advantages by group and rollout, float[T] each."""
    if given.adv_estimator == "gdpo":
        return _decoupled(found, given)
    if given.adv_estimator == "rae":
        return _of_roles(found, given)
    if given.adv_estimator == "optimal_token_baseline":
        return _baselined(found, old)
    out = []
    for group in found:
        made = advantages.grpo(group.rewards, group.scored, np.array([len(r) for r in group.rollouts]))
        out.append([np.full(len(r), value) for r, value in zip(group.rollouts, made, strict=True)])
    return out


def _decoupled(found, given) -> list:
    sums, seen = [], []
    for group in found:
        live = [i for i in range(len(group.rollouts)) if group.scored[i]]
        own = [0.0] * len(group.rollouts)
        for name, weight in zip(given.gdpo_reward_keys, given.gdpo_reward_weights, strict=True):
            values = [float(group.components[name][i]) for i in live]
            mean, deviation = statistics.fmean(values), statistics.stdev(values)
            for i, value in zip(live, values, strict=True):
                own[i] += weight * (value - mean) / (deviation + 1e-6)
        sums.append(own)
        seen += [own[i] for i in live for _ in range(int(group.rollouts[i].sampled.sum()))]
    mean, variance = statistics.fmean(seen), statistics.variance(seen)
    return [
        [
            np.full(len(r), (own - mean) / (variance + 1e-8) ** 0.5 * known)
            for r, own, known in zip(g.rollouts, owned, g.scored, strict=True)
        ]
        for g, owned in zip(found, sums, strict=True)
    ]


def _of_roles(found, given) -> list:
    means, out = {}, []
    for group in found:
        out.append([])
        for r, reward, known in zip(group.rollouts, group.rewards, group.scored, strict=True):
            mean = means.get(group.prompt.source, 0.0)
            out[-1].append(np.full(len(r), (float(reward) - mean) * known))
            if known:
                means[group.prompt.source] = given.rae_decay * mean + (1 - given.rae_decay) * float(reward)
    return out


def _baselined(found, old) -> list:
    """The optimal baseline of every sampled token: norms are those of one-hot minus law, taken entry by entry."""
    tokens, _, members = made_groups.unpacked(found)
    laws = np.asarray(_laws(old, tokens))
    energies = [[[] for _ in group.rollouts] for group in found]
    for n, (g, i) in enumerate(members):
        r, total = found[g].rollouts[i], 0.0
        for t in np.flatnonzero(r.sampled):
            score = -laws[n, r.prompt.tokens.size + t - 1]
            score[r.tokens[t]] += 1
            total += float(score @ score)
            energies[g][i].append(total)
    out = [[np.zeros(len(r)) for r in group.rollouts] for group in found]
    for group, own, made in zip(found, energies, out, strict=True):
        for k in range(max(map(len, own))):
            there = [i for i in range(len(own)) if group.scored[i] and len(own[i]) > k]
            whole = sum(own[i][k] for i in there) + 1e-8
            mean = sum(own[i][k] * float(group.rewards[i]) for i in there) / whole
            for i in there:
                made[i][np.flatnonzero(group.rollouts[i].sampled)[k]] = float(group.rewards[i]) - mean
    return out


@jax.jit
def _laws(params, tokens):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    h, _ = decoder.hidden(params, made_groups.MODEL, tokens, positions, dense(positions), None, dtype=np.float64)
    return jax.nn.softmax(decoder.logits(params, made_groups.MODEL, h) / TEMPERATURE)


def _facts(found, given, gains, mask, members, before) -> dict:
    """Advantages after every rule, and 1 for the tokens that a rule or term is of: [n, T] each."""
    logps, entropies = (
        laid_out([[getattr(r, name) for r in g.rollouts] for g in found], members, found, mask.shape)
        for name in ("logprobs", "entropies")
    )
    at = [tuple(place) for place in np.argwhere(mask)]
    mean_gain, mean_logp = statistics.fmean(gains[p] for p in at), statistics.fmean(logps[p] for p in at)
    covariances = sorted(((gains[p] - mean_gain) * (logps[p] - mean_logp), p) for p in at)
    gains, held, kept = gains.copy(), np.zeros(mask.shape), np.ones(mask.shape)
    if given.loss_mode == "clip_cov":
        for covariance, place in covariances:
            gains[place] *= not given.clip_cov_lb < covariance < given.clip_cov_ub
    if given.loss_mode == "kl_cov":
        for _, place in covariances[-int(given.kl_cov_ratio * len(at)) :]:
            held[place] = 1
    if given.top_entropy_quantile < 1:
        least = np.quantile([entropies[p] for p in at], 1 - given.top_entropy_quantile)
        gains *= entropies >= least
    if given.rollout_rs == "m2po":
        left = sorted((float(before[p] - logps[p]) ** 2, p) for p in at)
        while statistics.fmean(square for square, _ in left) > given.rollout_rs_threshold[0]:
            kept[left.pop()[1]] = 0
    positives = np.array([[float(found[g].rewards[i] > 0)] for g, i in members])
    return dict(gains=gains, held=held, kept=kept, positives=positives)


def _losses(logps, before, ref, mask, given, facts):
    a, d = facts["gains"], logps - before
    r, low, high = jnp.exp(d), given.clip_ratio_low, given.clip_ratio_high
    if given.loss_mode == "dro":
        out = -(a * logps - given.old_kl_coef / 2 * d * d)
    elif given.loss_mode == "prime_ipo":
        moved = jnp.exp(jax.lax.stop_gradient(logps)) - jnp.exp(before)
        inside = (moved <= high) & (moved >= -low)
        out = -a * jax.lax.stop_gradient(r) * logps * inside + given.old_kl_coef / 2 * d * d
    elif given.loss_mode == "kl_cov":
        out = -a * r + given.ppo_kl_coef * facts["held"] * jnp.abs(d)
    else:
        out = -jnp.minimum(r * a, jnp.clip(r, 1 - low, 1 + high) * a)
    if given.opsm_delta > 0:
        drift = jnp.sum(jnp.where(mask, -d, 0), axis=1, keepdims=True) / jnp.maximum(mask.sum(1, keepdims=True), 1)
        out = out * ~((a < 0) & (drift > given.opsm_delta))
    if given.kl_loss_coef > 0:
        gap = ref - logps
        kl = {"abs": jnp.abs(gap), "k3+": gap**2 / 2}.get(given.kl_loss_type, jnp.exp(gap) - 1 - gap)  # by their slopes
        out = out + given.kl_loss_coef * kl * (r if given.use_bias_correction_kl else 1.0)
    return facts["kept"] * (out - given.positive_nll_coef * facts["positives"] * logps)
