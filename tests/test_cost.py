"""The step-cost table: interpolation by hand, the choice of a size by brute force, and its file."""

from __future__ import annotations

import json

import pytest

from jaxrl_post import cost


def test_between_and_outside_the_measured_sizes():
    table = cost.StepCost((64, 128), (1.0, 1.5), "hand")
    assert table(64) == 1.0 and table(96) == 1.25 and table(256) == 2.5 and table(32) == 0.75


def test_best_size_has_the_most_useful_rows_per_second():
    steep = cost.StepCost((64, 128, 256), (1.0, 2.5, 6.0), "rows cost time")
    flat = cost.StepCost((64, 128, 256), (1.0, 1.01, 1.02), "rows are free")
    assert cost.best_size(steep, (64, 128, 256), running=60, backlog=1000) == 64
    assert cost.best_size(flat, (64, 128, 256), running=60, backlog=1000) == 256
    assert cost.best_size(flat, (64, 128, 256), running=60, backlog=0) == 64
    assert cost.best_size(steep, (64, 128, 256), running=100, backlog=0) == 128, "a size must hold every running slot"


def test_analytic_table_knows_the_device_kind_and_has_a_digest():
    chip = cost.analytic("TPU v5 lite", 7_000_000_000, 2, (64, 512))
    assert chip.source == "analytic:v5e"
    assert chip(64) == pytest.approx(14e9 / 8.2e11 + 5e-5) and chip(512) == pytest.approx(2 * 7e9 * 512 / 1.97e14 + 5e-5)
    assert chip.digest == cost.analytic("TPU v5 lite", 7_000_000_000, 2, (64, 512)).digest != \
        cost.analytic("NVIDIA H200", 7_000_000_000, 2, (64, 512)).digest


def test_an_unknown_device_is_refused():
    with pytest.raises(ValueError, match="no analytic step-cost table for a Quantum 9000"):
        cost.analytic("Quantum 9000", 1, 4, (64,))


def test_file(tmp_path):
    good = tmp_path / "good.json"
    good.write_text(json.dumps({"figures": {"step_s": {"128": 0.004, "64": 0.002}}}))
    assert cost.load(str(good)).rows == (64, 128)
    with pytest.raises(ValueError, match="no such file; write one with scripts/bench.py cost"):
        cost.load(str(tmp_path / "none.json"))
    bad = tmp_path / "bad.json"
    bad.write_text("{}")
    with pytest.raises(ValueError, match="expected figures.step_s"):
        cost.load(str(bad))
