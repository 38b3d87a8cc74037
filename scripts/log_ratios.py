"""How far the learner's log-probs are from those of an engine on the same weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import engine_lab as lab
import numpy as np

from jaxrl_post import config
from jaxrl_post.kernels import eight_bits
from jaxrl_post.models.model_config import EightBits, ModelConfig
from jaxrl_post.parallel import mesh
from jaxrl_post.ring.types import Group
from jaxrl_post.trainer.learner import Learner, LearnerSettings


def pairs(
    model: ModelConfig,
    params: Any,
    *,
    count: int = 48,
    temperature: float = 1.0,
    rounds: str = eight_bits.AUTO,
    formats: Mapping[str, str] | None = None,
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns (learner, engine) log-probs of the tokens of each rollout.

    Args:
      count: of rollouts, four of each prompt.
      rounds: the format to which the learner rounds matrices. formats: `weights` and `kv` of the engine.
    """
    asked = lab.requests(
        count, samples=4, longest=60, longest_prompt=30, vocab=model.vocab_size, temperatures=(temperature,)
    )
    found = lab.run(lab.engine(params, model, **(formats or {})), asked)
    bits = None if rounds == eight_bits.AUTO else EightBits(rounds, stored=False)
    learner = Learner(
        dataclasses.replace(model, eight_bits=bits),
        params,
        mesh.make_mesh(),
        LearnerSettings(
            algorithm=config.AlgorithmConfig(),
            optimizer=config.OptimizerConfig(),
            batch=config.BatchConfig(rows=4, tokens=128),
            temperature=temperature,
            steps=1,
            max_tokens=60,
        ),
    )
    groups = [
        Group(
            prompt=asked[at].prompt,
            rollouts=tuple(found[request.rollout_id] for request in asked[at : at + 4]),
            rewards=np.zeros(4),
            scored=np.ones(4, bool),
        )
        for at in range(0, count, 4)
    ]
    scored = learner.logprobs(groups)
    return [(scored[name], rollout.logprobs) for name, rollout in found.items()]
