"""Promises: a request becomes one, which is settled once, and whose result its client fetches later.

They belong to the event loop. A request that is sent twice, as clients do after a lost connection, becomes one promise and
is carried out once.
"""

from __future__ import annotations

import asyncio
import collections
import secrets
from collections.abc import Callable, Hashable, Mapping
from typing import Any

from jaxrl_post.ring.json_text import said
from jaxrl_post.serve.schema import Refusal

KEPT = 4096  # settled promises that can still be fetched, the newest ones
KEPT_NUMBERS = 1 << 22  # in results that were fetched and can be fetched again; a number takes about 32 bytes
Result = Mapping[str, Any]  # in the API's form


class Promise:
    """A request's result, once it is there. `owner`: the session that asked. `key_owner`: who alone may fetch it.

    `numbers`: of a result that was fetched, or that nobody fetches any more; 0 before.
    """

    def __init__(self, name: str, owner: str, key_owner: str):
        self.name, self.owner, self.key_owner = name, owner, key_owner
        self.result: Result | None = None
        self.numbers = 0
        self._settled = asyncio.Event()

    async def wait(self, seconds: float) -> bool:
        """Returns whether the result is there, after at most these seconds."""
        try:
            await asyncio.wait_for(self._settled.wait(), seconds)
        except TimeoutError:
            return False
        return True

    def settle(self, result: Result) -> None:
        """Gives the result. A second one is left out."""
        if self.result is None:
            self.result = result
            self._settled.set()

    def take(self) -> Result | None:
        """Returns the result for its client. It is kept for a client that asks again, but not for ever."""
        self.numbers = _numbers(self.result)
        return self.result


class Promises:
    """All promises that can be fetched, by name."""

    def __init__(self) -> None:
        self._open: collections.OrderedDict[str, Promise] = collections.OrderedDict()
        self._keys: dict[Hashable, str] = {}
        self._named: dict[str, Hashable] = {}

    def find(self, name: str, key_owner: str = "") -> Promise | None:
        """Returns a promise, or None where it was never made, is forgotten, or is another owner's."""
        one = self._open.get(name)
        return one if one is not None and one.key_owner == key_owner else None

    def earlier(self, key: Hashable) -> Promise | None:
        """Returns the promise of an earlier request with this key."""
        return self._open.get(self._keys.get(key, ""))

    def make(self, owner: str, key: Hashable = None, key_owner: str = "") -> Promise:
        """Returns a new promise. `key`: tells a repeated request from a new one; None: none is repeated."""
        self._forget()
        one = Promise(secrets.token_hex(16), owner, key_owner)
        self._open[one.name] = one
        if key is not None:
            self._keys[key], self._named[one.name] = one.name, key
        return one

    def end(self, reason: Result, owner: str = "") -> None:
        """Settles what is open, of one owner or of all."""
        for one in self._open.values():
            if not owner or one.owner == owner:
                one.settle(reason)
                one.take()

    def _forget(self) -> None:
        """Drops the oldest settled promises beyond KEPT, and the oldest fetched ones beyond KEPT_NUMBERS."""
        beyond, numbers = len(self._open) - KEPT, sum(one.numbers for one in self._open.values()) - KEPT_NUMBERS
        for name, one in list(self._open.items()) if max(beyond, numbers) > 0 else ():
            if one.result is not None and (beyond > 0 or (numbers > 0 and one.numbers)):
                beyond, numbers = beyond - 1, numbers - one.numbers
                del self._open[name]
                self._keys.pop(self._named.pop(name, None), None)


def _numbers(value: Any) -> int:
    """Counts what lists hold, at any depth. A list holds lists and objects alone, or none."""
    if isinstance(value, Mapping):
        return sum(map(_numbers, value.values()))
    if not isinstance(value, list) or not value:
        return 0
    return sum(map(_numbers, value)) if isinstance(value[0], (list, Mapping)) else len(value)


def refused(sentence: str, *, ours: bool = False) -> dict[str, str]:
    """Returns the result of a request that failed, in the API's form. `ours`: the server is at fault."""
    return {"error": sentence, "category": "server" if ours else "user"}


def answered(call: Callable[[], Result]) -> Result:
    """Returns the result of a call, or its refusal."""
    try:
        return call()
    except (Refusal, ValueError) as error:
        return refused(said(error), ours=isinstance(error, Refusal) and error.status >= 500)
