"""Opens a policy: a Hugging Face directory, a llama2.c file, the folder of a run, or a step that a run saved.

A policy of a run gets the engine and sampling options of that run, so that its bits are the run's, and its rewards.
Others get defaults, and no rewards.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrl_post import config as configs
from jaxrl_post.checkpoint import store
from jaxrl_post.launch import inputs
from jaxrl_post.launch.handed import OWN
from jaxrl_post.launch.policy import Policy
from jaxrl_post.models import decoder, hf
from jaxrl_post.parallel.processes import say

# What a run's options say of how its engine generates. The others say how it trains.
_ENGINE = (
    "slots",
    "max_length",
    "page_size",
    "pages",
    "row_sizes",
    "prompt_rows",
    "head_rows",
    "steps_per_dispatch",
    "refill_slots",
    "dtype",
    "cost_table",
)
_COLUMNS = ("format", "columns", "template", "chat", "source")
_GRADING = ("functions", "weights", "timeout_s", "test_limit_s", "sandbox")
_ANY_BATCH = 1 << 30  # tokens: no batch is made, so none may be too small


def load(path: str | Path, overrides: Sequence[str] = (), **options: Any) -> Policy:
    """Opens a policy.

    Args:
      path: a Hugging Face directory, a llama2.c file, RUN for the policy that a run ended with, or RUN@STEP for the
        weights of a saved step.
      overrides: options of a config as `a.b=value`, for example "engine.max_length=4096" or "mesh.tensor=2".
      options: the same as keywords, with "__" for each dot.

    Raises:
      ValueError: there is no policy, or an option does not fit.
    """
    values, step = _found(str(path))
    configs.assign(values, options)
    values.setdefault("batch", {})["tokens"] = _ANY_BATCH
    config = configs.resolve(values, overrides, platform=jax.default_backend())
    files = inputs.policy(config)
    return Policy(config, files if step is None else _of_step(files, *step))


def _found(path: str) -> tuple[dict, tuple[Path, int] | None]:
    """Returns the options of a policy, and the run and step of its weights if they are a saved step's."""
    configs.refuse_url(path, "policy")
    folder, at, number = path.rpartition("@")
    if not at or Path(path).exists():
        folder, number = path, ""
    place, told = Path(folder), _run(Path(folder))
    if number:
        if told is None:
            raise ValueError(f"policy: {folder} is no folder of a run, so that {path} names no saved step")
        if not number.isdecimal():
            raise ValueError(f"policy: {path}: the step behind @ must be a whole number, got {number!r}")
        return _options(told, told["model"]), (place, int(number))
    if told is not None:
        place = place / "policy"
        if not (place / "config.json").is_file():
            raise ValueError(f"policy: {folder} has not ended and has no policy yet; {_steps(Path(folder))}")
    elif not place.exists():
        raise ValueError(f"policy: there is no folder or file {path}; name a model's directory, RUN or RUN@STEP")
    else:
        told = _run(place.parent) if place.name == "policy" else None
    return _options(told, {"path": str(place)}) if told else _defaults(place), None


def _run(folder: Path) -> dict | None:
    """Returns the config of a run's folder, or None where it is no such folder."""
    file = folder / "config.json"
    if not file.is_file():
        return None
    try:
        told = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"policy: {file} cannot be read: {error}") from error
    return told if isinstance(told, dict) and {"engine", "scheduler", "model"} <= told.keys() else None


def _options(told: Mapping, model: Mapping) -> dict[str, Any]:
    """Returns the options of a run that its policy keeps."""
    engine, tensor = told["engine"], told["mesh"]["engine_tensor"] or told["mesh"]["tensor"]
    return {
        "seed": told["seed"],
        "model": {name: model[name] for name in ("path", "preset", "tokenizer") if name in model},
        "engine": {name: engine[name] for name in _ENGINE if name in engine},
        "sampling": dict(told["sampling"]),
        "mesh": {"tensor": tensor} if tensor <= jax.device_count() else {},
        "data": {name: told["data"][name] for name in _COLUMNS} | {"train": f"{OWN}rows"},
        "reward": {name: value for name, value in told["reward"].items() if name in _GRADING},
        "eval": {"prompts": 0},
    }


def _defaults(place: Path) -> dict[str, Any]:
    """Returns options that fit a model of any length."""
    length = 512
    if place.is_dir() and (place / "config.json").is_file():
        length = min(length, hf.read_config(place / "config.json").max_length)
    return {
        "model": {"path": str(place)},
        "engine": {"max_length": length},
        "sampling": {"max_tokens": min(256, length - 1)},
        "data": {"train": f"{OWN}rows"},
        "reward": {"functions": ()},
        "eval": {"prompts": 0},
    }


def _of_step(files: inputs.PolicyFiles, run: Path, step: int) -> inputs.PolicyFiles:
    """Returns the files with the weights of a saved step."""
    saved = store.Checkpoints(run / "checkpoints", keep_last=2, say=say).before(step + 1)
    if saved is None or saved.step != step:
        raise ValueError(f"policy: {run} has no whole step {step}; {_steps(run)}")

    def read(shardings: Any) -> Any:
        like = jax.tree.map(
            lambda x, home: jax.ShapeDtypeStruct(x.shape, np.float32, sharding=home),
            decoder.abstract(files.model),
            shardings,
        )
        return saved.part(like, "params.policy")

    return dataclasses.replace(files, load_params=read)


def _steps(run: Path) -> str:
    there = store.Checkpoints(run / "checkpoints", keep_last=2, say=say).steps()
    return f"its saved steps are {', '.join(map(str, there))}: write {run}@{there[-1]}" if there else "it saved no step"
