"""From a config to a run that is ready to train: every part is built here, exactly once.

`assemble` reads the command line. `begin` is the part that a Python program uses too (jaxrl_post/commands/api.py). Its stations are
options, inputs, mode, parent, folder and lock, checkpoint, graders, and the parts that compile.

A mistake in a config, a data file or a checkpoint is one ValueError before anything is compiled, and a run that could not
start leaves no folder behind.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax

from jaxrl_post import config as configs
from jaxrl_post.engine.elastic import Elastic
from jaxrl_post.engine.host import dispatch_log
from jaxrl_post.engine.host.turns import Judging, Turns
from jaxrl_post.engine.row_engine import RowEngine
from jaxrl_post.launch import autotuning, compile_guard, dry_run, own_process, resume, run_writers, start_check
from jaxrl_post.launch import branch as branches
from jaxrl_post.launch.command_line import parse
from jaxrl_post.launch.parts import build as parts
from jaxrl_post.launch.parts import evaluation, graders, inputs
from jaxrl_post.launch.parts.python_inputs import NOTHING, PythonInputs
from jaxrl_post.launch.plan import chips, mode_choice, slice_plan
from jaxrl_post.launch.stop_signal import RESTART, Stopped, resumed_from
from jaxrl_post.launch.watchdog import FaultPoints, Watchdog, leaving, write_stacks
from jaxrl_post.parallel import exchange, liveness, processes
from jaxrl_post.parallel.processes import say
from jaxrl_post.ring import written
from jaxrl_post.ring.history import History
from jaxrl_post.ring.timing import Stopwatch
from jaxrl_post.runs import attempts, bucket_run
from jaxrl_post.runs import run_folder as folder
from jaxrl_post.runs.buckets.followers import Follower
from jaxrl_post.runs.buckets.mirror import Mirror, Nowhere
from jaxrl_post.runs.checkpoint import store
from jaxrl_post.runs.checkpoint.background import Background
from jaxrl_post.runs.checkpoint.disks import Disks
from jaxrl_post.runs.rollout_log import read
from jaxrl_post.scheduler import registry
from jaxrl_post.scheduler.curriculum import Curricular
from jaxrl_post.scheduler.decision_log import Recorder
from jaxrl_post.scheduler.rounds.layout_planner import Planner
from jaxrl_post.telemetry import loggers, metrics
from jaxrl_post.telemetry.length_bias import BiasMeter
from jaxrl_post.trainer.learner import Learner


@dataclass(frozen=True, kw_only=True)
class Origin:
    """What a run starts from: nothing, its own newest checkpoint, one of its parent, or a step of a past run.

    `about`: what a checkpoint must agree with. `saves`: keeps the run's checkpoints. `saved`: the checkpoint whose state is
    restored, if any. `rewards`, `judge`: score training and evaluation. `parent`: the checkpoint of another run that this one
    began from, if any. `branch`: what the run takes from its parent now, before it has a checkpoint of its own.
    """

    about: dict
    saves: Any
    saved: store.Saved | None
    rewards: Any
    judge: Any
    parent: branches.Parent | None = None
    branch: branches.Branch | None = None
    faults: FaultPoints = field(default_factory=lambda: FaultPoints(os.environ))


@dataclass(kw_only=True)
class Run:
    """Every part of a run.

    `evaluator` is the engine itself, a second engine where training rollouts come from the data, or None without
    evaluation. `mine`: the folder that this process writes to. `traces`: what listens to the ring from its start to its
    end. `began`: when the run did, by time.monotonic(). `mirror`: what commits the folder to a bucket. Fields from `about`
    to `faults` are those of its Origin.
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
    history: History
    traces: list[Any]
    writer: metrics.Several
    about: dict
    saves: Background
    saved: store.Saved | None
    rewards: Any
    judge: Any
    parent: branches.Parent | None
    branch: branches.Branch | None
    faults: FaultPoints
    mirror: Mirror | Follower | Nowhere = field(default_factory=Nowhere)
    meter: BiasMeter = field(default_factory=BiasMeter)
    evaluations: list[evaluation.Evaluation] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    @property
    def swap(self) -> dict | None:
        """How weights reach the row engine, and the bytes of a swap by link. None: there is no row engine."""
        row_engines = [engine for engine in self.engines if isinstance(engine, (RowEngine, Elastic))]
        return parts.swap(row_engines[0]) if row_engines else None

    @property
    def records(self) -> list[Any]:
        """Parts that record scored groups: the history, and the drafting of each row engine."""
        return [self.history, *(engine.drafting for engine in self.engines if isinstance(engine, (RowEngine, Elastic)))]

    @functools.cached_property
    def rollout_engine(self) -> Any:
        """The engine as the ring sees it: its rollouts are whole conversations, or a judge works beside it."""
        about, engine = self.config.environment, self.engine
        if about.name:
            engine = Turns(engine, self.rewards.conversations, delay=about.delay, steps_cut=about.cut_turns == "step")
        return Judging(engine, self.rewards.beside.queue) if self.config.judge.model else engine

    @property
    def sources(self) -> list[Any]:
        """Parts whose counters each step reads."""
        judge = [self.rewards.beside.queue] if self.config.judge.model else []
        return [self.engine, self.scheduler, self.rewards, *judge, *self.records]

    @property
    def conversations(self) -> list[Any]:
        """Parts that hold conversations, in the order in which they are restored. Without an environment there are none."""
        return [self.rewards.conversations, self.rollout_engine] if self.config.environment.name else []

    @property
    def engines(self) -> list[Any]:
        """The engine and the evaluator, without repetition."""
        return list(dict.fromkeys(engine for engine in (self.engine, self.evaluator) if engine is not None))


def assemble(arguments: Sequence[str], stack: contextlib.ExitStack, handed: PythonInputs = NOTHING) -> Run | None:
    """Builds a run from the command line, with `handed` as in `begin`. Returns None where only the plan was asked for."""
    flags = parse(arguments)
    given = branches.settings(flags)
    if flags.slice:
        where = chips.read(flags.slice)
        config = configs.resolve(given, flags.overrides, platform=where.chip.platform)
        slice_plan.predicted(config, inputs.shape(config), where, functools.partial(print, flush=True), flags.length)
        return None
    if flags.dry_run:
        own_process.return_large_blocks()
        place = bucket_run.config_folder(flags.run_dir, flags.resume == "required") if flags.resume else ""
        dry_run.show(resolved(given, flags.overrides, place), flags.branch, every_option=flags.every_option)
        return None
    folders = {"run_dir": flags.run_dir, "resumes": flags.resume, "branch": flags.branch}
    return begin(given, flags.overrides, stack, **folders, handed=handed)


def resolved(given: Any, overrides: Sequence[str], resumed: str) -> configs.Config:
    """Resolves the options of a run on the devices that are here. `resumed`: the folder whose run goes on, or empty."""
    recorded = folder.recorded(resumed) if resumed else {}
    return configs.resolve(given, overrides, platform=jax.default_backend(), recorded=recorded)


def begin(
    given: Any,
    overrides: Sequence[str],
    stack: contextlib.ExitStack,
    *,
    run_dir: str = "",
    resumes: str = "",
    branch: str = "",
    handed: PythonInputs = NOTHING,
) -> Run:
    """Builds a run from a config and overrides `a.b=value`.

    Args:
      given: a ConfigDict, or nested mappings.
      stack: ends what the run holds.
      run_dir, resumes, branch: as `run_dir`, `resume` and `branch` of command_line.Flags.
      handed: what a Python program gives beside the config.

    Raises:
      ValueError: a mistake in the config, a data file, a reward function or a checkpoint. No new folder is left.
      Unreachable: the run's bucket does not answer.
    """
    own_process.return_large_blocks()
    processes.start(os.environ)
    liveness.join(attempts.end)
    where = bucket_run.opened(run_dir, resumes, stack, say)
    resumed = where.run_dir if resumes else ""
    config = inputs.dated(resolved(given, overrides, resumed))
    loggers.check(config.logger)
    compile_guard.use_cache(os.environ)
    start = inputs.gather(config, handed)
    start_check.check(lambda: resume.about(config, start))
    config, why, chosen = mode_choice.settled(config, start, resumed)
    taken = branches.opened(branch, config, start) if branch else None
    devices = parts.device_plan(config)
    dry_run.announce(config, start, chosen)
    since = folder.first_missing(Path(where.run_dir or config.run_dir))
    if resumes:
        found = folder.take_up(resumed, resumes == "required", where.disks)
    else:
        found = folder.make(where.run_dir, config.run_dir, config.name, config.seed, where.disks)
    folder.hold(found.place, stack, where.disks)  # a folder that another job holds is not ours to remove
    try:
        with starting(config, found.place, run_dir):
            parent, start = branches.ordered(taken, found.place, start)
            about = resume.about(config, start) | ({"auto": why} if why else {})
            origin = opened_origin(config, start, devices, found, where.disks, about, taken, stack)
            run = build(config, start, devices, found.place, replace(origin, parent=parent), stack)
            run.mirror = where.mirror
            run.mirror.begin(found.place)
            stack.push(lambda kind, *_: attempts.ending(1) if kind is not None else None)  # before the last commit
            return run
    except (ValueError, OSError, Stopped):
        stack.close()
        if found.new and where.disks.writes:
            folder.remove(found.place, since)
        raise


def starting(config: configs.Config, place: Path, asked: str) -> Watchdog:
    """Returns what ends a run that hangs while its parts are built and compiled. `asked`: its folder as it was given."""
    resumed_from(asked if "://" in asked else str(place))

    def expired(phase: str, seconds: float) -> None:
        with leaving(RESTART, f"the start hung for {seconds:.0f} s"):
            say(f"HANG: the start took {seconds:.0f} s, above watchdog.compile_s; hang.txt has all stacks")
            write_stacks(folder.own(place) / "hang.txt", f"the start: {seconds:.1f} s")

    return Watchdog({}, config.watchdog.compile_s, expired)


def opened_origin(
    config: configs.Config,
    start: inputs.Inputs,
    devices: parts.DevicePlan,
    found: folder.RunFolder,
    disks: Disks,
    about: dict,
    branch: branches.Branch | None,
    stack: contextlib.ExitStack,
) -> Origin:
    """Opens the run's checkpoints and starts its graders. Both may refuse. Then the attempt begins."""
    place, mine, faults = found.place, folder.own(found.place), FaultPoints(os.environ)
    if branch and jax.process_index() == 0:
        branches.write(place, branch.parent)
    saves = store.Checkpoints(
        place / "checkpoints",
        keep_last=config.checkpoint.keep_last,
        max_failures=config.checkpoint.max_failures,
        reach=faults.reach,
        say=say,
        disks=disks,
    )
    if not found.new:
        branches.check_begun(place, saves.steps())
    saved = branch.saved if branch else None if found.new else resume.point(saves, place, mine, about)
    background = stack.enter_context(Background(saves, own_process.give_back))
    rewards, judge = graders.both(config, start, devices, mine, stack)
    attempts.begin(place, jax.process_index(), jax.process_count(), exchange.broadcast_text)
    return Origin(
        about=about, saves=background, saved=saved, rewards=rewards, judge=judge, branch=branch, faults=faults
    )


def build(
    config: configs.Config,
    start: inputs.Inputs,
    devices: parts.DevicePlan,
    place: Path,
    origin: Origin,
    stack: contextlib.ExitStack,
) -> Run:
    """Builds every part of a run in the folder `place`, once, and restores the state of its origin."""
    mine, watch = folder.own(place), Stopwatch()
    more = run_writers.further_rows(config, place, mine, stack)
    history = History(epochs=config.history.epochs, max_bytes=config.history.max_bytes)
    scheduler = recorded_scheduler(config, start, history, mine, stack)
    guard = stack.enter_context(compile_guard.CompileGuard())
    learner = compiled_learner(config, start, devices, origin.saved)
    engine, evaluator = parts.engines(config, start, devices, learner, history)
    digests = compile_guard.digests(learner, {engine, evaluator})
    about = compile_guard.with_digests(origin.about, origin.saved, digests, say)
    origin = replace(origin, about=autotuning.with_results(about, origin.saved, autotuning.results(), say))
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
        history=history,
        traces=run_writers.drawn_traces(config, learner, watch, mine, stack),
        writer=run_writers.rows(config, start, evaluator, origin.about, place, mine, stack, origin.parent, more),
        **vars(origin),
    )
    restore(run)
    exchange.meet()
    own_process.give_back()
    return run


def compiled_learner(
    config: configs.Config, start: inputs.Inputs, devices: parts.DevicePlan, saved: store.Saved | None
) -> Learner:
    """Builds the learner and compiles its programs, with the state of the checkpoint, if any."""
    learner = parts.learner(config, start.model, start.load_params, devices, start.adapter)
    for line in parts.references_of_training(config, start.model, devices):
        say(line)
    learner.compile()
    exchange.meet()
    if saved is not None:
        learner.restore(saved.arrays, saved.step)
    return learner


def recorded_scheduler(
    config: configs.Config, start: inputs.Inputs, history: History, mine: Path, stack: contextlib.ExitStack
) -> Recorder:
    """Builds the scheduler, with its decision log around it."""
    replica = functools.partial(parts.replica, config, start.model, start.cost)
    order = parts.curriculum(config, start.train, history)
    pace = parts.pace(config, replica, start.cost)
    # The last rollout of a group that serves as a baseline (ReMax) is greedy.
    greedy = replace(start.sampling, temperature=0.0) if config.algorithm.adv_estimator == "remax" else None
    given = order or start.train, start.sampling, history.of, replica, pace, greedy, config.only_grader
    scheduler = registry.made(config, *given)
    if config.engine.layouts:
        scheduler = Planner(scheduler, parts.replicas(config, start.model, start.cost))
    if order is not None:
        scheduler = Curricular(scheduler, order)
    decisions = stack.enter_context(written.Log(mine / "scheduler_log.jsonl"))
    return Recorder(scheduler, decisions.write)


def restore(run: Run) -> None:
    """Restores the host's state of the checkpoint, if any. A branch may take only a part of it.

    The first and the latest evaluation are read from their log.
    """
    if run.branch is not None and not run.branch.goes_on:
        run.branch.begin(run.config.scheduler.updates, run.history, run.learner.gate, run.scheduler)
        return
    if run.saved is None:
        return
    prompts, host = {prompt.id: prompt for prompt in run.start.train}, run.saved.host
    if resume.layout_changes(run.saved.about, run.about):
        host = resume.resharded(host, run.engines)
    run.history.load_state_dict(host["history"])
    run.meter.load_state_dict(host["meter"])
    run.learner.gate.load_state_dict(host["gate"])
    run.learner.kl.load_state_dict(host["kl"])
    run.learner.roles.load_state_dict(host.get("roles", {"of": {}}))
    for engine, state in zip(run.engines, host["engines"], strict=True):
        engine.load_state_dict(state, prompts)
    for part, state in zip(run.conversations, host.get("conversations", ()), strict=True):
        part.load_state_dict(state, prompts)
    run.scheduler.load_state_dict(host["scheduler"])
    for rollout in run.scheduler.held():
        run.rewards.start(rollout)
    files = sorted((run.mine / "evaluations").glob("step_*.npz"))
    run.evaluations += [evaluation.of(read(file)) for file in dict.fromkeys([*files[:1], *files[-1:]])]
