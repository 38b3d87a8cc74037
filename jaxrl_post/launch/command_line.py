"""The command line of a run."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Flags:
    """The command line: a config file, overrides `a.b=value` in order, a folder, and two words. `resume`: "" never,
    "allowed" where there is something in the folder, "required"."""

    config: str
    overrides: tuple[str, ...] = ()
    dry_run: bool = False
    run_dir: str = ""
    resume: str = ""


def parse(arguments: Sequence[str]) -> Flags:
    """
    Raises:
      ValueError: no config file, or a flag that does not exist (with the nearest).
    """
    given: dict[str, Any] = {"overrides": []}
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if name in ("--config", "--run-dir") and equals and value:
            given[name.removeprefix("--").replace("-", "_")] = value
        elif name.startswith("--config."):
            given["overrides"].append(argument.removeprefix("--config."))
        elif argument == "--dry-run":
            given["dry_run"] = True
        elif name == "--resume" and (value or not equals):
            given |= {"run_dir": value, "resume": "required"} if value else {"resume": "allowed"}
        else:
            known = (
                "--config=FILE",
                "--config.a.b=VALUE",
                "--dry-run",
                "--run-dir=FOLDER",
                "--resume",
                "--resume=FOLDER",
            )
            near = difflib.get_close_matches(argument, known, n=1, cutoff=0.0)
            raise ValueError(f"unknown argument {argument!r}; nearest is {near[0]}, all are {', '.join(known)}")
    if "config" not in given:
        raise ValueError("no config file: write --config=FILE, for example --config=configs/demo.py")
    if given.get("resume") and not given.get("run_dir"):
        raise ValueError("--resume says not which run: write --resume=FOLDER, or --run-dir=FOLDER --resume")
    return Flags(**given | {"overrides": tuple(given["overrides"])})
