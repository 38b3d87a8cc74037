"""Per-token policy losses. Nothing here is jitted or random.

Shapes: all arrays are [B, T], indexed at the token (its log-prob, its advantage, its mask). A row has several packed
sequences, separated by segment_ids.

A loss is a function of `Terms`. It returns the losses and, by metric name, indicators of clipped tokens. Losses are defined
at every token, so the caller masks them. The gradient flows where the unclipped branch is taken, ties included. PARITY.md
names the source of each convention. The weights of tokens are in aggregation.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_post.algorithms.logprobs import LOG_RATIO_BOUND, assert_alike, log_ratio, sequence_length, sequence_mean
from jaxrl_post.config import AlgorithmConfig

SEQUENCE_LOG_RATIO_BOUND = 10.0  # gspo's log-ratio is clamped to at most 10, as verl does

Losses = tuple[Float[Array, "B T"], dict[str, Float[Array, "B T"]]]


@dataclass(frozen=True)
class Terms:
    """What a loss may read: of every token its log-prob now and at the old policy, its advantage, whether it counts, and
    its sequence; and the options. `old_logprobs`: None for a loss that does not read them (NEEDS_OLD_LOGPROBS)."""

    logprobs: Float[Array, "B T"]
    old_logprobs: Float[Array, "B T"] | None
    advantages: Float[Array, "B T"]
    mask: Bool[Array, "B T"]
    segment_ids: Int[Array, "B T"]
    algorithm: AlgorithmConfig

    def __post_init__(self):
        assert_alike(self.logprobs, self.advantages, *(() if self.old_logprobs is None else (self.old_logprobs,)))

    @property
    def log_ratio(self) -> Float[Array, "B T"]:
        return log_ratio(self.logprobs, self.old_logprobs)

    @property
    def ratio(self) -> Float[Array, "B T"]:
        return jnp.exp(self.log_ratio)


def vanilla(terms: Terms) -> Losses:
    """Returns max(-A r, -A clip(r, 1 - low, 1 + high)), r = exp(logprobs - old_logprobs).

    The source is PPO (arXiv 1707.06347, equation 7), with two bounds as in DAPO (arXiv 2503.14476, equation 10). With
    clip_ratio_c > 0 and A < 0 the loss is at most -A c (dual clip, arXiv 1912.09729). The default 0 turns this off.
    verl uses 3.
    """
    losses, indicators = _clipped(terms.ratio, terms)
    if terms.algorithm.clip_ratio_c > 0:
        ceiling = -terms.advantages * terms.algorithm.clip_ratio_c
        held = (terms.advantages < 0) & (losses > ceiling)
        losses = jnp.where(held, ceiling, losses)
        indicators["actor/pg_clipfrac_lower"] = held.astype(losses.dtype)
    return losses, indicators


def clip_cov(terms: Terms) -> Losses:
    """Returns PPO's clipped loss. The tokens that Clip-Cov picks have the advantage 0 (token_credit.py; as verl)."""
    return _clipped(terms.ratio, terms)


def kl_cov(terms: Terms) -> Losses:
    """Returns -A r. The learner adds ppo_kl_coef |log r| at the tokens that KL-Cov picks (arXiv 2505.22617; as verl)."""
    return -terms.advantages * terms.ratio, {}


def gspo(terms: Terms) -> Losses:
    """Returns PPO's clipped loss with one ratio per sequence (GSPO, arXiv 2507.18071, section 4.1).

    The ratio s is exp of the mean, over the sequence's masked tokens, of logprobs - old_logprobs. Each token carries
    the gradient of its own log-prob (GSPO-token, section 4.3). Where the tokens of a sequence have one weight and one
    advantage, this is the gradient of s. verl always averages this loss by seq-mean-token-mean. Here loss_agg_mode
    decides.
    """
    mean = jax.lax.stop_gradient(sequence_mean(terms.logprobs - terms.old_logprobs, terms.mask, terms.segment_ids))
    own = terms.logprobs - jax.lax.stop_gradient(terms.logprobs)
    return _clipped(jnp.exp(jnp.minimum(own + mean, SEQUENCE_LOG_RATIO_BOUND)), terms)


def cispo(terms: Terms) -> Losses:
    """Returns -A logprobs sg(clip(r, 1 - low, 1 + high)) (CISPO, arXiv 2506.13585, section 3.1).

    Every token keeps its gradient, and only its weight is bounded. Bounds are relative to 1, as in verl and slime.
    TRL's upper bound is absolute.
    """
    ratio = jax.lax.stop_gradient(terms.ratio)
    weight = jnp.clip(ratio, 1.0 - terms.algorithm.clip_ratio_low, 1.0 + terms.algorithm.clip_ratio_high)
    return -terms.advantages * weight * terms.logprobs, {
        "actor/pg_clipfrac": (weight != ratio).astype(terms.logprobs.dtype)
    }


def sapo(terms: Terms) -> Losses:
    """Returns -A (4 / tau) sigmoid(tau (r - 1)) (SAPO, arXiv 2511.20347): a soft gate in place of clipping.

    tau is tau_pos where A > 0, else tau_neg. At r = 1 the gradient is that of -A r. Nothing is clipped.
    """
    tau = jnp.where(terms.advantages > 0, terms.algorithm.tau_pos, terms.algorithm.tau_neg).astype(terms.logprobs.dtype)
    ratio = terms.ratio
    return -terms.advantages * jax.nn.sigmoid(tau * (ratio - 1.0)) * (4.0 / tau), {}


def geo_mean(terms: Terms) -> Losses:
    """Returns -A exp(mean log r) per sequence, log r held per token (GMPO, arXiv 2507.20673, equation 4; as verl).

    Where A > 0, log r is at most clip_ratio_high, else at least -clip_ratio_low. The bounds are of logarithms. A is the
    mean over the sequence. Each token carries the loss of its sequence, so that equal weights within a sequence give
    the gradient of the geometric mean. verl takes the mean over sequences. Here loss_agg_mode decides.
    """
    gap = terms.log_ratio
    held = jnp.where(terms.advantages > 0, gap > terms.algorithm.clip_ratio_high, gap < -terms.algorithm.clip_ratio_low)
    bound = jnp.where(terms.advantages > 0, terms.algorithm.clip_ratio_high, -terms.algorithm.clip_ratio_low).astype(
        gap.dtype
    )
    mean = sequence_mean(jnp.where(held, bound, gap), terms.mask, terms.segment_ids)
    gain = sequence_mean(terms.advantages, terms.mask, terms.segment_ids)
    return -gain * jnp.exp(mean), {"actor/pg_clipfrac": held.astype(gap.dtype)}


def dppo_tv(terms: Terms) -> Losses:
    """Returns -A logprobs sg(min(r, c)) inside a trust region of probabilities, else 0 (DPPO, arXiv 2602.04879).

    Outside is a token with A > 0 whose probability has risen by more than clip_ratio_high, or with A <= 0 whose
    probability has fallen by more than clip_ratio_low. c is clip_ratio_c; 0 is no bound. The paper's old policy is the
    engine's, which is prox_logp_method "rollout". As verl, whose c is 20. old_kl_coef (log r)^2 / 2 is added everywhere, as
    prime-rl does, whose tau of 1e-3 is old_kl_coef=2e-3.
    """
    moved = jax.lax.stop_gradient(jnp.exp(terms.logprobs) - jnp.exp(terms.old_logprobs))
    outside = jnp.where(
        terms.advantages > 0, moved > terms.algorithm.clip_ratio_high, moved < -terms.algorithm.clip_ratio_low
    )
    return _trusted(terms, outside)


def prime_ipo(terms: Terms) -> Losses:
    """Returns the same as `dppo_tv` with a trust region that does not look at the advantage (as prime-rl's ipo).

    Outside is a token whose probability has risen by more than clip_ratio_high or fallen by more than clip_ratio_low.
    """
    moved = jax.lax.stop_gradient(jnp.exp(terms.logprobs) - jnp.exp(terms.old_logprobs))
    outside = (moved > terms.algorithm.clip_ratio_high) | (moved < -terms.algorithm.clip_ratio_low)
    return _trusted(terms, outside)


def dppo_kl(terms: Terms) -> Losses:
    """Returns the same as `dppo_tv` with a binary KL in the place of the difference of probabilities.

    It is KL(old || new) of "this token or any other". Where A > 0 and the probability has risen, it must be at most
    clip_ratio_high. Where A <= 0 and the probability has fallen, it must be at most clip_ratio_low. 1e-8 is added to
    the probability of any other token. As verl.
    """
    new, old = jax.lax.stop_gradient((jnp.exp(terms.logprobs), jnp.exp(terms.old_logprobs)))
    others = (1.0 - old) * jnp.log((1.0 - old + 1e-8) / (1.0 - new + 1e-8))
    divergence = old * (terms.old_logprobs - jax.lax.stop_gradient(terms.logprobs)) + others
    rises = (divergence > terms.algorithm.clip_ratio_high) & (new > old)
    falls = (divergence > terms.algorithm.clip_ratio_low) & (new < old)
    return _trusted(terms, jnp.where(terms.advantages > 0, rises, falls))


def gpg(terms: Terms) -> Losses:
    """Returns -A logprobs: the plain policy gradient (GPG, arXiv 2504.02546; as verl). Nothing is clipped."""
    return -terms.advantages * terms.logprobs, {}


def dro(terms: Terms) -> Losses:
    """Returns -A logprobs + old_kl_coef (log r)^2 / 2 (DRO, arXiv 2405.19107; as verl, whose dro_beta is 0.1).

    With the advantage dr_grpo it is Kimi k1.5's loss (arXiv 2501.12599, section 2.3.2; as ROLL).
    """
    return -terms.advantages * terms.logprobs + _held(terms), {}


def topr(terms: Terms) -> Losses:
    """Returns -A logprobs where A > 0, else -A logprobs sg(min(r, 1)) (TOPR, arXiv 2503.14286, equation 8).

    Gains are supervised, whoever sampled them. Losses fade as they become rare. As ROLL, which looks at the reward's
    sign in the place of the advantage's.
    """
    ratio = jax.lax.stop_gradient(terms.ratio)
    weight = jnp.where(terms.advantages > 0, 1.0, jnp.minimum(ratio, 1.0))
    return -terms.advantages * weight * terms.logprobs, {
        "actor/pg_clipfrac": ((terms.advantages <= 0) & (ratio > 1)).astype(ratio.dtype)
    }


def luspo(terms: Terms) -> Losses:
    """Returns gspo's loss times the length of the sequence, so that long ones do not count less (LUSPO, as TRL).

    The objective is its mean over rollouts, which is loss_agg_mode "seq-mean-token-mean". The config refuses others.
    """
    losses, indicators = gspo(terms)
    return losses * sequence_length(terms.mask, terms.segment_ids).astype(losses.dtype), indicators


def vespo(terms: Terms) -> Losses:
    """Returns -A logprobs sg(W^k e^(l (1 - W))), W the product of the sequence's ratios (VESPO, arXiv 2602.10693).

    k and l are 2 and 3 where A > 0, else 3 and 2, as TRL has them. log W is clamped to +-20. The weight is 1 at W = 1
    and vanishes on both sides. The paper's old policy is the engine's, which is prox_logp_method "rollout".
    """
    length = sequence_length(terms.mask, terms.segment_ids).astype(terms.logprobs.dtype)
    total = jnp.clip(
        sequence_mean(terms.logprobs - terms.old_logprobs, terms.mask, terms.segment_ids) * length,
        -LOG_RATIO_BOUND,
        LOG_RATIO_BOUND,
    )
    power, decay = (jnp.where(terms.advantages > 0, *pair).astype(total.dtype) for pair in ((2.0, 3.0), (3.0, 2.0)))
    weight = jax.lax.stop_gradient(jnp.exp(power * total + decay * (1.0 - jnp.exp(total))))
    return -terms.advantages * weight * terms.logprobs, {}


def sft(terms: Terms) -> Losses:
    """Returns -logprobs: the negative log-likelihood of demonstrations. Nothing is clipped. Old log-probs are not read."""
    return -terms.logprobs, {}


def preference(terms: Terms) -> Losses:
    """Returns -A logprobs. A is minus the slope of the pair's loss (preferences.py), so that the gradient is the pair's.

    The value is not the pair's loss. That is the metric actor/preference_loss. Of a reward model,
    `logprobs` are rewards.
    """
    return -terms.advantages * terms.logprobs, {}


def gkd(terms: Terms) -> Losses:
    """Returns `advantages`: here the divergence of the policy's distribution from the teacher's, which is differentiated itself.

    The distribution of every token is compared, whichever token was sampled (divergence.py). Old log-probs are not read.
    """
    return terms.advantages, {}


LOSSES = {
    "vanilla": vanilla,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
    "gspo": gspo,
    "cispo": cispo,
    "sapo": sapo,
    "geo_mean": geo_mean,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "prime_ipo": prime_ipo,
    "gpg": gpg,
    "dro": dro,
    "topr": topr,
    "luspo": luspo,
    "vespo": vespo,
    "sft": sft,
    "dpo": preference,
    "ipo": preference,
    "gkd": gkd,
    "bradley_terry": preference,
}
NEEDS_OLD_LOGPROBS = {name: name not in ("gpg", "sft", "dpo", "ipo", "bradley_terry", "gkd") for name in LOSSES}


def clipped_value(
    values: Float[Array, "B T"], old_values: Float[Array, "B T"], returns: Float[Array, "B T"], clip: float
) -> Losses:
    """Returns max((V - G)^2, (clip(V, V_old - c, V_old + c) - G)^2) / 2, the critic's loss (as verl).

    The clipping is that of PPO's reference code (openai/baselines, ppo2). With clip 0 it is (V - G)^2 / 2.
    """
    assert_alike(values, old_values, returns)
    free = (values - returns) ** 2
    held = jnp.clip(values, old_values - clip, old_values + clip) if clip > 0 else values
    bound = (held - returns) ** 2
    clipped = bound > free
    return jnp.where(clipped, bound, free) / 2, {"critic/vf_clipfrac": clipped.astype(values.dtype)}


def _clipped(ratio: Float[Array, "B T"], terms: Terms) -> Losses:
    """Returns PPO's pessimistic loss, and 1 where the clipped branch is the larger loss (verl's pg_clipfrac)."""
    free = -terms.advantages * ratio
    low, high = terms.algorithm.clip_ratio_low, terms.algorithm.clip_ratio_high
    bound = -terms.advantages * jnp.clip(ratio, 1.0 - low, 1.0 + high)
    clipped = bound > free
    return jnp.where(clipped, bound, free), {"actor/pg_clipfrac": clipped.astype(ratio.dtype)}


def _trusted(terms: Terms, outside: Bool[Array, "B T"]) -> Losses:
    """Returns DPPO's loss, 0 outside of the trust region, with verl's two indicators."""
    ratio = jax.lax.stop_gradient(terms.ratio)
    most = terms.algorithm.clip_ratio_c or jnp.inf
    losses = jnp.where(outside, 0.0, -terms.advantages * jnp.minimum(ratio, most) * terms.logprobs)
    losses = losses + _held(terms)
    cut = (ratio > most) & ~outside
    return losses, {
        "actor/pg_clipfrac": outside.astype(losses.dtype),
        "actor/pg_clipfrac_lower": cut.astype(losses.dtype),
    }


def _held(terms: Terms) -> Float[Array, "B T"]:
    """Returns old_kl_coef (log r)^2 / 2, which is k2 of the KL to the old policy."""
    return terms.algorithm.old_kl_coef / 2 * terms.log_ratio**2
