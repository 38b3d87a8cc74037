"""Routes through experts: the engine records them, and the learner compares with them, repeats them and weighs the routers."""

from __future__ import annotations

import dataclasses

import engine_lab as lab
import gradient_arms as arms
import jax
import jax.numpy as jnp
import made_groups
import numpy as np
import numpy_llama
import pytest

from jaxrl_post import config
from jaxrl_post.models import decoder, experts
from jaxrl_post.models.model_config import Experts
from jaxrl_post.parallel import mesh
from jaxrl_post.ring.types import Group, Rollout
from jaxrl_post.trainer.learner import Learner, LearnerSettings

pytestmark = pytest.mark.usefixtures("quick_compilation")

HEAT, CLOSE = 0.8, 2e-5
MODEL = dataclasses.replace(lab.TINY, layers=3, windows=(), experts=Experts(8, 2, 24, dense_layers=(1,)))
POLICY = decoder.init(MODEL, 0)
MOVED = made_groups.moved(POLICY, 2)
WORDS = experts.route_words(MODEL)
ROUTED = (0, 2)


@pytest.fixture(scope="module")
def groups() -> list[Group]:
    """Three prompts with four rollouts each, drawn by an engine that records routes and what the cuts leave."""
    asked = lab.requests(12, longest_prompt=12, longest=20, temperatures=(HEAT,), cuts=((6, 0.8),))
    made = lab.engine(POLICY, MODEL, restricted=True, kept_ids=14, route_words=WORDS)
    return lab.groups_of(asked, lab.run(made, asked))


def scores_of(params, text) -> list[np.ndarray]:
    """The scores of each router at each token, [T, E], in float64."""
    seen = []
    real = numpy_llama.experts

    def watched(layer, model, x):
        seen.append(x @ layer["router"])
        return real(layer, model, x)

    numpy_llama.experts = watched
    try:
        numpy_llama.forward(params, MODEL, text, dtype=np.float64)
    finally:
        numpy_llama.experts = real
    return seen


def chosen(scores: np.ndarray) -> np.ndarray:
    return np.argsort(-scores, axis=-1, kind="stable")[:, : MODEL.experts.per_token]


def recorded(rollout: Rollout) -> np.ndarray:
    """Experts of each sampled token, [layers, T, k], read byte by byte."""
    _, words = rollout.records.split(WORDS)
    bytes_ = np.frombuffer(words.astype("<i4").tobytes(), np.uint8).reshape(len(words), -1)
    k, layers = MODEL.experts.per_token, len(ROUTED)
    return np.moveaxis(bytes_[:, : k * layers].reshape(len(words), layers, k), 1, 0)


def test_the_engine_records_what_the_twin_chooses(groups):
    for rollout in (one for group in groups for one in group.rollouts):
        text, first = np.concatenate([rollout.prompt.tokens, rollout.tokens]), rollout.prompt.tokens.size - 1
        twin = np.stack([chosen(scores)[first:-1] for scores in scores_of(POLICY, text)])
        assert np.array_equal(recorded(rollout), twin)
        kept, _ = rollout.records.split(WORDS)
        assert kept.counts.min() >= 1 and kept.counts.max() <= 14
        assert all(token in row for token, row in zip(rollout.tokens, kept.rows(14)))


def learner(params, dtype: str = "float32", reference=None, **algorithm) -> Learner:
    settings = LearnerSettings(
        algorithm=arms.algorithm(prox_logp_method="rollout", kl_loss_coef=0.0, **algorithm),
        optimizer=config.OptimizerConfig(),
        batch=config.BatchConfig(rows=4, tokens=48, head_chunk=64),
        temperature=HEAT,
        steps=10,
        max_tokens=20,
        kept_ids=14,
        route_words=WORDS,
        compute_dtype=dtype,
    )
    return Learner(MODEL, params, mesh.make_mesh(), settings, reference=reference)


def committed(one: Learner, groups) -> dict[str, float]:
    one.prepare(groups)
    one.accumulate(groups)
    return {name: float(value) for name, value in one.commit().items()}


def test_metrics_and_losses_equal_the_papers_formulas(groups):
    found = committed(learner(POLICY, router_aux_loss_coef=0.01, router_z_loss_coef=0.001), groups)
    balance, z, even, tokens = 0.0, 0.0, 0.0, 0
    e = MODEL.experts
    for rollout in (one for group in groups for one in group.rollouts):
        text, first = np.concatenate([rollout.prompt.tokens, rollout.tokens]), rollout.prompt.tokens.size - 1
        rows = slice(first, len(text) - 1)
        tokens += len(rollout)
        for scores in scores_of(POLICY, text):
            load = np.bincount(chosen(scores).ravel(), minlength=e.count) / len(text)
            law = np.exp(numpy_llama.log_softmax(scores))
            balance += e.count / e.per_token * (law[rows] @ load).sum() / len(ROUTED)
            z += (np.logaddexp.reduce(scores[rows], axis=-1) ** 2).sum() / len(ROUTED)
            even += e.count / e.per_token**2 * load[chosen(scores)[rows]].sum() / len(ROUTED)
    assert found["actor/router_aux_loss"] == pytest.approx(balance / tokens, rel=1e-5)
    assert found["actor/router_z_loss"] == pytest.approx(z / tokens, rel=1e-5)
    assert found["training/router_imbalance"] == pytest.approx(even / tokens, rel=1e-5)
    assert (found["training/router_mismatch"], found["training/recorded_routes"]) == (0.0, 1.0)


def test_the_weights_of_the_terms_reach_the_gradient(groups):
    def gradient(**algorithm):
        one = learner(POLICY, **algorithm)
        one.prepare(groups)
        one.accumulate(groups)
        return one.gradient()

    plain, both = gradient(), gradient(router_aux_loss_coef=0.1, router_z_loss_coef=0.1)
    moved = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), plain, both)
    assert moved["layers"]["0"]["router"] > 1e-4 and moved["layers"]["2"]["router"] > 1e-4
    assert moved["head" if "head" in moved else "final_norm"] < 1e-6  # behind the last router


def test_moved_weights_repeat_the_recorded_routes(groups):
    """Log-probs are those of a float64 forward whose experts are the recorded ones where there is a record."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    own, forced = learner(MOVED), learner(MOVED, reference=MOVED, router_replay=True, router_replay_reference=False)
    free, replayed = own.logprobs(groups), forced.logprobs(groups)
    reference = forced.logprobs(groups, of_reference=True)
    assert max(np.abs(free[r.id] - reference[r.id]).max() for r in rollouts) < CLOSE
    assert max(np.abs(free[r.id] - replayed[r.id]).max() for r in rollouts) > 1e-3
    for rollout in rollouts:
        assert np.abs(replayed[rollout.id] - twin(MOVED, rollout)).max() < CLOSE
    found, again = committed(own, groups), committed(forced, groups)
    assert found["training/router_mismatch"] == found["training/router_drift"] > 0.01
    assert again["training/router_mismatch"] == 0 and 0.01 < again["training/router_drift"] < 0.9


def twin(params, rollout: Rollout) -> np.ndarray:
    """Log-probs in float64 with the recorded experts forced, over the recorded ids."""
    first = rollout.prompt.tokens.size - 1
    routes, real = iter(recorded(rollout)), numpy_llama.experts

    def forced(layer, model, x):
        theirs, scores = next(routes), x @ layer["router"]
        picked = chosen(scores)
        picked[first:-1] = theirs
        out = np.zeros_like(x)
        for at, row in enumerate(x):
            weight = np.exp(numpy_llama.log_softmax(scores[at, picked[at]]))
            for rank, expert in enumerate(picked[at]):
                gate, up = row @ layer["experts_gate"][expert], row @ layer["experts_up"][expert]
                out[at] += weight[rank] * ((gate / (1 + np.exp(-gate)) * up) @ layer["experts_down"][expert])
        return out

    numpy_llama.experts = forced
    try:
        text = np.concatenate([rollout.prompt.tokens, rollout.tokens])
        logits = numpy_llama.forward(params, MODEL, text, dtype=np.float64)[first:-1] / HEAT
    finally:
        numpy_llama.experts = real
    kept, _ = rollout.records.split(WORDS)
    rows = (row[row >= 0] for row in kept.rows(14))
    return np.array(
        [z[t] - np.logaddexp.reduce(z[ids]) for z, t, ids in zip(logits, rollout.tokens, rows, strict=True)]
    )


@pytest.mark.parametrize("count, size", [(8, 1), (255, 1), (256, 2), (1000, 2)])
def test_routes_come_back_from_words(count, size):
    model = dataclasses.replace(MODEL, experts=Experts(count, 3, 4))
    ids = [
        np.random.default_rng(layer).permuted(np.tile(np.arange(count), (5, 1)), axis=1)[:, :3] for layer in range(3)
    ]
    ids[0][0] = (count - 1, count - 2, 0)
    words = experts.packed([jnp.asarray(one) for one in ids], model)
    assert words.shape == (5, -(-9 * size // 4)) == (5, experts.route_words(model))
    back = experts.unpacked(words.at[4].set(-1), model)
    assert np.array_equal(back[:, :4], np.stack(ids)[:, :4]) and np.all(back[:, 4] == -1)
