"""Seconds of an optimizer step on a slice by a trial of the run's scheduler: by hand, and what it says where it cannot."""

from pathlib import Path

import numpy as np
import pytest

from jaxrl_post.config import load, resolve
from jaxrl_post.launch.parts import inputs
from jaxrl_post.launch.plan import chips, roofline, slice_plan
from jaxrl_post.models.presets import PRESETS
from jaxrl_post.simulate import observed

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
SEVEN = PRESETS["qwen2_5_7b"]
LENGTH, PROMPT = 256, 512


@pytest.fixture
def equal(monkeypatch):
    """All rollouts have one length."""
    same = observed.Observed(lengths=((LENGTH,) * 8,) * 4, source="made")
    monkeypatch.setattr(observed, "prior", lambda cap: same)


def predicted(*overrides, name="models/gsm8k_qwen2_5_7b.py:8xh100", where="8xh100"):
    config = resolve(load(str(CONFIGS / name)), ["steps=64", *overrides], platform="gpu")
    return config, slice_plan.step_seconds(config, SEVEN, chips.read(where), 99.0, slice_plan.lengths(config))


def test_equal_rollouts_in_full_slots_by_hand(equal):
    """Eight H100, each a replica with 128 slots for 128 rollouts: a round is prefill, 256 steps with a longer context each,
    and the training of 1,024 sequences."""
    config, found = predicted()
    chip, weights = chips.read("8xh100").chip, 7615616512
    assert config.engine.slots == 128 and config.rollouts_per_step == 1024
    memory, arithmetic = chip.bandwidth * 0.85, chip.flops * 0.5
    steps = 0.0
    for done in range(LENGTH):
        read = 2 * weights + 128 * (PROMPT + done) * 57344
        host = (1e-3 + 2e-6 * 128 * 8) / config.engine.steps_per_dispatch
        rows = min(size for size in config.engine.row_sizes if size >= 128)
        steps += max(read / memory, rows * 2 * weights / arithmetic) + host
    prefill = 128 * (2 * weights * PROMPT + 2 * 28 * 28 * 128 * PROMPT**2) / arithmetic
    whole = PROMPT + LENGTH
    train = 3 * 1024 * (2 * weights * whole + 2 * 28 * 28 * 128 * whole**2) / (8 * chip.flops * 0.45)
    links = 1024 * whole / (config.batch.rows * config.batch.tokens)
    links *= (7 / 8 * weights * 6 + 3 * 8 * config.batch.tokens * 3584 * 2) / (chip.link * 0.85)
    publish = 2 * weights / (chip.link * 0.85)
    assert found.simulated and found.step_s == pytest.approx(steps + prefill + train + links + publish, rel=0.02)
    takes, lengths, left_out = found.lines
    assert f"takes {found.step_s:.1f} s by simulation of the scheduler (sync), predicted, not measured" in takes
    assert "256 tokens on average, at most 256 (made)" in lengths and "not simulated: evaluations" in left_out


def test_two_epochs_train_twice_on_one_generation(equal):
    """A round is then two optimizer steps, and takes one training more than a round of one."""
    one, two = (
        predicted(f"scheduler.ppo_epochs={epochs}", "eval.every=32", "checkpoint.every=32")[1].step_s
        for epochs in (1, 2)
    )
    whole = PROMPT + LENGTH
    flops = 3 * 1024 * (2 * 7615616512 * whole + 2 * 28 * 28 * 128 * whole**2)
    train = flops / (8 * chips.read("8xh100").chip.flops * 0.45)
    assert train < 2 * two - one < 1.5 * train


def test_a_step_costs_no_less_than_its_parts_without_a_tail(equal):
    """What the roofline adds up for these lengths is within a few percent of what the trial finds: no slot ever waits."""
    config, found = predicted("sampling.max_tokens=256", "engine.max_length=768")
    parts = roofline.seconds(config, SEVEN, chips.read("8xh100"), PROMPT)
    # the roofline trains on answers of half the longest: these are all as long as the longest
    train = parts["train"] + parts["collectives of training"]
    assert found.step_s - parts["decode"] - parts["prefill"] == pytest.approx(train * 768 / 640, rel=0.15)


def test_a_tail_makes_rounds_wait_and_a_pipeline_does_not():
    """RollPacker's lengths: the longest of a round is some seven times the mean."""
    split = ["mesh.fsdp=4", "mesh.engine=4", "batch.rows=4"]
    sync = predicted(*split)[1].step_s
    piped = predicted(*split, "scheduler.name=pipeline", "scheduler.max_staleness=4")[1].step_s
    assert piped < 0.9 * sync


def test_auto_says_what_it_would_choose():
    config, found = predicted("scheduler.name=auto")
    assert config.scheduler.name == "auto" and ", chosen by the simulator), predicted" in found.lines[0]


def test_one_config_is_predicted_alike_every_time():
    assert predicted()[1] == predicted()[1]


def test_what_generates_nothing_has_the_rooflines_seconds():
    config = resolve(load(str(CONFIGS / "demo/sft.py")))
    found = slice_plan.step_seconds(config, inputs.shape(config), chips.read("h100"), 12.5, slice_plan.lengths(config))
    assert found.step_s == 12.5 and not found.simulated
    assert found.lines == (
        "An optimizer step takes 12.5 s by the roofline alone, predicted, not measured: engine.name=demonstrations generates "
        "nothing, so there is no schedule to simulate",
    )


def test_step_costs_by_hand():
    """A replica of four v5e chips: two sums a layer, and a dispatch for every 32 steps."""
    config = resolve(load(str(CONFIGS / "models/gsm8k_qwen2_5_7b.py:v5e-16")), platform="tpu")
    cost = roofline.engine_step(config, SEVEN, chips.read("v5e-16"), PROMPT)
    memory = 4 * 8.19e11 * 0.85
    assert config.mesh.replica == 4 and config.replicas == 4
    assert cost.weights_s == pytest.approx(2 * 7615616512 / memory) and cost.token_s == pytest.approx(57344 / memory)
    assert cost.fixed_s == pytest.approx(2 * 28 * 15e-6 + 1e-3 / config.engine.steps_per_dispatch)
    small = float(cost(np.array([1]), np.array([0]))[0])
    assert small == pytest.approx(cost.weights_s + cost.fixed_s + 4 * 2e-6 / config.engine.steps_per_dispatch)
