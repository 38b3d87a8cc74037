"""The learner's gradient is a sum: packed == unpacked, k accumulates == one batch, 8 sharded devices == one.

Gradients are compared per leaf in relative 2-norm, before the optimizer. Every term of the loss is on (narrow clipping,
k3, entropy), and the ratio is away from one. The unpacked side is plain code of tests/made_groups.py: one sequence per
row, dense attention, the papers' formulas. Every aggregation runs with PPO's clipping. Then the other losses run in
x64, among them gspo's mean over a sequence inside a packed row. Each planted fault must be far outside: the same
distance, at least 1e-3.
"""

from __future__ import annotations

import os

import gradient_arms as arms
import made_groups
import numpy as np
import pytest
import test_trainer_sums as tests

MINUTES = 6.0
PLATFORM = "cpu"
EXACT, SINGLE = 1e-12, 5e-6

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")


def show(record) -> None:
    groups = made_groups.groups()
    record.figure("num_sequences", sum(len(group.rollouts) for group in groups))
    record.figure("num_trained_tokens", int(made_groups.unpacked(groups)[1].sum()))
    for name, dtype, bound in (("x64", np.float64, EXACT), ("f32", np.float32, SINGLE)):
        for mode in arms.MODES:
            short = mode.replace("-", "_")
            packed = arms.gradient(groups, dtype, mode=mode)
            plain = arms.plain_gradient(groups, dtype, mode=mode)
            record.figure(f"{name}_packed_vs_unpacked_{short}", arms.worst(packed, plain), at_most=bound)
            several = arms.gradient(groups, dtype, mode=mode, parts=3)
            record.figure(f"{name}_3_accumulates_vs_one_{short}", arms.worst(several, packed), at_most=bound)
            eight = arms.gradient(groups, dtype, mode=mode, sizes=(2, 2, 2))
            record.figure(f"{name}_8_devices_vs_one_{short}", arms.worst(eight, packed), at_most=bound)
    for loss_mode in arms.LOSSES:
        mode = "prompt-mean" if loss_mode == "cispo" else "seq-mean-token-mean"
        given = arms.algorithm(mode, loss_mode=loss_mode)
        packed = arms.gradient(groups, np.float64, given=given)
        plain = arms.plain_gradient(groups, np.float64, mode=mode, loss_mode=loss_mode)
        record.figure(f"x64_packed_vs_unpacked_{loss_mode}", arms.worst(packed, plain), at_most=EXACT)
        for name, more in (("3_accumulates", dict(parts=3)), ("8_devices", dict(sizes=(2, 2, 2)))):
            other = arms.gradient(groups, np.float64, given=given, **more)
            record.figure(f"x64_{name}_vs_one_{loss_mode}", arms.worst(other, packed), at_most=EXACT)
    _planted(record, groups)


def _planted(record, groups) -> None:
    """Measures the distance that each planted fault makes, here and not by a test's exit code."""
    mode = "seq-mean-token-mean"
    plain = arms.plain_gradient(groups, np.float64, mode=mode)
    for fault in tests.FAULTS:
        with pytest.MonkeyPatch.context() as patch:
            fault(patch)
            found = arms.worst(arms.gradient(groups, mode=mode), plain)
        record.figure(f"planted_{fault.__name__}", found, at_least=1e-3)
