"""Records of the journal of scores as a scored group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from jaxrl_post.rewards import digest
from jaxrl_post.types import Group


def scored(group: Group, records: Sequence[Mapping], shuffle_seed: int | None = None) -> Group:
    """Returns the group with the rewards of one record for each of its rollouts.

    Args:
      shuffle_seed: permutes the scores of training rollouts, a control from which nothing can be learned. None: they
        stay. Components are not permuted.
    """
    rewards = np.array([record["reward"] for record in records], np.float64)
    known = np.array([record["scored"] for record in records], bool)
    names = dict.fromkeys(name for record in records for name in record["components"])
    components = {name: np.array([record["components"].get(name, np.nan) for record in records]) for name in names}
    if shuffle_seed is not None:
        _permute(group, rewards, known, shuffle_seed)
    return Group(prompt=group.prompt, rollouts=group.rollouts, rewards=rewards, scored=known, components=components)


def _permute(group: Group, rewards: np.ndarray, known: np.ndarray, seed: int) -> None:
    """Permutes scored training rewards in place. Position i gets the score of the i-th smallest hash."""
    places = [i for i, rollout in enumerate(group.rollouts) if known[i] and rollout.id.purpose == "train"]
    order = sorted(places, key=lambda i: digest.of_parts(seed, group.prompt.id, group.rollouts[i].id.epoch, i))
    rewards[places] = rewards[order]
