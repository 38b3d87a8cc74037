"""python -m jaxrl_post tinker --model=POLICY [--port=8000] [...]

Serves a policy to the SDK of the Tinker API: its clients train it and sample from it in their own loops. It needs
pip install 'jaxrl_post[serve]'. docs/tinker.md says which version of the SDK, and what is served.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import re
import secrets
from pathlib import Path

from jaxrl_post.commands.arguments import POLICY, Command
from jaxrl_post.config.command_line import OVERRIDE, Flag, number, whole
from jaxrl_post.ring import json_text
from jaxrl_post.serve import listening

KEY = "TINKER_API_KEY"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")  # a folder has this name
_PREFIX = "tml-"  # the SDK takes no other keys
_NEEDED = ("starlette", "uvicorn", "httptools", "pydantic")

_FLAGS = (
    Flag("--model=POLICY", POLICY, required=True),
    Flag("--folder=FOLDER", "of saved weights, named by tinker:// paths; runs/tinker", Path, Path("runs/tinker")),
    Flag("--host=ADDRESS", "where it listens; 127.0.0.1", default="127.0.0.1"),
    Flag("--port=PORT", "8000; 0 takes a free one", whole(0), 8000),
    Flag(
        "--key=KEY",
        "that clients send, beginning with tml-; the variable TINKER_API_KEY, else a new one, which is printed",
        default=None,
    ),
    Flag(
        "--keys=FILE",
        "of lines NAME KEY, for clients that do not trust each other: each name has sessions, runs and saved weights of "
        "its own. Clients of one key share all of theirs",
        Path,
        None,
    ),
    Flag("--without-key", "lets everybody in who reaches the port"),
    Flag("--name=NAME", "of the model, as clients call it; the last part of POLICY"),
    Flag("--queue=N", "requests that may wait for the devices, before more are refused with 429; 4096", whole(1), 4096),
    Flag("--idle=SECONDS", "without a sign of a client, after which its session has ended; 600", number, 600.0),
    Flag(OVERRIDE, "an option, for example --config.engine.slots=32 or --config.batch.rows=16"),
)


def _check(flags: argparse.Namespace) -> None:
    if flags.key == "":
        raise ValueError("tinker: --key is empty: give one, leave it out for a new one, or give --without-key")
    doors = {"--key": flags.key, "--keys": flags.keys, "--without-key": flags.without_key}
    given = [name for name, value in doors.items() if value]
    if len(given) > 1:
        raise ValueError(f"tinker: {given[0]} and {given[1]} are both given: leave one out")
    if flags.key and not flags.key.startswith(_PREFIX):
        raise ValueError(f"tinker: --key={flags.key[:40]} must begin with {_PREFIX}, else the SDK refuses it")
    if not (flags.key or flags.keys or flags.without_key or (os.environ.get(KEY) or _PREFIX).startswith(_PREFIX)):
        raise ValueError(
            f"tinker: the variable {KEY} must begin with {_PREFIX}, else the SDK refuses it; or give --key"
        )
    listening.check_port("tinker", flags.port)
    if flags.idle < 1:
        raise ValueError(f"tinker: --idle={flags.idle:g} must be at least 1 second")
    listening.need("tinker", *_NEEDED)


def keys(flags: argparse.Namespace) -> dict[str, str]:
    """Returns key -> owner: those of a file, or one key whose owner has no name.

    Raises:
      ValueError: a line of the file is no name and key, or repeats one. No key is shown.
    """
    if flags.without_key:
        return {}
    if flags.keys is None:
        return {flags.key or os.environ.get(KEY) or _PREFIX + secrets.token_urlsafe(24): ""}
    found: dict[str, str] = {}
    for place, line in enumerate(json_text.text_of(flags.keys, f"tinker: {flags.keys}").splitlines(), 1):
        name, _, key = line.strip().partition(" ")
        where = f"tinker: {flags.keys}, line {place}"
        if line.strip() and not (_NAME.fullmatch(name) and key.strip().startswith(_PREFIX) and key.isascii()):
            raise ValueError(
                f"{where}: must be NAME KEY, a name of letters and digits and a key that begins with {_PREFIX}"
            )
        if name in found.values() or key.strip() in found:
            raise ValueError(f"{where}: the name or the key was given before; every owner has one key")
        found |= {key.strip(): name} if key else {}
    if not found:
        raise ValueError(f"tinker: {flags.keys} has no line NAME KEY")
    return found


def _serve(flags: argparse.Namespace) -> int:
    """Binds the port before anything is compiled, so that a port that is taken costs no minute."""
    _check(flags)
    given = keys(flags)
    with listening.bound("tinker", flags.host, flags.port) as heard, contextlib.suppress(KeyboardInterrupt):
        from jaxrl_post.launch.parts import saved_policy
        from jaxrl_post.serve.tinker import server

        sections = (*saved_policy.READ, "algorithm", "batch", "optimizer")
        config, files = saved_policy.files(flags.model, flags.overrides, sections)
        made = server.Server(
            config,
            files,
            name=flags.name or Path(flags.model.rstrip("/")).name,
            folder=flags.folder,
            keys=given,
            queue=flags.queue,
            idle_s=flags.idle,
            say=functools.partial(print, flush=True),
        )
        return made.serve(heard)
    return 0


main = Command("tinker", __doc__, _FLAGS, _serve)
