"""The mode that `scheduler.name=auto` chooses is near the best on lengths and costs that the choice has not seen.

There are twelve pairs of a workload and chips. The choice sees the first half of a trace, or rollouts drawn with one
seed, and the committed cost table. Every mode then runs in the simulator on the second half, or on rollouts of other
prompts with another seed. There an engine step costs 0.7 and 1.3 times what the table says. Figures are seconds per
trained rollout at equal optimizer steps, because modes change only in which step a rollout is trained.

- Traces: Azure's code and conversation, Mooncake, and completions of a GRPO run (JAXRL_DATA).
- Made lengths: equal, log-normal with a thin tail, uniform, and one prompt in eight that is sixteen times as long.
- Chips: a CPU, one H100 with Qwen2.5-0.5B, and 8 H100 or v5e-16 with Qwen2.5-7B, shared or split.

`auto` is within 10 % of the best mode in all of them, and slower than synchronous rounds in at most one pair. What it
would have chosen without any history stands beside, without a bound.

Then come four real runs: `auto` against synchronous rounds, in turns, in CPU seconds of the process by optimizer step
after the first two. All run on one core, because threads that wait for each other spend CPU seconds too. `noise` is the
largest ratio of two runs of one program, minus 1. The median ratio is at most 1 + noise. Where `auto` chooses
synchronous rounds, both arms are one program: their configs are equal, and their ratios are noise.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

MINUTES = 14.0
PROMPTS, GROUP, STEPS = 16, 8, 24
SCALES = (0.7, 1.3)  # of the seconds of an engine step
TRACES = {
    "code": ("traces", "AzureLLMInferenceTrace_code.csv"),
    "conversation": ("traces", "AzureLLMInferenceTrace_conv.csv"),
    "mooncake": ("traces", "mooncake_conversation_trace.jsonl"),
    "countdown": ("rollout-samples", "smollm2_countdown_grpo_completions.txt"),
}
# Workload, chips, and the bound of staleness.
PAIRS = (
    ("code", "cpu", 0),
    ("conversation", "h100", 4),
    ("mooncake", "8xh100.shared", 0),
    ("countdown", "8xh100.split", 4),
    ("conversation", "v5e-16.shared", 4),
    ("mooncake", "v5e-16.split", 0),
    ("equal", "cpu", 4),
    ("equal", "8xh100.shared", 0),
    ("thin_tail", "v5e-16.shared", 0),
    ("two_kinds", "8xh100.shared", 4),
    ("two_kinds", "cpu", 0),
    ("uniform", "v5e-16.split", 4),
)
REPEATS, RUN_STEPS, WARM = 3, 20, 2
QUIET = ("eval=default", "eval.prompts=0", "checkpoint.every=0", "trace_rounds=0")
EARLIER = "the log of an earlier run, at another seed"
RUNS = {  # config, overrides of both arms, and of auto alone
    "long_tail.pipelines": ("configs/demo/auto.py", (), ()),
    "long_tail.on_policy": ("configs/demo/auto.py", (), ("scheduler.max_staleness=0",)),
    "demo.no_history": ("configs/demo.py", ("scheduler.prompts=16",), ()),
    "demo.cut_short": ("configs/demo.py", ("scheduler.prompts=16", "sampling.max_tokens=4"), EARLIER),
}
SYNC = ("scheduler.name=sync", "scheduler.auto_history=", "scheduler.max_staleness=0")

os.environ.setdefault("JAX_PLATFORMS", "cpu")


def show(record) -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # before jax counts the cores
    halves = {name: record.data(*parts) for name, parts in TRACES.items()}
    worse = []
    for workload, chips, most in PAIRS:
        name = f"{workload}.{chips}"
        found = record.cached(name, lambda pair=(workload, chips, most): _pair(*pair, halves))
        record.figure(name, found)
        record.figure(f"{name}.chosen", found["chosen"])
        record.figure(f"{name}.sync_over_auto", found["sync_over_auto"])
        record.figure(f"{name}.auto_over_best", found["auto_over_best"], at_most=1.10)
        record.figure(f"{name}.without_history_over_best", found["without_history_over_best"])
        worse += [name] * (found["sync_over_auto"] < 1)
    record.figure("slower_than_sync", worse)
    record.figure("pairs", len(PAIRS), at_least=12)
    record.figure("pairs_slower_than_sync", len(worse), at_most=1)
    _real(record)


# ---- in the simulator


def _pair(workload: str, chips: str, most: int, halves: dict) -> dict:
    """Returns the choice of a pair, and ratios of seconds over both scales, the worst of each."""
    from jaxrl_post.launch.plan import mode_choice
    from jaxrl_post.simulate import observed, trial

    seen, unseen, cap = _lengths(workload, halves)
    config, job = _job(chips, most, cap, seen)
    started = time.process_time()
    why = mode_choice.choose(config, job)
    took = time.process_time() - started
    blind = mode_choice.choose(config, _with(job, lengths=observed.prior(cap).lengths))["chosen"]
    chosen, blind = mode_choice.named(why["chosen"]), mode_choice.named(blind)
    out = {"chosen": chosen, "without_history": blind, "seconds_of_the_choice": took}
    out["predicted"] = {mode_choice.named(mode["options"]): mode["seconds"] for mode in why["modes"]}
    for scale in SCALES:
        world = _with(job, lengths=unseen, seed=1, replica=_with(job.replica, cost=Scaled(job.replica.cost, scale)))
        ends = {one.name: trial.run(one.config, world, STEPS).ends for one in mode_choice.candidates(config)[0]}
        assert all(len(end) == STEPS for end in ends.values()), "modes are compared at equal optimizer steps"
        out[f"{scale}"] = {name: end[-1] / (STEPS * PROMPTS * GROUP) for name, end in ends.items()}
    worlds = [out[f"{scale}"] for scale in SCALES]
    out["auto_over_best"] = max(one[chosen] / min(one.values()) for one in worlds)
    out["without_history_over_best"] = max(one[blind] / min(one.values()) for one in worlds)
    out["sync_over_auto"] = min(one["sync"] / one[chosen] for one in worlds)
    return out


def _with(value, **changes):
    import dataclasses

    return dataclasses.replace(value, **changes)


class Scaled:
    """A Cost whose steps take `scale` times as long. Prefill takes what it took."""

    def __init__(self, cost, scale: float):
        self._cost, self._scale, self.prefill_s = cost, scale, cost.prefill_s

    def __call__(self, rows, context):
        return self._scale * self._cost(rows, context)


def _lengths(workload: str, halves: dict) -> tuple[tuple, tuple, int]:
    """Returns lengths by prompt for the choice, others for the runs, and the longest rollout."""
    from jaxrl_post.simulate import workloads

    if workload in TRACES:
        cap = 2048
        every = [min(length, cap) for length in workloads.read_lengths(halves[workload])]
        middle = len(every) // 2
        return (tuple(every[:middle]),), (tuple(every[middle:]),), cap
    return _made(workload, 0), _made(workload, 1), 1024


def _made(workload: str, seed: int) -> tuple[tuple[int, ...], ...]:
    """Returns lengths of 256 prompts with GROUP rollouts each."""
    import numpy as np

    rng = np.random.default_rng(seed)
    shape = (256, GROUP)
    if workload == "equal":
        drawn = np.full(shape, 256)
    elif workload == "uniform":
        drawn = rng.integers(1, 1025, shape)
    elif workload == "thin_tail":
        drawn = np.exp(rng.normal(np.log(300), 0.25, shape))
    else:
        long = rng.random((256, 1)) < 1 / 8
        drawn = np.where(long, 800, 50) * np.exp(rng.normal(0, 0.2, shape))
    return tuple(tuple(int(min(max(length, 1), 1024)) for length in row) for row in drawn)


def _job(chips: str, most: int, cap: int, lengths: tuple):
    """Returns the config of a run on these chips, and what the simulator needs of it."""
    from jaxrl_post import config as configs
    from jaxrl_post.launch.plan import mode_choice
    from jaxrl_post.scheduler.forecast import ReplicaCapacity
    from jaxrl_post.simulate import trial

    slots, sizes, split = (64, (64, 128), False) if chips == "cpu" else (160, (160,), chips.endswith("split"))
    options = (
        "model.preset=tiny",
        "scheduler.name=auto",
        f"steps={STEPS}",
        f"scheduler.max_staleness={most}",
        f"scheduler.prompts={PROMPTS}",
        f"scheduler.group_size={GROUP}",
        f"mesh.engine={int(split)}",
        f"engine.slots={slots}",
        f"engine.row_sizes={list(sizes)}",
        f"sampling.max_tokens={cap}",
        *(f"{name}={cap + 128}" for name in ("engine.max_length", "batch.tokens")),
    )
    cost, token_s, step_s = _cost(chips)
    return configs.resolve(configs.default(), options), trial.TrialInputs(
        lengths=lengths,
        prompts=4096,
        prompt_tokens=128,
        replica=ReplicaCapacity(slots=slots, kv_tokens=slots * (cap + 128), cost=trial.InSizes(cost=cost, sizes=sizes)),
        token_s=token_s,
        step_s=step_s,
        drift=mode_choice.DRIFT,
    )


def _cost(chips: str) -> tuple:
    """Returns the cost of an engine step, and seconds of a trained token and of an optimizer step beside its tokens."""
    from cost_tables import read

    from jaxrl_post.engine import step_cost

    shapes = {
        "cpu": step_cost.Shape(active=1.61e5, parameters=3.2e5, kv_bytes=2048),  # the demo's policy in float32
        "h100": step_cost.Shape(active=4.9e8, parameters=4.9e8, kv_bytes=12288),
    }
    if chips in shapes:
        cost = step_cost.decode(chips, shapes[chips])
        return cost, 3 * cost.prefill_s, 0.0
    price = read(*chips.split("."))
    rows, seconds = zip(*sorted(price.step_s.items()))
    table = step_cost.StepCost(rows, tuple(one + price.launch_s for one in seconds), chips)
    return step_cost.TableCost(table=table), price.train_token_s, price.train_step_s


# ---- real runs


def _real(record) -> None:
    found = {name: record.cached(f"run.{name}", lambda name=name: _arms(record, name)) for name in RUNS}
    same = [[*told["sync"], *told["auto"]] if told["equal_configs"] else told["sync"] for told in found.values()]
    noise = max(max(runs) / min(runs) for runs in same) - 1
    record.figure("real.noise", noise, at_most=0.2)
    for name, told in found.items():
        ratios = [ours / theirs for ours, theirs in zip(told["auto"], told["sync"])]
        record.figure(f"real.{name}.chosen", told["chosen"])
        record.figure(f"real.{name}.cpu_seconds_per_step", {arm: told[arm] for arm in ("sync", "auto")})
        record.figure(f"real.{name}.auto_over_sync_by_pair", ratios)
        record.figure(f"real.{name}.auto_over_sync", statistics.median(ratios), at_most=1 + noise)
        record.figure(f"real.{name}.equal_configs", told["equal_configs"], equals=told["chosen"] == "sync")


def _arms(record, name: str) -> dict:
    """Returns the mode that auto chose, and CPU seconds by optimizer step of both arms, repetition by repetition."""
    file, both, more = RUNS[name]
    out: dict = {"sync": [], "auto": []}
    configs = {}
    with tempfile.TemporaryDirectory() as folder:
        _run(record, file, [*both, *SYNC, "seed=7", "steps=4"], Path(folder) / "earlier")  # its seconds do not count
        more = [f"scheduler.auto_history={folder}/earlier"] if more is EARLIER else more
        auto = ["scheduler.name=auto", *more]
        for turn in range(REPEATS):
            for arm in ("sync", "auto") if turn % 2 == 0 else ("auto", "sync"):
                place = Path(folder) / f"{arm}-{turn}"
                options = [*both, *(SYNC if arm == "sync" else auto), f"steps={RUN_STEPS}"]
                seconds, configs[arm] = _run(record, file, options, place)
                out[arm].append(seconds)
    return out | {"chosen": _mode(configs["auto"]), "equal_configs": configs["sync"] == configs["auto"]}


def _run(record, file: str, options: list[str], place: Path) -> tuple:
    """Runs a config in this process. Returns CPU seconds by optimizer step after the first ones, and the run's config."""
    from jaxrl_post import main

    marks: list[float] = []
    with contextlib.ExitStack() as stack, contextlib.redirect_stdout(sys.stderr):
        flags = [f"--config={record.root / file}", f"--run-dir={place}"]
        run = main.assemble([*flags, *(f"--config.{one}" for one in (*QUIET, *options))], stack)
        write = run.writer.write

        def timed(step: int, row) -> None:
            marks.append(time.process_time())
            write(step, row)

        run.writer.write = timed
        main.run_training(run)
    return (marks[-1] - marks[WARM - 1]) / (len(marks) - WARM), run.config


def _mode(config) -> str:
    from jaxrl_post.launch.plan import mode_choice

    s = config.scheduler
    own = {"tail_batching": ("over", "prefix_mode"), "pipeline": ("max_staleness", "ahead")}.get(s.name, ())
    return mode_choice.named({"name": s.name, **{option: getattr(s, option) for option in own}})
