"""The device program of the engine: R rows a step, several steps a dispatch, for every replica at once.

A row is (slot, position, input token). It runs through the model, writes its KV entry, and, when the token after it is not
settled, samples it. Positions below `known` are settled; those from `known` to `guessed` hold candidates. A sample that
equals its candidate lets the next candidate row count; the first that differs is written and the rest dropped. So prefill,
decode, verification and recomputation are this one program. Where a slot has no candidates, a drafter may guess some from
what was written before; slots that stand in for another one (clones: same text and seed, its pages and own copies of those
still written) try other guesses, and after the step all take over the farthest. Replicas meet once a step, to agree on whether
there is another one.

Invariant: what a position gets depends on the weights, the tokens before it, the seed and the temperature; never on slot,
page, company, candidates, or on how many steps a dispatch has. A dispatch ends early only on the state itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxrl_post.engine import row_plan
from jaxrl_post.engine.host.wire import (
    ACTIVE,
    BRANCH,
    DRAFTS,
    FILLED,
    FIRST_END,
    GUESSED,
    KNOWN,
    LEADER,
    LIMIT,
    MAPPED,
    OFFERS,
    ORDER,
    SEED0,
    SEED1,
    TABLE,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    USES,
    WATCH,
    WEIGHT,
    Sizes,
    Told,
)
from jaxrl_post.engine.speculation.interface import Drafts
from jaxrl_post.engine.speculation.registry import Drafter
from jaxrl_post.kernels import attention, sampling, thresholds, verify
from jaxrl_post.models import decoder
from jaxrl_post.parallel import mesh as meshes


class State(NamedTuple):
    """What stays on the device, with a leading replica axis: one Cache per layer, all tokens [replicas, S, T], the tokens held
    most likely [replicas, S, T] (T = 0 without a drafter), and what the drafter remembers."""

    cache: tuple
    tokens: Array
    favourites: Array
    memory: Any


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
    offers: Array  # [OFFERS]
    won: Array  # tokens that answers took over from their clones


class Work(NamedTuple):
    """The rows of a step: the plan, the position of each row [R], the ends of candidates [S], forced rows [S], and what
    each draft is worth [S, W]."""

    plan: row_plan.Plan
    position: Array
    guessed: Array
    forced: Array
    values: Array


class Heads(NamedTuple):
    """What a step found at each head: whether its sample is kept, ends its rollout, equals its candidate; the sample's
    position; and what is reported of it: log-prob, entropy and stamp."""

    counts: Array
    ended: Array
    match: Array
    after: Array
    reported: tuple


@dataclass(frozen=True, kw_only=True)
class RowProgram:
    """What is fixed when a dispatch is compiled.

    `rows`: rows of a step. `dtype`: of activations. `spread(attention)`: the same attention, each device over its own part.
    """

    rows: int
    sizes: Sizes
    config: decoder.ModelConfig
    dtype: Any
    drafter: Drafter
    spread: Callable


def _ends(tokens: Array, ends: Array) -> Array:
    return jnp.any(tokens[:, None] == ends, axis=1)


def _accept(plan: row_plan.Plan, guess: Array, sampled: Array, ended: Array) -> tuple[Array, Array, Array]:
    """Per head: the token to write, whether it counts, and whether it equals its candidate and may be continued."""
    match = (sampled == guess) & ~ended & plan.head_real
    before = jnp.cumsum(~match) - ~match
    first = jnp.arange(match.shape[0]) - plan.head_rank
    return sampled, plan.head_real & (before == before[first]), match


def _step(
    program: RowProgram,
    params: Any,
    tables: Any,
    packed: Array,
    carry: State,
    slots: Slots,
    number: Array,
    clones: Array,
) -> tuple[State, Slots]:
    """Takes one step of one replica. packed [S, columns]; tokens [S, T]; `clones`: whether any slot is a clone."""
    sizes, config, drafter = program.sizes, program.config, program.drafter
    going = (packed[:, ACTIVE] > 0) & (slots.done == 0)
    drafts, tokens, work = _planned(program, tables, packed, carry, slots, going)
    plan, position = work.plan, work.position
    attend = _attending(attention.Rows(plan.slot, position, plan.real, packed[:, TABLE:]), program.spread)
    inputs = jnp.where(plan.real, tokens[plan.slot, position], 0)
    h, cache = decoder.hidden(params, config, inputs, position, attend, carry.cache, dtype=program.dtype)

    slot, after = plan.head_slot, position[plan.head_row] + 1
    sampled, *law, _, likely = _drawn(program, params, h[plan.head_row], packed[slot], after)
    guess = jnp.where(after < work.guessed[slot], tokens[slot, jnp.minimum(after, sizes.max_length - 1)], -1)
    ended = _ends(sampled, packed[slot, FIRST_END:TABLE])
    sampled, counts, match = _accept(plan, guess, sampled, ended)
    tokens = tokens.at[slot, jnp.where(counts, after, sizes.max_length)].set(sampled, mode="drop")
    favourites = carry.favourites
    if favourites.shape[1] and drafter.width:
        favourites = favourites.at[slot, jnp.where(counts, after, sizes.max_length)].set(likely, mode="drop")
    heads = Heads(counts, ended, match, after, (*law, number * 2 + match))
    settled = _settle(sizes, packed, slots._replace(guessed=work.guessed), plan, heads, going)
    settled = settled._replace(offers=slots.offers + _binned(work.values))
    state = State(cache, tokens, favourites, carry.memory)
    if drafter.width:
        state, settled = _shared(program, packed, state, slots, settled, drafts, work, going, clones)
    return state, settled


def _planned(
    program: RowProgram, tables: Any, packed: Array, carry: State, slots: Slots, going: Array
) -> tuple[Drafts, Array, Work]:
    """Drafts, the tokens with the drafts written behind `known`, and the rows of the step."""
    sizes, rows = program.sizes, program.rows
    bound = _bound(packed, sizes)
    drafts, tokens, values = _drafted(program.drafter, tables, carry.memory, packed, carry.tokens, slots, going, bound)
    offered = jnp.sum(values > 0, axis=1, dtype=jnp.int32)
    guessed = jnp.where(offered > 0, slots.known + offered, slots.guessed)
    forced = jnp.where(going & (slots.known <= bound), slots.known - slots.filled, 0)
    candidates = jnp.where(offered > 0, 0, jnp.maximum(jnp.minimum(guessed, bound) - slots.known, 0))
    weighed = values * jax.lax.bitcast_convert_type(packed[:, WEIGHT], jnp.float32)[:, None]
    heads = dict(heads=min(sizes.heads, rows), places=sizes.head_places(rows))
    plan = row_plan.plan(jnp, forced, candidates, weighed, packed[:, ORDER], rows=rows, **heads)
    position = jnp.where(plan.real, slots.filled[plan.slot] + plan.offset, 0)
    return drafts, tokens, Work(plan, position, guessed, forced, values)


def _shared(
    program: RowProgram,
    packed: Array,
    state: State,
    before: Slots,
    settled: Slots,
    drafts: Drafts,
    work: Work,
    going: Array,
    clones: Array,
) -> tuple[State, Slots]:
    """Lets clones and their leaders share what they settled, and shows the step's tokens to the drafter."""
    sizes, drafter = program.sizes, program.drafter
    cache, tokens, favourites, memory = state
    cache, tokens, favourites, settled = jax.lax.cond(
        clones,
        functools.partial(_follow, drafter.width, sizes, packed, before.filled),
        lambda *same: same,
        cache,
        tokens,
        favourites,
        settled,
    )
    leads = going & (packed[:, LEADER] == jnp.arange(sizes.slots))
    learn = favourites if favourites.shape[1] else tokens
    memory = drafter.observe(
        memory,
        drafts,
        packed[:, DRAFTS:FIRST_END],
        tokens,
        learn,
        before.known,
        settled.known,
        jnp.maximum(work.plan.count - work.forced, 0),
        leads,
    )
    return State(cache, tokens, favourites, memory), settled


def _attending(at: attention.Rows, spread: Callable) -> Callable:
    """The decoder's `attend`: writes the rows' keys and values, then looks at their slots' pages."""

    def attend(layer, q, k, v, cache, **how):
        written = attention.write(cache[layer], k, v, at)
        run = spread(functools.partial(attention.attention, **how))
        return run(q, written, at), (*cache[:layer], written, *cache[layer + 1 :])

    return attend


def _drafted(
    drafter: Drafter, tables: Any, memory: Any, packed: Array, tokens: Array, slots: Slots, going: Array, bound: Array
) -> tuple[Drafts, Array, Array]:
    """Drafts, the tokens with them written behind `known`, and what each is worth [S, W]: 0 where none is wanted, because
    the slot rests, prefills, has candidates already, or is near its end."""
    S, W = tokens.shape[0], drafter.width
    drafts = drafter.propose(tables, memory, tokens, slots.known, packed[:, DRAFTS:FIRST_END], packed[:, BRANCH])
    free = going & (slots.guessed <= slots.known) & (slots.filled == slots.known - 1)
    room = jnp.where(free, jnp.minimum(drafts.count, bound - slots.known), 0)
    wanted = jnp.arange(W) < room[:, None]
    where = jnp.where(wanted, slots.known[:, None] + jnp.arange(W), tokens.shape[1])
    tokens = tokens.at[jnp.arange(S)[:, None], where].set(drafts.tokens, mode="drop")
    return drafts, tokens, jnp.where(wanted, jnp.maximum(drafts.value, 2.0**-24), 0.0)


def _binned(values: Array) -> Array:
    """int32[OFFERS]: how many values lie in each sixteenth of 0 .. 1."""
    edges = jnp.arange(OFFERS) / OFFERS
    above = jnp.sum(values.reshape(-1, 1) > edges, axis=0, dtype=jnp.int32)
    return above - jnp.append(above[1:], 0)


def _follow(
    width: int, sizes: Sizes, packed: Array, filled: Array, cache: tuple, tokens: Array, favourites: Array, slots: Slots
) -> tuple[tuple, Array, Array, Slots]:
    """Every slot takes over the text of whichever of its leader and that one's clones has come farthest (ties: the lowest
    slot), and the pages written to since position `filled` that are its own. All of them compute the same function, so the
    farthest text is what each would have."""
    leader = packed[:, LEADER]
    same = leader[:, None] == leader[None, :]
    rank = slots.known * sizes.slots + (sizes.slots - 1 - jnp.arange(sizes.slots))
    best = jnp.argmax(jnp.where(same, rank[None, :], -1), axis=1)
    block = (filled[best] // sizes.page)[:, None] + jnp.arange(-(-width // sizes.page) + 1)
    written = (block <= (slots.known[best] // sizes.page)[:, None]) & (block < sizes.blocks)
    block = jnp.minimum(block, sizes.blocks - 1)
    source = jnp.take_along_axis(packed[:, TABLE:][best], block, axis=1)
    target = jnp.take_along_axis(packed[:, TABLE:], block, axis=1)
    target = jnp.where(written & (target != source) & (source < sizes.pages), target, sizes.pages).reshape(-1)
    cache = tuple(attention.copy(layer, jnp.minimum(source.reshape(-1), sizes.pages - 1), target) for layer in cache)
    leads = (leader == jnp.arange(sizes.slots)) & (packed[:, ACTIVE] > 0)
    won = jnp.sum(jnp.where(leads, slots.known[best] - slots.known, 0))
    per_slot = {
        name: getattr(slots, name)[best] for name in ("known", "filled", "done", "logprobs", "entropies", "stamps")
    }
    return (
        cache,
        tokens[best],
        favourites[best],
        slots._replace(**per_slot, guessed=slots.known[best], won=slots.won + won),
    )


def _drawn(program: RowProgram, params: Any, h: Array, packed: Array, after: Array) -> sampling.Drawn:
    """Returns what the heads draw, computed in tiles of one size. `h` [places, D] belongs to the head rows.

    A drafter needs more tiles, of the same size. The barriers keep a compiler from merging tiles with each other or with
    the operations around them.
    """
    sizes, config = program.sizes, program.config
    size, tiles = sizes.head_tile(program.rows), []
    for start in range(0, h.shape[0], size):
        inputs = jax.lax.optimization_barrier(tuple(x[start : start + size] for x in (h, packed, after)))
        drawn = _draw(sizes, inputs[1], decoder.logits(params, config, inputs[0]), inputs[2])
        tiles.append(jax.lax.optimization_barrier(drawn))
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), *tiles)


def _draw(sizes: Sizes, packed: Array, logits: Array, after: Array) -> sampling.Drawn:
    """Returns what the heads draw. `packed` holds the row of each head's slot."""
    as_float = functools.partial(jax.lax.bitcast_convert_type, new_dtype=jnp.float32)
    seeds = jax.lax.bitcast_convert_type(packed[:, SEED0 : SEED1 + 1], jnp.uint32)
    heat, lowest = as_float(packed[:, TEMPERATURE]), None
    if sizes.restricted:
        lowest = thresholds.find(logits, heat, packed[:, TOP_K], as_float(packed[:, TOP_P]))
    return verify.verify_sample(logits, seeds, after, heat, lowest, sizes.shards)


def _settle(sizes: Sizes, packed: Array, slots: Slots, plan: row_plan.Plan, heads: Heads, going: Array) -> Slots:
    """Returns the slots after a step."""
    counts, ended, match, after, reported = heads

    def heads_of_slot(which):
        return jnp.zeros_like(slots.known).at[plan.head_slot].add((counts & which).astype(jnp.int32))

    known = slots.known + heads_of_slot(counts)
    window = jnp.where(counts, after - packed[plan.head_slot, KNOWN], sizes.emit)
    logprobs, entropies, stamps = (
        old.at[plan.head_slot, window].set(new, mode="drop")
        for old, new in zip((slots.logprobs, slots.entropies, slots.stamps), reported)
    )
    return Slots(
        known=known,
        filled=jnp.where(known > slots.known, known - 1, slots.filled + plan.count),
        guessed=jnp.where(heads_of_slot(~match) > 0, known, jnp.maximum(slots.guessed, known)),
        done=jnp.where(going & ((heads_of_slot(ended) > 0) | (known >= packed[:, LIMIT])), 1, slots.done),
        logprobs=logprobs,
        entropies=entropies,
        stamps=stamps,
        uses=slots.uses + _uses(sizes, packed, plan, counts),
        offers=slots.offers,
        won=slots.won,
    )


def _uses(sizes: Sizes, packed: Array, plan: row_plan.Plan, counts: Array) -> Array:
    """Counts the rows of a step by use, in the order of USES."""
    leads = packed[:, LEADER] == jnp.arange(sizes.slots)
    mine, sampling = plan.real & leads[plan.slot], plan.head_real & leads[plan.head_slot]
    guesses, heads, rows = sampling & (plan.head_rank > 0), jnp.sum(sampling), jnp.sum(plan.real)
    uses = (
        jnp.sum(mine) - heads,
        heads - jnp.sum(guesses),
        jnp.sum(guesses & counts),
        jnp.sum(guesses & ~counts),
        plan.real.shape[0] - rows,
        rows - jnp.sum(mine),
    )
    return jnp.stack(uses)


def _bound(packed: Array, sizes: Sizes) -> Array:
    """Rows of a slot stay below this position: the last token needs no row, pages and the window have an end."""
    return jnp.minimum(jnp.minimum(packed[..., LIMIT] - 1, packed[..., MAPPED]), packed[..., KNOWN] + sizes.emit - 1)


def dispatch(
    program: RowProgram,
    params: Any,
    tables: Any,
    state: State,
    packed: Int[Array, "replicas S columns"],
    scalars: Int[Array, " 3"],
) -> tuple:
    """Takes up to scalars[0] steps. Returns the new state, then what the host reads.

    A dispatch ends once scalars[1] slots of a replica have finished, a watched prompt is ready, nothing is left to do, or a
    slot has no room. scalars[2]: whether any slot is a clone.
    """
    sizes = program.sizes
    step = jax.vmap(
        functools.partial(_step, program), in_axes=(None, 0, 0, 0, 0, None, None), spmd_axis_name=meshes.REPLICAS
    )
    slots = _started(sizes, packed)

    def go_on(carry):
        number, _, slots = carry
        going = (packed[..., ACTIVE] > 0) & (slots.done == 0)
        stalled = going & (slots.known > _bound(packed, sizes))
        ready = (packed[..., WATCH] > 0) & (slots.filled >= packed[..., WATCH])
        ends = jnp.any(stalled | ready, axis=-1) | (jnp.sum(slots.done, axis=-1) >= scalars[1])
        # One number a replica, so that a step has one collective: 0 has nothing to do, 1 goes on, 2 ends the dispatch.
        wants = jnp.where(ends, 2, jnp.any(going, axis=-1).astype(jnp.int32))
        return (number < scalars[0]) & (jnp.max(wants) == 1)

    def body(carry):
        number, state, slots = carry
        return number + 1, *step(params, tables, packed, state, slots, number, scalars[2] > 0)

    state = state._replace(memory=state.memory._replace(counts=jnp.zeros_like(state.memory.counts)))
    number, state, slots = jax.lax.while_loop(go_on, body, (jnp.int32(0), state, slots))
    return state, _reported(program, packed, state, slots, number)


def _started(sizes: Sizes, packed: Array) -> Slots:
    """The slots before the first step of a dispatch."""
    shape = packed.shape[:2]
    empty = jnp.zeros((*shape, sizes.emit))
    return Slots(
        packed[..., KNOWN],
        packed[..., FILLED],
        packed[..., GUESSED],
        jnp.zeros(shape, jnp.int32),
        empty,
        empty,
        jnp.zeros((*shape, sizes.emit), jnp.int32),
        jnp.zeros((shape[0], len(USES)), jnp.int32),
        jnp.zeros((shape[0], OFFERS), jnp.int32),
        jnp.zeros(shape[:1], jnp.int32),
    )


def _reported(program: RowProgram, packed: Array, state: State, slots: Slots, number: Array) -> Told:
    """What the host reads of a dispatch of `number` steps: per slot its counts and the window of new tokens."""
    sizes = program.sizes
    where = jnp.minimum(packed[..., KNOWN, None] + jnp.arange(sizes.emit), sizes.max_length - 1)
    as_int = functools.partial(jax.lax.bitcast_convert_type, new_dtype=jnp.int32)
    watched = program.drafter.width and state.favourites.shape[-1]
    texts = [
        jnp.take_along_axis(text, where, axis=-1) for text in (state.tokens, state.favourites)[: 2 if watched else 1]
    ]
    out = jnp.concatenate(
        [
            jnp.stack([slots.known, slots.filled, slots.guessed, slots.done], axis=-1),
            texts[0],
            as_int(slots.logprobs),
            as_int(slots.entropies),
            slots.stamps,
            texts[-1],
        ],
        axis=-1,
    )
    return Told(out, slots.uses, number, slots.offers, slots.won, state.memory.counts)
