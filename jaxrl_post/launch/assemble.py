"""From the command line to a run that is ready to turn: every part is built here, exactly once.

A mistake in a config, a data file or a checkpoint is one ValueError before anything is compiled, and a run that could not
start leaves no folder behind.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

from jaxrl_post import config as configs
from jaxrl_post import evaluation
from jaxrl_post.checkpoint import store
from jaxrl_post.checkpoint.background import Background
from jaxrl_post.engine.demonstrations import Demonstrations
from jaxrl_post.engine.elastic import Elastic
from jaxrl_post.engine.host import dispatch_log
from jaxrl_post.engine.row_engine import RowEngine
from jaxrl_post.history import History
from jaxrl_post.kernels import sampling
from jaxrl_post.launch import build as parts
from jaxrl_post.launch import (
    chips,
    compile_guard,
    inputs,
    malloc,
    memory_plan,
    moved_run,
    resume,
    reward_trial,
    run_lock,
    slice_plan,
)
from jaxrl_post.launch import run_folder as folder
from jaxrl_post.launch.command_line import parse
from jaxrl_post.launch.fault_points import FaultPoints
from jaxrl_post.launch.stop_signal import RESTART, Stopped
from jaxrl_post.launch.watchdog import Watchdog, leaving, write_stacks
from jaxrl_post.parallel import processes
from jaxrl_post.parallel.processes import say
from jaxrl_post.rewards import math_algebra
from jaxrl_post.rewards.limits import Adaptive, Fixed
from jaxrl_post.rewards.pool import Pool
from jaxrl_post.rewards.printed import Printed
from jaxrl_post.scheduler import registry
from jaxrl_post.scheduler.decision_log import Recorder
from jaxrl_post.telemetry import metrics
from jaxrl_post.telemetry.journal import Journal, read_aside, read_journal
from jaxrl_post.telemetry.length_bias import BiasMeter
from jaxrl_post.telemetry.rollout_log import read
from jaxrl_post.telemetry.timing import Stopwatch
from jaxrl_post.telemetry.trace import RingTrace
from jaxrl_post.trainer.learner import Learner
from jaxrl_post.types import RolloutId


def planned(config: configs.Config, start: inputs.Inputs) -> str:
    """Describes batch arithmetic, memory per device, the weight sync and what graders compare with, as text."""
    numbers = memory_plan.arithmetic(config, len(start.train), start.longest_prompt)
    held = memory_plan.by_device(config, parts.memory(config, start))
    return "\n".join(
        [
            memory_plan.text("Batch", numbers),
            *(memory_plan.text(f"Memory per {one}", memory_plan.table(own), "B") for one, own in held.items()),
            memory_plan.text(
                "Kept for the backward pass per device, by model.remat_policy",
                memory_plan.kept_by_policy(config, start.model),
                "B",
            ),
            f"Weights reach the engine: {memory_plan.swap_case(config)}",
            *(f"{path} compares by {by}" for path, by in math_algebra.graders(config.reward.functions).items()),
        ]
    )


@dataclass(kw_only=True)
class Run:
    """Every part of a run.

    `evaluator` is the engine itself, a second engine where training rollouts come from the data, or None without
    evaluation. `mine`: the folder that this process writes to. `traces`: at most one. `saved`: the checkpoint that the run
    resumes from, if any. `about`: what a checkpoint must agree with.
    """

    config: configs.Config
    start: inputs.Inputs
    folder: Path
    mine: Path
    guard: compile_guard.CompileGuard
    watch: Stopwatch
    learner: Learner
    engine: Any
    evaluator: RowEngine | Elastic | None
    scheduler: Recorder
    rewards: Pool
    judge: Pool
    history: History
    meter: BiasMeter
    traces: list[RingTrace]
    writer: metrics.Several
    saves: Background
    saved: store.Saved | None
    about: dict
    faults: FaultPoints
    evaluations: list[evaluation.Evaluation] = field(default_factory=list)

    @property
    def swap(self) -> dict | None:
        """How weights reach the row engine, and the bytes of a swap by link. None: there is no row engine."""
        row_engines = [engine for engine in self.engines if isinstance(engine, (RowEngine, Elastic))]
        return parts.swap(row_engines[0]) if row_engines else None

    @property
    def records(self) -> list[Any]:
        """Parts that record scored groups: the history, and the drafting of each row engine."""
        return [self.history, *(engine.drafting for engine in self.engines if isinstance(engine, (RowEngine, Elastic)))]

    @property
    def engines(self) -> list[Any]:
        """The engine and the evaluator, without repetition."""
        return list(dict.fromkeys(engine for engine in (self.engine, self.evaluator) if engine is not None))


def assemble(arguments: Sequence[str], stack: contextlib.ExitStack) -> Run | None:
    """Builds a run from the command line. Returns None where only the plan was asked for (--dry-run)."""
    flags = parse(arguments)
    malloc.return_large_blocks()
    resolved = functools.partial(configs.resolve, configs.load(flags.config), flags.overrides)
    if flags.slice:
        config = resolved(platform=chips.read(flags.slice).chip.platform)
        slice_plan.text(config, inputs.shape(config), flags.slice, functools.partial(print, flush=True))
        return None
    if not flags.dry_run:
        processes.start(os.environ)
    recorded = folder.recorded(flags.run_dir) if flags.resume else {}
    config = resolved(platform=jax.default_backend(), recorded=recorded)
    if flags.dry_run:
        print(json.dumps(configs.to_dict(config), indent=2))
        start = inputs.gather(config)
        checked(config, start)
        print(planned(config, start), flush=True)
        compile_guard.use_cache(os.environ)
        print(parts.foreseen(config, start))
        return None
    compile_guard.use_cache(os.environ)
    start = inputs.gather(config)
    words = planned(config, start)
    devices = parts.device_plan(config)
    say(words)
    since = folder.first_missing(Path(flags.run_dir or config.run_dir))
    if flags.resume:
        place, new = folder.take_up(flags.run_dir, must_exist=flags.resume == "required")
    else:
        place, new = folder.make(flags.run_dir, config.run_dir, config.name, config.seed), True
    run_lock.hold(place, stack)  # a folder that another job holds is not ours to remove
    try:
        with starting(config, place):
            return build(config, start, devices, place, new, stack)
    except (ValueError, OSError, Stopped):
        stack.close()
        if new and jax.process_index() == 0:
            folder.remove(place, since)
        raise


def starting(config: configs.Config, place: Path) -> Watchdog:
    """Returns what ends a run that hangs while its parts are built and compiled."""

    def expired(phase: str, seconds: float) -> None:
        with leaving(RESTART):
            say(f"HANG: the start took {seconds:.0f} s, above watchdog.compile_s; hang.txt has all stacks")
            write_stacks(folder.own(place) / "hang.txt", f"the start: {seconds:.1f} s")

    return Watchdog({}, config.watchdog.compile_s, expired)


def build(
    config: configs.Config,
    start: inputs.Inputs,
    devices: parts.DevicePlan,
    place: Path,
    new: bool,
    stack: contextlib.ExitStack,
) -> Run:
    """Builds every part, once. The checkpoint and the graders come first: they need no device and may refuse."""
    mine, watch, faults = folder.own(place), Stopwatch(), FaultPoints(os.environ)
    about, saves, saved = checkpoints(config, start, place, mine, new, faults, stack)
    rewards, judge = both_graders(config, start, devices, mine, stack)
    history = History(epochs=config.history.epochs, max_bytes=config.history.max_bytes)
    scheduler = recorded_scheduler(config, start, history, mine, stack)
    guard = stack.enter_context(compile_guard.CompileGuard())
    learner = compiled_learner(config, start, devices, saved)
    engine, evaluator = ENGINES[config.engine.name](config, start, devices, learner, history)
    stack.enter_context(dispatch_log.logged({engine, evaluator}, mine / "dispatches.jsonl"))
    run = Run(
        config=config,
        start=start,
        folder=place,
        mine=mine,
        guard=guard,
        watch=watch,
        learner=learner,
        engine=engine,
        evaluator=evaluator,
        scheduler=scheduler,
        rewards=rewards,
        judge=judge,
        history=history,
        meter=BiasMeter(),
        traces=drawn_traces(config, learner, watch, mine, stack),
        writer=written_rows(config, evaluator, place, mine, stack),
        saves=saves,
        saved=saved,
        about=about,
        faults=faults,
    )
    if saved is not None:
        revive(run, saved)
    malloc.give_back()
    return run


def checkpoints(
    config: configs.Config,
    start: inputs.Inputs,
    place: Path,
    mine: Path,
    new: bool,
    faults: FaultPoints,
    stack: contextlib.ExitStack,
) -> tuple[dict, Background, store.Saved | None]:
    """Opens the run's checkpoints: what they must agree with, where they lie, and the one to resume from, if any."""
    about = resume.about(config, start, resume.versions())
    saves = store.Checkpoints(
        place / "checkpoints",
        keep_last=config.checkpoint.keep_last,
        max_failures=config.checkpoint.max_failures,
        reach=faults.reach,
        say=say,
        share=processes.share_text,
        any_of=processes.any_text,
    )
    saved = None if new else resume.point(saves, place, mine, about, say)
    return about, stack.enter_context(Background(saves, malloc.give_back)), saved


def both_graders(
    config: configs.Config, start: inputs.Inputs, devices: parts.DevicePlan, mine: Path, stack: contextlib.ExitStack
) -> tuple[Pool, Pool]:
    """Starts the graders of training and those of evaluation. Every prompt is checked against the reward functions."""
    grade = functools.partial(graders, config, start.tokenizer.decode, devices, stack, Printed(mine / "rewards.log"))
    of_training, of_evaluation = config.scheduler.group_size, config.eval.samples
    rewards = grade(mine / "rewards.jsonl", lambda rollout: of_training, shuffle=config.reward.shuffle)
    judge = grade(
        mine / "eval_rewards.jsonl",
        lambda rollout: 1 if rollout.attempt == evaluation.GREEDY else of_evaluation,
        shuffle=False,
    )
    rewards.check((*start.train, *start.held_out))
    if rewards.confined:
        say(f"judged programs: sandbox {rewards.confined['level']}, layers {', '.join(rewards.confined['layers'])}")
    return rewards, judge


def checked(config: configs.Config, start: inputs.Inputs) -> None:
    """Loads the reward functions, checks every prompt against them, and calls each once, for a plan."""
    about, texts = config.reward, reward_trial.Texts(start.tokenizer)
    with Pool(
        about.functions, about.weights, workers=1, timeout_s=about.timeout_s, decode=texts.decode, sandbox=about.sandbox
    ) as pool:
        pool.check((*start.train, *start.held_out))
        reward_trial.call_once(start, pool, texts)


def compiled_learner(
    config: configs.Config, start: inputs.Inputs, devices: parts.DevicePlan, saved: store.Saved | None
) -> Learner:
    """Builds the learner and compiles its programs, with the state of the checkpoint, if any."""
    learner = parts.learner(config, start.model, start.load_params, devices)
    if line := parts.training_attention(config, start.model, devices)[1]:
        say(line)
    learner.compile()
    if saved is not None:
        learner.restore(saved.arrays, saved.step)
    return learner


def recorded_scheduler(
    config: configs.Config, start: inputs.Inputs, history: History, mine: Path, stack: contextlib.ExitStack
) -> Recorder:
    """Builds the scheduler, with its decision log around it."""
    replica = functools.partial(parts.replica, config, start.model, start.cost)
    scheduler = registry.made(
        config, start.train, start.sampling, history.of, replica, parts.pace(config, replica, start.cost)
    )
    if config.engine.layouts:
        scheduler = registry.planned(scheduler, parts.replicas(config, start.model, start.cost))
    decisions = stack.enter_context(open(mine / "scheduler_log.jsonl", "a", buffering=1, encoding="utf-8"))
    return Recorder(scheduler, decisions.write)


def written_rows(
    config: configs.Config, evaluator: Any, place: Path, mine: Path, stack: contextlib.ExitStack
) -> metrics.Several:
    """Opens the metrics of this process. Process 0 also writes config.json and a line to the screen for each step."""
    writers = [metrics.Jsonl(mine / "metrics.jsonl")]
    if jax.process_index() == 0:
        told = derived(config, evaluator) | {"graders": math_algebra.graders(config.reward.functions)}
        folder.write_json(place / "config.json", configs.to_dict(config) | {"derived": told})
        writers.append(metrics.console(config.steps))
    writer = metrics.Several(*writers)
    stack.callback(writer.close)
    return writer


def drawn_traces(
    config: configs.Config, learner: Learner, watch: Stopwatch, mine: Path, stack: contextlib.ExitStack
) -> list[RingTrace]:
    """Opens the trace of the first `trace_rounds` rounds; none where that is 0."""
    if not config.trace_rounds:
        return []
    file = stack.enter_context(open(mine / f"trace_{learner.step:06d}.json", "w", encoding="utf-8"))
    trace = RingTrace(file.write, watch.now, slots=config.engine.slots, rounds=config.trace_rounds)
    watch.listeners.append(trace.phase)
    stack.callback(trace.close)
    return [trace]


def revive(run: Run, saved: store.Saved) -> None:
    """Restores the host's state. The first and the latest evaluation are read from their log."""
    prompts, host = {prompt.id: prompt for prompt in run.start.train}, saved.host
    if moved_run.changes(saved.about, run.about):
        host = moved_run.rehomed(host, run.engines)
    run.history.load_state_dict(saved.host["history"])
    run.meter.load_state_dict(saved.host["meter"])
    run.learner.gate.load_state_dict(saved.host["gate"])
    for engine, state in zip(run.engines, host["engines"], strict=True):
        engine.load_state_dict(state, prompts)
    run.scheduler.load_state_dict(host["scheduler"])
    for rollout in run.scheduler.held():
        run.rewards.start(rollout)
    files = sorted((run.mine / "evaluations").glob("step_*.npz"))
    run.evaluations += [evaluation.of(read(file)) for file in dict.fromkeys([*files[:1], *files[-1:]])]


def graders(
    config: configs.Config,
    decode: Callable,
    devices: parts.DevicePlan,
    stack: contextlib.ExitStack,
    printed: Printed,
    journal: Path,
    group_size: Callable[[RolloutId], int],
    *,
    shuffle: bool,
) -> Pool:
    """Starts a pool of reward processes. In a job of several processes, process 0 scores and shares the scores."""
    limits = Fixed(config.reward.limit_s)
    if config.reward.adaptive_limit:
        limits = Adaptive(config.reward.limit_s, read_journal(journal) if journal.is_file() else ())
    log = Journal(journal)
    stack.callback(log.close)
    before = read_aside(journal)
    if len(before):
        say(f"resume: {len(before)} scores of {journal.name} after that point are used again, not asked for again")
    pool = Pool(
        config.reward.functions,
        config.reward.weights,
        workers=config.reward.workers,
        timeout_s=config.reward.timeout_s,
        decode=decode,
        shuffle=shuffle,
        seed=config.seed,
        share=functools.partial(processes.share, mesh=devices.first) if jax.process_count() > 1 else None,
        compute=jax.process_index() == 0,
        journal=log,
        journaled=before,
        limits=limits,
        sandbox=config.reward.sandbox,
        group_size=group_size,
        printed=printed,
    )
    return stack.enter_context(pool)


def rows_for_all(config, start, devices, learner, history) -> tuple[Any, RowEngine | Elastic | None]:
    """Builds one row engine that generates and evaluates."""
    engine = parts.engine(config, start, devices, learner, history, say)
    return engine, engine if start.held_out else None


def data_for_training(config, start, devices, learner, history) -> tuple[Any, RowEngine | None]:
    """Builds an engine that takes training rollouts from the data, and a row engine for evaluation, if there is any."""
    engine = Demonstrations(start.write, slots=config.engine.slots, replicas=config.replicas, version=learner.step)
    return engine, parts.engine(config, start, devices, learner, history, say) if start.held_out else None


ENGINES = {"rows": rows_for_all, "demonstrations": data_for_training}


def derived(config: configs.Config, evaluator: RowEngine | Elastic | None) -> dict:
    """What tokens depend on beside the config: versions, devices, processes, sampling law and the engine's own keys."""
    out = {
        "versions": resume.versions(),
        "device": jax.devices()[0].device_kind,
        "devices": jax.device_count(),
        "processes": jax.process_count(),
        "sampling_law": sampling.LAW,
        "swap": memory_plan.swap_case(config),
    }
    if evaluator is not None:
        out |= parts.keys(evaluator)
    return out
