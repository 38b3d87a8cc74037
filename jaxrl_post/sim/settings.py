"""What a simulation is given: one frozen schema, resolved by config.resolve as a run's is.

A file in configs/sim/ starts from `default()`; its scheduler is the section of a run's config, so what is simulated is what
would run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxrl_post import config
from jaxrl_post.config import at_least, one_of


@dataclass(frozen=True, kw_only=True)
class Workload:
    """`prompts` of `prompt_tokens` an epoch, answers of at most `cap`. rollpacker: fitted to that paper's figure 11;
    uniform: 1 to `cap`; lognormal: `mean` tokens, the longest of a group `tail` times as long, `within` of the logarithm's
    variance within a prompt; trace: the lengths of the file `path`; rollouts: those of the rollout log in the folder `path`.
    `tv`: chance per token that the next version writes another one there."""

    name: str = one_of("rollpacker", "rollpacker", "uniform", "lognormal", "trace", "rollouts")
    prompts: int = at_least(10_000, 1)
    prompt_tokens: int = at_least(256, 1)
    cap: int = at_least(8192, 1)
    mean: float = at_least(1000.0, 1.0)
    tail: float = at_least(1.5, 1.0)
    within: float = at_least(1.0, 1e-3, 1.0)
    path: str = ""
    tv: float = at_least(0.0, 0.0, 0.999)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """`replicas` of `tensor` devices with `slots` each. `model`: its cost is analytic for `device`; else, with `step_s`
    above 0, a step takes that and `request_s` for each answer in it, or a measured table is named in `cost_table`.
    `round_s`: what a round takes beside steps and training. `pace`: all replicas in one program, or each on its own, then
    the clock counts ticks of `tick_s`. `bounded`: KV is bounded by the device's memory. `layouts`: further values of
    `tensor`, between which a planner chooses each round; a relayout takes `move_s`, and each doubling of `tensor` makes a step
    `collective_s` longer. Drafts: where at most `draft_running` answers of a replica run, each gets `draft_tokens` tokens a
    step for `draft_width` rows more."""

    replicas: int = at_least(16, 1)
    tensor: int = at_least(1, 1)
    slots: int = at_least(1024, 1)
    device: str = one_of("h800", "h800", "h200", "h100", "v5e", "v6e")
    model: str = one_of("qwen2.5-7b", "qwen2.5-7b", "qwen2.5-14b", "qwen2.5-32b")
    step_s: float = at_least(0.0, 0.0)
    request_s: float = at_least(0.0, 0.0)
    cost_table: str = ""
    round_s: float = at_least(0.0, 0.0)
    pace: str = one_of("lockstep", "lockstep", "independent")
    tick_s: float = at_least(1e-3, 1e-6)
    bounded: bool = False
    layouts: tuple[int, ...] = ()
    move_s: float = at_least(0.0, 0.0)
    collective_s: float = at_least(0.0, 0.0)
    draft_tokens: float = at_least(1.0, 1.0)
    draft_width: int = at_least(0, 0)
    draft_running: int = at_least(0, 0)


@dataclass(frozen=True, kw_only=True)
class Learner:
    """Seconds of an optimizer step: `step_s`, and `token_s` for each trained token. `apart`: on devices of its own, which are
    none of the cluster's, while the engine goes on with the weights before."""

    token_s: float = at_least(0.0, 0.0)
    step_s: float = at_least(0.0, 0.0)
    apart: bool = False


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """`rounds` of a scheduler over a workload. `reward_slope`: logits of being right per factor e of length. `published`:
    figure name -> number of the paper, of which those in `fitted` were fitted to. `parts`: one after the other what is
    added to the same simulation under synchronous rounds, each a name and overrides: "long lane: scheduler.lane=0.5"."""

    name: str = "simulation"
    seed: int = at_least(0, 0)
    rounds: int = at_least(20, 1)
    workload: Workload = Workload()
    cluster: Cluster = Cluster()
    scheduler: config.Scheduler = config.Scheduler()
    learner: Learner = Learner()
    reward_slope: float = 0.0
    published: Mapping[str, Any] = field(default_factory=dict)
    fitted: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()

    @property
    def replicas(self) -> int:
        return self.cluster.replicas

    @property
    def sampling(self) -> config.Sampling:
        """Answers end by themselves, at the latest at the cap."""
        return config.Sampling(max_tokens=self.workload.cap)

    def __post_init__(self):
        c = self.cluster
        unfit = [tensor for tensor in c.layouts if tensor % c.tensor or c.replicas * c.tensor % tensor]
        if unfit or (c.layouts and (c.step_s or c.cost_table)):
            raise ValueError(
                f"cluster.layouts={c.layouts} must be multiples of cluster.tensor={c.tensor} that divide the "
                f"{c.replicas * c.tensor} devices, and need the analytic cost: no step_s, no cost_table"
            )
        unknown = sorted(set(self.fitted) - set(self.published))
        if unknown:
            raise ValueError(f"fitted={unknown[0]!r} names no figure of published: {', '.join(self.published)}")
        s = self.scheduler
        if s.name == "sync" and not s.over == s.over_samples == 1:
            raise ValueError(
                f"scheduler.name='sync' waits for all it launches: scheduler.over={s.over} and scheduler."
                f"over_samples={s.over_samples} must be 1"
            )
        if s.name == "tail_batching" and s.over_samples != 1:
            raise ValueError(
                f"scheduler.name='tail_batching' drops no answer: scheduler.over_samples={s.over_samples} must be 1"
            )
        if self.learner.apart and c.layouts:
            raise ValueError(
                f"learner.apart publishes in the midst of a round and cluster.layouts={c.layouts} are changed between "
                "two: leave one of them as it is"
            )
        if self.learner.apart and (s.updates > 1 or s.long_batches > 1):
            raise ValueError(
                f"learner.apart publishes after each optimizer step: scheduler.mini_batches={s.mini_batches}, "
                f"scheduler.ppo_epochs={s.ppo_epochs} and scheduler.long_batches={s.long_batches} must be 1"
            )
        if s.interleave and (s.name != "pipeline" or self.learner.apart):
            raise ValueError(
                f"scheduler.interleave={s.interleave} is of scheduler.name='pipeline' on shared devices: with scheduler."
                f"name={s.name!r} and learner.apart={self.learner.apart} it must be 0"
            )
        if s.lend:
            raise ValueError(
                f"scheduler.lend={s.lend:g} moves answers in the midst of a round, which the simulator does not: what a "
                "loan would make of each step is its lent_step_s; the nearest valid lend is 0"
            )
        if s.name == "pipeline" and (
            s.updates != 1 or s.stream or self.cluster.layouts or s.placement not in ("least_loaded", "divided")
        ):
            raise ValueError(
                "scheduler.name='pipeline' has no rounds: scheduler.mini_batches, scheduler.ppo_epochs must be 1, "
                "scheduler.stream 0, cluster.layouts empty, scheduler.placement 'least_loaded' or 'divided'"
            )
        nameless = [part for part in self.parts if not all(map(str.strip, part.partition(":")))]
        if nameless:
            raise ValueError(
                f"parts: {nameless[0]!r} must be a name, a colon and overrides, as in 'long lane: scheduler.lane=0.5'"
            )
        if self.workload.name in ("trace", "rollouts") and not self.workload.path:
            raise ValueError(
                f"workload.name={self.workload.name!r} needs workload.path, the file or folder of its lengths"
            )


def default() -> Any:
    """Every field with its default, as a ConfigDict that refuses unknown names."""
    return config.default(Simulation)


def resolve(given: Any, overrides: Sequence[str] = ()) -> Simulation:
    """
    Raises:
      ValueError: unknown name (with the nearest), wrong type, value out of range, or a cross-field rule broken.
    """
    return config.resolve(given, overrides, Simulation)
