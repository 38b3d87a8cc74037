"""Gradients of low-rank additions against an explicit full model with W + scale A B, and planted faults (tests/lora_arms.py)."""

from __future__ import annotations


def show(record) -> None:
    import lora_arms
    import numpy as np
    import pytest

    record.figure("lora.gradient_gap_float32", lora_arms.gap(lora_arms.ROOTED), at_most=5e-6)
    record.figure("lora.gradient_gap_x64", lora_arms.gap(lora_arms.PLAIN, np.float64), at_most=1e-12)
    for fault in lora_arms.FAULTS:
        with pytest.MonkeyPatch.context() as patch:
            lora_arms.planted(fault, patch)
            record.figure(f"lora.planted_{fault}", lora_arms.gap(lora_arms.ROOTED), at_least=1e-3)
    record.figure("lora.planted_trained_base_is_found", lora_arms.trained_base_is_found(), equals=True)
