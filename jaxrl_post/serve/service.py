"""Requests between the event loop and the engine: their seeds, their bound, their deadlines and their pieces.

Invariant: the noise of a rollout is a hash of (seed, prompt's tokens, sample), as in `Policy.generate` with the tokens for
the prompt's id. So its tokens follow from weights, prompt, seed and sampling law, whoever else is served.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import itertools
import json
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import anyio
import jax

from jaxrl_post.engine.row_engine import RowEngine
from jaxrl_post.json_text import said
from jaxrl_post.kernels import sampling
from jaxrl_post.launch.policy import Policy
from jaxrl_post.serve.asked import Asked
from jaxrl_post.serve.engine_thread import EngineThread, Lost, Piece, Told, Work
from jaxrl_post.serve.gauges import Gauges
from jaxrl_post.serve.prompts import Reading
from jaxrl_post.serve.refusal import Refusal
from jaxrl_post.serve.schema import check_stops
from jaxrl_post.types import MOST_ENDS, Prompt, Request, RolloutId, Sampling, served_seed

_SEED_BITS = 48  # of a seed that the server draws: JSON readers of every language keep such a number exactly
_STOP_S = 30.0  # for the last dispatch
GONE = 499  # nginx's status of a request whose client went away
_STOPPED = "the engine has stopped; the log of the server says why"
_FAILED = "the engine failed on a dispatch, and begins anew; send the request again; the log of the server says why"


class Ticket:
    """An open request: its pieces as they come.

    Attributes:
      prompts, law, seed: what it samples, of all samples of each prompt.
    """

    def __init__(self, prompts: Sequence[Prompt], law: Sampling, seed: int):
        self.prompts, self.law, self.seed = prompts, law, seed
        self.queue: asyncio.Queue[Piece | Lost] = asyncio.Queue()
        self.work: Work | None = None
        self.begun = time.monotonic()
        self.open = 0  # rollouts whose end was not told yet
        self.heard = False  # whether a piece has come
        self.places: dict[int, int] = {}  # rollout that has not ended -> its replica
        self.watcher: asyncio.Task | None = None  # waits for the client to go away
        self.cut: asyncio.TimerHandle | None = None  # ends a response that is not read

    async def pieces(self) -> AsyncIterator[Piece]:
        """Yields pieces until every rollout has ended.

        Raises:
          Refusal: the deadline is over, the engine has failed, or the server is stopping.
        """
        while self.open:
            piece = await self.queue.get()
            if isinstance(piece, Lost):
                self.open = self.open if piece.status == GONE else 0
                raise Refusal(piece.status, piece.why)
            self.open -= piece.finish is not None
            yield piece

    def leave(self) -> None:
        """Ends `pieces`, as the client is gone."""
        self.queue.put_nowait(Lost(GONE, "the client is gone"))


class Service:
    """A policy that is served.

    Args:
      name: of the model, as clients call it.
      queue: rollouts that may wait for a slot.
      timeout_s: of a request that names none.
      parser: of tool calls, a name of data/tool_calls.py.
      say: gets lines for the operator.
    """

    def __init__(
        self, policy: Policy, engine: RowEngine, *, name: str, queue: int, timeout_s: float, parser: str, say: Any
    ):
        self.policy, self.name, self.parser, self.timeout_s = policy, name, parser, timeout_s
        self.words = policy.tokenizer
        self.most = engine.sizes.slots * engine.sizes.replicas + queue
        self.key = fingerprint(policy, engine)
        self.gauges = Gauges()
        self.thread = EngineThread(
            engine, post=self._post, counted=self.gauges.counted, say=say, ended=lambda: self._later(self._end)
        )
        self.failed, self.broken, self._stopping = asyncio.Event(), False, False
        self._reading = Reading(self.words, policy.template(), policy.config.engine.max_length, tools=parser != "none")
        self._one, self._telling = anyio.CapacityLimiter(1), anyio.CapacityLimiter(1)
        self._serials, self._load = itertools.count(), Counter(dict.fromkeys(range(engine.sizes.replicas), 0))
        self._open: set[Ticket] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        for gauge, about, value in (
            ("pending", "Rollouts in slots and waiting for one.", lambda: self.thread.pending),
            ("weight_version", "Version of the weights: the optimizer step of a run.", lambda: self.thread.version),
            ("most_pending", "Rollouts that may be pending.", lambda: self.most),
        ):
            self.gauges.watch(gauge, about, value)

    def start(self) -> None:
        """Starts the engine's thread. It is called in the event loop."""
        self._loop = asyncio.get_running_loop()
        self.thread.start()

    async def stop(self) -> None:
        """Ends the engine's thread, and open requests with it."""
        self._stopping = True
        await anyio.to_thread.run_sync(self.thread.stop, _STOP_S)
        self._reading.close()

    async def open(self, asked: Asked) -> Ticket:
        """Hands a request to the engine.

        Raises:
          Refusal: it is wrong, or too many rollouts wait already.
        """
        self.check_model(asked.model)
        law = self._law(asked)
        prompts = await anyio.to_thread.run_sync(self._reading.prompts, asked, limiter=self._one)
        ticket = Ticket(prompts, law, secrets.randbits(_SEED_BITS) if asked.seed is None else asked.seed)
        self._admit(asked.n, len(prompts))
        requests = self._requests(ticket, asked)
        ticket.open = len(requests)
        ticket.work = Work(
            requests=requests,
            streams=asked.stream,
            deadline=time.monotonic() + (asked.timeout_s or self.timeout_s),
            tell=functools.partial(self._told, ticket),
        )
        self._open.add(ticket)
        ticket.places = {place: request.replica for place, request in enumerate(requests)}
        self._load.update(ticket.places.values())
        self.thread.submit(ticket.work)
        self.gauges.prompt_tokens.inc(sum(prompt.tokens.size for prompt in prompts))
        return ticket

    async def tokens(self, asked: Asked) -> list[int]:
        """Returns the token ids of the one prompt of a request, which may be longer than a slot.

        Raises:
          Refusal: the model is another, or the prompt cannot be read or has more than `longest_text` characters.
        """
        self.check_model(asked.model)
        limiter = self._one if asked.chat else self._telling  # a long text holds no other request up
        return await anyio.to_thread.run_sync(self._reading.tokens, asked, limiter=limiter)

    @property
    def longest_text(self) -> int:
        """Returns the most characters of a text, and the most ids, that are read."""
        return self._reading.longest

    def check_model(self, name: str) -> None:
        """Raises a Refusal where a request names another model. Without a name it does nothing."""
        if name and name != self.name:
            raise Refusal(404, f"there is no model {name[:80]!r}; the only one is {self.name!r}", "model")

    def close(self, ticket: Ticket) -> None:
        """Forgets a request. Rollouts that still run leave the engine before the next dispatch."""
        if ticket not in self._open:
            return
        self._open.remove(ticket)
        left = bool(ticket.places)
        self._free(ticket, list(ticket.places))
        self.gauges.seconds.observe(time.monotonic() - ticket.begun)
        if ticket.open:  # the client went away
            self.gauges.left.inc()
        if left:
            self.thread.cancel(ticket.work)

    @property
    def pending(self) -> int:
        """Returns the number of rollouts that have not ended."""
        return self._load.total()

    # ---- what a request becomes

    def _law(self, asked: Asked) -> Sampling:
        """Returns the sampling law of a request.

        Raises:
          Refusal: a stop string cannot be found in a text (data/ends.py).
        """
        stops, ends = asked.law.get("stop_ids", ()), len(self.policy.sampling.eos_ids)
        check_stops("stop_token_ids", stops, self.words.vocab_size, MOST_ENDS - ends)
        try:
            return self.policy.law(asked.law)
        except ValueError as error:
            raise Refusal(400, said(error), "stop") from error

    def _requests(self, ticket: Ticket, asked: Asked) -> tuple[Request, ...]:
        """Returns a request of the engine for each sample of each prompt. Samples of a prompt share a replica."""
        out, load = [], self._load.copy()
        for prompt in ticket.prompts:
            room = self.policy.config.engine.max_length - prompt.tokens.size
            if asked.max_tokens > room:
                raise Refusal(
                    400,
                    f"max_tokens={asked.max_tokens} behind a prompt of {prompt.tokens.size} tokens is beyond the "
                    f"{self.policy.config.engine.max_length} positions served; the largest valid value is {room}",
                    "max_tokens",
                )
            replica = min(load, key=lambda one: (load[one], one))
            load[replica] += asked.n
            serial = next(self._serials)
            out += [
                Request(
                    rollout_id=RolloutId(serial, "eval", 0, prompt.id, sample),
                    prompt=prompt,
                    seed=served_seed(ticket.seed, prompt.id, sample),
                    max_tokens=asked.max_tokens or self.policy.room(prompt),
                    sampling=ticket.law,
                    replica=replica,
                )
                for sample in range(asked.n)
            ]
        return tuple(out)

    def _admit(self, n: int, prompts: int) -> None:
        """Refuses rollouts beyond the bound."""
        count = n * prompts
        if self.failed.is_set():
            raise Refusal(503, _STOPPED)
        if count > self.most:
            raise Refusal(
                400,
                f"n={n} of {prompts} prompts are {count} rollouts; at most {self.most} run or wait at the same time",
                "n",
            )
        if self.pending + count > self.most:
            raise Refusal(
                429,
                f"{self.pending} rollouts run or wait, and at most {self.most} may; ask again later",
                headers={"Retry-After": "1"},
            )

    # ---- what the engine's thread says

    def _post(self, told: Told) -> None:
        self._later(self._deliver, told)

    def _later(self, call: Any, *arguments: Any) -> None:
        """Calls something in the event loop, where there still is one."""
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(call, *arguments)

    def _deliver(self, told: Told) -> None:
        for work, piece in told:
            work.tell(piece)

    def _told(self, ticket: Ticket, piece: Piece | Lost) -> None:
        """Passes a piece on. A rollout that has ended frees its place at once, whether its client reads or not."""
        ended = list(ticket.places) if isinstance(piece, Lost) else [piece.place] if piece.finish is not None else []
        self._free(ticket, ended)
        ticket.queue.put_nowait(piece)

    def _free(self, ticket: Ticket, places: Sequence[int]) -> None:
        self._load.subtract([ticket.places.pop(place) for place in places if place in ticket.places])

    def last_word(self) -> None:
        """Ends open requests, as the server is stopping."""
        self._lose(503, "the server is stopping; send the request again later")

    def _lose(self, status: int, why: str) -> None:
        for ticket in self._open:
            if ticket.work is not None and ticket.places:
                self.thread.cancel(ticket.work)
            self._told(ticket, Lost(status, why))

    def _end(self) -> None:
        """Tells open requests that the thread has ended. One that was not told to end begins anew."""
        if self._stopping:
            self.last_word()
        elif self.thread.sound:
            self._lose(500, _FAILED)
            self.gauges.restarts.inc()
            self.thread.restart()
            return
        else:
            self._lose(503, _STOPPED)
        self.broken = not self._stopping
        self.failed.set()


def fingerprint(policy: Policy, engine: RowEngine) -> str:
    """Returns 8 hex digits of what bits depend on beside the weights: the numerics key of the engine."""
    device, sizes = jax.devices()[0], engine.sizes
    told: Mapping[str, Any] = {
        "jax": jax.__version__,
        "device": f"{device.platform}/{device.device_kind}",
        "law": sampling.LAW,
        "rows": list(engine.row_sizes),
        "layout": list(engine.layout),
        "sizes": [sizes.slots, sizes.max_length, sizes.page, sizes.prompt_rows],
        "dtype": policy.config.engine.dtype,
        "model": repr(policy.model),
    }
    return hashlib.blake2b(json.dumps(told, sort_keys=True).encode(), digest_size=4).hexdigest()
