"""Qwen3.5 and Qwen3-Next in packed rows have transformers' log-probs of each segment alone, and the gradients of float64.

Log-probs: of twelve segments in two rows, by the learner's program and by the engine's rows, on the random checkpoints of
tests/goldens. Gradients: of their sum, leaf by leaf, beside tests/plain_decoder.py, in which a state goes from token to token.
Mistakes are planted in both: among them a state or a convolution that crosses a boundary or a slot, and a decay behind the update.

With JAXRL_ORACLE set to a python that has torch and transformers, transformers also reads what we write.
"""

from __future__ import annotations

import segment_parity

MINUTES = 6.0
PLATFORM = "cpu"
FAULTS = 21


def show(record) -> None:
    import segment_arms

    record.figure("planted_faults", segment_parity.measure(record, segment_arms.HYBRID), at_least=FAULTS)
