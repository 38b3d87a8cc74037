"""What a run starts from: the model's weights, its tokenizer, the training prompts and the held-out ones.

Invariant: everything here is host data and is the same in every process. Held-out prompts share no id with training
prompts. It refuses a tokenizer that the model has no rows for, and a prompt that leaves no room for its answer.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_post.config import Config
from jaxrl_post.data import chat, prompts, supervised, tasks, tokenizer
from jaxrl_post.data.columns import COMPLETION, Columns
from jaxrl_post.engine import step_cost as cost
from jaxrl_post.engine.step_cost import StepCost
from jaxrl_post.json_text import said, shown
from jaxrl_post.models import decoder, hf, llama2c
from jaxrl_post.models.presets import PRESETS, published
from jaxrl_post.parallel import mesh
from jaxrl_post.types import MOST_ENDS, Prompt, Sampling


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """`load_params(shardings)` reads or draws the weights (float32, placed so); until then only shapes are known.
    `dtype`: of an exported policy's weights. `files`: the tokenizer's own, copied beside it. `held_out` is empty when
    eval.prompts is 0.
    `write(prompt, seed)` gives the tokens of a worked solution, for supervised training. `cost`: engine.cost_table, read,
    or None where none is named."""

    model: decoder.ModelConfig
    dtype: str
    load_params: Callable[[Any], Any]
    tokenizer: tokenizer.Tokenizer
    files: tuple[Path, ...]
    train: prompts.Prompts
    held_out: tuple[Prompt, ...]
    sampling: Sampling
    longest_prompt: int
    write: Callable[[Prompt, np.ndarray], list[int]]
    cost: StepCost | None


def gather(config: Config) -> Inputs:
    """Reads everything but the weights.

    Raises:
      ValueError: one sentence about the file, name or length that is wrong.
    """
    try:
        return _gathered(config)
    except OSError as error:
        raise ValueError(f"{said(error.filename or 'an input')}: cannot be read: {error.strerror}") from error


def _gathered(config: Config) -> Inputs:
    place = Path(config.model.tokenizer) if config.model.tokenizer else _beside(config)
    words = tokenizer.load(place)
    model, load_params, dtype = _model(config, words.vocab_size)
    hf.check_savable(model)  # as the run ends with it
    if words.vocab_size > model.vocab_size:
        raise ValueError(
            f"the tokenizer {place} has {words.vocab_size} tokens, the model only {model.vocab_size}: "
            "they do not belong together"
        )
    if words.vocab_size < model.vocab_size:
        model = dataclasses.replace(model, used_vocab=words.vocab_size)
    if config.engine.max_length > model.max_length:
        raise ValueError(
            f"engine.max_length={config.engine.max_length} is beyond the model's {model.max_length} "
            f"positions; the nearest valid value is {model.max_length}"
        )
    template = chat.load(place) if place.is_dir() else None
    train, taught = _train(config, words, template)
    held_out = _prompts(config, "eval", words, template)
    if template is not None:
        template.close()
    shared = sorted({prompt.id for prompt in train} & {prompt.id for prompt in held_out})
    if shared:
        raise ValueError(
            f"eval.data and data.train share {len(shared)} prompts, the first is {shared[0]!r}: held-out "
            "prompts must not be trained on"
        )
    if config.engine.name == "demonstrations":
        _check_demonstrations(config, train, words, taught)
    sampling = _sampling(config, words)
    return Inputs(
        model=model,
        dtype=dtype,
        load_params=load_params,
        tokenizer=words,
        files=_files(place),
        held_out=held_out,
        train=prompts.Prompts(train, config.seed),
        sampling=sampling,
        longest_prompt=max(prompt.tokens.size for prompt in (*train, *held_out)),
        write=_writer(config, words, taught),
        cost=cost.load(config.engine.cost_table) if config.engine.cost_table else None,
    )


def _sampling(config: Config, words: tokenizer.Tokenizer) -> Sampling:
    """The sampling law of training, with the tokenizer's end tokens."""
    law = config.sampling
    sampling = Sampling(
        temperature=law.temperature,
        top_k=max(law.top_k, 0),
        top_p=law.top_p,
        eos_ids=words.eos_ids,
        stop_ids=law.stop_ids,
        stop_strings=law.stop_strings,
    )
    _check_ends(sampling, words.vocab_size)
    return sampling


def _check_demonstrations(
    config: Config, train: Sequence[Prompt], words: tokenizer.Tokenizer, taught: Mapping[str, Sequence[int]]
) -> None:
    """The longest of each prompt of a task: a character that the tokenizer lacks, or a token too many, shows before
    anything is compiled. Those of a file were checked as they were read."""
    for prompt in () if taught else train:
        text, where = _task(config).longest(prompt.extra), f"the demonstration of prompt {prompt.id!r}"
        prompts.measured(f"data.train={config.data.train}: {where}", text, words, config.sampling.max_tokens)
        tokens = len(words.encode(text, special=False)) + 1
        if tokens > config.sampling.max_tokens:
            raise ValueError(
                f"data.train={config.data.train}: {where} has {tokens} "
                f"tokens with its end, more than sampling.max_tokens={config.sampling.max_tokens}; the "
                f"nearest valid value is {tokens}"
            )


def _task(config: Config) -> tasks.Task:
    return tasks.TASKS[config.data.train.removeprefix("task:")]


def _check_ends(sampling: Sampling, vocabulary: int) -> None:
    ends = sampling.eos_ids + sampling.stop_ids
    if len(ends) > MOST_ENDS:
        raise ValueError(
            f"sampling.stop_ids and the tokenizer's end tokens are {len(ends)} ids; at most {MOST_ENDS} can "
            "end an answer"
        )
    wrong = [token for token in sampling.stop_ids if not 0 <= token < vocabulary]
    if wrong:
        raise ValueError(
            f"sampling.stop_ids: {wrong[0]} is no token of the tokenizer; the nearest valid value is "
            f"{min(max(wrong[0], 0), vocabulary - 1)}"
        )


def _beside(config: Config) -> Path:
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
            + (f"; nearest is {path.parent / near[0]}" if near else "")
        )
    return tokenizer.beside(path)


def _model(config: Config, vocabulary: int) -> tuple[decoder.ModelConfig, Callable[[Any], Any], str]:
    """The shape, how to come by the weights, and the dtype of an exported policy."""
    path, preset = config.model.path, config.model.preset
    if path and preset:
        raise ValueError(f"model.path={path!r} and model.preset={preset!r} are both given: name one")
    if path and Path(path).is_dir():
        shape = hf.read_config(Path(path) / "config.json")
        return shape, lambda shardings: hf.load(path, shardings=shardings)[1], hf.stored_dtype(path)
    if path:
        return llama2c.load(path)[0], lambda shardings: mesh.put(llama2c.load(path)[1], shardings), "float32"
    if preset not in PRESETS:
        near = difflib.get_close_matches(preset, PRESETS, n=1, cutoff=0.0)
        raise ValueError(f"model.preset={preset!r} is not one of {', '.join(PRESETS)}; nearest is {near[0]!r}")
    model = dataclasses.replace(PRESETS[preset], vocab_size=vocabulary)
    return model, lambda shardings: decoder.placed(model, config.seed, shardings), "float32"


def shape(config: Config) -> decoder.ModelConfig:
    """Returns the model's shape for a plan, which needs neither its weights nor its tokenizer.

    It is that of model.path, where that is here, or of the published model that the path's last name says.

    Raises:
      ValueError: nothing says the shape.
    """
    path, preset = Path(config.model.path), config.model.preset
    if config.model.path and path.exists():
        return hf.read_config(path / "config.json") if path.is_dir() else llama2c.load(str(path))[0]
    found = published(path.name) if config.model.path else PRESETS.get(preset)
    if found is None:
        named = f"model.path={config.model.path}" if config.model.path else f"model.preset={preset!r}"
        near = difflib.get_close_matches(path.name if config.model.path else preset, PRESETS, n=1, cutoff=0.0)
        raise ValueError(
            f"{named}: there is no such folder, and no shape is known by this name; known are {', '.join(PRESETS)}, "
            f"nearest is {near[0]!r}"
        )
    return found


def _train(
    config: Config, words: tokenizer.Tokenizer, template: chat.Chat | None
) -> tuple[tuple[Prompt, ...], dict[str, list[int]]]:
    """Training prompts in file order. Of a supervised file also the tokens that are trained on, by prompt id."""
    source = config.data.train
    if config.engine.name != "demonstrations" or source.startswith("task:"):
        return _prompts(config, "train", words, template), {}
    _check_closable(words)
    most, limit = config.sampling.max_tokens, config.engine.max_length - config.sampling.max_tokens
    rows = supervised.read(source, _columns(config))
    return supervised.tokenised(rows, words, chat=template, limit=limit, most=most, where=source)


def _columns(config: Config) -> Columns:
    """How files are read."""
    data = config.data
    if COMPLETION in data.columns and config.engine.name != "demonstrations":
        raise ValueError(
            f"data.columns: {COMPLETION}={shown(data.columns[COMPLETION])} is read by engine.name='demonstrations' alone: "
            "another column without a role reaches reward functions under its own name"
        )
    return Columns(format=data.format, named=data.columns, template=data.template, source=data.source, chat=data.chat)


def _prompts(config: Config, part: str, words: tokenizer.Tokenizer, template: chat.Chat | None) -> tuple[Prompt, ...]:
    """Prompts of one part, "train" or "eval", in file order."""
    if part == "eval" and config.eval.prompts == 0:
        return ()
    source, arguments, size = config.data.train, config.data.task, config.data.size
    if part == "eval":
        source, arguments, size = _eval_source(config), config.eval.task or arguments, config.eval.prompts
    split = "sft" if part == "train" and config.engine.name == "demonstrations" else part
    columns = _columns(config)
    if config.engine.name == "demonstrations" and not source.startswith("task:"):
        rows = supervised.questions(supervised.read(source, columns))
    else:
        rows = prompts.rows(source, seed=config.seed, split=split, size=size, arguments=arguments, columns=columns)
    if part == "eval":
        if len(rows) < size:
            raise ValueError(
                f"eval.prompts={size} but {source} has {len(rows)} rows; the nearest valid value is {len(rows)}"
            )
        rows = rows[:size]
    return prompts.tokenised(
        rows, words, chat=template, limit=config.engine.max_length - config.sampling.max_tokens, where=source
    )


def _eval_source(config: Config) -> str:
    """eval.data, else the training task itself, which draws its held-out prompts apart."""
    if not config.eval.data and not config.data.train.startswith("task:"):
        raise ValueError(
            f"eval.data is empty and data.train={config.data.train!r} is a file: name a file of held-out "
            "prompts, or set eval.prompts=0"
        )
    return config.eval.data or config.data.train


def _check_closable(words: tokenizer.Tokenizer) -> None:
    if not words.eos_ids:
        raise ValueError(
            "engine.name='demonstrations' needs a tokenizer with an end token, to close each solution with"
        )


def _writer(
    config: Config, words: tokenizer.Tokenizer, taught: Mapping[str, Sequence[int]]
) -> Callable[[Prompt, np.ndarray], list[int]]:
    """Worked solutions: of a file those of its rows, of a procedural task its own. An end token closes each."""
    if taught:
        return lambda prompt, seed: list(taught[prompt.id])
    if config.engine.name == "demonstrations":
        _check_closable(words)

    def solve(prompt: Prompt, seed: np.ndarray) -> list[int]:
        return [*words.encode(_task(config).demonstrate(prompt.extra, seed), special=False), words.eos_ids[0]]

    return solve


def _files(place: Path) -> tuple[Path, ...]:
    if place.is_file():
        return (place,)
    names = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
    return tuple(place / name for name in names if (place / name).is_file())
