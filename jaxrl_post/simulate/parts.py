"""Builds the parts of a simulation from its settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxrl_post.engine import step_cost as cost
from jaxrl_post.rewards.modelled import BATCHES
from jaxrl_post.ring.types import Layout
from jaxrl_post.scheduler.forecast import Cost, ReplicaCapacity
from jaxrl_post.scheduler.learner_pace import Interleaved, Pace, Split
from jaxrl_post.simulate import judge as judges
from jaxrl_post.simulate import observed, workloads
from jaxrl_post.simulate import pace as paces
from jaxrl_post.simulate.engine import SimElastic, SimEngine
from jaxrl_post.simulate.learner import Lengths, SimLearner, SimRewards
from jaxrl_post.simulate.pace import Engine as Timed
from jaxrl_post.simulate.pace import SideBySide, Wall
from jaxrl_post.simulate.settings import Cluster, Simulation
from jaxrl_post.simulate.texts import SimTexts

_ENDLESS = 1 << 53  # tokens
JUDGE_CAP = 8  # the longest reply, in mean ones


def prompts(given: Simulation) -> workloads.SimPrompts:
    return workloads.SimPrompts(given.workload.prompts, tokens=given.workload.prompt_tokens, seed=given.seed)


def texts(given: Simulation) -> SimTexts:
    return SimTexts(_distribution(given), cap=given.workload.cap, tv=given.workload.tv)


def _distribution(given: Simulation) -> workloads.DistributionOf:
    w = given.workload
    if w.name == "rollpacker":
        return workloads.rollpacker(w.prompts, cap=w.cap, seed=given.seed)
    if w.name == "uniform":
        return workloads.uniform(w.cap)
    if w.name == "lognormal":
        return workloads.lognormal(
            w.prompts, mean=w.mean, tail=w.tail, group=given.scheduler.group_size, within=w.within, seed=given.seed
        )
    if w.name == "trace":
        return workloads.trace(workloads.read_lengths(w.path))
    return workloads.groups(logged(w.path))


def logged(folder: str) -> list[list[int]]:
    """Returns the lengths in a rollout log, one list per prompt, in order of first appearance. No length is below 1.

    Raises:
      ValueError: the folder holds no rollout log.
    """
    files = sorted(Path(folder).glob("step_*.npz"))
    if not files:
        raise ValueError(f"workload.path={folder}: holds no step_*.npz of a rollout log")
    return [[max(length, 1) for length in own] for own in observed.of_log(files)]


def step_cost(given: Cluster) -> Cost:
    """Returns the cost of an engine step of one replica."""
    if given.cost_table:
        return cost.TableCost(table=cost.load(given.cost_table))
    if given.step_s > 0:
        return cost.DecodeCost(
            weights_s=given.step_s, token_s=0.0, row_s=0.0, request_s=given.request_s, source="given step_s"
        )
    return cost.decode(given.device, cost.SHAPES[given.model], tensor=given.tensor, per_collective_s=given.collective_s)


def replicas(given: Cluster) -> dict[Layout, ReplicaCapacity]:
    """Returns slots, KV capacity and step cost of a replica in each layout. The engine starts in the first layout."""
    out = {}
    for tensor in (given.tensor, *given.layouts):
        at = replace(given, tensor=tensor)
        kv = cost.kv_tokens(at.device, cost.SHAPES[at.model], tensor=tensor) if at.bounded else _ENDLESS
        layout = Layout(given.replicas * given.tensor // tensor, tensor)
        out[layout] = ReplicaCapacity(slots=given.slots * tensor // given.tensor, kv_tokens=kv, cost=step_cost(at))
    return out


def replica(given: Cluster) -> ReplicaCapacity:
    """Returns the capacity of a replica in the layout in which the engine starts."""
    return next(iter(replicas(given).values()))


def pace(given: Simulation) -> Pace | None:
    """Returns how long an optimizer step keeps new weights from the engine while it keeps generating.

    None: the engine rests during a step. Where engine and learner alternate, a micro-batch is one group.
    """
    learner, ratio = given.learner, given.scheduler.interleave
    if not learner.apart and not ratio:
        return None
    work = Split(replica(given.cluster), token_s=learner.token_s, step_s=learner.step_s)
    return Interleaved(work, ratio=ratio, piece=1) if ratio else work


def judge(given: Simulation, policy: SimEngine | SimElastic) -> judges.Beside | judges.Apart | None:
    """Returns the judge beside a policy, or None where there is none."""
    c, about = given.cluster, given.judge
    if about.place == "none":
        return None
    shape, replicas = cost.SHAPES[about.model], c.replicas if about.place == "beside" else about.replicas
    steps = cost.decode(c.device, shape, tensor=c.tensor, per_collective_s=c.collective_s)
    distribution = judges.replies(about.reply)
    made = SimEngine(
        SimTexts(lambda prompt: distribution, cap=int(JUDGE_CAP * about.reply)),
        replicas=replicas,
        slots=c.slots,
        pace=paces.LockStep(steps),
    )
    most, make = c.slots * replicas, judges.Beside if about.place == "beside" else judges.Apart
    return make(made, most, -(-most // BATCHES), policy)


def rewards(given: Simulation, records: Sequence[Lengths], queue: judges.Beside | judges.Apart | None) -> Any:
    """Returns what scores rollouts, after the judge where there is one."""
    plain = SimRewards(slope=given.reward_slope, records=records)
    if queue is None:
        return plain
    return judges.JudgedRewards(
        plain,
        queue,
        question=given.judge.question,
        cap=int(JUDGE_CAP * given.judge.reply),
        longest=given.workload.cap,
        replicas=given.cluster.replicas if given.judge.place == "beside" else given.judge.replicas,
    )


def wall(given: Simulation, engine: Timed, learner: SimLearner) -> Wall:
    """Returns how the seconds of engine and learner add up."""
    return SideBySide(engine, learner) if given.learner.apart else Wall(engine, learner)


def engine(given: Simulation) -> SimEngine | SimElastic:
    c, made = given.cluster, {}
    drafts = paces.DraftSpeed(tokens=c.draft_tokens, width=c.draft_width, most_running=c.draft_running)
    for layout, one in replicas(c).items():
        paced = (
            paces.LockStep(one.cost, drafts) if c.pace == "lockstep" else paces.Independent(one.cost, c.tick_s, drafts)
        )
        made[layout] = SimEngine(
            texts(given),
            replicas=layout.replicas,
            slots=one.slots,
            pace=paced,
            kv_tokens=one.kv_tokens if c.bounded else None,
        )
    return SimElastic(made, move_s=c.move_s) if len(made) > 1 else next(iter(made.values()))
