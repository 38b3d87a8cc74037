"""JetStream's Engine interface over the row engine, driven by JetStream's own orchestrator and gRPC server.

A prefix is a prompt: its rows run in the dispatch that samples its first token, as all rows of the engine do. The weights
are those that the engine holds.

Invariant: the tokens of a request are those of the engine driven directly, at any load. A request that cannot be served is
refused before it reaches a thread of JetStream, because any error in one of these kills the process.
"""

from __future__ import annotations

import functools
import re
import socket
from bisect import bisect_left
from collections.abc import AsyncIterator, Callable
from typing import Any
from unittest import mock  # replaces what JetStream has no argument for

import jax
import numpy as np

from jaxrl_post.data.tokenizer import Tokenizer
from jaxrl_post.engine.row_engine import RowEngine
from jaxrl_post.ring.types import Sampling
from jaxrl_post.serve import jetstream_package
from jaxrl_post.serve.slots import LENGTH, TOKEN, VALID, Slots

NO_TOKEN = -1  # pads prompts, and stands for the begin token of a model without one; no prompt keeps it
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
_BUCKETS = tuple(1 << power for power in range(4, 16))  # the lengths to which JetStream pads prompts
_IDLE = "At this point we must have some requests inserted into the slots."

package = jetstream_package.load()


class JetStreamTokenizer(package.tokenizer_api.Tokenizer):
    """A tokenizer as JetStream calls it. `ends`: ids that end a request."""

    def __init__(self, tokenizer: Tokenizer, ends: tuple[int, ...]):
        self._tokenizer, self._ends = tokenizer, ends

    def encode(self, s: str, **padding: Any) -> tuple[Any, int]:
        """Returns the padded ids of a text and their number. `padding`: arguments of JetStream's `pad_tokens`."""
        return package.token_utils.pad_tokens(
            np.array(self._tokenizer.encode(s), np.int32), self.bos_id, self.pad_id, **padding | {"is_bos": False}
        )

    def decode(self, token_ids: list[int], **ways: Any) -> str:
        """Returns the text of one token within a text, so that JetStream can join texts. A byte stays <0x0A>."""
        (one,) = token_ids
        model = getattr(self._tokenizer, "model", None)
        piece = model.id_to_token(one) if model else self._tokenizer.pieces[one].decode("utf-8", "replace")
        if piece is not None and _BYTE.fullmatch(piece):
            return piece
        return self._tokenizer.decode([one], before=[one])

    @property
    def pad_id(self) -> int:
        return NO_TOKEN

    @property
    def eos_id(self) -> int:
        return self._ends[0] if self._ends else NO_TOKEN

    @property
    def bos_id(self) -> int:
        return NO_TOKEN if self._tokenizer.bos_id is None else self._tokenizer.bos_id

    @property
    def stop_tokens(self) -> set[int]:
        return {*self._ends, NO_TOKEN}


class Engine(package.engine_api.Engine):
    """JetStream's Engine over the slots of a row engine. Requests with `sampling_params` alone, seeded by `seed` and their prompt."""

    def __init__(self, rows: RowEngine, tokenizer: Tokenizer, sampling_params: Sampling, seed: int = 0):
        self._rows, self._tokenizer, self._sampling_params = rows, tokenizer, sampling_params
        self.slots = Slots(rows, sampling_params, seed)

    def prefill(self, *, params: Any, existing_prefix: Any = None, padded_tokens: Any, true_length: int) -> np.ndarray:
        """Returns the prompt, int32[T]: its keys and values are computed behind `insert`."""
        assert existing_prefix is None, "the engine shares prompts of its own accord"
        tokens = np.asarray(padded_tokens)[:true_length].astype(np.int32)
        return tokens[tokens != NO_TOKEN]

    def insert(self, prefix: Any, decode_state: None, slot: int) -> None:
        """Gives the slot to a prompt."""
        self.slots.insert(np.array(prefix, np.int32), slot)

    def generate(self, params: Any, decode_state: None) -> tuple[None, Any]:
        """Returns the next token of every slot. Dispatches run where a slot has none left."""
        columns = [(column, column + 1) for column in (TOKEN, VALID, LENGTH)]
        return None, package.engine_api.ResultTokens(self.slots.read(), *columns, self.samples_per_slot)

    def free_resource(self, slot: int) -> None:
        """Drops the request of a slot. JetStream 0.2.2 never says so: there a slot runs until it is filled again."""
        self.slots.free(slot)

    def load_params(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the weights that the engine holds. Those handed to `generate` are not read."""
        return self._rows.device.params

    def init_decode_state(self, *args: Any, **kwargs: Any) -> None:
        """Empties all slots. Their state lives in the engine."""
        self.slots.clear()

    def get_prefix_destination_sharding(self) -> Any:
        return None

    def get_tokenizer(self) -> Any:
        return package.tokenizer_pb2.TokenizerParameters()

    def build_tokenizer(self, metadata: Any) -> JetStreamTokenizer:
        return JetStreamTokenizer(self._tokenizer, (*self._sampling_params.eos_ids, *self._sampling_params.stop_ids))

    def refusal(self, request: Any) -> str:
        """Returns why a DecodeRequest cannot be served, or an empty text."""
        if not request.WhichOneof("content"):
            return "the request has neither text_content nor token_content"
        if request.max_tokens < 1:
            return f"max_tokens={request.max_tokens}; the nearest valid number is 1"
        if request.session_cache:
            return "session_cache names a session, and none is kept; leave it empty and send the whole text"
        try:
            tokens = self._prompt(request)
        except ValueError as error:
            return str(error)
        longest = min(self.slots.longest_prompt, self.max_prefill_length)
        if len(tokens) > longest:
            return f"the prompt has {len(tokens)} tokens; the nearest valid number is {longest}"
        return self.slots.refusal(tokens)

    def _prompt(self, request: Any) -> list[int]:
        """Returns the prompt of a DecodeRequest, which `prefill` will see."""
        if request.HasField("text_content"):
            return self._tokenizer.encode(request.text_content.text)
        begin = [] if self._tokenizer.bos_id is None else [self._tokenizer.bos_id]
        return [*begin, *request.token_content.token_ids]

    @property
    def max_concurrent_decodes(self) -> int:
        return self.slots.count

    @property
    def samples_per_slot(self) -> int:
        return 1

    @property
    def max_prefill_length(self) -> int:
        """Returns the first of JetStream's buckets that holds every prompt, for it takes no other number."""
        return _BUCKETS[min(bisect_left(_BUCKETS, self.slots.longest_prompt), len(_BUCKETS) - 1)]

    @property
    def mesh(self) -> jax.sharding.Mesh:
        return self._rows.device.programs.mesh

    @property
    def colocated_cpus(self) -> None:
        return None


class Orchestrator(package.orchestrator.LLMOrchestrator):
    """JetStream's gRPC service. It ends a request that the engine cannot serve with INVALID_ARGUMENT and a sentence."""

    def __init__(self, engine: Engine, driver: Any):
        super().__init__(driver=driver)
        self._engine = engine

    async def Decode(self, request: Any, context: Any = None) -> AsyncIterator[Any]:
        why = self._engine.refusal(request)
        if why:
            await context.abort(package.grpc.StatusCode.INVALID_ARGUMENT, why)
        async for response in super().Decode(request, context):
            yield response


class Thread(package.orchestrator.JetThread):
    """A thread of JetStream. It begins anew where all requests end between two looks of it at the free slots.

    JetStream asserts that this never happens. No slot holds a request then, so that a new beginning loses nothing. Any
    other error kills the process, as JetStream wants it.
    """

    def __init__(self, *, target: Callable[[], None], **named: Any):
        super().__init__(target=functools.partial(_begun_again, target), **named)


def _begun_again(work: Callable[[], None]) -> None:
    while True:
        try:
            return work()
        except AssertionError as error:
            if str(error) != _IDLE:
                raise


def serve(engine: Engine, host: str, port: int) -> Any:
    """Starts JetStream's server and returns it, a JetStreamServer. `host`: the address that it listens on.

    JetStream's own choice would be every address of the machine. A ValueError says that nothing can listen there."""
    try:
        socket.create_server((host, port)).close()
    except OSError as error:
        raise ValueError(f"jetstream: {host}:{port} cannot be listened on: {error.strerror}") from error
    devices = jax.devices()
    config = package.config_lib.ServerConfig(
        interleaved_slices=(f"devices={len(devices)}",), interleaved_engine_create_fns=(lambda devices: engine,)
    )
    with (
        mock.patch.object(package.orchestrator, "JetThread", Thread),
        mock.patch.object(package.orchestrator, "LLMOrchestrator", functools.partial(Orchestrator, engine)),
        mock.patch.object(package.server_lib, "_HOST", host),
    ):
        return package.server_lib.run(port, config, devices, jax_padding=False)
