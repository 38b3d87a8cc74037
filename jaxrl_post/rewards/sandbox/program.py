"""A judged program's side: runs the program and serves calls to its functions until the channel closes.

Runs as `python -c` in a process of its own, behind the confinement. The package is not imported there: `sandbox` sends
this module and `wire` as compiled code. Nothing here is trusted by the other side.
"""

from __future__ import annotations

import collections
import contextlib
import sys
import types

MODULE = "program"  # its name in the judged process: it is imported, not started as a script


class Outcome:
    """Catches whatever a judged program raises, SystemExit too, because the test decides what it means."""

    def __init__(self):
        self.error: BaseException | None = None

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind, error, trace) -> bool:
        self.error = error
        return True


class Server:
    """Serves one program. Objects that are no plain values stay here, and the other side refers to them by number.

    Requests are dicts with "do":

    - "load": runs `source` in a namespace. The reply's "names" maps each of `wanted` that the program defines to
      "module" or to its value.
    - "call", "get", "set", "item", "put", "len", "iter", "next" act on the object "of".

    A reply holds "value", or "raised" and "text". "changed" holds new values of mutable arguments, by position or by
    "=" and name.
    """

    def __init__(self, channel, buffer: bytearray, wire):
        self._channel, self._buffer, self._wire = channel, buffer, wire
        self._objects: list = []
        module = sys.modules[MODULE] = types.ModuleType(MODULE)
        self._space = vars(module)

    def serve(self) -> None:
        """Replies to requests until the other end is closed."""
        while True:
            request = self._wire.receive(self._channel, self._buffer)
            outcome = Outcome()
            with outcome:
                frame = self._wire.pack(getattr(self, f"_{request['do']}")(request))
            if outcome.error is not None:
                kind = type(outcome.error).__name__
                frame = self._wire.pack({"raised": kind, "text": str(outcome.error)[:500]})
            self._channel.sendall(frame)

    def _load(self, request: dict) -> dict:
        for setup in request["before"]:
            with contextlib.suppress(NameError):  # a setup that names the program's own classes belongs behind it
                exec(compile(setup, "<setup>", "exec"), self._space)
        exec(compile(request["source"], "<program>", "exec"), self._space)
        found = {name: self._space[name] for name in request["wanted"] if name in self._space}
        return {
            "names": {
                name: "module" if isinstance(value, types.ModuleType) else ["value", self._encode(value)]
                for name, value in found.items()
            }
        }

    def _call(self, request: dict) -> dict:
        args = [self._decode(arg) for arg in request["args"]]
        named = {name: self._decode(arg) for name, arg in request["named"].items()}
        reply = {"value": self._encode(self._objects[request["of"]](*args, **named)), "changed": {}}
        given = [(str(place), arg, sent) for place, (arg, sent) in enumerate(zip(args, request["args"], strict=True))]
        given += [(f"={name}", arg, request["named"][name]) for name, arg in named.items()]
        for place, arg, sent in given:
            if isinstance(arg, (list, dict, set, bytearray, collections.deque)) and (now := self._encode(arg)) != sent:
                reply["changed"][place] = now
        return reply

    def _get(self, request: dict) -> dict:
        return {"value": self._encode(getattr(self._objects[request["of"]], request["name"]))}

    def _set(self, request: dict) -> dict:
        setattr(self._objects[request["of"]], request["name"], self._decode(request["value"]))
        return {"value": None}

    def _item(self, request: dict) -> dict:
        return {"value": self._encode(self._objects[request["of"]][self._decode(request["key"])])}

    def _put(self, request: dict) -> dict:
        self._objects[request["of"]][self._decode(request["key"])] = self._decode(request["value"])
        return {"value": None}

    def _len(self, request: dict) -> dict:
        return {"value": len(self._objects[request["of"]])}

    def _iter(self, request: dict) -> dict:
        return {"value": self._encode(iter(self._objects[request["of"]]))}

    def _next(self, request: dict) -> dict:
        return {"value": self._encode(next(self._objects[request["of"]]))}

    def _encode(self, value: object) -> object:
        return self._wire.encode(value, self._refer)

    def _decode(self, given: object) -> object:
        return self._wire.decode(given, lambda items: self._objects[items[0]])

    def _refer(self, value: object) -> list:
        for number, known in enumerate(self._objects):
            if known is value:
                return ["h", number]
        self._objects.append(value)
        return ["h", len(self._objects) - 1]
