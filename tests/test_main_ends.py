"""How a run ends that has nothing left to learn from, that loses its last save, or that was resumed: what it says and leaves."""

import dataclasses
import json
import time

import pytest
import resumed_runs
from resumed_runs import FLAGS, kill, resume, saved
from test_main import go

from jaxrl_post import config as configs
from jaxrl_post import main
from jaxrl_post.commands import watch
from jaxrl_post.launch.parts import inputs
from jaxrl_post.runs import attempts, metric_rows, rollout_log
from jaxrl_post.runs.checkpoint import store
from jaxrl_post.scheduler import group_filter

pytestmark = pytest.mark.usefixtures("quick_compilation")
here = resumed_runs.here  # fixture

FILTER = ("--config.scheduler.filter_groups=True", "--config.scheduler.max_waves=2")
ALWAYS = "def {name}(data_source, solution_str, ground_truth, extra_info):\n    return {score}\n"


def rewarded(here, name, score):
    (here / f"{name}.py").write_text(ALWAYS.format(name=name, score=score))
    return f"--config.reward.functions=('{here / name}.py:{name}',)"


def test_a_constant_reward_under_a_filter_is_one_sentence(here, capsys):
    assert go(here, f"--run-dir={here / 'equal'}", *FLAGS, *FILTER, rewarded(here, "always", 0.5)) == 1
    said = capsys.readouterr().err
    assert said.count("error: ") == 1 and "Traceback" not in said
    assert "kept 0 of the 4 groups of round 1 after scheduler.max_waves=2 waves (8 groups scored)" in said
    assert "scheduler.filter_metric='seq_reward' is equal" in said


def test_a_run_that_has_solved_its_prompts_ends_with_its_checkpoint(here, monkeypatch, capsys):
    """Groups of the first two rounds count as useful; every rollout is right."""
    calls, folder = [], here / "solved"
    monkeypatch.setattr(group_filter, "differs", lambda group, metric: calls.append(1) or len(calls) <= 8)
    flags = (
        *FLAGS,
        "--config.checkpoint.every=4",
        *FILTER,
        rewarded(here, "right", 1.0),
        "--config.logger.console=quiet",
    )
    assert go(here, f"--run-dir={folder}", *flags) == 0
    said = capsys.readouterr().out
    assert (
        "solved: all rollouts of the 8 groups" in said
        and "step 2/" in said
        and said.endswith(f"run folder: {folder}\n")
    )
    assert not [word for word in ("MiB", "weights reach", "prompt  ", "metrics.jsonl", "gained") if word in said]
    assert saved(folder) == ["step_000002"] and (folder / "policy" / "model.safetensors").is_file()
    assert json.loads((folder / "summary.json").read_text())["steps"] == 2
    assert attempts.status(folder).attempts[-1].processes[0].code == 0


def test_a_last_save_that_fails_is_another_exit_code_and_the_policy_is_there(here, monkeypatch, capsys):
    real, folder = store.Checkpoints._check_space, here / "full"
    monkeypatch.setattr(
        store.Checkpoints, "_check_space", lambda self, given: full() if self.steps() == [2, 4] else real(self, given)
    )

    def full():
        raise OSError(28, "it needs 100 bytes, and 0 are free")

    assert go(here, f"--run-dir={folder}", *FLAGS) == 1
    said = capsys.readouterr()
    line = "step 5 was not saved: [Errno 28] it needs 100 bytes, and 0 are free; the newest whole one is step 4; it was the last"
    assert f"CHECKPOINT FAILED: {line}" in said.out and f"error: {line}" in said.err
    assert "the next save tries again" not in said.out and (folder / "policy" / "model.safetensors").is_file()
    assert saved(folder) == ["step_000002", "step_000004"]


def test_a_resumed_run_divides_the_tokens_of_its_last_start_by_its_seconds_and_tells_of_its_schedule(here, capsys):
    """Half a cosine from 1e-2 to 1e-3 over 5 and over 6 steps, at the third step."""
    folder = here / "counted"
    kill(here, folder, store, "manifest", 2)  # in the save at step 4, after that of step 2
    capsys.readouterr()
    assert resume(here, folder, "--config.steps=6") == 0
    told = json.loads((folder / "summary.json").read_text())
    logged = [rollout_log.read(folder / "rollouts" / f"step_{step:06d}.npz") for step in range(1, 7)]
    tokens = [sum(len(rollout) for group in groups for rollout in group.rollouts) for groups in logged]
    assert (told["resumed_at"], told["all_tokens"], told["tokens"]) == (2, sum(tokens), sum(tokens[2:]))
    assert 0 < told["seconds"] < time.monotonic() - main.BEGAN
    rate = f"{told['tokens'] / told['seconds']:,.0f}"
    out = capsys.readouterr().out
    assert f"6 steps since step 2, where it was resumed: 4 steps, {told['tokens']:,} sampled tokens" in out
    assert f" {rate} tokens/s" in out
    assert "optimizer.schedule='cosine' is stretched from 5 to 6 steps: step 3 has the learning rate 0.00775" in out
    assert "where the first course had 0.00689" in out
    seconds = sorted(
        row["timing_s/step"] for row in metric_rows.read(folder / "metrics.jsonl") if "timing_s/step" in row
    )
    assert seconds[0] <= told["mode"]["step_s"] <= seconds[-1] and "a step took " in out
    assert "  sync: gained: " in out and "the step-cost table predicted " in out
    assert watch.main([str(folder), "--once"]) == 0
    assert f"since it was resumed at step 2, {rate} sampled" in " ".join(capsys.readouterr().out.split())


def test_a_cut_sampling_law_without_weights_names_its_bias(here):
    config = configs.resolve(configs.default(), ("model.preset=tiny",))
    for law, weights, found in (
        ({"top_p": 0.9, "keep_mask": False}, "none", "sampling.top_p=0.9 draws"),
        ({"top_k": 5, "top_p": 0.9, "keep_mask": False}, "none", "sampling.top_k=5 and sampling.top_p=0.9 draws"),
        ({"top_k": 5, "keep_mask": False}, "token", ""),
        ({"top_k": 5, "top_p": 0.9}, "none", ""),
        ({}, "none", ""),
    ):
        given = dataclasses.replace(
            config,
            sampling=dataclasses.replace(config.sampling, **law),
            algorithm=dataclasses.replace(config.algorithm, rollout_is=weights),
        )
        lines = inputs.bias(given)
        assert [line.startswith(found) and "is biased towards ids that are drawn" in line for line in lines] == [
            True
        ] * bool(found)
