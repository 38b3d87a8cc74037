"""The judge of a run (judge.model): the settings of its engine, and a hash of its weights.

Invariant: its engine has the slots, row sizes and number format of the run's, so that a question takes the place of a
rollout. Its replies are as long as the options of the judge say.
"""

from __future__ import annotations

from pathlib import Path

import jax

from jaxrl_post import config as configs
from jaxrl_post.checkpoint import identity
from jaxrl_post.json_text import of_hub
from jaxrl_post.launch.handed import OWN
from jaxrl_post.models import hf

_ENGINE = ("slots", "page_size", "row_sizes", "prompt_rows", "steps_per_dispatch", "refill_slots", "dtype")
_ANY_BATCH = 1 << 30  # tokens: no batch is made, so none may be too small


def settings(config: configs.Config) -> configs.Config:
    """Returns the settings of the judge's engine.

    Raises:
      ValueError: there is no such model, or it is a reward model.
    """
    about, place = config.judge, Path(config.judge.model)
    if not (place / "config.json").is_file():
        raise ValueError(
            f"judge.model={about.model}: there is no such folder with a config.json{of_hub(place)}; name a policy, for example RUN/policy"
        )
    if hf.read_config(place / "config.json").scalar:
        raise ValueError(f"judge.model={about.model} is a reward model, which writes no reply; name it in reward.model")
    values = {
        "model": {"path": about.model},
        "mesh": {"data": config.replicas, "tensor": config.mesh.replica},
        "engine": {name: getattr(config.engine, name) for name in _ENGINE} | {"max_length": about.max_length},
        "sampling": {"max_tokens": about.max_tokens},
        "batch": {"tokens": _ANY_BATCH},
        "data": {"train": f"{OWN}questions", "date": config.data.date},
        "reward": {"functions": ()},
        "eval": {"prompts": 0},
    }
    return configs.resolve(values, (), platform=jax.default_backend())


def digest(config: configs.Config) -> dict[str, str]:
    """Returns a hash of the judge's files by a name for it; empty where there is none."""
    return {"judge.model": identity.weights(Path(config.judge.model))} if config.judge.model else {}
