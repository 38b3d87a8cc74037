"""A learner of a cut law: old, reference and current log-probs, KL and entropy are of the ids that the engine kept."""

from __future__ import annotations

import dataclasses

import engine_lab as lab
import gradient_arms as arms
import made_groups
import numpy as np
import numpy_llama
import pytest

from jaxrl_post import config
from jaxrl_post.parallel import mesh
from jaxrl_post.ring.types import Group, Rollout
from jaxrl_post.trainer import programs
from jaxrl_post.trainer.learner import Learner, LearnerSettings

pytestmark = pytest.mark.usefixtures("quick_compilation")

HEAT, TOP_K, TOP_P, CLOSE = 0.8, 6, 0.8, 2e-5
RECORDED = TOP_K + 8
POLICY = lab.weights(0)
REFERENCE = made_groups.moved(POLICY, 2)


@pytest.fixture(scope="module")
def groups() -> list[Group]:
    """Four prompts with four rollouts each, drawn by an engine that records what the cuts leave."""
    asked = lab.requests(16, longest_prompt=12, longest=20, temperatures=(HEAT,), cuts=((TOP_K, TOP_P),))
    out = lab.run(lab.engine(POLICY, restricted=True, kept_ids=RECORDED), asked)
    rewards = np.random.default_rng(0)
    return [
        Group(
            prompt=asked[i].prompt,
            rollouts=tuple(out[request.rollout_id] for request in asked[i : i + 4]),
            rewards=rewards.random(4),
            scored=np.ones(4, bool),
        )
        for i in range(0, 16, 4)
    ]


def twin(params, rollout: Rollout) -> tuple[np.ndarray, np.ndarray]:
    """Log-probs and entropies in float64: z_y - logsumexp of z over the recorded ids."""
    prompt = rollout.prompt.tokens
    logits = numpy_llama.forward(params, lab.TINY, np.concatenate([prompt, rollout.tokens]), dtype=np.float64)
    found = []
    for scores, token, row in zip(logits[prompt.size - 1 :], rollout.tokens, rollout.records.rows(RECORDED)):
        kept = row[row >= 0]
        z = scores[kept] / HEAT
        logps = z - np.logaddexp.reduce(z)
        found.append((logps[kept.tolist().index(token)], -np.sum(np.exp(logps) * logps)))
    return tuple(np.array(x) for x in zip(*found, strict=True))


def learner() -> Learner:
    settings = LearnerSettings(
        algorithm=arms.algorithm(prox_logp_method="rollout"),
        optimizer=config.OptimizerConfig(),
        batch=config.BatchConfig(rows=4, tokens=48, head_chunk=64),
        temperature=HEAT,
        steps=10,
        max_tokens=20,
        kept_ids=RECORDED,
    )
    return Learner(lab.TINY, POLICY, mesh.make_mesh(), settings, reference=REFERENCE)


def distances(groups) -> dict[str, float]:
    """How far each place is from the twin, at the weights that drew the rollouts: all ratios are 1."""
    one = learner()
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    own, theirs = ({r.id: twin(params, r) for r in rollouts} for params in (POLICY, REFERENCE))
    found = {
        name: max(np.abs(scored[r.id] - expected[r.id][0]).max() for r in rollouts)
        for name, scored, expected in (
            ("old", one.logprobs(groups), own),
            ("reference", one.logprobs(groups, of_reference=True), theirs),
        )
    }
    one.prepare(groups)
    one.accumulate(groups)
    metrics = one.commit()
    logps, ref = (np.concatenate([x[r.id][0] for r in rollouts]) for x in (own, theirs))
    gap = ref - logps
    entropy = np.concatenate([own[r.id][1] for r in rollouts]).mean()
    return found | {
        "current": abs(float(metrics["actor/ppo_kl"])),
        "kl": abs(float(metrics["actor/kl_loss"]) - np.mean(np.exp(gap) - gap - 1)),
        "entropy": abs(float(metrics["actor/entropy"]) - entropy),
        "unrecorded": float(metrics["training/unrecorded_kept_ids"]),
    }


def test_every_place_is_of_the_kept_ids(groups):
    assert max(distances(groups).values()) < CLOSE


def blind(batch):
    """The batch without its records."""
    return dataclasses.replace(batch, kept=np.full_like(batch.kept, -1))


def blind_scores(monkeypatch, *, of_reference: bool):
    real = Learner._scores

    def scores(self, policy):
        run = real(self, policy)
        if (policy is self._reference) is not of_reference:
            return run
        return lambda batch: run(self._put(blind(batch)))

    monkeypatch.setattr(Learner, "_scores", scores)


def old(monkeypatch):
    blind_scores(monkeypatch, of_reference=False)


def reference(monkeypatch):
    blind_scores(monkeypatch, of_reference=True)


def current(monkeypatch):
    real = Learner._packed

    def patched(self, groups):
        batches, places = real(self, groups)
        return [blind(batch) for batch in batches], places

    monkeypatch.setattr(Learner, "_packed", patched)


def entropy(monkeypatch):
    real = programs.score

    def score(policy, batch, recipe):
        return real(policy, batch, recipe)[0], real(policy, dataclasses.replace(batch, kept=None), recipe)[1]

    monkeypatch.setattr(programs, "score", score)


FAULTS = {"old": old, "reference": reference, "current": current, "entropy": entropy}


@pytest.mark.parametrize("place", FAULTS)
def test_planted_whole_vocabulary_in_one_place_is_seen(groups, monkeypatch, place):
    FAULTS[place](monkeypatch)
    found = distances(groups)
    assert found[place] > 100 * CLOSE
    others = {"old": {}, "reference": {"kl"}, "current": {"kl", "entropy", "unrecorded"}, "entropy": {}}[place]
    assert max(gap for name, gap in found.items() if name not in {place, *others}) < CLOSE
