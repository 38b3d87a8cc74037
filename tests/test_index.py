"""The index of a restored history; the places on the shelf against a map of taken entries."""

from __future__ import annotations

import drafting_twins as twins
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_post import checkpoint, index, ngrams, suffixes
from jaxrl_post.history import History
from jaxrl_post.types import Finish, Group, Prompt, Rollout, RolloutId

PROMPT = Prompt(id="a", tokens=[3, 1, 4, 1, 5, 9, 2, 6, 5])


def group(epoch, answers, rewards, prompt=PROMPT):
    def rollout(sample, tokens):
        zeros = np.zeros(len(tokens))
        return Rollout(id=RolloutId(0, "train", epoch, prompt.id, sample), prompt=prompt, tokens=tokens, sampled=zeros == 0,
                       logprobs=zeros, entropies=zeros, versions=zeros, drafted=zeros, finish=Finish.EOS, start_clock=0,
                       finish_clock=0)
    return Group(prompt=prompt, rollouts=tuple(map(rollout, range(len(answers)), answers)), rewards=rewards,
                 scored=np.ones(len(answers), bool))


def test_a_restored_history_gives_the_same_index(tmp_path):
    noise, history, restored = np.random.default_rng(0), History(epochs=2, max_bytes=1 << 20), None
    past = [[noise.integers(0, 9, n).astype(np.int32) for n in (30, 0, 25)] for _ in range(3)]
    for epoch, answers in enumerate(past):
        history.record(group(epoch, answers, [0.0, 1.0, 0.5]))
        history.record(group(epoch, answers[:1], [1.0], Prompt(id="b", tokens=[epoch + 1])))
    checkpoint.write_state(tmp_path / "state", history.state_dict())
    restored = History(epochs=2, max_bytes=1 << 20)
    restored.load_state_dict(checkpoint.read_state(tmp_path / "state"))
    table, arrays = index.grams(history, PROMPT), index.sorted_suffixes(history, PROMPT, by_reward=True)
    assert np.array_equal(table, index.grams(restored, PROMPT)) and table.nbytes == 12 * 110
    for a, b in zip(arrays, index.sorted_suffixes(restored, PROMPT, by_reward=True)):
        assert np.array_equal(a, b)
    assert np.array_equal(arrays.order, suffixes.sort(arrays.pool)) and arrays.pool.size == 55 + 3 * 8
    assert arrays.priority[-1] == 1 * 38 + 16 * 8 + 9 * 33  # rewards 0, 1 and a half
    plain = index.sorted_suffixes(history, PROMPT, by_reward=False)
    assert plain.priority[-1] == 79 and np.array_equal(plain.order, arrays.order)
    expected = twins.history(past[1:], PROMPT.tokens[-6:])  # the last two epochs, the newer one over the older
    reader = twins.Hashed(table.size, ngrams.OWN, table)
    assert np.mean([reader.get(seen) == found[:2] for seen, found in expected.items()]) > 0.75
    unknown = Prompt(id="z", tokens=[1])
    assert index.grams(history, unknown).size == index.sorted_suffixes(history, unknown, by_reward=True).pool.size == 0


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 7), st.booleans()), max_size=40))
def test_places_never_overlap_and_are_free_again(visits):
    shelf, held = index.Shelf(16), {}
    for key, length, leaving in visits:
        if leaving and key in held:
            shelf.leave(key)
            held[key][2] -= 1
            if not held[key][2]:
                del held[key]
            continue
        taken = np.zeros(17, bool)
        taken[16] = True
        for offset, size, _ in held.values():
            assert not taken[offset:offset + size].any()
            taken[offset:offset + size] = True
        found = shelf.hold(key, length)
        if key in held:
            held[key][2] += 1
            assert found == (held[key][0], False)
            continue
        fits = [i for i in range(17 - length) if not taken[i:i + length].any()]
        if not fits:
            assert found is None
        else:
            offset, new = found
            assert new and offset in fits
            held[key] = [offset, length, 1]
