"""Hashed n-gram tables against dictionaries of contexts; the hash against Python integers and jax.numpy."""

from __future__ import annotations

import time

import drafting_twins as twins
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_post.engine.speculation import ngrams


def texts(noise, count, words=5, longest=40):
    """Returns texts of random lengths, half of them repetitive."""
    out = []
    for n in noise.integers(0, longest, count):
        if noise.random() < 0.5:
            out.append(noise.integers(0, words, n).astype(np.int32))
        else:
            out.append(np.tile(noise.integers(0, words, noise.integers(2, 7)), n)[:n].astype(np.int32))
    return out


def epochs(past, end):
    return [ngrams.Texts(end, answers) for answers in past]


def test_the_hash_is_that_of_python_integers_on_both_array_modules():
    noise = np.random.default_rng(0)
    tokens = noise.integers(0, ngrams.MOST_TOKENS, (50, ngrams.ORDERS)).astype(np.uint32)
    tokens[0], tokens[1] = 0, ngrams.MOST_TOKENS - 1
    for xp in (np, jnp):
        newest = [xp.asarray(tokens[:, i]) for i in range(ngrams.ORDERS)]
        for order, part in enumerate(ngrams.hashes(xp, newest), 1):
            keys = ngrams.key(xp, part, ngrams.OWN)
            expected = [twins.hashed([int(t) for t in row[:order][::-1]], ngrams.OWN) for row in tokens]
            assert [(int(k), int(f)) for k, f in zip(keys, ngrams.fingerprint(xp, keys))] == expected
            assert np.asarray(keys).dtype == np.uint32


def test_an_entry_holds_what_was_packed():
    mark, sure, token = (np.array(x, np.uint32) for x in ([1, 4095], [0, 3], [0, ngrams.MOST_TOKENS - 1]))
    entries = ngrams.pack(np, mark, sure, token)
    assert entries.tolist() == [1 << 20, 2**32 - 1]
    assert [x.tolist() for x in ngrams.unpack(np, entries)] == [mark.tolist(), sure.tolist(), token.tolist()]


@settings(max_examples=25)
@given(seed=st.integers(0, 10**6), times=st.integers(0, 3), answers=st.integers(0, 4), context=st.integers(0, 8))
def test_a_table_with_room_is_the_dictionary_of_contexts(seed, times, answers, context):
    noise = np.random.default_rng(seed)
    tail = noise.integers(0, 5, context).astype(np.int32)
    past = [texts(noise, answers) for _ in range(times)]
    table = ngrams.build(epochs(past, tail), size=1 << 20)
    expected = twins.history(past, tail[-ngrams.ORDERS :])
    reader = twins.Hashed(table.size, ngrams.OWN, table)
    held = {seen: found[:2] for seen, found in expected.items()}
    found = {seen: reader.get(seen) for seen in held}
    missing = [seen for seen in held if found[seen] != held[seen]]
    assert len(missing) <= 0.005 * len(held) + 1  # two contexts in one bucket of a million
    assert np.count_nonzero(table) >= len(held) - len(missing)
    everything = {seen for answers in past for answer in answers for seen, _ in twins.contexts(answer, tail[-6:])}
    assert sum(reader.get(seen) is not None for seen in everything - set(held)) <= 1
    assert np.count_nonzero(table) <= len(held)


def test_by_hand():
    """After 7: 8 twice and 9 once; the newer epoch has 5. No context spans two rollouts."""
    epoch = [np.array([7, 8], np.int32), np.array([7, 8], np.int32), np.array([7, 9], np.int32)]

    def told(past, *context):
        return twins.Hashed(4096, ngrams.OWN, ngrams.build(epochs(past, np.zeros(0, np.int32)), 4096)).get(context)

    assert told([epoch], 7) == (8, 1)  # 2 / (3 + 1)
    assert told([epoch], 8) is None and told([epoch], 8, 7) is None
    assert told([epoch, [np.array([7, 5], np.int32)]], 7) == (5, 1)  # 1 / 2
    assert told([[np.array([7, 5], np.int32)], epoch], 7) == (8, 1)
    assert told([4 * epoch[:1]], 7) == (8, 3)
    last = ngrams.MOST_TOKENS - 1
    assert told([[np.array([last, last], np.int32)]], last) == (last, 1)


def test_what_the_model_held_most_likely_is_learned_behind_what_was_written():
    """The tokens are 7 8 7 9 and the argmax tokens 1 2 1 3. So 2 or 3 follows 7, and 1 follows 7 8."""
    table = ngrams.build([ngrams.Texts(np.zeros(0), [np.array([7, 8, 7, 9])], [np.array([1, 2, 1, 3])])], 4096)
    reader = twins.Hashed(4096, ngrams.OWN, table)
    assert reader.get((7,)) == (2, 0) and reader.get((8,)) == (1, 1) and reader.get((8, 7)) == (3, 1)
    assert reader.get((7, 8)) is None and reader.get((1,)) is None  # back-off to 8 gives the same


def test_buckets_keep_the_shorter_then_the_more_frequent_context():
    noise = np.random.default_rng(3)
    past, tail, size = [texts(noise, 6), texts(noise, 6)], np.arange(4, dtype=np.int32), 37
    best = {}
    for seen, (token, sure, times) in twins.history(past, tail).items():
        key, mark = twins.hashed(seen, ngrams.OWN)
        best[key % size] = max(best.get(key % size, (-9,)), (-len(seen), times, key, mark << 20 | sure << 18 | token))
    expected = [best[i][-1] if i in best else 0 for i in range(size)]
    assert len(best) > 20 and ngrams.build(epochs(past, tail), size).tolist() == expected


def test_twelve_bytes_a_token_and_most_contexts_have_room():
    noise = np.random.default_rng(1)
    past = [[(noise.zipf(1.3, 100) % 500).astype(np.int32) for _ in range(8)] for _ in range(2)]
    table, tail = ngrams.build(epochs(past, np.arange(9))), np.arange(9)
    assert table.nbytes == 12 * 1600
    reader, held = twins.Hashed(table.size, ngrams.OWN, table), twins.history(past, tail[-6:])
    assert np.mean([reader.get(seen) == found[:2] for seen, found in held.items()]) > 0.8
    assert ngrams.build([]).size == ngrams.build(epochs([[], []], tail)).size == 0
    assert ngrams.build(epochs([[np.zeros(0, np.int32)]], tail)).nbytes == 0


def test_a_large_history_builds_at_once():
    noise = np.random.default_rng(1)
    past = [[(noise.zipf(1.3, 1 << 14) % 50000).astype(np.int32) for _ in range(8)]]
    start = time.process_time()
    table = ngrams.build(epochs(past, np.arange(9)))
    assert time.process_time() - start < 3.0  # measured 0.15 s
    assert np.array_equal(table, ngrams.build(epochs(past, np.arange(9))))


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="at most 262144"):
        ngrams.check_vocab(ngrams.MOST_TOKENS + 1)
    assert ngrams.check_vocab(ngrams.MOST_TOKENS) == ngrams.MOST_TOKENS
    for token in (-1, ngrams.MOST_TOKENS):
        with pytest.raises(ValueError, match=f"token {token}, ids go from 0 to 262143"):
            ngrams.build(epochs([[np.array([1, token])]], np.arange(3)))


def test_all_prompts_are_counted_together():
    """Groups with ends of different lengths, counted as one epoch of separate texts."""
    noise = np.random.default_rng(5)
    groups = [ngrams.Texts(noise.integers(0, 5, n), texts(noise, 3)) for n in (0, 2, 6, 9)]
    after = {}
    for end, answers, _ in groups:
        for answer in answers:
            for seen, token in twins.contexts(answer, end[-6:]):
                after.setdefault(seen, []).append(token)
    table = ngrams.build_all(groups, 1 << 20)
    reader = twins.Hashed(table.size, ngrams.ALL, table)
    expected = {seen: twins.most_frequent(tokens) for seen, tokens in after.items()}
    kept = {
        seen: found
        for seen, found in expected.items()
        if len(seen) == 1 or expected[seen[1:]][0] != found[0] or expected[seen[1:]][1] < found[1]
    }
    assert len(kept) > 100 and np.count_nonzero(table) == len(kept)
    assert all(reader.get(seen) == found[:2] for seen, found in kept.items())
    assert not ngrams.build_all([], 8).any()
