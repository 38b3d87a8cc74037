"""Every family against scores that transformers computed: close in f32, and far with any planted fault."""

from __future__ import annotations

import jax
import numpy as np
import parity_arms as arms
import pytest

from jaxrl_post.models import decoder, hf
from tests import numpy_llama

pytestmark = pytest.mark.usefixtures("quick_compilation")
FAULTS = [(family, fault) for family, faults in arms.FAULTS.items() for fault in faults]


@pytest.mark.parametrize("family", arms.FAMILIES)
def test_the_goldens_can_tell(family):
    """Scores far apart, texts longer than the window and the original rotation, no norm or bias at rest."""
    tokens, scores = arms.golden(family)
    config, params = hf.load(arms.GOLDENS / family)
    assert scores.std() >= 2 and scores.dtype == np.float32 and scores.shape == (*tokens.shape, config.vocab_size)
    assert all(window is None or 2 * window < tokens.shape[1] for window in config.windows)
    assert (
        config.rope_scaling is None
        or config.rope_scaling.kind == "linear"
        or (config.rope_scaling.original_length < tokens.shape[1])
    )
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        assert leaf.size == 1 or leaf.std() > 0.1, path
    assert sum(file.stat().st_size for file in (arms.GOLDENS / family).iterdir()) < 140_000


@pytest.mark.parametrize("family", arms.FAMILIES)
def test_scores_equal_those_of_transformers_in_both_spellings(family, tmp_path):
    (config, params), (other, again) = (
        hf.load(arms.spelled(family, spelling, tmp_path)) for spelling in ("newer", "older")
    )
    assert config == other
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(again), strict=True))
    largest, elsewhere = arms.gap(family, config, params)
    assert largest <= arms.BOUND and elsewhere == 0
    tokens, theirs = arms.golden(family)
    np.testing.assert_allclose(
        numpy_llama.forward(params, config, tokens[1], dtype=np.float64), theirs[1], rtol=0, atol=arms.BOUND
    )


@pytest.mark.extended
@pytest.mark.parametrize("family, fault", FAULTS)
def test_a_planted_fault_parts_the_scores(family, fault):
    assert arms.planted(family, fault)[0] > 10 * arms.BOUND


@pytest.mark.parametrize("arm", arms.ARMS)
def test_over_the_attention_of_trainer_and_engine_scores_are_as_close(arm):
    """Gemma 2 has most to tell the attention: windows, a soft cap, a scale. scripts/shows/parity.py has all."""
    config, params = hf.load(arms.GOLDENS / "gemma2")
    largest, elsewhere = arms.gap("gemma2", config, params, jax.jit(arms.ARMS[arm], static_argnums=0))
    assert largest <= arms.BOUND and elsewhere == 0


@pytest.mark.parametrize(
    "family, leaves",
    [
        ("llama2", 9),
        ("qwen2", 12),
        ("qwen3", 11),
        ("gemma2", 11),
        ("gemma3", 13),
        ("gemma4", 14),
        ("gemma4_embeds", 17),
        ("gemma4_moe", 23),
        ("qwen3_5", 18),
        ("qwen3_5_moe", 23),
        ("qwen3_next", 18),
        ("qwen2_moe", 17),
        ("qwen3_moe", 11),
        ("mixtral", 10),
        ("gpt_oss", 19),
    ],
)
def test_each_family_has_its_own_leaves(family, leaves):
    config, params = hf.load(arms.GOLDENS / family)
    assert len(params["layers"]["0"]) == leaves
    assert jax.tree.map(np.shape, params) == jax.tree.map(lambda leaf: leaf.shape, decoder.abstract(config))
