"""Laws of lengths against closed forms, and answers under drift against what they promise."""

from __future__ import annotations

import math

import numpy as np
import pytest
import sim_arms as arms
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_post.simulate import length_distributions, workloads
from jaxrl_post.simulate.texts import SimText, agreement, noise, pieces, spans_of

UNIFORMS = [(n + 0.5) / 400 for n in range(400)]
HEAVY = length_distributions.Mixture(
    length_distributions.LogNormal(2.0, 0.8), length_distributions.LogUniform(10.0, 100.0), 0.2
)
LAWS = [
    length_distributions.Uniform(40),
    length_distributions.LogNormal(2.0, 0.8),
    length_distributions.LogUniform(3.0, 60.0),
    HEAVY,
    length_distributions.Empirical([1, 3, 3, 8, 20, 21]),
]


def drawn(law, beyond, grid):
    return np.array([law.draw(a, b, beyond) for a, b in grid])


@pytest.mark.parametrize("law", LAWS, ids=lambda law: type(law).__name__)
@pytest.mark.parametrize("beyond", [0.0, 2.0, 9.0, 17.0])
def test_behind_a_position_the_law_is_the_law_given_that_it_is_longer(law, beyond):
    """Its quantiles are those of the draws from the start that are longer."""
    rng = np.random.default_rng(0)
    grid = rng.random((8000, 2)).tolist()
    all_of_them, behind = drawn(law, 0.0, grid), drawn(law, beyond, grid)
    longer = all_of_them[all_of_them > beyond]
    assert (behind > beyond).all()
    at = np.unique(np.quantile(longer, np.linspace(0.05, 0.95, 19)))
    a, b = (np.searchsorted(np.sort(x), at, side="right") / x.size for x in (longer, behind))
    assert np.abs(a - b).max() < 2.2 / math.sqrt(longer.size) + 2.2 / math.sqrt(behind.size)


def test_laws_against_their_closed_forms():
    """Each quantile of the uniform grid within a step of it."""
    uniform = [length_distributions.Uniform(40).draw(0.5, u, 0.0) for u in UNIFORMS]
    assert np.mean(uniform) == pytest.approx(20.0) and np.std(uniform) == pytest.approx(40 / math.sqrt(12), rel=1e-4)
    logs = np.log([length_distributions.LogNormal(2.0, 0.8).draw(0.5, u, 0.0) for u in UNIFORMS])
    assert np.mean(logs) == pytest.approx(2.0) and np.std(logs) == pytest.approx(0.8, rel=0.01)
    logs = np.log([length_distributions.LogUniform(3.0, 60.0).draw(0.5, u, 0.0) for u in UNIFORMS])
    assert np.mean(logs) == pytest.approx(math.log(180) / 2)
    assert (
        length_distributions.LogNormal(2.0, 0.8).survival(math.exp(2.0)) == 0.5
        and length_distributions.LogUniform(1.0, 100.0).survival(10.0) == 0.5
    )


def test_the_spread_gives_the_tail_that_was_asked_for():
    """Longest of 8 over the mean, by drawing; of one answer it is 1 whatever the spread."""
    sigma = length_distributions.spread(1.45, 8)
    z = np.random.default_rng(0).normal(size=(100_000, 8))
    assert np.exp(sigma * z).max(1).mean() / math.exp(sigma**2 / 2) == pytest.approx(1.45, rel=0.01)
    assert length_distributions.tail_of(0.7, 1) == pytest.approx(1.0)
    with pytest.raises(ValueError, match="nearest valid value is 1"):
        length_distributions.spread(0.5, 8)


@pytest.mark.parametrize("tv", [0.003, 0.03, 0.3])
def test_every_version_has_the_same_law(tv):
    """Lengths after 7 versions against lengths of version 0: two samples of one law (Kolmogorov-Smirnov, 1 in 10 000)."""
    texts, ids = arms.texts(tv), [arms.request(n).rollout_id for n in range(2500)]
    first, last = (np.sort([texts.length(name, None, version) for name in ids]) for version in (0, 7))
    at = np.arange(1, arms.CAP + 1)
    gap = np.abs(np.searchsorted(first, at, side="right") - np.searchsorted(last, at, side="right")).max() / len(ids)
    assert gap < 2.23 * math.sqrt(2 / len(ids))
    assert (first != last).any()


def test_the_first_difference_is_geometric_and_all_before_it_is_equal():
    """P(no difference in the first k tokens) = (1 - tv)^k, among answers that have so many."""
    tv, texts = 0.05, arms.texts(0.05)
    pairs = [[texts.path(arms.request(n).rollout_id, None, ((0, version),)) for version in (3, 4)] for n in range(1500)]
    for k in (1, 5, 12):
        there = [agreement(a.tokens(a.length), b) for a, b in pairs if a.length >= k]
        assert np.mean([same >= k for same in there]) == pytest.approx(
            (1 - tv) ** k, abs=3.5 * 0.5 / math.sqrt(len(there))
        )


@given(st.integers(0, 400), st.lists(st.integers(0, 4), min_size=1, max_size=4), st.floats(0.01, 0.4))
def test_what_is_written_is_kept_and_the_rest_is_sampled_by_the_new_version(number, jumps, tv):
    """A path in pieces: its front is that of the path before, its length is above what was written, and going on under the
    same version changes nothing."""
    texts, name = arms.texts(tv), arms.request(number).rollout_id
    spans, version, before = ((0, 0),), 0, texts.path(name, None, ((0, 0),))
    for jump in jumps:
        written = before.length // 2
        version += jump
        spans = (*spans, (written, version)) if jump and written else ((0, version),) if not written else spans
        after = texts.path(name, None, spans)
        assert after.length > written or after.length == before.length
        assert (after.tokens(written) == before.tokens(written)).all()
        assert texts.path(name, None, spans) == after
        before = after


def test_frozen_weights_never_change_an_answer():
    texts = arms.texts(0.0)
    name = arms.request(3).rollout_id
    assert texts.path(name, None, ((0, 0),)) == texts.path(name, None, ((0, 5), (2, 900)))


@given(st.integers(0, 2**64 - 1), st.integers(0, 10**6), st.integers(-5, 10**6))
def test_noise_lies_strictly_between_0_and_1(key, version, place):
    assert 0.0 < noise(key, version, place) < 1.0 and noise(key, version, place) == noise(key, version, place)


def test_noise_is_uniform_and_each_word_counts():
    values = np.array([noise(key, version, place) for key in range(20) for version in range(20) for place in range(20)])
    assert np.unique(values).size == values.size
    assert np.histogram(values, 10, (0, 1))[0] == pytest.approx(800, abs=4.5 * math.sqrt(800 * 0.9))


def test_pieces_and_spans_by_hand():
    answer = SimText(6, (0, 2, 5), (0, 3, 4))
    assert answer.tokens(6).tolist() == [0, 0, 3, 3, 3, 4] and answer.tokens(3).tolist() == [0, 0, 3]
    assert spans_of(np.array([1, 1, 1, 4])) == ((0, 1), (3, 4)) and spans_of(np.zeros(0)) == ()
    assert pieces((0,), (7,), 2).tolist() == [7, 7]
    assert agreement(np.array([0, 0, 3, 9]), answer) == 3 and agreement(np.array([0, 0]), answer) == 2


def test_the_fitted_workload_has_the_published_quantiles():
    """Its note's table at a cap of 8k: mean 1006, medians 587, 1042 and 1887 at 75 and 90 %, 2.6 % at the cap, 16 % of
    prompts with one of 8 there."""
    law = workloads.rollpacker(3000, cap=8192)
    texts = arms.SimTexts(law, cap=8192)
    order = workloads.SimPrompts(3000, tokens=1)
    lengths = np.array(
        [
            [texts.length(name, prompt, 0) for name in names]
            for prompt, names in (
                (prompt, [arms.RolloutId(0, "train", 0, prompt.id, sample, 0) for sample in range(8)])
                for _, prompt in map(order.at, range(3000))
            )
        ]
    )
    assert lengths.mean() == pytest.approx(1006, rel=0.04)
    assert np.quantile(lengths, [0.5, 0.75, 0.9]) == pytest.approx([587, 1042, 1887], rel=0.05)
    assert (lengths == 8192).mean() == pytest.approx(0.026, abs=0.004)
    assert (lengths == 8192).any(1).mean() == pytest.approx(0.16, abs=0.02)


def test_log_normal_prompts_have_the_mean_the_tail_and_the_share_within():
    law = workloads.lognormal(4000, mean=1350.0, tail=1.43, group=8, within=0.5)
    own = [law(prompt) for _, prompt in map(workloads.SimPrompts(4000, tokens=1).at, range(4000))]
    assert np.mean([math.exp(one.mu + one.sigma**2 / 2) for one in own]) == pytest.approx(1350, rel=0.02)
    assert np.var([one.mu for one in own]) == pytest.approx(own[0].sigma ** 2, rel=0.07)
    assert length_distributions.tail_of(own[0].sigma, 8) == pytest.approx(1.43)


def test_an_epoch_holds_every_prompt_once_and_each_epoch_has_its_own_order():
    order = workloads.SimPrompts(50, tokens=3, seed=2)
    epochs = [[order.at(epoch * 50 + n)[1].id for n in range(50)] for epoch in range(2)]
    assert (
        sorted(epochs[0], key=int) == sorted(epochs[1], key=int) == [str(n) for n in range(50)]
        and epochs[0] != epochs[1]
    )
    assert order.at(120)[0] == 2 and order.at(3)[1].id == epochs[0][3]


def test_traces_are_read_in_their_own_forms(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"output_length": 5}\n{"output_length": 0}\n{"output_length": 7}\n')
    (tmp_path / "b.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\nx,4,10\ny,9,3\n")
    (tmp_path / "c.txt").write_text("abcdefgh\n=====\nabc\nd\n=====\n")
    assert [workloads.read_lengths(tmp_path / name) for name in ("a.jsonl", "b.csv", "c.txt")] == [
        [5, 7],
        [10, 3],
        [2, 2],
    ]
    (tmp_path / "d.jsonl").write_text('{"length": 5}\n')
    for name, said in (("d.jsonl", "no trace of this form"), ("e.csv", "no trace"), ("a.json", "no trace")):
        with pytest.raises(ValueError, match=said):
            workloads.read_lengths(tmp_path / name)
