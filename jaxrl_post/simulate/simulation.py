"""python -m jaxrl_post.simulate --config=configs/sim/FILE.py [--config.a.b=VALUE ...] [--json FILE] [--trace FILE]

Runs simulations without a model: the scheduler and the loop of a real run, known rollout lengths, and seconds computed
from a step cost. Prints a table that compares each simulation with synchronous rounds on the same workload, and with
the numbers of its paper.
"""

from __future__ import annotations

import argparse
import difflib
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jaxrl_post import config as configs
from jaxrl_post.config.command_line import OVERRIDE, Arguments, Flag
from jaxrl_post.engine.host.turns import Judging
from jaxrl_post.ring import loop
from jaxrl_post.ring.events import Ring
from jaxrl_post.ring.types import Sampling
from jaxrl_post.scheduler import registry
from jaxrl_post.scheduler.rounds.layout_planner import Planner
from jaxrl_post.simulate import parts, settings
from jaxrl_post.simulate.learner import Lengths, SimLearner
from jaxrl_post.simulate.settings import Simulation
from jaxrl_post.simulate.tally import Tally, figures
from jaxrl_post.telemetry.length_bias import BiasMeter
from jaxrl_post.telemetry.trace import RingTrace

# ---- 1. The command line

FLAGS = (
    Flag("--config=FILE ...", "several make one table; without one all files of configs/sim/"),
    Flag(OVERRIDE, "overrides an option of every config"),
    Flag("--json=FILE", "writes the figures to a file, too"),
    Flag("--trace=FILE", "draws the last simulation for ui.perfetto.dev, in simulated seconds"),
)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parses the command line of a simulation.

    Raises:
      ValueError: an unknown flag, with the nearest one, or a URL.
    """
    flags = Arguments("", str(__doc__), FLAGS).read(arguments)
    for name in ("json", "trace"):
        configs.refuse_url(getattr(flags, name), f"--{name}")
    return flags


# ---- 2. The parts


@dataclass(kw_only=True)
class Parts:
    """The parts of a simulation's ring. `turns`: the engine as the ring sees it, with the judge beside it."""

    engine: Any
    turns: Any
    scheduler: Any
    rewards: Any
    learner: SimLearner
    tally: Tally
    meter: BiasMeter


def assemble(given: Simulation) -> Parts:
    """Builds all parts of a simulation."""
    engine, past = parts.engine(given), Lengths()
    queue = parts.judge(given, engine)
    scheduler = registry.made(
        given, parts.prompts(given), Sampling(), past.of, lambda: parts.replica(given.cluster), parts.pace(given)
    )
    if given.cluster.layouts:
        scheduler = Planner(scheduler, parts.replicas(given.cluster), move_s=given.cluster.move_s)
    learner = SimLearner(token_s=given.learner.token_s, step_s=given.learner.step_s)
    tally = Tally(
        engine, scheduler, learner, round_s=given.cluster.round_s, wall=parts.wall(given, queue or engine, learner)
    )
    return Parts(
        engine=engine,
        turns=Judging(engine, queue) if queue else engine,
        scheduler=scheduler,
        rewards=parts.rewards(given, [past], queue),
        learner=learner,
        tally=tally,
        meter=BiasMeter(lambda request: engine.texts.length(request.rollout_id, request.prompt, engine.version)),
    )


# ---- 3. The loop


def publish(learner: SimLearner, engine: Any) -> int:
    engine.swap(learner.params, learner.step)
    return learner.step


def tallied(made: Parts) -> Ring:
    """Returns a ring whose only listener is the tally."""
    ring = Ring()
    ring.on("accumulating", made.tally.begun)
    ring.on("committed", made.tally.commit)
    ring.on("published", made.tally.published)
    return ring


def listen(ring: Ring, made: Parts, traces: Sequence[RingTrace]) -> None:
    """Registers the bias meter, the tally's `moments` and the traces as listeners.

    Traces are registered after the tally, because they draw its figures.
    """
    ring.on("preparing", made.meter.trained)
    ring.on("launched", made.meter.launched, *(trace.launched for trace in traces))
    ring.on("stepping", *(trace.stepping for trace in traces))
    ring.on("stepped", made.meter.stepped, made.tally.moments.stepped, *(trace.stepped for trace in traces))
    ring.on("stopped", made.meter.stopped, *(trace.stopped for trace in traces))
    ring.on("published", *(trace.published for trace in traces))


def run(given: Simulation, draw: Callable[[str], object] | None = None) -> dict[str, float]:
    """Runs a simulation and returns its figures, including the bias meter's. `draw` receives pieces of its trace."""
    made = assemble(given)
    traces = [] if draw is None else [RingTrace(draw, made.tally.now, slots=given.cluster.slots, rounds=given.rounds)]
    made.tally.phases += [trace.phase for trace in traces]
    ring = tallied(made)
    listen(ring, made, traces)
    loop.run(
        ring, made.turns, made.scheduler, made.rewards, made.learner, publish, given.rounds * given.scheduler.updates
    )
    told = made.meter.report()
    return figures(made.tally.rounds, made.tally.counts) | {name: float(told[name]) for name in METERED}


METERED = (
    "shift",
    "shift_so_far",
    "histogram_distance",
    "num_dropped",
    "num_untrained",
    "longest_park",
    "most_deferrals",
    "num_tokens_wasted",
    "num_tokens_recomputed",
    "num_rollouts_deferred",
)


# ---- 4. Figures


def stages(given: Simulation) -> dict[str, Simulation]:
    """Returns the simulations to compare, by name.

    The first one has synchronous rounds. Each part is then added to the simulation before. Without `parts`, the only
    other simulation is the whole.
    """
    plain = configs.SchedulerConfig(
        prompts=given.scheduler.prompts,
        group_size=given.scheduler.group_size,
        mini_batches=given.scheduler.mini_batches,
        ppo_epochs=given.scheduler.ppo_epochs,
    )
    cluster = replace(given.cluster, draft_tokens=1.0, draft_width=0, draft_running=0, layouts=(), move_s=0.0)
    learner = replace(given.learner, apart=False)
    out = {"sync": replace(given, scheduler=plain, cluster=cluster, learner=learner, parts=(), published={}, fitted=())}
    overrides: list[str] = []
    for part in given.parts:
        name, _, more = part.partition(":")
        overrides += more.split()
        out[name.strip()] = settings.resolve(configs.to_dict(out["sync"]), overrides)
    return out if given.parts else out | {given.name: given}


def report(given: Simulation, draw: Callable[[str], object] | None = None) -> dict:
    """Runs all stages and returns the figures as JSON. `draw` receives the trace of the last stage.

    - `rows`: name, published, ours, error as ln(ours / published), and fitted.
    - `rms_log_error`: root mean square of the errors of `rows`.
    - `speedup_over_sync`: seconds of a synchronous step over seconds of a step of the last stage.
    - `length_bias`: trained mean length over synchronous mean length, minus 1.
    - `tokens_wasted`: share of the generated tokens that was not trained.
    - `part_shares`: share of each part in the logarithm of the speed-up.
    - `stages`: all figures of every stage.
    """
    wanted = stages(given)
    found = {name: run(stage, draw if name == list(wanted)[-1] else None) for name, stage in wanted.items()}
    sync, ours = found["sync"], list(found.values())[-1]
    ours |= {
        "speedup_over_sync": sync["step_s"] / ours["step_s"],
        "rollout_speedup_over_sync": sync["rollout_s"] / ours["rollout_s"],
        "length_bias": ours["mean_length"] / sync["mean_length"] - 1,
    }
    rows = [_row(name, number, ours, name in given.fitted) for name, number in given.published.items()]
    errors = [row["error"] for row in rows]
    return {
        "name": given.name,
        "rows": rows,
        "rms_log_error": math.sqrt(sum(error * error for error in errors) / len(errors)) if errors else None,
        "speedup_over_sync": ours["speedup_over_sync"],
        "length_bias": ours["length_bias"],
        "tokens_wasted": ours["tokens_wasted"],
        "part_shares": _shares(found),
        "stages": found,
    }


def _row(name: str, published: float, ours: Mapping[str, float], fitted: bool) -> dict:
    if name not in ours:
        near = difflib.get_close_matches(name, list(ours), n=1, cutoff=0.0)
        raise ValueError(f"published names {name!r}, which is no figure of this simulation; nearest is {near[0]!r}")
    return {
        "name": name,
        "published": published,
        "ours": ours[name],
        "error": math.log(ours[name] / published),
        "fitted": fitted,
    }


def _shares(found: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Returns the share of each stage in the logarithm of the total speed-up."""
    names, times = list(found), [stage["step_s"] for stage in found.values()]
    whole = math.log(times[0] / times[-1])
    return {
        name: math.log(before / after) / whole if whole else 0.0
        for name, before, after in zip(names[1:], times, times[1:])
    }


def table(reports: Sequence[Mapping]) -> str:
    """Returns a table: one line for each simulation and one for each published number."""
    lines = [("simulation", "figure", "published", "ours", "ln error", "")]
    for one in reports:
        lines.append(
            (
                one["name"],
                "speedup_over_sync",
                "",
                f"{one['speedup_over_sync']:.2f}",
                "",
                f"length bias {one['length_bias']:+.1%}, wasted {one['tokens_wasted']:.1%}",
            )
        )
        lines += [
            (
                "",
                row["name"],
                f"{row['published']:.4g}",
                f"{row['ours']:.4g}",
                f"{row['error']:+.3f}",
                "fitted" if row["fitted"] else "predicted",
            )
            for row in one["rows"]
        ]
    widths = [max(len(line[column]) for line in lines) for column in range(6)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines)


def main(arguments: Sequence[str]) -> int:
    try:
        flags = parse(arguments)
        files = flags.config or [str(file) for file in sorted(Path("configs/sim").glob("*.py"))]
        given = [settings.resolve(configs.load(file, Simulation), flags.overrides) for file in files]
        pieces: list[str] = []
        reports = [report(one, pieces.append if flags.trace and one is given[-1] else None) for one in given]
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())[:2000]}", file=sys.stderr)
        return 1
    if flags.json:
        Path(flags.json).write_text(
            json.dumps(reports if len(reports) > 1 else reports[0], indent=1) + "\n", encoding="utf-8"
        )
    if flags.trace:
        Path(flags.trace).write_text("".join(pieces), encoding="utf-8")
    print(table(reports), flush=True)
    return 0
