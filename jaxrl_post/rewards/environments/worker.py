"""The child side of environments: loads one, then plays conversations with it, one step at a time.

It keeps the objects of the latest conversations. One that it does not have is played again from its row and from what the
policy said. An exception ends the process after a last message, as in a reward process (rewards/worker.py).

Invariant: a conversation that is played again must give the same observations, else it is refused.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import pickle
import socket
import sys
import time
from base64 import b64decode
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxrl_post.rewards import worker as functions
from jaxrl_post.rewards.lifetime import die_with
from jaxrl_post.rewards.sandbox import counts

_STEP = ("key", "row", "said", "known")
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


def load(path: str, code: str, arguments: Mapping) -> Callable[[], Any]:
    """Returns what makes an environment's object.

    Raises:
      functions.Refused: no such module, file or name, or the object lacks a method.
    """
    found = pickle.loads(b64decode(code)) if code else functions._found(path)
    if not callable(found):
        raise functions.Refused(f"environment {path!r} is a {type(found).__name__}, neither a class nor a function")

    def make() -> Any:
        made = found(**arguments)
        lacking = [name for name in ("reset", "step") if not callable(getattr(made, name, None))]
        if lacking:
            raise functions.Refused(f"environment {path!r} has no method {lacking[0]!r}")
        return made

    return make


def begun(make: Callable[[], Any], row: Mapping) -> Live:
    """Returns a conversation that begins."""
    environment = make()
    return Live(environment, _messages(environment.reset(dict(row)), "reset"), [])


def stepped(live: Live, message: Mapping) -> dict[str, Any]:
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


class Player:
    """Plays conversations and keeps the objects of the latest ones."""

    def __init__(self, make: Callable[[], Any]):
        self._make = make
        self._live: OrderedDict[str, Live] = OrderedDict()

    def play(self, task: Mapping) -> dict[str, Any]:
        """Returns the reply to a task: what follows a turn, or the beginning of a row's conversation."""
        return self.step(**{name: task[name] for name in _STEP}) if "said" in task else self.reset(task["row"])

    def step(self, key: str, row: Mapping, said: Sequence[Mapping], known: Sequence[str]) -> dict[str, Any]:
        """Returns what follows the last of `said`, and the seconds of that step. `known`: the digests of what followed the
        others.

        Raises:
          Unlike: played again, something else followed.
        """
        live = self._live.pop(key, None)
        if live is None or live.said != list(said[:-1]):
            live = begun(self._make, row)
            for message, expected in zip(said[:-1], known, strict=True):
                if digest(stepped(live, message)["messages"]) != expected:
                    raise Unlike("played again with the same messages, it returned something else")
        self._live[key] = live
        while len(self._live) > KEPT:
            self._live.popitem(last=False)
        begin = time.monotonic()
        return stepped(live, said[-1]) | {"seconds": time.monotonic() - begin}

    def reset(self, row: Mapping) -> dict[str, Any]:
        """Returns the messages that a row's conversation begins with."""
        return {"messages": begun(self._make, row).messages}

    def close(self, key: str) -> None:
        """Drops a conversation."""
        self._live.pop(key, None)


def main(fd: int, parent: int) -> None:
    """Serves the socket `fd` until the other end closes it. Each reply names the task that it is of."""
    die_with(parent)
    os.set_inheritable(fd, False)
    channel, buffer = socket.socket(fileno=fd), bytearray()
    first, task = functions._receive(channel, buffer), None
    path = first["path"]

    def last_word(kind, error, trace):
        told = functions.words(error, trace, [path.rpartition(":")[0]])
        if task is None:
            place = f" at {told['place']}" if told["place"] else ""
            text = f"environment {path!r} cannot be loaded: {told['failed']}{place}"
            channel.sendall(functions.pack({"refused": str(error) if kind is functions.Refused else text}))
        else:
            channel.sendall(functions.pack({"task": task["task"]} | told))

    sys.excepthook = last_word
    make = load(path, first["code"], first["arguments"])
    player = Player(make)
    channel.sendall(functions.pack({"ready": list(getattr(make(), "tools", ()) or ())}))
    while True:
        task = functions._receive(channel, buffer)
        for key in task["closed"]:
            player.close(key)
        begin = time.monotonic()
        reply = player.play(task)
        about = {"task": task["task"], "restarts": counts.pop("restarts", 0)}
        channel.sendall(functions.pack(about | {"seconds": time.monotonic() - begin} | reply))
