"""Values of the row program: what stays on the device, what changes in each step, and what is fixed at compilation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from jaxtyping import Array

from jaxrl_post.engine import row_plan
from jaxrl_post.engine.host.wire import Sizes
from jaxrl_post.engine.speculation.interface import Drafter
from jaxrl_post.kernels import hardware
from jaxrl_post.models import decoder


class State(NamedTuple):
    """What stays on the device between dispatches, with a leading replica axis.

    cache: one Cache a layer. tokens: int32[replicas, S, T]. argmax_tokens: the likeliest token at each position,
    int32[replicas, S, T]; T = 0 without a drafter. memory: what the drafter remembers."""

    cache: tuple
    tokens: Array
    argmax_tokens: Array
    memory: Any


class Slots(NamedTuple):
    """What changes from step to step, [S] each; windows of new tokens are [S, emit]."""

    num_tokens: Array
    num_computed: Array
    candidate_end: Array
    done: Array
    logprobs: Array
    entropies: Array
    stamps: Array
    uses: Array  # [len(USES)]
    offers: Array  # [OFFERS]
    won: Array  # tokens that sequences took over from their clones


class Work(NamedTuple):
    """The rows of a step.

    plan: the row plan. position: int32[R]. candidate_end: int32[S]. forced: rows of each slot whose input token is
    settled, int32[S]. values: worth of each draft, f32[S, W]."""

    plan: row_plan.Plan
    position: Array
    candidate_end: Array
    forced: Array
    values: Array


class Heads(NamedTuple):
    """What a step found at each head row.

    counts: the sample is kept. ended: the sample ends its rollout. match: the sample equals its candidate. after: the
    sample's position. reported: log-prob, entropy and stamp of the sample."""

    counts: Array
    ended: Array
    match: Array
    after: Array
    reported: tuple


@dataclass(frozen=True, kw_only=True)
class RowProgram:
    """What is fixed when a dispatch is compiled.

    `rows`: rows of a step. `dtype`: of activations. `spread(attention)`: the same attention, run by each device on its
    own part. `platforms`: those whose kernels may be used."""

    rows: int
    sizes: Sizes
    config: decoder.ModelConfig
    dtype: Any
    drafter: Drafter
    spread: Callable
    platforms: frozenset[str] = hardware.PLATFORMS
