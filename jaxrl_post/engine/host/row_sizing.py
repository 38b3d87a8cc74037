"""How many rows each step of a dispatch has, and whether it drafts: by the step-cost table, for the busiest replica."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from jaxrl_post.engine import step_cost
from jaxrl_post.engine.host import wire
from jaxrl_post.engine.host.wire import Sizes


@dataclass(frozen=True, kw_only=True)
class Demand:
    """What a dispatch has to serve.

    `running`: sequences in slots, int[replicas]. `backlog`: further rows that they need, int[replicas]. `unopened`:
    sequences without a place in the drafter's tables. `waiting`: whether sequences wait for a slot. `ends_soon`: the
    dispatch ends once a prompt is computed, so drafts are worth nothing in it."""

    running: np.ndarray
    backlog: np.ndarray
    unopened: int
    waiting: bool
    ends_soon: bool


def load(live: np.ndarray, packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns, as int[replicas] each, the sequences in slots and the further rows that they need.

    Each sequence has one row. Further rows are positions to prefill or to recompute, and candidates to verify.

    Args:
      live: which slots run, bool[replicas, S].
      packed: the matrix of the dispatch.
    """
    backlog = np.where(live, packed[..., wire.CANDIDATE_END] - packed[..., wire.NUM_COMPUTED] - 1, 0)
    return live.sum(axis=1), backlog.sum(axis=1)


def choose(
    cost: step_cost.StepCost,
    row_sizes: Sequence[int],
    sizes: Sizes,
    demand: Demand,
    worth: Callable[[int, int, int], float],
    due: bool,
) -> tuple[int, bool]:
    """Returns a row size and whether to draft.

    Args:
      worth: expected tokens a step from drafts, given rows, running sequences and free slots.
      due: drafts must be tried again now.
    """
    most = int(demand.running.max())
    behind = demand.backlog[int(np.argmax(demand.running + demand.backlog))] / sizes.steps
    free = 0 if demand.waiting else sizes.slots - most
    share = demand.unopened / (sizes.slots * sizes.replicas)
    return step_cost.best_size(
        cost,
        row_sizes,
        most,
        behind,
        lambda rows: 0.0 if demand.ends_soon else worth(rows, most, free),
        must_draft=due,
        opening=cost.opening * share / (step_cost.LASTING * sizes.steps),
    )
