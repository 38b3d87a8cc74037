"""A run that is killed at any point and resumed ends as the one that was not: logs, weights and moments to the bit."""

import json
import shutil
import signal

import numpy as np
import pytest
import resumed_runs
from resumed_runs import FLAGS, STEPS, kill, pair, placed_state, resume, same_run, saved
from test_main import go

from jaxrl_post.launch import command_line
from jaxrl_post.models import hf
from jaxrl_post.runs import attempts, journal, metric_rows, rollout_log
from jaxrl_post.runs.checkpoint import store

pytestmark = pytest.mark.usefixtures("quick_compilation")
here, whole, ended = resumed_runs.here, resumed_runs.whole, resumed_runs.ended  # fixtures


def test_killed_before_and_in_the_first_save(here, whole, capsys):
    target = here / "early"
    kill(here, target, journal.Journal, "write", 2)  # in the evaluation before
    kill(here, target, store, "write_state", 1)  # in the save at step 2
    assert saved(target) == ["step_000002.part"] and capsys.readouterr().out.count("starts over") == 1
    before = (target / "metrics.jsonl").read_bytes()
    kill(here, target, store.Checkpoints, "_prune", 1)  # step 2 is whole
    assert saved(target) == ["step_000002"]
    # what had been logged before the first save is kept until the run has finished
    assert (target / "unsaved" / "001" / "metrics.jsonl").read_bytes() == before and before.count(b"\n") >= 2
    assert resume(here, target) == 0
    said = capsys.readouterr().out
    assert said.count("goes on after step 2") == 1 and said.count("starts over; logs up to step") == 1
    same_run(whole, target)
    found = attempts.status(target)
    assert [one.processes[0].code for one in found.attempts] == [1, 1, 1, 0]
    assert (found.state, found.step, found.steps, found.saved) == ("finished", STEPS, STEPS, STEPS)


def everything(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("left", ["nothing", "an empty folder", "a folder of a kill"])
def test_a_run_whose_checkpoints_are_gone_is_refused_and_nothing_is_touched(here, ended, capsys, left):
    shutil.rmtree(ended / "checkpoints")
    if left != "nothing":
        (ended / "checkpoints").mkdir()
    if left == "a folder of a kill":
        (ended / "summary.json").unlink()
        (ended / "checkpoints" / "step_000004.part").mkdir()
    before = everything(ended)
    assert resume(here, ended) == 1
    said = capsys.readouterr().err
    assert f"--resume: {ended} has logs of 5 finished steps and no checkpoint to go on from" in said
    assert "its first save was due at step 2" in said and said.count("\n") == 1
    assert everything(ended) == before and (ended / "checkpoints").exists() == (left != "nothing")


def test_killed_between_saves_and_in_later_ones(here, whole, capsys):
    target = here / "late"
    kill(here, target, rollout_log.RolloutLog, "_index", 5)  # rollouts of step 3 are written, their index line is not
    kill(here, target, store, "manifest", 1)  # in the save at step 4
    assert saved(target) == ["step_000002", "step_000004.part"]
    kill(here, target, store.shutil, "rmtree", 2)  # step 5 is whole and step 2 about to be deleted
    assert saved(target) == ["step_000002.gone", "step_000004", "step_000005"]
    kill(here, target, hf, "save", 1)
    assert saved(target) == ["step_000004", "step_000005"]
    assert resume(here, target) == 0
    said = capsys.readouterr().out
    assert [said.count(f"goes on after step {n}") for n in (2, 5)] == [2, 2]
    same_run(whole, target)


MOODY = """
import os

def moody(data_source, solution_str, ground_truth, extra_info):
    with open(CALLS, "a") as file:
        file.write(".")
    return {"score": os.path.getsize(CALLS) / 1000, "acc": float(solution_str[:1] == ground_truth[:1])}
"""


def test_a_score_that_was_journaled_is_never_asked_for_again(here, capsys):
    """The grader's answer is how often it was asked: had one answer been graded twice, scores, weights and figures of
    the resumed run would be others. One worker, so that the uninterrupted run is the same each time."""
    flags = [*FLAGS, "--config.reward.workers=1", f"--config.reward.functions=['{here / 'moody.py'}:moody']"]
    said = []

    def run(name, *, killed_at=()):
        target, calls = here / name, here / f"{name}.calls"
        (here / "moody.py").write_text(MOODY.replace("CALLS", repr(str(calls))))
        for owner, method, count in killed_at:
            kill(here, target, owner, method, count, flags=flags)
            said.append(capsys.readouterr().out)
        assert go(here, f"--run-dir={target}", "--resume", *flags) == 0
        said.append(capsys.readouterr().out)
        return target, calls.stat().st_size

    # killed where all that was asked for is journaled: in the commit of step 1, in the evaluation after step 2's save
    # and before step 4's, and once more on the way back there
    points = [
        (rollout_log, "to_bytes", 2),
        (store.Checkpoints, "save", 2),
        (rollout_log, "to_bytes", 1),
        (store.Checkpoints, "save", 1),
        (hf, "save", 1),
    ]
    straight, asked = run("straight")
    assert not list(straight.glob("*aside*"))
    crooked, asked_too = run("crooked", killed_at=points)
    assert asked == asked_too == sum(len((straight / name).read_text().splitlines()) for name in journal.JOURNALS)
    same_run(straight, crooked)
    assert ["of rewards.jsonl after that point are used again" in words for words in said[1:]] == [
        False,
        True,
        True,
        True,
        True,
        False,
    ], said


def test_a_flipped_byte_in_the_newest_checkpoint(here, whole, ended, capsys):
    arrays = (ended / "checkpoints" / "step_000005" / "arrays").rglob("*")
    data = max(arrays, key=lambda file: file.is_file() * file.stat().st_size)
    changed = bytearray(data.read_bytes())
    changed[len(changed) // 2] ^= 8
    data.write_bytes(changed)
    assert resume(here, ended) == 0
    said = capsys.readouterr().out
    assert "CHECKPOINT DAMAGED: step 5 is not used" in said and "goes on after step 4" in said
    assert saved(ended) == ["step_000004", "step_000005", "step_000005.damaged-1"]
    same_run(whole, ended)


@pytest.mark.parametrize(
    "flag, sentence",
    [
        ("--config.optimizer.lr=0.5", "resume refused: optimizer.lr 0.01 -> 0.5: step 5 was saved under the first"),
        ("--config.steps=4", "steps 5 -> 4"),
        ("--config.checkpoint.every=3", "checkpoint.every 2 -> 3"),
        ("--config.data.train=HERE/other.jsonl", "data.train.digest"),
        ("--config.seed=1", "seed 0 -> 1"),
    ],
)
def test_another_config_or_other_data_is_refused_and_nothing_is_cut(here, ended, capsys, flag, sentence):
    lines = (here / "train.jsonl").read_text().splitlines(keepends=True)
    (here / "other.jsonl").write_text("".join([*lines[1:], lines[0]]))
    before = {path: path.read_bytes() for path in sorted(ended.rglob("*")) if path.is_file()}
    assert resume(here, ended, flag.replace("HERE", str(here))) == 1
    said = capsys.readouterr().err
    assert sentence in said and said.count("\n") == 1
    assert before == {path: path.read_bytes() for path in sorted(ended.rglob("*")) if path.is_file()}


def test_more_steps_go_on_where_the_run_ended(here, ended, capsys):
    assert resume(here, ended, "--config.steps=6", "--config.eval.show=1", "--config.checkpoint.keep_last=3") == 0
    rows = metric_rows.read(ended / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2, 2, 3, 4, 4, 5, 6, 6]
    assert json.loads((ended / "summary.json").read_text())["steps"] == 6
    assert saved(ended) == ["step_000004", "step_000005", "step_000006"]
    assert json.loads((ended / "config.json").read_text())["steps"] == 6


@pytest.mark.parametrize(
    "flags, sentence",
    [
        (("--resume",), "--resume says not which run"),
        (("--resume=/nowhere",), "there is no such folder"),
        (("--resume=HERE",), "is not the folder of a run: it holds"),
    ],
)
def test_what_cannot_be_resumed(here, capsys, flags, sentence):
    before = sorted(here.iterdir())
    assert go(here, *FLAGS, *(flag.replace("HERE", str(here)) for flag in flags)) == 1
    said = capsys.readouterr().err
    assert sentence in said and said.count("\n") == 1 and sorted(here.iterdir()) == before


def test_flags():
    flags = command_line.parse(["--config=a.py", "--run-dir=r", "--resume"])
    assert flags == command_line.Flags(config="a.py", run_dir="r", resume="allowed")
    flags = command_line.parse(["--config=a.py", "--resume=r"])
    assert flags == command_line.Flags(config="a.py", run_dir="r", resume="required")


DYING = """
import os, signal, sys
from jaxrl_post import main
from jaxrl_post.runs.checkpoint import store

save = store.Checkpoints.save
def dying(self, step, *rest):
    if step == 2 and os.environ["JAX_PROCESS_ID"] == sys.argv[1][-1]: os.kill(os.getpid(), signal.SIGKILL)
    save(self, step, *rest)
store.Checkpoints.save = dying
sys.exit(main.main(sys.argv[2:]))
"""
OTHER = """
import os, sys
from jaxrl_post import main

own = ["--config.optimizer.lr=0.5"] if os.environ["JAX_PROCESS_ID"] == "1" else []
sys.exit(main.main([*sys.argv[1:], *own]))
"""


@pytest.mark.extended  # two starts of a process
def test_processes_that_do_not_start_alike_say_so_and_compile_nothing(here, tmp_path):
    status, said = pair(here, tmp_path / "run", tmp_path / "cache", code=("-c", OTHER))
    assert status == [1, 1] and not (tmp_path / "run").exists() and not list((tmp_path / "cache").glob("*"))
    for one in said:
        assert "process 1 does not start as process 0: config.optimizer.lr is 0.5 there and" in one, one


@pytest.mark.shown("variants")  # eight starts of a process, two at a time
def test_two_processes_that_are_killed_and_resumed(here, tmp_path):
    """kill -9 of one before the save of step 2, when its scores and rollouts are logged; then on from step 1.

    The other one ends with 42 and names the lost one, first process 1 and then process 0.
    """
    status, said = pair(here, tmp_path / "whole", tmp_path / "cache")
    assert status == [0, 0], said
    target = tmp_path / "killed"
    status, said = pair(here, target, tmp_path / "cache", code=("-c", DYING, "process 1"))
    assert status == [42, -signal.SIGKILL] and "error: process 1 of 2 is lost: its connection ended" in said[0], said
    status, said = pair(here, target, tmp_path / "cache", code=("-c", DYING, "process 0"), resumed=True)
    assert status == [-signal.SIGKILL, 42] and "error: process 0 of 2 is lost: its connection ended" in said[1], said
    assert saved(target) == ["step_000001"] and (target / "process_0" / "rollouts" / "step_000002.npz").is_file()
    status, said = pair(here, target, tmp_path / "cache", resumed=True)
    assert status == [0, 0], said
    codes = [[one.code for one in attempt.processes] for attempt in attempts.status(target).attempts]
    assert codes == [[42, None], [None, 42], [0, 0]]
    assert "goes on after step 1" in said[0] and "of rewards.jsonl after that point are used again" in said[0]
    for process in ("process_0", "process_1"):
        one, two = tmp_path / "whole" / process, target / process
        names = [
            sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
            for folder in (one, two)
        ]
        assert names[0] == names[1] and len(names[0]) > 9
        for name in set(names[0]) - {"metrics.jsonl"}:
            assert (one / name).read_bytes() == (two / name).read_bytes(), name
        rows = [metric_rows.read(folder / "metrics.jsonl") for folder in (one, two)]
        assert [metric_rows.deterministic(row) for row in rows[0]] == [
            metric_rows.deterministic(row) for row in rows[1]
        ]
    exported = [(folder / "policy" / "model.safetensors").read_bytes() for folder in (tmp_path / "whole", target)]
    assert exported[0] == exported[1]
    states = [placed_state(folder) for folder in (tmp_path / "whole", target)]
    assert sorted(states[0]) == sorted(states[1]) and any(
        np.any(leaf) for name, leaf in states[0].items() if "opt" in name
    )
    for name, leaf in states[0].items():
        assert leaf.dtype == states[1][name].dtype and leaf.tobytes() == states[1][name].tobytes(), name
