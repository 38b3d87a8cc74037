"""The device program of the engine: R rows a step, several steps a dispatch, for every replica at once.

A row is (slot, position, input token). It runs through the model, writes its KV entry, and, when the token after it is not
settled, samples it. Positions below `known` are settled; those from `known` to `guessed` hold candidates. A sample that
equals its candidate lets the next candidate row count; the first that differs is written and the rest dropped. So prefill,
decode, verification and recomputation are this one program.

Invariant: what a position gets depends on the weights, the tokens before it, the seed and the temperature; never on slot,
page, company, candidates, or on how many steps a dispatch has. A dispatch ends early only on the state itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxrl_post import mesh as meshes
from jaxrl_post import rowplan
from jaxrl_post.kernels import attention, thresholds, verify
from jaxrl_post.models import decoder
from jaxrl_post.types import MOST_ENDS

# columns of the packed host-to-device matrix, then MOST_ENDS ids, then the page table
ACTIVE, KNOWN, FILLED, GUESSED, LIMIT, MAPPED, ORDER, WATCH, *_LAW, FIRST_END = range(14)
SEED0, SEED1, TEMPERATURE, TOP_K, TOP_P = _LAW
TABLE = FIRST_END + MOST_ENDS
# columns of the packed device-to-host matrix, then four blocks of `emit`: tokens, log-probs, entropies, step*2+drafted
OUT_KNOWN, OUT_FILLED, OUT_GUESSED, OUT_DONE, OUT_WINDOW = range(5)
USES = ("prefill", "decode", "draft_accepted", "draft_rejected", "idle")


@dataclass(frozen=True)
class Sizes:
    """What programs are compiled for, one replica's. `emit`: tokens one slot may get in one dispatch. `restricted`: rows
    may have top-k and top-p. `shards`: over which devices a vocabulary lies, if there are several."""

    replicas: int
    slots: int
    max_length: int
    page: int
    pages: int
    heads: int
    steps: int
    emit: int
    inserts: int
    restricted: bool
    shards: verify.Shards | None = None

    @classmethod
    def of(cls, replicas: int, *, slots: int, max_length: int, page_size: int, pages: int, head_rows: int,
           steps_per_dispatch: int, restricted: bool = False) -> Sizes:
        """Those of an engine's settings."""
        return cls(replicas=replicas, slots=slots, max_length=max_length, page=page_size, pages=pages, heads=head_rows,
                   steps=steps_per_dispatch, emit=min(max_length, max(4 * steps_per_dispatch, 16)),
                   inserts=min(slots, 16), restricted=restricted)

    @property
    def blocks(self) -> int:
        return -(-self.max_length // self.page)


class State(NamedTuple):
    """What stays on the device: one Cache per layer with a leading replica axis, and all tokens [replicas, S, T]."""

    cache: tuple
    tokens: Array


class Slots(NamedTuple):
    """What changes from step to step, [S] each (window arrays [S, emit])."""

    known: Array
    filled: Array
    guessed: Array
    done: Array
    logprobs: Array
    entropies: Array
    stamps: Array
    uses: Array  # [len(USES)]


def _ends(tokens: Array, ends: Array) -> Array:
    return jnp.any(tokens[:, None] == ends, axis=1)


def _accept(plan: rowplan.Plan, guess: Array, sampled: Array, ended: Array) -> tuple[Array, Array, Array]:
    """Per head: the token to write, whether it counts, and whether it equals its candidate and may be continued."""
    match = (sampled == guess) & ~ended & plan.head_real
    before = jnp.cumsum(~match) - ~match
    first = jnp.arange(match.shape[0]) - plan.head_rank
    return sampled, plan.head_real & (before == before[first]), match


def _step(rows: int, sizes: Sizes, config: decoder.ModelConfig, dtype: Any, spread: Callable, params: Any, packed: Array,
          cache: tuple, tokens: Array, slots: Slots, number: Array) -> tuple[tuple, Array, Slots]:
    """One step of one replica; packed [S, columns], tokens [S, T]. `spread` gives a kernel to the devices."""
    going = (packed[:, ACTIVE] > 0) & (slots.done == 0)
    bound = _bound(packed, sizes)
    forced = jnp.where(going & (slots.known <= bound), slots.known - slots.filled, 0)
    candidates = jnp.maximum(jnp.minimum(slots.guessed, bound) - slots.known, 0)
    plan = rowplan.plan(jnp, forced, candidates, packed[:, ORDER], rows=rows, heads=sizes.heads)
    position = jnp.where(plan.real, slots.filled[plan.slot] + plan.offset, 0)
    at = attention.Rows(plan.slot, position, plan.real, packed[:, TABLE:])

    def attend(layer, q, k, v, cache, **how):
        written = attention.write(cache[layer], k, v, at)
        run = functools.partial(attention.attention, **how)
        run = spread(run) if attention.serving(q, written) else run
        return run(q, written, at), (*cache[:layer], written, *cache[layer + 1:])

    inputs = jnp.where(plan.real, tokens[plan.slot, position], 0)
    h, cache = decoder.hidden(params, config, inputs, position, attend, cache, dtype=dtype)
    logits = decoder.logits(params, config, h[plan.head_row])

    slot, after = plan.head_slot, position[plan.head_row] + 1
    sampled, *law = _draw(sizes, packed[slot], logits, after)
    guess = jnp.where(after < slots.guessed[slot], tokens[slot, jnp.minimum(after, sizes.max_length - 1)], -1)
    ended = _ends(sampled, packed[slot, FIRST_END:TABLE])
    sampled, counts, match = _accept(plan, guess, sampled, ended)
    tokens = tokens.at[slot, jnp.where(counts, after, sizes.max_length)].set(sampled, mode="drop")
    stamps = number * 2 + match
    return cache, tokens, _settle(sizes, packed, slots, plan, counts, ended, match, (*law, stamps), going, after)


def _draw(sizes: Sizes, packed: Array, logits: Array, after: Array) -> tuple[Array, Array, Array]:
    """Tokens, log-probs and entropies of the heads, whose own rows of `packed` are given."""
    as_float = functools.partial(jax.lax.bitcast_convert_type, new_dtype=jnp.float32)
    seeds = jax.lax.bitcast_convert_type(packed[:, SEED0:SEED1 + 1], jnp.uint32)
    heat, lowest = as_float(packed[:, TEMPERATURE]), None
    if sizes.restricted:
        lowest = thresholds.find(logits, heat, packed[:, TOP_K], as_float(packed[:, TOP_P]))
    return verify.verify_sample(logits, seeds, after, heat, lowest, sizes.shards)[:3]


def _settle(sizes: Sizes, packed: Array, slots: Slots, plan: rowplan.Plan, counts: Array, ended: Array, match: Array,
            told: tuple, going: Array, after: Array) -> Slots:
    """The slots after a step: what `counts` (heads whose sample is kept) says of each, and `told` about each head."""
    def heads_of_slot(which):
        return jnp.zeros_like(slots.known).at[plan.head_slot].add((counts & which).astype(jnp.int32))

    known = slots.known + heads_of_slot(counts)
    window = jnp.where(counts, after - packed[plan.head_slot, KNOWN], sizes.emit)
    logprobs, entropies, stamps = (old.at[plan.head_slot, window].set(new, mode="drop") for old, new in
                                   zip((slots.logprobs, slots.entropies, slots.stamps), told))
    guesses, heads = plan.head_real & (plan.head_rank > 0), jnp.sum(plan.head_real)
    uses = (jnp.sum(plan.real) - heads, heads - jnp.sum(guesses), jnp.sum(guesses & counts),
            jnp.sum(guesses & ~counts), plan.real.shape[0] - jnp.sum(plan.real))
    return Slots(
        known=known,
        filled=jnp.where(known > slots.known, known - 1, slots.filled + plan.count),
        guessed=jnp.where(heads_of_slot(~match) > 0, known, jnp.maximum(slots.guessed, known)),
        done=jnp.where(going & ((heads_of_slot(ended) > 0) | (known >= packed[:, LIMIT])), 1, slots.done),
        logprobs=logprobs, entropies=entropies, stamps=stamps, uses=slots.uses + jnp.stack(uses))


def _bound(packed: Array, sizes: Sizes) -> Array:
    """Rows of a slot stay below this position: the last token needs no row, pages and the window have an end."""
    return jnp.minimum(jnp.minimum(packed[..., LIMIT] - 1, packed[..., MAPPED]), packed[..., KNOWN] + sizes.emit - 1)


def _dispatch(rows: int, sizes: Sizes, config: decoder.ModelConfig, dtype: Any, spread: Callable, params: Any,
              state: State, packed: Int[Array, "replicas S columns"], scalars: Int[Array, " 2"]
              ) -> tuple[State, Array, Array, Array]:
    """Up to scalars[0] steps; leaves once scalars[1] slots of a replica finished, a watched prompt is ready, nothing is
    left to do, or a slot has no room."""
    step = jax.vmap(functools.partial(_step, rows, sizes, config, dtype, spread), in_axes=(None, 0, 0, 0, 0, None),
                    spmd_axis_name=meshes.REPLICAS)
    shape = packed.shape[:2]
    empty = jnp.zeros((*shape, sizes.emit))
    slots = Slots(packed[..., KNOWN], packed[..., FILLED], packed[..., GUESSED], jnp.zeros(shape, jnp.int32), empty, empty,
                  jnp.zeros((*shape, sizes.emit), jnp.int32), jnp.zeros((shape[0], len(USES)), jnp.int32))

    def go_on(carry):
        number, _, _, slots = carry
        going = (packed[..., ACTIVE] > 0) & (slots.done == 0)
        stalled = going & (slots.known > _bound(packed, sizes))
        ready = (packed[..., WATCH] > 0) & (slots.filled >= packed[..., WATCH])
        freed = jnp.max(jnp.sum(slots.done, axis=-1))
        return (number < scalars[0]) & jnp.any(going) & ~jnp.any(stalled) & ~jnp.any(ready) & (freed < scalars[1])

    def body(carry):
        number, cache, tokens, slots = carry
        return number + 1, *step(params, packed, cache, tokens, slots, number)

    number, cache, tokens, slots = jax.lax.while_loop(go_on, body, (jnp.int32(0), state.cache, state.tokens, slots))
    where = jnp.minimum(packed[..., KNOWN, None] + jnp.arange(sizes.emit), sizes.max_length - 1)
    as_int = functools.partial(jax.lax.bitcast_convert_type, new_dtype=jnp.int32)
    out = jnp.concatenate([jnp.stack([slots.known, slots.filled, slots.guessed, slots.done], axis=-1),
                           jnp.take_along_axis(tokens, where, axis=-1), as_int(slots.logprobs), as_int(slots.entropies),
                           slots.stamps], axis=-1)
    return State(cache, tokens), out, slots.uses, number


def _insert(state: State, slot: Array, tokens: Array, source: Array, target: Array) -> State:
    """Puts texts into slots and copies pages: slot, source and target [replicas, I], tokens [replicas, I, T]; a slot >= S or
    a target >= pages is dropped."""
    cache = tuple(jax.vmap(attention.copy)(layer, source, target) for layer in state.cache)
    put = jax.vmap(lambda old, where, new: old.at[where].set(new, mode="drop"))
    return State(cache, put(state.tokens, slot, tokens))


class Programs:
    """The compiled programs, one dispatch for each row size. Only these ever run, so a new shape is an error, not a
    recompilation."""

    def __init__(self, config: decoder.ModelConfig, mesh: jax.sharding.Mesh, sizes: Sizes, row_sizes: tuple[int, ...],
                 dtype: Any):
        shards = verify.Shards(functools.partial(meshes.by_vocab, mesh), meshes.TENSOR, mesh.shape[meshes.TENSOR])
        self.sizes = replace(sizes, shards=shards if mesh.size > 1 else None)
        self.config, self.mesh, self.row_sizes, self.dtype = config, mesh, row_sizes, dtype
        self._whole = meshes.replicated(mesh)
        blocks, cached = meshes.slot_sharding(mesh), meshes.cache_sharding(mesh)
        self._placed = State(tuple(attention.Cache(cached) for _ in range(config.layers)), blocks)
        self._dispatches: dict[int, Callable] = {}

    def compile(self, params: Any) -> None:
        """Compiles everything for weights like these."""
        s = self.sizes
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), params)
        state = jax.eval_shape(self._blank)
        ints = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32, sharding=self._whole)
        state = jax.tree.map(lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), state, self._placed)
        spread = functools.partial(meshes.by_heads, self.mesh)
        for rows in self.row_sizes:
            run = jax.jit(functools.partial(_dispatch, rows, s, self.config, self.dtype, spread), donate_argnums=1,
                          out_shardings=(self._placed, self._whole, self._whole, self._whole))
            self._dispatches[rows] = run.lower(like, state, ints((s.replicas, s.slots, TABLE + s.blocks)),
                                               ints((2,))).compile()
        some = ints((s.replicas, s.inserts))
        self._insert = jax.jit(_insert, donate_argnums=0, out_shardings=self._placed).lower(
            state, some, ints((s.replicas, s.inserts, s.max_length)), some, some).compile()

    def temporaries(self) -> dict[str, int]:
        """Bytes that each compiled program needs on a device beside what it is given and gives back."""
        return {name: program.memory_analysis().temp_size_in_bytes for name, program in self.compiled.items()}

    @property
    def compiled(self) -> dict[str, Any]:
        """What `compile` made, by name."""
        return {f"dispatch_{rows}": run for rows, run in self._dispatches.items()} | {"insert": self._insert}

    def _blank(self) -> State:
        s, c = self.sizes, self.config
        cache = tuple(jax.tree.map(lambda x: jnp.broadcast_to(x, (s.replicas, *x.shape)),
                                   attention.empty(s.pages, s.page, c.kv_heads, c.head_dim, self.dtype))
                      for _ in range(c.layers))
        return State(cache, jnp.zeros((s.replicas, s.slots, s.max_length), jnp.int32))

    def blank(self) -> State:
        """An empty state, placed."""
        return jax.jit(self._blank, out_shardings=self._placed)()

    def dispatch(self, rows: int, params: Any, state: State, packed: np.ndarray, steps: int, freed: int
                 ) -> tuple[State, np.ndarray, np.ndarray, int]:
        """One dispatch; the new state, and on the host: out [replicas, S, ...], uses [replicas, 5], steps taken."""
        scalars = np.array([steps, freed], np.int32)
        state, *out = self._dispatches[rows](params, state, meshes.put(packed, self._whole),
                                             meshes.put(scalars, self._whole))
        out, uses, number = read(out)
        return state, out, uses, int(number)

    def insert(self, state: State, slot: np.ndarray, tokens: np.ndarray, source: np.ndarray, target: np.ndarray) -> State:
        """Puts texts and copies pages, `Sizes.inserts` a replica at once."""
        return self._insert(state, *(meshes.put(x, self._whole) for x in (slot, tokens, source, target)))


def temporaries(model: decoder.ModelConfig, mesh: jax.sharding.Mesh, *, row_sizes: Sequence[int], dtype: Any,
                **sizes: int | bool) -> dict[str, int]:
    """Bytes that each program of an engine of these settings needs on a device beside weights, pages and tokens: for a
    plan, from shapes alone."""
    homes = meshes.param_shardings(mesh, decoder.axes(model), "engine")
    programs = Programs(model, mesh, Sizes.of(meshes.replicas(mesh), **sizes), tuple(sorted(row_sizes)), dtype)
    programs.compile(jax.tree.map(lambda x, home: jax.ShapeDtypeStruct(x.shape, dtype, sharding=home),
                                  decoder.abstract(model), homes))
    return programs.temporaries()


def read(tree: Any) -> Any:
    """The one door from device to host: waits, and returns numpy."""
    return jax.device_get(tree)
