"""What each rollout of a round contributes to the loss: shaped rewards, advantages, weights. Host code.

Invariant: everything follows from the groups, their old, reference and teacher's log-probs and the config. It is computed once,
at the start of the round, and stays the same over all optimizer steps of the round.

The order is:
1. the reward
2. the penalty for length
3. the penalty for KL, token by token
4. the advantage, plus what a teacher adds to it
5. which rollouts are masked
6. the weight of a token
7. the correction for the engine's log-probs
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from jaxtyping import Float

from jaxrl_post.algorithms import advantages, correction, distillation, gae, preferences, token_credit
from jaxrl_post.algorithms.advantages import RoleBaseline
from jaxrl_post.algorithms.aggregation import AGGREGATIONS
from jaxrl_post.config import AlgorithmConfig
from jaxrl_post.ring.types import Group, Rollout, RolloutId

LogProbs = Mapping[RolloutId, np.ndarray]
WHOLE_ROUND = {*advantages.WHOLE_ROUND, *gae.LEVELS, "gdpo"}  # estimators that see all rollouts of a round at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    """The contribution of one rollout of T tokens.

    - advantages float[T]: 0 for tokens that were not sampled.
    - weight: of each sampled token in the sum of the loss, times the prompt's own weight; 0 for a masked rollout.
    - count: what the rollout adds to the divisor of the sum.
    - correction float[T]: a further weight of each token in the policy loss, or None where the run has no correction.
    - reward: with every penalty.
    - values, returns float[T]: the critic's at the start of the round, and what it learns; None without a critic.
    - marks: by name of a leaf of the batch, 1 for tokens that a further term of the loss is of (trainer/packing.py).
    """

    advantages: np.ndarray
    weight: float
    count: int
    correction: np.ndarray | None
    reward: float
    values: np.ndarray | None = None
    returns: np.ndarray | None = None
    marks: Mapping[str, np.ndarray | float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class CreditStats:
    """Facts about some groups, from which `describe` makes metrics.

    - corrections: (ratios, weights, kept) of every corrected rollout in the loss.
    - kls: mean KL of every scored rollout, in runs that have the KL in the reward.
    - penalties: for length, of scored rollouts.
    - compared: every pair, in runs on preferences.
    - reverse_kls: from the teacher, of every scored rollout, in runs whose advantage has one.
    """

    corrections: list[tuple[np.ndarray, np.ndarray, np.ndarray]]
    kls: list[float]
    penalties: np.ndarray
    compared: Sequence[preferences.Compared] = ()
    reverse_kls: Sequence[float] = ()


def assign(
    groups: Sequence[Group],
    algorithm: AlgorithmConfig,
    *,
    max_tokens: int,
    old: LogProbs,
    reference: LogProbs,
    values: LogProbs | None = None,
    norms: LogProbs | None = None,
    roles: RoleBaseline | None = None,
    teacher: LogProbs | None = None,
) -> tuple[dict[RolloutId, Credit], CreditStats]:
    """Returns the credit of every rollout that `trained` leaves, and the facts for `describe`.

    Args:
      groups: whole groups. Where `needs_whole_round` says so, all groups of the round.
      max_tokens: the longest rollout that the run allows.
      old, reference, teacher: log-probs over the rollout by rollout id, where the config needs them.
      values, norms: the critic's, and the squared norms of tokens' scores, by rollout id, where the config needs them.
      roles: the baselines of roles, which move. None: each begins at 0.
    """
    greedy = [_greedy_reward(group, algorithm, max_tokens) for group in groups]
    groups = trained(groups, algorithm)
    penalties = [np.array([overlong(len(r), algorithm, max_tokens) for r in group.rollouts]) for group in groups]
    drift = _drift(groups, algorithm, old, reference)
    rewards = [_shaped(group, penalty, drift, algorithm) for group, penalty in zip(groups, penalties, strict=True)]
    pairs = algorithm.adv_estimator == "pairs"
    compared = preferences.compared(groups, algorithm, old, reference) if pairs else []
    corrected, seen = _corrections(groups, algorithm, old)
    returns: LogProbs = {}
    if compared:
        estimated = [_of_a_pair(group, pair) for group, pair in zip(groups, compared, strict=True)]
    elif algorithm.adv_estimator in WHOLE_ROUND:
        estimated, returns = _of_the_round(groups, rewards, algorithm, values or {})
    else:
        roles = roles or RoleBaseline(algorithm.rae_decay)
        known = zip(groups, rewards, greedy, strict=True)
        estimated = [_of_a_group(*one, algorithm, roles, norms or {}, corrected) for one in known]
    estimated, apart = distillation.taught(estimated, groups, algorithm, old, teacher or {})
    (estimated, marks), credits = token_credit.marked(groups, estimated, algorithm, corrected), {}
    for group, made, owned in zip(groups, estimated, rewards, strict=True):
        lengths = _lengths(group, algorithm.overlong_filtering)
        weights, counts = AGGREGATIONS[algorithm.loss_agg_mode](lengths, max_tokens)
        for i, rollout in enumerate(group.rollouts):
            credits[rollout.id] = Credit(
                advantages=made[i],
                weight=float(weights[i]) * group.prompt.weight if lengths[i] else 0.0,
                count=int(counts[i]),
                correction=corrected.get(rollout.id),
                reward=float(owned[i].sum()),
                values=(values or {}).get(rollout.id),
                returns=returns.get(rollout.id),
                marks=marks[rollout.id],
            )
    return credits, CreditStats(
        corrections=seen,
        kls=distillation.token_means(groups, drift) if algorithm.use_kl_in_reward else [],
        penalties=np.concatenate([penalty[group.scored] for group, penalty in zip(groups, penalties, strict=True)]),
        compared=[pair for group, pair in zip(groups, compared, strict=False) if group.scored.all()],
        reverse_kls=apart,
    )


def needs_whole_round(algorithm: AlgorithmConfig) -> bool:
    """Returns whether a statistic of all rollouts of a round decides on each of them."""
    ranks = token_credit.ranks_tokens(algorithm) or algorithm.rollout_rs == "m2po"
    return ranks or algorithm.adv_estimator in WHOLE_ROUND


def trained(groups: Sequence[Group], algorithm: AlgorithmConfig) -> Sequence[Group]:
    """Returns the groups without rollouts that only serve as a baseline: ReMax's greedy one, the last of its group.

    Where the baseline has no score, its group is unscored as a whole. So is a pair of which one has no score.
    """
    if algorithm.adv_estimator == "pairs":
        return [replace(group, scored=np.full_like(group.scored, group.scored.all())) for group in groups]
    if algorithm.adv_estimator != "remax":
        return groups
    return [
        replace(
            group,
            rollouts=group.rollouts[:-1],
            rewards=group.rewards[:-1],
            scored=group.scored[:-1] & group.scored[-1],
            components={name: values[:-1] for name, values in group.components.items()},
        )
        for group in groups
    ]


def describe(found: Sequence[CreditStats], algorithm: AlgorithmConfig) -> dict[str, float]:
    """Returns the metrics of everything found since the round began. A KL is a mean of rollouts' means, as verl reports it."""
    corrections = [triple for piece in found for triple in piece.corrections]
    kls, penalties = [kl for piece in found for kl in piece.kls], [x for piece in found for x in piece.penalties]
    out = {}
    if corrections:
        told = correction.describe(*zip(*corrections, strict=True), algorithm.rollout_is_threshold)
        used = {"rollout_is": algorithm.rollout_is, "rollout_rs": algorithm.rollout_rs}
        out |= {name: value for name, value in told.items() if used[name.split("/")[1][:10]] != "none"}
    if kls:
        out |= {"actor/reward_kl_penalty": float(np.mean(kls)), "actor/reward_kl_penalty_coeff": algorithm.kl_coef}
    if reverse_kls := [kl for piece in found for kl in piece.reverse_kls]:
        out[distillation.REVERSE_KL] = float(np.mean(reverse_kls))
    compared = [pair for piece in found for pair in piece.compared]
    if compared:
        out |= preferences.describe(compared, algorithm)
    if algorithm.overlong_buffer and penalties:
        share = float(np.mean(np.array(penalties) < 0))
        out |= {"reward/overlong/mean": float(np.mean(penalties)), "reward/overlong/share": share}
    return out


def spreads(seen: Sequence[tuple[Rollout, Credit]]) -> dict[str, float]:
    """Returns mean, max and min of advantages and rewards of scored rollouts, under verl's names.

    With a critic, also those of its values and returns over sampled tokens, and critic/vf_explained_var.
    """
    if not seen:
        return {}

    def joined(name: str) -> np.ndarray:
        return np.concatenate([getattr(credit, name)[rollout.sampled] for rollout, credit in seen]).astype(float)

    out = _spread("critic/advantages", joined("advantages"))
    out |= _spread("critic/rewards", np.array([credit.reward for _, credit in seen]))
    if seen[0][1].returns is None:
        return out
    values, returns = joined("values"), joined("returns")
    out |= _spread("critic/values", values) | _spread("critic/returns", returns)
    return out | {"critic/vf_explained_var": gae.explained_variance(values, returns)}


def _spread(name: str, values: np.ndarray) -> dict[str, float]:
    """Returns verl's three statistics (mean, max, min), or an empty dict for no values."""
    found = {"mean": values.mean(), "max": values.max(), "min": values.min()} if values.size else {}
    return {f"{name}/{statistic}": float(value) for statistic, value in found.items()}


def overlong(tokens: int, algorithm: AlgorithmConfig, max_tokens: int) -> float:
    """Returns DAPO's soft punishment (arXiv 2503.14476, equation 13), times overlong_penalty.

    It is 0 up to max_tokens - buffer. From there it falls linearly to -overlong_penalty at max_tokens. A buffer of 0
    always gives 0.
    """
    over = tokens - (max_tokens - algorithm.overlong_buffer)
    if over <= 0 or algorithm.overlong_buffer == 0:
        return 0.0
    return -over / algorithm.overlong_buffer * algorithm.overlong_penalty


def _drift(groups: Sequence[Group], algorithm: AlgorithmConfig, old: LogProbs, reference: LogProbs) -> LogProbs:
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    if not algorithm.use_kl_in_reward:
        return {r.id: np.zeros(len(r)) for r in rollouts}
    return {r.id: np.where(r.sampled, old[r.id].astype(float) - reference[r.id], 0.0) for r in rollouts}


def _shaped(
    group: Group, penalties: Float[np.ndarray, " G"], drift: LogProbs, algorithm: AlgorithmConfig
) -> list[np.ndarray]:
    """Returns the rewards of every token of each rollout: every token's own penalty, and the reward at the last sampled one."""
    out = []
    for rollout, reward in zip(group.rollouts, group.rewards + penalties, strict=True):
        penalty = algorithm.kl_coef * drift[rollout.id]
        out.append(-penalty)
        if rollout.sampled.any():
            out[-1][np.flatnonzero(rollout.sampled)[-1]] += reward
    return out


def _greedy_reward(group: Group, algorithm: AlgorithmConfig, max_tokens: int) -> float:
    """Returns the reward of ReMax's greedy rollout, with its penalty for length; 0 for any other estimator."""
    if algorithm.adv_estimator != "remax" or not group.scored[-1]:
        return 0.0
    return float(group.rewards[-1]) + overlong(len(group.rollouts[-1]), algorithm, max_tokens)


def _of_a_group(
    group: Group,
    rewards: Sequence[np.ndarray],
    greedy: float,
    algorithm: AlgorithmConfig,
    roles: RoleBaseline,
    norms: LogProbs,
    corrected: LogProbs,
) -> list[np.ndarray]:
    """Returns float[T] for each rollout, by an estimator that needs one group alone."""
    masks = [rollout.sampled & scored for rollout, scored in zip(group.rollouts, group.scored, strict=True)]
    if algorithm.adv_estimator == "remax":
        return advantages.remax(rewards, masks, greedy)
    if algorithm.adv_estimator == "rae":
        return roles.estimate(rewards, masks, group.prompt.source)
    if algorithm.adv_estimator == "optimal_token_baseline":
        weighed = [norms[r.id] * corrected.get(r.id, 1.0) ** 2 for r in group.rollouts]
        return advantages.optimal_token_baseline(rewards, masks, weighed)
    estimate = advantages.ADVANTAGES[algorithm.adv_estimator]
    found = estimate(np.array([reward.sum() for reward in rewards]), group.scored, _lengths(group, False))
    return [np.where(r.sampled, value, 0.0) for r, value in zip(group.rollouts, found, strict=True)]


def _of_a_pair(group: Group, pair: preferences.Compared) -> list[np.ndarray]:
    """Returns minus the slopes of the pair's loss, times 2: the loss is divided by rollouts, and a pair has two."""
    gains = -2 * pair.slopes * group.scored
    return [np.where(mask, gain, 0.0) for mask, gain in zip(pair.masks, gains, strict=True)]


def _of_the_round(
    groups: Sequence[Group], rewards: Sequence[Sequence[np.ndarray]], algorithm: AlgorithmConfig, values: LogProbs
) -> tuple[list[list[np.ndarray]], dict[RolloutId, np.ndarray]]:
    """Returns float[T] per group and rollout, by an estimator of WHOLE_ROUND, and by rollout id what a critic learns."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    masks = [r.sampled & scored for r, scored in token_credit.with_scored(groups)]
    flat = [reward for owned in rewards for reward in owned]
    returns: dict[RolloutId, np.ndarray] = {}
    if algorithm.adv_estimator in gae.LEVELS:
        found, learned = gae.estimate(
            algorithm.adv_estimator,
            flat,
            [values[rollout.id] for rollout in rollouts],
            masks,
            algorithm.gamma,
            algorithm.lam,
            lam_value=None if algorithm.lam_value < 0 else algorithm.lam_value,
            alpha=algorithm.lam_alpha,
        )
        returns = {rollout.id: one for rollout, one in zip(rollouts, learned, strict=True)}
    elif algorithm.adv_estimator == "gdpo":
        components = [_components(group, algorithm.gdpo_reward_keys) for group in groups]
        weights = np.array(algorithm.gdpo_reward_weights or [1.0] * len(algorithm.gdpo_reward_keys))
        found = advantages.gdpo(components, [group.scored for group in groups], masks, weights)
    else:
        owners = np.repeat(np.arange(len(groups)), [len(group.rollouts) for group in groups])
        found = advantages.WHOLE_ROUND[algorithm.adv_estimator](flat, masks, owners, algorithm.gamma)
    each = iter(found)
    return [[next(each) for _ in group.rollouts] for group in groups], returns


def _components(group: Group, names: Sequence[str]) -> Float[np.ndarray, "K G"]:
    """Returns the named components of a group's rewards, and zeros for a group without a score. Refuses one that is not there."""
    if not group.scored.any():
        return np.zeros((len(names), len(group.rollouts)))
    for name in names:
        if name not in group.components:
            raise ValueError(
                f"algorithm.gdpo_reward_keys: the reward of prompt {group.prompt.id!r} has no component {name!r}; it has "
                f"{', '.join(sorted(group.components)) or 'none'}"
            )
    return np.array([group.components[name] for name in names])


def _lengths(group: Group, filtering: bool) -> np.ndarray:
    """Returns how many tokens of each rollout are trained on."""
    return np.array([int(r.sampled.sum()) for r in group.rollouts]) * token_credit.in_loss(group, filtering)


def _corrections(groups: Sequence[Group], algorithm: AlgorithmConfig, old: LogProbs) -> tuple[LogProbs, list[tuple]]:
    """Returns float[T] by rollout id, and (ratios, weights, kept) of rollouts that are trained on.

    Both are empty where the config corrects nothing.
    """
    if not algorithm.corrects_rollouts:
        return {}, []
    out, seen, small = {}, [], token_credit.small_moment(groups, algorithm, old)
    for group in groups:
        in_loss = token_credit.in_loss(group, algorithm.overlong_filtering)
        for rollout, trained in zip(group.rollouts, in_loss, strict=True):
            gap = (old[rollout.id].astype(float) - rollout.logprobs)[rollout.sampled]
            ratios = correction.importance(gap, algorithm.rollout_is, rollout.versions[rollout.sampled])
            free = algorithm.rollout_is == "none"
            weights = ratios if free else correction.bounded(ratios, algorithm.rollout_is_threshold)
            kept = small.get(rollout.id)
            if kept is None:
                kept = correction.kept(gap, algorithm.rollout_rs, algorithm.rollout_rs_threshold)
            out[rollout.id] = np.zeros(len(rollout))
            out[rollout.id][rollout.sampled] = weights * kept
            seen += [(ratios, weights, kept)] if trained and gap.size else []
    return out, seen
