"""The teacher of a run: the folder that it comes from, and what is refused of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_post.config import Config
from jaxrl_post.data import tokenizer
from jaxrl_post.json_text import of_hub
from jaxrl_post.launch import second_model
from jaxrl_post.models import decoder, hf
from jaxrl_post.models.presets import published
from jaxrl_post.trainer.teacher import Teacher


def teacher(
    config: Config,
    model: decoder.ModelConfig,
    mesh: jax.sharding.Mesh,
    attention: Callable[[decoder.ModelConfig], Callable | None],
    plans: bool,
) -> Teacher:
    """Builds the teacher of a run.

    Args:
      model: of the policy.
      attention: from a model to the devices' kernel for packed rows, or None.
      plans: the teacher gets shapes in the place of weights.

    Raises:
      ValueError: teacher.path holds no weights of the shape that its config.json says.
    """
    own, dtype = shape(config, model), jnp.dtype(config.teacher.dtype)

    def load(shardings: Any) -> Any:
        return hf.load(config.teacher.path, dtype=dtype, shardings=shardings)[1]

    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), decoder.abstract(own))
    return Teacher(own, shapes if plans else load, mesh, attention(own))


def shape(config: Config, model: decoder.ModelConfig) -> decoder.ModelConfig:
    """Returns the teacher's shape, with the rows that the policy's tokenizer uses.

    It is that of teacher.path, where that is here, or of the published model that the path's last name says.

    Raises:
      ValueError: nothing says the shape.
    """
    path = Path(config.teacher.path)
    there = (path / "config.json").is_file()
    found = hf.read_config(path / "config.json") if there else published(path.name)
    if found is None:
        raise ValueError(
            f"teacher.path={config.teacher.path}: no such folder with a config.json{of_hub(path)}; a teacher is a Hugging Face directory, "
            "such as the policy/ of a run"
        )
    used = model.used_vocab or model.vocab_size
    return dataclasses.replace(found, used_vocab=used if used < found.vocab_size else 0)


def check(config: Config, words: tokenizer.Tokenizer) -> None:
    """Refuses a run's teacher that is not here, reads other tokens than the policy, or is too short for its rollouts.

    Args:
      words: the policy's tokenizer.

    Raises:
      ValueError: one sentence with the first difference.
    """
    if not config.algorithm.needs_teacher:
        return
    second_model.opened("teacher.path", config.teacher.path, words, config.engine.max_length, kind="a teacher")


def refuse_whole_hosts(config: Config) -> None:
    """Refuses a teacher where whole processes learn and whole processes generate.

    Raises:
      ValueError: with what works instead.
    """
    if config.algorithm.needs_teacher:
        raise ValueError(
            f"teacher.path={config.teacher.path} does not work where whole hosts learn and whole hosts generate; the nearest "
            "valid mesh.engine is 0"
        )
