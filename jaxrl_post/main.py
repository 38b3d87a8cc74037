"""python -m jaxrl_post.main --config=FILE [--config.a.b=VALUE ...] [--dry-run] [--run-dir=FOLDER] [--resume[=FOLDER]]
python -m jaxrl_post.main --help [SECTION]

The whole run, read from top to bottom: what was asked for, what the run starts from, the plan, the parts (each built
exactly once), the ring turning, the last words. A mistake in a config, a data file or a checkpoint is one sentence and
exit code 1, before anything is compiled; a run that could not start leaves nothing behind. So is a first round whose
answers no grader could score, which leaves its folder; a swap of weights that fails in its midst is exit code 42: resume.
--resume=FOLDER goes on with a run that was killed; --run-dir=FOLDER --resume begins it where there is none yet, so one
command can be run until it ends.
"""

from __future__ import annotations

import time

BEGAN = time.monotonic()  # before the imports: a run's seconds are those of the whole command

import contextlib
import difflib
import functools
import json
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

from jaxrl_post import config as configs
from jaxrl_post import checkpoint, evaluate, loop, metrics, parts, report
from jaxrl_post.bias import BiasMeter
from jaxrl_post.chores import Chores, PutOff
from jaxrl_post.config import reference
from jaxrl_post.engine.demonstrations import Demonstrations
from jaxrl_post.engine.elastic import Elastic
from jaxrl_post.engine.engine import RowEngine
from jaxrl_post.history import History
from jaxrl_post.kernels import sampling
from jaxrl_post.launch import allocation, compilation, distributed, folder, inputs, plan, resume
from jaxrl_post.models import hf
from jaxrl_post.observers import AtWork, FirstScores, Observers, Remembering, Stopwatch, Timed
from jaxrl_post.rewards import NoScores
from jaxrl_post.rewards.limits import Adaptive, Fixed
from jaxrl_post.rewards.pool import Pool
from jaxrl_post.rollout_log import Journal, RolloutLog, forget_aside, read, read_aside, read_journal
from jaxrl_post.scheduler import schedulers
from jaxrl_post.scheduler.recorder import Recorder
from jaxrl_post.slots import dispatches
from jaxrl_post.trace import RingTrace
from jaxrl_post.trainer.learner import Learner
from jaxrl_post.watched import Heard, Watched
from jaxrl_post.weights import Torn

RESTART = 42  # exit code: the run is sound up to its last checkpoint and goes on with --resume

# ---- 1. What was asked for


@dataclass(frozen=True, kw_only=True)
class Flags:
    """The command line: a config file, overrides `a.b=value` in order, a folder, and two words. `resume`: "" never,
    "allowed" where there is something in the folder, "required"."""

    config: str
    overrides: tuple[str, ...] = ()
    dry_run: bool = False
    run_dir: str = ""
    resume: str = ""


def parse(arguments: Sequence[str]) -> Flags:
    """
    Raises:
      ValueError: no config file, or a flag that does not exist (with the nearest).
    """
    given: dict[str, Any] = {"overrides": []}
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if name in ("--config", "--run-dir") and equals and value:
            given[name.removeprefix("--").replace("-", "_")] = value
        elif name.startswith("--config."):
            given["overrides"].append(argument.removeprefix("--config."))
        elif argument == "--dry-run":
            given["dry_run"] = True
        elif name == "--resume" and (value or not equals):
            given |= {"run_dir": value, "resume": "required"} if value else {"resume": "allowed"}
        else:
            known = ("--config=FILE", "--config.a.b=VALUE", "--dry-run", "--run-dir=FOLDER", "--resume",
                     "--resume=FOLDER", "--help", "--help SECTION")
            near = difflib.get_close_matches(argument, known, n=1, cutoff=0.0)
            raise ValueError(f"unknown argument {argument!r}; nearest is {near[0]}, all are {', '.join(known)}")
    if "config" not in given:
        raise ValueError("no config file: write --config=FILE, for example --config=configs/demo.py")
    if given.get("resume") and not given.get("run_dir"):
        raise ValueError("--resume says not which run: write --resume=FOLDER, or --run-dir=FOLDER --resume")
    return Flags(**given | {"overrides": tuple(given["overrides"])})


# ---- 2. The plan


def planned(config: configs.Config, start: inputs.Inputs) -> str:
    """Batch arithmetic and memory per device, as text."""
    numbers = plan.arithmetic(config, len(start.train), start.longest_prompt)
    kinds = plan.by_kind(config, parts.memory(config, start))
    return "\n".join([plan.text("Batch", numbers), *(plan.text(f"Memory per {kind}", held, "B") for kind, held in kinds.items()),
                      f"Weights reach the engine: {plan.swap_case(config)}"])


# ---- 3. The parts


@dataclass(kw_only=True)
class Run:
    """Everything that turns. `evaluator` is the engine itself, a second one where the data writes the rollouts, or None
    where nothing is evaluated. `traces`: those that are drawn, at most one. `saved`: the checkpoint it goes on from, if any;
    `about`: what it is saved under."""

    config: configs.Config
    start: inputs.Inputs
    folder: Path
    mine: Path
    guard: compilation.CompileGuard
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
    saves: checkpoint.Checkpoints
    saved: checkpoint.Saved | None
    about: dict
    evaluations: list[evaluate.Evaluation] = field(default_factory=list)

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
    allocation.return_large_blocks()
    config = configs.resolve(configs.load(flags.config), flags.overrides)
    if flags.dry_run:
        print(json.dumps(configs.to_dict(config), indent=2))
        start = inputs.gather(config)
        print(planned(config, start), flush=True)
        compilation.use_cache(os.environ)
        print(parts.foreseen(config, start))
        return None
    distributed.start(os.environ)
    compilation.use_cache(os.environ)
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


def build(config: configs.Config, start: inputs.Inputs, devices: jax.sharding.Mesh, place: Path, new: bool,
          stack: contextlib.ExitStack) -> Run:
    """Every part, once. What was saved and graders first: they need no device and may refuse."""
    mine, decode, watch = folder.own(place), start.tokenizer.decode, Stopwatch()
    about = resume.about(config, start, resume.versions())
    saves = checkpoint.Checkpoints(place / "checkpoints", keep_last=config.checkpoint.keep_last, say=say,
                                   share=distributed.share_text)
    saved = None if new else resume.point(saves, place, mine, about, say)
    rewards = stack.enter_context(graders(config, decode, mine / "rewards.jsonl", stack, shuffle=config.reward.shuffle))
    judge = stack.enter_context(graders(config, decode, mine / "eval_rewards.jsonl", stack, shuffle=False))
    rewards.check((*start.train, *start.held_out))
    history = History(epochs=config.history.epochs, max_bytes=config.history.max_bytes)
    replica = functools.partial(parts.replica, config, start.model, start.cost)
    scheduler = schedulers.made(config, start.train, start.sampling, history.of, replica, parts.pace(config, replica, start.cost))
    if config.engine.layouts:
        scheduler = schedulers.planned(scheduler, parts.replicas(config, start.model, start.cost))
    decisions = stack.enter_context(open(mine / "scheduler_log.jsonl", "a", buffering=1, encoding="utf-8"))

    guard = stack.enter_context(compilation.CompileGuard())
    learner = parts.learner(config, start.model, start.load_params, devices)
    learner.compile()
    if saved is not None:
        learner.restore(saved.arrays, saved.step)
    engine, evaluator = ENGINES[config.engine.name](config, start, learner, history)
    stack.enter_context(dispatches.logged({engine, evaluator}, mine / "dispatches.jsonl"))
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
    run = Run(config=config, start=start, folder=place, mine=mine, guard=guard, watch=watch, learner=learner, engine=engine,
              evaluator=evaluator, scheduler=Recorder(scheduler, decisions.write), rewards=rewards,
              judge=judge, history=history, meter=BiasMeter(), traces=traces, writer=writer, saves=saves, saved=saved,
              about=about)
    if saved is not None:
        revive(run, saved)
    allocation.give_back()
    return run


def revive(run: Run, saved: checkpoint.Saved) -> None:
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
    run.evaluations += [evaluate.of(read(file)) for file in dict.fromkeys([*files[:1], *files[-1:]])]


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
    return Pool(config.reward.functions, config.reward.weights, workers=config.reward.workers,
                timeout_s=config.reward.timeout_s, decode=decode, shuffle=shuffle, seed=config.seed,
                share=functools.partial(distributed.share, mesh=parts.mesh_of(config, parts.layouts(config)[0]))
                if jax.process_count() > 1 else None, compute=jax.process_index() == 0,
                journal=log, journaled=before, limits=limits)


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
    out = {"versions": resume.versions(), "device": jax.devices()[0].device_kind, "devices": jax.device_count(),
           "processes": jax.process_count(), "sampling_law": sampling.LAW, "swap": plan.swap_case(config)}
    if evaluator is not None:
        out |= parts.keys(evaluator)
    return out


# ---- 4. The ring turns


def turn(run: Run) -> None:
    """Evaluation before, the loop, evaluation after, export, summary."""
    config, watch = run.config, run.watch
    log = RolloutLog(run.mine / "rollouts")
    chores = Chores()
    timed = Timed(run.rewards, {"start": "reward", "join": "reward"}, watch)
    graded = PutOff(FirstScores(timed, config.scheduler.prompts), chores, later=("start",), after=("join",))
    rewards = Remembering(graded, run.records)
    observe = Observers(
        engine=run.engine, scheduler=run.scheduler, rewards=rewards, meter=run.meter, write=run.writer.write, log=log.write,
        evaluate=lambda version: examine(run, version), when=config.evaluated_at,
        save=lambda version: save(run, observe, version), saved_at=config.saved_at, warm=run.guard.arm, watch=watch,
        devices=config.devices, chores=chores)
    for at_work in run.engines:
        at_work.meanwhile = chores.run
    if run.saved is None:
        examine(run, 0)
    else:
        observe.load_state_dict(run.saved.host["observers"])
    watch.drain()
    engine = Timed(run.engine, {"submit": "gen", "step": "gen", "relayout": "relayout"}, watch)
    engine = PutOff(engine, chores, later=(), after=("relayout",))  # a group is packed for devices lent when it was given
    learner = Timed(run.learner, {"prepare": "old_log_prob", "accumulate": "update_actor", "commit": "update_actor"}, watch)
    apart = [AtWork(lambda: run.learner.at_work, watch)] if config.mesh.engine or config.lent else []
    trainer = PutOff(learner, chores, later=("prepare", "accumulate"), after=("commit",))
    with jax.transfer_guard_host_to_device("disallow"):
        loop.run(
            Watched(engine, [run.meter, *apart, *run.traces]), run.scheduler, rewards,
            Heard(trainer, {"prepare": [run.meter.trained]}),
            Heard(observe, {"published": [trace.published for trace in run.traces]}),
            lambda learner, engine: publish(run), config.steps)
    chores.run()
    observe.flush()
    examine(run, run.learner.step)
    run.guard.disarm()
    run.writer.close()
    finish(run, observe.tokens)


def publish(run: Run) -> int:
    """New weights for everything that generates. The wait for the learner is counted as its own."""
    run.watch.timing("update_actor", jax.block_until_ready)(run.learner.params)
    for engine in run.engines:
        run.watch.timing("update_weights", engine.swap)(run.learner.params, run.learner.step)
    return run.engine.version


def save(run: Run, observe: Observers, version: int) -> None:
    """The whole run as one unit, and how far its logs have come. Every engine rests, so that this run and one that resumes
    go on alike."""
    host = {"engines": [engine.state_dict() for engine in run.engines], "scheduler": run.scheduler.state_dict(),
            "history": run.history.state_dict(), "meter": run.meter.state_dict(), "observers": observe.state_dict(),
            "gate": run.learner.gate.state_dict(), "marks": checkpoint.marks(run.mine)}
    with run.guard.lifted(), jax.transfer_guard_host_to_device("allow"):  # processes meet in programs that Orbax makes
        run.saves.save(version, run.learner.state, host, run.about)
    allocation.give_back()


def examine(run: Run, version: int) -> None:
    """One evaluation: its answers below evaluations/, its row of metrics, with what the evaluator counted meanwhile."""
    if run.evaluator is None:
        return
    config = run.config
    found = evaluate.evaluate(
        run.evaluator, run.judge, run.start.held_out, samples=config.eval.samples, run_seed=config.seed,
        sampling=run.start.sampling, max_tokens=config.sampling.max_tokens,
        replicas=len(run.evaluator.capacity.slots))
    run.evaluations[1:] = [found]  # the first and the latest
    RolloutLog(run.mine / "evaluations").write(version, found.sampled + found.greedy)
    counted = run.evaluator.metrics() | {f"eval/{name}": n for name, n in run.judge.metrics().items()}
    run.writer.write(version, found.metrics() | {name: n for name, n in counted.items() if "timing_s/" not in name})


# ---- 5. Last words


def finish(run: Run, tokens: int) -> None:
    """The policy, the summary, and what to look at."""
    policy = distributed.whole(run.learner.params)
    if jax.process_index() != 0:
        return
    words = run.start.tokenizer
    hf.save(run.folder / "policy", run.start.model, policy, tokenizer_files=run.start.files, eos_ids=words.eos_ids,
            bos_id=words.bos_id)
    figures = [found.figures() for found in run.evaluations] or [None]
    summary = {
        "name": run.config.name, "seed": run.config.seed, "eval": {"before": figures[0], "after": figures[-1]},
        "steps": run.learner.step, "tokens": tokens, "versions": resume.versions(), "device": jax.devices()[0].device_kind,
        "devices": jax.device_count(), "processes": jax.process_count(),
        "seconds": round(time.monotonic() - BEGAN, 3),
        "device_time": report.device_time(metrics.read(run.mine / "metrics.jsonl"))}
    folder.write_json(run.folder / "summary.json", summary)
    folder.write_json(run.folder / "bias.json", run.meter.report())
    forget_aside(run.mine)
    say("\n".join([*answers(run), *report.headline(summary, run.config.eval.samples), *folder.contents(run.folder)]))


def answers(run: Run) -> list[str]:
    """The same held-out prompts, answered greedily before and after."""
    lines = []
    first, last = (run.evaluations or [None])[0], (run.evaluations or [None])[-1]
    for index in range(min(run.config.eval.show, len(run.start.held_out))):
        prompt = run.start.held_out[index]
        lines.append(f"\nprompt  {run.start.tokenizer.decode(prompt.tokens)!r}   answer {prompt.answer!r}")
        for word, found in (("before", first), ("after", last)):
            group = found.greedy[index]
            mark = f"{group.accuracies[0]:g}" if group.scored[0] else "no score"
            text = run.start.tokenizer.decode(group.rollouts[0].tokens)
            lines.append(f"  {word:<6}  {mark:<8}  {text!r}")
    return lines


def say(text: str) -> None:
    """To the screen, once per job."""
    if jax.process_index() == 0:
        print(text, flush=True)


def main(arguments: Sequence[str]) -> int:
    with contextlib.ExitStack() as stack:
        try:
            if "--help" in arguments:
                print(reference.help_on(arguments, str(__doc__)))
                return 0
            run = assemble(arguments, stack)
        except ValueError as error:
            return sorry(error)
        try:
            if run is not None:
                turn(run)
        except NoScores as error:  # graders are the user's own; any other failure of a turning ring shows its traceback
            return sorry(error)
        except Torn as error:
            return sorry(error, RESTART)
    return 0


def sorry(error: Exception, code: int = 1) -> int:
    """One sentence, and the exit code."""
    print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
