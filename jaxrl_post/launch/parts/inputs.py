"""What a run starts from: the model's weights, its tokenizer, the training prompts and the held-out ones.

Invariant: everything here is host data and is the same in every process. Held-out prompts share no id with training
prompts. It refuses a tokenizer that the model has no rows for, and a prompt that leaves no room for a rollout.
"""

from __future__ import annotations

import dataclasses
import datetime
import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrl_post.config import Config, fields
from jaxrl_post.data import chat, ends, messages, prompts, tasks
from jaxrl_post.data import tokenizer as tokenizers
from jaxrl_post.data.prompts import measured
from jaxrl_post.engine import step_cost as cost
from jaxrl_post.engine.step_cost import StepCost
from jaxrl_post.launch.parts import adapter, completions, environments, second_models, sources
from jaxrl_post.launch.parts.python_inputs import NOTHING, PythonInputs
from jaxrl_post.launch.parts.second_models import SecondModel
from jaxrl_post.models import decoder, hf, llama2c, text_part
from jaxrl_post.models.presets import PRESETS, published
from jaxrl_post.parallel import exchange, mesh
from jaxrl_post.ring.json_text import of_hub, said
from jaxrl_post.ring.types import MOST_ENDS, Group, Prompt, Sampling
from jaxrl_post.runs.buckets import files


@dataclass(frozen=True, kw_only=True)
class PolicyFiles:
    """A model and its tokenizer. `place`: of the tokenizer. `files`: its own files, copied beside an exported policy.

    `load_params(shardings, dtype)` reads or draws the weights (placed so, float32 by default). Until then only shapes are
    known.
    `dtype`: of an exported policy's weights. `cost`: engine.cost_table, read, or None where none is named. `others`: what the
    checkpoint has beside its text model.
    """

    place: Path
    tokenizer: tokenizers.Tokenizer
    files: tuple[Path, ...]
    model: decoder.ModelConfig
    load_params: Callable[..., Any]
    dtype: str
    cost: StepCost | None
    others: text_part.OtherParts | None = None


@dataclass(frozen=True, kw_only=True)
class Inputs(PolicyFiles):
    """What a run starts from. `held_out` is empty when eval.prompts is 0.

    `write(prompt, seed)` gives the tokens of a worked solution, for supervised training. `trained`: which of them are trained
    on, by prompt id, where not all are. `pairs`: tokens of preferences, by prompt id. `completions`: held-out ones.
    `adapter`: lora.adapter on this machine. `handed`: what a Python program gave beside the config. `notes`: lines on data
    that is not used as it is. `overlong`: prompts that were dropped or cut, by "train" and "eval". `chat`: the tokenizer's
    chat template, with the tools of an environment. `reward_model`: the files of reward.model. `judge`: those of judge.model.
    """

    train: prompts.Prompts
    held_out: tuple[Prompt, ...]
    sampling: Sampling
    longest_prompt: int
    write: Callable[[Prompt, np.ndarray], list[int]]
    trained: Mapping[str, Sequence[bool]]
    pairs: Mapping[str, Sequence[Sequence[int]]]
    completions: tuple[Group, ...]
    adapter: str
    handed: PythonInputs
    notes: tuple[str, ...]
    overlong: Mapping[str, int]
    chat: chat.Chat | None
    reward_model: SecondModel | None
    judge: PolicyFiles | None


def local(config: Config) -> Config:
    """Returns a config whose files of a bucket are copies on this machine. It is for reading them, and no run's config.

    Raises:
      ValueError: there is no such file, or the bucket refuses.
      Unreachable: the bucket does not answer.
    """
    for option in fields.options(Config):
        if option.about.bucket:
            section, _, name = option.name.partition(".")
            part = getattr(config, section)
            path = files.local(getattr(part, name), option.name)
            if path != getattr(part, name):
                config = dataclasses.replace(config, **{section: dataclasses.replace(part, **{name: path})})
    return config


def policy(config: Config) -> PolicyFiles:
    """Reads the model's shape and its tokenizer.

    Raises:
      ValueError: there is none, they do not belong together, or engine.max_length is beyond the model's positions.
    """
    config = local(config)
    place = _tokenizer_place(config)
    tokenizer = tokenizers.load(place)
    stored, load, dtype = _model(config, tokenizer.vocab_size)
    model = second_models.trained_shape(config, stored)
    hf.check_savable(model)  # as the run ends with it
    adapter.check(config, model)
    _check_routers(config, model)
    return PolicyFiles(
        place=place,
        tokenizer=tokenizer,
        files=tokenizer_files(place),
        model=_fitting(config, model, tokenizer, place),
        load_params=second_models.with_score_head(stored, model, load),
        dtype=dtype,
        cost=cost.load(config.engine.cost_table) if config.engine.cost_table else None,
        others=hf.other_parts(config.model.path) if config.model.path and not model.scalar else None,
    )


def _check_routers(config: Config, model: decoder.ModelConfig) -> None:
    """Refuses options about routers and experts for a model that has none."""
    if model.experts is not None:
        return
    c = config.algorithm
    for name, value, off in (
        ("algorithm.router_aux_loss_coef", c.router_aux_loss_coef, 0.0),
        ("algorithm.router_z_loss_coef", c.router_z_loss_coef, 0.0),
        ("algorithm.router_replay", c.router_replay, False),
        ("mesh.expert", config.mesh.expert, 1),
        ("mesh.engine_expert", config.mesh.engine_experts, 1),
    ):
        if value != off:
            raise ValueError(
                f"{name}={value}: the model {config.model.path or config.model.preset} has no experts and no router; "
                f"the nearest valid value is {off}"
            )


def gather(config: Config, handed: PythonInputs = NOTHING) -> Inputs:
    """Reads everything but the weights.

    Raises:
      ValueError: one sentence about the file, name or length that is wrong.
    """
    try:
        return _gathered(config, handed)
    except OSError as error:
        raise ValueError(f"{said(error.filename or 'an input')}: cannot be read: {error.strerror}") from error


def chat_template(config: Config, place: Path) -> chat.Chat | None:
    """Returns the chat template in a tokenizer's folder, with the date and the arguments of a config, if there is one.

    Raises:
      ValueError: it cannot be read, or an argument is none of a template's.
    """
    messages.check_names("data.chat_template_kwargs", config.data.chat_template_kwargs)
    if not place.is_dir():
        return None
    return chat.load(place, now=config.data.date, arguments=config.data.chat_template_kwargs)


def dated(config: Config) -> Config:
    """Returns a config whose data.date is now, where a chat template of the run asks for the date and none is set.

    Process 0 says what the time is.

    Raises:
      ValueError: a template cannot be read.
    """
    given = local(config)
    places = [_tokenizer_place(given), *([Path(config.judge.model)] if config.judge.model else [])]
    found = [chat.load(place) for place in places if place.is_dir()]
    if config.data.date or not any(one is not None and one.dated for one in found):
        return config
    now = exchange.broadcast_text(datetime.datetime.now().isoformat(timespec="seconds"))
    return dataclasses.replace(config, data=dataclasses.replace(config.data, date=now))


def _gathered(config: Config, handed: PythonInputs) -> Inputs:
    handed.check(config)
    config = local(config)
    own = policy(config)
    template = chat_template(config, own.place)
    with environments.first_messages(config, template, handed) as (template, begins):
        read = sources.Sources(config=config, tokenizer=own.tokenizer, chat=template, handed=handed, begins=begins)
        rows, asked = read.train(), read.held_out()
    written = read.completions()
    if template is not None:
        template.close()
    every = (*rows.prompts, *asked.prompts, *written.prompts)
    shared = sorted(rows.ids & {prompt.id for prompt in (*asked.prompts, *written.prompts)})
    if shared:
        raise ValueError(
            f"eval.data and data.train share {len(shared)} prompts, the first is {shared[0]!r}: held-out "
            "prompts must not be trained on"
        )
    if config.engine.name == "demonstrations" and not rows.taught:
        _check_demonstrations(config, rows.prompts, own.tokenizer)
    second_models.check_teacher(config, own.tokenizer)
    notes = [*rows.notes, *asked.notes, *written.notes, *bias(config)]
    if config.model.path:
        notes += hf.remarks(config.model.path)
    if template is not None and template.dated:
        told = config.data.date or "now"
        notes.insert(0, f"data.date={told}: the chat template says the date, and is told this one in the whole run")
    return Inputs(
        **vars(own),
        train=rows.ordered(config),
        held_out=asked.prompts,
        sampling=sampling_params(config, own.tokenizer),
        longest_prompt=max(prompt.tokens.size for prompt in every),
        write=_writer(config, own.tokenizer, rows.taught),
        trained=rows.trained,
        pairs=rows.pairs,
        completions=completions.groups(written, config.seed),
        adapter=config.lora.adapter,
        handed=handed,
        notes=tuple(notes),
        overlong={"train": rows.overlong, "eval": asked.overlong},
        chat=template,
        reward_model=second_models.reward_model(config, own.tokenizer),
        judge=policy(second_models.judge_settings(config)) if config.judge.model else None,
    )


def _fitting(
    config: Config, model: decoder.ModelConfig, tokenizer: tokenizers.Tokenizer, place: Path
) -> decoder.ModelConfig:
    """Returns the model with the rows that its tokenizer uses. Refused: one that it or engine.max_length does not fit."""
    if tokenizer.vocab_size > model.vocab_size:
        raise ValueError(
            f"the tokenizer {place} has {tokenizer.vocab_size} tokens, the model only {model.vocab_size}: "
            "they do not belong together"
        )
    if tokenizer.vocab_size < model.vocab_size:
        model = dataclasses.replace(model, used_vocab=tokenizer.vocab_size)
    if config.engine.max_length > model.max_length:
        raise ValueError(
            f"engine.max_length={config.engine.max_length} is beyond the model's {model.max_length} "
            f"positions; the nearest valid value is {model.max_length}"
        )
    return model


def sampling_params(config: Config, tokenizer: tokenizers.Tokenizer) -> Sampling:
    """Returns the sampling parameters of training, with the end tokens of the tokenizer.

    Raises:
      ValueError: a stop id that is no token, or more ids that end a rollout than can.
    """
    section = config.sampling
    sampling = Sampling(
        temperature=section.temperature,
        top_k=max(section.top_k, 0),
        top_p=section.top_p,
        eos_ids=tokenizer.eos_ids,
        stop_ids=section.stop_ids,
        stop_strings=section.stop_strings,
    )
    every = sampling.eos_ids + sampling.stop_ids
    if len(every) > MOST_ENDS:
        raise ValueError(
            f"sampling.stop_ids and the tokenizer's end tokens are {len(every)} ids; at most {MOST_ENDS} can "
            "end a rollout"
        )
    wrong = [token for token in sampling.stop_ids if not 0 <= token < tokenizer.vocab_size]
    if wrong:
        raise ValueError(
            f"sampling.stop_ids: {wrong[0]} is no token of the tokenizer; the nearest valid value is "
            f"{min(max(wrong[0], 0), tokenizer.vocab_size - 1)}"
        )
    return ends.with_special_stops(sampling, tokenizer)


def bias(config: Config) -> tuple[str, ...]:
    """Returns a line that names the bias of a cut sampling law that no weight corrects; nothing where there is none."""
    section = config.sampling
    cuts = [f"sampling.top_k={section.top_k}"] * (section.top_k > 0) + [f"sampling.top_p={section.top_p:g}"] * (
        section.top_p < 1
    )
    if not cuts or config.kept_ids or config.engine.name != "rows" or config.algorithm.rollout_is != "none":
        return ()
    return (
        f"{' and '.join(cuts)} draws rollouts from a cut distribution, and the loss is of the whole one: the gradient is biased "
        "towards ids that are drawn; sampling.keep_mask=True trains on the cut one, algorithm.rollout_is='token' weighs by the "
        "gap, and an uncut law has none",
    )


def _check_demonstrations(config: Config, train: Sequence[Prompt], tokenizer: tokenizers.Tokenizer) -> None:
    """The longest of each prompt of a task: a character that the tokenizer lacks, or a token too many, shows before
    anything is compiled. Those of a file were checked as they were read."""
    task = tasks.TASKS[config.data.train.removeprefix("task:")]
    for prompt in train:
        text, where = task.longest(prompt.extra), f"the demonstration of prompt {prompt.id!r}"
        measured(f"data.train={config.data.train}: {where}", text, tokenizer, config.sampling.max_tokens)
        tokens = len(tokenizer.encode(text, special=False)) + 1
        if tokens > config.sampling.max_tokens:
            raise ValueError(
                f"data.train={config.data.train}: {where} has {tokens} "
                f"tokens with its end, more than sampling.max_tokens={config.sampling.max_tokens}; the "
                f"nearest valid value is {tokens}"
            )


def _tokenizer_place(config: Config) -> Path:
    """Returns where the tokenizer is: the file or folder that the config names, else what lies beside the model."""
    if config.model.tokenizer:
        return Path(config.model.tokenizer)
    if not config.model.path:
        raise ValueError(
            "model.tokenizer is empty and model.preset has none beside it: name a tokenizer.json, a "
            "directory that holds one, or a llama2.c vocabulary"
        )
    path = Path(config.model.path)
    if not path.exists():
        names = [file.name for file in path.parent.iterdir()] if path.parent.is_dir() else []
        near = difflib.get_close_matches(path.name, names, n=1, cutoff=0.0)
        raise ValueError(
            f"model.path={config.model.path}: no such file or folder"
            + (f"; nearest is {path.parent / near[0]}" if near else of_hub(path))
        )
    return tokenizers.beside(path)


def _model(config: Config, vocabulary: int) -> tuple[decoder.ModelConfig, Callable[..., Any], str]:
    """The shape, how to come by the weights, and the dtype of an exported policy."""
    path, preset = config.model.path, config.model.preset
    if path and preset:
        raise ValueError(f"model.path={path!r} and model.preset={preset!r} are both given: name one")
    if path and Path(path).is_dir():
        return hf.read_config(Path(path) / "config.json"), second_models.weights(path), hf.stored_dtype(path)
    if path:
        own, drawn = llama2c.load(path)[0], lambda shardings: mesh.put(llama2c.load(path)[1], shardings)
        return own, _castable(drawn), "float32"
    if preset not in PRESETS:
        near = difflib.get_close_matches(preset, PRESETS, n=1, cutoff=0.0)
        raise ValueError(f"model.preset={preset!r} is not one of {', '.join(PRESETS)}; nearest is {near[0]!r}")
    model = dataclasses.replace(PRESETS[preset], vocab_size=vocabulary)
    return model, _castable(lambda shardings: decoder.placed(model, config.seed, shardings)), "float32"


def _castable(drawn: Callable[[Any], Any]) -> Callable[..., Any]:
    """Returns what places float32 weights by `drawn` and casts them to a dtype."""

    def placed(shardings: Any, dtype: Any = np.float32) -> Any:
        return jax.tree.map(lambda leaf: leaf.astype(dtype), drawn(shardings))

    return placed


def shape(config: Config) -> decoder.ModelConfig:
    """Returns the model's shape for a plan, which needs neither its weights nor its tokenizer.

    It is that of model.path, where that is here, or of the published model that the path's last name says.

    Raises:
      ValueError: nothing says the shape.
    """
    given = local(config).model
    path, preset = Path(given.path), given.preset
    if given.path and path.exists():
        found = hf.read_config(path / "config.json") if path.is_dir() else llama2c.load(str(path))[0]
    else:
        found = published(path.name) if given.path else PRESETS.get(preset)
    if found is None:
        named = f"model.path={given.path}" if given.path else f"model.preset={preset!r}"
        near = difflib.get_close_matches(path.name if given.path else preset, PRESETS, n=1, cutoff=0.0)
        raise ValueError(
            f"{named}: there is no such folder, and no shape is known by this name; known are {', '.join(PRESETS)}, "
            f"nearest is {near[0]!r}"
        )
    return second_models.trained_shape(config, found)


def _writer(
    config: Config, tokenizer: tokenizers.Tokenizer, taught: Mapping[str, Sequence[int]]
) -> Callable[[Prompt, np.ndarray], list[int]]:
    """Worked solutions: of a file those of its rows, of a procedural task its own. An end token closes each."""
    if taught:
        return lambda prompt, seed: list(taught[prompt.id])
    return lambda prompt, seed: sources.solved(config.data.train, prompt, seed, tokenizer)


def tokenizer_files(place: Path) -> tuple[Path, ...]:
    if place.is_file():
        return (place,)
    names = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
    return tuple(place / name for name in names if (place / name).is_file())
