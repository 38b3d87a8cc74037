"""Trains a policy: assembles a run (launch/assemble.py), runs its loop, and writes the policy and a summary.

`python -m jaxrl_post.main --help` prints its flags and exit codes (launch/command_line.py).
"""

from __future__ import annotations

import os
import signal
import time

BEGAN = time.monotonic()  # before the imports: a run's seconds include the imports
if __name__ == "__main__":  # nothing has begun while modules are imported
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: (os.write(2, b"stopped before the run began\n"), os._exit(42)))

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence

import jax

from jaxrl_post.config import reference
from jaxrl_post.launch import command_line, own_process, run_end
from jaxrl_post.launch.assemble import Run, assemble
from jaxrl_post.launch.parts import completions, evaluation
from jaxrl_post.launch.parts.python_inputs import PythonInputs
from jaxrl_post.launch.stop_signal import RESTART, Stopped, StopSignal, heard, limit
from jaxrl_post.launch.watchdog import Watchdog, WatchedRing, leaving, write_stacks
from jaxrl_post.parallel import liveness
from jaxrl_post.parallel.processes import say
from jaxrl_post.parallel.weight_sync import NotFinite, Torn
from jaxrl_post.rewards import NoScores
from jaxrl_post.rewards.jobs import FirstScores
from jaxrl_post.ring import loop
from jaxrl_post.ring.events import TimedRing
from jaxrl_post.ring.timing import AtWork
from jaxrl_post.ring.types import Group
from jaxrl_post.runs import attempts, metric_rows
from jaxrl_post.runs.buckets.followers import Behind
from jaxrl_post.runs.buckets.record import Taken
from jaxrl_post.runs.buckets.store import Unreachable
from jaxrl_post.runs.checkpoint import log_marks
from jaxrl_post.runs.checkpoint.store import SaveFailed
from jaxrl_post.runs.rollout_log import RolloutLog
from jaxrl_post.scheduler.group_filter import NoGroups, Solved
from jaxrl_post.serve.agents import endpoint
from jaxrl_post.telemetry import report
from jaxrl_post.telemetry.alarms import Alarms, Diverged, thresholds
from jaxrl_post.telemetry.observer import Observer

# ---- 1. The loop


def run_training(run: Run) -> None:
    """Evaluates, runs the loop, evaluates again, and writes the policy and the summary.

    Raises:
      SaveFailed: the last save failed. The policy was written all the same.
    """
    if run.swap and not run.config.logger.quiet:
        say(report.swap(run.swap))
    config, dog = run.config, watchdog(run)
    ring = WatchedRing(run.watch, dog, run.faults.reach)
    observe = Observer(
        ring=ring,
        sources=run.sources,
        meter=run.meter,
        write=run.writer.write,
        log=RolloutLog(run.mine / "rollouts").write,
        evaluate=lambda version: examine(run, version),
        when=config.evaluated_at,
        save=lambda version: save(run, observe, version),
        saved_at=config.saved_at,
        alarms=Alarms(thresholds(config), run.start.model.used_vocab or run.start.model.vocab_size, say),
        dump=lambda step, groups: dump(run, step, groups),
        warm=lambda: (run.guard.arm(), dog.warm()),
        watch=run.watch,
        devices=config.devices,
    )
    listen(ring, run, observe)
    with dog:
        begin(ring, run, observe)
        run.watch.drain()
        with jax.transfer_guard_host_to_device("disallow"), stoppable(ring, run, observe):
            try:
                parts = run.rollout_engine, run.scheduler, run.rewards, run.learner
                loop.run(ring, *parts, lambda learner, engine: publish(ring, run), config.steps)
            except Solved as end:
                say(str(end))
                save_last(ring, run, observe, run.learner.step)
        settle(ring, run, observe)
        run.guard.disarm()
        run.writer.close()
        with dog.phase("save_checkpoint"):
            run_end.finish(run, observe)
        if run.saves.lost:
            raise SaveFailed(run.saves.lost)


def begin(ring: TimedRing, run: Run, observe: Observer) -> None:
    """Restores the observer of a checkpoint. A new run evaluates, and one that branches saves where it begins."""
    if run.saved is not None:
        observe.load_state_dict(run.saved.host["observers"])
    if run.saved is None or run.branch:
        ring.call("testing", examine, run, run.learner.step)
    if run.branch and run.config.checkpoint.every > 0:
        ring.call("save_checkpoint", save, run, observe, run.learner.step)


def settle(ring: TimedRing, run: Run, observe: Observer) -> None:
    """Makes all deferred calls, evaluates the final policy, and waits for the last checkpoint."""
    ring.flush()
    observe.flush()
    ring.call("testing", examine, run, run.learner.step)
    ring.call("save_checkpoint", run.saves.join)


def listen(ring: TimedRing, run: Run, observe: Observer) -> None:
    """Registers the listeners of every event.

    The observer is the last listener of a publish: its checkpoint contains the state of all others.
    """
    traces, first = run.traces, FirstScores(run.config.scheduler.prompts)
    for engine in run.engines:
        engine.meanwhile = ring.flush
    if run.config.engine.sleep:
        ring.on("preparing", lambda groups: [engine.sleep() for engine in run.engines])
    ring.on("preparing", run.meter.trained)
    ring.on("launched", run.meter.launched, *(trace.launched for trace in traces))
    ring.on("stepped", run.meter.stepped, lambda *_: run.mirror.check())
    if run.config.mesh.engine or run.config.lent:
        apart = AtWork(lambda: run.learner.at_work, run.watch)
        ring.on("stepping", apart.stepping)
        ring.on("stepped", apart.stepped)
    ring.on("stepping", *(trace.stepping for trace in traces))
    ring.on("stepped", *(trace.stepped for trace in traces))
    ring.on("stopped", run.meter.stopped, *(trace.stopped for trace in traces))
    ring.on("scored", first.scored, *(record.record for record in run.records))
    ring.on("committed", observe.commit)
    ring.on("published", lambda version: run.faults.reach("publish"))
    ring.on("published", *(trace.published for trace in traces), observe.published)


def watchdog(run: Run) -> Watchdog:
    """Returns what ends the run where a call hangs. It writes stacks, the scheduler's state and the trace before."""

    def expired(phase: str, seconds: float) -> None:
        with leaving(RESTART, f"phase {phase} hung for {seconds:.0f} s"):
            say(
                f"HANG: phase {phase} took {seconds:.0f} s, above its limit; hang.txt has all stacks; --resume continues"
            )
            write_stacks(run.mine / "hang.txt", f"phase {phase}: {seconds:.1f} s, at learner step {run.learner.step}")
            for trace in run.traces:
                trace.close()
            state = {"phase": phase, "seconds": seconds, "scheduler": run.scheduler.state_dict()}
            (run.mine / "hang.json").write_text(json.dumps(state, default=str), encoding="utf-8")

    return Watchdog(run.config.watchdog.phases, run.config.watchdog.compile_s, expired)


def stoppable(ring: TimedRing, run: Run, observe: Observer) -> StopSignal:
    """Registers what ends the run at a safe point after SIGTERM or SIGINT."""

    def may_save() -> bool:
        config = run.config  # a drafter forgets at a save what it learned of rollouts since
        return config.checkpoint.every > 0 and config.speculation.drafter == "off" and run.rollout_engine.pending == 0

    stop = StopSignal(lambda version: save_last(ring, run, observe, version), may_save, run.config.steps)
    ring.on("stepped", stop.stepped)
    ring.on("published", stop.published)
    return stop


def save_last(ring: TimedRing, run: Run, observe: Observer, version: int) -> bool:
    """Saves a version after which the run ends early, unless it never saves. Returns whether it is saved."""
    ring.flush()
    observe.flush()
    run.saves.join()
    if version not in run.saves.steps() and run.config.checkpoint.every > 0:
        save(run, observe, version, last=True)
        run.saves.join()
    return version in run.saves.steps()


def publish(ring: TimedRing, run: Run) -> int:
    """Hands new weights to every engine. The wait for the learner counts as the learner's time.

    Raises:
      Diverged: a weight is not finite.
    """
    ring.call("update_actor", jax.block_until_ready, run.learner.params)
    try:
        for engine in run.engines:
            ring.call("update_weights", engine.swap, run.learner.params, run.learner.step, run.learner.finite)
    except NotFinite as error:
        raise Diverged(
            f"step {run.learner.step}: {error}; nothing is exported, and the newest checkpoint is whole"
        ) from error
    return run.engine.version


def save(run: Run, observe: Observer, version: int, last: bool = False) -> None:
    """Saves the whole run as one unit, with the present length of its logs. It is written while the run goes on.

    `last`: the run ends with it, whatever its config says.

    Every engine takes all rollouts out of their slots, so that this run and a resumed one continue alike.
    """
    host = {
        "engines": [engine.state_dict() for engine in run.engines],
        "scheduler": run.scheduler.state_dict(),
        "history": run.history.state_dict(),
        "meter": run.meter.state_dict(),
        "observers": observe.state_dict(),
        "gate": run.learner.gate.state_dict(),
        "kl": run.learner.kl.state_dict(),
        "roles": run.learner.roles.state_dict(),
        "conversations": [part.state_dict() for part in run.conversations],
        "marks": log_marks.marks(run.mine),
    }
    # Orbax compiles programs of its own, in which all processes take part
    with run.guard.lifted(), jax.transfer_guard_host_to_device("allow"):
        run.saves.save(version, run.learner.state, host, run.about, last or version >= run.config.steps)


def dump(run: Run, step: int, groups: Sequence[Group]) -> None:
    """Writes the batch of a skipped step below skipped/, and says how to repeat it."""
    RolloutLog(run.mine / "skipped").write(step, groups)
    say(
        f"step {step} was skipped: the gradient is not finite; its batch is skipped/step_{step:06d}.npz, and "
        f"`python -m jaxrl_post replay {run.folder} --batch={step}` repeats it"
    )


def examine(run: Run, version: int) -> None:
    """Runs one evaluation: of rollouts, of held-out completions, or of both. Its metrics are one row."""
    row = sampled(run, version) if run.evaluator else {}
    if run.start.completions:
        scored, figures = completions.measured(run.start.completions, run.learner, run.config.algorithm)
        RolloutLog(run.mine / "completions").write(version, scored)
        row |= figures
    if row:
        run.writer.write(version, row)


def sampled(run: Run, version: int) -> dict[str, float]:
    """Samples held-out prompts, logs the rollouts below evaluations/, and returns their metrics and the evaluator's."""
    run.faults.reach("evaluation")
    config = run.config
    found = evaluation.evaluate(
        run.rollout_engine if run.evaluator is run.engine else run.evaluator,
        run.judge,
        run.start.held_out,
        samples=config.eval.samples,
        run_seed=config.seed,
        sampling=run.start.sampling,
        max_tokens=config.sampling.max_tokens,
        replicas=len(run.evaluator.capacity.slots),
        temperature=config.eval.temperature,
        top_p=config.eval.top_p,
    )
    run.evaluations[1:] = [found]  # the first and the latest
    RolloutLog(run.mine / "evaluations").write(version, found.sampled + found.greedy)
    judged = {f"eval/{name}": n for name, n in run.judge.metrics().items() if not metric_rows.is_timing(name)}
    counted = run.evaluator.metrics() | judged
    return found.metrics() | {name: n for name, n in counted.items() if "timing_s/" not in name}


# ---- 2. The command


def main(arguments: Sequence[str]) -> int:
    code = 1
    try:
        code = _ended(arguments)
    finally:
        leave(code)
    return code


def leave(code: int) -> None:
    """Ends the attempt in its log, and then this process's place in its job. What was open is closed before."""
    attempts.end(code)
    liveness.leave(code)


def _ended(arguments: Sequence[str]) -> int:
    with contextlib.ExitStack() as stack:
        try:
            if reference.asks(arguments):
                print(reference.help_on(arguments, command_line.parser().format_help()))
                return 0
            stack.enter_context(heard(limit(os.environ)))
            with losses():
                run = assemble(arguments, stack, PythonInputs(endpoint=endpoint.opened))
        except (ValueError, OSError) as error:
            return sorry(error)
        except Unreachable as error:
            return sorry(error, RESTART)
        except Stopped as stopped:
            return gone(stopped)
        try:
            if run is not None:
                run.began = BEGAN
                with losses():
                    run_training(run)
                    run.mirror.finished()
                attempts.ending(0)
                stack.close()  # a mirror commits the logs once they are closed
                run.mirror.check()
        except (
            NoScores,
            NoGroups,
            Diverged,
            SaveFailed,
            Taken,
        ) as error:  # the user's graders or numbers; other errors show their traceback
            return sorry(error)
        except OSError as error:  # a log or a result could not be written
            return sorry(RuntimeError(f"{error}; mend that, and --resume continues from the newest checkpoint"))
        except (Torn, Behind) as error:
            return sorry(error, RESTART)
        except Stopped as stopped:
            return gone(stopped)
    return 0


@contextlib.contextmanager
def losses() -> Iterator[None]:
    """Lets the loss of another process end this one, before the error that it causes here does."""
    well = False
    try:
        yield
        well = True
    finally:
        if not well:
            liveness.wait_for_loss()


def gone(stopped: Stopped) -> int:
    """Says that a signal ended the run and returns the exit code."""
    attempts.end(RESTART, str(stopped))
    say(str(stopped))
    return RESTART


def sorry(error: Exception, code: int = 1) -> int:
    """Prints the error as one line and returns the exit code."""
    sentence = " ".join(str(error).split())
    attempts.end(code, sentence)
    print(f"error: {sentence}", file=sys.stderr)
    return code


if __name__ == "__main__":
    own_process.begun()
    sys.exit(own_process.ended(main(sys.argv[1:])))
