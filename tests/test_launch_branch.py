"""Runs that begin from a checkpoint of another run: what goes on to the bit, what is dropped and drawn again, what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from resumed_runs import FLAGS, final_state, here, whole_run  # noqa: F401  (a fixture, and its kin)
from test_main import go

from jaxrl_post import main as command
from jaxrl_post.launch import branch
from jaxrl_post.runs import metric_rows
from jaxrl_post.runs.checkpoint import store

pytestmark = pytest.mark.usefixtures("quick_compilation")

TAIL = (
    *FLAGS,
    "--config.scheduler.name=tail_batching",
    "--config.scheduler.over=1.5",
    "--config.scheduler.prefix_mode=recompute",
    "--config.checkpoint.every=1",
    "--config.checkpoint.keep_last=9",
)
AT = 2  # the step that is branched from: four groups wait there


@pytest.fixture(scope="module")
def parent(here):  # noqa: F811
    return whole_run(here, "parent", *TAIL)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def steps(folder: Path) -> list[dict]:
    rows = [row for row in metric_rows.read(folder / "metrics.jsonl") if "actor/grad_norm" in row]
    return [metric_rows.deterministic(row) for row in rows]


def events(folder: Path, name: str) -> list[dict]:
    lines = (folder / "scheduler_log.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == name]


def trained(folder: Path) -> list:
    return [tuple(group) for event in events(folder, "take") for group in event["fresh"]]


def test_without_changes_it_is_the_parents_run_to_the_bit(here, parent, monkeypatch, capsys):  # noqa: F811
    """From another working directory, by the parent's own config. The parent is only read."""
    before, target = contents(parent), here / "same"
    monkeypatch.chdir("/")
    assert command.main([f"--branch={parent}@{AT}", f"--run-dir={target}"]) == 0
    said = capsys.readouterr().out
    assert f"branch: it begins at step {AT} of {parent}; no setting changes; 4 groups in flight go on" in said
    assert contents(parent) == before
    assert steps(target) == steps(parent)[AT:]
    states = [final_state(folder) for folder in (parent, target)]
    assert sorted(states[0]) == sorted(states[1])
    assert all(leaf.tobytes() == states[1][name].tobytes() for name, leaf in states[0].items())
    summary, config = (json.loads((target / name).read_text()) for name in ("summary.json", "config.json"))
    assert summary["parent"] == config["derived"]["parent"]
    assert summary["parent"]["run"] == str(parent) and summary["parent"]["step"] == AT
    assert len(summary["parent"]["checkpoint"]) == 32
    assert "parent" not in json.loads((parent / "summary.json").read_text())


def test_with_another_learning_rate_what_is_in_flight_goes_on(here, parent, capsys):  # noqa: F811
    target = here / "slower"
    assert go(here, f"--branch={parent}@{AT}", f"--run-dir={target}", *TAIL, "--config.optimizer.lr=1e-3") == 0
    said = capsys.readouterr().out
    assert f"branch: it begins at step {AT} of {parent}; optimizer.lr 0.01 -> 0.001; 4 groups in flight go on" in said
    ours, theirs = steps(target), steps(parent)[AT:]
    same = [name for name in theirs[0] if name.startswith(("critic/score", "response_length", "rollout/"))]
    assert len(same) > 5 and all(ours[0][name] == theirs[0][name] for name in same)
    assert ours[0]["actor/lr"] == pytest.approx(theirs[0]["actor/lr"] / 10)
    assert trained(target)[:4] == trained(parent)[4 * AT : 4 * AT + 4]


@pytest.mark.extended
def test_with_another_temperature_dropped_prompts_come_first(here, parent, capsys):  # noqa: F811
    """Every prompt of the first epoch is trained on once, by parent and branch together; also after a resume."""
    target = here / "cooler"
    flags = [*TAIL, "--config.sampling.temperature=0.5", "--config.steps=9"]
    assert go(here, f"--branch={parent}@{AT}", f"--run-dir={target}", *flags) == 0
    assert "4 groups in flight are dropped and their prompts come first" in capsys.readouterr().out
    waiting = json.loads((target / "parent.json").read_text())
    assert len(waiting["again"]) == 4 and waiting["changes"]["sampling.temperature"] == [1.0, 0.5]
    saved = store.Checkpoints(parent / "checkpoints", keep_last=2, say=print).at(AT, "")
    held = {
        (one["id"][2], one["id"][3])
        for group in saved.host["scheduler"]["scheduler"]["queue"]
        for one in group["prefixes"]
    }
    first = {(told[0][2], told[0][3]) for told in events(target, "admit")[0]["requests"]}
    assert held and held <= first
    epoch = [group for group in [*trained(parent)[: 4 * AT], *trained(target)] if group[0] == 0]
    assert len(epoch) == len(set(epoch)) == 12
    assert command.main([f"--resume={target}", "--config.steps=10"]) == 0
    assert "goes on after step 9" in capsys.readouterr().out


@pytest.mark.parametrize(
    "flags, sentence",
    [
        (["--branch=RUN@77"], "--branch=RUN@77: there is no step 77 in RUN/checkpoints; it has 1, 2, 3, 4, 5"),
        (["--branch=RUN"], "steps=5 is reached at step 5, where the branch begins; the nearest valid value is 6"),
        (["--branch=RUN@2", "--config.optimizer.max_grad_norm=0"], "optimizer.max_grad_norm 1.0 -> 0.0: the optimizer's state"),
        (["--branch=RUN@2", "--config.optimizer.moments_dtype=bfloat16"], "optimizer.moments_dtype float32 -> bfloat16"),
        (["--branch=RUN@3", "--config.scheduler.name=sync", "--config.scheduler.prefix_mode=verify",
          "--config.scheduler.over=1", "--config.scheduler.mini_batches=2", "--config.steps=6", "--config.eval.every=0"],
         "step 3 lies within a round of 2 optimizer steps"),
        (["--branch=RUN@2", "--config.curriculum.interest=variance"],
         "curriculum.interest changes, and the passes of a curriculum go on only where neither data nor rollouts change"),
        (["--branch=RUN@2", "--config.model.preset=demo"], "model.preset \"tiny\" -> \"demo\": the weights of step 2"),
    ],
)  # fmt: skip
def test_what_makes_the_state_useless_is_refused(here, parent, flags, sentence, capsys):  # noqa: F811
    before = contents(here)
    assert command.main([flag.replace("RUN", str(parent)) for flag in flags]) == 1
    said = capsys.readouterr().err.replace(str(parent), "RUN")
    assert said.startswith("error: ") and said.count("\n") == 1 and sentence in said
    assert contents(here) == before


def test_a_branch_that_was_killed_before_its_first_save_is_not_begun_from_nothing(here, parent, tmp_path, capsys):  # noqa: F811
    (tmp_path / "config.json").write_text((parent / "config.json").read_text())
    branch.write(tmp_path, branch.Parent(run="old", step=2, checkpoint="x"))
    assert command.main([f"--resume={tmp_path}"]) == 1
    assert "branched from step 2 of old and has no checkpoint of its own: begin it anew by --branch=old@2" in (
        capsys.readouterr().err
    )


def test_a_step_is_named_behind_the_last_at_sign():
    assert branch.named("a/b@12") == (Path("a/b"), 12)
    assert branch.named("a@b") == (Path("a@b"), None) and branch.named("a@b@3") == (Path("a@b"), 3)
    assert branch.named("@3") == (Path("@3"), None)


def test_positions_before_the_next_stand_for_those_that_come_again():
    parent = branch.Parent(run="r", step=1, checkpoint="c", position=8, again=(3, 6))
    assert parent.detour == {6: 3, 7: 6}
    state = {"scheduler": {"rounds": {"position": 8, "open": [{"position": 3}], "queue": [{"position": 6}]}}}
    assert sorted(branch._positions(state)) == [3, 6]
    np.testing.assert_array_equal(list(branch._counted(6, 2).values()), [3, 6, 6])
