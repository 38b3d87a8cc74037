"""On-policy distillation: a teacher of another shape in the advantage, alone and beside rewards, and whole laws as the loss.

The other side is tests/distill_arms.py: one sequence per row, dense attention, a whole softmax of both models, in float64.
"""

from __future__ import annotations

from training_parity import SINGLE, plant

ARMS = {"distill": ("distill", {}), "distill_beside_rewards": ("grpo", {"opd_kl_coef": 0.7})}
EXACT = {"gkd_reverse_kl": 1.0, "gkd_jensen_shannon": 0.3, "gkd_forward_kl": 0.0}  # by gkd_beta


def show(record) -> None:
    import distill_arms as distill
    import gradient_arms as arms
    import made_groups

    groups = made_groups.groups()
    for name, (estimator, more) in ARMS.items():
        given = distill.algorithm(estimator, **more)
        want = distill.plain_gradient(groups, given=given)

        def distance(given=given, want=want) -> float:
            return arms.worst(distill.gradient(groups, given=given), want)

        record.figure(name, distance(), at_most=SINGLE)
        plant(record, name, FAULTS[name], distance)
    for name, beta in EXACT.items():
        wanted, _ = distill.plain_exact(groups, beta)

        def apart(beta=beta, wanted=wanted) -> float:
            return arms.worst(distill.gradient(groups, given=distill.exact(beta)), wanted)

        record.figure(name, apart(), at_most=SINGLE)
        plant(record, name, FAULTS[name], apart)


def _gains(patch, change) -> None:
    from jaxrl_post.algorithms import distillation

    true = distillation.gains
    patch.setattr(distillation, "gains", lambda *given: change(true, *given))


def _the_policy_is_left_out(patch) -> None:
    """Only the teacher's log-prob is the gain: the cross entropy, which has no bound on how sharp the policy may become."""
    _gains(
        patch, lambda true, groups, how, old, teacher: true(groups, how, {id: 0 * x for id, x in old.items()}, teacher)
    )


def _the_other_sign(patch) -> None:
    _gains(patch, lambda true, groups, how, old, teacher: true(groups, how, teacher, old))


def _log_probs_of_the_next_token(patch) -> None:
    import numpy as np

    def shifted(true, groups, how, old, teacher):
        return true(groups, how, old, {id: np.roll(x, 1) for id, x in teacher.items()})

    _gains(patch, shifted)


def _temperature_of_the_teacher_is_one(patch) -> None:
    import dataclasses

    from jaxrl_post.trainer.teacher import Teacher

    true = Teacher.jitted
    patch.setattr(
        Teacher,
        "jitted",
        lambda one, mesh, shapes, recipe: true(one, mesh, shapes, dataclasses.replace(recipe, temperature=1.0)),
    )


def _no_coefficient(patch) -> None:
    from jaxrl_post.config import AlgorithmConfig

    patch.setattr(AlgorithmConfig, "teacher_coef", property(lambda algorithm: 1.0))


def _divergence(patch, change) -> None:
    from jaxrl_post.algorithms import divergence

    true = divergence.of_logs
    patch.setattr(divergence, "of_logs", lambda *given: change(true, *given))


def _directions_are_swapped(patch) -> None:
    _divergence(patch, lambda true, own, teacher, beta: true(own, teacher, 1 - beta))


def _not_mixed(patch) -> None:
    """The Jeffreys divergence with the same weights, in which no law is mixed."""

    def jeffreys(true, own, teacher, beta):
        return beta * true(own, teacher, 0) + (1 - beta) * true(own, teacher, 1)

    _divergence(patch, jeffreys)


def _a_row_is_left_out(patch) -> None:
    from jaxrl_post.algorithms import divergence

    true = divergence.laws
    patch.setattr(divergence, "laws", lambda *given, used, **how: true(*given, used=used - 1, **how))


FAULTS = {
    "distill": {
        "the_policy_is_left_out": _the_policy_is_left_out,
        "the_other_sign": _the_other_sign,
        "log_probs_of_the_next_token": _log_probs_of_the_next_token,
        "temperature_of_the_teacher_is_one": _temperature_of_the_teacher_is_one,
    },
    "distill_beside_rewards": {"no_coefficient": _no_coefficient},
    "gkd_reverse_kl": {
        "directions_are_swapped": _directions_are_swapped,
        "a_row_of_the_vocabulary_is_left_out": _a_row_is_left_out,
    },
    "gkd_jensen_shannon": {"not_mixed": _not_mixed},
    "gkd_forward_kl": {"directions_are_swapped": _directions_are_swapped},
}
