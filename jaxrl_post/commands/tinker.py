"""python -m jaxrl_post tinker --model=POLICY [--port=8000] [...]

Serves a policy to the SDK of the Tinker API: its clients train it and sample from it in their own loops. It needs
pip install 'jaxrl_post[serve]'. docs/tinker.md says which version of the SDK, and what is served.

--model=POLICY        a Hugging Face directory, a llama2.c file, RUN for the policy that a run ended with, or RUN@STEP
--folder=FOLDER       of saved weights, named by tinker:// paths; runs/tinker
--host=ADDRESS        where it listens; 127.0.0.1
--port=PORT           8000; 0 takes a free one
--key=KEY             that clients send, beginning with tml-; the variable TINKER_API_KEY, else a new one, which is printed
--keys=FILE           of lines NAME KEY, for clients that do not trust each other: each name has sessions, runs and saved
                      weights of its own. Clients of one key share all of theirs
--without-key         lets everybody in who reaches the port
--name=NAME           of the model, as clients call it; the last part of POLICY
--queue=N             requests that may wait for the devices, before more are refused with 429; 4096
--idle=SECONDS        without a sign of a client, after which its session has ended; 600
--config.a.b=VALUE    an option, for example --config.engine.slots=32 or --config.batch.rows=16
"""

from __future__ import annotations

import argparse
import os
import re
import secrets
from collections.abc import Sequence
from pathlib import Path

from jaxrl_post import json_text
from jaxrl_post.commands.arguments import Arguments, answered, number, whole
from jaxrl_post.serve import listening

KEY = "TINKER_API_KEY"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")  # a folder has this name
_PREFIX = "tml-"  # the SDK takes no other keys
_NEEDED = ("starlette", "uvicorn", "httptools", "pydantic")


def main(arguments: Sequence[str]) -> int:
    """Serves until it is stopped. Exit code 1, with one sentence, where something given is wrong, or a device failed."""
    try:
        return answered(lambda: _serve(_read(arguments)))
    except KeyboardInterrupt:
        return 0


def _read(arguments: Sequence[str]) -> argparse.Namespace:
    words = Arguments("tinker", str(__doc__), overrides=True)
    words.add_argument("--model", required=True, help=argparse.SUPPRESS)
    words.add_argument("--key", help=argparse.SUPPRESS)
    words.add_argument("--keys", type=Path, help=argparse.SUPPRESS)
    words.add_argument("--name", default="", help=argparse.SUPPRESS)
    words.add_argument("--folder", type=Path, default=Path("runs/tinker"), help=argparse.SUPPRESS)
    words.add_argument("--host", default="127.0.0.1", help=argparse.SUPPRESS)
    words.add_argument("--port", type=whole(0), default=8000, help=argparse.SUPPRESS)
    words.add_argument("--queue", type=whole(1), default=4096, help=argparse.SUPPRESS)
    words.add_argument("--idle", type=number, default=600.0, help=argparse.SUPPRESS)
    words.add_argument("--without-key", action="store_true", help=argparse.SUPPRESS)
    flags = words.read(arguments)
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
    return flags


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
    given = keys(flags)
    with listening.bound("tinker", flags.host, flags.port) as heard:
        from jaxrl_post.launch import saved_policy
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
            say=_say,
        )
        return made.serve(heard)


def _say(line: str) -> None:
    print(line, flush=True)
