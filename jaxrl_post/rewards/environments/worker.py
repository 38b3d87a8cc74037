"""The environment of a child process: conversations are played with it, one step at a time (rewards/child.py).

The process keeps the objects of the latest conversations. One that it does not have is played again from its row and from
what the policy said.

Invariant: a conversation that is played again must give the same observations, else it is refused.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxrl_post.rewards.child import Refused, Service, found, serve

KEPT = 1024  # conversations whose objects a process keeps


class Unlike(Exception):
    """An environment that was played again did not return what it had returned before."""


class Live(NamedTuple):
    """A conversation: the environment's object, all messages, and what the policy said."""

    environment: Any
    messages: list
    said: list


def digest(messages: Sequence[Mapping]) -> str:
    """Returns a hash of messages."""
    return hashlib.blake2b(json.dumps(messages, sort_keys=True).encode(), digest_size=8).hexdigest()


class Player(Service):
    """Plays conversations. `first`: the environment's path, its code, and its arguments."""

    def __init__(self, first: Mapping):
        self._path, self._code, self._arguments = first["path"], first["code"], first["arguments"]
        self._live: OrderedDict[str, Live] = OrderedDict()
        self.what, self.files = f"environment {self._path!r}", [self._path.rpartition(":")[0]]

    def load(self) -> dict:
        self._found = found(self._path, self._code)
        if not callable(self._found):
            kind = type(self._found).__name__
            raise Refused(f"environment {self._path!r} is a {kind}, neither a class nor a function")
        return {"ready": list(getattr(self._made(), "tools", ()) or ())}

    def answer(self, task: Mapping) -> dict[str, Any]:
        """Returns what follows a turn, or the beginning of a row's conversation. It forgets those that are closed."""
        for key in task["closed"]:
            self._live.pop(key, None)
        if "said" not in task:
            return {"messages": self._begun(task["row"]).messages}
        return self._step(task["key"], task["row"], task["said"], task["known"])

    def _made(self) -> Any:
        """Returns an object of the environment."""
        made = self._found(**self._arguments)
        lacking = [name for name in ("reset", "step") if not callable(getattr(made, name, None))]
        if lacking:
            raise Refused(f"environment {self._path!r} has no method {lacking[0]!r}")
        return made

    def _begun(self, row: Mapping) -> Live:
        environment = self._made()
        return Live(environment, _messages(environment.reset(dict(row)), "reset"), [])

    def _step(self, key: str, row: Mapping, said: Sequence[Mapping], known: Sequence[str]) -> dict[str, Any]:
        """Returns what follows the last of `said`, and the seconds of that step. `known`: the digests of what followed the
        others.

        Raises:
          Unlike: played again, something else followed.
        """
        live = self._live.pop(key, None)
        if live is None or live.said != list(said[:-1]):
            live = self._begun(row)
            for message, expected in zip(said[:-1], known, strict=True):
                if digest(_stepped(live, message)["messages"]) != expected:
                    raise Unlike("played again with the same messages, it returned something else")
        self._live[key] = live
        while len(self._live) > KEPT:
            self._live.popitem(last=False)
        begin = time.monotonic()
        return _stepped(live, said[-1]) | {"seconds": time.monotonic() - begin}


def _stepped(live: Live, message: Mapping) -> dict[str, Any]:
    """Returns what the environment says to the policy's message: messages, reward, done and numbers."""
    live.said.append(message)
    live.messages.append(dict(message))
    returned = live.environment.step([dict(one) for one in live.messages])
    if not isinstance(returned, Sequence) or isinstance(returned, str) or len(returned) != 4:
        raise TypeError(f"step must return (messages, reward, done, info), got {str(returned)[:80]!r}")
    messages, reward, done, info = returned
    observed, reward = _messages(messages, "step"), float(reward)
    live.messages.extend(observed)
    if not math.isfinite(reward):
        raise ValueError(f"step returned the reward {reward}, which is not finite")
    numbers = {str(k): float(v) for k, v in dict(info).items() if isinstance(v, (bool, int, float))}
    return {
        "messages": observed,
        "reward": reward,
        "done": bool(done),
        "numbers": {name: number for name, number in numbers.items() if math.isfinite(number)},
    }


def _messages(given: Any, method: str) -> list[dict]:
    """Checks what a method returned as messages."""
    if not isinstance(given, (list, tuple)) or not all(isinstance(one, Mapping) and "role" in one for one in given):
        raise TypeError(f"{method} must return a list of messages with a role, got {str(given)[:80]!r}")
    return json.loads(json.dumps([dict(one) for one in given]))


main = functools.partial(serve, made=Player)
