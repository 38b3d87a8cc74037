"""The reward model that scores a run's rollouts (reward.model): its files, checked before anything is compiled, and its scorer."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_post.config import Config
from jaxrl_post.data import tokenizer
from jaxrl_post.models import decoder, hf
from jaxrl_post.trainer import reward_scorer


@dataclass(frozen=True, kw_only=True)
class RewardFiles:
    """A reward model on this machine: its folder and its shape."""

    place: Path
    model: decoder.ModelConfig


def files(config: Config, words: tokenizer.Tokenizer) -> RewardFiles | None:
    """Returns the run's reward model, or None where it has none. `words`: the policy's tokenizer.

    Raises:
      ValueError: the folder holds no reward model, or one whose tokens or positions do not fit the policy's.
    """
    if not config.reward.model:
        return None
    place, named = Path(config.reward.model), f"reward.model={config.reward.model}"
    if not (place / "config.json").is_file():
        raise ValueError(
            f"{named}: there is no such folder with a config.json; name RUN/reward_model, or leave it empty"
        )
    model = hf.read_config(place / "config.json")
    if not model.scalar:
        raise ValueError(
            f"{named} is a policy: a reward model's architecture is ...ForSequenceClassification; train one with "
            "algorithm.loss_mode='bradley_terry'"
        )
    if _vocabulary(tokenizer.load(tokenizer.beside(place))) != _vocabulary(words):
        raise ValueError(
            f"{named} has other tokens than the policy, whose rollouts it is given; name one of the same tokenizer"
        )
    if config.engine.max_length > model.max_length:
        raise ValueError(
            f"engine.max_length={config.engine.max_length} is beyond the {model.max_length} positions of {named}; the nearest valid "
            f"value is {model.max_length}"
        )
    return RewardFiles(place=place, model=model)


def _vocabulary(words: tokenizer.Tokenizer) -> Any:
    """Returns the piece of text of each token id."""
    return words.model.get_vocab() if isinstance(words, tokenizer.JsonTokenizer) else words.pieces


def digest(own: RewardFiles | None) -> dict[str, str]:
    """Returns a hash of the reward model's config and weights, by a name for it; empty where there is none."""
    if own is None:
        return {}
    whole = hashlib.blake2b(digest_size=16)
    for file in (own.place / "config.json", *sorted(own.place.glob("*.safetensors"))):
        with open(file, "rb") as read:
            whole.update(hashlib.file_digest(read, "blake2b").digest())
    return {"reward.model": whole.hexdigest()}


def scorer(config: Config, own: RewardFiles, mesh: jax.sharding.Mesh) -> reward_scorer.RewardScorer:
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


def temporaries(config: Config, own: RewardFiles, mesh: jax.sharding.Mesh) -> int:
    """Returns the bytes of temporary memory that the program needs on a device."""
    program, shapes = reward_scorer.scoring(
        own.model, mesh, reward_scorer.tiled(config.engine.max_length), jnp.dtype(config.engine.dtype)
    )
    return program.lower(*shapes).compile().memory_analysis().temp_size_in_bytes
