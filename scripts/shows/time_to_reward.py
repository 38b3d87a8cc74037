"""Time to a reward on devices that are not there: pipelined generation against synchronous and tail-batched rounds.

Runs are real: a small policy learns, and its tokens are as stale as their log-probs say. Decisions follow a table of
what Qwen2.5-7B costs on 8 H100 or on v5e-16. The same table prices engine steps, dispatches and optimizer steps.
scripts/cost_tables.py wrote the tables, scripts/tables/, before any run. The engine of the run, one replica on a CPU,
stands for all replicas in lock-step. Synchronous and tail-batched runs share all devices between engine and learner. So
do pipelined runs of the placement `shared`, in which the engine rests during an optimizer step. Those of the placement
`split` have half of the devices for the learner, and the engine goes on.

Every arm tries the same number of settings on seeds of its own. Each takes the one with the least median time to the
reward, for each slice. The reward is nine tenths of what synchronous rounds with their first setting reach at the end of that
seed's run. It is a mean over a window of rollouts, trained on or not. A ratio is of medians over SEEDS, with a bootstrap
interval. On the demo every arm also has settings that leave out groups of equal accuracies. Rounds replace them in waves,
the pipeline as its slots become free.

Four other prices have launches or training at half or twice their cost, and every arm takes its best setting under each.
Runs on shared devices decide without prices, so that they are priced again. Runs on split devices are made again under
every price. Drafts are off in every arm. The pipeline's settings come from trials on the seeds of TRIED_ON. Those of
stories on shared devices, and that of 48 filtered prompts, do not.

MINUTES is the aim, which the show does not meet. The results file has the seconds of a whole run. A killed show goes on
with the runs that it has finished.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable

import intervals
from reward_runs import PRICES, STORIES, Jobs, Runs, Setting, Workload

MINUTES = 30.0
SOURCES = ("scripts/tables/8xh100.json", "scripts/tables/v5e-16.json", "scripts/priced_runs.py")
SLICES = ("8xh100", "v5e-16")
SEEDS, TRIED_ON = tuple(range(5)), (100, 101)
ROWS = {"demo": 128, "stories": 96}  # of an engine step in every arm: on these devices few rows take as long as many
PLAIN = ("scheduler.over=1.0", "scheduler.lane=0.0")
PIPED = (
    *PLAIN,
    "scheduler.name=pipeline",
    "scheduler.ahead=16",
    "algorithm.prox_logp_method=loglinear",
    "algorithm.rollout_is=token",
)
FILTER = ("scheduler.filter_groups=true", "scheduler.max_waves=100")


def _setting(
    group: int,
    prompts: int,
    slots: int,
    dispatch: int,
    refill: int,
    *more: str,
    filtered: bool,
    placement: str = "shared",
) -> Setting:
    overrides = (
        f"scheduler.prompts={prompts}",
        f"engine.slots={slots}",
        f"engine.steps_per_dispatch={dispatch}",
        f"engine.refill_slots={refill}",
        *more,
        *(FILTER if filtered else ()),
    )
    return Setting(overrides=overrides, rollouts=prompts * group, slots=slots, placement=placement, filtered=filtered)


def _sync(group: int, prompts: int, dispatch: int, filtered: bool = False) -> Setting:
    slots = prompts * group
    return _setting(group, prompts, slots, dispatch, slots // 2, "scheduler.name=sync", *PLAIN, filtered=filtered)


def _tail_batching(group: int, prompts: int, over: float, filtered: bool = False) -> Setting:
    rules = ("scheduler.name=tail_batching", f"scheduler.over={over}", "scheduler.lane=1.0")
    slots = math.ceil(prompts * over) * group
    return _setting(group, prompts, slots, 16, prompts * group // 2, *rules, filtered=filtered)


def _pipeline(
    group: int, placement: str, prompts: int, slots: int, *, bound: int = 8, ready: int = 0, filtered: bool = False
) -> Setting:
    """`bound`: of staleness. `ready`: groups that may wait for the learner; 0: any number."""
    rules = (
        *PIPED,
        f"mesh.engine={int(placement == 'split')}",
        f"scheduler.max_staleness={bound}",
        f"scheduler.max_ready={ready}",
    )
    return _setting(group, prompts, slots, 4, 4, *rules, filtered=filtered, placement=placement)


# Four settings of each arm. The first of `sync` sets the reward.
WORKLOADS = {
    "demo": Workload(
        config="configs/demo/long_tail.py",
        overrides=(f"engine.row_sizes=({ROWS['demo']},)",),
        trained=36 * 96,
        window=960,
        arms={
            "sync": [_sync(2, many, 32, filtered) for many in (48, 24) for filtered in (False, True)],
            "tail_batching": [
                _tail_batching(2, many, 1.125, filtered) for many in (48, 24) for filtered in (False, True)
            ],
            "pipeline": [
                _pipeline(2, "split", 48, 96, ready=60),
                _pipeline(2, "shared", 48, 96),
                _pipeline(2, "shared", 48, 96, filtered=True),
                _pipeline(2, "shared", 24, 48, filtered=True),
            ],
        },
    ),
    "stories": Workload(
        config="configs/models/stories.py",
        overrides=(*STORIES, f"engine.row_sizes=({ROWS['stories']},)"),
        trained=22 * 64,
        window=320,
        arms={
            "sync": [_sync(8, many, dispatch) for many in (8, 4) for dispatch in (16, 32)],
            "tail_batching": [_tail_batching(8, many, over) for many in (8, 4) for over in (1.125, 1.25)],
            "pipeline": [
                _pipeline(8, "split", 8, 96, ready=12),
                _pipeline(8, "split", 4, 48, ready=6),
                _pipeline(8, "shared", 8, 64),
                _pipeline(8, "shared", 4, 32),
            ],
        },
    ),
}


def show(record) -> None:
    record.data("tinystories-260k")
    with Jobs(record) as jobs:
        for name, workload in WORKLOADS.items():
            _compare(record, name, workload, Runs(name, workload, jobs))


# ---- what is compared


def _compare(record, name: str, workload: Workload, runs: Runs) -> None:
    runs.make(runs.of(arm, at, slice_, price, seed) for arm, at, slice_, price in _all(workload) for seed in TRIED_ON)
    kinds = itertools.product(workload.arms, SLICES, PRICES)
    best = {(arm, slice_, price): _best(workload, runs, arm, slice_, price) for arm, slice_, price in kinds}
    runs.make(runs.of("sync", 0, slice_, "", seed) for slice_ in SLICES for seed in SEEDS)
    runs.make(runs.of(arm, at, slice_, price, seed) for (arm, slice_, price), at in best.items() for seed in SEEDS)
    for slice_ in SLICES:
        for price in PRICES:
            for arm in workload.arms:
                chosen = workload.arms[arm][best[arm, slice_, price]]
                record.figure(f"{name}.{slice_}{price}.{arm}.setting", list(chosen.overrides))
            _ratios(
                record, name, workload, runs, slice_, price, {arm: best[arm, slice_, price] for arm in workload.arms}
            )
    found = [
        runs.found(runs.of("pipeline", best["pipeline", slice_, price], slice_, price, seed))
        for slice_, price, seed in itertools.product(SLICES, PRICES, SEEDS)
    ]
    record.figure(f"{name}.largest_staleness", max(one["oldest"] for one in found), at_most=8)
    record.figure(f"{name}.mean_staleness", statistics.mean(one["stale"] for one in found))


def _all(workload: Workload) -> Iterable[tuple[str, int, str, str]]:
    settings = ((arm, at) for arm, all_of in workload.arms.items() for at in range(len(all_of)))
    return ((*setting, slice_, price) for setting, slice_, price in itertools.product(settings, SLICES, PRICES))


def _best(workload: Workload, runs: Runs, arm: str, slice_: str, price: str) -> int:
    """Returns the setting with the least median time to the reward on the seeds that settings are tried on."""
    times = [
        statistics.median(
            runs.time(runs.of(arm, at, slice_, price, seed), slice_, price)["seconds"] for seed in TRIED_ON
        )
        for at in range(len(workload.arms[arm]))
    ]
    return times.index(min(times))


def _ratios(record, name: str, workload: Workload, runs: Runs, slice_: str, price: str, best: dict[str, int]) -> None:
    key = f"{name}.{slice_}{price}"
    times = {
        arm: [runs.time(runs.of(arm, at, slice_, price, seed), slice_, price) for seed in SEEDS]
        for arm, at in best.items()
    }
    for arm, found in times.items():
        record.figure(f"{key}.{arm}.seconds_to_reward", [round(one["seconds"], 3) for one in found])
        record.figure(f"{key}.{arm}.rollouts_to_reward", [one["rollouts"] for one in found])
        for part in ("step", "engine", "learner", "waited"):
            record.figure(f"{key}.{arm}.{part}_s", round(statistics.mean(one[part] for one in found), 4))
    for other in ("sync", "tail_batching"):
        theirs, ours = ([one["seconds"] for one in times[arm]] for arm in (other, "pipeline"))
        ratio, low, high = intervals.ratio_of_medians(theirs, ours)
        record.figure(f"{key}.{other}_over_pipeline", round(ratio, 4), at_least=1.5)
        record.figure(f"{key}.{other}_over_pipeline_low", round(low, 4), at_least=1.2)
        record.figure(f"{key}.{other}_over_pipeline_high", round(high, 4))
