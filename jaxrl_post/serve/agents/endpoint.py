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
def opened(config: Config, words: Tokenizer) -> Iterator[Sessions]:
    """Yields the sessions of a run, which harnesses play over HTTP until the block ends.

    Raises:
      ValueError: a wrong option, an address that is taken, or a package of the extra `serve` that is not installed.
    """
    where = harness.read(config.environment.arguments)
    listening.need("environment.name='harness'", *_NEEDED)
    sessions = Sessions(timeout_s=config.environment.timeout_s, say=say)
    with listening.bound("environment.arguments", where.host, where.port) as heard:
        token = listening.token()
        served = Served(sessions, _app(config, words, where, sessions, token), heard)
        told = f"of {listening.TOKEN}" if os.environ.get(listening.TOKEN) else token
        say(f"harness: sessions at {listening.address(heard)}/v1/sessions, token {told}")
        try:
            yield sessions
        finally:
            served.stop()


class Served:
    """An application that is served in a thread, from now on."""

    def __init__(self, sessions: Sessions, application: Any, heard: socket.socket):
        from jaxrl_post.serve.http_server import CLOSING_S, HttpServer

        self._sessions, self._heard, self._closing_s = sessions, heard, CLOSING_S
        self._http = HttpServer(application, lifespan="off")
        self._thread = threading.Thread(target=self._run, name="harness", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends all sessions, and the server behind its open responses."""
        self._sessions.stop("the run has ended")
        self._http.stop()
        self._thread.join(2 * self._closing_s)

    def _run(self) -> None:
        try:
            self._http.run(self._heard)
        finally:
            self._sessions.stop("its server has ended; the traceback above says why")


def _app(config: Config, words: Tokenizer, where: harness.Where, sessions: Sessions, token: str) -> Any:
    from jaxrl_post.serve.agents.app import About, app

    about = About(
        model=config.name,
        words=words,
        tools=where.tools,
        max_turns=config.environment.max_turns,
        max_tokens=config.sampling.max_tokens,
    )
    return app(sessions, about, token)
