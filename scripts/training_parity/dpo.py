"""DPO and IPO: gradients of pairs packed among others, against autodiff of TRL's formula in float64 (tests/preference_arms.py)."""

from __future__ import annotations

from training_parity import SINGLE, plant

ARMS = {"dpo": ("dpo", {}), "dpo_smoothed": ("dpo", {"label_smoothing": 0.2}), "ipo": ("ipo", {})}


def show(record) -> None:
    import gradient_arms as arms
    import made_groups
    import preference_arms as pairs

    groups = made_groups.groups(size=2)
    for name, (loss, more) in ARMS.items():
        given = pairs.algorithm(loss, **more)
        want = pairs.plain_gradient(groups, given)

        def distance(given=given, want=want) -> float:
            return arms.worst(pairs.gradient(pairs.learner(given, rows=2), groups), want)

        record.figure(name, distance(), at_most=SINGLE)
        plant(record, name, FAULTS[name], distance)


def _losses(patch, name: str, change) -> None:
    from jaxrl_post.algorithms import preferences

    patch.setitem(preferences.PREFERENCES, name, change(preferences.PREFERENCES[name]))


def _sides_are_swapped(patch) -> None:
    _losses(patch, "dpo", lambda true: lambda gaps, *more: true(gaps[::-1], *more))


def _no_reference(patch) -> None:
    from jaxrl_post.algorithms import preferences

    true = preferences.compare
    patch.setattr(preferences, "compare", lambda group, how, old, ref: true(group, how, old, [0 * one for one in ref]))


def _a_pair_counts_as_two(patch) -> None:
    from jaxrl_post.algorithms import credit

    true = credit._of_a_pair
    patch.setattr(credit, "_of_a_pair", lambda *given: [one / 2 for one in true(*given)])


def _not_smoothed(patch) -> None:
    _losses(patch, "dpo", lambda true: lambda gaps, lengths, beta, smoothing: true(gaps, lengths, beta, 0.0))


def _summed_over_tokens(patch) -> None:
    _losses(patch, "ipo", lambda true: lambda gaps, lengths, *more: true(gaps, lengths**0, *more))


FAULTS = {
    "dpo": {
        "sides_are_swapped": _sides_are_swapped,
        "no_reference": _no_reference,
        "a_pair_counts_as_two": _a_pair_counts_as_two,
    },
    "dpo_smoothed": {"not_smoothed": _not_smoothed},
    "ipo": {"summed_over_tokens": _summed_over_tokens},
}
