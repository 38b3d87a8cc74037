"""The endpoint of a run: its sessions over HTTP, in a thread beside the ring.

Invariant: it is open from before anything is compiled until the run has written its policy. Then every harness that waits
hears that the run has ended. If the server fails, the run ends, too.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

from jaxrl_post.config import Config
from jaxrl_post.data.tokenizer import Tokenizer
from jaxrl_post.parallel.processes import say
from jaxrl_post.rewards.environments import harness
from jaxrl_post.rewards.environments.sessions import Sessions
from jaxrl_post.serve import listening

_NEEDED = ("starlette", "uvicorn", "httptools", "prometheus_client", "pydantic")


@contextlib.contextmanager
def opened(config: Config, tokenizer: Tokenizer) -> Iterator[Sessions]:
    """Yields the sessions of a run, which harnesses play over HTTP until the block ends.

    A ValueError names a wrong option, an address that is taken, or a package of the extra `serve` that is not installed."""
    where = harness.read(config.environment.arguments)
    listening.need("environment.name='harness'", *_NEEDED)
    from jaxrl_post.serve.agents import app

    sessions = Sessions(timeout_s=config.environment.timeout_s, say=say)
    token = listening.token()
    about = app.About(
        model=config.name,
        tokenizer=tokenizer,
        tools=where.tools,
        max_turns=config.environment.max_turns,
        max_tokens=config.sampling.max_tokens,
    )
    with listening.bound("environment.arguments", where.host, where.port) as heard:
        shown = f"of {listening.TOKEN}" if os.environ.get(listening.TOKEN) else token
        say(f"harness: sessions at {listening.address(heard)}/v1/sessions, token {shown}")
        with served(sessions, app.app(sessions, about, token), heard):
            yield sessions


@contextlib.contextmanager
def served(sessions: Sessions, application: Any, heard: socket.socket) -> Iterator[None]:
    """Serves an application in a thread until the block ends. Then all sessions end, and open responses with them."""
    from jaxrl_post.serve.http_server import CLOSING_S, HttpServer

    http = HttpServer(application, lifespan="off")

    def serve() -> None:
        try:
            http.run(heard)
        finally:
            sessions.stop("its server has ended; the traceback above says why")

    thread = threading.Thread(target=serve, name="harness", daemon=True)
    thread.start()
    try:
        yield
    finally:
        sessions.stop("the run has ended")
        http.stop()
        thread.join(2 * CLOSING_S)
