"""The server: a policy, its engine, the followed run and uvicorn, put together and taken apart in order.

Invariant: running rollouts keep their tokens at a swap, and the new weights compute keys and values of the text again. So
every token is the one that the weights of its version sample behind the text before it.
"""

from __future__ import annotations

import functools
import socket
from collections.abc import Callable
from typing import Any

from jaxrl_post.engine.host.swap_policy import SwapPolicy
from jaxrl_post.launch.parts import inputs, saved_policy
from jaxrl_post.launch.parts.policy import Policy
from jaxrl_post.serve.app import app
from jaxrl_post.serve.followed_run import FollowedRun
from jaxrl_post.serve.http_server import CLOSING_S, HttpServer
from jaxrl_post.serve.listening import address
from jaxrl_post.serve.service import Service

Following = Callable[..., FollowedRun]


class Server:
    """A server of one policy.

    Args:
      version: of the policy's weights.
      following: makes the FollowedRun, where a run is followed.
      token: that clients need; empty: none.
      how: as in Service.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        version: int = 0,
        following: Following | None = None,
        token: str,
        say: Callable[[str], object],
        **how: Any,
    ):
        say(f"compiling the engine of {how['name']}; its address follows")
        self.engine = policy.engine(version=version)
        self.engine.swap_policy = SwapPolicy("recompute")
        self.service = Service(policy, self.engine, say=say, **how)
        self._run, gauges = None, self.service.gauges
        if following is not None:
            run = self._run = following(
                version=version, swap=self.service.thread.swap, say=say, failed=gauges.unread.inc
            )
            gauges.watch("run_followed", "Whether newer weights of the run are still looked for.", lambda: run.alive)
        self._token, self._say = token, say
        self._http = HttpServer(app(self.service, token), self.service.last_word)

    def serve(self, listening: socket.socket) -> int:
        """Serves at a socket until a signal, `stop`, or the end of the engine. Returns the exit code."""
        self._say(f"serving {self.service.name}, version {self.engine.version}, at {address(listening)}/v1")
        self._say(
            f"token {self._token}" if self._token else "no token is asked for: whoever reaches the port is served"
        )
        if self._run is not None:
            self._run.start()
        try:
            self._http.run(listening, self.service.failed)
        finally:
            if self._run is not None:
                self._run.stop(CLOSING_S)
        return int(self.service.broken)

    def stop(self) -> None:
        """Ends the server. It may be called in any thread."""
        self._http.stop()


def following(run: str, policy: Policy, start: inputs.PolicyFiles, every_s: float) -> Following:
    """Returns what makes the FollowedRun of a run, whose policy this is. `start`: the files of what it begins with."""
    return functools.partial(
        FollowedRun,
        newest=functools.partial(saved_policy.newest_step, run),
        load=lambda step: policy.placed(saved_policy.of_step(run, step, policy.config, start)),
        every_s=every_s,
    )


def version_of(path: str) -> int:
    """Returns the step in RUN@STEP, and 0 for other policies."""
    _, at, step = path.rpartition("@")
    return int(step) if at and step.isdecimal() else 0
