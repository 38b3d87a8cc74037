"""The command: a run leaves what it promises and repeats to the bit. Its exported policy is the one that it ended with."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from trace_reader import check, tracks

from jaxrl_post import main as command
from jaxrl_post.data.tasks import TASKS, split_of
from jaxrl_post.data.tokenizer import characters, load
from jaxrl_post.engine.host import dispatch_log
from jaxrl_post.parallel import weight_sync
from jaxrl_post.runs import metric_rows, rollout_log

pytestmark = pytest.mark.usefixtures("quick_compilation")

CONFIG = """
from jaxrl_post.config import default


def get_config():
    c = default()
    c.name, c.steps, c.run_dir = "toy", 3, "{here}/runs"
    c.model.preset, c.model.tokenizer = "PRESET", "{here}/tokenizer"
    c.engine.slots, c.engine.max_length, c.engine.page_size, c.engine.row_sizes = 8, 32, 8, (32,)
    c.engine.steps_per_dispatch = 4
    c.sampling.max_tokens = 8
    c.scheduler.prompts, c.scheduler.group_size = 4, 4
    c.batch.rows, c.batch.tokens = 4, 64
    c.optimizer.lr = 1e-2
    c.data.train, c.eval.data = "{here}/train.jsonl", "{here}/eval.jsonl"
    c.eval.prompts, c.eval.samples = 6, 2
    c.reward.functions = ("{here}/reward.py:first_digit",)
    return c
"""

CONFIG = CONFIG.replace(
    "PRESET", {"experts": "tiny_moe", "hybrid": "tiny_hybrid"}.get(os.environ.get("LAB_MODEL", ""), "tiny")
)

REWARD = """
def first_digit(data_source, solution_str, ground_truth, extra_info):
    return float(solution_str[:1] == ground_truth[:1])
"""


def write_sums(folder, first, second, *, trained):
    """Writes a tokenizer and rows of a+b, with a below `first` and b below `second`: some to train on, the others held out."""
    characters("0123456789+=").save(folder / "tokenizer")
    rows = [
        {"id": f"{a}+{b}", "prompt": f"{a}+{b}=", "data_source": "sums", "reward_model": {"ground_truth": str(a + b)}}
        for a in range(first)
        for b in range(second)
    ]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:trained]))
    (folder / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[trained:]))


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """A folder with a config and all that it names: sums of one digit, 90 to train on and 10 held out."""
    folder = tmp_path_factory.mktemp("command")
    write_sums(folder, 10, 10, trained=90)
    (folder / "reward.py").write_text(REWARD)
    (folder / "broken.json").write_text('{"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": ["a"]}}')
    (folder / "toy.py").write_text(CONFIG.format(here=folder))
    return folder


def go(here, *flags):
    return command.main([f"--config={here / 'toy.py'}", *flags])


@pytest.fixture(scope="module")
def finished(here):
    """One run of three steps; its folder."""
    assert (
        go(
            here,
            f"--run-dir={here / 'first'}",
            "--config.eval.every=2",
            "--config.trace_rounds=2",
            "--config.logger.tensorboard=true",
        )
        == 0
    )
    return here / "first"


def test_a_run_leaves_what_it_promises(finished):
    config, summary = (json.loads((finished / f"{name}.json").read_text()) for name in ("config", "summary"))
    assert config["optimizer"]["lr"] == 1e-2 and config["derived"]["row_sizes"] == [32]
    assert set(config["derived"]["cost_table"]) == {"source", "digest"} and config["derived"]["swap"] == "shared"
    rows = metric_rows.read(finished / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2, 2, 3, 3]
    steps = [row for row in rows if "training/global_step" in row]
    logged = [rollout_log.read(finished / "rollouts" / f"step_{n:06d}.npz") for n in (1, 2, 3)]
    assert summary["steps"] == 3 and summary["seconds"] > 0
    assert summary["swap"]["case"] in ("shared", "cast", "relayout") and "in place" in summary["swap"]["links"]
    assert summary["tokens"] == sum(r.tokens.size for groups in logged for g in groups for r in g.rollouts)
    for version, (row, groups) in enumerate(zip(steps, logged)):
        assert row["reward/mean"] == pytest.approx(np.mean([g.rewards for g in groups]))
        assert {int(v) for g in groups for r in g.rollouts for v in r.versions} == {version}
        assert row["training/rollout_probs_diff_max"] < 1e-4 and row["sched/num_groups_trained"] == 4
        assert row["rows/decode"] + row["rows/prefill"] + row["rows/idle"] == row["rows/steps"] * 32
        assert row["timing_s/step"] >= row["timing_s/gen"] + row["timing_s/update_actor"]
    for when, row in (("before", rows[0]), ("after", rows[-1])):
        assert set(summary["eval"][when]) >= {"greedy", "mean_at_2", "n"} and summary["eval"][when]["n"] == 6
        assert row["val-core/sums/acc/mean@2"] == summary["eval"][when]["mean_at_2"]
        assert row["val-aux/sums/acc/greedy"] == summary["eval"][when]["greedy"]
    answered = rollout_log.read(finished / "evaluations" / "step_000003.npz")
    assert [group.prompt.id for group in answered] == [f"9+{b}" for b in range(6)] * 2
    for group in logged[0]:
        for rollout, reward in zip(group.rollouts, group.rewards):
            assert reward == float(rollout.tokens[:1].tolist() == [int(group.prompt.answer[0]) + 1])  # id 1 is "0"
    events = [json.loads(line) for line in (finished / "scheduler_log.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events].count("complete") == 48
    dispatched = [dispatch_log.read(line) for line in (finished / "dispatches.jsonl").read_text().splitlines()]
    for purpose, name in (("train", "rows"), ("eval", "eval/rows")):
        mine = [dispatch for dispatch in dispatched if dispatch.purpose == purpose]
        assert sum(dispatch.steps for dispatch in mine) == sum(row.get(f"{name}/steps", 0) for row in rows)
        assert sum(dispatch.uses[1] for dispatch in mine) == sum(row.get(f"{name}/decode", 0) for row in rows)
    assert len((finished / "rewards.jsonl").read_text().splitlines()) == 48
    assert len((finished / "eval_rewards.jsonl").read_text().splitlines()) == 3 * 6 * 3
    page = (finished / "report.html").read_text().partition('id="data">')[2].partition("</script>")[0]
    (told,) = json.loads(page)["runs"]
    assert told["curves"]["steps"] == [0, 1, 2, 3] and told["rule"]["shown"]["training"] == 48
    assert len([*(finished / "tensorboard").iterdir()]) == 1


def test_meter_and_trace_tell_what_the_rollout_log_holds(finished):
    """Two of three rounds were drawn: every answer once, in one of the slots, and nothing else in them."""
    logged = [
        [r for g in rollout_log.read(finished / "rollouts" / f"step_{n:06d}.npz") for r in g.rollouts]
        for n in (1, 2, 3)
    ]
    lengths = [len(rollout) for rollouts in logged for rollout in rollouts]
    rows = [row for row in metric_rows.read(finished / "metrics.jsonl") if "training/global_step" in row]
    report = json.loads((finished / "bias.json").read_text())
    assert report["num_tokens_generated"] == sum(row["bias/num_tokens_generated"] for row in rows) == sum(lengths)
    assert report["trained_length/mean"] == report["launched_length/mean"] == pytest.approx(np.mean(lengths))
    assert report["shift"] == report["num_prompts_that_differ"] == report["num_untrained"] == 0
    assert sum(report["histograms"]["trained"]) == report["num_rollouts_launched"] == 48
    assert [row["bias/step_length/short"] for row in rows] == [
        np.mean([len(r) for r in rollouts]) for rollouts in logged
    ]
    events = json.loads((finished / "trace_000000.json").read_text())
    check(events)
    found, drawn = tracks(events), [e for e in events if e["ph"] == "X" and e["cat"] == "replica 0"]
    assert sorted((e["name"], e["args"]["tokens"], e["args"]["finish"]) for e in drawn) == sorted(
        (f"{r.prompt.id} #{r.id.sample}", len(r), r.finish.value) for r in [*logged[0], *logged[1]]
    )
    assert len({e["tid"] for e in drawn}) == 8 and len(found["ring", "round"]) == len(found["ring", "swap"]) == 2
    assert (
        sum(int(name.split()[0]) for name, *_ in found["ring", "engine"])
        == rows[0]["rows/steps"] + rows[1]["rows/steps"]
    )
    assert {name for name, *_ in found["ring", "learner"]} == {"old_log_prob", "update_actor"}


def test_a_run_repeats_to_the_bit_also_without_the_evaluation_between(here, finished):
    again = here / "again"
    assert go(here, f"--run-dir={again}") == 0
    for name in (
        "rollouts/step_000001.npz",
        "rollouts/step_000003.npz",
        "scheduler_log.jsonl",
        "rewards.jsonl",
        "policy/model.safetensors",
    ):
        assert (again / name).read_bytes() == (finished / name).read_bytes(), name
    same_answers(*(folder / "evaluations" / "step_000003.npz" for folder in (finished, again)))
    first, second = (metric_rows.read(folder / "metrics.jsonl") for folder in (finished, again))
    assert [metric_rows.deterministic(row) for row in second] == [
        metric_rows.deterministic(row) for i, row in enumerate(first) if i != 3
    ]


def test_the_exported_policy_answers_as_the_run_ended(here, finished):
    flags = ("--config.model.preset=", f"--config.model.path={finished / 'policy'}", "--config.model.tokenizer=")
    assert go(here, f"--run-dir={here / 'more'}", "--config.steps=1", *flags) == 0
    same_answers(finished / "evaluations" / "step_000003.npz", here / "more" / "evaluations" / "step_000000.npz")


def same_answers(first, second):
    """All but the clocks, which count the evaluations before."""
    for a, b in zip(rollout_log.read(first), rollout_log.read(second), strict=True):
        assert np.array_equal(a.rewards, b.rewards)
        for x, y in zip(a.rollouts, b.rollouts, strict=True):
            assert x.id == y.id and np.array_equal(x.tokens, y.tokens) and np.array_equal(x.logprobs, y.logprobs)


def test_the_last_words(here, capsys):
    assert go(here, f"--run-dir={here / 'words'}", "--config.steps=1") == 0
    said = capsys.readouterr().out
    folder = here / "words"
    assert said.count("prompt  '9+") == 3 and said.count("  before  ") == 3 == said.count("  after   ")
    assert "prompt  '9+1='   answer '10'" in said and f"\n{folder}\n" in said
    assert "6 held-out prompts, 1 steps" in said and "step 1/1" in said
    listed = [line.split()[0] for line in said[said.index(f"\n{folder}\n") :].splitlines()[2:]]
    assert listed == sorted(path.name for path in folder.iterdir() if path.name != ".lock")


def test_a_publish_reads_no_weights_to_check_them(here, monkeypatch):
    def unread(tree):
        raise AssertionError("weights were read to check them")

    monkeypatch.setattr(weight_sync, "_finite", unread)
    assert go(here, f"--run-dir={here / 'unread'}", "--config.steps=2") == 0


def test_an_existing_run_is_never_written_over(here, finished, capsys):
    before = (finished / "summary.json").read_bytes()
    assert go(here, f"--run-dir={finished}") == 1
    assert "a run is never written over" in capsys.readouterr().err
    assert (finished / "summary.json").read_bytes() == before


def test_a_recompilation_in_the_second_round_fails_the_run(here, monkeypatch):
    write = rollout_log.RolloutLog.write

    def strange(self, step, groups):
        write(self, step, groups)
        if self._folder.name == "rollouts":
            jax.jit(lambda late_program: late_program * 2)(jax.device_put(np.zeros(100 + step, np.float32)))

    monkeypatch.setattr(rollout_log.RolloutLog, "write", strange)
    with pytest.raises(RuntimeError, match=r"recompilation after warm-up of .*float32\[102\]"):
        go(here, f"--run-dir={here / 'late'}")
    jax.jit(lambda x: x + 3)(jnp.ones(7))  # the guard ended with the run


def test_an_implicit_transfer_in_the_loop_fails_the_run(here, monkeypatch):
    write = rollout_log.RolloutLog.write

    def careless(self, step, groups):
        write(self, step, groups)
        if self._folder.name == "rollouts":
            jax.numpy.add(jax.device_put(np.zeros(3, np.float32)), np.zeros(3, np.float32))

    monkeypatch.setattr(rollout_log.RolloutLog, "write", careless)
    with pytest.raises(Exception, match="Disallowed host-to-device transfer"):
        go(here, f"--run-dir={here / 'careless'}")


def test_dynamic_sampling_and_no_evaluation(here):
    folder = here / "filtered"
    assert (
        go(
            here,
            f"--run-dir={folder}",
            "--config.scheduler.filter_groups=True",
            "--config.scheduler.max_waves=99",
            "--config.eval=default",
            "--config.eval.prompts=0",
            "--config.steps=2",
        )
        == 0
    )
    rows = metric_rows.read(folder / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["frac_reward_zero_std"] == 0 and row["sched/num_groups_trained"] == 4 for row in rows)
    assert sum(row["sched/num_groups_filtered"] for row in rows) > 0 and not (folder / "evaluations").exists()
    assert json.loads((folder / "summary.json").read_text())["eval"] == {"before": None, "after": None}


@pytest.mark.extended
def test_supervised_training_is_the_same_loop(here, capsys):
    """Rollouts are the task's own solutions, the loss falls, and the evaluating engine got the trained weights."""
    folder = here / "supervised"
    task = [
        "--config.data.train=task:sums",
        "--config.data.size=64",
        "--config.eval.data=",
        "--config.batch.tokens=96",
        "--config.engine.max_length=96",
        "--config.sampling.max_tokens=64",
        "--config.data.task.usual=4",
        "--config.data.task.longest=5",
        "--config.reward.functions=['jaxrl_post.rewards.math:exact']",
    ]
    supervised = [
        "--config.engine.name=demonstrations",
        "--config.algorithm.loss_mode=sft",
        "--config.steps=12",
        "--config.algorithm.adv_estimator=ones",
        "--config.scheduler.group_size=1",
        "--config.scheduler.prompts=16",
        f"--config.model.tokenizer={here / 'sums_tokenizer'}",
    ]
    characters("0123456789+=#").save(here / "sums_tokenizer")
    capsys.readouterr()
    assert go(here, f"--run-dir={folder}", *task, *supervised, "--config.logger.console=quiet") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines if "  loss " in line] == [f"{step}/12" for step in range(1, 13)]
    assert not [
        line for line in lines if "  reward " in line or "  acc " in line or "MiB" in line or "prompt" in line[:8]
    ]
    assert lines[-1] == f"run folder: {folder}" and len(lines) < 12 + 12
    rows = [row for row in metric_rows.read(folder / "metrics.jsonl") if "actor/pg_loss" in row]
    losses = [row["actor/pg_loss"] for row in rows]
    assert losses[-1] < losses[0] - 0.5
    words = load(here / "sums_tokenizer")
    for group in rollout_log.read(folder / "rollouts" / "step_000007.npz"):
        rollout = group.rollouts[0]
        text = TASKS["sums"].demonstrate(group.prompt.extra, rollout.id.seed())
        assert words.decode(rollout.tokens) == text and rollout.tokens[-1] == 0 and rollout.sampled.all()
        assert split_of(words.decode(group.prompt.tokens)) == "sft"
    assert (
        go(
            here,
            f"--run-dir={here / 'after'}",
            *task,
            "--config.steps=1",
            "--config.model.preset=",
            f"--config.model.path={folder / 'policy'}",
            "--config.model.tokenizer=",
        )
        == 0
    )
    same_answers(folder / "evaluations" / "step_000012.npz", here / "after" / "evaluations" / "step_000000.npz")


@pytest.mark.extended
@pytest.mark.slow
def test_two_processes_write_the_same_bytes_as_one(here):
    """2 processes of 2 devices against 1 of 4: decisions and tokens of step 1; the two processes in everything."""
    flags = ["--config.mesh.data=2", "--config.mesh.fsdp=2", "--config.steps=2", "--config.eval.prompts=2"]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    def launch(folder, devices, environment):
        root = str(Path(__file__).parents[1])
        given = os.environ | {"PYTHONPATH": root, "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
        return subprocess.Popen(
            [
                sys.executable,
                "-m",
                "jaxrl_post.main",
                f"--config={here / 'toy.py'}",
                f"--run-dir={here / folder}",
                *flags,
            ],
            env=given | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=root,
        )

    jobs = [
        launch(
            "two",
            2,
            {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": str(i)},
        )
        for i in range(2)
    ]
    said = [job.communicate(timeout=240)[0] for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], said
    alone = launch("one", 4, {})
    said = alone.communicate(timeout=240)[0]
    assert alone.returncode == 0, said
    first, second = here / "two" / "process_0", here / "two" / "process_1"
    names, others = (
        [path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file()] for folder in (first, second)
    )
    assert names == others and len(names) > 6
    for name in names:
        if name.name != "metrics.jsonl":
            assert (first / name).read_bytes() == (second / name).read_bytes(), name
    rows = [metric_rows.read(folder / "metrics.jsonl") for folder in (first, second)]
    assert [metric_rows.deterministic(row) for row in rows[0]] == [metric_rows.deterministic(row) for row in rows[1]]
    decided = [(folder / "scheduler_log.jsonl").read_text().splitlines() for folder in (first, here / "one")]
    taken = [next(i for i, line in enumerate(lines) if '"event":"take"' in line) for lines in decided]
    assert decided[0][: taken[0] + 1] == decided[1][: taken[1] + 1]
    assert (first / "rollouts" / "step_000001.npz").read_bytes() == (
        here / "one" / "rollouts" / "step_000001.npz"
    ).read_bytes()
