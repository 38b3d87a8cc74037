"""Values of the row program: what stays on the device, what changes in each step, and what is fixed at compilation."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from jaxtyping import Array

from jaxrl_post.engine import recurrent_rows, row_numbers
from jaxrl_post.engine.host.wire import EngineSettings
from jaxrl_post.engine.speculation.interface import Drafter
from jaxrl_post.kernels import attention, hardware, small_arrays
from jaxrl_post.models import cache_kinds, decode_stack, decoder, experts, layer_loop


class State(NamedTuple):
    """What stays on the device between dispatches, with a leading replica axis.

    cache: for each layer that keeps something of its own, a Cache of pages or a recurrent_rows.Recurrent. tokens:
    int32[replicas, S, T]. argmax_tokens: the likeliest token at each position, int32[replicas, S, T]; T = 0 without a drafter.
    memory: what the drafter remembers."""

    cache: tuple
    tokens: Array
    argmax_tokens: Array
    memory: Any


class Slots(NamedTuple):
    """What changes from step to step, [S] each; windows of new tokens are [S, emit]."""

    num_tokens: Array
    num_computed: Array
    candidate_end: Array
    done: Array
    logprobs: Array
    entropies: Array
    stamps: Array
    kept: Array  # ids of each token's record, -1 behind the last one, and words of its route, [S, emit, record]
    uses: Array  # [row_numbers.USED]
    offers: Array  # [OFFERS]
    won: Array  # tokens that sequences took over from their clones

    @property
    def progress(self) -> row_numbers.Progress:
        return row_numbers.Progress(*self[: len(row_numbers.Progress._fields)])


class Work(NamedTuple):
    """The rows of a step."""

    rows: row_numbers.Rows
    values: Array  # worth of each draft, f32[S, W]


@dataclass(frozen=True, kw_only=True)
class Program:
    """What is fixed when a program is compiled.

    `dtype`: of activations. `spread(attention)`: the same attention, run by each device on its own part.
    `spread_states(read)`: the same for recurrent_rows.read. `routing`: how rows come to their experts. `platforms`: those
    whose kernels may be used. `of_states`: those whose kernels of recurrent rows and of thresholds may be."""

    config: decoder.ModelConfig
    dtype: Any
    spread: Callable
    spread_states: Callable
    routing: experts.Routing = experts.ALONE
    platforms: frozenset[str] = hardware.PLATFORMS
    of_states: frozenset[str] = hardware.PLATFORMS

    def attending(self, rows: Any, read: Callable) -> Callable:
        """Returns the decoder's `attend`: it writes the rows' keys and values where a layer has pages, and reads its pages.

        `read`: attention over `rows`, with kernels of `platforms`.
        """
        kept = self.config.kept
        places = cache_kinds.places(kept)

        def attend(layer, q, k, v, cache, *, sinks=None, **how):
            place = places[layer]
            written = attention.write(cache[place], k, v, rows) if kept[layer].of is None else cache[place]
            run = self.spread(functools.partial(read, platforms=self.platforms, **how))
            own = () if sinks is None else (sinks,)
            return run(q, written, rows, *own), (*cache[:place], written, *cache[place + 1 :])

        return attend

    def recurring(self, rows: recurrent_rows.SlotRows, slot: Array) -> Callable:
        """Returns the decoder's `recur`: each row reads the state of its slot, and settled rows move it. slot: of each row."""
        places = cache_kinds.places(self.config.kept)
        run = self.spread_states(functools.partial(recurrent_rows.read, platforms=self.of_states))

        def recur(layer, inputs, g, beta, weights, cache):
            place = places[layer]
            out, moved = run(cache[place], rows, slot, inputs, g, beta, weights)
            return out, (*cache[:place], moved, *cache[place + 1 :])

        return recur


@dataclass(frozen=True, kw_only=True)
class RowProgram(Program):
    """What is fixed when a dispatch is compiled. `rows`: rows of a step. `small`: a form of small_arrays.run.

    between: (rows) -> decode_stack.Between, where kernels run between the products of the layers. None: XLA's operations do."""

    rows: int
    sizes: EngineSettings
    drafter: Drafter
    small: Callable = small_arrays.run
    between: Callable | None = None

    def hidden(
        self, params: Any, inputs: Array, at: attention.Rows, calls: layer_loop.Callbacks, cache: tuple
    ) -> tuple[Array, Any]:
        """Returns the normed output of the last layer for rows, and the cache after it."""
        if self.between is not None:
            between = self.between(at)
            return decode_stack.hidden(params, self.config, inputs, at.position, between, cache, self.dtype)
        how = dict(cache=cache, dtype=self.dtype, **calls._asdict())
        return decoder.hidden(params, self.config, inputs, at.position, **how)
