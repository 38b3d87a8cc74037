"""From the command line to a run that is ready to turn: every part is built here, exactly once.

A mistake in a config, a data file or a checkpoint is one ValueError before anything is compiled, and a run that could not
start leaves no folder behind.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

from jaxrl_post import config as configs
from jaxrl_post import evaluation
from jaxrl_post.checkpoint import store
from jaxrl_post.engine.demonstrations import Demonstrations
from jaxrl_post.engine.elastic import Elastic
from jaxrl_post.engine.host import dispatch_log
from jaxrl_post.engine.row_engine import RowEngine
from jaxrl_post.history import History
from jaxrl_post.kernels import sampling
from jaxrl_post.launch import build as parts
from jaxrl_post.launch import compile_guard, inputs, malloc, memory_plan, resume
from jaxrl_post.launch import run_folder as folder
from jaxrl_post.launch.command_line import parse
from jaxrl_post.parallel import processes
from jaxrl_post.parallel.processes import say
from jaxrl_post.rewards.limits import Adaptive, Fixed
from jaxrl_post.rewards.pool import Pool
from jaxrl_post.scheduler import registry
from jaxrl_post.scheduler.decision_log import Recorder
from jaxrl_post.telemetry import metrics
from jaxrl_post.telemetry.journal import Journal, read_aside, read_journal
from jaxrl_post.telemetry.length_bias import BiasMeter
from jaxrl_post.telemetry.rollout_log import read
from jaxrl_post.telemetry.timing import Stopwatch
from jaxrl_post.telemetry.trace import RingTrace
from jaxrl_post.trainer.learner import Learner


def planned(config: configs.Config, start: inputs.Inputs) -> str:
    """Batch arithmetic and memory per device, as text."""
    numbers = memory_plan.arithmetic(config, len(start.train), start.longest_prompt)
    kinds = memory_plan.by_kind(config, parts.memory(config, start))
    return "\n".join(
        [
            memory_plan.text("Batch", numbers),
            *(memory_plan.text(f"Memory per {kind}", held, "B") for kind, held in kinds.items()),
            f"Weights reach the engine: {memory_plan.swap_case(config)}",
        ]
    )


@dataclass(kw_only=True)
class Run:
    """Everything that turns. `evaluator` is the engine itself, a second one where the data writes the rollouts, or None
    where nothing is evaluated. `traces`: those that are drawn, at most one. `saved`: the checkpoint it goes on from, if any;
    `about`: what it is saved under."""

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
    saves: store.Checkpoints
    saved: store.Saved | None
    about: dict
    evaluations: list[evaluation.Evaluation] = field(default_factory=list)

    @property
    def records(self) -> list[Any]:
        """What keeps scored groups: the history, and what engines draft from."""
        return [self.history, *(engine.drafting for engine in self.engines if isinstance(engine, (RowEngine, Elastic)))]

    @property
    def engines(self) -> list[Any]:
        """Those that there are, each once."""
        return list(dict.fromkeys(engine for engine in (self.engine, self.evaluator) if engine is not None))


def assemble(arguments: Sequence[str], stack: contextlib.ExitStack) -> Run | None:
    """From the command line to a run that is ready to turn; None when only the plan was asked for."""
    flags = parse(arguments)
    malloc.return_large_blocks()
    config = configs.resolve(configs.load(flags.config), flags.overrides)
    if flags.dry_run:
        print(json.dumps(configs.to_dict(config), indent=2))
        start = inputs.gather(config)
        print(planned(config, start), flush=True)
        compile_guard.use_cache(os.environ)
        print(parts.foreseen(config, start))
        return None
    processes.start(os.environ)
    compile_guard.use_cache(os.environ)
    start = inputs.gather(config)
    words = planned(config, start)
    devices = parts.learner_mesh(config)
    say(words)
    if flags.resume:
        place, new = folder.take_up(flags.run_dir, must_exist=flags.resume == "required")
    else:
        place, new = folder.make(flags.run_dir, config.run_dir, config.name, config.seed), True
    try:
        return build(config, start, devices, place, new, stack)
    except ValueError:
        stack.close()
        if new and jax.process_index() == 0:
            shutil.rmtree(place)
        raise


def build(
    config: configs.Config,
    start: inputs.Inputs,
    devices: jax.sharding.Mesh,
    place: Path,
    new: bool,
    stack: contextlib.ExitStack,
) -> Run:
    """Every part, once. What was saved and graders first: they need no device and may refuse."""
    mine, decode, watch = folder.own(place), start.tokenizer.decode, Stopwatch()
    about = resume.about(config, start, resume.versions())
    saves = store.Checkpoints(
        place / "checkpoints", keep_last=config.checkpoint.keep_last, say=say, share=processes.share_text
    )
    saved = None if new else resume.point(saves, place, mine, about, say)
    rewards = stack.enter_context(graders(config, decode, mine / "rewards.jsonl", stack, shuffle=config.reward.shuffle))
    judge = stack.enter_context(graders(config, decode, mine / "eval_rewards.jsonl", stack, shuffle=False))
    rewards.check((*start.train, *start.held_out))
    history = History(epochs=config.history.epochs, max_bytes=config.history.max_bytes)
    replica = functools.partial(parts.replica, config, start.model, start.cost)
    scheduler = registry.made(
        config, start.train, start.sampling, history.of, replica, parts.pace(config, replica, start.cost)
    )
    if config.engine.layouts:
        scheduler = registry.planned(scheduler, parts.replicas(config, start.model, start.cost))
    decisions = stack.enter_context(open(mine / "scheduler_log.jsonl", "a", buffering=1, encoding="utf-8"))

    guard = stack.enter_context(compile_guard.CompileGuard())
    learner = parts.learner(config, start.model, start.load_params, devices)
    learner.compile()
    if saved is not None:
        learner.restore(saved.arrays, saved.step)
    engine, evaluator = ENGINES[config.engine.name](config, start, learner, history)
    stack.enter_context(dispatch_log.logged({engine, evaluator}, mine / "dispatches.jsonl"))
    writers = [metrics.Jsonl(mine / "metrics.jsonl")]
    if jax.process_index() == 0:
        folder.write_json(place / "config.json", configs.to_dict(config) | {"derived": derived(config, evaluator)})
        writers.append(metrics.console(config.steps))
    writer = metrics.Several(*writers)
    stack.callback(writer.close)
    traces = []
    if config.trace_rounds:
        file = stack.enter_context(open(mine / f"trace_{learner.step:06d}.json", "w", encoding="utf-8"))
        traces = [RingTrace(file.write, watch.now, slots=config.engine.slots, rounds=config.trace_rounds)]
        watch.listeners.append(traces[0].phase)
        stack.callback(traces[0].close)
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
        scheduler=Recorder(scheduler, decisions.write),
        rewards=rewards,
        judge=judge,
        history=history,
        meter=BiasMeter(),
        traces=traces,
        writer=writer,
        saves=saves,
        saved=saved,
        about=about,
    )
    if saved is not None:
        revive(run, saved)
    malloc.give_back()
    return run


def revive(run: Run, saved: store.Saved) -> None:
    """Everything on the host as it was; the first and the latest evaluation are read from their log."""
    prompts = {prompt.id: prompt for prompt in run.start.train}
    run.history.load_state_dict(saved.host["history"])
    run.meter.load_state_dict(saved.host["meter"])
    run.learner.gate.load_state_dict(saved.host["gate"])
    for engine, state in zip(run.engines, saved.host["engines"], strict=True):
        engine.load_state_dict(state, prompts)
    run.scheduler.load_state_dict(saved.host["scheduler"])
    for rollout in run.scheduler.held():
        run.rewards.start(rollout)
    files = sorted((run.mine / "evaluations").glob("step_*.npz"))
    run.evaluations += [evaluation.of(read(file)) for file in dict.fromkeys([*files[:1], *files[-1:]])]


def graders(config: configs.Config, decode: Any, journal: Path, stack: contextlib.ExitStack, *, shuffle: bool) -> Pool:
    """A pool of reward processes; of several processes of a job the first one scores and shares."""
    limits = Fixed(config.reward.limit_s)
    if config.reward.adaptive_limit:
        limits = Adaptive(config.reward.limit_s, read_journal(journal) if journal.is_file() else ())
    log = Journal(journal)
    stack.callback(log.close)
    before = read_aside(journal)
    if len(before):
        say(f"resume: {len(before)} scores of {journal.name} after that point are used again, not asked for again")
    return Pool(
        config.reward.functions,
        config.reward.weights,
        workers=config.reward.workers,
        timeout_s=config.reward.timeout_s,
        decode=decode,
        shuffle=shuffle,
        seed=config.seed,
        share=functools.partial(processes.share, mesh=parts.mesh_of(config, parts.layouts(config)[0]))
        if jax.process_count() > 1
        else None,
        compute=jax.process_index() == 0,
        journal=log,
        journaled=before,
        limits=limits,
    )


def rows_for_all(config, start, learner, history) -> tuple[Any, RowEngine | Elastic | None]:
    """The row engine generates, and evaluates."""
    engine = parts.engine(config, start, learner, history, say)
    return engine, engine if start.held_out else None


def data_for_training(config, start, learner, history) -> tuple[Any, RowEngine | None]:
    """The data writes the training rollouts; a row engine evaluates, if anything is evaluated."""
    engine = Demonstrations(start.write, slots=config.engine.slots, replicas=config.replicas, version=learner.step)
    return engine, parts.engine(config, start, learner, history, say) if start.held_out else None


ENGINES = {"rows": rows_for_all, "demonstrations": data_for_training}


def derived(config: configs.Config, evaluator: RowEngine | Elastic | None) -> dict:
    """What the run was keyed by beside its config."""
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
