"""The terms, rules and advantages of single papers: DRO, Clip-Cov, KL-Cov, OPSM, M2PO, VAPO's term, GDPO, RAE, OTB, and more.

The other side is tests/term_arms.py: one sequence per row and loops over tokens, in float64.
"""

from __future__ import annotations

from training_parity import SINGLE, plant


def show(record) -> None:
    import term_arms as terms
    from gradient_arms import worst

    groups = terms.groups()
    for name, changes in terms.CASES.items():
        given = terms.algorithm(**changes)
        want = terms.plain_gradient(groups, given)
        record.figure(name, worst(terms.gradient(groups, given), want), at_most=SINGLE)
        faults = {fault.__name__.strip("_"): fault for fault in FAULTS.get(name, ())}
        plant(record, name, faults, lambda given=given, want=want: worst(terms.gradient(groups, given), want))


def _log_ratio_not_squared(patch) -> None:
    import jax.numpy as jnp

    from jaxrl_post.algorithms import losses

    whole = losses.log_ratio
    patch.setattr(losses, "_held", lambda logps, old, algorithm: algorithm.old_kl_coef / 2 * jnp.abs(whole(logps, old)))


def _smallest_covariances(patch) -> None:
    from jaxrl_post.algorithms import token_selection as rules

    whole = rules.kl_cov
    patch.setattr(rules, "kl_cov", lambda gains, *rest: whole([-gain for gain in gains], *rest))


def _low_entropies_are_kept(patch) -> None:
    from jaxrl_post.algorithms import token_selection as rules

    whole = rules.high_entropy
    patch.setattr(rules, "high_entropy", lambda values, *rest: whole([-value for value in values], *rest))


def _drift_of_the_other_sign(patch) -> None:
    from jaxrl_post.trainer import programs

    whole = programs.off_policy
    patch.setattr(programs, "off_policy", lambda logps, old, *rest: whole(old, logps, *rest))


def _every_rollout_is_positive(patch) -> None:
    from jaxrl_post.trainer import packing

    whole = packing._credit

    def credit(arrays, row, tail, sampled, one):
        whole(arrays, row, tail, sampled, one)
        arrays["positives"][row, tail] = sampled

    patch.setattr(packing, "_credit", credit)


def _first_tokens_are_dropped(patch) -> None:
    from jaxrl_post.algorithms import token_selection as rules

    whole = rules.second_moment
    patch.setattr(rules, "second_moment", lambda gaps, *rest: whole([1 / (abs(gap) + 0.1) for gap in gaps], *rest))


def _components_are_summed_first(patch) -> None:
    import numpy as np

    from jaxrl_post.algorithms import advantages

    whole = advantages.gdpo

    def summed(components, scored, masks, weights):
        return whole([(weights @ rows)[None] for rows in components], scored, masks, np.ones(1))

    patch.setattr(advantages, "gdpo", summed)


def _one_baseline_for_all(patch) -> None:
    from jaxrl_post.algorithms.role_baseline import RoleBaseline

    whole = RoleBaseline.estimate
    patch.setattr(RoleBaseline, "estimate", lambda self, rewards, masks, role: whole(self, rewards, masks, ""))


def _norms_are_one(patch) -> None:
    import numpy as np

    from jaxrl_post.algorithms import advantages

    whole = advantages.optimal_token_baseline
    patch.setattr(
        advantages,
        "optimal_token_baseline",
        lambda rewards, masks, norms: whole(rewards, masks, [np.ones_like(norm) for norm in norms]),
    )


FAULTS = {
    "dro": (_log_ratio_not_squared,),
    "kl_cov": (_smallest_covariances,),
    "high_entropy": (_low_entropies_are_kept,),
    "opsm": (_drift_of_the_other_sign,),
    "positive_nll": (_every_rollout_is_positive,),
    "m2po": (_first_tokens_are_dropped,),
    "gdpo": (_components_are_summed_first,),
    "rae": (_one_baseline_for_all,),
    "optimal_token_baseline": (_norms_are_one,),
}
