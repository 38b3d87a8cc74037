"""Figures of packed rows of one family: log-probs, gradients, what is planted in both, and its exports."""

from __future__ import annotations

import contextlib
import json
import os
import sys

BOUND = 1e-4  # nats
LEAF = 5e-6  # of the leaf's largest number
FAULT = 1e-3
MARGIN = 1e-4  # of scores of experts, far beyond their rounding


def measure(record, families: tuple[str, ...]) -> int:
    """Writes the figures of the families and returns how many faults were planted. With JAXRL_ORACLE, exports are read, too."""
    import segment_arms

    record.figure("segments_of_a_row", min(map(len, segment_arms.LENGTHS)), at_least=5)
    planted = sum(
        _log_probs(record, segment_arms, family) + _gradients(record, segment_arms, family) for family in families
    )
    for family in families:
        record.figure(f"{family}_leaves_that_an_export_changes", segment_arms.changed_by_export(family), equals=0)
    if os.environ.get("JAXRL_ORACLE"):
        _written(record, families, os.environ["JAXRL_ORACLE"])
    return planted


def _log_probs(record, segment_arms, family: str) -> int:
    for arm in segment_arms.ARMS:
        record.figure(f"{family}_log_probs_{arm}", segment_arms.gap(family, arm), at_most=BOUND)
    for size in segment_arms.CHUNKS.get(family, ()):
        found = segment_arms.gap(family, change=segment_arms.in_chunks(size))
        record.figure(f"{family}_log_probs_in_chunks_of_{size}", found, at_most=BOUND)
    found = [(arm, name, change) for arm, some in segment_arms.FAULTS[family].items() for name, change in some.items()]
    with _compiled_quickly():
        for arm, name, change in found:
            record.figure(f"{family}_planted_{arm}_{name}", segment_arms.gap(family, arm, change), at_least=FAULT)
    return len(found)


def _gradients(record, segment_arms, family: str) -> int:
    if segment_arms.calm(family)[0].experts:
        record.figure(f"{family}_smallest_margin", segment_arms.margin(family), at_least=MARGIN)
    found = segment_arms.gradients(family)
    record.figure(f"{family}_leaves", len(found))
    record.figure(f"{family}_worst_leaf", max(found, key=found.get))
    record.figure(f"{family}_gradient_of_the_worst_leaf", max(found.values()), at_most=LEAF)
    faults = segment_arms.SLOPES.get(family, {})
    with _compiled_quickly():
        for name, fault in faults.items():
            planted = max(segment_arms.gradients(family, fault).values())
            record.figure(f"{family}_planted_no_gradient_of_{name}", planted, at_least=FAULT)
    return len(faults)


@contextlib.contextmanager
def _compiled_quickly():
    """Programs with a fault, each of which runs once, are compiled without most optimizations."""
    import jax

    jax.config.update("jax_disable_most_optimizations", True)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", False)


def _written(record, families: tuple[str, ...], oracle: str) -> None:
    """Writes the largest difference of transformers' log-probs on directories that models/hf.py wrote, in nats."""
    checked = ("scripts/make_goldens.py", "--only", *families, "--check", sys.executable)
    for family, found in json.loads(record.said(*checked, timeout_s=1200, python=oracle)).items():
        for name, gap in found.items():
            record.figure(f"{family}_transformers_reads_{name}", 2 * gap, at_most=BOUND)  # of scores, so twice as far
