"""PipelineRL's throughput and six measured stalenesses come out of closed forms and of the simulator's events alike.

PipelineRL (arXiv 2509.19128, appendix A) has 128 chips, batches of 128 and uniform lengths. Conventional training uses
all chips in turns, with G = 133 steps on each generation. The pipeline has 44 generators of 192 sequences beside 84
learners. A step of h sequences takes 446.7 + 0.278 h flashes, from the paper's two rates of generation. 4.92 flashes
train a token. Events come from the real loop under synchronous rounds for the conventional case. For the pipeline they
come from generation beside training (scripts/models/pipelinerl.py).

Devices lent to the learner (RollPacker, arXiv 2509.21009, section 5.3): seconds of a step without lending over those
with it, on its fitted workloads, beside the published gain. They have no bound, because training is known only as a
share of a step.

Staleness: six runs of Qwen3-8B (Applied Compute, July 2026). Groups of 8 and log-normal lengths are assumed. The
numbers of Seer and HistoPipe belong to the show placements.
"""

from __future__ import annotations

from models import throughput
from models.pipelinerl import Stream

from jaxrl_post import config
from jaxrl_post.config import SchedulerConfig
from jaxrl_post.engine import step_cost as cost
from jaxrl_post.ring import loop
from jaxrl_post.ring.events import Ring
from jaxrl_post.ring.types import Sampling
from jaxrl_post.scheduler.placement.placement import LeastLoaded
from jaxrl_post.scheduler.rounds.rounds import Sync
from jaxrl_post.simulate import pace, settings, simulation, workloads
from jaxrl_post.simulate.engine import SimEngine
from jaxrl_post.simulate.learner import SimLearner, SimRewards
from jaxrl_post.simulate.tally import Tally
from jaxrl_post.simulate.texts import SimTexts

MINUTES = 6.0
CHIPS, BATCH, GENERATORS, SLOTS, TAU, UPDATES, LONGEST = 128, 128, 44, 192, 4.92, 133, 1024
STEP = (446.66, 0.2778)  # flashes of any step, and of each sequence in it
PUBLISHED = {
    "pipelined.generated": 16.9,
    "pipelined.trained": 17.1,
    "pipelined.both": 16.9,
    "conventional.generated": 18.3,
    "conventional.trained": 26.0,
    "conventional.both": 10.7,
    "ratio": 1.57,
}
ROWS = (  # slots, samples a step, queue in batches, generator's speed over the learner's, tail, measured staleness
    (120, 240, 2, 0.63, 1.42, 1.26),
    (240, 120, 2, 0.92, 1.43, 3.59),
    (128, 128, 2, 1.07, 1.44, 3.09),
    (240, 120, 1, 0.86, 1.42, 3.40),
    (120, 120, 1, 0.67, 1.42, 1.92),
    (128, 128, 1, 1.14, 1.45, 2.01),
)
LENT = {
    "8k": 2.03 / 2.01,
    "16k": 2.22 / 2.02,
    "32k": 2.56 / 2.52,
}  # published, end to end; long rounds at 8k 124.2 / 115.2
MEAN, GROUP, CAP = 1350, 8, 16384


def show(record) -> None:
    _pipelinerl(record)
    _lending_and_staleness(record)


def _pipelinerl(record) -> None:
    closed = _closed(record)
    events = record.cached("pipelined", _pipelined) | record.cached("conventional", conventional)
    events["ratio"] = events["pipelined.both"] / events["conventional.both"]
    for name, value in events.items():
        record.figure(f"pipelinerl.events.{name}", value)
        record.figure(f"pipelinerl.events.{name}.over_closed", value / closed[name], at_least=0.97, at_most=1.03)


def _lending_and_staleness(record) -> None:
    for cap, published in LENT.items():
        workload = config.load(str(record.root / "configs" / "sim" / f"rollpacker_{cap}.py"))
        given = settings.resolve(workload, ("rounds=20",))
        found = record.cached(f"lent{cap}", lambda: simulation.run(given))
        record.figure(
            f"lending.{cap}.gain",
            {
                "ours": round(found["step_s"] / found["lent_step_s"], 3),
                "long_rounds": round(found["long_step_s"] / found["long_lent_step_s"], 3),
                "published": round(published, 3),
            },
        )
        record.figure(f"lending.{cap}.never_slower", found["lent_step_s"] <= found["step_s"], equals=True)
    for number, row in enumerate(ROWS, start=1):
        _staleness(record, number, row)


def _step(sequences):
    return STEP[0] + STEP[1] * sequences


def _closed(record) -> dict[str, float]:
    alive = throughput.uniform_alive(UPDATES * BATCH, LONGEST)
    found = {
        "conventional": throughput.conventional(alive, chips=CHIPS, step=_step, train=TAU),
        "pipelined": throughput.pipelined(chips=CHIPS, generators=GENERATORS, slots=SLOTS, step=_step, train=TAU),
    }
    closed = {
        f"{name}.{kind}": getattr(rates, kind)
        for name, rates in found.items()
        for kind in ("generated", "trained", "both")
    }
    closed["ratio"] = closed["pipelined.both"] / closed["conventional.both"]
    for name, published in PUBLISHED.items():
        record.figure(
            f"pipelinerl.closed.{name}",
            closed[name],
            at_least=published - 0.05 if published > 2 else 1.565,
            at_most=published + 0.05 if published > 2 else 1.5849,
        )
    record.figure(
        "pipelinerl.closed.largest_lag",
        throughput.largest_lag(slots=SLOTS, generators=GENERATORS, longest=LONGEST, mean=LONGEST / 2, batch=BATCH),
        at_least=132,
        at_most=133,
    )
    return closed


def _engine(replicas: int, slots: int):
    steps = cost.DecodeCost(
        weights_s=STEP[0], token_s=0.0, row_s=0.0, request_s=STEP[1], source="PipelineRL, appendix A"
    )
    return SimEngine(
        SimTexts(workloads.uniform(LONGEST), cap=LONGEST), replicas=replicas, slots=slots, pace=pace.LockStep(steps)
    )


def _pipelined() -> dict[str, float]:
    """Returns events after a warm-up.

    While all slots start together, the generator fills the queue. Until that is used up, both systems train a little
    faster than they generate, and it takes long.
    """
    flash = _step(SLOTS)  # a step's, because all slots are always full
    stream = Stream(
        _engine(GENERATORS, SLOTS),
        workloads.SimPrompts(100_000, tokens=1),
        group=GROUP,
        batch=BATCH,
        train=lambda tokens: tokens * TAU / (CHIPS - GENERATORS) / flash,
        max_tokens=LONGEST,
    )
    found = stream.run(warm=2 * UPDATES, batches=2 * UPDATES)
    return {"pipelined.generated": found.generated_per_unit / flash, "pipelined.both": found.tokens_per_unit / flash}


def conventional() -> dict[str, float]:
    engine = _engine(CHIPS, 1024)
    scheduler = Sync(
        workloads.SimPrompts(100_000, tokens=1),
        SchedulerConfig(prompts=UPDATES * BATCH // GROUP, group_size=GROUP, mini_batches=UPDATES),
        steps=1,
        run_seed=0,
        sampling=Sampling(),
        max_tokens=LONGEST,
        placement=LeastLoaded(CHIPS),
    )
    learner = SimLearner(token_s=TAU / CHIPS)
    tally = Tally(engine, scheduler, learner)
    ring = Ring()
    ring.on("committed", tally.commit)
    ring.on("published", tally.published)
    loop.run(ring, engine, scheduler, SimRewards(), learner, simulation.publish, UPDATES)
    tokens = float(tally.rounds[0].lengths.sum())
    return {
        "conventional.generated": tokens / engine.seconds,
        "conventional.trained": tokens / learner.seconds,
        "conventional.both": tokens / (engine.seconds + learner.seconds),
    }


def _staleness(record, number: int, row: tuple) -> None:
    slots, batch, queue, ratio, tail, measured = row
    closed = throughput.staleness(slots=slots, batch=batch, queue=queue, ratio=ratio, tail=tail)
    ours = record.cached(f"staleness{number}", lambda: _stale(slots, batch, queue, ratio, tail))
    record.figure(f"staleness.{number}.measured", measured)
    record.figure(f"staleness.{number}.closed", round(closed, 2))
    record.figure(f"staleness.{number}.events", round(ours, 2))
    record.figure(f"staleness.{number}.error", ours - measured, at_least=-0.3, at_most=0.3)


def _stale(slots: int, batch: int, queue: int, ratio: float, tail: float) -> float:
    steps = pace.LockStep(cost.DecodeCost(weights_s=1.0, token_s=0.0, row_s=0.0))
    law = workloads.lognormal(50_000, mean=MEAN, tail=tail, group=GROUP)
    engine = SimEngine(SimTexts(law, cap=CAP), replicas=1, slots=slots, pace=steps)
    stream = Stream(
        engine,
        workloads.SimPrompts(50_000, tokens=1),
        group=GROUP,
        batch=batch,
        max_tokens=CAP,
        train=lambda tokens: ratio * batch * MEAN / slots,
        capacity=queue * batch,
    )
    return stream.run(warm=20, batches=80).staleness
