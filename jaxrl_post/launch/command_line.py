"""The command line: one reader for every command, and the flags of a run.

A value stands behind "=" or as the next argument, for every flag alike.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jaxrl_post.config import Config, check_place, elsewhere, fields
from jaxrl_post.json_text import shown

OVERRIDE = "--config.a.b=VALUE"
_OVERRIDES = "--config."
RUN = (
    "--config=FILE",
    OVERRIDE,
    "--dry-run",
    "--dry-run=all",
    "--slice=NAME",
    "--length=TOKENS",
    "--run-dir=FOLDER",
    "--resume",
    "--resume=FOLDER",
    "--branch=RUN",
    "--branch=RUN@STEP",
    "--help",
    "--help SECTION",
)


@dataclass(frozen=True, kw_only=True)
class Flags:
    """What a run was asked for: a config file, overrides `a.b=value` in order, a folder, and what to do.

    `config`: "" stands for the config of the run that is resumed or branched from. `resume`: "" never; "allowed" if the
    folder holds a run; "required". `slice`: what is planned for, "" for devices here. `length`: mean tokens of a rollout
    there, 0: of those seen before. `every_option`: whether a dry run prints options at their defaults too. `branch`: RUN or
    RUN@STEP to begin from, "" for none.
    """

    config: str = ""
    overrides: tuple[str, ...] = ()
    dry_run: bool = False
    every_option: bool = False
    slice: str = ""
    length: float = 0.0
    run_dir: str = ""
    resume: str = ""
    branch: str = ""


def parse(arguments: Sequence[str]) -> Flags:
    """Reads the command line of a run.

    Raises:
      ValueError: no config file, an unknown flag (with the nearest), a flag that is given twice, a URL, or flags that do not
        go together.
    """
    given: dict[str, Any] = {"overrides": ()}
    seen: dict[str, str] = {}
    for name, value in read(arguments, RUN, _elsewhere):
        if name == OVERRIDE:
            given["overrides"] += (value,)
            continue
        if name in seen:
            raise ValueError(
                f"{name} is given twice, with {shown(seen[name])} and {shown(value)}: leave one of them out"
            )
        seen[name] = value
        check_place(value, name, bucket=name in ("--run-dir", "--resume"))
        if name == "--resume":
            given |= {"run_dir": value, "resume": "required"} if value else {"resume": "allowed"}
        elif name == "--dry-run":
            given |= {"dry_run": True, "every_option": _every_option(value)}
        else:
            given[name.removeprefix("--").replace("-", "_")] = _length(value) if name == "--length" else value or True
    _check(given, "--run-dir" in seen and bool(seen.get("--resume")))
    return Flags(**given)


def _check(given: dict[str, Any], two_folders: bool) -> None:
    """Refuses flags that do not go together. `two_folders`: --run-dir and --resume name one each."""
    if two_folders:
        raise ValueError(
            "--run-dir and --resume=FOLDER both name a folder: write --resume=FOLDER, or --run-dir=FOLDER --resume"
        )
    if given.get("resume") and given.get("branch"):
        raise ValueError(
            "--branch begins a new run and --resume continues one: leave one of them out; a branch is continued by "
            "--resume=FOLDER with its own folder"
        )
    if given.get("resume") and not given.get("run_dir"):
        raise ValueError("--resume says not which run: write --resume=FOLDER, or --run-dir=FOLDER --resume")
    if "config" not in given and not given.get("resume") and not given.get("branch"):
        raise ValueError(
            "no config file: write --config=FILE, for example --config=configs/demo.py, or --resume=RUN to continue a run"
        )
    if given.get("slice") and not given.get("dry_run"):
        raise ValueError("--slice plans for devices that are not there, and a run needs them: add --dry-run")
    if given.get("length") and not given.get("slice"):
        raise ValueError("--length is for a prediction, which only --slice=NAME makes: leave it out")
    if given.get("slice") and (given.get("branch") or "config" not in given):
        raise ValueError("--slice plans from a config alone: name it by --config=FILE, without --branch")


def _every_option(text: str) -> bool:
    """Returns whether --dry-run is to print every option."""
    if text not in ("", "all"):
        raise ValueError(f"--dry-run={shown(text, 40)} must be --dry-run, or --dry-run=all for every option as JSON")
    return bool(text)


def _length(text: str) -> float:
    """Returns the value of --length."""
    if not re.fullmatch(r"\d{1,9}(\.\d{1,9})?", text) or not float(text):
        raise ValueError(
            f"--length={shown(text, 40)} must be a mean length in tokens above 0, for example --length=512"
        )
    return float(text)


def _elsewhere(argument: str) -> str:
    """Returns what to write instead of an argument that is an option, here or in another framework; or an empty text."""
    name, equals, value = argument.partition("=")
    name, ours = name.lstrip("-").replace("-", "_"), {option.name for option in fields.options(Config)}
    if name in ours:
        return f"write --config.{name}={value if equals and len(value) < 80 else 'VALUE'}"
    theirs = elsewhere.answer(name)
    return f"{theirs}, set by --config.NAME=VALUE" if theirs else ""


def split(arguments: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """Returns a command line without its overrides, and the overrides as `a.b=value`."""
    others, found, rest = [], [], list(arguments)
    while rest:
        argument = rest.pop(0)
        if argument.startswith(_OVERRIDES):
            found.append(_override(argument, rest))
        else:
            others.append(argument)
    return others, tuple(found)


def _override(argument: str, rest: list[str]) -> str:
    """Returns an override as `a.b=value`. A value behind a space is taken from `rest`."""
    apart = "=" not in argument and rest and not rest[0].startswith("--")
    return (f"{argument}={rest.pop(0)}" if apart else argument).removeprefix(_OVERRIDES)


def read(
    arguments: Sequence[str], known: Sequence[str], instead: Callable[[str], str] = lambda argument: ""
) -> list[tuple[str, str]]:
    """Splits a command line into (name, value) pairs, in order.

    Args:
      known: the forms of flags: "--dry-run" has no value; "--config=FILE" and "--json FILE" have one, behind "=" or as the
        next argument. A flag with both kinds of form has its value there if the next argument is no flag. An override has
        the name OVERRIDE and the value "a.b=value".
      instead: returns what to write instead of an unknown argument, or an empty text.

    Raises:
      ValueError: a flag of no known form, with the nearest form and all of them.
    """
    switches = {form for form in known if "=" not in form and " " not in form}
    valued = {form.replace(" ", "=").partition("=")[0] for form in known if "=" in form or " " in form}
    found, rest = [], list(arguments)
    while rest:
        argument = rest.pop(0)
        name, equals, value = argument.partition("=")
        follows = bool(rest) and not rest[0].startswith("--")
        if name.startswith(_OVERRIDES) and OVERRIDE in known:
            found.append((OVERRIDE, _override(argument, rest)))
        elif name in valued and value:
            found.append((name, value))
        elif name in valued and not equals and follows and rest[0]:
            found.append((name, rest.pop(0)))
        elif argument in switches:
            found.append((argument, ""))
        else:
            near = difflib.get_close_matches(argument[:100], known, n=1, cutoff=0.0)
            other = "" if name in valued else instead(argument)
            raise ValueError(
                f"unknown argument {shown(argument)}; {other or f'nearest is {near[0]}, all are ' + ', '.join(known)}"
            )
    return found
