"""Sampling law 1 against its numpy twin, and its distribution against softmax."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sampler

from jaxrl_post.kernels import sampling, threefry, thresholds

pytestmark = pytest.mark.usefixtures("quick_compilation")

sample, find = jax.jit(sampling.sample), jax.jit(thresholds.find)


def test_threefry_known_answers():
    """Compares with Random123's test vectors for threefry2x32, 20 rounds, and with a twin in Python integers."""
    for key, counter, word in [
        ((0, 0), (0, 0), 0x6B200159),
        ((0xFFFFFFFF,) * 2, (0xFFFFFFFF,) * 2, 0x1CB996FC),
        ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), 0xC4923A9C),
    ]:
        got = threefry.first_word(np, *(np.array([v], np.uint32) for v in key + counter))
        assert int(got[0]) == word == sampler.threefry(key, counter)


def test_noise_is_a_gumbel_number_of_seed_position_and_word():
    noise = np.random.default_rng(0)
    seeds = noise.integers(0, 2**32, (50, 2), dtype=np.uint32)
    positions = noise.integers(0, 5000, 50).astype(np.int32)
    words = noise.integers(0, 2**32, (50, 7), dtype=np.uint32)
    got = np.asarray(sampling.gumbel(jnp.asarray(seeds), jnp.asarray(positions), jnp.asarray(words)))
    want = [[sampler.gumbel(seeds[r], int(positions[r]), int(w)) for w in words[r]] for r in range(50)]
    np.testing.assert_allclose(got, want, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("vocab", [7, 512, 1024, 2053])
def test_agrees_with_the_twin(vocab):
    noise = np.random.default_rng(vocab)
    rows = 24
    logits = (noise.normal(size=(rows, vocab)) * 3).astype(np.float32)
    logits[3, : vocab // 2] = -np.inf
    seeds = noise.integers(0, 2**32, (rows, 2), dtype=np.uint32)
    positions = noise.integers(0, 4096, rows).astype(np.int32)
    heat = np.resize([1.0, 0.6, 0.0, 2.0], rows).astype(np.float32)
    tokens, logprobs, entropies, plain, likeliest = sample(*map(jnp.asarray, (logits, seeds, positions, heat)))
    for r in range(rows):
        want = sampler.draw(logits[r], seeds[r], int(positions[r]), float(heat[r]))
        assert tokens[r] == want.token or want.gap < 1e-5
        assert abs(logprobs[r] - want.logprob) < 1e-5 and abs(entropies[r] - want.entropy) < 2e-5
        assert likeliest[r] == np.argmax(logits[r])
        assert abs(plain[r] - sampler.numpy_llama.log_softmax(logits[r].astype(float))[tokens[r]]) < 1e-5


@pytest.mark.parametrize("vocab", [16, 503, 1025])
def test_a_row_without_a_cut_has_the_same_bits_beside_rows_with_one(vocab):
    """Programs with and without cuts are the same law to the bit, so an option of other rows changes no log-prob."""
    noise = np.random.default_rng(vocab)
    logits = jnp.asarray(noise.normal(size=(64, vocab)) * 3, jnp.float32)
    seeds, positions = jnp.asarray(noise.integers(0, 2**32, (64, 2)), jnp.uint32), jnp.arange(64)
    heat, cut = jnp.full(64, 0.6, jnp.float32), jnp.arange(64) % 2 == 1
    lowest = jax.jit(thresholds.find)(logits, heat, jnp.where(cut, 3, 0), jnp.where(cut, 0.9, 1.0))
    plain, mixed = (jax.jit(sampling.sample)(logits, seeds, positions, heat, t) for t in (None, lowest))
    for one, other in zip(plain, mixed):
        np.testing.assert_array_equal(np.asarray(one)[~cut], np.asarray(other)[~cut])


@pytest.mark.parametrize("vocab", [7, 512, 2053])
def test_with_thresholds_agrees_with_the_twin_that_sorts(vocab):
    noise = np.random.default_rng(vocab)
    rows = 40
    logits = (noise.normal(size=(rows, vocab)) * 3).astype(np.float32)
    logits[3, : vocab // 2] = -np.inf
    seeds = noise.integers(0, 2**32, (rows, 2), dtype=np.uint32)
    positions = noise.integers(0, 4096, rows).astype(np.int32)
    heat = np.resize([1.0, 0.6, 0.0, 2.0], rows).astype(np.float32)
    top_k = np.resize([0, 1, 5, vocab + 3, 40], rows).astype(np.int32)
    top_p = np.resize([1.0, 0.9, 0.5], rows).astype(np.float32)
    lowest = find(*map(jnp.asarray, (logits, heat, top_k, top_p)))
    drawn = sample(*map(jnp.asarray, (logits, seeds, positions, heat)), lowest)
    plain = sample(*map(jnp.asarray, (logits, seeds, positions, heat))).plain
    cut = 0
    for r in range(rows):
        want = sampler.draw(
            logits[r], seeds[r], int(positions[r]), float(heat[r]), top_k=int(top_k[r]), top_p=float(top_p[r])
        )
        assert want.edge > 1e-6, "another seed: this one cannot decide"
        assert drawn.tokens[r] == want.token or want.gap < 1e-5
        assert abs(drawn.logprobs[r] - want.logprob) < 1e-5 and abs(drawn.entropies[r] - want.entropy) < 2e-5
        whole = sampler.numpy_llama.log_softmax(logits[r].astype(float))
        assert abs(drawn.plain[r] - whole[drawn.tokens[r]]) < 1e-5
        cut += want.edge < np.inf
    assert cut > rows // 3 and plain.shape == (rows,)


def test_a_threshold_of_none_changes_no_bit():
    noise = np.random.default_rng(3)
    given = [
        jnp.asarray(x)
        for x in (
            noise.normal(size=(32, 2053)).astype(np.float32),
            noise.integers(0, 2**32, (32, 2), dtype=np.uint32),
            np.arange(32, dtype=np.int32),
            np.resize([1.0, 0.0, 0.7], 32).astype(np.float32),
        )
    ]
    off = find(given[0], given[3], jnp.zeros(32, jnp.int32), jnp.ones(32))
    assert (np.asarray(off) == -np.inf).all()
    for one, two in zip(sample(*given), sample(*given, off), strict=True):
        assert np.asarray(one).tobytes() == np.asarray(two).tobytes()


def test_ties_at_the_threshold_are_all_kept():
    """By hand: 2, 1, 1, 0 with top_k 2 keeps three ids; -0.0 and 0.0 tie; half the mass of equal ids keeps them all."""
    logits = np.array([[2, 1, 1, 0], [0.0, -1, -0.0, -2], [1, 1, 1, 1], [-1, -2, -3, -4]], np.float32)
    top_k, top_p = np.array([2, 1, 0, 3], np.int32), np.array([1, 1, 0.5, 0.95], np.float32)
    lowest = np.asarray(find(*map(jnp.asarray, (logits, np.ones(4, np.float32), top_k, top_p))))
    assert (logits >= lowest[:, None]).sum(axis=1).tolist() == [3, 2, 4, 3]


@pytest.mark.parametrize("parts", [1, 4])
def test_records_are_the_ids_that_the_twin_keeps(parts):
    """Rows of 512 ids on one device and on four. A row that keeps more than 24 has no record, nor has one without a cut."""
    noise = np.random.default_rng(parts)
    logits = (noise.normal(size=(40, 512)) * 3).astype(np.float32)
    logits[5] = 1.0  # all ids tie
    heat = np.resize([1.0, 0.6, 0.0, 2.0], 40).astype(np.float32)
    top_k, top_p = np.resize([0, 1, 5, 600, 20], 40).astype(np.int32), np.resize([1.0, 0.9, 0.5], 40).astype(np.float32)
    lowest = find(*map(jnp.asarray, (logits, heat, top_k, top_p)))
    got = np.asarray(jax.jit(thresholds.kept, static_argnums=(2, 3))(jnp.asarray(logits), lowest, 24, parts))
    empty = 0
    for r in range(40):
        cuts = heat[r] > 0 and (top_k[r] > 0 or top_p[r] < 1)
        allowed = sampler.cut(logits[r], float(heat[r]), int(top_k[r]), float(top_p[r]))[0] if cuts else np.zeros(512)
        want = np.flatnonzero(allowed) if allowed.sum() <= 24 else np.zeros(0, int)
        assert sorted(got[r][got[r] >= 0]) == want.tolist()
        assert (np.diff(logits[r][got[r][got[r] >= 0]]) <= 0).all()  # the likeliest first
        empty += want.size == 0
    assert 5 < empty < 25


def test_a_share_that_is_met_exactly_is_enough():
    """Four ids that differ by less than a weight can tell: each weighs 1, so half of the mass is two ids."""
    logits = jnp.asarray([[0, -1e-9, -2e-9, -3e-9]], jnp.float32)
    lowest = thresholds.find(logits, jnp.ones(1), jnp.zeros(1, jnp.int32), jnp.full(1, 0.5))
    assert (np.asarray(logits) >= np.asarray(lowest)[:, None]).tolist() == [[True, True, False, False]]


def test_ties_go_to_the_lowest_id():
    logits = np.zeros((1, 2053), np.float32)
    logits[0, [5, 1500]] = 9.0
    got = sample(jnp.asarray(logits), jnp.zeros((1, 2), jnp.uint32), jnp.zeros(1, jnp.int32), jnp.zeros(1))
    assert got[0][0] == 5


def _counts(logits: np.ndarray, draws: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns observed and expected counts of each id in `draws` samples."""
    law = jax.jit(
        jax.vmap(lambda seed, at: sampling.sample(jnp.asarray(logits)[None], seed[None], at[None], jnp.ones(1))[0][0])
    )
    noise = np.random.default_rng(1)
    seeds = jnp.asarray(noise.integers(0, 2**32, (draws, 2), dtype=np.uint32))
    at = jnp.asarray(noise.integers(0, 300, draws).astype(np.int32))
    tokens = np.concatenate([np.asarray(law(seeds[i : i + 4000], at[i : i + 4000])) for i in range(0, draws, 4000)])
    expected = draws * np.exp(sampler.numpy_llama.log_softmax(logits.astype(np.float64)))
    return np.bincount(tokens, minlength=logits.size), expected


def _excess(counts: np.ndarray, expected: np.ndarray) -> float:
    """Returns Pearson's statistic in standard deviations above its mean. Expected counts below 5 are pooled."""
    often = expected >= 5
    counts = np.append(counts[often], counts[~often].sum())
    expected = np.append(expected[often], expected[~often].sum())
    keep = expected > 0
    statistic, freedom = float(((counts - expected)[keep] ** 2 / expected[keep]).sum()), max(int(keep.sum()) - 1, 1)
    return (statistic - freedom) / np.sqrt(2 * freedom)


PEAKED = (np.random.default_rng(0).normal(size=2053) * 2.5).astype(np.float32)
FLAT = np.zeros(2053, np.float32)


@pytest.mark.parametrize("logits", [FLAT, PEAKED], ids=["flat", "peaked"])
def test_distribution_is_softmax(logits):
    """Chi-square at V = 2,053, three tiles of which the last is partly filled.

    Tests all ids, and the few ids whose numbers are tile numbers too."""
    counts, expected = _counts(logits, 40000)
    assert _excess(counts, expected) < 4.5
    assert _excess(counts[:3], expected[:3]) < 4.5


def test_planted_fault_without_the_tile_tag_fails(monkeypatch):
    """Without the tag, tile t and id t share noise: ids 0 and 1 have about twice and zero times their probability."""
    monkeypatch.setattr(sampling, "TILE_TAG", 0)
    counts, expected = _counts(FLAT, 40000)
    assert _excess(counts[:3], expected[:3]) > 4.5
    assert counts[1] < 0.2 * expected[1]
