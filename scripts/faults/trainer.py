"""Faults of trainer/: the learner."""

from __future__ import annotations

from faults.fault import in_file

FAULTS = (
    *in_file(
        "jaxrl_post/trainer/learner.py",
        (
            "closed_gate_keeps_the_sums",
            "Learner.commit",
            'self._sums = self._programs["zeros"]()',
            "pass",
            "the gate closes but the sums are not emptied: weights move anyway",
            "test_a_closed_gate_leaves_every_bit_and_empties_the_sums",
        ),
    ),
)
