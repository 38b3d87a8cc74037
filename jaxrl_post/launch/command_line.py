"""The command line: one reader for every command, and the flags of a run."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxrl_post.config import refuse_url
from jaxrl_post.json_text import shown

OVERRIDE = "--config.a.b=VALUE"
RUN = (
    "--config=FILE",
    OVERRIDE,
    "--dry-run",
    "--slice=NAME",
    "--run-dir=FOLDER",
    "--resume",
    "--resume=FOLDER",
    "--help",
    "--help SECTION",
)


@dataclass(frozen=True, kw_only=True)
class Flags:
    """What a run was asked for: a config file, overrides `a.b=value` in order, a folder, and what to do.

    `resume`: "" never; "allowed" if the folder holds a run; "required". `slice`: what is planned for, "" for devices here.
    """

    config: str
    overrides: tuple[str, ...] = ()
    dry_run: bool = False
    slice: str = ""
    run_dir: str = ""
    resume: str = ""


def parse(arguments: Sequence[str]) -> Flags:
    """Reads the command line of a run.

    Raises:
      ValueError: no config file, an unknown flag (with the nearest), a URL, --slice without --dry-run, or --resume without a folder.
    """
    given: dict[str, Any] = {"overrides": ()}
    for name, value in read(arguments, RUN):
        if name == OVERRIDE:
            given["overrides"] += (value,)
            continue
        refuse_url(value, name)
        if name == "--resume":
            given |= {"run_dir": value, "resume": "required"} if value else {"resume": "allowed"}
        else:
            given[name.removeprefix("--").replace("-", "_")] = value or True
    if "config" not in given:
        raise ValueError("no config file: write --config=FILE, for example --config=configs/demo.py")
    if given.get("slice") and not given.get("dry_run"):
        raise ValueError("--slice plans for devices that are not there, and a run needs them: add --dry-run")
    if given.get("resume") and not given.get("run_dir"):
        raise ValueError("--resume says not which run: write --resume=FOLDER, or --run-dir=FOLDER --resume")
    return Flags(**given)


def read(arguments: Sequence[str], known: Sequence[str]) -> list[tuple[str, str]]:
    """Splits a command line into (name, value) pairs, in order.

    Args:
      known: the forms of flags: "--dry-run" has no value, "--config=FILE" one after "=", "--json FILE" one after "=" or as
        the next argument. An override has the name OVERRIDE and the value "a.b=value".

    Raises:
      ValueError: a flag of no known form, with the nearest form and all of them.
    """
    switches = {form for form in known if "=" not in form and " " not in form}
    valued = {form.partition("=")[0] for form in known if "=" in form}
    spaced = {form.partition(" ")[0] for form in known if " " in form}
    found, rest = [], list(arguments)
    while rest:
        argument = rest.pop(0)
        name, equals, value = argument.partition("=")
        if name.startswith("--config.") and OVERRIDE in known:
            found.append((OVERRIDE, argument.removeprefix("--config.")))
        elif name in valued | spaced and value:
            found.append((name, value))
        elif name in spaced and not equals and rest:
            found.append((name, rest.pop(0)))
        elif argument in switches:
            found.append((argument, ""))
        else:
            near = difflib.get_close_matches(argument[:100], known, n=1, cutoff=0.0)
            raise ValueError(f"unknown argument {shown(argument)}; nearest is {near[0]}, all are {', '.join(known)}")
    return found
