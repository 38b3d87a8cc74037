"""The weights that a critic starts from: the policy's, or those of a folder with a model of the same shape."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax

from jaxrl_post.config import Config
from jaxrl_post.json_text import of_hub
from jaxrl_post.models import decoder, hf
from jaxrl_post.trainer.critic import Critic
from jaxrl_post.trainer.state import is_abstract


def critic(config: Config, model: decoder.ModelConfig, params: Any, mesh: jax.sharding.Mesh) -> Critic:
    """Builds the critic of a run.

    Args:
      params: the policy's weights, or their shapes for a critic that only plans.

    Raises:
      ValueError: critic.path is no folder with a decoder of the policy's shape.
    """
    start = params
    if config.critic.path:
        check(config, model)
        if not is_abstract(params):
            start = _read(config.critic.path)
    return Critic(model, start, mesh, settings=config.critic, optimizer=config.optimizer, steps=config.steps)


def refuse_whole_hosts(config: Config) -> None:
    """Refuses a critic where whole processes learn and whole processes generate.

    Raises:
      ValueError: the run has a critic, or moves the coefficient of the KL.
    """
    for name, set_here in (
        (f"algorithm.adv_estimator={config.algorithm.adv_estimator!r}", config.algorithm.needs_critic),
        (f"algorithm.kl_target={config.algorithm.kl_target}", config.algorithm.kl_target > 0),
    ):
        if set_here:
            raise ValueError(
                f"{name} keeps state that processes without the learner's devices do not have, and with this mesh.engine "
                "whole processes generate; the nearest valid mesh.engine is 0"
            )


def check(config: Config, model: decoder.ModelConfig) -> None:
    """Refuses a folder that is not there, or whose decoder has another shape than the policy's.

    Raises:
      ValueError: one sentence with the first difference.
    """
    path = Path(config.critic.path)
    if not (path / "config.json").is_file():
        raise ValueError(
            f"critic.path={config.critic.path}: no such folder with a config.json{of_hub(path)}; leave it empty to start from the policy's "
            "weights"
        )
    there = dataclasses.asdict(hf.read_config(path / "config.json"))
    for name, here in dataclasses.asdict(model).items():
        if name not in ("tied", "used_vocab", "family") and there[name] != here:
            raise ValueError(
                f"critic.path={config.critic.path}: its decoder has {name}={there[name]}, the policy has {here}; the critic has "
                "the policy's shape"
            )


def _read(path: str) -> Any:
    """Returns a function from the policy's shardings to the folder's weights, without its head."""

    def load(shardings: Any) -> Any:
        tied = hf.read_config(Path(path) / "config.json").tied
        asked = {name: home for name, home in shardings.items() if name != "head"}
        if not tied:
            asked["head"] = shardings.get("head", shardings["embed"])
        return hf.load(path, shardings=asked)[1]

    return load
