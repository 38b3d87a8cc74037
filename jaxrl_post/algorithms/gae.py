"""Generalized advantage estimation (GAE): advantages and returns from rewards and a critic's values. Host code.

Two levels: of a token, where every sampled token is an action, and of a turn, where a run of sampled tokens is one.
Tokens outside the mask (observed, not sampled) are skipped. The next token is then the next one of the mask.

Invariant: a rollout's result depends on that rollout alone. Only `estimate` whitens, over all tokens of a round.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from jaxtyping import Bool, Float

from jaxrl_post.algorithms.advantages import Masks, Vectors, finite, whiten

Vector = Float[np.ndarray, " T"]
Estimate = tuple[Vector, Vector]


def of_tokens(rewards: Vector, values: Vector, mask: Bool[np.ndarray, " T"], gamma: float, lam: float) -> Estimate:
    """Returns advantages A_t = delta_t + gamma lam A_{t+1}, and returns A_t + V_t (arXiv 1506.02438, equation 16).

    delta_t = r_t + gamma V_{t+1} - V_t, with t+1 the next token of the mask, and V = A = 0 behind the last one. Both
    are 0 outside the mask. As verl.
    """
    advantages, returns = np.zeros(mask.shape), np.zeros(mask.shape)
    following, after = 0.0, 0.0
    for t in np.flatnonzero(mask)[::-1]:
        after = rewards[t] + gamma * following - values[t] + gamma * lam * after
        advantages[t], returns[t] = after, after + values[t]
        following = values[t]
    return advantages, returns


def of_turns(rewards: Vector, values: Vector, mask: Bool[np.ndarray, " T"], gamma: float, lam: float) -> Estimate:
    """Returns the same with a turn as one action: every token of a turn has the turn's advantage and return.

    A turn is a run of tokens of the mask. Its reward is the sum of theirs, and its value is that of its first token. A
    rollout of one turn has A = R - V. The turn-level MDP is that of Turn-PPO (arXiv 2512.17008).
    """
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(int)))
    first, behind = edges[::2], edges[1::2]
    sums = np.array([rewards[a:b].sum() for a, b in zip(first, behind, strict=True)])
    whole = np.ones(first.shape, bool)
    made = of_tokens(sums, values[first].astype(float), whole, gamma, lam)
    out = np.zeros(mask.shape), np.zeros(mask.shape)
    for found, array in zip(made, out, strict=True):
        for turn, (a, b) in enumerate(zip(first, behind, strict=True)):
            array[a:b] = found[turn]
    return out


LEVELS: dict[str, Callable[..., Estimate]] = {"gae": of_tokens, "gae_turn": of_turns}
ACTIONS: dict[str, Callable[[np.ndarray], int]] = {  # how many a rollout has
    "gae": lambda mask: int(mask.sum()),
    "gae_turn": lambda mask: int((np.diff(np.concatenate([[False], mask]).astype(int)) == 1).sum()),
}


def estimate(
    level: str,
    rewards: Vectors,
    values: Vectors,
    masks: Masks,
    gamma: float,
    lam: float,
    *,
    lam_value: float | None = None,
    alpha: float = 0.0,
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Returns advantages, whitened over every masked token of the round (as verl), and returns, which are not.

    Args:
      level: one of LEVELS.
      rewards, values, masks: one vector per rollout. The mask of an unscored rollout is False everywhere.
      lam_value: lambda of the returns. None: that of the advantages (decoupled GAE, VAPO, arXiv 2504.05118).
      alpha: above 0, lambda of the advantages follows from the length (`adaptive`), and `lam` is not read for them.
    """
    advantages, returns = [], []
    for reward, value, mask in zip(rewards, values, masks, strict=True):
        given = finite(reward, mask), value.astype(float), mask, gamma
        made, learned = LEVELS[level](*given, adaptive(alpha, ACTIONS[level](mask)) if alpha > 0 else lam)
        if lam_value is not None or alpha > 0:
            _, learned = LEVELS[level](*given, lam if lam_value is None else lam_value)
        advantages.append(made)
        returns.append(learned)
    return whiten(advantages, masks), returns


def adaptive(alpha: float, actions: int) -> float:
    """Returns 1 - 1 / (alpha actions), at least 0: lambda of a rollout by its length (VAPO, arXiv 2504.05118)."""
    return max(0.0, 1.0 - 1.0 / (alpha * max(actions, 1)))


def explained_variance(values: Vector, returns: Vector) -> float:
    """Returns 1 - Var(returns - values) / (Var(returns) + 1e-5), var with n-1 (verl's critic/vf_explained_var)."""
    if returns.size < 2:
        return 0.0
    return float(1.0 - np.var(returns - values, ddof=1) / (np.var(returns, ddof=1) + 1e-5))
