"""Round policies and placements by name, and the scheduler that a config asks for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from jaxrl_post import config as configs
from jaxrl_post.history import Past
from jaxrl_post.scheduler.forecast import ReplicaCapacity
from jaxrl_post.scheduler.group_filter import SUMMED
from jaxrl_post.scheduler.groups import PromptOrder
from jaxrl_post.scheduler.learner_pace import Pace
from jaxrl_post.scheduler.ledger import Ledger
from jaxrl_post.scheduler.pipeline import Pipeline
from jaxrl_post.scheduler.placement.histopipe import RankGroups
from jaxrl_post.scheduler.placement.placement import LeastLoaded, Placement
from jaxrl_post.scheduler.placement.seer import Divided, LongestFirst
from jaxrl_post.scheduler.rounds.around import RoundScheduler
from jaxrl_post.scheduler.rounds.delivery import Streamed
from jaxrl_post.scheduler.rounds.layout_planner import Planner
from jaxrl_post.scheduler.rounds.lending import Lending
from jaxrl_post.scheduler.rounds.overlapped import Overlapped
from jaxrl_post.scheduler.rounds.rollpacker import RollPacker
from jaxrl_post.scheduler.rounds.rounds import Sync
from jaxrl_post.scheduler.rounds.tail_batching import TailBatching
from jaxrl_post.types import Layout, Sampling

SCHEDULERS = {"sync": Sync, "tail_batching": TailBatching, "rollpacker": RollPacker, "pipeline": Pipeline}

# The constructor arguments of each scheduler, beside the ones that all schedulers share.
_OWN: dict[str, Callable] = {
    "sync": lambda c, past, pace: _rounds(c),
    "tail_batching": lambda c, past, pace: (
        _rounds(c)
        | {
            "over": c.scheduler.over,
            "prefix_mode": c.scheduler.prefix_mode,
            "long_batches": c.scheduler.long_batches,
            "lane": c.scheduler.lane,
            "past": past,
        }
    ),
    "rollpacker": lambda c, past, pace: (
        _rounds(c) | {"over_prompts": c.scheduler.over, "over_samples": c.scheduler.over_samples}
    ),
    "pipeline": lambda c, past, pace: {
        "steps": c.rounds,
        "prompts_per_step": c.scheduler.prompts,
        "max_staleness": c.scheduler.max_staleness,
        "ahead": c.scheduler.ahead,
        "max_unscored": c.scheduler.max_unscored,
        "max_ready": c.scheduler.max_ready,
        "pace": pace,
    },
}


def _rounds(c: configs.Config) -> dict:
    """Returns the arguments that every scheduler with rounds takes."""
    s = c.scheduler
    return {
        "steps": c.rounds,
        "prompts_per_round": s.prompts,
        "mini_batches": s.mini_batches,
        "ppo_epochs": s.ppo_epochs,
        "delivery": Streamed(s.stream) if s.stream else None,
    }


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
    metric = SUMMED[0] if s.filter_metric == only_grader else s.filter_metric
    scheduler = SCHEDULERS[s.name](
        prompts,
        run_seed=config.seed,
        group_size=s.group_size,
        sampling=sampling,
        baseline=baseline,
        max_tokens=config.sampling.max_tokens,
        filter_groups=s.filter_groups,
        filter_metric=metric,
        max_waves=s.max_waves,
        replicas=config.replicas,
        placement=PLACEMENTS[s.placement](config.replicas, past, replica),
        **_OWN[s.name](config, past, pace),
    )
    if s.lend:
        all_of_them, half = (Layout(count, config.mesh.replica) for count in (config.replicas, config.staying))
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


def planned(rounds: RoundScheduler, replicas: Mapping[Layout, ReplicaCapacity], *, move_s: float = 0.0) -> Planner:
    """Wraps a scheduler in a planner that chooses the engine's layout for each round.

    Args:
      rounds: the scheduler to wrap.
      replicas: the replica of each layout. The engine starts in the first layout.
      move_s: seconds of one relayout.
    """
    return Planner(rounds, replicas, move_s=move_s)
