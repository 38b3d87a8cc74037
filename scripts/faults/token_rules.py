"""Faults of ratios, KL estimators, rules that pick tokens, and baselines of roles."""

from __future__ import annotations

from faults.fault import in_file

FAULTS = (
    *in_file(
        "jaxrl_post/algorithms/ratios.py",
        (
            "means_across_segments",
            "sequence_mean",
            "(segment_ids[:, :, None] == segment_ids[:, None, :]) & mask[:, None, :]",
            "(segment_ids[:, :, None] >= segment_ids[:, None, :]) & mask[:, None, :]",
            "a sequence's mean takes in its neighbours",
            "test_a_sequences_mean_leaves_out_what_is_masked_and_other_segments",
        ),
    ),
    *in_file(
        "jaxrl_post/algorithms/kl_estimators.py",
        (
            "k3_of_the_other_ratio",
            "k3",
            "ref_logprobs - logprobs",
            "logprobs - ref_logprobs",
            "pi / ref in the place of ref / pi",
            "test_kl_estimators_by_hand",
        ),
        ("k2_not_halved", "k2", "** 2 / 2", "** 2", "twice the estimate", "test_kl_estimators_by_hand"),
        (
            "plus_with_its_own_slope",
            "_with_slope_of_k2",
            "jax.lax.stop_gradient(values) + slope",
            "values + slope",
            "both gradients count",
            "test_a_name_with_plus_has_its_own_value_and_the_gradient_of_k2",
        ),
    ),
    *in_file(
        "jaxrl_post/algorithms/token_selection.py",
        (
            "smallest_covariances",
            "kl_cov",
            "np.argsort(-found, kind='stable')",
            "np.argsort(found, kind='stable')",
            "the smallest covariances are picked",
            "test_kl_cov_takes_the_largest_covariances",
        ),
        (
            "largest_moments_are_kept",
            "second_moment",
            "np.argsort(squares, kind='stable')",
            "np.argsort(-squares, kind='stable')",
            "the largest log-ratios are kept",
            "test_second_moment_drops_the_worst_until_the_mean_fits",
        ),
        (
            "covariance_of_raw_advantages",
            "_covariances",
            "(gains - gains.mean())",
            "gains",
            "the advantage is not centred",
            "test_kl_cov_takes_the_largest_covariances",
        ),
    ),
    *in_file(
        "jaxrl_post/algorithms/role_baseline.py",
        (
            "baseline_after_the_reward",
            "RoleBaseline.estimate",
            "np.where(mask, total - mean, 0.0)",
            "np.where(mask, (total - mean) * self._decay, 0.0)",
            "the reward is in its own baseline",
            "test_algorithms_role_baseline.py",
        ),
    ),
    *in_file(
        "jaxrl_post/algorithms/off_policy_mask.py",
        (
            "drift_of_the_other_sign",
            "off_policy",
            "old_logprobs - logprobs",
            "logprobs - old_logprobs",
            "rollouts leave the loss as they become likely",
            "test_algorithms_off_policy_mask.py",
        ),
    ),
)
