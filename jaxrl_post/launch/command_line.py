"""The flags of a run, and which of them go together."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass

from jaxrl_post.config import Config, check_place, elsewhere, fields
from jaxrl_post.config.command_line import OVERRIDE, Arguments, Flag
from jaxrl_post.ring.json_text import shown

HELP = """
python -m jaxrl_post.main --config=FILE [--config.a.b=VALUE ...] [--dry-run[=all]] [--run-dir=FOLDER] [--resume[=FOLDER]]
python -m jaxrl_post.main --resume=FOLDER [--config.steps=N ...]
python -m jaxrl_post.main --branch=RUN[@STEP] [--config=FILE] [--config.a.b=VALUE ...] [--run-dir=FOLDER]
python -m jaxrl_post.main --config=FILE [--config.a.b=VALUE ...] --dry-run --slice=NAME
python -m jaxrl_post.main --help [SECTION]

Trains a policy: runs the loop, and writes the policy and a summary.

A relative path in a config file is looked for beside the file first, then in the working directory. One on the command
line is looked for in the working directory. FOLDER may be gs://BUCKET/NAME or s3://BUCKET/NAME. Then the run works in a
folder of this machine, and is committed to the bucket after every save.

Exit codes:
- 1: a mistake in a config, a data file or a checkpoint. The error is one sentence, printed before anything is
  compiled. A run that could not start leaves no folder.
- 1: no rollout of the first round could be scored, filters leave no group, or weights or gradients are not finite. Or
  saves fail again and again, the last save failed, or a log cannot be written. The folder is kept.
- 42: use --resume. A signal or a hang ended the run, another process of the job was lost, a weight swap failed midway, or a
  bucket did not answer.
"""
FLAGS = (
    Flag("--config=FILE", "the config; FILE.py:CHOICE hands CHOICE to the file's get_config"),
    Flag(OVERRIDE, "overrides an option; --config.a=default gives a section its defaults"),
    Flag(
        "--dry-run[=all]",
        "prints the options that differ from their defaults, the batch arithmetic and the memory plan, and writes nothing; "
        "with =all every option, as JSON. A run keeps them in its config.json",
    ),
    Flag(
        "--slice=NAME",
        "v5e-16, v5p-64, tpu7x-8, h100, 4x8xh100, l4, ...: plans for devices that are not there, from shapes alone: memory "
        "of each device, and predicted seconds. Exit code 1 where the run does not fit",
    ),
    Flag("--length=TOKENS", "of a rollout on average, for the predicted seconds of --slice"),
    Flag("--run-dir=FOLDER", "the run's folder, new or empty; else RUN_DIR/NAME-SEED-NNN, by the options"),
    Flag(
        "--resume[=FOLDER]",
        "resumes a run that was killed. Without --config it has the run's own config, and only a few options may differ. "
        "--run-dir=FOLDER --resume starts the run if the folder has none, so that one command can be repeated until the "
        "run ends",
    ),
    Flag(
        "--branch=RUN[@STEP]",
        "begins a new run from a checkpoint of RUN, the newest one without @STEP. Weights, moments, the position in the "
        "data and the history are RUN's. Options may differ; without --config they are RUN's. RUN is only read",
    ),
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


def parser() -> Arguments:
    """Returns what reads the command line of a run."""
    return Arguments("", HELP, FLAGS, _elsewhere)


def parse(arguments: Sequence[str]) -> Flags:
    """Reads the command line of a run.

    Raises:
      ValueError: no config file, an unknown flag (with the nearest), a flag that is given twice, a URL, or flags that do not
        go together.
    """
    reader = parser()
    given = reader.read(arguments)
    for name, value in reader.seen.items():
        check_place(value, f"--{name.replace('_', '-')}", bucket=name in ("run_dir", "resume"))
    every_option, length = _every_option(given.dry_run or ""), _length(given.length)
    _check(given)
    return Flags(
        config=given.config,
        overrides=given.overrides,
        dry_run=given.dry_run is not None,
        every_option=every_option,
        slice=given.slice,
        length=length,
        run_dir=given.resume or given.run_dir,
        resume="" if given.resume is None else "required" if given.resume else "allowed",
        branch=given.branch,
    )


def _check(given: argparse.Namespace) -> None:
    """Refuses flags that do not go together."""
    resumes = given.resume is not None
    if given.resume and given.run_dir:
        raise ValueError(
            "--run-dir and --resume=FOLDER both name a folder: write --resume=FOLDER, or --run-dir=FOLDER --resume"
        )
    if resumes and given.branch:
        raise ValueError(
            "--branch begins a new run and --resume continues one: leave one of them out; a branch is continued by "
            "--resume=FOLDER with its own folder"
        )
    if resumes and not (given.resume or given.run_dir):
        raise ValueError("--resume says not which run: write --resume=FOLDER, or --run-dir=FOLDER --resume")
    if not (given.config or resumes or given.branch):
        raise ValueError(
            "no config file: write --config=FILE, for example --config=configs/demo.py, or --resume=RUN to continue a run"
        )
    if given.slice and given.dry_run is None:
        raise ValueError("--slice plans for devices that are not there, and a run needs them: add --dry-run")
    if given.length and not given.slice:
        raise ValueError("--length is for a prediction, which only --slice=NAME makes: leave it out")
    if given.slice and (given.branch or not given.config):
        raise ValueError("--slice plans from a config alone: name it by --config=FILE, without --branch")


def _every_option(text: str) -> bool:
    """Returns whether --dry-run is to print every option."""
    if text not in ("", "all"):
        raise ValueError(f"--dry-run={shown(text, 40)} must be --dry-run, or --dry-run=all for every option as JSON")
    return bool(text)


def _length(text: str) -> float:
    """Returns the value of --length, 0 without it."""
    if text and (not re.fullmatch(r"\d{1,9}(\.\d{1,9})?", text) or not float(text)):
        raise ValueError(
            f"--length={shown(text, 40)} must be a mean length in tokens above 0, for example --length=512"
        )
    return float(text or 0)


def _elsewhere(argument: str) -> str:
    """Returns what to write instead of an argument that is an option, here or in another framework; or an empty text."""
    name, equals, value = argument.partition("=")
    name, ours = name.lstrip("-").replace("-", "_"), {option.name for option in fields.options(Config)}
    if name in ours:
        return f"write --config.{name}={value if equals and len(value) < 80 else 'VALUE'}"
    theirs = elsewhere.answer(name)
    return f"{theirs}, set by --config.NAME=VALUE" if theirs else ""
