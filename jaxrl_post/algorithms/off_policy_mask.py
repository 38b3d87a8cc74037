"""Which tokens leave the policy loss because the policy has moved away from the one that sampled their rollout."""

from __future__ import annotations

from jaxtyping import Array, Bool, Float, Int

from jaxrl_post.algorithms.ratios import assert_alike, sequence_mean


def off_policy(
    logprobs: Float[Array, "B T"],
    old_logprobs: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    segment_ids: Int[Array, "B T"],
    delta: float,
) -> Bool[Array, "B T"]:
    """Returns True where A < 0 and the rollout's mean of log pi_old - log pi is above `delta`, in nats per token.

    The source is off-policy sequence masking (OPSM, DeepSeek-V3.2, arXiv 2512.02556, section 3.1; as slime). The paper's old
    policy is the engine's, which is prox_logp_method "rollout". Such a token has no gradient, and is still counted.
    """
    assert_alike(logprobs, old_logprobs, advantages)
    return (advantages < 0) & (sequence_mean(old_logprobs - logprobs, mask, segment_ids) > delta) & mask
