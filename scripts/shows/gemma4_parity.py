"""Gemma 4 in packed rows has transformers' log-probs of each segment alone, and the gradients of float64.

As the show `hybrid-parity`, for the variants with values that are keys, with embeddings of each layer and lent keys, and with
experts beside the feed-forward. Planted are, among others, values taken behind the norm or the rotation of keys.
"""

from __future__ import annotations

import segment_parity

MINUTES = 6.0
PLATFORM = "cpu"
FAULTS = 17


def show(record) -> None:
    import segment_arms

    record.figure("planted_faults", segment_parity.measure(record, segment_arms.GEMMA4), at_least=FAULTS)
