"""The parts of the show training-parity: one module for each way to train, with a function `show(record)`.

A part compares gradients of the learner, per leaf, with an independent implementation, and plants faults that the same
comparison must find. A new way to train is a new module here and a name in scripts/shows/training_parity.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

SINGLE = 5e-6  # per leaf, the relative 2-norm of the difference in float32
FAULT = 1e-3  # what a planted fault must differ by


def plant(record, part: str, faults: Mapping[str, Callable], distance: Callable[[], float]) -> None:
    """Measures `distance` with each fault in place. A fault gets pytest's monkeypatch, which takes it back."""
    import pytest

    for name, fault in faults.items():
        with pytest.MonkeyPatch.context() as patch:
            fault(patch)
            record.figure(f"{part}_planted_{name}", distance(), at_least=FAULT)
