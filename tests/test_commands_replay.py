"""`replay`: the batch of a skipped step, and logged rollouts of a pipelined run, sampled again bit for bit."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from resumed_runs import here  # noqa: F401  (a fixture)
from test_main import go
from test_main_pipeline import FLAGS

from jaxrl_post.commands import repeated, replay
from jaxrl_post.launch import past_run
from jaxrl_post.rewards import jobs
from jaxrl_post.ring.types import RolloutId
from jaxrl_post.runs import rollout_log, run_logs

pytestmark = pytest.mark.usefixtures("quick_compilation")

ROOT = Path(__file__).resolve().parents[1]
RUN = (
    "--config=configs/demo.py",
    "--config.steps=6",
    "--config.scheduler.prompts=4",
    "--config.scheduler.group_size=4",
    "--config.eval.prompts=4",
    "--config.eval.every=0",
    "--config.checkpoint.every=1",
    "--config.algorithm.adv_estimator=dr_grpo",
    "--config.alarms.max_skipped=2",
)
EVALUATED = ("--config.eval.prompts=3",)
NOTHING = {"reward": 0.0, "scored": True, "components": {}}
GRADER = """
def score(data_source, solution_str, ground_truth, extra_info):
    return 3e38 * (1 if len(solution_str) % 2 else -1)
"""


def ran(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)


@pytest.mark.extended
@pytest.mark.slow
def test_overflowing_gradients_end_a_run_and_their_batch_is_repeated(tmp_path):
    (tmp_path / "huge.py").write_text(GRADER)
    run = tmp_path / "run"
    done = ran("jaxrl_post.main", *RUN, f"--config.reward.functions=('{tmp_path}/huge.py:score',)", f"--run-dir={run}")
    assert done.returncode == 1 and "error: step 2: the gradient was not finite in 2 steps in a row" in done.stderr
    assert "step 1 was skipped: the gradient is not finite" in done.stdout
    assert not (run / "policy").exists() and not (run / "summary.json").exists()
    assert (run / "skipped" / "step_000002.npz").read_bytes() == (run / "rollouts" / "step_000002.npz").read_bytes()
    again = ran("jaxrl_post", "replay", str(run), "--batch=2")
    assert again.returncode == 0 and "4 groups, 16 rollouts, at the weights of step 1" in again.stdout
    assert "gradient norm nan" in again.stdout or "gradient norm inf" in again.stdout


def test_what_cannot_be_replayed_is_one_sentence(tmp_path, capsys):
    assert replay.main([str(tmp_path), "--batch=3"]) == 1
    assert "has no config.json" in capsys.readouterr().err
    assert replay.main([str(tmp_path)]) == 1
    assert capsys.readouterr().err == "error: replay: say what is repeated: --rollout=ID or --batch=STEP\n"
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "skipped").mkdir()
    (tmp_path / "skipped" / "step_000007.npz").write_bytes(b"no archive")
    assert replay.main([str(tmp_path), "--batch=3"]) == 1
    assert "no skipped batch of step 3; it has those of steps [7]" in capsys.readouterr().err
    assert replay.main([str(tmp_path), "--batch=7"]) == 1
    assert "is no rollout log, or is damaged" in capsys.readouterr().err
    (tmp_path / "process_0" / "skipped").mkdir(parents=True)  # a job of several processes writes below process_K
    (tmp_path / "process_0" / "skipped" / "step_000009.npz").write_bytes(b"no archive")
    assert replay.main([str(tmp_path), "--batch=3"]) == 1
    assert "no skipped batch of step 3; it has those of steps [9]" in capsys.readouterr().err
    assert replay.main([str(tmp_path), "--batch=9"]) == 1
    assert "is no rollout log, or is damaged" in capsys.readouterr().err
    shutil.rmtree(tmp_path / "process_0")
    rollout_log.RolloutLog(tmp_path / "skipped").write(7, [])
    (tmp_path / "config.json").write_text("[]")
    assert replay.main([str(tmp_path), "--batch=7"]) == 1
    assert "config.json: must hold a JSON object, got a list" in capsys.readouterr().err


# ---- a rollout again


@pytest.fixture(scope="module")
def run(here):  # noqa: F811
    """A pipelined run whose rollouts have tokens of several versions, with evaluations and a checkpoint a publish."""
    folder = here / "piped"
    flags = (f"--run-dir={folder}", *FLAGS, "--config.checkpoint.keep_last=99", "--config.eval.every=3", *EVALUATED)
    assert go(here, *flags) == 0
    return folder


@pytest.fixture(scope="module")
def names(run):
    """Two rollouts of three versions or more, two of one version, and two of an evaluation."""
    logs = run_logs.opened(run)
    trained = [(step, rollout) for step, group in run_logs.groups_of(logs, "train") for rollout in group.rollouts]
    count = {run_logs.name_of(rollout.id, step): len(np.unique(rollout.versions)) for step, rollout in trained}
    several = [name for name, versions in count.items() if versions > 2]
    single = [name for name, versions in count.items() if versions == 1]
    (evaluation,) = [step for step in logs.steps("eval") if 0 < step < 7][:1]
    tried = [run_logs.name_of(id, evaluation) for id in rollout_log.ids(run / "evaluations" / "step_000003.npz")]
    return [*several[:1], *several[-1:], single[0], single[-1], tried[0], tried[-1]]


def digests(folder):
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_rollouts_are_sampled_again_bit_for_bit(run, names):
    before = digests(run)
    found = repeated.repeated(run_logs.opened(run), names)
    assert [one.name for one in found] == names
    assert all(one.equal and one.differences == {} and one.restored == 0 for one in found)
    assert max(len(np.unique(one.found.versions)) for one in found) > 2
    assert len({one.begun for one in found}) > 2, "one checkpoint would prove little"
    for one in found:  # not the logged objects again
        assert one.found is not one.logged and one.found.logprobs is not one.logged.logprobs
    assert digests(run) == before


def test_the_command_prints_and_says_whether_it_is_equal(run, names, capsys):
    assert replay.main([str(run), f"--rollout={names[0]}", "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    told, (step, logged) = json.loads(line), run_logs.opened(run).find(names[0])
    assert told["equal"] and told["step"] == step and told["rollout"] == str(names[0])
    assert np.array(told["logprobs"], np.float32).tobytes() == logged.logprobs.tobytes()
    assert told["tokens"] == logged.tokens.tolist() and told["versions"] == logged.versions.tolist()
    assert replay.main([str(run), "--rollout", str(names[4])]) == 0
    assert "equal bit for bit" in capsys.readouterr().out.splitlines()[0]
    assert replay.main([str(run), "--rollout=0+0:99:0"]) == 1
    assert "has logged no rollout" in capsys.readouterr().err


def refused(run, name):
    """Whether a replay ends as different: by its comparison, or because the journal has no score of such tokens."""
    try:
        (found,) = repeated.repeated(run_logs.opened(run), [name])
    except ValueError as error:
        assert "the ring does not repeat the run" in str(error)
        return True
    return not found.equal


@pytest.mark.parametrize("later", [1, 99])
def test_a_planted_later_checkpoint_is_caught(run, names, monkeypatch, later):
    sound, there = past_run.begin_at, sorted(int(p.name[5:]) for p in (run / "checkpoints").glob("step_??????"))

    def late(logs, name, rollout):
        after = [step for step in there if step > sound(logs, name, rollout)]
        return after[min(later, len(after)) - 1]

    monkeypatch.setattr(past_run, "begin_at", late)
    assert refused(run, names[0])


def test_planted_noise_of_another_seed_is_caught(run, names, monkeypatch):
    sound = RolloutId.seed
    monkeypatch.setattr(RolloutId, "seed", lambda id: sound(id._replace(run_seed=id.run_seed + 1)))
    assert refused(run, names[0])


@pytest.mark.extended
def test_planted_rewards_of_nothing_are_caught(run, names, monkeypatch):
    """Then the gradient is another one, and tokens after the next publish have other log-probs."""
    sound = jobs.scored_group
    monkeypatch.setattr(past_run.jobs, "scored_group", lambda group, found, _: sound(group, [NOTHING] * len(found)))
    assert refused(run, names[0])


@pytest.mark.extended
def test_a_run_from_its_start_repeats_them_too(run, names):
    found = repeated.repeated(run_logs.opened(run), names[1:2], from_start=True)
    assert found[0].equal and found[0].begun == 0


def test_where_checkpoints_were_pruned_the_earliest_step_is_named(run, names, tmp_path, capsys):
    there = sorted((run / "checkpoints").glob("step_??????"))
    pruned = tmp_path / "pruned"
    shutil.copytree(run, pruned, ignore=lambda folder, files: [f.name for f in there[:-2] if f.name in files])
    told = json.loads((pruned / "config.json").read_text())
    told["checkpoint"]["keep_last"] = 2
    (pruned / "config.json").write_text(json.dumps(told))
    logs = run_logs.opened(pruned)
    first = min(len(there), 2)
    name = next(
        run_logs.name_of(rollout.id, step)
        for step, group in run_logs.groups_of(logs, "train")
        for rollout in group.rollouts
        if first <= rollout.versions.min() < int(there[-2].name[5:])
    )
    assert replay.main([str(pruned), f"--rollout={name}"]) == 1
    said = capsys.readouterr().err
    assert "were pruned (checkpoint.keep_last=2)" in said and said.count("\n") == 1
    assert f"the earliest step that can be replayed is {int(there[-2].name[5:])}, and --from-start" in said


def test_what_is_not_replayed_is_one_sentence(run, names, tmp_path, capsys):
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    told = json.loads((copy / "config.json").read_text())
    for flags, words in (
        (["--rollout=x"], "names no rollout"),
        (["--rollout=x:0:0", "--batch=3"], "not allowed with argument"),
        (["--batch=3", "--json"], "--json and --from-start belong to --rollout"),
        ([f"--rolout={names[0]}"], "unknown argument"),
    ):
        assert replay.main([str(copy), *flags]) == 1
        said = capsys.readouterr().err
        assert said.startswith("error: ") and said.count("\n") == 1 and words in said
    (copy / "config.json").write_text(json.dumps(told | {"derived": told["derived"] | {"processes": 2}}))
    assert replay.main([str(copy), f"--rollout={names[0]}"]) == 1
    assert "was a job of 2 processes; only runs of one are replayed" in capsys.readouterr().err
    (copy / "config.json").write_text(json.dumps(told | {"environment": told["environment"] | {"name": "calculator"}}))
    assert replay.main([str(copy), f"--rollout={names[0]}"]) == 1
    assert "is a run in the environment 'calculator'; only runs of one turn are replayed" in capsys.readouterr().err
