"""The sliding window over all prompts' rollouts against a list, also saved and restored midway."""

from __future__ import annotations

import numpy as np
import pytest

from jaxrl_post.engine.speculation import ngrams
from jaxrl_post.engine.speculation.corpus import Corpus
from jaxrl_post.runs.checkpoint import host_state


def groups(count, seed=0):
    noise = np.random.default_rng(seed)
    return [
        ngrams.Texts(noise.integers(0, 9, noise.integers(1, 9)).astype(np.int32), *written(noise)) for _ in range(count)
    ]


def written(noise):
    """Returns rollouts and, half of the time, argmax tokens."""
    answers, argmax_tokens = (
        [noise.integers(0, 9, n).astype(np.int32) for n in lengths] for lengths in [noise.integers(0, 12, 3)] * 2
    )
    return answers, argmax_tokens if noise.random() < 0.5 else None


def test_the_table_is_that_of_the_last_groups_that_fit_and_lags_by_an_eighth():
    corpus, built, waiting, changes = Corpus(300), [], [], 0

    def tokens(some):
        return sum(len(answer) for texts in some for answer in texts.rollouts)

    for group in groups(60):
        waiting.append(group)
        changed = 8 * tokens(waiting) >= tokens(built)
        if changed:
            built, waiting, changes = built + waiting, [], changes + 1
            while tokens(built) > 100:
                built = built[1:]
        assert corpus.add(group) == changed and corpus.version == changes
        assert np.array_equal(corpus.entries, ngrams.build_all(built, 300))
    assert 10 < changes < 60 and corpus.entries.nbytes == 12 * 100 and np.count_nonzero(corpus.entries) > 50


def test_a_restored_window_goes_on_alike(tmp_path):
    whole, resumed = Corpus(300), Corpus(300)
    for number, group in enumerate(groups(40, seed=1)):
        assert whole.add(group) == resumed.add(group)
        assert np.array_equal(whole.entries, resumed.entries) and whole.version == resumed.version
        if number % 7 == 0:
            host_state.write_state(tmp_path / str(number), resumed.state_dict())
            resumed = Corpus(300)
            resumed.load_state_dict(host_state.read_state(tmp_path / str(number)))
            assert np.array_equal(whole.entries, resumed.entries)


def test_an_empty_window_and_a_group_larger_than_the_window():
    fresh = Corpus(30)
    fresh.load_state_dict(Corpus(30).state_dict())
    assert not fresh.entries.any()
    assert fresh.add(ngrams.Texts(np.arange(3), [np.arange(11)])) and not fresh.entries.any()
    assert fresh.add(ngrams.Texts(np.arange(3), [np.arange(10)])) and fresh.entries.any()
    with pytest.raises(ValueError, match="2 entries, at least 3"):
        Corpus(2)
