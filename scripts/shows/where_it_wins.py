"""PipelineRL's case by the scheduler of a run, and where pipelining, tail batching and both win, by lengths and
devices.

First comes PipelineRL's appendix A (arXiv 2509.19128): 44 generators of 192 sequences beside 84 learners, with uniform
lengths, in flashes. It is compared with conventional rounds of 133 steps on all 128 chips. The pipeline is the very
object that a run uses (scheduler/pipeline.py).

Then comes a table over four laws of lengths and 16 to 1,024 H800. The laws are uniform, RollPacker's fitted 8k and 32k
(arXiv 2509.21009), and log-normal with a thin tail. The model is Qwen2.5-7B on one device a replica, or on 8 where
there are 1,024 devices. An optimizer step trains on 1,024 rollouts, each bound to a replica when a slot is free.
Seconds come from the analytic cost. There are six ways:

- synchronous and tail-batched rounds on shared devices;
- both with the learner on devices of its own, one step behind;
- the pipeline on shared devices, and split.

Split ways get the better of two shares of the devices for generation. On shared devices time is decode plus training
work, and the pipeline's gain is full slots. Where devices are split, the slower side decides. `where-it-wins.svg` draws
the table.
"""

from __future__ import annotations

import itertools
import math
import multiprocessing
import os
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor

MINUTES = 20.0
LAWS = {
    "uniform": ("workload.name=uniform", "workload.cap=8192"),
    "rollpacker_8k": ("workload.name=rollpacker", "workload.cap=8192"),
    "rollpacker_32k": ("workload.name=rollpacker", "workload.cap=32768"),
    "thin_tail": ("workload.name=lognormal", "workload.mean=1000.0", "workload.tail=1.2", "workload.cap=8192"),
}
DEVICES = (16, 128, 1024)
SHARES = (0.5, 0.7)  # of the devices, for generation, where the learner has its own
TENSOR = {16: 1, 128: 1, 1024: 8}  # devices of a replica
PROMPTS, GROUP, ROUNDS, WARM = 128, 8, 30, 10
PEAK, MFU, ACTIVE = 9.9e14, 0.4, 7.62e9  # of an H800; a trained token takes 6 * ACTIVE operations
COLORS = {
    "sync.shared": "#a9a9a9",
    "sync.split": "#6f6f6f",
    "tail.shared": "#9ec5e8",
    "tail.split": "#4a7fb5",
    "pipeline.shared": "#9fd3a9",
    "pipeline.split": "#3f8f52",
}
WAYS = {
    "sync": ("scheduler.name=sync",),
    "tail": ("scheduler.name=tail_batching", "scheduler.over=1.25", "scheduler.prefix_mode=recompute"),
    "pipeline": ("scheduler.name=pipeline", "scheduler.max_staleness=4"),
}
CLOSED = {"generated": 16.9, "both": 16.9, "conventional": 10.7}


def show(record) -> None:
    sys.path[:0] = [str(record.root / folder) for folder in ("", "scripts", "scripts/shows")]
    _pipelinerl(record)
    found = _table(record)
    for (law, count), row in found.items():
        for way, told in row.items():
            record.figure(f"{law}.{count}.{way}", told)
        best = max(row, key=lambda way: row[way]["over_sync"])
        record.figure(f"{law}.{count}.best", best)
        for way in ("pipeline.shared", "pipeline.split"):
            record.figure(f"{law}.{count}.{way}.largest_staleness", row[way]["largest_staleness"], at_most=4)
    # Full slots can only help: a pipeline that is slower than rounds on the same devices has a fault.
    worst = min(row["pipeline.shared"]["over_sync"] for row in found.values())
    record.figure("pipeline_shared_over_sync_at_worst", worst, at_least=0.98)
    most = max(row["pipeline.split"]["over_sync"] for row in found.values())
    record.figure("pipeline_split_over_sync_at_best", most, at_least=1.5)
    _drawn(record, found)


# ---- PipelineRL's own case


def _pipelinerl(record) -> None:
    import papers

    piped, conventional = record.cached("pipelinerl", _piped), record.cached("conventional", papers.conventional)
    figures = piped | {"conventional": conventional["conventional.both"]}
    for name, value in figures.items():
        record.figure(f"pipelinerl.{name}", value)
        record.figure(f"pipelinerl.{name}.over_closed", value / CLOSED[name], at_least=0.97, at_most=1.03)
    record.figure(
        "pipelinerl.ratio", figures["both"] / figures["conventional"], at_least=1.57 * 0.97, at_most=1.57 * 1.03
    )


def _piped() -> dict[str, float]:
    """Returns tokens a flash, generated and trained, after as many steps as the longest rollout lasts."""
    import papers as p

    given = _settings(
        (
            f"rounds={4 * p.UPDATES}",
            "workload.name=uniform",
            f"workload.cap={p.LONGEST}",
            "workload.prompt_tokens=1",
            "workload.prompts=100000",
            f"cluster.replicas={p.GENERATORS}",
            f"cluster.slots={p.SLOTS}",
            f"cluster.step_s={p.STEP[0]}",
            f"cluster.request_s={p.STEP[1]}",
            "scheduler.name=pipeline",
            f"scheduler.max_staleness={4 * p.UPDATES}",
            f"scheduler.prompts={p.BATCH // p.GROUP}",
            f"scheduler.group_size={p.GROUP}",
            "learner.apart=True",
            f"learner.token_s={p.TAU / (p.CHIPS - p.GENERATORS)}",
        )
    )
    rounds = _turned(given)[0][2 * p.UPDATES :]
    flashes = sum(one.generate_s for one in rounds)
    generated = p.GENERATORS * p.SLOTS / (p.STEP[0] + p.STEP[1] * p.SLOTS)
    return {"both": float(sum(one.lengths.sum() for one in rounds)) / flashes, "generated": generated}


# ---- the table


def _table(record) -> dict[tuple[str, int], dict]:
    """Returns rows by law and devices. As many are computed at a time as there are cores."""
    from shows import where_it_wins as mine  # under a name that another process knows it by

    cells = [(law, count) for law in LAWS for count in DEVICES]
    with ProcessPoolExecutor(os.cpu_count(), mp_context=multiprocessing.get_context("fork")) as pool:
        pool.submit(int).result()  # forks the workers, before there are threads
        with ThreadPoolExecutor(len(cells)) as waiting:
            done = [
                waiting.submit(
                    record.cached, f"{law}-{count}", lambda cell=(law, count): pool.submit(mine._row, *cell).result()
                )
                for law, count in cells
            ]
            return {cell: row.result() for cell, row in zip(cells, done)}


def _row(law: str, count: int) -> dict[str, dict]:
    """Returns for each way seconds an optimizer step, the speed-up over synchronous rounds, and staleness."""
    out = {}
    for way in WAYS:
        out[f"{way}.shared"] = _way(law, way, count, 1.0)
        split = [_way(law, way, count, share) for share in SHARES]
        out[f"{way}.split"] = min(split, key=lambda told: told["step_s"])
    return {way: told | {"over_sync": out["sync.shared"]["step_s"] / told["step_s"]} for way, told in out.items()}


def _way(law: str, way: str, count: int, share: float) -> dict[str, float]:
    tensor = TENSOR[count]
    generators = round(count * share / tensor)
    learners = count if share == 1.0 else count - generators * tensor
    token_s = 6 * ACTIVE / (PEAK * MFU * learners)
    given = _settings(
        (
            f"rounds={ROUNDS}",
            "workload.prompts=4096",
            f"cluster.replicas={generators}",
            f"cluster.slots={_slots(way, generators)}",
            f"cluster.tensor={tensor}",
            "scheduler.placement=divided",
            "cluster.device=h800",
            "cluster.model=qwen2.5-7b",
            f"scheduler.prompts={PROMPTS}",
            f"scheduler.group_size={GROUP}",
            f"learner.apart={share < 1.0}",
            f"learner.token_s={token_s}",
            *LAWS[law],
            *WAYS[way],
        )
    )
    rounds, oldest = _turned(given)
    rounds = _behind(rounds, WARM)
    return {
        "step_s": sum(one.step_s for one in rounds) / sum(one.batches for one in rounds),
        "generators": generators * tensor,
        "staleness": statistics.mean(one.staleness for one in rounds),
        "largest_staleness": oldest,
    }


def _behind(rounds: list, batches: int) -> list:
    """Returns the rounds after so many batches. One round may have several."""
    seen = itertools.accumulate(one.batches for one in rounds)
    return [one for one, count in zip(rounds, seen) if count > batches]


def _slots(way: str, replicas: int) -> int:
    """Returns the slots of each replica.

    Rounds get a slot for each of their rollouts. The pipeline gets so many that its bound leaves them full, about three
    batches in all.
    """
    answers = PROMPTS * GROUP * (1.25 if way == "tail" else 3.0 if way == "pipeline" else 1.0)
    return min(256, math.ceil(answers / replicas))


def _settings(overrides: tuple[str, ...]):
    from jaxrl_post.sim import settings

    return settings.resolve(settings.default(), overrides)


def _turned(given) -> tuple[list, int]:
    """Returns the rounds of a simulation that has run, and the age of its oldest trained token."""
    from ages import Ages

    from jaxrl_post import loop, simulate

    ring = simulate.assemble(given)
    learner = Ages(ring.learner)
    loop.run(simulate.tallied(ring), ring.engine, ring.scheduler, ring.rewards, learner, simulate.publish, given.rounds)
    return ring.tally.rounds, max(learner.oldest)


# ---- the picture


def _drawn(record, found: dict) -> None:
    """Writes the picture beside the results."""
    import drawing

    place = record.root / "scripts" / "results" / "where-it-wins.svg"
    place.parent.mkdir(parents=True, exist_ok=True)
    drawing.save(bars(found), place)
    record.figure("picture", place.relative_to(record.root).as_posix())


def bars(found: dict):
    """Returns a figure with a panel for each law. Each number of devices has a bar for each way: its speed-up over synchronous
    rounds on shared devices."""
    import drawing

    ways = list(next(iter(found.values())))
    wide = 0.8 / len(ways)
    picture = drawing.figure(12, 4)
    for law, axes in zip(LAWS, picture.subplots(1, len(LAWS), sharey=True)):
        for at, way in enumerate(ways):
            left = [place - 0.4 + wide * at for place in range(len(DEVICES))]
            tall = [found[law, count][way]["over_sync"] for count in DEVICES]
            axes.bar(left, tall, wide * 0.9, align="edge", color=COLORS[way], label=way.replace(".", ", "))
        axes.set_title(law.replace("_", " "), fontsize=10)
        axes.set_xticks(range(len(DEVICES)), [str(count) for count in DEVICES])
        axes.set_xlabel("devices")
        axes.grid(axis="y", color="#d0d0d0", linewidth=0.6)
        axes.set_axisbelow(True)
    picture.axes[0].set_ylabel("speed-up over synchronous rounds")
    picture.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=len(ways), frameon=False)
    return picture
