"""The weights that the training of a reward model starts from: a policy's with a head of zeros, or a reward model's own.

A reward model is a decoder whose head gives each token one number. That of the last token is the reward of the text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from jaxrl_post.config import Config
from jaxrl_post.models import decoder
from jaxrl_post.parallel import mesh as meshes


def headed(config: Config, model: decoder.ModelConfig) -> decoder.ModelConfig:
    """Returns the shape that a run trains from the shape of its files: that of a reward model, or of a policy.

    Raises:
      ValueError: a policy is needed, and the files are a reward model.
    """
    if config.algorithm.trains_reward_model:
        return replace(model, scalar=True)
    if model.scalar:
        raise ValueError(
            f"model.path={config.model.path} is a reward model, which writes no tokens: name a policy, or train it further with "
            "algorithm.loss_mode='bradley_terry'"
        )
    return model


def started(files: decoder.ModelConfig, model: decoder.ModelConfig, load: Callable[..., Any]) -> Callable[..., Any]:
    """Returns what loads the weights of `model` from files of the shape `files`, as `load` loads those.

    Scores of tokens are left out, and a new scalar head is 0. So every first reward is 0.
    """
    if files.scalar == model.scalar:
        return load

    def read(shardings: Any, dtype: Any = np.float32) -> Any:
        trunk = {name: home for name, home in shardings.items() if name != "score"}
        left_out = {} if files.tied else {"head": shardings["embed"]}
        params = load(trunk | left_out, dtype)
        head = np.zeros((model.embed, 1), jax.tree.leaves(params)[0].dtype)
        return {name: params[name] for name in trunk} | {"score": meshes.put(head, shardings["score"])}

    return read


def folder(model: decoder.ModelConfig) -> str:
    """Returns the name of the folder in which a run leaves its model."""
    return "reward_model" if model.scalar else "policy"
