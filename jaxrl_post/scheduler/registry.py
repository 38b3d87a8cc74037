"""Round policies and placements by name, and the scheduler that a config asks for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from jaxrl_post import config as configs
from jaxrl_post.ring.history import Past
from jaxrl_post.ring.types import Layout, Sampling
from jaxrl_post.scheduler.forecast import ReplicaCapacity
from jaxrl_post.scheduler.group_filter import SUMMED
from jaxrl_post.scheduler.learner_pace import Pace
from jaxrl_post.scheduler.ledger import Ledger, PromptOrder
from jaxrl_post.scheduler.pipeline import Pipeline
from jaxrl_post.scheduler.placement.histopipe import RankGroups
from jaxrl_post.scheduler.placement.placement import LeastLoaded, Placement
from jaxrl_post.scheduler.placement.seer import Divided, LongestFirst
from jaxrl_post.scheduler.rounds.around import Overlapped
from jaxrl_post.scheduler.rounds.lending import Lending
from jaxrl_post.scheduler.rounds.rollpacker import RollPacker
from jaxrl_post.scheduler.rounds.rounds import Sync
from jaxrl_post.scheduler.rounds.tail_batching import TailBatching

SCHEDULERS = {"sync": Sync, "tail_batching": TailBatching, "rollpacker": RollPacker, "pipeline": Pipeline}

Pasts = Callable[[str], Sequence[Past]]

PLACEMENTS: dict[str, Callable[[int, Pasts, Callable[[], ReplicaCapacity]], Placement]] = {
    "least_loaded": lambda count, past, replica: LeastLoaded(count),
    "divided": lambda count, past, replica: Divided(),
    "longest_first": lambda count, past, replica: LongestFirst(past=past),
    "rank_groups": lambda count, past, replica: RankGroups(replica(), past=past),
}


def made(
    config: configs.Config,
    prompts: PromptOrder,
    sampling: Sampling,
    past: Pasts,
    replica: Callable[[], ReplicaCapacity],
    pace: Pace | None = None,
    baseline: Sampling | None = None,
    only_grader: str = "",
) -> Ledger | Lending | Overlapped:
    """Builds the scheduler of a run.

    Args:
      config: the config of a run, or the settings of a simulation.
      prompts: the endless order of training prompts.
      sampling: how tokens are drawn.
      past: maps a prompt id to its records in the history, newest first.
      replica: returns slots, KV capacity and step cost of one replica. Only placements and loans that forecast call it.
      pace: how long an optimizer step takes the learner. None: learner and engine share devices.
      baseline: how the last rollout of each group is drawn. None: as all others.
      only_grader: the reward function whose score is the whole reward, which a filter may name. Empty: there is none.
    """
    s = config.scheduler
    scheduler: Any = SCHEDULERS[s.name](
        prompts,
        replace(s, filter_metric=SUMMED[0]) if s.filter_metric == only_grader else s,
        steps=config.rounds,
        run_seed=config.seed,
        sampling=sampling,
        baseline=baseline,
        max_tokens=config.sampling.max_tokens,
        placement=PLACEMENTS[s.placement](config.replicas, past, replica),
        past=past,
        pace=pace,
    )
    if s.lend:
        all_of_them, half = (Layout(count, config.mesh.engine_parts) for count in (config.replicas, config.staying))
        scheduler = Lending(
            scheduler,
            all_of_them=all_of_them,
            half=half,
            share=s.lend,
            replica=replica(),
            past=past,
            apart=config.mesh.engine > 0,
        )
    return scheduler if pace is None or s.name == "pipeline" else Overlapped(scheduler, pace)
