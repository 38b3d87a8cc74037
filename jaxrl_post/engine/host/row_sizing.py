"""How many rows a dispatch takes per step, and whether it drafts: by the step-cost table, for the busiest replica."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from jaxrl_post.engine import step_cost
from jaxrl_post.engine.host.sequence import Live
from jaxrl_post.engine.host.wire import Sizes


def load(lives: Sequence[Live], replicas: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns int[replicas] running rollouts, and int[replicas] tokens that are to be computed again."""
    running, backlog = np.zeros(replicas, int), np.zeros(replicas, int)
    for live in lives:
        running[live.request.replica] += 1
        backlog[live.request.replica] += live.known - live.filled - 1 + len(live.guesses)
    return running, backlog


def choose(
    cost: step_cost.StepCost,
    row_sizes: Sequence[int],
    sizes: Sizes,
    running: np.ndarray,
    backlog: np.ndarray,
    worth: Callable[[int, int, int], float],
    due: bool,
    unopened: int,
    waiting: bool,
    ends_soon: bool,
) -> tuple[int, bool]:
    """Returns a row size and whether to draft.

    Args:
      worth: tokens per step that drafts add, given rows, running rollouts and free slots.
      due: drafts must be tried again now.
      unopened: rollouts whose prompt has no place in the draft tables yet.
      waiting: whether requests wait for a slot.
      ends_soon: the dispatch ends once a prompt is computed, so it does not draft unless it must.
    """
    most, behind = int(running.max()), backlog[int(np.argmax(running + backlog))] / sizes.steps
    free = 0 if waiting else sizes.slots - most
    share = unopened / (sizes.slots * sizes.replicas)
    return step_cost.best_size(
        cost,
        row_sizes,
        most,
        behind,
        lambda rows: 0.0 if ends_soon else worth(rows, most, free),
        must_draft=bool(due),
        opening=cost.opening * share / (step_cost.LASTING * sizes.steps),
    )
