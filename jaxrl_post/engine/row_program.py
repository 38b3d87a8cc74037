"""The device program of the engine: R rows a step, several steps a dispatch, for every replica at once.

A row is (slot, position, input token). It runs through the model, writes its KV entry, and, when the token after it is not
settled, samples it. Positions below `num_tokens` are settled; those from `num_tokens` to `candidate_end` hold candidates. A sample that
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
    NUM_COMPUTED,
    FIRST_END,
    CANDIDATE_END,
    NUM_TOKENS,
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
    DispatchResult,
)
from jaxrl_post.engine.speculation.interface import Drafter, Drafts
from jaxrl_post.kernels import attention, sampling, thresholds, verify
from jaxrl_post.models import decoder
from jaxrl_post.parallel import mesh as meshes


class State(NamedTuple):
    """What stays on the device, with a leading replica axis: one Cache per layer, all tokens [replicas, S, T], the tokens held
    most likely [replicas, S, T] (T = 0 without a drafter), and what the drafter remembers."""

    cache: tuple
    tokens: Array
    argmax_tokens: Array
    memory: Any


class Slots(NamedTuple):
    """What changes from step to step, [S] each (window arrays [S, emit])."""

    num_tokens: Array
    num_computed: Array
    candidate_end: Array
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
    candidate_end: Array
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


def _accept(plan: row_plan.Plan, candidate: Array, sampled: Array, ended: Array) -> tuple[Array, Array, Array]:
    """Per head: the token to write, whether it counts, and whether it equals its candidate and may be continued."""
    match = (sampled == candidate) & ~ended & plan.head_real
    before = jnp.cumsum(~match) - ~match
    first = jnp.arange(match.shape[0]) - plan.head_rank
    return sampled, plan.head_real & (before == before[first]), match


def _step(
    program: RowProgram,
    params: Any,
    tables: Any,
    packed: Array,
    state: State,
    slots: Slots,
    number: Array,
    clones: Array,
) -> tuple[State, Slots]:
    """Takes one step of one replica. packed [S, columns]; tokens [S, T]; `clones`: whether any slot is a clone."""
    sizes, config, drafter = program.sizes, program.config, program.drafter
    going = (packed[:, ACTIVE] > 0) & (slots.done == 0)
    drafts, tokens, work = _planned(program, tables, packed, state, slots, going)
    plan, position = work.plan, work.position
    attend = _attending(attention.Rows(plan.slot, position, plan.real, packed[:, TABLE:]), program.spread)
    inputs = jnp.where(plan.real, tokens[plan.slot, position], 0)
    h, cache = decoder.hidden(params, config, inputs, position, attend, state.cache, dtype=program.dtype)
    logits = decoder.logits(params, config, h[plan.head_row])

    slot, after = plan.head_slot, position[plan.head_row] + 1
    sampled, *law, _, likeliest = _draw(sizes, packed[slot], logits, after)
    candidate = jnp.where(after < work.candidate_end[slot], tokens[slot, jnp.minimum(after, sizes.max_length - 1)], -1)
    ended = _ends(sampled, packed[slot, FIRST_END:TABLE])
    sampled, counts, match = _accept(plan, candidate, sampled, ended)
    tokens = tokens.at[slot, jnp.where(counts, after, sizes.max_length)].set(sampled, mode="drop")
    argmax_tokens = state.argmax_tokens
    if argmax_tokens.shape[1] and drafter.width:
        argmax_tokens = argmax_tokens.at[slot, jnp.where(counts, after, sizes.max_length)].set(likeliest, mode="drop")
    heads = Heads(counts, ended, match, after, (*law, number * 2 + match))
    settled = _settle(sizes, packed, slots._replace(candidate_end=work.candidate_end), plan, heads, going)
    settled = settled._replace(offers=slots.offers + _binned(work.values))
    state = State(cache, tokens, argmax_tokens, state.memory)
    if drafter.width:
        state, settled = _shared(program, packed, state, slots, settled, drafts, work, going, clones)
    return state, settled


def _planned(
    program: RowProgram, tables: Any, packed: Array, state: State, slots: Slots, going: Array
) -> tuple[Drafts, Array, Work]:
    """Drafts, the tokens with the drafts written behind `num_tokens`, and the rows of the step."""
    sizes, rows = program.sizes, program.rows
    bound = _bound(packed, sizes)
    drafts, tokens, values = _drafted(program.drafter, tables, state.memory, packed, state.tokens, slots, going, bound)
    offered = jnp.sum(values > 0, axis=1, dtype=jnp.int32)
    candidate_end = jnp.where(offered > 0, slots.num_tokens + offered, slots.candidate_end)
    forced = jnp.where(going & (slots.num_tokens <= bound), slots.num_tokens - slots.num_computed, 0)
    candidates = jnp.where(offered > 0, 0, jnp.maximum(jnp.minimum(candidate_end, bound) - slots.num_tokens, 0))
    weighed = values * jax.lax.bitcast_convert_type(packed[:, WEIGHT], jnp.float32)[:, None]
    plan = row_plan.plan(jnp, forced, candidates, weighed, packed[:, ORDER], rows=rows, heads=min(sizes.heads, rows))
    position = jnp.where(plan.real, slots.num_computed[plan.slot] + plan.offset, 0)
    return drafts, tokens, Work(plan, position, candidate_end, forced, values)


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
    cache, tokens, argmax_tokens, memory = state
    cache, tokens, argmax_tokens, settled = jax.lax.cond(
        clones,
        functools.partial(_follow, drafter.width, sizes, packed, before.num_computed),
        lambda *same: same,
        cache,
        tokens,
        argmax_tokens,
        settled,
    )
    leads = going & (packed[:, LEADER] == jnp.arange(sizes.slots))
    learn = argmax_tokens if argmax_tokens.shape[1] else tokens
    memory = drafter.observe(
        memory,
        drafts,
        packed[:, DRAFTS:FIRST_END],
        tokens,
        learn,
        before.num_tokens,
        settled.num_tokens,
        jnp.maximum(work.plan.count - work.forced, 0),
        leads,
    )
    return State(cache, tokens, argmax_tokens, memory), settled


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
    """Drafts, the tokens with them written behind `num_tokens`, and what each is worth [S, W]: 0 where none is wanted, because
    the slot rests, prefills, has candidates already, or is near its end."""
    S, W = tokens.shape[0], drafter.width
    drafts = drafter.propose(tables, memory, tokens, slots.num_tokens, packed[:, DRAFTS:FIRST_END], packed[:, BRANCH])
    free = going & (slots.candidate_end <= slots.num_tokens) & (slots.num_computed == slots.num_tokens - 1)
    room = jnp.where(free, jnp.minimum(drafts.count, bound - slots.num_tokens), 0)
    wanted = jnp.arange(W) < room[:, None]
    where = jnp.where(wanted, slots.num_tokens[:, None] + jnp.arange(W), tokens.shape[1])
    tokens = tokens.at[jnp.arange(S)[:, None], where].set(drafts.tokens, mode="drop")
    return drafts, tokens, jnp.where(wanted, jnp.maximum(drafts.value, 2.0**-24), 0.0)


def _binned(values: Array) -> Array:
    """int32[OFFERS]: how many values lie in each sixteenth of 0 .. 1."""
    edges = jnp.arange(OFFERS) / OFFERS
    above = jnp.sum(values.reshape(-1, 1) > edges, axis=0, dtype=jnp.int32)
    return above - jnp.append(above[1:], 0)


def _follow(
    width: int,
    sizes: Sizes,
    packed: Array,
    num_computed: Array,
    cache: tuple,
    tokens: Array,
    argmax_tokens: Array,
    slots: Slots,
) -> tuple[tuple, Array, Array, Slots]:
    """Every slot takes over the text of whichever of its leader and that one's clones has come farthest (ties: the lowest
    slot), and the pages written to since position `num_computed` that are its own. All of them compute the same function, so the
    farthest text is what each would have."""
    leader = packed[:, LEADER]
    same = leader[:, None] == leader[None, :]
    rank = slots.num_tokens * sizes.slots + (sizes.slots - 1 - jnp.arange(sizes.slots))
    best = jnp.argmax(jnp.where(same, rank[None, :], -1), axis=1)
    block = (num_computed[best] // sizes.page)[:, None] + jnp.arange(-(-width // sizes.page) + 1)
    written = (block <= (slots.num_tokens[best] // sizes.page)[:, None]) & (block < sizes.blocks)
    block = jnp.minimum(block, sizes.blocks - 1)
    source = jnp.take_along_axis(packed[:, TABLE:][best], block, axis=1)
    target = jnp.take_along_axis(packed[:, TABLE:], block, axis=1)
    target = jnp.where(written & (target != source) & (source < sizes.pages), target, sizes.pages).reshape(-1)
    cache = tuple(attention.copy(layer, jnp.minimum(source.reshape(-1), sizes.pages - 1), target) for layer in cache)
    leads = (leader == jnp.arange(sizes.slots)) & (packed[:, ACTIVE] > 0)
    won = jnp.sum(jnp.where(leads, slots.num_tokens[best] - slots.num_tokens, 0))
    moved = ("num_tokens", "num_computed", "done", "logprobs", "entropies", "stamps")
    per_slot = {name: getattr(slots, name)[best] for name in moved}
    return (
        cache,
        tokens[best],
        argmax_tokens[best],
        slots._replace(**per_slot, candidate_end=slots.num_tokens[best], won=slots.won + won),
    )


def _draw(sizes: Sizes, packed: Array, logits: Array, after: Array) -> sampling.Drawn:
    """What the heads draw, whose own rows of `packed` are given."""
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
        return jnp.zeros_like(slots.num_tokens).at[plan.head_slot].add((counts & which).astype(jnp.int32))

    num_tokens = slots.num_tokens + heads_of_slot(counts)
    window = jnp.where(counts, after - packed[plan.head_slot, NUM_TOKENS], sizes.emit)
    logprobs, entropies, stamps = (
        old.at[plan.head_slot, window].set(new, mode="drop")
        for old, new in zip((slots.logprobs, slots.entropies, slots.stamps), reported)
    )
    return Slots(
        num_tokens=num_tokens,
        num_computed=jnp.where(num_tokens > slots.num_tokens, num_tokens - 1, slots.num_computed + plan.count),
        candidate_end=jnp.where(heads_of_slot(~match) > 0, num_tokens, jnp.maximum(slots.candidate_end, num_tokens)),
        done=jnp.where(going & ((heads_of_slot(ended) > 0) | (num_tokens >= packed[:, LIMIT])), 1, slots.done),
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
    drafted, heads, rows = sampling & (plan.head_rank > 0), jnp.sum(sampling), jnp.sum(plan.real)
    uses = (
        jnp.sum(mine) - heads,
        heads - jnp.sum(drafted),
        jnp.sum(drafted & counts),
        jnp.sum(drafted & ~counts),
        plan.real.shape[0] - rows,
        rows - jnp.sum(mine),
    )
    return jnp.stack(uses)


def _bound(packed: Array, sizes: Sizes) -> Array:
    """Rows of a slot stay below this position: the last token needs no row, pages and the window have an end."""
    return jnp.minimum(
        jnp.minimum(packed[..., LIMIT] - 1, packed[..., MAPPED]), packed[..., NUM_TOKENS] + sizes.emit - 1
    )


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
        stalled = going & (slots.num_tokens > _bound(packed, sizes))
        ready = (packed[..., WATCH] > 0) & (slots.num_computed >= packed[..., WATCH])
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
        packed[..., NUM_TOKENS],
        packed[..., NUM_COMPUTED],
        packed[..., CANDIDATE_END],
        jnp.zeros(shape, jnp.int32),
        empty,
        empty,
        jnp.zeros((*shape, sizes.emit), jnp.int32),
        jnp.zeros((shape[0], len(USES)), jnp.int32),
        jnp.zeros((shape[0], OFFERS), jnp.int32),
        jnp.zeros(shape[:1], jnp.int32),
    )


def _reported(program: RowProgram, packed: Array, state: State, slots: Slots, number: Array) -> DispatchResult:
    """What the host reads of a dispatch of `number` steps: per slot its counts and the window of new tokens."""
    sizes = program.sizes
    where = jnp.minimum(packed[..., NUM_TOKENS, None] + jnp.arange(sizes.emit), sizes.max_length - 1)
    as_int = functools.partial(jax.lax.bitcast_convert_type, new_dtype=jnp.int32)
    watched = program.drafter.width and state.argmax_tokens.shape[-1]
    texts = [
        jnp.take_along_axis(text, where, axis=-1) for text in (state.tokens, state.argmax_tokens)[: 2 if watched else 1]
    ]
    out = jnp.concatenate(
        [
            jnp.stack([slots.num_tokens, slots.num_computed, slots.candidate_end, slots.done], axis=-1),
            texts[0],
            as_int(slots.logprobs),
            as_int(slots.entropies),
            slots.stamps,
            texts[-1],
        ],
        axis=-1,
    )
    return DispatchResult(out, slots.uses, number, slots.offers, slots.won, state.memory.counts)
