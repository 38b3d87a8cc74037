"""What the show same-bits takes for equal: arrays by their bits, decisions by their bytes but for one dead field."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
sys.path.insert(0, str(SCRIPTS))

_spec = importlib.util.spec_from_file_location("same_bits", SCRIPTS / "shows" / "same_bits.py")
same_bits = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(same_bits)


def rollouts(file: Path, finishes: list[str], **other) -> dict:
    """Writes two rollouts and reads them as the show does."""
    found = {name: np.arange(4, dtype=np.float32) for name in same_bits.TOKENS}
    texts = {"finishes": finishes, "ids": [[7, "train", 0, "a", 0, 0]]}
    found |= {"finish": np.array([0, 2], np.uint8), "texts": np.frombuffer(json.dumps(texts).encode(), np.uint8)}
    np.savez(file, **{name: array for name, array in (found | other).items() if array is not None})
    return same_bits.arrays(file)


def test_a_dead_reason_to_finish_and_new_names_are_no_difference(tmp_path):
    base = rollouts(tmp_path / "a.npz", ["eos", "stop", "length", "cancelled"], argmax_tokens=np.zeros(4))
    new = rollouts(tmp_path / "b.npz", ["eos", "stop", "length"], argmax_tokens=np.zeros(4))
    assert json.loads(str(base["finish"])) == ["eos", "length"]
    assert same_bits.differing_arrays(base, new) == []


@pytest.mark.parametrize(
    "name, other",
    [
        ("logprobs", {"logprobs": np.array([0, 1, 2, np.nextafter(np.float32(3), np.float32(4))], np.float32)}),
        ("logprobs", {"logprobs": np.array([-0.0, 1, 2, 3], np.float32)}),  # equal numbers, other bits
        ("logprobs", {"logprobs": np.arange(4, dtype=np.float64)}),
        ("tokens", {"tokens": np.array([0, 1, 2], np.float32)}),
        ("tokens", {"tokens": None}),  # a core array that one side lacks
        ("finish", {"finish": np.array([0, 1], np.uint8)}),
        ("texts", {"texts": np.frombuffer(b'{"finishes": ["eos", "stop", "length"], "ids": []}', np.uint8)}),
    ],
)
def test_planted_differences_of_arrays_are_found(tmp_path, name, other):
    finishes = ["eos", "stop", "length"]
    base, new = rollouts(tmp_path / "a.npz", finishes), rollouts(tmp_path / "b.npz", finishes, **other)
    assert same_bits.differing_arrays(base, new) == same_bits.differing_arrays(new, base) == [name]


def test_decisions_may_only_lack_the_dead_field():
    with_it = '{"cancel":[],"clock":3,"event":"complete"}\n{"clock":4,"event":"take"}\n'
    without = '{"clock":3,"event":"complete"}\n{"clock":4,"event":"take"}\n'
    assert same_bits.same_decisions(with_it, with_it) and same_bits.same_decisions(with_it, without)
    assert not same_bits.same_decisions(with_it, without.replace("4", "5"))
    assert not same_bits.same_decisions(with_it.replace("[]", '[["a"]]'), without)
    assert not same_bits.same_decisions(with_it, with_it + with_it)
