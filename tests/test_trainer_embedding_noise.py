"""NEFTune: the noise against its law in Python's integers, and gradients against a table with a row for each token."""

from __future__ import annotations

import dataclasses
import hashlib

import gradient_arms as arms
import jax
import jax.numpy as jnp
import made_groups
import numpy as np
import preference_arms as pairs
import pytest
from dense_attend import dense
from sampler import threefry

from jaxrl_post.config import AlgorithmConfig
from jaxrl_post.models import decoder
from jaxrl_post.parallel import mesh

pytestmark = pytest.mark.usefixtures("quick_compilation")

MODEL = dataclasses.replace(made_groups.MODEL, tied=False)
GROUPS = made_groups.groups(3, 2, unscored=False)
ALPHA, STEP = 4.0, 3


def noise_of(rollout, step: int) -> np.ndarray:
    """Returns alpha / sqrt(L d) times (2 u - 1), [L, D], by the words of the docstrings."""
    text = b"neftune" + rollout.id.seed().tobytes() + step.to_bytes(8, "little")
    key = np.frombuffer(hashlib.blake2b(text, digest_size=8).digest(), "<u4").tolist()
    length = rollout.prompt.tokens.size + len(rollout)
    units = [[((threefry(key, (t, d)) >> 9) + 0.5) / 2**23 for d in range(MODEL.embed)] for t in range(length)]
    return ALPHA / (length * MODEL.embed) ** 0.5 * (2 * np.array(units) - 1)


def plain_scores(params, noisy: bool):
    """Log-probs of each text in a row of its own, where every token has its own row of a table of embeddings."""
    tokens, mask, members = made_groups.unpacked(GROUPS)
    noise = np.zeros((*tokens.shape, MODEL.embed))
    for n, (g, i) in enumerate(members):
        if noisy:
            made = noise_of(GROUPS[g].rollouts[i], STEP)
            noise[n, : len(made)] = made
    table = (params["embed"][tokens] + noise).reshape(-1, MODEL.embed)
    ids, positions = np.arange(tokens.size).reshape(tokens.shape), np.tile(np.arange(tokens.shape[1]), (len(tokens), 1))
    model = dataclasses.replace(MODEL, vocab_size=tokens.size)
    given = params | {"embed": table, "head": jnp.zeros((MODEL.embed, tokens.size))}
    positions = jnp.asarray(positions)
    h, _ = decoder.hidden(given, model, jnp.asarray(ids), positions, dense(positions), None, dtype=np.float64)
    logps = jax.nn.log_softmax(h @ params["head"])
    chosen = jnp.take_along_axis(logps[:, :-1], jnp.asarray(tokens)[:, 1:, None], axis=-1)[..., 0]
    return jnp.pad(chosen, ((0, 0), (1, 0))), mask


def learner(given: AlgorithmConfig, reference: bool, rows: int):
    how = dict(given=given, kind=arms.Uncommitted, temperature=1.0, reference=reference, model=MODEL, rows=rows)
    one = arms.learner(np.float32, policy=made_groups.weights(0, np.float32, MODEL), **how)
    one._step = STEP
    return one


@pytest.mark.parametrize("rows", [1, 4])
def test_supervised_gradients_are_those_of_noisy_embeddings(rows):
    given = AlgorithmConfig(loss_mode="sft", adv_estimator="ones", neftune_alpha=ALPHA)
    found = pairs.gradient(learner(given, False, rows), GROUPS)
    with arms.precision(np.float64):

        def loss(params):
            logps, mask = plain_scores(params, noisy=True)
            return -jnp.sum(jnp.where(mask, logps, 0)) / mask.sum()

        params = jax.tree.map(jnp.asarray, made_groups.weights(0, np.float64, MODEL))
        want = jax.device_get(jax.jit(jax.grad(loss))(params))
    assert arms.worst(found, want) <= 5e-6


def test_gradients_of_pairs_have_a_noisy_policy_and_a_reference_without():
    given = pairs.algorithm("dpo", neftune_alpha=ALPHA)
    found = pairs.gradient(learner(given, True, 2), GROUPS)
    with arms.precision(np.float64):
        policy = made_groups.weights(0, np.float64, MODEL)
        reference = jax.tree.map(jnp.asarray, made_groups.moved(policy, 2))

        def sums(params, noisy):
            logps, mask = plain_scores(params, noisy)
            return jnp.sum(jnp.where(mask, logps, 0), axis=1)

        def loss(params):
            gaps = (sums(params, True) - sums(reference, False)).reshape(-1, 2)
            return jnp.mean(pairs.plain_losses(given, gaps[:, 0], gaps[:, 1], 1, 1))

        want = jax.device_get(jax.jit(jax.grad(loss))(jax.tree.map(jnp.asarray, policy)))
    assert arms.worst(found, want) <= 5e-6


def test_without_alpha_there_is_no_noise_in_the_programs():
    quiet, loud = (
        learner(AlgorithmConfig(loss_mode="sft", adv_estimator="ones", neftune_alpha=alpha), False, 2)
        for alpha in (0.0, ALPHA)
    )
    place = mesh.make_mesh(1, 1, 1)
    assert quiet._shapes.batch(place).noise_scales is None and quiet._shapes.bare(place).noise_keys is None
    assert loud._shapes.batch(place).noise_scales.shape == (2, 48) and loud._shapes.bare(place).noise_keys.ndim == 3
