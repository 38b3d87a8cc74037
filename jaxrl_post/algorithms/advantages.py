"""From rewards to advantages. Host code: numpy in, numpy out, float64 inside.

There are two kinds of functions:
- ADVANTAGES: a function of one group. It gives one advantage per rollout.
- WHOLE_ROUND: a function of all rollouts of a round, for advantages that are whitened over the batch. It gives one
  advantage per token. It cannot be used where groups are trained on as they become complete.

Where `rewards` and `masks` have one vector per rollout, the mask of an unscored rollout is False everywhere.

Invariant: an unscored rollout is left out of every statistic and gets 0. Rewards that are not finite raise ValueError.
PARITY.md names the source of each convention.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Bool, Float, Int

Rewards = Float[np.ndarray, " G"]  # of a group's rollouts
Scored = Bool[np.ndarray, " G"]
Lengths = Int[np.ndarray, " G"]
Vector = Float[np.ndarray, " _"]  # of a rollout's tokens
Vectors = Sequence[Vector]
Masks = Sequence[Bool[np.ndarray, " _"]]
Owners = Int[np.ndarray, " n"]  # the index of each rollout's group

EPSILON = 1e-6  # added to the standard deviation, as verl does (TRL 1e-4, OpenRLHF 1e-9)
VARIANCE_EPSILON = 1e-8  # added to the variance when whitening, as verl does


def grpo(rewards: Rewards, scored: Scored, lengths: Lengths) -> Rewards:
    """Returns (R_i - mean) / (std + 1e-6), std with n-1 (arXiv 2402.03300, section 4.1.2; constants as verl).

    A group with fewer than two scored rollouts gets 0. verl passes on the raw reward there.
    """
    values = _scored(rewards, scored)
    if values.size < 2:
        return np.zeros(rewards.shape)
    return np.where(scored, (rewards.astype(float) - values.mean()) / (values.std(ddof=1) + EPSILON), 0.0)


def dr_grpo(rewards: Rewards, scored: Scored, lengths: Lengths) -> Rewards:
    """Returns R_i - mean (arXiv 2503.20783, section 3.1). Without a division, easy and hard prompts weigh the same."""
    values = _scored(rewards, scored)
    if values.size < 2:
        return np.zeros(rewards.shape)
    return np.where(scored, rewards.astype(float) - values.mean(), 0.0)


def rloo(rewards: Rewards, scored: Scored, lengths: Lengths) -> Rewards:
    """Returns R_i - mean of the other rollouts = n/(n-1) (R_i - mean) over the n scored rollouts (arXiv 2402.14740)."""
    n = int(scored.sum())
    return dr_grpo(rewards, scored, lengths) * (n / (n - 1) if n > 1 else 0.0)


def opo(rewards: Rewards, scored: Scored, lengths: Lengths) -> Rewards:
    """Returns R_i - sum(T_j R_j) / sum(T_j) (OPO, arXiv 2505.23585; as verl).

    T_j is the number of sampled tokens of rollout j. Fewer than two scored rollouts give 0.
    """
    values = _scored(rewards, scored)
    if values.size < 2:
        return np.zeros(rewards.shape)
    baseline = np.sum(values * lengths[scored]) / max(int(lengths[scored].sum()), 1)
    return np.where(scored, rewards.astype(float) - baseline, 0.0)


def maxrl(rewards: Rewards, scored: Scored, lengths: Lengths) -> Rewards:
    """Returns (R_i - mean) / (mean + 1e-6) (arXiv 2602.02710; constants as SkyRL). Rarer success weighs more.

    A group without success gets 0.

    Raises:
      ValueError: a reward is negative. The mean stands for the rate of success.
    """
    values = _scored(rewards, scored)
    if np.any(values < 0):
        raise ValueError(
            f"algorithm.adv_estimator='maxrl' divides by the rate of success and needs rewards of at "
            f"least 0, got {values.min()}; the nearest estimator without that need is 'grpo'"
        )
    return dr_grpo(rewards, scored, lengths) / (values.mean() + EPSILON if values.size else 1.0)


def grpo_passk(rewards: Rewards, scored: Scored, lengths: Lengths) -> Rewards:
    """Returns (best - second best) / (std + 1e-6) for the best rollout, 0 for all others (arXiv 2503.19595; as verl).

    std has n-1. Of equal ones the first is the best, and gets 0. Fewer than two scored rollouts give 0.
    """
    values = _scored(rewards, scored)
    out = np.zeros(rewards.shape)
    if values.size >= 2:
        second, best = np.sort(values)[-2:]
        out[np.flatnonzero(scored)[np.argmax(values)]] = (best - second) / (values.std(ddof=1) + EPSILON)
    return out


def ones(rewards: Rewards, scored: Scored, lengths: Lengths) -> Rewards:
    """Returns 1 for every scored rollout. In supervised training every demonstration counts alike."""
    _scored(rewards, scored)
    return scored.astype(float)


def distill(rewards: Rewards, scored: Scored, lengths: Lengths) -> Rewards:
    """Returns 0. Nothing but the teacher speaks for a token (distillation.py)."""
    _scored(rewards, scored)
    return np.zeros(rewards.shape)


ADVANTAGES = {f.__name__: f for f in (grpo, dr_grpo, rloo, opo, maxrl, grpo_passk, ones, distill)}


def remax(rewards: Vectors, masks: Masks, baseline: float) -> list[Vector]:
    """Returns the return from each token on, minus the greedy rollout's reward (ReMax, arXiv 2310.10505; as verl).

    `baseline`: the reward of the group's greedy rollout.
    """
    return [
        np.where(mask, _returns(reward, mask, 1.0) - baseline, 0.0) for reward, mask in zip(rewards, masks, strict=True)
    ]


def reinforce_plus_plus(rewards: Vectors, masks: Masks, groups: Owners, gamma: float) -> list[Vector]:
    """Returns whiten(G_t), G_t = r_t + gamma G_{t+1}, over all masked tokens of the round.

    The source is REINFORCE++ (arXiv 2501.03262), as in verl. Tokens outside the mask (observed, not sampled) pass the
    return on undiscounted. verl sets the return to 0 there.
    """
    return whiten([_returns(reward, mask, gamma) for reward, mask in zip(rewards, masks, strict=True)], masks)


def reinforce_plus_plus_baseline(rewards: Vectors, masks: Masks, groups: Owners, gamma: float) -> list[Vector]:
    """Returns whiten(R_i - mean of its group) over all masked tokens of the round (arXiv 2501.03262; as verl).

    R_i is the sum of the rollout's rewards. gamma is not read. A group with one scored rollout gets 0 before
    whitening. verl takes a mean of 0 there.
    """
    _, centred, _ = _centred(rewards, masks, groups)
    return whiten([np.full(mask.shape, value) for value, mask in zip(centred, masks, strict=True)], masks)


def lite_ppo(rewards: Vectors, masks: Masks, groups: Owners, gamma: float) -> list[Vector]:
    """Returns (R_i - mean of its group) / (std of the round + 1e-6), std with n-1 (LitePPO, arXiv 2508.08221).

    TRL calls it scale_rewards="batch". The std is of all rewards, not of their differences to the mean. gamma is not
    read.
    """
    sums, centred, live = _centred(rewards, masks, groups)
    scale = sums[live].std(ddof=1) + EPSILON if live.sum() > 1 else 1.0
    return [np.where(mask, value / scale, 0.0) for value, mask in zip(centred, masks, strict=True)]


def gpg(rewards: Vectors, masks: Masks, groups: Owners, gamma: float) -> list[Vector]:
    """Returns a (R_i - mean of its group), a = rollouts / rollouts with R != 0 (GPG, arXiv 2504.02546; as verl).

    a makes up for groups that have no gradient. It is of the whole round. gamma is not read.
    """
    sums, centred, live = _centred(rewards, masks, groups)
    scale = live.sum() / max(int(np.count_nonzero(sums[live])), 1)
    return [np.where(mask, value * scale, 0.0) for value, mask in zip(centred, masks, strict=True)]


def _centred(rewards: Vectors, masks: Masks, groups: Owners) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the sum of each rollout's rewards, that minus its group's mean, and which rollouts count at all."""
    live = np.array([bool(mask.any()) for mask in masks])
    sums = np.array([finite(reward, mask).sum() for reward, mask in zip(rewards, masks, strict=True)])
    centred = np.zeros(len(masks))
    for group in np.unique(groups[live]):
        members = live & (groups == group)
        centred[members] = sums[members] - sums[members].mean()
    return sums, centred, live


WHOLE_ROUND = {f.__name__: f for f in (reinforce_plus_plus, reinforce_plus_plus_baseline, lite_ppo, gpg)}


def gdpo(
    components: Sequence[Float[np.ndarray, "K G"]],
    scored: Sequence[Bool[np.ndarray, " G"]],
    masks: Masks,
    weights: Float[np.ndarray, " K"],
) -> list[Vector]:
    """Returns whiten(sum_k w_k z_k), z_k the advantage grpo by component k alone (GDPO, arXiv 2601.05242; as verl).

    Each component is normalised within its group. So a component of small variance counts as much as any other. The sum is
    whitened over all masked tokens of the round.

    `components`, `scored`: one entry per group. `masks`: one vector per rollout of all groups, in order.
    """
    sums = [
        sum(w * grpo(row, known, np.zeros(known.shape, int)) for w, row in zip(weights, rows, strict=True))
        for rows, known in zip(components, scored, strict=True)
    ]
    each = np.concatenate(sums) if sums else np.zeros(0)
    return whiten([np.full(mask.shape, value) for value, mask in zip(each, masks, strict=True)], masks)


def optimal_token_baseline(rewards: Vectors, masks: Masks, norms: Vectors) -> list[Vector]:
    """Returns G_t - b_t, b_t = sum_i G_it W_it / sum_i W_it over the group, W_t = sum of the norms up to t (OTB, as verl).

    t counts sampled tokens, so observed ones do not shift a conversation against its group (verl's
    tir_optimal_token_baseline). The tail of the longest rollout is compared with itself alone, and gets 0. Fewer than two
    scored rollouts give 0.

    Args:
      rewards, masks, norms: of the rollouts of a group. A norm is the squared norm of the token's score, times the square of
        its weight where the engine is corrected.
    """
    live = [bool(mask.any()) for mask in masks]
    if sum(live) < 2:
        return [np.zeros(mask.shape) for mask in masks]
    returns = [_returns(reward, mask, 1.0)[mask] for reward, mask in zip(rewards, masks, strict=True)]
    weighed, total = np.zeros(max(map(len, returns))), np.zeros(max(map(len, returns)))
    for gain, norm, mask in zip(returns, norms, masks, strict=True):
        energy = np.cumsum(norm[mask].astype(float))
        weighed[: gain.size] += gain * energy
        total[: gain.size] += energy
    baseline, out = weighed / (total + VARIANCE_EPSILON), []
    for gain, mask in zip(returns, masks, strict=True):
        out.append(np.zeros(mask.shape))
        out[-1][mask] = gain - baseline[: gain.size]
    return out


def whiten(values: Vectors, masks: Masks) -> list[Vector]:
    """Returns (x - mean) / sqrt(var + 1e-8) over every masked token of all vectors, var with n-1 (as verl).

    Tokens outside the mask get 0. With fewer than two masked tokens, every token gets 0.
    """
    seen = np.concatenate([value[mask] for value, mask in zip(values, masks, strict=True)] or [np.zeros(0)])
    if seen.size < 2:
        return [np.zeros(mask.shape) for mask in masks]
    scale = 1.0 / np.sqrt(seen.var(ddof=1) + VARIANCE_EPSILON)
    return [np.where(mask, (value - seen.mean()) * scale, 0.0) for value, mask in zip(values, masks, strict=True)]


def _returns(rewards: np.ndarray, mask: np.ndarray, gamma: float) -> np.ndarray:
    values, after = finite(rewards, mask), 0.0
    out = np.zeros(mask.shape)
    for t in reversed(range(mask.size)):
        if mask[t]:
            after = values[t] + gamma * after
        out[t] = after
    return out


def finite(rewards: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Returns the rewards, with 0 outside the mask.

    Raises:
      ValueError: a reward inside the mask is not finite.
    """
    return np.where(mask, _refused_unless_finite(np.where(mask, rewards.astype(float), 0.0)), 0.0)


def _scored(rewards: np.ndarray, scored: np.ndarray) -> np.ndarray:
    return _refused_unless_finite(rewards[scored].astype(float))


def _refused_unless_finite(values: np.ndarray) -> np.ndarray:
    if not np.all(np.isfinite(values)):
        raise ValueError(
            f"advantages: scored rewards must be finite, got {values.tolist()}; leave such a rollout unscored"
        )
    return values


class RoleBaseline:
    """RAE: the baseline of a rollout is a running mean of the rewards of its role. Each mean begins at 0.

    A role is the source of a prompt, for example one side of a game. In self-play the mean of a group says nothing, because
    what one side wins the other loses. Rollouts count in the order of groups and samples, so all processes and a resumed run
    have the same means.

    `decay`: what a mean keeps of itself when a reward arrives.
    """

    def __init__(self, decay: float):
        self._decay = decay
        self.of: dict[str, float] = {}

    def estimate(self, rewards: Vectors, masks: Masks, role: str) -> list[Vector]:
        """Returns R_i - b of the role, at every token of the mask, and moves b by each R_i after its use.

        b becomes decay b + (1 - decay) R_i. The source is RAE (SPIRAL, arXiv 2506.24119; in the order of prime-rl).
        """
        out = []
        for reward, mask in zip(rewards, masks, strict=True):
            total, mean = finite(reward, mask).sum(), self.of.get(role, 0.0)
            out.append(np.where(mask, total - mean, 0.0))
            if mask.any():
                self.of[role] = float(self._decay * mean + (1.0 - self._decay) * total)
        return out

    def state_dict(self) -> dict:
        return {"of": dict(self.of)}

    def load_state_dict(self, state: Mapping) -> None:
        self.of = dict(state["of"])
