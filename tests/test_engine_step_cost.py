"""The step-cost table: interpolation by hand, the choice of a size by brute force, and its file."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from jaxrl_post.engine import step_cost


def test_between_and_outside_the_measured_sizes():
    table = step_cost.StepCost((64, 128), (1.0, 1.5), "hand")
    assert table(64) == 1.0 and table(96) == 1.25 and table(256) == 2.5 and table(32) == 0.75


STEEP = step_cost.StepCost((64, 128, 256), (1.0, 2.5, 6.0), "rows cost time")
FLAT = step_cost.StepCost((64, 128, 256), (1.0, 1.01, 1.02), "rows are free")
SIZES = (64, 128, 256)


DEAR = dataclasses.replace(STEEP, drafting=0.04)


def none_right(rows):
    return 0.0


def half_right(rows):
    return rows / 2


def at_most_40_right(rows):
    return min(rows, 40)


CHOICES = [  # costs, running slots, waiting rows, right drafts, further arguments: size and whether to draft, and why
    (STEEP, 60, 1000, none_right, {}, (64, False), "the most useful rows a second"),
    (FLAT, 60, 1000, none_right, {}, (256, False), "rows are free"),
    (FLAT, 60, 0, none_right, {}, (64, False), "nothing waits"),
    (STEEP, 100, 0, none_right, {}, (128, False), "a size must hold every running slot"),
    # 60 running slots leave 4 rows of 64 and 68 of 128
    (STEEP, 60, 0, half_right, {}, (64, True), "(60 + 34) / 2.5 < 60 / 1 < (60 + 2) / 1"),
    (FLAT, 60, 0, half_right, {}, (256, True), "rows are free"),
    (FLAT, 60, 0, at_most_40_right, {}, (128, True), "no more are right"),
    (STEEP, 64, 0, half_right, {}, (64, False), "no row is left"),
    (STEEP, 60, 4, half_right, {}, (64, False), "waiting rows come first"),
    (DEAR, 60, 0, half_right, {}, (64, False), "62 / 1.04 < 60"),
    (DEAR, 60, 0, half_right, {"must_draft": True}, (64, True), "it must"),
    (STEEP, 60, 0, none_right, {"must_draft": True}, (64, True), "it must"),
    (STEEP, 60, 0, half_right, {"opening": 0.02}, (64, True), "61.6 / 1.02 > 60"),
    (STEEP, 60, 0, half_right, {"opening": 0.04}, (64, False), "61.6 / 1.04 < 60"),
]


def test_drafts_are_made_where_they_bring_more_than_they_cost():
    """By hand: the size with the most useful rows a second."""
    failures = [
        (why, found)
        for cost, running, backlog, worth, more, chosen, why in CHOICES
        if (found := step_cost.best_size(cost, SIZES, running, backlog, worth, **more)) != chosen
    ]
    assert not failures


def test_tries_take_a_hundredth_of_the_time():
    """0.5 s to start drafting, and steps of 10 ms: 0.5 / (5000 * 0.01) = 0.01."""
    table = step_cost.StepCost((64, 128), (0.01, 0.02), "hand", opening=0.5)
    assert step_cost.tries_apart(table) == 5000
    assert step_cost.tries_apart(step_cost.StepCost((64, 128), (0.01, 0.02), "hand")) == 0


def test_the_choice_is_that_of_brute_force():
    noise = np.random.default_rng(0)
    for _ in range(200):
        table = step_cost.StepCost(
            SIZES, tuple(np.sort(noise.random(3) + 0.1).tolist()), "random", drafting=noise.random() / 10
        )
        running, backlog, gain = int(noise.integers(1, 200)), float(noise.integers(0, 100)), noise.random()
        best, rates = None, {}
        for size in SIZES:
            for drafts in (False, True):
                if size >= running:
                    forced = min(size, running + backlog)
                    right = (size - forced) * gain * step_cost.SURE * drafts
                    rates[size, drafts] = (forced + right) / (table(size) + table.drafting * drafts)
        best = max(rates.values())
        assert rates[step_cost.best_size(table, SIZES, running, backlog, lambda rows: gain * rows)] == best


def test_analytic_table_knows_the_device_kind_and_has_a_digest():
    chip = step_cost.analytic("TPU v5 lite", 7_000_000_000, 2, (64, 512))
    assert chip.source == "analytic:v5e"
    assert chip(64) == pytest.approx(14e9 / 8.19e11 + 5e-5) and chip(512) == pytest.approx(
        2 * 7e9 * 512 / 1.97e14 + 5e-5
    )
    assert (
        chip.digest
        == step_cost.analytic("TPU v5 lite", 7_000_000_000, 2, (64, 512)).digest
        != step_cost.analytic("NVIDIA H200", 7_000_000_000, 2, (64, 512)).digest
    )


def test_the_table_of_a_cpu_is_part_of_runs():
    """Its digest is kept with every run on a CPU: 1e11 FLOP/s, 2e10 bytes/s, 0.3 ms of overhead."""
    table = step_cost.analytic("cpu", 320_000, 4, (64, 128))
    seconds = [max(320_000 * 4 / 2e10, 2 * 320_000 * rows / 1e11) + 3e-4 for rows in (64, 128)]
    assert (table.rows, list(table.seconds), table.source) == ((64, 128), seconds, "analytic:cpu")


def test_an_unknown_device_costs_what_a_slow_one_does():
    known, unknown = (step_cost.analytic(kind, 7_000_000_000, 2, (64, 512)) for kind in ("NVIDIA L4", "Quantum 9000"))
    assert unknown.seconds == known.seconds and unknown.source == "analytic:l4?"


def test_file(tmp_path):
    good = tmp_path / "good.json"
    good.write_text(json.dumps({"figures": {"step_s": {"128": 0.004, "64": 0.002}}}))
    table = step_cost.load(str(good))
    assert table.rows == (64, 128) and table.drafting == 0.0
    others = {"drafting_s": 0.0005, "opening_s": 0.25, "train_token_s": 0.125, "train_step_s": 0.5}
    good.write_text(json.dumps({"figures": {"step_s": {"128": 0.004, "64": 0.002}, **others}}))
    whole = step_cost.load(str(good))
    assert (whole.drafting, whole.opening, whole.training, whole.updating) == (0.0005, 0.25, 0.125, 0.5)
    changes = ({"opening": 0.0}, {"training": 0.0}, {"updating": 0.0}, {"training": 0.5, "updating": 0.125})
    tables = [table, whole, *(dataclasses.replace(whole, **change) for change in changes)]
    assert len({one.digest for one in tables}) == 6
    with pytest.raises(ValueError, match="no such file; write one with scripts/bench.py cost"):
        step_cost.load(str(tmp_path / "none.json"))
    bad = tmp_path / "bad.json"
    bad.write_text("{}")
    with pytest.raises(ValueError, match="expected figures.step_s"):
        step_cost.load(str(bad))
    for name, value, what in (
        ("train_token_s", "-0.1", "seconds of training are -0.1 and"),
        ("drafting_s", "NaN", "drafting are nan"),
        ("opening_s", "Infinity", "opening are inf"),
        ("train_step_s", "-1", "updating are -1.0 and"),
    ):
        bad.write_text(f'{{"figures": {{"step_s": {{"64": 0.002}}, "{name}": {value}}}}}')
        with pytest.raises(ValueError, match=what):
            step_cost.load(str(bad))
    bad.write_text('{"figures": {"step_s": {"64": NaN}}}')
    with pytest.raises(ValueError, match="times be positive"):
        step_cost.load(str(bad))


SEVEN = step_cost.SHAPES["qwen2.5-7b"]


def test_a_decode_step_by_hand():
    """7.62e9 parameters in bf16 at 3.35e12 bytes/s; KV of 28 layers x 4 heads x 128 x 2 x 2 bytes; 0.6 of 9.9e14
    FLOP/s.

    64 sequences of 1000 tokens are bound by memory, 4096 of one token by arithmetic. tensor 2 halves all but the
    overhead."""
    one, two = (step_cost.decode("NVIDIA H800", SEVEN, tensor=tensor, per_collective_s=1e-4) for tensor in (1, 2))
    memory = (2 * 7.62e9 + 64_000 * 57_344) / 3.35e12
    arithmetic = 4096 * 2 * 7.62e9 / (0.6 * 9.9e14)
    rows, context = np.array([64, 4096, 0]), np.array([64_000, 4096, 0])
    assert one(rows, context) == pytest.approx([memory + 5e-5, arithmetic + 5e-5, 0.0])
    assert two(rows, context) == pytest.approx([memory / 2 + 1.5e-4, arithmetic / 2 + 1.5e-4, 0.0])
    assert one.prefill_s == pytest.approx(2 * 7.62e9 / (0.5 * 9.9e14)) and one.digest != two.digest


def test_a_given_step_has_its_parts():
    steps = step_cost.DecodeCost(weights_s=2.0, token_s=0.01, row_s=0.5, fixed_s=0.25, request_s=0.1)
    assert steps(np.array([1, 10]), np.array([100, 100])) == pytest.approx([3.0 + 0.1 + 0.25, 5.0 + 1.0 + 0.25])
    with pytest.raises(ValueError, match="seconds must be at least 0, and a step must take some"):
        step_cost.DecodeCost(weights_s=0.0, token_s=1.0, row_s=0.0)


def test_a_table_costs_by_its_rows_alone():
    steps = step_cost.TableCost(table=step_cost.StepCost((64, 128), (1.0, 1.5), "hand"))
    assert steps(np.array([96, 0]), np.array([5, 9])).tolist() == [1.25, 0.0] and steps.prefill_s == 1.5 / 128


def test_kv_that_fits_beside_the_weights():
    assert step_cost.kv_tokens("h200", SEVEN) == int((0.9 * (143771 - 1024) * 2**20 - 1.524e10) / 57_344)
    with pytest.raises(
        ValueError, match="1 x v5e has 1.52e[+]10 usable bytes, the weights need 1.52e[+]10: use more devices"
    ):
        step_cost.kv_tokens("TPU v5 lite", SEVEN)


@pytest.mark.parametrize(
    "figures,words",
    [
        ('{"step_s": {"64": 1e-320}}', "step_s.64 must be seconds, a number from 1e-12 to 1e"),
        ('{"step_s": {"64": "0.1"}}', "step_s.64 must be seconds, .* got '0.1'"),
        ('{"step_s": {"64": true}}', "step_s.64 must be seconds"),
        ('{"step_s": {"-3": 1}}', "expected figures.step_s with rows -> seconds, got rows '-3'"),
        ('{"step_s": {"64": 1' + "0" * 400 + "}}", "step_s.64 must be seconds"),
        ('{"step_s": {"64": 1}, "opening_s": ' + "[" * 5000 + "]" * 5000 + "}", "more than 64 levels"),
        ("[1]", "expected figures.step_s with rows -> seconds"),
    ],
)
def test_a_malformed_table_is_one_sentence_with_its_file(tmp_path, figures, words):
    file = tmp_path / "table.json"
    file.write_text(f'{{"figures": {figures}}}')
    with pytest.raises(ValueError, match=f"table.json: .*{words}") as caught:
        step_cost.load(str(file))
    assert type(caught.value) is ValueError and len(str(caught.value)) < 400
