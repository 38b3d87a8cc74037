"""python -m jaxrl_post serve (--model=POLICY | --run=RUN [--model=POLICY]) [--port=8000] [...]

Serves a policy over HTTP, in OpenAI's form: /v1/completions, /v1/chat/completions, /v1/models, /health, /metrics, and vLLM's
/tokenize, /detokenize and /version. It needs pip install 'jaxrl_post[serve]'. docs/serve.md says what a request may hold.

--model=POLICY        a Hugging Face directory, a llama2.c file, RUN for the policy that a run ended with, or RUN@STEP
--run=RUN             follows a run: its newest saved weights, swapped in between two dispatches. It begins with the newest
                      step, else with the run's own model, for which --model may stand
--every=SECONDS       between two looks for newer weights; 2
--host=ADDRESS        where it listens; 127.0.0.1
--port=PORT           8000; 0 takes a free one
--token=TOKEN         that clients send as their API key; the variable JAXRL_POST_TOKEN, else a new one, which is printed
--without-token       lets everybody in who reaches the port
--name=NAME           of the model, as clients call it; the last part of POLICY or RUN
--queue=N             rollouts that may wait for a slot, before requests are refused with 429; 256
--timeout=SECONDS     of a request that names none; 600
--tool-calls=PARSER   how calls are read in a turn: hermes, llama3 or mistral; none
--config.a.b=VALUE    an option of the engine, for example --config.engine.slots=32
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jaxrl_post.commands.arguments import Arguments, answered, number, whole
from jaxrl_post.config import refuse_url
from jaxrl_post.data.tool_calls import PARSERS
from jaxrl_post.serve import listening

_NEEDED = ("starlette", "uvicorn", "httptools", "prometheus_client", "pydantic")


def main(arguments: Sequence[str]) -> int:
    """Serves until it is stopped. Exit code 1, with one sentence, where something given is wrong, or the engine failed."""
    try:
        return answered(lambda: _serve(_read(arguments)))
    except KeyboardInterrupt:
        return 0


def _read(arguments: Sequence[str]) -> argparse.Namespace:
    words = Arguments("serve", str(__doc__), overrides=True)
    for name in ("--model", "--run", "--name"):
        words.add_argument(name, default="", help=argparse.SUPPRESS)
    words.add_argument("--token", help=argparse.SUPPRESS)
    words.add_argument("--host", default="127.0.0.1", help=argparse.SUPPRESS)
    words.add_argument("--port", type=whole(0), default=8000, help=argparse.SUPPRESS)
    words.add_argument("--queue", type=whole(0), default=256, help=argparse.SUPPRESS)
    words.add_argument("--timeout", type=number, default=600.0, help=argparse.SUPPRESS)
    words.add_argument("--every", type=number, default=2.0, help=argparse.SUPPRESS)
    words.add_argument("--tool-calls", choices=sorted(PARSERS), default="none", help=argparse.SUPPRESS)
    words.add_argument("--without-token", action="store_true", help=argparse.SUPPRESS)
    flags = words.read(arguments)
    if not (flags.model or flags.run):
        raise ValueError("serve: say what is served: --model=POLICY or --run=RUN")
    if flags.token == "":
        raise ValueError("serve: --token is empty: give one, leave it out for a new one, or give --without-token")
    if flags.token and flags.without_token:
        raise ValueError("serve: --token and --without-token are both given: leave one out")
    listening.check_port("serve", flags.port)
    for name, least in (("timeout", 0.001), ("every", 0.1)):
        if getattr(flags, name) < least:
            raise ValueError(f"serve: --{name}={getattr(flags, name):g} must be at least {least:g} seconds")
    refuse_url(flags.run, "--run")
    listening.need("serve", *_NEEDED)
    return flags


def _serve(flags: argparse.Namespace) -> int:
    """Binds the port before anything is compiled, so that a port that is taken costs no minute."""
    with listening.bound("serve", flags.host, flags.port) as heard:
        from jaxrl_post.serve import server

        token = "" if flags.without_token else listening.token(flags.token or "")
        policy, version, following = _opened(flags)
        made = server.Server(
            policy,
            version=version,
            following=following,
            token=token,
            name=flags.name or Path((flags.run or flags.model).rstrip("/")).name,
            queue=flags.queue,
            timeout_s=flags.timeout,
            parser=flags.tool_calls,
            say=_say,
        )
        return made.serve(heard)


def _say(line: str) -> None:
    print(line, flush=True)


def _opened(flags: argparse.Namespace) -> tuple[Any, int, Callable[..., Any] | None]:
    """Returns the policy, the version of its weights, and what makes a FollowedRun where a run is followed."""
    from jaxrl_post.launch import saved_policy
    from jaxrl_post.launch.policy import Policy
    from jaxrl_post.serve import server

    if not flags.run:
        config, files = saved_policy.files(flags.model, flags.overrides, saved_policy.READ)
        return Policy(config, files), server.version_of(flags.model), None
    config, start = saved_policy.started(flags.run, flags.overrides, flags.model)
    step = saved_policy.newest_step(flags.run, 0)
    if not step and (Path(flags.run) / "policy" / "config.json").is_file():
        raise ValueError(f"serve: {flags.run} has ended and saved no step; write --model={flags.run}")
    files = saved_policy.of_step(flags.run, step, config, start) if step else start
    policy = Policy(config, files)
    return policy, step or 0, server.following(flags.run, policy, start, flags.every)
