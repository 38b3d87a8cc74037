"""Seer's order of placements comes out of the simulator; HistoPipe's on our lengths; and what lock-step leaves of both.

Seer (arXiv 2511.14617) has 400 prompts x 8 rollouts on 32 H800. The memory beside a model of Moonlight's size bounds
the KV cache. Lengths are log-normal with a mean near its 22,386 tokens, at most 65,536. How much of their spread lies
within a prompt is assumed. All arms have the same rollouts:

- FIFO: groups are bound to replicas in order.
- Divided: a rollout is bound when a slot is free.
- Ours: a probe of each prompt, the longest first, and idle replicas take rollouts over.
- Oracle: knows every length, and takes over as ours does.

Taking over alone is shown too. It gives nearly all of the gain, as slots are not short here. With 64 slots a replica
they are short: probes come too late there, and rollouts of an earlier epoch take their place.

HistoPipe (RhymeRL, arXiv 2508.18588) runs on our fitted length model: RollPacker's, at most 16k. Its own workload is
private, so this is no reproduction. 16 replicas step on their own, and past rollouts are drawn like the present ones.
Replicas that do not wait for each other use weights one step old. When each may begin follows from what each takes for
each step. A rollout that moved is taken to arrive at a replica which began that step at the same time.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
from models.throughput import step_ends

from jaxrl_post.config import SchedulerConfig
from jaxrl_post.engine import step_cost as cost
from jaxrl_post.ring import loop
from jaxrl_post.ring.events import Ring
from jaxrl_post.ring.types import Prompt, Request, RolloutId, Sampling
from jaxrl_post.scheduler.forecast import ReplicaCapacity
from jaxrl_post.scheduler.placement.histopipe import RankGroups, two_steps
from jaxrl_post.scheduler.placement.placement import LeastLoaded
from jaxrl_post.scheduler.placement.seer import Divided, LongestFirst
from jaxrl_post.scheduler.rounds.rounds import Sync
from jaxrl_post.simulate import pace, workloads
from jaxrl_post.simulate.engine import SimEngine
from jaxrl_post.simulate.learner import SimLearner, SimRewards
from jaxrl_post.simulate.simulation import publish
from jaxrl_post.simulate.texts import SimTexts

MINUTES = 4.0
SEER = {"within": 0.1, "tail": 1.45, "mean": 24000.0, "cap": 65536, "prompts": 400, "group": 8, "replicas": 32}
HISTO = {"cap": 16384, "prompts": 128, "group": 8, "replicas": 16, "steps": 10, "train": 0.15}
ARMS = ("fifo", "divided", "divided, taken over", "probe", "oracle")
PUBLISHED = {"divided": 1.41, "probe": 1.47, "histopipe": 1.43, "two tiers": 1.43 * 1.10}


def show(record) -> None:
    _seer(record)
    _lockstep(record)
    _histopipe(record)


# ---- Seer


def _seer(record) -> None:
    for seed in (0, 1):
        found = record.cached(
            f"seer_{seed}", lambda seed=seed: {arm: _round(arm, seed=seed, slots=256, bounded=True) for arm in ARMS}
        )
        fifo, divided, taken_over, probe, oracle = (found[arm]["seconds"] for arm in ARMS)
        record.figure(f"seer.{seed}.mean_length", found["fifo"]["mean"])
        record.figure(f"seer.{seed}.divided_over_fifo", fifo / divided, at_least=1.05)
        record.figure(f"seer.{seed}.probe_over_divided", divided / probe, at_least=1.02)
        record.figure(f"seer.{seed}.probe_over_fifo", fifo / probe)
        record.figure(f"seer.{seed}.probe_as_share_of_oracle", oracle / probe, at_least=0.95)
        record.figure(f"seer.{seed}.taken_over_as_share_of_oracle", oracle / taken_over)
        for arm, figures in found.items():
            record.figure(f"seer.{seed}.{arm}.tail_s", figures["tail"])
    scarce = record.cached(
        "seer_scarce",
        lambda: {arm: _round(arm, seed=0, slots=64, bounded=True)["seconds"] for arm in ("probe", "past", "oracle")},
    )
    record.figure("seer.64_slots.probe_as_share_of_oracle", scarce["oracle"] / scarce["probe"])
    record.figure("seer.64_slots.past_as_share_of_oracle", scarce["oracle"] / scarce["past"], at_least=0.95)
    record.figure("seer.published.divided_over_fifo", PUBLISHED["divided"])
    record.figure("seer.published.probe_over_fifo", PUBLISHED["probe"])


def _round(arm: str, *, seed: int, slots: int, bounded: bool = False, lockstep: bool = False) -> dict[str, float]:
    """Returns of one synchronous round: seconds, seconds in which the last tenth finishes, engine clock, mean length."""
    shape = cost.Shape(active=2.24e9, parameters=16e9, kv_bytes=27 * 576 * 2)  # Moonlight 16B-A3B: latent KV of 576
    steps, answers = cost.decode("h800", shape), _answers(seed)
    engine = SimEngine(
        answers,
        replicas=SEER["replicas"],
        slots=slots,
        pace=pace.LockStep(steps) if lockstep else pace.Independent(steps, 1e-3),
        kv_tokens=cost.kv_tokens("h800", shape) if bounded else None,
    )
    scheduler = Sync(
        workloads.SimPrompts(SEER["prompts"], seed=seed),
        SchedulerConfig(prompts=SEER["prompts"], group_size=SEER["group"]),
        steps=1,
        run_seed=seed,
        sampling=Sampling(),
        max_tokens=SEER["cap"],
        placement=_placement(arm, answers),
    )
    trained, ring = [], Ring()
    ring.on("preparing", lambda groups: trained.extend(rollout for group in groups for rollout in group.rollouts))
    loop.run(ring, engine, scheduler, SimRewards(), SimLearner(), publish, 1)
    ends = np.sort([rollout.finish_clock for rollout in trained])
    return {
        "seconds": float(engine.seconds),
        "clock": float(ends[-1]),
        "mean": float(np.mean(list(map(len, trained)))),
        "tail": float(engine.seconds * (1 - ends[int(0.9 * ends.size)] / ends[-1])),
    }


def _answers(seed: int):
    law = workloads.lognormal(
        SEER["prompts"], mean=SEER["mean"], tail=SEER["tail"], group=SEER["group"], within=SEER["within"], seed=seed
    )
    return SimTexts(law, cap=SEER["cap"])


def _placement(arm: str, answers):
    class Oracle(Divided):
        """Knows every rollout's length beforehand and places the longest first."""

        def place(self, groups, round) -> None:
            known = {
                request.rollout_id: answers.length(request.rollout_id, request.prompt, 0)
                for group in groups
                for request in group
            }
            flat = sorted((request for group in groups for request in group), key=lambda r: -known[r.rollout_id])
            super().place([[request] for request in flat], round)

    return {
        "fifo": lambda: LeastLoaded(SEER["replicas"]),
        "divided": lambda: Divided(steal=0.0),
        "oracle": Oracle,
        "divided, taken over": Divided,
        "past": lambda: LongestFirst(past=_past(answers)),
        "probe": lambda: LongestFirst(past=lambda prompt_id: ()),
    }[arm]()


def _lockstep(record) -> None:
    """Measures one program over all replicas.

    Where there are more rollouts than slots the order counts in engine steps too. Where there are not, nothing does.
    """
    found = record.cached(
        "lockstep",
        lambda: {
            f"{arm}.{slots}": _round(arm, seed=0, slots=slots, lockstep=True)
            for slots in (32, 128)
            for arm in ("fifo", "divided", "probe")
        },
    )
    steps = {name: figures["clock"] for name, figures in found.items()}
    record.figure("lockstep.scarce.steps_fifo_over_divided", steps["fifo.32"] / steps["divided.32"], at_least=1.05)
    record.figure("lockstep.scarce.steps_fifo_over_probe", steps["fifo.32"] / steps["probe.32"], at_least=1.05)
    record.figure("lockstep.plenty.steps_fifo_over_divided", steps["fifo.128"] / steps["divided.128"], equals=1.0)
    record.figure("lockstep.plenty.steps_fifo_over_probe", steps["fifo.128"] / steps["probe.128"], equals=1.0)


# ---- HistoPipe


def _histopipe(record) -> None:
    found = record.cached("histopipe", _arms)
    seconds = {arm: np.array(figures["seconds"]) for arm, figures in found.items()}
    train = HISTO["train"] * float(seconds["least loaded"].max(axis=1).mean())
    sync = step_ends(seconds["least loaded"], train, 0)[-1]
    for arm, own in seconds.items():
        record.figure(f"histopipe.{arm}.with_a_barrier", sync / step_ends(own, train, 0)[-1])
        record.figure(f"histopipe.{arm}.one_step_old", sync / step_ends(own, train, 1)[-1])
        record.figure(f"histopipe.{arm}.moved_share", found[arm]["moved"])
    old = {arm: sync / step_ends(own, train, 1)[-1] for arm, own in seconds.items()}
    record.figure("histopipe.published.ranks", PUBLISHED["histopipe"])
    record.figure("histopipe.published.ranks_and_replicas", PUBLISHED["two tiers"])
    record.figure("histopipe.note", "workload private, not a reproduction")
    record.figure(
        "histopipe.gain_over_least_loaded_one_step_old",
        old["ranks, replicas, moves"] / old["least loaded"],
        at_least=1.1,
    )
    whole = {arm: figures["lockstep"] for arm, figures in found.items() if "lockstep" in figures}
    record.figure(
        "histopipe.lockstep.least_loaded_over_ranks",
        whole["least loaded"] / whole["ranks, replicas, moves"],
        at_most=1.0,
    )


def _arms() -> dict:
    steps = cost.decode("h800", cost.SHAPES["qwen2.5-14b"], tensor=2)
    replica, past = ReplicaCapacity(slots=1024, kv_tokens=1 << 40, cost=steps), _past(_law()[1])

    def ranks(objective, migrate):
        return lambda: RankGroups(replica, past=past, ranks=4, objective=objective, migrate=migrate)

    def even(seconds):
        return 0.0

    arms = {
        "least loaded": lambda: LeastLoaded(HISTO["replicas"]),
        "ranks": ranks(even, False),
        "ranks, moves": ranks(even, True),
        "ranks, replicas": ranks(two_steps, False),
        "ranks, replicas, moves": ranks(two_steps, True),
    }
    out = {arm: _steps(make(), steps) for arm, make in arms.items()}
    for arm in ("least loaded", "ranks, replicas, moves"):
        out[arm]["lockstep"] = _steps(arms[arm](), steps, lockstep=True)["whole"]
    return out


def _law():
    count = HISTO["prompts"] * HISTO["steps"]
    return workloads.SimPrompts(count), SimTexts(workloads.rollpacker(count, cap=HISTO["cap"]), cap=HISTO["cap"])


def _past(answers):
    """Returns the lengths that each prompt had in another epoch."""

    def past(prompt_id):
        prompt = Prompt(id=prompt_id, tokens=[0])
        return (
            SimpleNamespace(
                lengths=np.array(
                    [
                        answers.length(RolloutId(0, "train", 99, prompt_id, sample), prompt, 0)
                        for sample in range(HISTO["group"])
                    ]
                )
            ),
        )

    return past


def _steps(placement, steps, lockstep: bool = False) -> dict:
    """Returns for each step the seconds that each replica works.

    Also returns the seconds of all steps with a barrier, and the share of rollouts that moved.
    """
    prompts, answers = _law()
    out, whole, moved = [], 0.0, 0
    for step in range(HISTO["steps"]):
        engine = SimEngine(
            answers,
            replicas=HISTO["replicas"],
            slots=1024,
            pace=pace.LockStep(steps) if lockstep else pace.Independent(steps, 1e-3),
        )
        placement.place(
            [_requests(*prompts.at(len(prompts) + step * HISTO["prompts"] + n)) for n in range(HISTO["prompts"])], step
        )
        last, at = [0.0] * HISTO["replicas"], {}
        while True:
            new = placement.release(engine.capacity)
            at |= {request.rollout_id: request.replica for request in new}
            engine.submit(new)
            if not engine.pending:
                break
            for rollout in engine.step():
                parked = engine.park(placement.learn(rollout))
                placement.moved(parked)
                moved += len(parked)
                for left in (rollout, *parked):
                    last[at[left.id]] = max(last[at[left.id]], left.finish_clock * 1e-3)
        out.append(last)
        whole += engine.seconds
    return {"seconds": out, "whole": whole, "moved": moved / (HISTO["steps"] * HISTO["prompts"] * HISTO["group"])}


def _requests(epoch: int, prompt) -> list:
    ids = [RolloutId(0, "train", epoch, prompt.id, sample) for sample in range(HISTO["group"])]
    return [
        Request(rollout_id=id, prompt=prompt, seed=id.seed(), max_tokens=HISTO["cap"], sampling=Sampling())
        for id in ids
    ]
