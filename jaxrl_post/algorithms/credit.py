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

from jaxrl_post.algorithms import advantages, correction, distillation, gae, preferences, reward_model, token_credit
from jaxrl_post.algorithms.aggregation import AGGREGATIONS
from jaxrl_post.algorithms.role_baseline import RoleBaseline
from jaxrl_post.config import AlgorithmConfig
from jaxrl_post.types import Group, Rollout, RolloutId

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
class Measured:
    """What the learner computed of the rollouts beside log-probs, by rollout id: float[T] each.

    - values: the critic's, where the config has a critic.
    - norms: the squared norms of tokens' scores, where the advantage needs them.
    - weights: the corrections for the engine's log-probs, where the config has some.
    """

    values: LogProbs = field(default_factory=dict)
    norms: LogProbs = field(default_factory=dict)
    weights: LogProbs = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
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
) -> tuple[dict[RolloutId, Credit], Found]:
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
    penalties = [_penalties(group, algorithm, max_tokens) for group in groups]
    drift = {r.id: _kl(r, algorithm, old, reference) for group in groups for r in group.rollouts}
    rewards = [_shaped(group, penalty, drift, algorithm) for group, penalty in zip(groups, penalties, strict=True)]
    compared = _compared(groups, algorithm, old, reference)
    corrected, seen = _corrections(groups, algorithm, old)
    known = Measured(values=values or {}, norms=norms or {}, weights=corrected)
    estimated, returns = _advantages(groups, rewards, algorithm, greedy, known, compared, roles)
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
    return credits, Found(
        corrections=seen,
        kls=_kls(groups, algorithm, drift),
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


def describe(found: Sequence[Found], algorithm: AlgorithmConfig) -> dict[str, float]:
    """Returns the metrics of everything found since the round began.

    They cover the corrections, penalties for length, the KL in the reward, and the KL to a teacher. The KL is a mean of rollouts' means, as
    verl reports it.
    """
    corrections = [triple for piece in found for triple in piece.corrections]
    kls, penalties = [kl for piece in found for kl in piece.kls], [x for piece in found for x in piece.penalties]
    out = {}
    if corrections:
        told = correction.describe(*zip(*corrections, strict=True), algorithm.rollout_is_threshold)
        used = {"rollout_is": algorithm.rollout_is, "rollout_rs": algorithm.rollout_rs}
        out |= {name: value for name, value in told.items() if used[name.split("/")[1][:10]] != "none"}
    if kls:
        out |= {"actor/reward_kl_penalty": float(np.mean(kls)), "actor/reward_kl_penalty_coeff": algorithm.kl_coef}
    out |= distillation.describe([kl for piece in found for kl in piece.reverse_kls])
    compared = [pair for piece in found for pair in piece.compared]
    if algorithm.trains_reward_model:
        out |= reward_model.describe(compared)
    else:
        out |= preferences.describe(compared, algorithm.dpo_beta)
    if algorithm.overlong_buffer and penalties:
        out |= {
            "reward/overlong/mean": float(np.mean(penalties)),
            "reward/overlong/share": float(np.mean(np.array(penalties) < 0)),
        }
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


def _penalties(group: Group, algorithm: AlgorithmConfig, max_tokens: int) -> Float[np.ndarray, " G"]:
    return np.array([overlong(len(rollout), algorithm, max_tokens) for rollout in group.rollouts])


def _kl(rollout: Rollout, algorithm: AlgorithmConfig, old: LogProbs, reference: LogProbs) -> Float[np.ndarray, " T"]:
    """Returns k1 of each sampled token (verl's kl_penalty "kl"), or zeros where no KL is in the reward."""
    if not algorithm.use_kl_in_reward:
        return np.zeros(len(rollout))
    return np.where(rollout.sampled, old[rollout.id].astype(float) - reference[rollout.id], 0.0)


def _shaped(
    group: Group, penalties: Float[np.ndarray, " G"], drift: LogProbs, algorithm: AlgorithmConfig
) -> list[Float[np.ndarray, " _"]]:
    """Returns the rewards of every token of each rollout, with the penalties for length and KL."""
    return [
        _per_token(rollout, reward, algorithm.kl_coef * drift[rollout.id])
        for rollout, reward in zip(group.rollouts, group.rewards + penalties, strict=True)
    ]


def _per_token(rollout: Rollout, reward: float, penalty: np.ndarray) -> Float[np.ndarray, " T"]:
    """Returns the reward at the last sampled token, minus every token's own penalty."""
    values = -penalty
    if rollout.sampled.any():
        values[np.flatnonzero(rollout.sampled)[-1]] += reward
    return values


def _greedy_reward(group: Group, algorithm: AlgorithmConfig, max_tokens: int) -> float:
    """Returns the reward of ReMax's greedy rollout, with its penalty for length; 0 for any other estimator."""
    if algorithm.adv_estimator != "remax" or not group.scored[-1]:
        return 0.0
    return float(group.rewards[-1]) + overlong(len(group.rollouts[-1]), algorithm, max_tokens)


def _advantages(
    groups: Sequence[Group],
    rewards: Sequence[Sequence[np.ndarray]],
    algorithm: AlgorithmConfig,
    greedy: Sequence[float],
    known: Measured,
    compared: Sequence[preferences.Compared],
    roles: RoleBaseline | None,
) -> tuple[list[list[np.ndarray]], dict[RolloutId, np.ndarray]]:
    """Returns float[T] per group and rollout, and by rollout id the returns that a critic learns."""
    if compared:
        return [_of_a_pair(group, pair) for group, pair in zip(groups, compared, strict=True)], {}
    if algorithm.adv_estimator in WHOLE_ROUND:
        return _of_the_round(groups, rewards, algorithm, known.values)
    out, roles = [], roles or RoleBaseline(algorithm.rae_decay)
    for group, owned, baseline in zip(groups, rewards, greedy, strict=True):
        masks = [rollout.sampled & scored for rollout, scored in zip(group.rollouts, group.scored, strict=True)]
        if algorithm.adv_estimator == "remax":
            out.append(advantages.remax(owned, masks, baseline))
            continue
        if algorithm.adv_estimator == "rae":
            out.append(roles.estimate(owned, masks, group.prompt.source))
            continue
        if algorithm.adv_estimator == "optimal_token_baseline":
            norms = [known.norms[r.id] * known.weights.get(r.id, 1.0) ** 2 for r in group.rollouts]
            out.append(advantages.optimal_token_baseline(owned, masks, norms))
            continue
        estimate = advantages.ADVANTAGES[algorithm.adv_estimator]
        found = estimate(np.array([reward.sum() for reward in owned]), group.scored, _lengths(group, False))
        out.append([np.where(r.sampled, value, 0.0) for r, value in zip(group.rollouts, found, strict=True)])
    return out, {}


def _compared(
    groups: Sequence[Group], algorithm: AlgorithmConfig, old: LogProbs, reference: LogProbs
) -> list[preferences.Compared]:
    """Returns the comparison of every pair, or nothing in runs without preferences."""
    if algorithm.adv_estimator != "pairs":
        return []
    if algorithm.trains_reward_model:
        return [reward_model.compare(group, algorithm, [old[r.id] for r in group.rollouts]) for group in groups]
    sides = [[[logps[r.id] for r in group.rollouts] for logps in (old, reference)] for group in groups]
    return [preferences.compare(group, algorithm, *side) for group, side in zip(groups, sides, strict=True)]


def _of_a_pair(group: Group, pair: preferences.Compared) -> list[np.ndarray]:
    """Returns minus the slopes of the pair's loss, times 2: the loss is divided by rollouts, and a pair has two."""
    gains = -2 * pair.slopes * group.scored
    return [np.where(mask, gain, 0.0) for mask, gain in zip(pair.masks, gains, strict=True)]


def _of_the_round(
    groups: Sequence[Group], rewards: Sequence[Sequence[np.ndarray]], algorithm: AlgorithmConfig, values: LogProbs
) -> tuple[list[list[np.ndarray]], dict[RolloutId, np.ndarray]]:
    """Returns the same for an estimator of WHOLE_ROUND."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    masks = [r.sampled & scored for group in groups for r, scored in zip(group.rollouts, group.scored, strict=True)]
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
    """Returns the named components of a group's rewards. A group without a score has none, and zeros stand for them.

    Raises:
      ValueError: the reward has no such component.
    """
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
        for rollout, trained in zip(
            group.rollouts, token_credit.in_loss(group, algorithm.overlong_filtering), strict=True
        ):
            gap = (old[rollout.id].astype(float) - rollout.logprobs)[rollout.sampled]
            ratios = correction.importance(gap, algorithm.rollout_is, rollout.versions[rollout.sampled])
            weights = ratios
            if algorithm.rollout_is != "none":
                weights = correction.bounded(ratios, algorithm.rollout_is_threshold)
            kept = small.get(rollout.id)
            if kept is None:
                kept = correction.kept(gap, algorithm.rollout_rs, algorithm.rollout_rs_threshold)
            out[rollout.id] = np.zeros(len(rollout))
            out[rollout.id][rollout.sampled] = weights * kept
            seen += [(ratios, weights, kept)] if trained and gap.size else []
    return out, seen


def _kls(groups: Sequence[Group], algorithm: AlgorithmConfig, drift: LogProbs) -> list[float]:
    """Returns, for every scored rollout, the mean KL over its sampled tokens. Empty where no KL is in the reward."""
    if not algorithm.use_kl_in_reward:
        return []
    return [
        float(drift[r.id][r.sampled].mean())
        for group in groups
        for r, known in zip(group.rollouts, group.scored, strict=True)
        if known and r.sampled.any()
    ]
