"""Reads configs: defaults, Python files and overrides become one frozen Config.

`default()` mirrors the schema into a locked ConfigDict. A file in configs/ starts from it and assigns. `resolve()` turns
that, and overrides `a.b=value`, into a Config, once. After that nobody sees a ConfigDict. Every mistake gives one
sentence with the name, the value, the bound and the nearest valid choice, before anything is compiled.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import dataclasses
import difflib
import importlib.util
import os
import re
import sys
import traceback
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_collections

from jaxrl_post.config import elsewhere, fields
from jaxrl_post.config.fields import AUTO
from jaxrl_post.config.local_path import check_place, placed, refuse_url
from jaxrl_post.config.schema import Config
from jaxrl_post.ring.json_text import said, shown

_LARGEST = sys.float_info.max
_LONGEST = 200  # characters of the name of an option
_FOLDERS = ("recipes", "models", "demo")  # of configs/, whose files all lay in configs/ itself in the last release


def default(schema: type = Config) -> ml_collections.ConfigDict:
    """Every field with its default, as a ConfigDict that refuses unknown names; mappings (a task's own arguments) take
    any. Fill `model` before `resolve`. `schema`: another one than a run's, made of the same kinds of field."""
    return _mirror(schema)


def _mirror(schema) -> ml_collections.ConfigDict:
    out, mappings = ml_collections.ConfigDict(type_safe=False), []
    for name, (kind, f) in fields.members(schema).items():
        if dataclasses.is_dataclass(kind):
            out[name] = _mirror(kind)
        elif f.default is not dataclasses.MISSING:
            out[name] = f.default if fields.about(f).accelerator is None else AUTO
        else:
            out[name] = ml_collections.ConfigDict()
            mappings.append(name)
    out.lock()  # and everything in it
    for name in mappings:
        out[name].unlock()
    return out


# Whatever Python itself raises while a config file runs; it is the user's own code, so its mistakes are the file's.
_MISTAKES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    ImportError,
    LookupError,
    MemoryError,
    NameError,
    OSError,
    RuntimeError,
    StopIteration,
    SyntaxError,
    SystemExit,
    TypeError,
    ValueError,
)


def load(path: str, schema: type = Config) -> ml_collections.ConfigDict:
    """What `get_config()` of a Python file returns; of FILE.py:CHOICE what `get_config(CHOICE)` returns.

    A relative path in it at which something lies beside the file becomes absolute.

    Raises:
      ValueError: a mistake in the file, with its line.
    """
    refuse_url(path, "--config")
    name, colon, choice = path.rpartition(":")
    named = bool(colon) and name.endswith(".py")
    file = _found(Path(name if named else path), path)
    spec = importlib.util.spec_from_file_location(f"config_{file.stem}", file)
    module = importlib.util.module_from_spec(spec)
    try:  # from its source: a cached program of an older text may have the same time and size
        with _kept_alive():
            exec(spec.loader.source_to_code(file.read_bytes(), str(file)), module.__dict__)
            given = module.get_config(choice) if named else module.get_config()
    except _MISTAKES as error:
        raise ValueError(_mistake(file, error)) from error
    _need(
        isinstance(given, ml_collections.ConfigDict),
        f"--config={path}: get_config() must return the ConfigDict of "
        f"jaxrl_post.config.default(), got {type(given).__name__}",
    )
    _beside(given, file.parent, schema)
    return given


@contextlib.contextmanager
def _kept_alive() -> Iterator[None]:
    """Makes os._exit raise SystemExit, as sys.exit does: a file that ends Python is a mistake with a line."""
    real, os._exit = os._exit, sys.exit
    try:
        yield
    finally:
        os._exit = real


def _beside(given: ml_collections.ConfigDict, folder: Path, schema: type) -> None:
    """Makes the relative paths of a config absolute that name something in `folder`."""
    for option in fields.options(schema):
        *sections, name = option.name.split(".")
        where: Any = given
        for section in sections:
            where = where.get(section) if isinstance(where, ml_collections.ConfigDict) else None
        if _is_read(option.about) and isinstance(where, ml_collections.ConfigDict) and name in where:
            where[name] = _placed(where[name], folder)


def _is_read(about: fields.About) -> bool:
    """Whether an option names what a run reads."""
    return about.path and not about.written


def _placed(value: Any, folder: str | Path) -> Any:
    """Returns a path, or each of several, as `placed` does. What is no text is left for the check of types."""
    if isinstance(value, (tuple, list)):
        return tuple(_placed(one, folder) for one in value)
    return placed(value, folder) if isinstance(value, str) else value


def chosen(given: ml_collections.ConfigDict, choice: str, table: Mapping[str, Mapping[str, Any]]) -> Any:
    """Returns the config with the options of one entry of a file's table: by choice, options `a.b` and their values.

    Raises:
      ValueError: no such entry.
    """
    near = difflib.get_close_matches(choice, table, n=1, cutoff=0.0)
    _need(choice in table, f"no choice {shown(choice, 40)}; nearest is {near and near[0]}, all are {', '.join(table)}")
    for path, value in table[choice].items():
        *sections, name = path.split(".")
        where = given
        for section in sections:
            where = where[section]
        where[name] = value
    return given


def _found(file: Path, asked: str) -> Path:
    """Returns the file, or what a file in configs/ of the last release is now: one line names it.

    Raises:
      ValueError: no such file.
    """
    if _is_python(file):
        return file
    below = [file.parent / folder for folder in _FOLDERS] if file.absolute().parent.name == "configs" else []
    for now in (folder / file.name.removeprefix(f"{folder.name}_") for folder in below):
        if _is_python(now):
            print(f"{file} is now {now}; the old name opens it in this release alone", file=sys.stderr)
            return now
    there = {found.name: found for folder in (*below, file.parent) for found in folder.glob("*.py")}
    near = difflib.get_close_matches(f"{file.stem}.py", there, n=1)
    raise ValueError(
        f"--config={shown(asked, 200)}: no such Python file" + (f"; nearest is {there[near[0]]}" if near else "")
    )


def _is_python(file: Path) -> bool:
    try:
        return file.is_file() and file.suffix == ".py"
    except OSError:  # a name that is too long, a folder that may not be read
        return False


def _mistake(file: Path, error: BaseException) -> str:
    """One sentence on an error in a config file: its line, what it says, the nearest valid name."""
    lines = [str(frame.lineno) for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
    lines += [str(error.lineno)] if isinstance(error, SyntaxError) else []
    said = str(error if isinstance(error, OSError) or not error.args else error.args[0]).splitlines()
    text = said[0][:300] if said and said[0] else type(error).__name__
    if isinstance(error, SystemExit):
        text = f"the file ends Python, with exit code {shown(error.code)}"
    unknown = re.match(r"\W*(?:Key )?\W*(\w+)\W*($|does not exist|n?Did you mean)", text)  # as ml_collections puts it
    if unknown and isinstance(error, (AttributeError, KeyError)):
        text = f"unknown name {_instead(unknown[1], Config, '', Config, unknown[1])}"
    return f"--config={file}{':' if lines else ''}{''.join(lines[-1:])}: {text}"


def assign(values: dict, options: Mapping[str, Any]) -> None:
    """Sets options in nested dicts. They are named as `a.b`, or as Python's keywords are, `a__b`; `resolve` checks them.

    Raises:
      ValueError: an option is named as a section.
    """
    for name, value in options.items():
        *sections, leaf = name.replace("__", ".").split(".")
        where = values
        for section in sections:
            where = where.setdefault(section, {})
            _need(isinstance(where, dict), f"config: {said(name)}: {said(section)} has no fields")
        where[leaf] = str(value) if isinstance(value, Path) else value


def resolve(
    given: ml_collections.ConfigDict | Mapping,
    overrides: Sequence[str] = (),
    schema: type = Config,
    *,
    platform: str = "cpu",
    recorded: Mapping[str, Any] | None = None,
) -> Any:
    """Returns the frozen Config (or `schema`) of a config file's dict and of `a.b=value` overrides, in order.

    `section=default` gives every option of a section its default.

    Args:
      platform: of the run's devices, as jax names it. Some options have another default on accelerators.
      recorded: options of the run that goes on, by section. They count where such an option is not set.

    Raises:
      ValueError: unknown name (with the nearest), wrong type, value out of range, or a cross-field rule broken.
    """
    values = given.to_dict() if isinstance(given, ml_collections.ConfigDict) else copy.deepcopy(dict(given))
    for override in overrides:
        _override(values, override, schema)
    _settle(schema, values, platform, recorded or {})
    return _build(schema, values, "")


def _settle(schema: type, values: dict, platform: str, recorded: Mapping[str, Any]) -> None:
    """Writes a definite value for each option whose default depends on the platform or on the run's start, and that is not set.

    One that nothing reads keeps the default of CPUs: another value would be refused."""
    known = {option.name: option for option in fields.options(schema)}

    def found(name: str) -> Any:
        section, _, own = name.rpartition(".")
        where = values.get(section, {})
        value = where.get(own, AUTO) if isinstance(where, dict) else AUTO
        return value if isinstance(value, known[name].kind) and value != AUTO else known[name].default

    for name, option in known.items():
        section, _, own = name.rpartition(".")
        where, about = values.get(section, {}), option.about
        if about.accelerator is not None and isinstance(where, dict) and where.get(own, AUTO) == AUTO:
            other = platform != "cpu" and about.used_when.holds(found)
            definite = recorded.get(section, {}).get(own, about.accelerator if other else option.default)
            values[section] = where | {own: definite}
        if about.recorded and isinstance(where, dict) and where.get(own, option.default) == option.default:
            values[section] = where | {own: recorded.get(section, {}).get(own, option.default)}


def _override(values: dict, override: str, root: type) -> None:
    path, equals, text = override.partition("=")
    _need(len(path) <= _LONGEST, f"--config.{said(path)}: no option has a name of {len(path)} characters")
    _need(bool(equals), f"--config.{said(override)}: write --config.{said(path)}=VALUE")
    *parents, leaf = path.split(".")
    schema, where = root, values
    for depth, name in enumerate(parents):
        if schema is not None:
            _known(schema, name, ".".join(parents[:depth]), root, path)
            kind = fields.members(schema)[name][0]
            schema = kind if dataclasses.is_dataclass(kind) else None
        where = where.setdefault(name, {})
        _need(isinstance(where, dict), f"--config.{path}: {'.'.join(parents[: depth + 1])} has no fields")
    kind = None
    if schema is not None:  # else inside a mapping
        _known(schema, leaf, ".".join(parents), root)
        kind = fields.members(schema)[leaf][0]
        if dataclasses.is_dataclass(kind):
            _need(
                text == "default",
                f"--config.{path} is a section: set one of its fields, for example "
                f"--config.{path}.{dataclasses.fields(kind)[0].name}=VALUE, or all of them by --config.{path}=default",
            )
            where[leaf] = {}
            return
    where[leaf] = text if kind is str else _literal(text)


def _literal(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return text


def _known(schema, name: str, where: str, root: type, path: str = "") -> None:
    """Refuses a name that the schema lacks. `path`: the whole name that was written, where it goes on behind this one."""
    if name not in fields.members(schema):
        full = f"{where}.{name}" if where else name
        raise ValueError(f"config: unknown name {_instead(name, schema, where, root, path or full)}")


def _instead(name: str, schema, where: str, root: type, path: str) -> str:
    """The unknown name, and what to write instead: another framework's name in ours, the nearest one, or all there are."""
    full, near = f"{where}.{name}" if where else name, _nearest(name, schema, where, root)
    ours = {option.name.rpartition(".")[2] for option in fields.options(root)}
    if root is Config and (theirs := elsewhere.answer(path, ours)):
        return f"{shown(path)}; {theirs}"
    return f"{shown(full)}; " + (
        f"nearest valid name is {near!r}" if near else f"valid names are {', '.join(fields.members(schema))}"
    )


def _nearest(name: str, schema, where: str, root: type = Config) -> str | None:
    """The full name most like `name`: of the same section first among equals, else of any section.

    A name of the same section that begins with `name` is the nearest: `group` of the scheduler is its `group_size`.
    """
    own = {f"{where}.{leaf}" if where else leaf: leaf for leaf in fields.members(schema)}
    begun = [full for full, leaf in own.items() if where and len(name) >= 3 and leaf.startswith(f"{name}_")]
    if begun:
        return min(begun, key=len)
    named = {full: (leaf, 0.1) for full, leaf in own.items()}
    for section, (kind, _) in fields.members(root).items():
        if dataclasses.is_dataclass(kind):
            named.update({f"{section}.{leaf}": (leaf, 0.0) for leaf in fields.members(kind) if section != where})
    score = {full: difflib.SequenceMatcher(None, name, leaf).ratio() + bonus for full, (leaf, bonus) in named.items()}
    best = max(score, key=score.get)
    return best if score[best] >= 0.6 else None


def _build(schema, values: Mapping, where: str, root: type | None = None):
    out, root = {}, root or schema
    for name, value in values.items():
        _known(schema, name, where, root)
        kind, f = fields.members(schema)[name]
        full = f"{where}.{name}" if where else name
        if dataclasses.is_dataclass(kind):
            _need(isinstance(value, Mapping), f"config: {full} is a section, got {shown(value)}")
            out[name] = _build(kind, value, full, root)
        else:
            out[name] = _checked(full, kind, f, value)
    return schema(**out)


def _checked(full: str, kind, f: dataclasses.Field, value):
    value = _coerced(full, kind, value)
    about = fields.about(f)
    low, high, choices = about.low, about.high, about.choices
    for text in ((value,) if isinstance(value, str) else value) if about.path else ():
        check_place(text, f"config: {full}", bucket=about.bucket)
    value = _placed(value, ".") if _is_read(about) else value
    if choices and value not in choices:
        near = difflib.get_close_matches(str(value), choices, n=1, cutoff=0.3)
        raise ValueError(
            f"config: {full}={shown(value)} is not one of {', '.join(choices)}"
            + (f"; nearest is {near[0]!r}" if near else "")
        )
    if not (low is None or value >= low):
        raise ValueError(f"config: {full}={shown(value)} is below its bound; the nearest valid value is {low}")
    if not (high is None or value <= high):
        raise ValueError(f"config: {full}={shown(value)} is above its bound; the nearest valid value is {high}")
    return value


def _coerced(full: str, kind, value):
    if typing.get_origin(kind) is tuple:
        member = typing.get_args(kind)[0]
        if not isinstance(value, (tuple, list)):
            raise ValueError(
                f"config: {full} must be a list of {member.__name__}, got {shown(value)}; write [{shown(value)}]"
            )
        return tuple(_coerced(f"{full}[{i}]", member, v) for i, v in enumerate(value))
    if kind is float:
        fits = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= _LARGEST
    elif kind is int:
        fits = isinstance(value, int) and not isinstance(value, bool)
    else:
        fits = isinstance(value, kind if kind in (bool, str) else Mapping)
    if not fits:
        name = getattr(kind, "__name__", kind)
        raise ValueError(f"config: {full} must be {name}, got {type(value).__name__} {shown(value)}")
    if kind in (bool, str, int):
        return value
    return float(value) if kind is float else types.MappingProxyType(dict(value))


def to_dict(config: Config) -> dict:
    """Plain nested dict, ready for JSON."""

    def plain(value):
        if dataclasses.is_dataclass(value):
            return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
        if isinstance(value, Mapping):
            return {k: plain(v) for k, v in value.items()}
        return [plain(v) for v in value] if isinstance(value, (tuple, list)) else value

    return plain(config)


def _need(condition: bool, sentence: str) -> None:
    if not condition:
        raise ValueError(sentence)
