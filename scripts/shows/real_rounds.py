"""Tail batching against the best synchronous rounds on the demo's policy: engine steps, seconds and curves of the same run.

configs/demo_long_tail.py, both ways, in turns, over five seeds or more. Each arm has its own settings, the cheapest of several
(slots, over-subscription, row sizes; `over` for tail batching): the lengths of a recorded run go through the exact twin of the
engine (sim/rows.py), and its steps are priced by one table of step costs, measured here. Both arms stay among row sizes that
give the same bits on a CPU, 64 and up, as a run does by default.

Seconds are those of whole training steps (generation, reward, learner, swap, logs), without evaluation. On a CPU a row costs
about the same in any company, so synchronous rounds of one small size waste less: `sync_of_any_size` is the best of those,
measured too and without a bound. The curves: held-out accuracy at the same optimizer steps, its mean over the run, and Welch's
95 % interval of the difference between the arms, a seed being a sample; seeds are added until it is narrow enough. Seed by
seed the difference is told too: there even the order of what is trained may show.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

MINUTES = 20.0
SEEDS, MOST_SEEDS, WIDTH = 5, 10, 0.05
CONFIG, WARM = "configs/demo_long_tail.py", 2  # rounds that are left out of seconds and steps
PROBED = 40  # rounds of the recorded run
SYNC = ("scheduler.name=sync", "scheduler.over=1.0")
CANDIDATES = {
    "sync": [(*SYNC, "engine.slots=64", "engine.row_sizes=[64]"), (*SYNC, "engine.slots=96", "engine.row_sizes=[64,96]"),
             (*SYNC, "engine.slots=96", "engine.row_sizes=[96]")],
    "tail_batching": [(f"engine.slots={slots}", f"engine.row_sizes={sizes}", f"scheduler.over={over}") for slots, sizes in
                      ((64, "[64]"), (96, "[64,96]")) for over in (1.125, 1.25)],
    "sync_of_any_size": [(*SYNC, f"engine.slots={size}", f"engine.row_sizes=[{size}]", "engine.refill_slots=4")
                         for size in (16, 32, 48)],
}
QUIET = ("checkpoint.every=0", "eval.prompts=0", "eval.every=0", "trace_rounds=0")

os.environ.setdefault("JAX_PLATFORMS", "cpu")


def show(record) -> None:
    sys.path[:0] = [str(record.root), str(record.root / "scripts")]
    best = record.cached("settings", lambda: _settings(record))
    for arm, found in best.items():
        record.figure(f"{arm}.settings", found["settings"])
        record.figure(f"{arm}.predicted_generation_s_per_group", found["seconds"])
    runs: dict[str, list[dict]] = {"sync": [], "tail_batching": []}
    for seed in range(MOST_SEEDS):
        for arm in ("sync", "tail_batching"):
            runs[arm].append(record.cached(f"{arm}-{seed}", lambda: _run(record, best[arm]["settings"], seed)))
        if seed + 1 >= SEEDS and _width(runs) < WIDTH:
            break
    _speed(record, runs)
    other = record.cached("any-size", lambda: _run(record, best["sync_of_any_size"]["settings"], 0))
    for name in ("engine_steps", "seconds", "generation_s"):
        record.figure(f"sync_of_any_size.{name}_over_ours", other[name] / runs["tail_batching"][0][name])
    _curves(record, runs)
    for arm, mine in runs.items():
        record.figure(f"{arm}.idle_slot_time", statistics.mean(run["bubble"] for run in mine))
        for name in ("shift", "num_tokens_wasted", "num_tokens_recomputed", "num_tokens_generated", "num_rollouts_deferred",
                     "longest_park", "num_dropped", "num_untrained", "most_deferrals"):
            record.figure(f"{arm}.bias.{name}", statistics.mean(run["bias"][name] for run in mine),
                          **({"equals": 0} if name in ("num_dropped", "num_untrained") else {}))
        record.figure(f"{arm}.step_length", mine[0]["step_length"])


def _speed(record, runs: dict) -> None:
    """Medians over seeds; per trained group."""
    for name, bound in (("engine_steps", 1.5), ("seconds", 1.5), ("generation_s", None)):
        for arm, mine in runs.items():
            record.figure(f"{arm}.{name}_per_group", statistics.median(run[name] for run in mine))
        ratios = [a[name] / b[name] for a, b in zip(runs["sync"], runs["tail_batching"])]
        record.figure(f"{name}_ratio_by_seed", ratios)
        record.figure(f"{name}_ratio", statistics.median(ratios), **({"at_least": bound} if bound else {}))


def _curves(record, runs: dict) -> None:
    for arm, mine in runs.items():
        record.figure(f"{arm}.curve", [statistics.mean(values) for values in zip(*(run["curve"] for run in mine))])
        record.figure(f"{arm}.accuracy_after", statistics.mean(run["curve"][-1] for run in mine), at_least=0.85)
        record.figure(f"{arm}.accuracy_before", statistics.mean(run["curve"][0] for run in mine), at_most=0.5)
    low, high = _interval(runs)
    record.figure("curve.seeds", len(runs["sync"]), at_least=SEEDS)
    record.figure("curve.difference_low", low, at_most=0.0)
    record.figure("curve.difference_high", high, at_least=0.0)
    record.figure("curve.difference_width", high - low, at_most=WIDTH)
    record.figure("curve.difference_by_seed", [b - a for a, b in zip(_means(runs["sync"]), _means(runs["tail_batching"]))])


def _means(runs: list[dict]) -> list[float]:
    """Of each run's curve."""
    return [statistics.mean(run["curve"]) for run in runs]


def _interval(runs: dict) -> tuple[float, float]:
    """Welch's 95 % interval of ours minus synchronous: the seeds of an arm are its sample."""
    from scipy import stats
    found = stats.ttest_ind(_means(runs["tail_batching"]), _means(runs["sync"]), equal_var=False).confidence_interval(0.95)
    return float(found.low), float(found.high)


def _width(runs: dict) -> float:
    low, high = _interval(runs)
    return high - low


# ---- the settings of each arm


def _settings(record) -> dict:
    """Arm -> its cheapest settings, as overrides, and the seconds of generation that the twin and the table foresee."""
    with tempfile.TemporaryDirectory() as folder:
        tables = _tables(record, Path(folder))
        record.run("-m", "jaxrl_post.main", f"--config={CONFIG}", f"--run-dir={folder}/probe", f"--config.steps={PROBED}",
                   *(f"--config.{override}" for override in (*SYNC, *QUIET)), timeout_s=900)
        out = {}
        for arm, candidates in CANDIDATES.items():
            priced = [(_price(Path(folder) / "probe", candidate, tables), candidate) for candidate in candidates]
            seconds, settings = min(priced)
            out[arm] = {"settings": list(settings), "seconds": seconds, "of": [price for price, _ in priced]}
        return out


def _tables(record, folder: Path) -> dict[int, float]:
    """Seconds of a step by row size: those that agree in one engine, small ones in an engine each."""
    out = {}
    for sizes in ((64, 96), (48,), (32,), (16,)):
        file = folder / f"cost_{sizes[0]}.json"
        record.run("scripts/bench.py", "cost", "--json", file, f"--config={CONFIG}", f"--config.engine.slots={sizes[0]}",
                   f"--config.engine.row_sizes={list(sizes)}",
                   timeout_s=900)
        out |= {int(size): seconds for size, seconds in json.loads(file.read_text())["figures"]["step_s"].items()}
    return out


def _price(probe: Path, settings: tuple[str, ...], tables: dict[int, float]) -> float:
    """Seconds of generation per group that the exact twin's steps cost, fed with the recorded lengths."""
    from jaxrl_post import config as configs
    from jaxrl_post import loop, parts
    from jaxrl_post.cost import StepCost
    from jaxrl_post.engine.drafting import Drafting
    from jaxrl_post.history import History
    from jaxrl_post.launch import inputs
    from jaxrl_post.observers import Remembering
    from jaxrl_post.rollout_log import read
    from jaxrl_post.scheduler import schedulers
    from jaxrl_post.sim.learner import SimLearner
    from jaxrl_post.sim.logged import LoggedRewards
    from jaxrl_post.sim.rows import Known, RowTwin
    from jaxrl_post.simulate import publish
    from jaxrl_post.slots.columns import Sizes
    file = Path(__file__).resolve().parents[2] / CONFIG
    config = configs.resolve(configs.load(str(file)), [*QUIET, f"steps={PROBED}", *settings])
    start, c = inputs.gather(config), config.engine
    groups = [group for file in sorted((probe / "rollouts").glob("step_*.npz")) for group in read(file)]
    known = {rollout.id: Known(rollout.tokens) for group in groups for rollout in group.rollouts}
    decisions = [json.loads(line) for line in (probe / "scheduler_log.jsonl").read_text().splitlines()]
    history = History(epochs=config.history.epochs, max_bytes=config.history.max_bytes)
    twin = RowTwin(
        lambda request, version: known[request.rollout_id],
        Sizes.of(1, slots=c.slots, max_length=c.max_length, page_size=c.page_size, pages=config.pages,
                 head_rows=config.head_rows, steps_per_dispatch=c.steps_per_dispatch),
        row_sizes=c.row_sizes, refill_slots=c.refill_slots, vocab_size=start.model.vocab_size,
        cost=StepCost(tuple(sorted(c.row_sizes)), tuple(tables[size] for size in sorted(c.row_sizes)), "measured here"),
        drafting=Drafting(parts.drafter(config, start.model), replicas=1, slots=c.slots, past=history.of))
    scheduler = schedulers.made(config, start.train, start.sampling, history.of,
                                lambda: parts.replicas(config, start.model, twin.cost))
    loop.run(twin, scheduler, Remembering(LoggedRewards(decisions), [history]), SimLearner(), _Nobody(), publish,
             config.steps)
    counts = twin.metrics()
    return sum(tables[size] * counts.get(f"rows/size_{size}", 0.0) for size in c.row_sizes) / len(groups)


class _Nobody:
    """A protocols.Observer."""

    def commit(self, metrics, part) -> None:
        """Nothing is written."""

    def published(self, version: int) -> None:
        """Nothing is saved."""


# ---- one run


def _run(record, settings: list[str], seed: int) -> dict:
    """A whole run by the command; what it took per trained group, its curve, its meter, its idle slots."""
    import plot_rounds

    from jaxrl_post import metrics
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        record.run("-m", "jaxrl_post.main", f"--config={CONFIG}", f"--run-dir={run}", f"--config.seed={seed}",
                   "--config.checkpoint.every=0", *(f"--config.{override}" for override in settings), timeout_s=1800)
        rows = metrics.read(run / "metrics.jsonl")
        config = json.loads((run / "config.json").read_text())
        trace = plot_rounds.panel(plot_rounds.read(next(run.glob("trace_*.json"))), "", slice(WARM, None), True)
        steps = [row for row in rows if "timing_s/step" in row][WARM:]
        groups = len(steps) * config["scheduler"]["prompts"]
        apart = ("timing_s/testing", "timing_s/save_checkpoint")
        lengths = {kind: [row[f"bias/step_length/{kind}"] for row in steps if f"bias/step_length/{kind}" in row]
                   for kind in ("short", "long")}
        return {"engine_steps": sum(row["rows/steps"] for row in steps) / groups,
                "seconds": sum(row["timing_s/step"] - sum(row.get(name, 0.0) for name in apart) for row in steps) / groups,
                "generation_s": sum(row["timing_s/gen"] for row in steps) / groups,
                "curve": [row[name] for row in rows for name in row if name.endswith("acc/mean@4")],
                "step_length": {kind: statistics.mean(found) for kind, found in lengths.items() if found},
                "bubble": trace.bubble(), "bias": json.loads((run / "bias.json").read_text())}
