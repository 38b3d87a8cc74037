"""Families with experts have transformers' log-probs and float64's gradients, and transformers reads their exports.

Log-probs: the random checkpoints of tests/goldens (scripts/make_goldens.py) in float32, over plain attention, the trainer's
and the engine's. The show `parity` plants the faults of their forward pass.

Gradients: of the sum of log-probs, over the trainer's attention. Each leaf is compared with a plain form in float64
(tests/plain_decoder.py), in which every expert computes every row and the experts that float32 chose count. Then gradients
that stop at gates or rows are planted. A margin is the difference of the lowest chosen score from the highest other one.

With JAXRL_ORACLE set to a python that has torch and transformers, transformers also reads what we write.
"""

from __future__ import annotations

import json
import os
import sys

MINUTES = 2.0
PLATFORM = "cpu"
LEAF = 5e-6  # of the leaf's largest number
FAULT = 1e-3
MARGIN = 1e-3  # far beyond the rounding of scores


def show(record) -> None:
    import parity_arms as arms

    for family in arms.WITH_EXPERTS:
        _log_probs(record, arms, family)
        _gradients(record, arms, family)
    if os.environ.get("JAXRL_ORACLE"):
        _written(record, arms, os.environ["JAXRL_ORACLE"])


def _log_probs(record, arms, family: str) -> None:
    import expert_arms

    from jaxrl_post.models import hf

    config, params = hf.load(arms.GOLDENS / family)
    chosen, margin = expert_arms.choices(config, params, arms.golden(family)[0])
    record.figure(f"{family}_smallest_margin", margin, at_least=MARGIN)
    unused = sum(config.experts.count - len(set(ids.ravel().tolist())) for ids in chosen.values())
    record.figure(f"{family}_experts_that_no_row_uses", unused, equals=0)
    for arm in arms.ARMS:
        record.figure(f"{family}_log_probs_{arm}", expert_arms.log_prob_gap(family, arm), at_most=arms.BOUND)


def _gradients(record, arms, family: str) -> None:
    import expert_arms

    found = expert_arms.gradients(family)
    record.figure(f"{family}_leaves", len(found))
    record.figure(f"{family}_gradient_of_the_worst_leaf", max(found.values()), at_most=LEAF)
    for fault in expert_arms.PLANTED:
        planted = expert_arms.gradients(family, fault=fault)
        record.figure(f"{family}_planted_{fault}", max(planted.values()), at_least=FAULT)


def _written(record, arms, oracle: str) -> None:
    """Records the largest difference of transformers' log-probs on directories that models/hf.py wrote, in nats."""
    checked = ("scripts/make_goldens.py", "--only", *arms.WITH_EXPERTS, "--check", sys.executable)
    for family, found in json.loads(record.said(*checked, timeout_s=1200, python=oracle)).items():
        for name, gap in found.items():
            record.figure(
                f"{family}_transformers_reads_{name}", 2 * gap, at_most=arms.BOUND
            )  # of scores, so twice as far
