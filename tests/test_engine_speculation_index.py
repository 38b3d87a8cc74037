"""A prompt's tables, from a history and from a restored one, against twins."""

from __future__ import annotations

import dataclasses

import drafting_twins as twins
import numpy as np
import plain_rollouts

from jaxrl_post.engine.speculation import corpus, ngrams, suffix_array
from jaxrl_post.ring.history import History
from jaxrl_post.ring.types import Group, Prompt, RolloutId
from jaxrl_post.runs.checkpoint import host_state

PROMPT = Prompt(id="a", tokens=[3, 1, 4, 1, 5, 9, 2, 6, 5])


def group(epoch, answers, rewards, prompt=PROMPT):
    def rollout(sample, tokens):
        return plain_rollouts.rollout(RolloutId(0, "train", epoch, prompt.id, sample), prompt, tokens)

    return Group(
        prompt=prompt,
        rollouts=tuple(map(rollout, range(len(answers)), answers)),
        rewards=rewards,
        scored=np.ones(len(answers), bool),
    )


def test_a_restored_history_gives_the_same_index(tmp_path):
    noise, history, restored = np.random.default_rng(0), History(epochs=2, max_bytes=1 << 20), None
    past = [[noise.integers(0, 9, n).astype(np.int32) for n in (30, 0, 25)] for _ in range(3)]
    for epoch, answers in enumerate(past):
        history.record(group(epoch, answers, [0.0, 1.0, 0.5]))
        history.record(group(epoch, answers[:1], [1.0], Prompt(id="b", tokens=[epoch + 1])))
    host_state.write_state(tmp_path / "state", history.state_dict())
    restored = History(epochs=2, max_bytes=1 << 20)
    restored.load_state_dict(host_state.read_state(tmp_path / "state"))
    known, again = history.of("a"), restored.of("a")
    table, arrays = corpus.grams(known, PROMPT), corpus.sorted_suffixes(known, PROMPT, by_reward=True)
    assert np.array_equal(table, corpus.grams(again, PROMPT)) and table.nbytes == 12 * 110
    for a, b in zip(arrays, corpus.sorted_suffixes(again, PROMPT, by_reward=True)):
        assert np.array_equal(a, b)
    assert np.array_equal(arrays.order, suffix_array.sort(arrays.pool)) and arrays.pool.size == 55 + 3 * 8
    assert arrays.priority[-1] == 1 * 38 + 16 * 8 + 9 * 33  # rewards 0, 1 and a half
    plain = corpus.sorted_suffixes(known, PROMPT, by_reward=False)
    assert plain.priority[-1] == 79 and np.array_equal(plain.order, arrays.order)
    expected = twins.history(past[1:], PROMPT.tokens[-6:])  # the last two epochs, the newer one over the older
    reader = twins.Hashed(table.size, ngrams.OWN, table)
    assert np.mean([reader.get(seen) == found[:2] for seen, found in expected.items()]) > 0.75
    unknown = Prompt(id="z", tokens=[1])
    assert (
        corpus.grams(history.of("z"), unknown).size
        == corpus.sorted_suffixes((), unknown, by_reward=True).pool.size
        == 0
    )


def test_a_table_learns_what_the_model_held_likely():
    """Contexts are those of the tokens; continuations are those of the argmax tokens."""
    answers = group(0, [[1, 2, 3, 4]], [0.0])
    likely = Group(
        prompt=PROMPT,
        rollouts=(dataclasses.replace(answers.rollouts[0], argmax_tokens=np.array([1, 2, 7, 4])),),
        rewards=[0.0],
        scored=[True],
    )
    history = History(epochs=1, max_bytes=1 << 20)
    history.record(likely)
    table = corpus.grams(history.of("a"), PROMPT)
    reader = twins.Hashed(table.size, ngrams.OWN, table)
    assert [(reader.get((token,)) or (None,))[0] for token in (1, 2, 3)] == [2, 7, 4]
