"""A judge on the policy's devices gives the scores of an endpoint, and its seconds stand beside those of reserved devices.

- knows: the shipped judge against the labels of held-out questions.
- equal: at a learning rate of 0 a rollout has one verdict in synchronous, tail-batched, pipelined and drafting runs, and with a
  judge that sleeps. Every rollout of the synchronous run is asked again over HTTP.
- learns: a short run that the judge rewards, with the exact result as a measure. Reported.
- cpu: two devices of this machine shared, against one for the policy and one for the judge's endpoint. Reported.
- simulated: configs/sim/judge_14b.py, half of 32 devices reserved against all shared. Reported.
"""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from pathlib import Path

import http_clients
import trained

import jaxrl_post
from jaxrl_post import config
from jaxrl_post.data import tasks, tokenizer
from jaxrl_post.rewards import jobs
from jaxrl_post.rewards.judge import Judge, Undecided
from jaxrl_post.rewards.question import Question
from jaxrl_post.runs.run_logs import groups_of, opened
from jaxrl_post.simulate import settings, simulation

MINUTES = 7.0
SOURCES = ("configs/demo.py", "configs/demo/judge.py", "configs/judge_policy/*", "configs/sim/judge_14b.py")
LIMIT_S = 900.0  # of one run, on a busy machine
CLIENTS = 8
SMALL = (
    *("steps=4", "checkpoint.every=0", "scheduler.prompts=12", "scheduler.group_size=8", "engine.slots=24"),
    *("engine.row_sizes=(64,)", "engine.steps_per_dispatch=8", "eval.prompts=0", "eval.every=0", "optimizer.lr=0"),
)
ARMS = {
    "sync": (),
    "tail_batching": ("scheduler.name=tail_batching", "scheduler.over=1.25"),
    "pipelined": (
        *("scheduler.name=pipeline", "scheduler.max_staleness=2", "scheduler.ahead=4", "scheduler.max_unscored=18"),
    ),
    "drafting": ("speculation.drafter=ours",),
    "asleep": ("judge.asleep=true",),
}
TAUGHT = (
    *("steps=24", "checkpoint.every=0", "scheduler.prompts=32", "eval.prompts=64", "eval.samples=1", "eval.every=0"),
)
GRADER = """
from jaxrl_post.rewards.judge import Judge
score = Judge("http://127.0.0.1:{port}/v1", model="judge", question="{{task}} {{answer}}", high=2.0, max_tokens=16,
              deadline_s=60.0, attempts=1, key_variable="")
"""


def show(record) -> None:
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        _knows(record)
        _equal(record, here)
        _learns(record, here)
        _cpu(record, here)
    _simulated(record)


def _knows(record) -> None:
    rows, form = tasks.verdict_rows(0, "eval", 240), Question(text="{answer}", high=2.0)
    judge = jaxrl_post.load(record.root / "configs" / "judge_policy", engine__max_length=128, sampling__max_tokens=16)
    said = judge.generate([row["prompt"] for row in rows], sampling={"temperature": 0.0})
    right = [form.verdict(one[0].text) == float(row["answer"]) for one, row in zip(said, rows)]
    record.figure("knows.questions", len(rows), at_least=200)
    record.figure("knows.right", sum(right) / len(right), at_least=0.95)


# ---- one verdict, whenever the question runs


def _run(record, folder: Path, *overrides: str, devices: int = 1) -> Path:
    """Runs the demo with a judge into a folder, on so many devices of the CPU."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    env = {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    trained.run(record, "configs/demo/judge.py", folder, "", *overrides, timeout_s=LIMIT_S, env=env)
    return folder


def _records(run: Path) -> dict[str, dict]:
    """Returns the journaled scores by the rollout's id and tokens."""
    names = ("prompt_id", "epoch", "sample", "attempt", "digest")
    lines = map(json.loads, (run / "rewards.jsonl").read_text().splitlines())
    return {json.dumps([one[name] for name in names]): one for one in lines}


def _sums(run: Path, *names: str) -> dict[str, float]:
    rows = trained.rows(run)
    return {name: sum(row.get(name, 0.0) for row in rows) for name in names}


def _equal(record, here: Path) -> None:
    runs = {name: _run(record, here / name, *SMALL, *more) for name, more in ARMS.items()}
    told = {name: {id: one["verdict"] for id, one in _records(run).items()} for name, run in runs.items()}
    sync = told["sync"]
    record.figure("equal.rollouts", len(sync), at_least=300)
    record.figure("equal.kinds_of_verdicts", sorted({str(one) for one in sync.values()}))
    record.figure("equal.different_verdicts", len(set(sync.values())), at_least=2)
    for name in list(ARMS)[1:]:
        common = sync.keys() & told[name].keys()
        record.figure(f"equal.{name}.rollouts_in_common", len(common), at_least=len(sync) // 2)
        differ = [id for id in sorted(common) if sync[id] != told[name][id]]
        record.figure(f"equal.{name}.verdicts_that_differ", differ, equals=[])
    for name, run in runs.items():
        found = _sums(run, "judge/questions", "judge/reply_tokens", "perf/judge_dispatches", "timing_s/judge")
        record.figure(f"equal.{name}.judge", found)
    with _serving(record) as port:
        differ, asked = _asked_again(record, runs["sync"], port)
    record.figure("equal.endpoint.rollouts", asked, at_least=300)
    record.figure("equal.endpoint.verdicts_that_differ", differ, equals=[])


def _asked_again(record, run: Path, port: int) -> tuple[list, int]:
    """Asks an endpoint about every training rollout of a run. Returns the ids whose verdict differs, and their number."""
    words = tokenizer.load(record.root / "configs" / "demo_policy")
    how = dict(model="judge", question="{task} {answer}", high=2.0, max_tokens=16, deadline_s=60.0, attempts=1)
    judge = Judge(f"http://127.0.0.1:{port}/v1", key_variable="", **how)
    rollouts = [rollout for _, group in groups_of(opened(run), "train") for rollout in group.rollouts]
    known = {(one["prompt_id"], one["digest"]): one["verdict"] for one in _records(run).values()}

    def ask(rollout) -> float | None:
        try:
            task = {"task": words.decode(rollout.prompt.tokens)}
            return judge("", words.decode(rollout.tokens, before=rollout.prompt.tokens), rollout.prompt.answer, task)
        except Undecided:
            return None

    said = http_clients.together(CLIENTS, [lambda one=one: ask(one) for one in rollouts])
    keys = [(one.id.prompt_id, jobs.digest_of_tokens(one)) for one in rollouts]
    return [key for key, verdict in zip(keys, said) if known[key] != verdict], len(rollouts)


def _serving(record) -> http_clients.Served:
    """Serves the judge."""
    command = ("serve", "--model=configs/judge_policy", "--name=judge", "--port=0", "--without-token")
    more = ("--config.engine.max_length=128", "--config.sampling.max_tokens=16")
    return http_clients.Served(record.root, "-m", "jaxrl_post", *command, *more)


# ---- what it is good for, and what it costs


def _learns(record, here: Path) -> None:
    run = _run(record, here / "learns", *TAUGHT)
    scores = [row["critic/score/mean"] for row in trained.rows(run, "critic/score/mean")]
    record.figure("learns.score_of_the_first_4_steps", sum(scores[:4]) / 4)
    record.figure("learns.score_of_the_last_4_steps", sum(scores[-4:]) / 4)
    told = trained.summary(run)["eval"]
    for when in ("before", "after"):
        record.figure(f"learns.accuracy_{when}", told[when]["mean_at_1"])


def _cpu(record, here: Path) -> None:
    """The same rows, rollouts and questions twice: all devices shared, and half of them reserved for the judge."""
    rows = [
        {
            "prompt": row["prompt"],
            "data_source": "sums",
            "reward_model": {"ground_truth": row["answer"]},
            "extra_info": {"task": row["prompt"], "index": row["id"]},
        }
        for row in tasks.sum_rows(0, "train", 48)
    ]
    data = here / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    same = (*SMALL, f"data.train={data}", "data.size=4096", "steps=6")
    beside = _run(record, here / "beside", *same, "mesh.data=2", "engine.slots=12", devices=2)
    off = ("judge.model=", "judge.question=", "judge.high=1.0", "judge.weight=1.0", "judge.max_length=1024")
    with _serving(record) as port:
        grader = here / "endpoint.py"
        grader.write_text(GRADER.format(port=port))
        own = (f"reward.functions=('{grader}:score',)", "reward.weights=(0.5,)", f"reward.workers={CLIENTS}")
        limits = ("reward.timeout_s=120.0", "judge.max_tokens=64")
        apart = _run(record, here / "apart", *same, *off, *own, *limits)
    mine, theirs = _records(beside), _records(apart)
    common = mine.keys() & theirs.keys()
    record.figure("cpu.rollouts_in_common", len(common), at_least=len(mine) // 2)
    differ = [id for id in sorted(common) if mine[id]["reward"] != theirs[id]["reward"]]
    record.figure("cpu.rewards_that_differ", differ, equals=[])
    for name, run in (("beside", beside), ("apart", apart)):
        steps = [row.get("timing_s/step") for row in trained.rows(run)]
        seconds = sorted(one for one in steps[1:] if one is not None)  # the first step warms up
        record.figure(f"cpu.{name}.seconds_of_a_step", seconds[len(seconds) // 2])


def _simulated(record) -> None:
    file = str(record.root / "configs" / "sim" / "judge_14b.py")
    given = settings.resolve(config.load(file, settings.Simulation))
    stages = simulation.report(given)["stages"]
    alone = dataclasses.replace(simulation.stages(given)["beside"], judge=settings.JudgeConfig())
    plain, judged = simulation.run(alone), stages["beside"]
    names = {"sync": "half_reserved", "beside": "shared", "tail batching": "shared_and_tail_batching"}
    for stage, name in names.items():
        record.figure(f"simulated.{name}.step_s", stages[stage]["step_s"])
        record.figure(f"simulated.{name}.rollout_s", stages[stage]["rollout_s"])
    shares = {"rollout": plain["rollout_s"], "judge": judged["step_s"] - plain["step_s"]}
    shares["train"] = plain["step_s"] - plain["rollout_s"]
    record.figure("simulated.shared.shares", {name: part / judged["step_s"] for name, part in shares.items()})
    record.figure("simulated.shared_over_half_reserved", stages["sync"]["step_s"] / stages["beside"]["step_s"])
