"""python -m jaxrl_post serve (--model=POLICY | --run=RUN [--model=POLICY]) [--port=8000] [...]

Serves a policy over HTTP, in OpenAI's form: /v1/completions, /v1/chat/completions, /v1/models, /health, /metrics, and vLLM's
/tokenize, /detokenize and /version. It needs pip install 'jaxrl_post[serve]'. docs/serve.md says what a request may hold.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxrl_post.commands.arguments import POLICY, Command
from jaxrl_post.config import refuse_url
from jaxrl_post.config.command_line import OVERRIDE, Flag, number, whole
from jaxrl_post.data.tool_calls import PARSERS
from jaxrl_post.serve import listening

_NEEDED = ("starlette", "uvicorn", "httptools", "prometheus_client", "pydantic")

_FLAGS = (
    Flag("--model=POLICY", POLICY),
    Flag(
        "--run=RUN",
        "follows a run: its newest saved weights, swapped in between two dispatches. It begins with the newest step, else "
        "with the run's own model, for which --model may stand",
    ),
    Flag("--every=SECONDS", "between two looks for newer weights; 2", number, 2.0),
    Flag("--host=ADDRESS", "where it listens; 127.0.0.1", default="127.0.0.1"),
    Flag("--port=PORT", "8000; 0 takes a free one", whole(0), 8000),
    Flag(
        "--token=TOKEN",
        "that clients send as their API key; the variable JAXRL_POST_TOKEN, else a new one, which is printed",
        default=None,
    ),
    Flag("--without-token", "lets everybody in who reaches the port"),
    Flag("--name=NAME", "of the model, as clients call it; the last part of POLICY or RUN"),
    Flag("--queue=N", "rollouts that may wait for a slot, before requests are refused with 429; 256", whole(0), 256),
    Flag("--timeout=SECONDS", "of a request that names none; 600", number, 600.0),
    Flag(
        "--tool-calls=PARSER",
        "how calls are read in a turn: hermes, llama3, mistral, qwen3_coder or gemma4; none",
        default="none",
        choices=sorted(PARSERS),
    ),
    Flag(OVERRIDE, "an option of the engine, for example --config.engine.slots=32"),
)


def _check(flags: argparse.Namespace) -> None:
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


def _serve(flags: argparse.Namespace) -> int:
    """Binds the port before anything is compiled, so that a port that is taken costs no minute."""
    _check(flags)
    with listening.bound("serve", flags.host, flags.port) as heard, contextlib.suppress(KeyboardInterrupt):
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
            say=functools.partial(print, flush=True),
        )
        return made.serve(heard)
    return 0


main = Command("serve", __doc__, _FLAGS, _serve)


def _opened(flags: argparse.Namespace) -> tuple[Any, int, Callable[..., Any] | None]:
    """Returns the policy, the version of its weights, and what makes a FollowedRun where a run is followed."""
    from jaxrl_post.launch.parts import saved_policy
    from jaxrl_post.launch.parts.policy import Policy
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
