"""scripts/rl_check.py without a run: what it reads from a folder, predicts beside it, fits, and writes as cost tables."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

import gpu_check  # noqa: E402
import rl_check  # noqa: E402
from gpu.part import Part  # noqa: E402
from rl import arms, config, costs, inputs, sections  # noqa: E402

from jaxrl_post.config import resolve  # noqa: E402
from jaxrl_post.engine import step_cost  # noqa: E402
from jaxrl_post.models import decoder  # noqa: E402
from jaxrl_post.runs.run_logs import RunLogs  # noqa: E402

PREDICTED = {"step_s": 2.0, "gen_s": 1.0, "update_actor_s": 0.5, "update_weights_s": 0.0, "device": "TPU v5 lite"}
PREDICTED |= {"steps_s": {"16": 0.01, "32": 0.015, "64": 0.03}}


def folder(place: Path) -> Path:
    """A run of three steps, the last two of which were published together, as those of a pipeline can be."""
    rows = [
        {"step": 1, "training/global_step": 1, "timing_s/step": 50.0, "timing_s/gen": 40.0, "off_policy/max": 0},
        {"step": 2, "training/global_step": 2, "off_policy/max": 3},
        {"step": 3, "training/global_step": 3, "timing_s/step": 8.0, "timing_s/gen": 4.0, "timing_s/update_actor": 2.0},
        {"step": 3, "eval/mean": 1.0},
    ]
    counts = {"sched/num_groups_trained": 4, "rollout/num_tokens": 400, "rows/decode": 100, "response_length/mean": 5}
    sizes = {"rows/steps": 30, "rows/size_16": 10, "rows/size_32": 20, "rows/draft_accepted": 20}
    lines = [row | (counts | sizes if "training/global_step" in row else {}) for row in rows]
    place.mkdir()
    (place / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    kept = {"steps": 3, "scheduler": {"group_size": 2, "prompts": 4}, "derived": {"processes": 1}}
    (place / "config.json").write_text(json.dumps(kept))
    (place / "summary.json").write_text(json.dumps({"device_time": {"generating": 0.6, "idle rows": 0.4}}))
    return place


def test_a_run_is_read_without_its_first_step(tmp_path):
    found = arms.left_by(RunLogs(folder(tmp_path / "run")))
    assert (found["steps"], found["step_s"], found["gen_s"], found["update_actor_s"]) == (3, 4.0, 2.0, 1.0)
    assert found["trained_rollouts"] == found["wanted_rollouts"] == 24 and found["staleness"] == 3
    assert found["trained_tokens_per_s"] == 100.0 and found["generated_tokens_per_s"] == 30.0
    assert found["device_time"] == {"generating": 0.6, "idle rows": 0.4}
    assert found["by_step"] == [
        {"sizes": {"16": 10, "32": 20}, "gen_s": 4.0, "train_s": 2.0, "tokens": 400, "publish_s": 0.0}
    ]


@pytest.fixture
def part(tmp_path, monkeypatch):
    """A part whose processes leave the folder above, and predict the same for each mode but 1.5 s for a pipeline."""
    made = Part(told={})

    def run(*given, **how):
        place = next(one.removeprefix("--run-dir=") for one in given if str(one).startswith("--run-dir="))
        folder(Path(place))
        return 60.0

    def said(script, path, lengths, *options, **how):
        told = PREDICTED | {"plan": "fits", "plan_mib": 10.0}
        return json.dumps(told | ({"step_s": 1.5} if "scheduler.name=pipeline" in options else {}))

    monkeypatch.setattr(made, "run", run)
    monkeypatch.setattr(made, "said", said)
    monkeypatch.setattr(arms, "_inputs", lambda *_: [])
    return made


def test_measured_stands_beside_predicted_and_synchronous_rounds(part, capsys):
    for mode in ("sync", "pipeline"):
        arms.run(part, sections.TINY, mode)
        part.told = dict(part.figures)
    found = part.figures
    assert part.ok and found["tiny.sync.measured_over_predicted"] == {
        "step_s": 2.0,
        "gen_s": 2.0,
        "update_actor_s": 2.0,
    }
    assert found["tiny.pipeline"]["times_as_fast_as_sync"] == 1.0
    assert found["tiny.pipeline.predicted"]["times_as_fast_as_sync"] == pytest.approx(2 / 1.5)
    known = sections.predictions("", found)
    rows = {row[0]: row for row in gpu_check.expected.rows(found, part.bounds, known)}
    assert rows["tiny.pipeline/step_s"][1:3] == ("4", "1.5 (predicted)")
    assert rows["tiny.pipeline.trained_rollouts"][3:] == ("= 24", "ok")


def test_a_run_that_the_plan_refuses_is_a_figure(part, monkeypatch):
    told = json.dumps(PREDICTED | {"plan": "does not fit", "plan_mib": 20000.0})
    monkeypatch.setattr(part, "said", lambda *_, **how: told)
    monkeypatch.setattr(part, "run", lambda *_, **how: pytest.fail("it runs"))
    arms.run(part, sections.TINY, "sync")
    assert part.figures == {"tiny.sync": {"without_room_mib": 20000.0}}


def test_costs_are_those_that_made_the_seconds():
    noise, right = np.random.default_rng(0), {"16": 0.002, "32": 0.003}
    counts = [{size: int(n) for size, n in zip(right, noise.integers(5, 50, 2))} for _ in range(6)]
    steps = [
        {
            "sizes": one,
            "gen_s": sum(n * right[s] for s, n in one.items()),
            "train_s": 2.0,
            "tokens": 400,
            "publish_s": 0.1,
        }
        for one in counts
    ]
    found = costs.fitted(steps)
    assert found["step_s"] == pytest.approx(right) and found["train_token_s"] == 0.005
    assert found["train_step_s"] == pytest.approx(0.1)
    odd = [step | {"gen_s": 0.01 * step["sizes"]["16"] - 0.001 * step["sizes"]["32"]} for step in steps]
    assert set(costs.fitted(odd)["step_s"]) == {"16"}


def test_a_size_that_no_step_had_is_scaled_by_the_nearest_that_one_had():
    found, scaled = costs.completed({"16": 0.02, "32": 0.06}, PREDICTED["steps_s"])
    assert found == pytest.approx({"16": 0.02, "32": 0.06, "64": 0.12}) and scaled == ["64"]


def test_a_correction_is_a_cost_table_with_date_and_device(part, tmp_path):
    arms.run(part, sections.TINY, "sync")
    part.told = dict(part.figures)
    costs.correct(part, sections.TINY)
    (tmp_path / "x.json").write_text(json.dumps({"figures": part.figures}))
    (file,) = rl_check.corrections(tmp_path / "x.json")
    told = json.loads(file.read_text())
    assert file.name == "x-costs-tiny.json" and told["device"] == "TPU v5 lite" and len(told["date"]) == 10
    table = step_cost.load(str(file))
    assert "64" in told["scaled"] and "64" in told["figures"]["step_s"]
    assert table.training == 0.005 and all(seconds > 0 for seconds in table.seconds)


def test_every_section_has_a_function_and_waits_for_what_it_reads():
    names = [one.name for one in sections.RL.table]
    assert set(names) == set(sections.functions(sections.SHAPES)) and len(names) == 15
    for place, one in enumerate(sections.RL.table):
        assert one.needs_s + gpu_check.MARGIN_S < one.limit_s and (not one.after or one.after in names[:place])
    assert "NVIDIA" not in sections.why_not({"platform": "gpu", "kind": "NVIDIA H100 80GB HBM3", "count": 1})
    assert "--small" in sections.why_not({"platform": "cpu", "kind": "cpu", "count": 1})


@pytest.mark.parametrize("mode", arms.MODES)
@pytest.mark.parametrize("more", [(), sections.TINY.options], ids=["device", "small"])
def test_options_of_a_mode_are_those_of_a_run(mode, more):
    found = resolve(config.get_config(), ["model.preset=stories260k", "data.train=x.jsonl", *more, *arms.MODES[mode]])
    assert found.rollouts_per_step == (16 if more else 128)


def test_prompts_have_the_lengths_of_gsm8k_and_the_shapes_are_the_published_ones():
    lengths = [len(row["question"]) for row in inputs.prompts(4096)]
    assert np.median(lengths) == pytest.approx(85, abs=3) and min(lengths) >= 40 and max(lengths) <= 250
    assert len(set(inputs.LETTERS)) == len(inputs.LETTERS) == 254
    # Qwen3-1.7B: 1.72 billion weights, its head tied (model card).
    import jax

    count = sum(x.size for x in jax.tree.leaves(decoder.abstract(inputs.MODELS["qwen3_1_7b"])))
    assert count == pytest.approx(1.72e9, rel=0.005)


def test_a_folder_without_weights_is_refused(tmp_path, capsys):
    assert rl_check.main([f"--model={tmp_path}", f"--json={tmp_path / 'x.json'}"]) == 2
    assert "no config.json" in capsys.readouterr().err and not (tmp_path / "x.json").exists()
