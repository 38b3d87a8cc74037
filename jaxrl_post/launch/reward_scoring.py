"""The reward model that scores a run's rollouts (reward.model): its files, checked before anything is compiled, and its scorer."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_post.config import Config
from jaxrl_post.data import tokenizer
from jaxrl_post.launch import second_model
from jaxrl_post.launch.second_model import SecondModel
from jaxrl_post.models import hf
from jaxrl_post.trainer import reward_scorer


def files(config: Config, words: tokenizer.Tokenizer) -> SecondModel | None:
    """Returns the run's reward model, or None where it has none. `words`: the policy's tokenizer.

    Raises:
      ValueError: the folder holds no reward model, or one whose tokens or positions do not fit the policy's.
    """
    if not config.reward.model:
        return None
    longest = config.engine.max_length
    return second_model.opened("reward.model", config.reward.model, words, longest, kind="a reward model", scalar=True)


def scorer(config: Config, own: SecondModel, mesh: jax.sharding.Mesh) -> reward_scorer.RewardScorer:
    """Loads a reward model onto the engine's mesh, in the engine's dtype, and compiles it.

    Raises:
      ValueError: its weights are wrong, or on this device a score depends on the texts beside it.
    """

    def load(shardings: Any, dtype: Any) -> Any:
        return hf.load(own.place, dtype=dtype, shardings=shardings)[1]

    made = reward_scorer.RewardScorer(
        own.model, load, mesh, longest=config.engine.max_length, dtype=jnp.dtype(config.engine.dtype)
    )
    if not made.keeps_bits():
        raise ValueError(
            f"reward.model={config.reward.model}: on this device the bits of a score depend on the texts that are scored beside it, "
            "so that a run could not be repeated; leave it empty"
        )
    return made


def temporaries(config: Config, own: SecondModel, mesh: jax.sharding.Mesh) -> int:
    """Returns the bytes of temporary memory that the program needs on a device."""
    program, shapes = reward_scorer.scoring(
        own.model, mesh, reward_scorer.tiled(config.engine.max_length), jnp.dtype(config.engine.dtype)
    )
    return program.lower(*shapes).compile().memory_analysis().temp_size_in_bytes
