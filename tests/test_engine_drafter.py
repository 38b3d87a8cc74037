"""The drafters on the device against twins in plain Python, step by step over given texts."""

from __future__ import annotations

import functools

import drafting_twins as twins
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_post.engine.host.wire import ALL_OFFSET, ALL_SIZE, OFFSET, PLACE, ROW, SIZE, Entry
from jaxrl_post.engine.speculation import interface as rules
from jaxrl_post.engine.speculation import ngrams, suffix_array
from jaxrl_post.engine.speculation.ngram_drafter import CHUNK, Backoff
from jaxrl_post.engine.speculation.registry import DRAFTERS
from jaxrl_post.engine.speculation.suffix_drafter import Histospec

pytestmark = pytest.mark.usefixtures("quick_compilation")

S, T, W, GROUP, PROMPT = 6, 40, 4, 2, 5
ROOM = 1 << 18  # entries: two contexts almost never share a bucket


def texts(noise, count, length, words):
    """Returns random texts, repetitive texts, and mixtures of both."""
    out = noise.integers(0, words, (count, length))
    for row in out[::2]:
        row[:] = np.tile(noise.integers(0, words, noise.integers(2, 9)), length)[:length]
        row[noise.random(length) < 0.1] = words - 1
    return out.astype(np.int32)


def case(seed, words, repeat=True):
    """Returns the truth [S, T] in groups of one prompt, its argmax tokens, and two epochs of past rollouts for each
    prompt.

    Some past rollouts are like the truth."""
    noise = np.random.default_rng(seed)
    truth = texts(noise, S, T, words)
    truth[:, :PROMPT] = np.repeat(truth[::GROUP, :PROMPT], GROUP, axis=0)
    past = []
    for group in range(S // GROUP):
        answers = [list(texts(noise, 3, T - PROMPT, words)) for _ in range(2)]
        answers[1][0] = truth[group * GROUP, PROMPT:].copy()
        past.append(answers)
    return truth, np.where(noise.random((S, T)) < 0.2, words - 1, truth).astype(np.int32), past


def settle(noise, truth, known, tokens, given):
    """Returns what the row program would settle: the right drafts among the given ones, and the sample behind them."""
    after = known.copy()
    for s in range(S):
        right = 0
        while right < given[s] and known[s] + right < T and tokens[s, right] == truth[s, known[s] + right]:
            right += 1
        after[s] = min(known[s] + right + 1, T)
    return after


def rates_of(noise, classes):
    """Returns distinct multiples of 2^-10, so that rates alone decide ties."""
    return (noise.permutation(np.arange(1, 1024))[:classes] / 1024).astype(np.float32)


def fields(drafts):
    return tuple(np.asarray(x) for x in drafts)


def entry(*columns):
    """Texts that enter: slot, row, fresh, seen, tokens, argmax tokens, number of tokens."""
    names = ("slot", "row", "fresh", "seen", "tokens", "argmax_tokens", "num_tokens")
    return Entry(source=None, target=None, state=None, **dict(zip(names, map(jnp.asarray, columns), strict=True)))


def jitted(drafter):
    """`propose` and `observe` of a drafter, compiled; they take the fields of Context and of Step."""
    propose = jax.jit(lambda tables, memory, *given: drafter.propose(tables, memory, rules.Context(*given)))
    observe = jax.jit(lambda memory, drafts, *given: drafter.observe(memory, drafts, rules.Step(*given)))
    return propose, observe


def placed(drafter, past, truth):
    """Returns tables of an n-gram drafter, `place` of its slots, and readers of the same tables by source and group."""
    own = [
        ngrams.build([ngrams.Texts(truth[g * GROUP, :PROMPT], a) for a in answers], ROOM)
        for g, answers in enumerate(past)
    ]
    every = [ngrams.Texts(truth[g * GROUP, :PROMPT], answers[1]) for g, answers in enumerate(past)]
    entries = np.concatenate([*own, ngrams.build_all(every, ROOM)])
    place = np.zeros((S, PLACE), np.int32)
    place[:, ROW] = np.arange(S) // GROUP
    place[:, OFFSET], place[:, SIZE] = place[:, ROW] * ROOM, ROOM
    place[:, ALL_OFFSET], place[:, ALL_SIZE] = len(own) * ROOM, ROOM
    return entries, place


@pytest.mark.parametrize("name, seed, words", [("ours", 0, 3), ("ours", 1, 12), ("ours", 2, 500), ("ngram", 3, 4)])
def test_hashed_drafts_are_those_of_dictionaries(name, seed, words):
    """Compares tokens, counts, values, candidates and hits of every step. One slot joins late; one drafts its second
    choice."""
    truth, likely, past = case(seed, words)
    likely = likely if name == "ours" else truth  # `ngram` learns the sampled tokens
    noise = np.random.default_rng(seed + 100)
    drafter = DRAFTERS[name](vocab=512, width=W, entries=4 * ROOM, live=ROOM)
    tables, memory = drafter.empty(S)
    entries, place = placed(drafter, past, truth)
    rates = rates_of(noise, drafter.classes)
    if name == "ours":
        tables = tables._replace(entries=jnp.asarray(entries))
    tables = tables._replace(rates=jnp.asarray(rates))
    shared = name == "ours"
    row = place[:, ROW] if shared else np.arange(S)
    live = [twins.Live() for _ in range(S)]
    known = np.full(S, PROMPT)
    known[1] = PROMPT + 6  # a parked text
    lead = np.arange(S) % GROUP == 0
    given = entry(np.arange(S), place[:, ROW], lead.astype(np.int32), np.full(S, PROMPT), truth, likely, known)
    memory = jax.jit(drafter.enter)(memory, given)
    start = np.where(lead | (not shared), 0, PROMPT)
    for r in range(S):
        live[r].learn(
            [new for s in range(S) if row[s] == r for new in occurrences(truth[s], likely[s], start[s], known[s])]
        )
    own = [twins.history(answers, truth[g * GROUP, :PROMPT]) for g, answers in enumerate(past)]
    all_ = pooled([(truth[g * GROUP, :PROMPT], answers[1]) for g, answers in enumerate(past)])
    branch = np.zeros(S, np.int32)
    branch[2] = 1
    propose, observe = jitted(drafter)
    counts, drafted = np.zeros((2, drafter.classes), int), 0
    while (known < T).any():
        got = propose(tables, memory, truth, known, place, branch)
        tokens, count, value, seen, kinds, _ = fields(got)
        running = (known < T) & (noise.random(S) < 0.9)
        given = np.where(running, np.minimum(count, noise.integers(0, W + 1, S)), 0)
        after = np.where(running, settle(noise, truth, known, tokens, given), known)
        for s in np.flatnonzero(known < T):
            sources = [live[row[s]], own[s // GROUP], all_] if shared else [live[row[s]]]
            chain, values, first = twins.draft(truth[s, : known[s]], sources, rates, W, T, branch[s])
            assert tokens[s].tolist() == chain + [-1] * (W - len(chain)) and count[s] == len(chain)
            np.testing.assert_allclose(value[s], values + [0] * (W - len(values)), rtol=1e-5)
            assert {(k, t) for k, t in zip(kinds[s].tolist(), seen[s].tolist()) if t >= 0} == {
                (kind, token) for _, _, token, kind in first
            }
            drafted += len(chain)
            if running[s]:
                for _, _, token, kind in first:
                    counts[:, kind] += 1, token == truth[s, known[s]]
                if first and branch[s] == 0:
                    counts[:, drafter.classes // 2 + first[0][3]] += 1, first[0][2] == truth[s, known[s]]
        for r in range(S):
            live[r].learn(
                [new for s in range(S) if row[s] == r for new in occurrences(truth[s], likely[s], known[s], after[s])]
            )
        memory = observe(memory, got, place, truth, likely, known, after, given, running)
        known = after
    assert np.array_equal(memory.counts, counts) and drafted > 100 and counts[1].sum() > 20


def occurrences(text, likely, start, stop):
    """Returns (context, learned token) for positions start .. stop-1 of one text, for each order with enough tokens."""
    return [
        (tuple(int(t) for t in text[at - order : at]), int(likely[at]))
        for at in range(start, stop)
        for order in range(1, twins.ORDERS + 1)
        if at >= order
    ]


def pooled(groups):
    """Returns context -> (token, confidence, seen), with all groups as one epoch."""
    after = {}
    for end, answers in groups:
        for answer in answers:
            for seen, token in twins.contexts(answer, end[-6:]):
                after.setdefault(seen, []).append(token)
    every = {seen: twins.most_frequent(tokens) for seen, tokens in after.items()}
    return {
        seen: found
        for seen, found in every.items()
        if len(seen) == 1 or every[seen[1:]][0] != found[0] or every[seen[1:]][1] < found[1]
    }


@pytest.mark.parametrize("seed", range(3))
def test_small_tables_are_word_for_word_those_of_python_integers(seed):
    """Rows have 61 entries, so that contexts evict each other and several meet in one bucket in one step."""
    truth, likely, past = case(seed, 6)
    noise = np.random.default_rng(seed)
    drafter = Backoff(width=W, entries=300, live=61)
    tables, memory = drafter.empty(S)
    own = [
        ngrams.build([ngrams.Texts(truth[g * GROUP, :PROMPT], a) for a in answers], 40 + g)
        for g, answers in enumerate(past)
    ]
    every = ngrams.build_all([ngrams.Texts(truth[0, :PROMPT], past[0][0])], 50)
    sizes = np.array([table.size for table in own])
    place = np.zeros((S, PLACE), np.int32)
    place[:, ROW] = (np.arange(S) // GROUP)[::-1]
    place[:, SIZE], place[:, OFFSET] = (
        sizes[np.arange(S) // GROUP],
        7 + (np.cumsum(sizes) - sizes)[np.arange(S) // GROUP],
    )
    place[:, ALL_OFFSET], place[:, ALL_SIZE] = 200, 50
    flat = np.zeros(300, np.uint32)
    flat[7 : 7 + sizes.sum()], flat[200:250] = np.concatenate(own), every
    tables = tables._replace(entries=jnp.asarray(flat), rates=jnp.asarray(rates_of(noise, drafter.classes)))
    readers = [twins.Hashed(table.size, ngrams.OWN, table) for table in own]
    all_, live = twins.Hashed(50, ngrams.ALL, every), [twins.Hashed(61, ngrams.LIVE) for _ in range(S)]
    known, zero = np.full(S, 1), jnp.zeros(S, jnp.int32)
    propose, observe = jitted(drafter)
    while (known < T).any():
        got = propose(tables, memory, truth, known, place, zero)
        after = np.minimum(known + noise.integers(0, W + 2, S), T)
        for s in np.flatnonzero(known < T):
            sources = [live[place[s, ROW]], readers[s // GROUP], all_]
            chain, _, _ = twins.draft(truth[s, : known[s]], sources, np.asarray(tables.rates), W, T)
            assert np.asarray(got.tokens[s]).tolist() == chain + [-1] * (W - len(chain))
        for r in range(S):
            live[r].learn(
                [
                    new
                    for s in range(S)
                    if place[s, ROW] == r
                    for new in occurrences(truth[s], likely[s], known[s], after[s])
                ]
            )
        memory = observe(memory, got, place, truth, likely, known, after, got.count, np.ones(S, bool))
        assert np.asarray(memory.live).reshape(S, 61).tolist() == [table.entries for table in live]
        known = after


def test_a_long_text_is_learned_chunk_by_chunk_and_a_fresh_row_forgets():
    drafter = Backoff(width=W, entries=1, live=4096)
    noise = np.random.default_rng(0)
    text = noise.integers(0, 50, (2, 150)).astype(np.int32)
    _, memory = drafter.empty(3)
    enter = jax.jit(drafter.enter)
    one = jnp.ones(2, jnp.int32)
    memory = enter(memory, entry([0, 3], [1, 1], one, [5, 5], text, text, [150, 150]))
    twin = twins.Hashed(4096, ngrams.LIVE)
    for start in range(0, 150, CHUNK):
        twin.learn(occurrences(text[0], text[0], start, min(start + CHUNK, 150)))
    rows = np.asarray(memory.live).reshape(3, 4096)
    assert rows[1].tolist() == twin.entries and not rows[0].any() and not rows[2].any()  # slot 3 does not exist
    memory = enter(memory, entry([2, 1], [1, 2], one, [5, 5], text, text, [3, 0]))
    rows = np.asarray(memory.live).reshape(3, 4096)
    assert np.count_nonzero(rows[1]) == 3 and not rows[2].any()  # (t0) -> t1, (t1) -> t2, (t0, t1) -> t2
    memory = enter(memory, entry([1, 3], [1, 1], 0 * one, [2, 5], text, text, [4, 9]))
    assert np.count_nonzero(np.asarray(memory.live)) == 3 + 3  # token 3 after 1, 2 and 3 others


@pytest.mark.parametrize("seed, words, rewarded", [(0, 3, False), (1, 6, True), (2, 40, True), (3, 2, False)])
def test_histospec_drafts_are_those_of_sorted_suffixes(seed, words, rewarded):
    truth, likely, past = case(seed, words)
    noise = np.random.default_rng(seed)
    width = 12
    drafter = DRAFTERS["histospec"](vocab=512, width=width, entries=1000, live=1)
    tables, memory = drafter.empty(S)
    weights = [noise.integers(1, 17, 3) if rewarded else np.ones(3, int) for _ in past]
    built = [suffix_array.build(answers[1], truth[g * GROUP, :PROMPT], weights[g]) for g, answers in enumerate(past)]
    built[2] = suffix_array.build([], truth[0])  # a prompt without a past
    size = np.array([part.pool.size for part in built])
    place = np.zeros((S, PLACE), np.int32)
    place[:, SIZE], place[:, OFFSET] = size[np.arange(S) // GROUP], 11 + (np.cumsum(size) - size)[np.arange(S) // GROUP]
    end = 11 + size.sum()
    tables = tables._replace(
        **{
            name: getattr(tables, name).at[11:end].set(np.concatenate([getattr(b, name) for b in built]))
            for name in ("pool", "order", "priority")
        }
    )
    all_, begun = np.arange(S), np.full(S, PROMPT)
    memory = jax.jit(drafter.enter)(memory, entry(all_, all_, np.ones(S, np.int32), begun, truth, likely, begun))
    known, window, drafted = np.full(S, 1), np.full(S, 2), 0
    branch = np.array([0, 0, 0, 1, 0, 0], np.int32)
    propose, observe = jitted(drafter)
    counts = np.zeros((2, 10), int)
    while (known < T).any():
        got = propose(tables, memory, truth, known, place, branch)
        tokens, count, value, seen, _, _ = fields(got)
        running = (known < T) & (noise.random(S) < 0.8)
        given = np.where(running & (noise.random(S) < 0.9), count, count // 2)
        after = np.where(running, settle(noise, truth, known, tokens, given), known)
        for s in np.flatnonzero(known < T):
            group = s // GROUP
            answers = past[group][1] if group < 2 else []
            chain, first = twins.suffix_draft(
                truth[s, : known[s]], answers, truth[s, :PROMPT], weights[group], window[s], T, branch[s]
            )
            assert tokens[s].tolist() == chain + [-1] * (width - len(chain)) and count[s] == len(chain)
            assert dict(zip(range(7, 2, -1), seen[s].tolist())) == {m: first.get(m, -1) for m in range(7, 2, -1)}
            assert (np.diff(value[s]) <= 0).all() and ((value[s] > 0) == (tokens[s] >= 0)).all()
            drafted += len(chain)
            if running[s]:
                for m, token in first.items():
                    counts[:, 7 - m] += 1, token == truth[s, known[s]]
                if chain and branch[s] == 0:
                    counts[:, 12 - max(first)] += 1, chain[0] == truth[s, known[s]]
                if given[s] and after[s] - known[s] - 1 < given[s]:
                    window[s] = 2
                elif given[s] and given[s] == window[s]:
                    window[s] = min(window[s] + 2, width)
        memory = observe(memory, got, place, truth, likely, known, after, given, running)
        assert np.asarray(memory.window).tolist() == window.tolist()
        known = after
    assert np.array_equal(memory.counts, counts) and drafted > 20


def test_the_window_by_hand():
    """The window: +2 on a whole window accepted, up to 32; unchanged on a miss, a short or a cut draft; 2 on a
    rejection."""
    drafter = Histospec(width=32, entries=1)
    _, memory = drafter.empty(1)
    drafts = rules.Drafts(
        *(jnp.full((1, n), -1) for n in (32,)),
        jnp.zeros(1, jnp.int32),
        jnp.zeros((1, 32)),
        jnp.full((1, 5), -1),
        jnp.zeros((1, 5), jnp.int32),
        jnp.array([-1]),
    )
    tokens, place = jnp.zeros((1, 64), jnp.int32), jnp.zeros((1, PLACE), jnp.int32)

    def after(window, given, accepted, live=True):
        old = memory._replace(window=jnp.array([window], jnp.int32))
        numbers = (jnp.array([number]) for number in (9, 9 + accepted + 1, given, live))
        return int(drafter.observe(old, drafts, rules.Step(place, tokens, tokens, *numbers)).window[0])

    assert [after(w, w, w) for w in (2, 4, 30, 32)] == [4, 6, 32, 32]
    assert [after(8, 0, 0), after(8, 3, 3), after(8, 8, 7), after(8, 3, 2), after(8, 8, 8, live=False)] == [
        8,
        8,
        2,
        2,
        8,
    ]


@settings(max_examples=50)
@given(seed=st.integers(0, 10**6), branch=st.integers(0, 7))
def test_the_nth_distinct_candidate(seed, branch):
    noise = np.random.default_rng(seed)
    tokens, rates = noise.integers(-1, 4, (5, 7)), (noise.integers(0, 5, (5, 7)) / 4).astype(np.float32)
    token, column = rules.nth_distinct(jnp.asarray(tokens), jnp.asarray(rates), jnp.full(5, branch))
    for s in range(5):
        ranked = sorted((-rates[s, k], k, tokens[s, k]) for k in range(7) if tokens[s, k] >= 0)
        distinct = list(dict.fromkeys(t for _, _, t in ranked))
        expected = distinct[branch] if branch < len(distinct) else -1
        assert int(token[s]) == expected
        assert int(column[s]) == next((k for _, k, t in ranked if t == expected), 0)
    for one, other in zip(
        rules.best(jnp.asarray(tokens), jnp.asarray(rates)),
        rules.nth_distinct(jnp.asarray(tokens), jnp.asarray(rates), jnp.zeros(5, int)),
    ):
        assert np.array_equal(one, other)


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "ours" else pytest.mark.extended) for n in DRAFTERS])
def test_nothing_known_gives_no_draft_and_slots_may_stand_in_any_order(name):
    drafter = DRAFTERS[name](vocab=512, width=W, entries=600, live=256)
    tables, memory = drafter.empty(S)
    truth = jnp.asarray(texts(np.random.default_rng(0), S, T, 3))
    place = np.zeros((S, PLACE), np.int32)
    place[:, ROW] = np.arange(S)
    known, zero = jnp.full(S, 20), jnp.zeros(S, jnp.int32)
    nothing = jitted(drafter)[0](tables, memory, truth, known, jnp.asarray(place), zero)
    assert not np.asarray(nothing.count).any() and (np.asarray(nothing.tokens) == -1).all()
    assert (np.asarray(nothing.value) == 0).all() and (np.asarray(nothing.seen) == -1).all()
    assert nothing.tokens.shape == (S, drafter.width) and memory.counts.shape == (2, drafter.classes)
    assert drafter.priors.shape == (drafter.classes,) and ((drafter.priors > 0) & (drafter.priors < 1)).all()
    run = functools.partial(jax.jit(functools.partial(two_steps, drafter)), tables, memory)
    order = np.array([3, 1, 5, 0, 2, 4])
    one = run(truth, known, jnp.asarray(place))
    other = run(truth[order], known, jnp.asarray(place)[order])
    for a, b in zip(fields(one[0]), fields(other[0])):
        assert np.array_equal(a[order], b)
    assert np.array_equal(one[1].counts, other[1].counts)
    stacked = jax.jit(jax.vmap(functools.partial(two_steps, drafter, tables, memory)))(
        jnp.stack([truth, truth[order]]), jnp.stack([known, known]), jnp.stack([place, place[order]])
    )
    for a, b in zip(jax.tree.leaves(stacked), zip(jax.tree.leaves(one), jax.tree.leaves(other))):
        assert np.array_equal(a[0], b[0]) and np.array_equal(a[1], b[1])


def two_steps(drafter, tables, memory, truth, known, place):
    """Returns the second drafts and the memory behind them. Rows are those of `place`."""
    zero, all_ = jnp.zeros(truth.shape[0], jnp.int32), jnp.ones(truth.shape[0], bool)
    slots = jnp.arange(truth.shape[0])
    memory = drafter.enter(memory, entry(slots, place[:, ROW], zero + 1, zero + 5, truth, truth, known))
    for _ in range(2):
        drafts = drafter.propose(tables, memory, rules.Context(truth, known, place, zero))
        step = rules.Step(place, truth, truth, known, known + 3, drafts.count, all_)
        memory = drafter.observe(memory, drafts, step)
        known = known + 3
    return drafts, memory._replace(**{"live": zero} if hasattr(memory, "live") else {})


def test_the_end_of_the_text_the_largest_token_and_a_branch_too_many():
    last = ngrams.MOST_TOKENS - 1
    drafter = Backoff(width=W, entries=1, live=512)
    tables, memory = drafter.empty(4)
    truth = jnp.full((4, 10), last)
    place = jnp.zeros((4, PLACE), jnp.int32)
    given = entry(np.arange(4), np.zeros(4, np.int32), [1, 0, 0, 0], [5] * 4, truth, truth, [5] * 4)
    memory = jax.jit(drafter.enter)(memory, given)
    got = jitted(drafter)[0](tables, memory, truth, jnp.array([7, 9, 10, 5]), place, jnp.array([0, 0, 0, 1]))
    assert np.asarray(got.count).tolist() == [3, 1, 0, 0]
    assert np.asarray(got.tokens[0]).tolist() == [last] * 3 + [-1] and (np.asarray(got.tokens[3]) == -1).all()


def test_settings_that_cannot_be_are_refused():
    sizes = dict(width=4, entries=100, live=64)
    for name in ("ours", "ngram"):
        with pytest.raises(ValueError, match="vocabulary of 300000 ids, at most 262144"):
            DRAFTERS[name](vocab=300000, **sizes)
        with pytest.raises(ValueError, match="width is 0, at least 1"):
            DRAFTERS[name](vocab=512, **sizes | {"width": 0})
    with pytest.raises(ValueError, match="0 entries for the tables"):
        DRAFTERS["ours"](vocab=512, **sizes | {"entries": 0})
    with pytest.raises(ValueError, match="width 1, at least 2"):
        DRAFTERS["histospec"](vocab=300000, **sizes | {"width": 1})
    assert DRAFTERS["off"](vocab=300000, **sizes).width == 0
