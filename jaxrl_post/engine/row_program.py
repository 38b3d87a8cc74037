"""The device program of the engine: R rows a step, several steps a dispatch, for every replica at once.

A row is (slot, position, input token). It runs through the model and writes its KV entry. A row whose next token is not
settled is a head row: it samples that token. Positions below `num_tokens` are settled. Positions from there to
`candidate_end` hold candidates. A sample that equals its candidate is accepted, and the next candidate row counts. The
first sample that differs is written, and later candidates are dropped. So prefill, decode, verification and
recomputation are this one program.

A slot without candidates may get drafts from a drafter. A clone is a free slot that stands in for a running one: same
text and seed, shared full pages, and copies of the pages still written to. Clones try other drafts. After each step a
sequence and its clones continue from the text that has advanced most. Replicas communicate once a step, to agree on
another step.

Invariant: the token at a position depends on weights, earlier tokens, seed and sampling settings. It never depends on
slot, pages, other sequences, candidates, or the number of steps in a dispatch. A dispatch ends early only on the state
itself.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxrl_post.engine import recurrent_rows, row_numbers
from jaxrl_post.engine.host import wire as c
from jaxrl_post.engine.host.wire import OFFERS, USES, DispatchResult, EngineSettings
from jaxrl_post.engine.row_state import RowProgram, Slots, State, Work
from jaxrl_post.engine.speculation.interface import Context, Drafter, Drafts, Step
from jaxrl_post.kernels import attention, choice, row_blocks, sampling, thresholds, verify
from jaxrl_post.models import cache_kinds, decoder, experts, layer_loop
from jaxrl_post.parallel import mesh as meshes


class Given(NamedTuple):
    """What the host gives a dispatch: the packed matrix [S, columns], and columns of it that steps read, made once."""

    packed: Array
    fixed: row_numbers.Fixed
    table: Array


def _step(
    program: RowProgram,
    params: Any,
    tables: Any,
    given: Given,
    state: State,
    slots: Slots,
    number: Array,
    clones: Array,
) -> tuple[State, Slots]:
    """Takes one step of one replica. Where `sizes.scoring`, candidates stand for samples.

    tokens: [S, T]. `clones`: whether any slot is a clone."""
    sizes, config, drafter, packed = program.sizes, program.config, program.drafter, given.packed
    going = slots.progress.going(given.fixed)
    drafts, tokens, work = _planned(program, tables, given, state, slots, going)
    rows = work.rows
    plan, position = rows.plan, rows.position
    at = attention.Rows(plan.slot, position, plan.real, given.table)
    by_slot = recurrent_rows.slot_rows(slots.progress.num_computed, plan.count, rows.forced)
    attend, recur = program.attending(at, attention.attention), program.recurring(by_slot, plan.slot)
    calls, start = layer_loop.Callbacks(attend, program.routing, recur), state.cache
    if sizes.route_words:
        calls, start = _recording(calls), (state.cache, ())
    h, cache = program.hidden(params, rows.inputs, at, calls, start)

    slot, candidates = plan.head_slot, (rows.candidate,) if sizes.scoring else ()
    (sampled, *law, _, likeliest), kept = _drawn(program, params, h[plan.head_row], *rows.law, rows.after, *candidates)
    if sizes.route_words:
        cache, routes = cache
        kept = jnp.concatenate([kept, experts.packed(routes, config)[plan.head_row]], axis=-1)
    settling = functools.partial(row_numbers.settled, sizes)
    numbers = slots.progress, slots.uses, given.fixed, rows, sampled
    found = program.small(settling, numbers, (packed,), row_numbers.MOVED)
    tokens = tokens.at[slot, found.place].set(found.sampled, mode="drop")
    argmax_tokens = state.argmax_tokens
    if argmax_tokens.shape[1] and drafter.width:
        argmax_tokens = argmax_tokens.at[slot, found.place].set(likeliest, mode="drop")
    settled = _settle(sizes, given.fixed, slots, found, rows, (*law, number * 2 + found.match, kept))
    settled = settled._replace(offers=slots.offers + _binned(work.values))
    state = State(cache, tokens, argmax_tokens, state.memory)
    if drafter.width:
        state, settled = _shared(program, packed, state, slots, settled, drafts, work, going, clones)
    return state, settled


def _planned(
    program: RowProgram, tables: Any, given: Given, state: State, slots: Slots, going: Array
) -> tuple[Drafts, Array, Work]:
    """Returns the drafts, the tokens with drafts written behind the settled text, and the rows of the step."""
    sizes, rows, packed, states = program.sizes, program.rows, given.packed, cache_kinds.states(program.config.kept)
    bound = given.fixed.bound(sizes.emit)
    drafts, tokens, values = _drafted(program.drafter, tables, state.memory, packed, state.tokens, slots, going, bound)
    # A state cannot be taken back: it keeps few rows that may still be rejected.
    most = sizes.state_rows if states else rows
    values = jnp.where(jnp.arange(values.shape[1]) < most, values, 0) if most < values.shape[1] else values
    offers = ()
    if width := values.shape[1]:
        offered = jnp.sum(values > 0, axis=1, dtype=jnp.int32)
        worth = values * jax.lax.bitcast_convert_type(packed[:, c.WEIGHT], jnp.float32)[:, None]
        offers = jnp.pad(worth, ((0, 0), (0, (1 << (width - 1).bit_length()) - width))), offered
    planning = functools.partial(row_numbers.rows_of, sizes, rows, states)
    return (
        drafts,
        tokens,
        Work(program.small(planning, (given.fixed, slots.progress, *offers), (tokens, packed)), values),
    )


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
    """Shares settled tokens between clones and their leaders, and shows the step's tokens to the drafter."""
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
    leads = going & (packed[:, c.LEADER] == jnp.arange(sizes.slots))
    learn = argmax_tokens if argmax_tokens.shape[1] else tokens
    place, given = packed[:, c.DRAFTS : c.FIRST_END], jnp.maximum(work.rows.plan.count - work.rows.forced, 0)
    step = Step(place, tokens, learn, before.num_tokens, settled.num_tokens, given, leads)
    return State(cache, tokens, argmax_tokens, drafter.observe(memory, drafts, step)), settled


def _recording(calls: layer_loop.Callbacks) -> layer_loop.Callbacks:
    """Returns them such that the second part of the cache collects the chosen experts of each layer, [R, k]."""

    def choose(layer, scores, per_token, cache):
        ids, _ = calls.routing.choose(layer, scores, per_token, None)
        return ids, (cache[0], (*cache[1], ids))

    return layer_loop.beside(calls)._replace(routing=calls.routing._replace(choose=choose))


def _drafted(
    drafter: Drafter, tables: Any, memory: Any, packed: Array, tokens: Array, slots: Slots, going: Array, bound: Array
) -> tuple[Drafts, Array, Array]:
    """Returns drafts, the tokens with drafts written behind the settled text, and the worth of each draft [S, W].

    The worth is 0 where a slot takes no draft: it is idle, prefills, has candidates already, or is near its end."""
    S, W = tokens.shape[0], drafter.width
    context = Context(tokens, slots.num_tokens, packed[:, c.DRAFTS : c.FIRST_END], packed[:, c.BRANCH])
    drafts = drafter.propose(tables, memory, context)
    free = going & (slots.candidate_end <= slots.num_tokens) & (slots.num_computed == slots.num_tokens - 1)
    room = jnp.where(free, jnp.minimum(drafts.count, bound - slots.num_tokens), 0)
    wanted = jnp.arange(W) < room[:, None]
    where = jnp.where(wanted, slots.num_tokens[:, None] + jnp.arange(W), tokens.shape[1])
    tokens = tokens.at[jnp.arange(S)[:, None], where].set(drafts.tokens, mode="drop")
    return drafts, tokens, jnp.where(wanted, jnp.maximum(drafts.value, 2.0**-24), 0.0)


def _binned(values: Array) -> Array:
    """Returns int32[OFFERS]: the number of values in each sixteenth of 0 .. 1."""
    edges = jnp.arange(OFFERS) / OFFERS
    above = jnp.sum(values.reshape(-1, 1) > edges, axis=0, dtype=jnp.int32)
    return above - jnp.append(above[1:], 0)


def _follow(
    width: int,
    sizes: EngineSettings,
    packed: Array,
    num_computed: Array,
    cache: tuple,
    tokens: Array,
    argmax_tokens: Array,
    slots: Slots,
) -> tuple[tuple, Array, Array, Slots]:
    """Continues each slot from the most advanced text among its leader and the leader's clones; ties go to the lowest
    slot.

    Copies the pages written since position `num_computed` into the slot's own pages. Leader and clones compute the same
    function, so the most advanced text is the text that each of them would reach."""
    leader = packed[:, c.LEADER]
    same = leader[:, None] == leader[None, :]
    rank = slots.num_tokens * sizes.slots + (sizes.slots - 1 - jnp.arange(sizes.slots))
    best = jnp.argmax(jnp.where(same, rank[None, :], -1), axis=1)
    block = (num_computed[best] // sizes.page_size)[:, None] + jnp.arange(-(-width // sizes.page_size) + 1)
    written = (block <= (slots.num_tokens[best] // sizes.page_size)[:, None]) & (block < sizes.blocks)
    block = jnp.minimum(block, sizes.blocks - 1)
    source = jnp.take_along_axis(packed[:, c.TABLE :][best], block, axis=1)
    target = jnp.take_along_axis(packed[:, c.TABLE :], block, axis=1)
    target = jnp.where(written & (target != source) & (source < sizes.pages), target, sizes.pages).reshape(-1)
    source = jnp.minimum(source.reshape(-1), sizes.pages - 1)
    cache = tuple(
        attention.copy(one, source, target) if isinstance(one, attention.Cache) else one
        for one in recurrent_rows.copied(cache, best)
    )
    leads = (leader == jnp.arange(sizes.slots)) & (packed[:, c.ACTIVE] > 0)
    won = jnp.sum(jnp.where(leads, slots.num_tokens[best] - slots.num_tokens, 0))
    moved = ("num_tokens", "num_computed", "done", "logprobs", "entropies", "stamps", "kept")
    per_slot = {name: getattr(slots, name)[best] for name in moved}
    return (
        cache,
        tokens[best],
        argmax_tokens[best],
        slots._replace(**per_slot, candidate_end=slots.num_tokens[best], won=slots.won + won),
    )


def _drawn(program: RowProgram, params: Any, h: Array, *numbers: Array) -> tuple[sampling.Drawn, Array]:
    """Returns what the heads draw and their records, computed in tiles of one size. `h` [places, D] belongs to the head rows.

    `numbers`: for each head what it is sampled by, the position that it samples, and where scoring its candidate.

    A drafter needs more tiles, of the same size. The barriers keep a compiler from merging tiles with each other or
    with the operations around them.
    """
    config, size, tiles = program.config, program.sizes.head_tile(program.rows), []
    for start in range(0, h.shape[0], size):
        inputs = jax.lax.optimization_barrier(tuple(x[start : start + size] for x in (h, *numbers)))
        rows = decoder.logits(params, config, inputs[0]), *inputs[1:]
        if config.row_blocks is None:
            drawn = _draw(program, *rows)
        else:
            drawn = row_blocks.of_rows(functools.partial(_draw, program), *rows, platforms=program.platforms)
        tiles.append(jax.lax.optimization_barrier(drawn))
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), *tiles)


def _draw(program: RowProgram, logits: Array, *numbers: Array) -> tuple[sampling.Drawn, Array]:
    """Returns the samples of the heads, and the ids that were left to be drawn. numbers: as in `_drawn`."""
    seeds, heat, top_k, top_p, after, *given = numbers
    seeds = jax.lax.bitcast_convert_type(seeds, jnp.uint32)
    heat, top_p = (jax.lax.bitcast_convert_type(x, jnp.float32) for x in (heat, top_p))
    lowest, sizes, kept = None, program.sizes, jnp.zeros((logits.shape[0], program.sizes.kept_ids), jnp.int32)
    if sizes.restricted:
        finding = choice.of_thresholds(*logits.shape, sizes.shards, program.of_states)
        lowest = thresholds.find(logits, heat, top_k, top_p, finding)
    if sizes.kept_ids:
        kept = thresholds.kept(logits, lowest, sizes.kept_ids, sizes.shards.count if sizes.shards else 1)
    return verify.verify_sample(logits, seeds, after, heat, lowest, sizes.shards, program.platforms, *given), kept


def _settle(
    sizes: EngineSettings,
    of: row_numbers.Fixed,
    slots: Slots,
    found: row_numbers.Settled,
    rows: row_numbers.Rows,
    reported: tuple,
) -> Slots:
    """Returns the slots with what the step settled, in their windows of new tokens.

    reported: of each head row log-prob, entropy, stamp and record."""
    # The heads of a slot that count lie side by side, and their tokens come next in its window.
    rank = jnp.arange(sizes.emit)[None, :] - found.begin[:, None]
    fresh = (rank >= 0) & (rank < found.gained[:, None])
    source = jnp.clip(found.first[:, None] + rank, 0, found.counts.shape[0] - 1)
    *law, kept = reported
    old, slot = (slots.logprobs, slots.entropies, slots.stamps), rows.plan.head_slot
    logprobs, entropies, stamps = (jnp.where(fresh, new[source], one) for one, new in zip(old, law, strict=True))
    window = jnp.where(found.counts, rows.after - of.num_tokens[slot], sizes.emit)
    return slots._replace(
        **found.progress._asdict(),
        logprobs=logprobs,
        entropies=entropies,
        stamps=stamps,
        kept=slots.kept.at[slot, window].set(kept, mode="drop"),
        uses=found.uses,
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

    A dispatch ends early once scalars[1] slots of a replica have finished, or a watched prompt is computed. It also
    ends when nothing is left to do, or a slot has no page for its next row. scalars[2]: whether any slot is a clone."""
    sizes = program.sizes
    step = jax.vmap(
        functools.partial(_step, program), in_axes=(None, 0, 0, 0, 0, None, None), spmd_axis_name=meshes.REPLICAS
    )
    slots, of = _started(sizes, packed), row_numbers.fixed(packed)
    given = Given(packed, of, packed[..., c.TABLE :])

    def go_on(carry):
        number, _, slots = carry
        going = slots.progress.going(of)
        stalled = going & (slots.num_tokens > of.bound(sizes.emit))
        ready = (of.watch > 0) & (slots.num_computed >= of.watch)
        ends = jnp.any(stalled | ready, axis=-1) | (jnp.sum(slots.done, axis=-1) >= scalars[1])
        # One number a replica, so that a step has one collective. 0: nothing to do; 1: continue; 2: end the dispatch.
        wants = jnp.where(ends, 2, jnp.any(going, axis=-1).astype(jnp.int32))
        return (number < scalars[0]) & (jnp.max(wants) == 1)

    def body(carry):
        number, state, slots = carry
        return number + 1, *step(params, tables, given, state, slots, number, scalars[2] > 0)

    state = state._replace(memory=state.memory._replace(counts=jnp.zeros_like(state.memory.counts)))
    if program.drafter.width and cache_kinds.states(program.config.kept):
        # A clone has its leader's pages already, shared or copied.
        ways = jax.vmap(recurrent_rows.copied), lambda cache, _: cache
        state = state._replace(cache=jax.lax.cond(scalars[2] > 0, *ways, state.cache, packed[..., c.LEADER]))
    number, state, slots = jax.lax.while_loop(go_on, body, (jnp.int32(0), state, slots))
    return state, _reported(program, packed, state, slots, number)


def _started(sizes: EngineSettings, packed: Array) -> Slots:
    shape = packed.shape[:2]
    empty = jnp.zeros((*shape, sizes.emit))
    return Slots(
        packed[..., c.NUM_TOKENS],
        packed[..., c.NUM_COMPUTED],
        packed[..., c.CANDIDATE_END],
        jnp.zeros(shape, jnp.int32),
        empty,
        empty,
        jnp.zeros((*shape, sizes.emit), jnp.int32),
        jnp.full((*shape, sizes.emit, sizes.record), -1, jnp.int32),
        jnp.zeros((shape[0], row_numbers.USED), jnp.int32),
        jnp.zeros((shape[0], OFFERS), jnp.int32),
        jnp.zeros(shape[:1], jnp.int32),
    )


def _reported(program: RowProgram, packed: Array, state: State, slots: Slots, number: Array) -> DispatchResult:
    """Returns what the host reads after `number` steps: per slot its counts and the window of new tokens."""
    sizes = program.sizes
    where = jnp.minimum(packed[..., c.NUM_TOKENS, None] + jnp.arange(sizes.emit), sizes.max_length - 1)
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
            jnp.swapaxes(slots.kept, -1, -2).reshape(*slots.stamps.shape[:2], sizes.record * sizes.emit),
        ],
        axis=-1,
    )
    return DispatchResult(out, slots.uses[:, : len(USES)], number, slots.offers, slots.won, state.memory.counts)
