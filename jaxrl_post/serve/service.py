"""Requests between the event loop and the engine: their seeds, their bound, their deadlines and their chunks.

Invariant: the noise of a rollout is a hash of (seed, prompt's tokens, sample), as in `Policy.generate` with the tokens for
the prompt's id. So its tokens follow from weights, prompt, seed and sampling law, whoever else is served.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import itertools
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import anyio
import jax

from jaxrl_post.engine.row_engine import RowEngine
from jaxrl_post.kernels import eight_bits
from jaxrl_post.kernels.sampling import LAW
from jaxrl_post.launch.parts.policy import Policy
from jaxrl_post.ring.json_text import said
from jaxrl_post.ring.types import MOST_ENDS, Prompt, Request, Sampling
from jaxrl_post.serve.device_service import DeviceService
from jaxrl_post.serve.device_thread import EngineRequest, TokenChunk
from jaxrl_post.serve.gauges import Gauges
from jaxrl_post.serve.prompts import Reading, engine_requests
from jaxrl_post.serve.request_bodies import SamplingRequest
from jaxrl_post.serve.schema import Refusal, check_stops

_SEED_BITS = 48  # of a seed that the server draws: JSON readers of every language keep such a number exactly
GONE = 499  # nginx's status of a request whose client went away
_STOPPED = "the engine has stopped; the log of the server says why"
_FAILED = "the engine failed on a dispatch, and begins anew; send the request again; the log of the server says why"


class Ticket:
    """An open request: its chunks as they come.

    Attributes:
      prompts, sampling_params, seed: what it samples, of all samples of each prompt.
    """

    def __init__(self, prompts: Sequence[Prompt], sampling_params: Sampling, seed: int):
        self.prompts, self.sampling_params, self.seed = prompts, sampling_params, seed
        self.queue: asyncio.Queue[TokenChunk | Refusal] = asyncio.Queue()
        self.request: EngineRequest | None = None
        self.begun = time.monotonic()
        self.open = 0  # rollouts whose end was not read yet
        self.heard = False  # whether a chunk has come
        self.places: dict[int, int] = {}  # rollout that has not ended -> its replica
        self.watcher: asyncio.Task | None = None  # waits for the client to go away
        self.cut: asyncio.TimerHandle | None = None  # ends a response that is not read

    async def chunks(self) -> AsyncIterator[TokenChunk]:
        """Yields chunks until every rollout has ended.

        Refused: what is not sampled by its deadline, or when the engine fails or the server stops."""
        while self.open:
            chunk = await self.queue.get()
            if isinstance(chunk, Refusal):
                self.open = self.open if chunk.status == GONE else 0
                raise chunk
            self.open -= chunk.finish is not None
            yield chunk

    def leave(self) -> None:
        """Ends `chunks`, as the client is gone."""
        self.queue.put_nowait(Refusal("the client is gone", status=GONE))


class Service(DeviceService):
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
        self.tokenizer = policy.tokenizer
        self.most = engine.sizes.slots * engine.sizes.replicas + queue
        self.key = fingerprint(policy, engine)
        self.gauges = Gauges()
        super().__init__(engine, say=say, counted=self.gauges.counted)
        self.reading = Reading(
            self.tokenizer, policy.template(), policy.config.engine.max_length, tools=parser != "none"
        )
        self._one, self._telling = anyio.CapacityLimiter(1), anyio.CapacityLimiter(1)
        self._serials, self._load = itertools.count(), Counter(dict.fromkeys(range(engine.sizes.replicas), 0))
        self._open: set[Ticket] = set()
        for gauge, about, value in (
            ("pending", "Rollouts in slots and waiting for one.", lambda: self.thread.pending),
            ("weight_version", "Version of the weights: the optimizer step of a run.", lambda: self.thread.version),
            ("most_pending", "Rollouts that may be pending.", lambda: self.most),
        ):
            self.gauges.watch(gauge, about, value)

    async def stop(self) -> None:
        """Ends the thread and the process of the template, and open requests with them."""
        await super().stop()
        self.reading.close()

    async def open(self, sampling: SamplingRequest) -> Ticket:
        """Hands a request to the engine. Refused: a wrong one, or one too many."""
        self.check_model(sampling.model)
        sampling_params = self._sampling_params(sampling)
        prompts = await anyio.to_thread.run_sync(self.reading.prompts, sampling, limiter=self._one)
        sampling = sampling.seeded(_SEED_BITS)
        ticket = Ticket(prompts, sampling_params, sampling.seed)
        self._admit(sampling.n, len(prompts))
        requests = self._requests(ticket, sampling)
        ticket.open = len(requests)
        ticket.request = EngineRequest(
            requests=requests,
            streams=sampling.stream,
            deadline=time.monotonic() + (sampling.timeout_s or self.timeout_s),
            receive=functools.partial(self._receive, ticket),
        )
        self._open.add(ticket)
        ticket.places = {place: request.replica for place, request in enumerate(requests)}
        self._load.update(ticket.places.values())
        self.thread.submit(ticket.request)
        self.gauges.prompt_tokens.inc(sum(prompt.tokens.size for prompt in prompts))
        return ticket

    async def tokens(self, sampling: SamplingRequest) -> list[int]:
        """Returns the token ids of the one prompt of a request, which may be longer than a slot.

        Refused: another model, a prompt that cannot be read, or one of more than `reading.longest` characters."""
        self.check_model(sampling.model)
        limiter = self._one if sampling.chat else self._telling  # a long text holds no other request up
        return await anyio.to_thread.run_sync(self.reading.tokens, sampling, limiter=limiter)

    def check_model(self, name: str) -> None:
        """Raises a Refusal where a request names another model. Without a name it does nothing."""
        if name and name != self.name:
            raise Refusal(f"there is no model {name[:80]!r}; the only one is {self.name!r}", "model", status=404)

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
            self.thread.cancel(ticket.request)

    @property
    def pending(self) -> int:
        """Returns the number of rollouts that have not ended."""
        return self._load.total()

    # ---- what a request becomes

    def _sampling_params(self, sampling: SamplingRequest) -> Sampling:
        """Returns the sampling parameters of a request. Refused: a stop string that no text can hold (data/ends.py)."""
        stops, ends = sampling.sampling_changes.get("stop_ids", ()), len(self.policy.sampling.eos_ids)
        check_stops("stop_token_ids", stops, self.tokenizer.vocab_size, MOST_ENDS - ends)
        try:
            return self.policy.sampling_with(sampling.sampling_changes)
        except ValueError as error:
            raise Refusal(said(error), "stop") from error

    def _requests(self, ticket: Ticket, sampling: SamplingRequest) -> tuple[Request, ...]:
        """Returns a request of the engine for each sample of each prompt. Samples of a prompt share a replica."""
        out, load = [], self._load.copy()
        for prompt in ticket.prompts:
            room = self.policy.config.engine.max_length - prompt.tokens.size
            if sampling.max_tokens > room:
                raise Refusal(
                    f"max_tokens={sampling.max_tokens} behind a prompt of {prompt.tokens.size} tokens is beyond the "
                    f"{self.policy.config.engine.max_length} positions served; the largest valid value is {room}",
                    "max_tokens",
                )
            replica = min(load, key=lambda one: (load[one], one))
            load[replica] += sampling.n
            out += engine_requests(
                prompt,
                sampling,
                serial=next(self._serials),
                max_tokens=sampling.max_tokens or self.policy.room(prompt),
                sampling_params=ticket.sampling_params,
                replica=replica,
            )
        return tuple(out)

    def _admit(self, n: int, prompts: int) -> None:
        """Refuses rollouts beyond the bound."""
        count = n * prompts
        if self.failed.is_set():
            raise Refusal(_STOPPED, status=503)
        if count > self.most:
            raise Refusal(
                f"n={n} of {prompts} prompts are {count} rollouts; at most {self.most} run or wait at the same time",
                "n",
            )
        if self.pending + count > self.most:
            raise Refusal(
                f"{self.pending} rollouts run or wait, and at most {self.most} may; ask again later",
                headers={"Retry-After": "1"},
                status=429,
            )

    # ---- what the thread reports

    def _receive(self, ticket: Ticket, update: TokenChunk | Refusal) -> None:
        """Passes a chunk on. A rollout that has ended frees its place at once, whether its client reads or not."""
        if isinstance(update, Refusal):
            self._free(ticket, list(ticket.places))
        elif update.finish is not None:
            self._free(ticket, [update.place])
        ticket.queue.put_nowait(update)

    def _free(self, ticket: Ticket, places: Sequence[int]) -> None:
        self._load.subtract([ticket.places.pop(place) for place in places if place in ticket.places])

    def last_word(self) -> None:
        self._refuse_open(503, "the server is stopping; send the request again later")

    def _give_up(self) -> None:
        self._refuse_open(503, _STOPPED)

    def _begin_anew(self) -> None:
        self._refuse_open(500, _FAILED)
        self.gauges.restarts.inc()
        self.thread.restart()

    def _refuse_open(self, status: int, sentence: str) -> None:
        for ticket in self._open:
            if ticket.request is not None and ticket.places:
                self.thread.cancel(ticket.request)
            self._receive(ticket, Refusal(sentence, status=status))


def fingerprint(policy: Policy, engine: RowEngine) -> str:
    """Returns 8 hex digits of what bits depend on beside the weights: the numerics key of the engine."""
    device, sizes = jax.devices()[0], engine.sizes
    about: Mapping[str, Any] = {
        "jax": jax.__version__,
        "device": f"{device.platform}/{device.device_kind}",
        "law": LAW,
        "rows": list(engine.row_sizes),
        "layout": engine.layout.numbers,
        "sizes": [sizes.slots, sizes.max_length, sizes.page_size, sizes.prompt_rows],
        "dtype": policy.config.engine.dtype,
        "model": repr(policy.model),
    }
    if {sizes.weights, sizes.kv} != {eight_bits.AUTO}:
        about = {**about, "formats": [sizes.weights, sizes.kv]}
    return hashlib.blake2b(json.dumps(about, sort_keys=True).encode(), digest_size=4).hexdigest()
