"""Opens a policy: a Hugging Face directory, a llama2.c file, an adapter of PEFT, the folder of a run, or a step of a run.

A policy of a run gets the engine and sampling options of that run, so that its bits are the run's, and its rewards.
Others get defaults, and no rewards.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrl_post import config as configs
from jaxrl_post.data.columns import COMPLETION
from jaxrl_post.launch.parts import adapter, build, inputs
from jaxrl_post.launch.parts.policy import Policy
from jaxrl_post.launch.parts.python_inputs import OWN
from jaxrl_post.models import decoder, hf, lora, peft
from jaxrl_post.parallel import mesh as meshes
from jaxrl_post.ring.json_text import of_hub, shown
from jaxrl_post.runs import run_folder
from jaxrl_post.runs.checkpoint import store

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
    "weights",
    "kv",
    "products",
)
# Sections of a config that a policy reads, and `seed`.
READ = ("data", "engine", "lora", "mesh", "model", "reward", "sampling", "seed")
_COLUMNS = (
    "format",
    "columns",
    "template",
    "chat",
    "system_prompt",
    "chat_template_kwargs",
    "date",
    "source",
    "duplicates",
)
_GRADING = ("functions", "weights", "timeout_s", "test_limit_s", "sandbox")
_ANY_BATCH = 1 << 30  # tokens: no batch is made, so none may be too small


def load(path: str | Path, overrides: Sequence[str] = (), **options: Any) -> Policy:
    """Opens a policy.

    Args:
      path: a Hugging Face directory, a llama2.c file, or a directory of PEFT whose base is here. RUN is the policy that
        a run ended with, RUN@STEP that of a saved step. Low-rank additions are merged.
      overrides: options of a config as `a.b=value`, for example "engine.max_length=4096" or "mesh.tensor=2".
      options: the same as keywords, with "__" for each dot.

    Raises:
      ValueError: there is no policy, or an option does not fit.
    """
    return Policy(*files(path, overrides, READ, **options))


def files(
    path: str | Path, overrides: Sequence[str] = (), sections: Sequence[str] = (), **options: Any
) -> tuple[configs.Config, inputs.PolicyFiles]:
    """Returns the options and the files of a policy. Arguments and errors are those of `load`.

    `sections`: those whose options may be given, where an option of another section would change nothing. Empty: any.
    """
    if sections:
        _check_read((*overrides, *options), sections)
    values, weights = _found(str(path))
    configs.assign(values, options)
    values.setdefault("batch", {})["tokens"] = _ANY_BATCH
    config = configs.resolve(values, overrides, platform=jax.default_backend())
    return config, weights(config, inputs.policy(config))


def started(
    run: str | Path, overrides: Sequence[str] = (), model: str = ""
) -> tuple[configs.Config, inputs.PolicyFiles]:
    """Returns the options of a run, and the files of the weights that it begins with.

    Args:
      model: a Hugging Face directory or a llama2.c file that stands for the model of the run; empty: the run's own.

    Raises:
      ValueError: there is no such run, or its model is not here.
    """
    _check_read(overrides, READ)
    configs.refuse_url(str(run), "run")
    run_config = _run(Path(run))
    if run_config is None:
        raise ValueError(f"run: {run} is no folder of a run: it has no config.json of one")
    values = _options(run_config, {"path": model} if model else run_config["model"])
    values["lora"] = {name: value for name, value in run_config.get("lora", {}).items() if name != "adapter"}
    values["batch"] = {"tokens": _ANY_BATCH}
    config = configs.resolve(values, overrides, platform=jax.default_backend())
    return config, inputs.policy(config)


def _check_read(given: Sequence[str], sections: Sequence[str]) -> None:
    """Raises a ValueError about the first option that exists and is of another section."""
    known = {field.name for field in dataclasses.fields(configs.Config)}
    for option in given:
        section = option.partition("=")[0].replace("__", ".").partition(".")[0]
        if section in known and section not in sections:
            raise ValueError(
                f"policy: the option {shown(option, 80)} changes nothing here; a policy reads those of "
                f"{', '.join(sections[:-1])} and {sections[-1]}"
            )


def of_step(run: str | Path, step: int, config: configs.Config, files: inputs.PolicyFiles) -> inputs.PolicyFiles:
    """Returns the files of a run with the weights of a saved step.

    Raises:
      ValueError: there is no whole step of this number.
    """
    saved = _saved(Path(run), step)
    if config.lora.rank:
        model = adapter.adapting(config.lora, files.model)
        load = adapter.merged(files.load_params, config.lora, model, adapter.of_step(saved, model))
        return dataclasses.replace(files, load_params=load)

    def read(shardings: Any) -> Any:
        like = jax.tree.map(
            lambda x, home: jax.ShapeDtypeStruct(x.shape, np.float32, sharding=home),
            decoder.abstract(files.model),
            shardings,
        )
        return saved.part(like, "params.policy")

    return dataclasses.replace(files, load_params=read)


def newest_step(run: str | Path, above: int) -> int | None:
    """Returns the newest saved step of a run that is above a number, whole or not, or None.

    Raises:
      OSError: the folder of the run is not there, or cannot be read.
    """
    if not Path(run).is_dir():
        raise FileNotFoundError(f"there is no folder {run}")
    return max((step for step in store.read_only(Path(run)).steps() if step > above), default=None)


def write_merged(path: str, out: str, dtype: str = "", overrides: Sequence[str] = ()) -> None:
    """Writes a policy as a Hugging Face directory. `dtype`: empty: that of the model's own files."""
    config, own = files(path, overrides, READ)
    shardings = meshes.param_shardings(build.device_plan(config).first, decoder.axes(own.model), "engine")
    hf.save(
        out,
        own.model,
        own.load_params(shardings),
        dtype=dtype or own.dtype,
        tokenizer_files=own.files,
        eos_ids=own.tokenizer.eos_ids,
        bos_id=own.tokenizer.bos_id,
        others=own.others,
    )


def write_adapter(path: str, out: str) -> None:
    """Writes a policy's low-rank additions in PEFT's format.

    Args:
      path: RUN, RUN@STEP, or a directory of PEFT whose base is here.

    Raises:
      ValueError: the policy has no additions.
    """
    run, at, step = path.rpartition("@")
    if at and not Path(path).exists():
        config, own = files(path)
        if not config.lora.rank:
            raise ValueError(f"export: the run of {path} has lora.rank=0, so it has no adapter")
        model = adapter.adapting(config.lora, own.model)
        homes = meshes.param_shardings(meshes.make_mesh(), lora.axes(model).adapter, "engine")
        found, name = adapter.of_saved(_saved(Path(run), int(step)), model, homes), adapter.base_name(config)
    else:
        place = Path(path) / "adapter" if _run(Path(path)) else Path(path)
        if place.parent == Path(path) and not place.is_dir():
            raise ValueError(f"export: {path} holds no adapter: its run has not ended, or lora.rank was 0")
        given, name = peft.read(place)
        model = lora.adapting(files(place)[1].model, given)
        found = peft.load(place, model)
    peft.save(out, model, found, base=name)


Weights = Callable[[configs.Config, inputs.PolicyFiles], inputs.PolicyFiles]  # gives files the weights of a policy


def _found(path: str) -> tuple[dict, Weights]:
    """Returns the options of a policy, and what gives its files their weights."""
    configs.refuse_url(path, "policy")
    folder, at, number = path.rpartition("@")
    if not at or Path(path).exists():
        folder, number = path, ""
    place, run_config = Path(folder), _run(Path(folder))
    if run_config is not None and run_config.get("algorithm", {}).get("loss_mode") == "bradley_terry":
        raise ValueError(
            f"policy: the run {folder} trains a reward model, which writes no tokens; name the run of a policy"
        )
    if number:
        if run_config is None:
            raise ValueError(f"policy: {folder} is no folder of a run, so that {path} names no saved step")
        if not number.isdecimal():
            raise ValueError(f"policy: {path}: the step behind @ must be a whole number, got {number!r}")
        added = {name: value for name, value in run_config.get("lora", {}).items() if name != "adapter"}
        return _options(run_config, run_config["model"]) | {"lora": added}, functools.partial(
            of_step, place, int(number)
        )
    if run_config is not None:
        place = place / "policy"
        if not (place / "config.json").is_file():
            raise ValueError(f"policy: {folder} has not ended and has no policy yet; {_steps(Path(folder))}")
    elif not place.exists():
        raise ValueError(
            f"policy: there is no folder or file {path}{of_hub(path)}; name a model's directory, RUN or RUN@STEP"
        )
    else:
        run_config = _run(place.parent) if place.name in ("policy", "adapter") else None
    weights: Weights = _own
    if (place / peft.CONFIG).is_file():
        place, weights = _base(place), functools.partial(_of_adapter, place)
    return _options(run_config, {"path": str(place)}) if run_config else _defaults(place), weights


def _own(config: configs.Config, files: inputs.PolicyFiles) -> inputs.PolicyFiles:
    """Returns the files with the weights that lie beside them."""
    return files


def _base(adapter: Path) -> Path:
    """Returns the base of an adapter, a directory or file that is here."""
    _, named = peft.read(adapter)
    for place in (Path(named), adapter / named):
        if place.exists():
            return place
    raise ValueError(
        f"policy: {adapter / peft.CONFIG} names the base {named!r}, and there is no such folder or file here; write the "
        "path of the base there, as base_model_name_or_path"
    )


def _of_adapter(directory: Path, config: configs.Config, files: inputs.PolicyFiles) -> inputs.PolicyFiles:
    """Returns the files with weights of the base into which an adapter of PEFT is merged."""
    model, given = lora.adapting(files.model, peft.read(directory)[0]), configs.LoraConfig()
    read = adapter.of_directory(str(directory), model)
    peft.matched(directory, model)
    return dataclasses.replace(files, load_params=adapter.merged(files.load_params, given, model, read))


def _run(folder: Path) -> dict | None:
    """Returns the config of a run's folder, or None where it is no such folder."""
    run_config = run_folder.read_config(folder, "policy")
    return run_config if run_config is not None and {"engine", "scheduler", "model"} <= run_config.keys() else None


def _options(run_config: Mapping, model: Mapping) -> dict[str, Any]:
    """Returns the options of a run that its policy keeps."""
    engine, own = run_config["engine"], run_config["mesh"]
    tensor, expert = (own.get(f"engine_{axis}") or own.get(axis, 1) for axis in ("tensor", "expert"))
    return {
        "seed": run_config["seed"],
        "model": {name: model[name] for name in ("path", "preset", "tokenizer") if name in model},
        "engine": {name: engine[name] for name in _ENGINE if name in engine},
        "sampling": dict(run_config["sampling"]),
        "mesh": {"tensor": tensor, "expert": expert} if tensor * expert <= jax.device_count() else {},
        "data": _reading(run_config["data"]) | {"train": f"{OWN}rows"},
        "reward": _rewards(run_config),
        "eval": {"prompts": 0},
    }


def _reading(data: Mapping) -> dict[str, Any]:
    """Returns how a run reads prompts. The column of written completions is read in training alone."""
    found = {name: data[name] for name in _COLUMNS if name in data}
    return found | {"columns": {role: name for role, name in data["columns"].items() if role != COMPLETION}}


def _rewards(run_config: Mapping) -> dict[str, Any]:
    """Returns the options of a run's rewards. A run in an environment has none: its scores are of conversations."""
    if run_config.get("environment", {}).get("name"):
        return {"functions": ()}
    return {name: value for name, value in run_config["reward"].items() if name in _GRADING}


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


def _saved(run: Path, step: int) -> store.Saved:
    saved = store.read_only(run).before(step + 1)
    if saved is None or saved.step != step:
        raise ValueError(f"policy: {run} has no whole step {step}; {_steps(run)}")
    return saved


def _steps(run: Path) -> str:
    there = store.read_only(run).steps()
    return f"its saved steps are {', '.join(map(str, there))}: write {run}@{there[-1]}" if there else "it saved no step"
