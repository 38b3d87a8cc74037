"""When a run without a checkpoint may begin again, and what is kept of it. Every case is decided by hand."""

from __future__ import annotations

import json

import pytest

from jaxrl_post.runs.checkpoint import log_marks


def config(every, steps=9, updates=1):
    rounds = {"mini_batches": updates, "ppo_epochs": 1}
    return {"checkpoint": {"every": every}, "scheduler": rounds, "steps": steps}


def metrics(folder, *steps, end=""):
    (folder / "metrics.jsonl").write_text("".join(json.dumps({"step": step}) + "\n" for step in steps) + end)


def test_the_last_finished_step(tmp_path):
    assert log_marks.last_step(tmp_path) == 0
    metrics(tmp_path, 0)
    assert log_marks.last_step(tmp_path) == 0  # an evaluation before the first step
    metrics(tmp_path, 0, 1, 2, 2, end='{"step": 3, "lo')
    assert log_marks.last_step(tmp_path) == 2


@pytest.mark.parametrize(
    "last, given, there, refused",
    [
        (0, config(2), [], False),  # no step is finished
        (1, config(2), [], False),  # killed before the first save
        (2, config(2), [], False),  # or in it
        (4, config(2), ["checkpoints/step_000002.part"], False),  # or in it, while the run went on
        (3, config(2), [], True),
        (4, config(2), ["checkpoints/step_000004.part"], True),  # in a later one
        (4, config(3, updates=2), [], False),  # the first publish after 3 steps is that of step 4
        (5, config(3, updates=2), [], True),
        (9, config(50), [], False),  # in the save at the end
        (9, config(50), ["summary.json"], True),  # the run had ended, so it had saved
        (1, config(0), [], True),  # it never saves
        (5, config(2), ["checkpoints/step_000004.damaged-1"], False),  # store says what is wrong with these
    ],
)
def test_who_may_begin_again(tmp_path, last, given, there, refused):
    for name in there:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).mkdir()
    said = log_marks.refusal(tmp_path, last, given)
    assert bool(said) == refused
    if refused:
        assert f"has logs of {last} finished steps and no checkpoint" in said and str(tmp_path / "checkpoints") in said


@pytest.mark.parametrize(
    "published, last, there, refused",
    [
        ((2, 4), 4, [], False),  # killed in the save of step 4, the first publish that reaches step 3
        ((2,), 5, [], False),  # or before that publish
        ((), 4, [], False),  # or before the very first one
        ((2, 4), 6, ["step_000004.part"], False),  # or in the save, while the run went on
        ((2, 4, 6), 6, [], True),
        ((2, 4, 6), 6, ["step_000006.part"], True),
    ],
)
def test_a_pipeline_saves_with_a_publish(tmp_path, published, last, there, refused):
    """Only rows of published steps have seconds."""
    rows = [{"step": step} | ({"timing_s/step": 0.1} if step in published else {}) for step in range(last + 1)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name in there:
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert bool(log_marks.refusal(tmp_path, last, config(3))) == refused


def test_logs_are_set_aside_whole_and_forgotten_at_the_end(tmp_path):
    for time in (1, 2):
        metrics(tmp_path, time)
        (tmp_path / "rollouts").mkdir()
        (tmp_path / "rollouts" / "index.jsonl").write_text(f"{time}")
        (tmp_path / "rewards_aside.jsonl").write_text("stays")
        log_marks.set_aside(tmp_path)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["rewards_aside.jsonl", "unsaved"]
        assert (tmp_path / "unsaved" / f"00{time}" / "rollouts" / "index.jsonl").read_text() == f"{time}"
    assert [log_marks.last_step(tmp_path / "unsaved" / name) for name in ("001", "002")] == [1, 2]
    log_marks.forget(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["rewards_aside.jsonl"]
