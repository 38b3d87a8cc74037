"""From a config to a run that is ready to turn: every part is built here, exactly once.

`assemble` reads the command line. `begin` is the part that a Python program uses too (jaxrl_post/api.py).

A mistake in a config, a data file or a checkpoint is one ValueError before anything is compiled, and a run that could not
start leaves no folder behind.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxrl_post import config as configs
from jaxrl_post import evaluation, written
from jaxrl_post.buckets.followers import Follower
from jaxrl_post.buckets.mirror import Mirror, Nowhere
from jaxrl_post.checkpoint import store
from jaxrl_post.checkpoint.background import Background
from jaxrl_post.engine.elastic import Elastic
from jaxrl_post.engine.host import dispatch_log
from jaxrl_post.engine.row_engine import RowEngine
from jaxrl_post.history import History
from jaxrl_post.launch import (
    agreement,
    attempts,
    bucket_run,
    chips,
    compile_guard,
    environments,
    foretold,
    graders,
    inputs,
    judges,
    malloc,
    mode_choice,
    moved_run,
    program_digests,
    resume,
    run_lock,
    run_writers,
    slice_plan,
)
from jaxrl_post.launch import branch as branches
from jaxrl_post.launch import build as parts
from jaxrl_post.launch import run_folder as folder
from jaxrl_post.launch.command_line import parse
from jaxrl_post.launch.engines import ENGINES
from jaxrl_post.launch.fault_points import FaultPoints
from jaxrl_post.launch.handed import NOTHING, Handed
from jaxrl_post.launch.stop_signal import RESTART, Stopped, resumed_from
from jaxrl_post.launch.watchdog import Watchdog, leaving, write_stacks
from jaxrl_post.parallel import key_value, liveness, processes
from jaxrl_post.parallel.processes import say
from jaxrl_post.scheduler import registry
from jaxrl_post.scheduler.curriculum import Curricular
from jaxrl_post.scheduler.decision_log import Recorder
from jaxrl_post.telemetry import loggers, metrics
from jaxrl_post.telemetry.length_bias import BiasMeter
from jaxrl_post.telemetry.rollout_log import read
from jaxrl_post.telemetry.timing import Stopwatch
from jaxrl_post.trainer.learner import Learner


class Past(NamedTuple):
    """What a run begins from, and what saves and grades it: see the same names in `Run`."""

    about: dict
    saves: Any
    saved: store.Saved | None
    rewards: Any
    judge: Any


@dataclass(kw_only=True)
class Run:
    """Every part of a run.

    `evaluator` is the engine itself, a second engine where training rollouts come from the data, or None without
    evaluation. `mine`: the folder that this process writes to. `traces`: what listens to the ring from its start to its
    end. `saved`: the checkpoint that the run resumes from, if any. `about`: what a checkpoint must agree with. `began`: when
    the run did, by time.monotonic(). `parent`: the checkpoint of another run that this one began from, if any. `mirror`: what
    commits the folder to a bucket.
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
    rewards: Any
    judge: Any
    history: History
    traces: list[Any]
    writer: metrics.Several
    saves: Background
    saved: store.Saved | None
    about: dict
    faults: FaultPoints
    parent: branches.Parent | None = None
    mirror: Mirror | Follower | Nowhere = field(default_factory=Nowhere)
    meter: BiasMeter = field(default_factory=BiasMeter)
    evaluations: list[evaluation.Evaluation] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    @property
    def branches_now(self) -> bool:
        """Whether the run begins from its parent now: it has no checkpoint of its own yet."""
        return self.parent is not None and not self.saves.steps()

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
    def turns(self) -> Any:
        """The engine as the ring sees it: its rollouts are whole conversations, or a judge works beside it."""
        played = environments.conversing(self.config, self.engine, self.rewards)
        return judges.attended(self.config, played, self.rewards)

    @property
    def sources(self) -> list[Any]:
        """Parts whose counters each step reads."""
        return [self.engine, self.scheduler, self.rewards, *judges.queues(self.config, self.rewards), *self.records]

    @property
    def conversations(self) -> list[Any]:
        """Parts that hold conversations, in the order in which they are restored. Without an environment there are none."""
        return [self.rewards.conversations, self.turns] if self.config.environment.name else []

    @property
    def engines(self) -> list[Any]:
        """The engine and the evaluator, without repetition."""
        return list(dict.fromkeys(engine for engine in (self.engine, self.evaluator) if engine is not None))


def assemble(arguments: Sequence[str], stack: contextlib.ExitStack, handed: Handed = NOTHING) -> Run | None:
    """Builds a run from the command line, with `handed` as in `begin`. Returns None where only the plan was asked for."""
    flags = parse(arguments)
    given = branches.settings(flags)
    if flags.slice:
        config = configs.resolve(given, flags.overrides, platform=chips.read(flags.slice).chip.platform)
        say_now = functools.partial(print, flush=True)
        slice_plan.text(config, inputs.shape(config), flags.slice, say_now, flags.length)
        return None
    if not flags.dry_run:
        where = {"run_dir": flags.run_dir, "resumes": flags.resume, "branch": flags.branch}
        return begin(given, flags.overrides, stack, **where, handed=handed)
    malloc.return_large_blocks()
    recorded = (
        folder.recorded(bucket_run.config_folder(flags.run_dir, flags.resume == "required")) if flags.resume else {}
    )
    config = configs.resolve(given, flags.overrides, platform=jax.default_backend(), recorded=recorded)
    foretold.tell(config, flags.branch, every_option=flags.every_option)
    return None


def begin(
    given: Any,
    overrides: Sequence[str],
    stack: contextlib.ExitStack,
    *,
    run_dir: str = "",
    resumes: str = "",
    branch: str = "",
    handed: Handed = NOTHING,
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
    malloc.return_large_blocks()
    processes.start(os.environ)
    liveness.join(attempts.end)
    asked, opened = run_dir, bucket_run.opened(run_dir, resumes, stack, say)
    run_dir, disks = opened.run_dir, opened.disks
    recorded = folder.recorded(run_dir) if resumes else {}
    config = inputs.dated(configs.resolve(given, overrides, platform=jax.default_backend(), recorded=recorded))
    loggers.check(config.logger)
    compile_guard.use_cache(os.environ)
    start = inputs.gather(config, handed)
    agreement.check(lambda: resume.about(config, start, resume.versions()))
    config, why, chosen = mode_choice.settled(config, start, run_dir if resumes else "")
    taken = branches.taken(branch, config, start, say)
    devices = parts.device_plan(config)
    foretold.announce(config, start, chosen)
    since = folder.first_missing(Path(run_dir or config.run_dir))
    if resumes:
        place, new = folder.take_up(run_dir, resumes == "required", disks)
    else:
        place, new = folder.make(run_dir, config.run_dir, config.name, config.seed, disks), True
    run_lock.hold(place, stack, disks)  # a folder that another job holds is not ours to remove
    try:
        with starting(config, place, asked):
            run = build(config, start, devices, folder.Found(place, new, disks), stack, why=why, taken=taken)
            run.mirror = opened.mirror
            run.mirror.begin(place)
            stack.push(lambda kind, *_: attempts.ending(1) if kind is not None else None)  # before the last commit
            return run
    except (ValueError, OSError, Stopped):
        stack.close()
        if new and disks.writes:
            folder.remove(place, since)
        raise


def starting(config: configs.Config, place: Path, asked: str) -> Watchdog:
    """Returns what ends a run that hangs while its parts are built and compiled. `asked`: its folder as it was given."""
    resumed_from(asked if "://" in asked else str(place))

    def expired(phase: str, seconds: float) -> None:
        with leaving(RESTART, f"the start hung for {seconds:.0f} s"):
            say(f"HANG: the start took {seconds:.0f} s, above watchdog.compile_s; hang.txt has all stacks")
            write_stacks(folder.own(place) / "hang.txt", f"the start: {seconds:.1f} s")

    return Watchdog({}, config.watchdog.compile_s, expired)


def build(
    config: configs.Config,
    start: inputs.Inputs,
    devices: parts.DevicePlan,
    found: folder.Found,
    stack: contextlib.ExitStack,
    past: Past | None = None,
    why: dict | None = None,
    taken: branches.Branch | None = None,
) -> Run:
    """Builds every part, once. Checkpoints and graders come first: they need no device and may refuse.

    `past`: what a run that is turned again has in their place. `why`: how the mode was chosen."""
    place, mine, watch, faults = found.place, folder.own(found.place), Stopwatch(), FaultPoints(os.environ)
    parent, start = branches.ordered(taken, place, start)
    kept = past or begun(config, start, devices, found, why, faults, stack, taken)
    more = [] if past else run_writers.further_rows(config, place, mine, stack)
    history = History(epochs=config.history.epochs, max_bytes=config.history.max_bytes)
    scheduler = recorded_scheduler(config, start, history, mine, stack)
    guard = stack.enter_context(compile_guard.CompileGuard())
    learner = compiled_learner(config, start, devices, kept.saved)
    engine, evaluator = ENGINES[config.engine.name](config, start, devices, learner, history)
    digests = program_digests.told(learner, {engine, evaluator})
    kept = kept._replace(about=program_digests.noted(kept.about, kept.saved, digests, say))
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
        writer=run_writers.rows(config, start, evaluator, kept.about, place, mine, stack, parent, more),
        faults=faults,
        parent=parent,
        **kept._asdict(),
    )
    return revived(run, taken)


def begun(
    config: configs.Config,
    start: inputs.Inputs,
    devices: parts.DevicePlan,
    found: folder.Found,
    why: dict | None,
    faults: FaultPoints,
    stack: contextlib.ExitStack,
    taken: branches.Branch | None,
) -> Past:
    """Opens the run's checkpoints and starts its graders. Both may refuse; then the attempt begins."""
    place, mine = found.place, folder.own(found.place)
    about, saves, saved = checkpoints(config, start, found, mine, why, faults, stack, taken)
    past = Past(about, saves, saved, *graders.both(config, start, devices, mine, stack))
    attempts.begin(place, jax.process_index(), jax.process_count(), processes.share_text)
    return past


def checkpoints(
    config: configs.Config,
    start: inputs.Inputs,
    found: folder.Found,
    mine: Path,
    why: dict | None,
    faults: FaultPoints,
    stack: contextlib.ExitStack,
    taken: branches.Branch | None,
) -> tuple[dict, Background, store.Saved | None]:
    """Opens the run's checkpoints: what they must agree with, where they lie, and the one to resume from, if any."""
    place = found.place
    if taken and jax.process_index() == 0:
        branches.write(place, taken.parent)
    about = resume.about(config, start, resume.versions()) | ({"auto": why} if why else {})
    saves = store.Checkpoints(
        place / "checkpoints",
        keep_last=config.checkpoint.keep_last,
        max_failures=config.checkpoint.max_failures,
        reach=faults.reach,
        say=say,
        share=processes.share_text,
        any_of=processes.any_text,
        disks=found.disks,
    )
    if not found.new:
        branches.check_begun(place, saves.steps())
    saved = taken.saved if taken else None if found.new else resume.point(saves, place, mine, about, say)
    return about, stack.enter_context(Background(saves, malloc.give_back)), saved


def compiled_learner(
    config: configs.Config, start: inputs.Inputs, devices: parts.DevicePlan, saved: store.Saved | None
) -> Learner:
    """Builds the learner and compiles its programs, with the state of the checkpoint, if any."""
    learner = parts.learner(config, start.model, start.load_params, devices, start.adapter)
    if line := parts.training_attention(config, start.model, devices)[1]:
        say(line)
    learner.compile()
    key_value.meet()
    if saved is not None:
        learner.restore(saved.arrays, saved.step)
    return learner


def recorded_scheduler(
    config: configs.Config, start: inputs.Inputs, history: History, mine: Path, stack: contextlib.ExitStack
) -> Recorder:
    """Builds the scheduler, with its decision log around it."""
    replica = functools.partial(parts.replica, config, start.model, start.cost)
    order = parts.curriculum(config, start.train, history)
    pace, law = parts.pace(config, replica, start.cost), inputs.baseline_law(config, start.sampling)
    given = order or start.train, start.sampling, history.of, replica, pace, law, config.only_grader
    scheduler = registry.made(config, *given)
    if config.engine.layouts:
        scheduler = registry.planned(scheduler, parts.replicas(config, start.model, start.cost))
    if order is not None:
        scheduler = Curricular(scheduler, order)
    decisions = stack.enter_context(written.Log(mine / "scheduler_log.jsonl"))
    return Recorder(scheduler, decisions.write)


def revived(run: Run, taken: branches.Branch | None) -> Run:
    """Restores the host's state of the checkpoint, if any. A branch may take only a part of it."""
    if taken is not None and not taken.goes_on:
        taken.begin(run.config.scheduler.updates, run.history, run.learner.gate, run.scheduler)
    elif run.saved is not None:
        restore(run, run.saved)
    key_value.meet()
    malloc.give_back()
    return run


def restore(run: Run, saved: store.Saved) -> None:
    """Restores the host's state. The first and the latest evaluation are read from their log."""
    prompts, host = {prompt.id: prompt for prompt in run.start.train}, saved.host
    if moved_run.changes(saved.about, run.about):
        host = moved_run.rehomed(host, run.engines)
    run.history.load_state_dict(saved.host["history"])
    run.meter.load_state_dict(saved.host["meter"])
    run.learner.gate.load_state_dict(saved.host["gate"])
    run.learner.kl.load_state_dict(saved.host["kl"])
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
