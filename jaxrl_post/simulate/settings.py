"""The config of a simulation: one frozen schema, resolved by config.resolve like the config of a run.

A file in configs/sim/ starts from `default()`. Its scheduler section is the same as in a run's config, so the
simulated scheduler is the real one. The rules of a run apply too:

- An option that nothing would read is refused.
- The relations between a scheduler and its devices hold, under the names of this schema.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxrl_post import config
from jaxrl_post.config import any_of_type, file_path, mapping, number, one_of, positive
from jaxrl_post.config.relations import check, relation
from jaxrl_post.config.scheduling import SCHEDULING
from jaxrl_post.parallel.devices import DEVICES

_ANALYTIC = "cluster.cost_table= and cluster.step_s=0"
_SHAPE = f"{_ANALYTIC} or cluster.bounded=true"
_DEVICE = f"{_SHAPE} or judge.place=beside|apart"
_JUDGED = "judge.place=beside|apart"
_FITTED = "workload.name=lognormal"


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Prompts and the lengths of their rollouts. `name` selects where lengths come from:

    - `rollpacker`: distributions fitted to figure 11 of the RollPacker paper.
    - `uniform`: 1 to `cap`.
    - `lognormal`: distributions given by `mean`, `tail` and `within`.
    - `trace`: the lengths in the file `path`.
    - `rollouts`: the lengths in the rollout log of the folder `path`.
    """

    name: str = one_of("rollpacker|uniform|lognormal|trace|rollouts", doc="Where lengths come from.")
    prompts: int = positive(10_000, unit="prompts", doc="Prompts of one epoch.")
    prompt_tokens: int = positive(256, unit="tokens", doc="Length of a prompt.")
    cap: int = positive(8192, unit="tokens", doc="The longest rollout.")
    mean: float = number(1000.0, 1.0, unit="tokens", used_when=_FITTED, doc="Mean length of a rollout.")
    tail: float = number(
        1.5, 1.0, unit="times mean", used_when=_FITTED, doc="The longest rollout of a group, on average."
    )
    within: float = number(
        1.0, 1e-3, 1.0, unit="share", used_when=_FITTED, doc="Part of the logarithm's variance within a prompt."
    )
    path: str = file_path("", used_when="workload.name=trace|rollouts", doc="The file or folder of the lengths.")
    tv: float = number(0.0, 0.0, 0.999, doc="Chance per token that the next version writes another one there.")


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The devices that generate, and the cost of their steps.

    The cost is `cost_table` if given, else `step_s` if given, else the analytic cost of `model` on `device`. Replicas
    with at most `draft_running` rollouts draft. Each rollout there gets `draft_tokens` tokens per step and uses
    `draft_width` additional rows.
    """

    replicas: int = positive(16, unit="replicas", doc="Replicas of the engine.")
    tensor: int = positive(1, unit="devices", doc="Devices of one replica.")
    slots: int = positive(1024, unit="slots", doc="Rollouts that one replica generates at the same time.")
    device: str = one_of(
        "|".join(DEVICES), default="h800", used_when=_DEVICE, doc="Kind of device, for cost and memory."
    )
    model: str = one_of("qwen2.5-7b|qwen2.5-14b|qwen2.5-32b", used_when=_SHAPE, doc="Model shape, for cost and memory.")
    step_s: float = number(
        0.0, unit="seconds", used_when="cluster.cost_table=", doc="What a step takes. 0: the analytic cost."
    )
    request_s: float = number(
        0.0, unit="seconds", used_when="cluster.step_s>0", doc="What each rollout in a step adds."
    )
    cost_table: str = file_path("", doc="A file of measured step costs.")
    round_s: float = number(0.0, unit="seconds", doc="What a round takes beside steps and training.")
    pace: str = one_of("lockstep|independent", doc="All replicas in one program, or each with steps of its own.")
    tick_s: float = number(
        1e-3, 1e-6, unit="seconds", used_when="cluster.pace=independent", doc="What the clock counts."
    )
    bounded: bool = any_of_type(False, doc="Whether the device's memory bounds the KV cache.")
    layouts: tuple[int, ...] = any_of_type(
        (), unit="devices per replica", doc="Further values of `tensor`, between which a planner chooses each round."
    )
    move_s: float = number(0.0, unit="seconds", used_when="cluster.layouts!=", doc="What a relayout takes.")
    collective_s: float = number(
        0.0, unit="seconds", used_when=_ANALYTIC, doc="What each doubling of `tensor` adds to a step."
    )
    draft_tokens: float = number(
        1.0, 1.0, unit="tokens", used_when="cluster.draft_running>0", doc="Tokens a step of a rollout that drafts."
    )
    draft_width: int = number(
        0, unit="rows", used_when="cluster.draft_running>0", doc="Rows more of a rollout that drafts."
    )
    draft_running: int = number(0, unit="rollouts", doc="The most that run in a replica that drafts. 0: no drafts.")


@dataclass(frozen=True, kw_only=True)
class LearnerConfig:
    """The duration of an optimizer step."""

    token_s: float = number(0.0, unit="seconds", doc="For each trained token.")
    step_s: float = number(0.0, unit="seconds", doc="For each step.")
    apart: bool = any_of_type(
        False,
        doc="Whether the learner has devices of its own, none of the cluster's, while the engine goes on with the "
        "weights before.",
    )


@dataclass(frozen=True, kw_only=True)
class JudgeConfig:
    """A judge of every rollout, and the cost of its steps: the analytic one of `model` on cluster.device."""

    place: str = one_of(
        "none|beside|apart",
        doc="Where it runs. beside: on the devices that generate, in slots that are free. apart: on devices of its own, none of "
        "the cluster's.",
    )
    replicas: int = positive(
        1, unit="replicas", used_when="judge.place=apart", doc="Its replicas, each of cluster.tensor devices."
    )
    model: str = one_of("qwen2.5-7b|qwen2.5-14b|qwen2.5-32b", used_when=_JUDGED, doc="Its shape.")
    question: int = positive(512, unit="tokens", used_when=_JUDGED, doc="Length of a question beside the response.")
    reply: float = number(256.0, 1.0, unit="tokens", used_when=_JUDGED, doc="Mean length of a reply.")


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """A scheduler over a workload, compared with synchronous rounds and with the numbers of a paper."""

    name: str = any_of_type("simulation", doc="What tables call it.")
    seed: int = number(0, doc="Seeds lengths and prompts.")
    rounds: int = positive(20, unit="rounds", doc="Length of the simulation.")
    workload: Workload = Workload()
    cluster: Cluster = Cluster()
    scheduler: config.SchedulerConfig = config.SchedulerConfig()
    learner: LearnerConfig = LearnerConfig()
    judge: JudgeConfig = JudgeConfig()
    reward_slope: float = any_of_type(0.0, unit="logits", doc="What a factor e of length adds to those of being right.")
    published: Mapping[str, Any] = mapping(doc="Figure name and number of the paper.")
    fitted: tuple[str, ...] = any_of_type((), doc="The published figures that the workload was fitted to.")
    parts: tuple[str, ...] = any_of_type(
        (),
        doc="What is added one after the other to the same simulation under synchronous rounds, each a name and "
        'overrides: "long lane: scheduler.lane=0.5".',
    )

    @property
    def replicas(self) -> int:
        return self.cluster.replicas

    @property
    def generating(self) -> int:
        """Returns the number of devices of the engine."""
        return self.cluster.replicas * self.cluster.tensor

    @property
    def sampling(self) -> config.SamplingConfig:
        """Returns sampling settings in which a rollout ends by itself or at the cap."""
        return config.SamplingConfig(max_tokens=self.workload.cap)

    def __post_init__(self):
        check(self, (*SCHEDULING, *RELATIONS), _ALIASES)


def _unknown(fitted: tuple, published: Mapping) -> list[str]:
    return sorted(set(fitted) - set(published))


def _nameless(parts: tuple) -> list[str]:
    return [part for part in parts if not all(map(str.strip, part.partition(":")))]


# Option of a run, as its rules name it -> option of this schema.
_ALIASES = {
    "engine.layouts": "cluster.layouts",
    "engine.cost_table": "cluster.cost_table",
    "mesh.replica": "cluster.tensor",
    "mesh.engine": "learner.apart",
}
RELATIONS = (
    relation(
        "scheduler.name",
        need=lambda name: name != "auto",
        says="{scheduler.name} chooses among simulations, and this is one: name the scheduler",
        nearest=lambda name: "sync",
    ),
    relation(
        "cluster.layouts",
        "cluster.step_s",
        need=lambda layouts, step_s: not (layouts and step_s),
        says="{cluster.layouts} need the analytic cost, not {cluster.step_s}: leave one of them at its default",
    ),
    relation(
        "scheduler.lend",
        need=lambda lend: lend == 0,
        says="{scheduler.lend} moves rollouts in the midst of a round, which the simulator does not: what a loan would make "
        "of each step is its lent_step_s",
        nearest=lambda lend: 0,
    ),
    relation(
        "fitted",
        "published",
        need=lambda fitted, published: not _unknown(fitted, published),
        culprit=lambda fitted, published: _unknown(fitted, published)[0],
        says="fitted={culprit} names no figure of published",
        nearest=lambda fitted, published: tuple(name for name in fitted if name in published),
    ),
    relation(
        "parts",
        need=lambda parts: not _nameless(parts),
        culprit=lambda parts: _nameless(parts)[0],
        says="parts: {culprit} must be a name, a colon and overrides, as in 'long lane: scheduler.lane=0.5'",
    ),
    relation(
        "workload.path",
        when="workload.name=trace|rollouts",
        need=bool,
        says="{workload.name} needs workload.path, the file or folder of its lengths",
    ),
)


def default() -> Any:
    """Returns every field with its default, as a ConfigDict that refuses unknown names."""
    return config.default(Simulation)


def resolve(given: Any, overrides: Sequence[str] = ()) -> Simulation:
    """Returns the simulation that `given` and `overrides` describe.

    Raises:
      ValueError: unknown name (with the nearest), wrong type, value out of range, or a broken rule.
    """
    return config.resolve(given, overrides, Simulation)
