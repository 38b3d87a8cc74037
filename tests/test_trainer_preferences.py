"""DPO and IPO: gradients of the learner against autodiff of TRL's formula, metrics by hand, and the engine of pairs."""

from __future__ import annotations

import gradient_arms as arms
import made_groups
import numpy as np
import preference_arms as pairs
import pytest
from toy_ring import SAMPLING, ToyPrompts

from jaxrl_post.algorithms import credit, preferences
from jaxrl_post.engine.demonstrations import Preferences
from jaxrl_post.ring.types import Request, RolloutId

pytestmark = pytest.mark.usefixtures("quick_compilation")

GROUPS = made_groups.groups(size=2)  # in the second one a rollout is unscored, in the third some tokens are observed


@pytest.mark.parametrize("loss, more", [("dpo", {}), ("dpo", {"label_smoothing": 0.2}), ("ipo", {})])
def test_the_gradient_is_that_of_the_loss(loss, more):
    given = pairs.algorithm(loss, **more)
    want = pairs.plain_gradient(GROUPS, given)
    assert arms.worst(pairs.gradient(pairs.learner(given, rows=2), GROUPS), want) <= 5e-6


@pytest.mark.parametrize("loss", preferences.PREFERENCES)
def test_slopes_are_those_of_differences(loss):
    given, lengths, step = pairs.algorithm(loss, label_smoothing=0.1), np.array([3.0, 5.0]), 1e-5
    of = lambda gaps: preferences.PREFERENCES[loss](gaps, lengths, given.dpo_beta, given.label_smoothing)[0]  # noqa: E731
    for gaps in ([0.0, 0.0], [2.0, -1.0], [-30.0, 40.0], [400.0, -900.0]):
        _, slopes = preferences.PREFERENCES[loss](np.array(gaps), lengths, given.dpo_beta, given.label_smoothing)
        moved = [(of(np.array(gaps) + d) - of(np.array(gaps) - d)) / (2 * step) for d in step * np.eye(2)]
        np.testing.assert_allclose(slopes, moved, rtol=1e-4, atol=1e-8)


def test_metrics_are_those_of_trl_by_hand():
    """Two pairs with masked tokens, and one that is unscored and in no mean."""
    found, given = made_groups.groups(3, 2), pairs.algorithm("dpo", dpo_beta=0.5)
    rng = np.random.default_rng(1)
    old, ref = ({r.id: -rng.random(len(r)) for g in found for r in g.rollouts} for _ in range(2))
    _, facts = credit.assign(found, given, max_tokens=20, old=old, reference=ref)
    told = credit.describe([facts], given)
    sums = [[[side[r.id][r.sampled].sum() for r in found[g].rollouts] for g in (0, 2)] for side in (old, ref)]
    logps, rewards = np.array(sums[0]), 0.5 * (np.array(sums[0]) - np.array(sums[1]))
    margins = rewards[:, 0] - rewards[:, 1]
    want = {
        "rewards/chosen": rewards[:, 0].mean(),
        "rewards/rejected": rewards[:, 1].mean(),
        "rewards/accuracies": np.mean(margins > 0),
        "rewards/margins": margins.mean(),
        "logps/chosen": logps[:, 0].mean(),
        "logps/rejected": logps[:, 1].mean(),
        "actor/preference_loss": np.mean(np.log1p(np.exp(-margins))),
    }
    assert told.keys() == want.keys()
    assert told == pytest.approx(want)


def test_a_group_is_the_chosen_and_the_rejected_completion():
    prompt = ToyPrompts(1).prompts[0]
    engine = Preferences({prompt.id: ([4, 5, 0], [6, 0])}, slots=4, version=3)
    ids = [RolloutId(0, "train", 0, prompt.id, sample) for sample in (1, 0)]
    engine.submit(
        [Request(rollout_id=id, prompt=prompt, seed=id.seed(), max_tokens=4, sampling=SAMPLING) for id in ids]
    )
    chosen, rejected = engine.step()
    assert (chosen.tokens.tolist(), rejected.tokens.tolist()) == ([4, 5, 0], [6, 0])
    assert chosen.sampled.all() and chosen.versions.tolist() == [3] * 3
    engine.submit([Request(rollout_id=ids[0], prompt=prompt, seed=ids[0].seed(), max_tokens=4, sampling=SAMPLING)])
    other = Preferences({prompt.id: ([4, 5, 0], [6, 0])}, slots=4)
    other.load_state_dict(engine.state_dict(), {prompt.id: prompt})
    assert [rollout.tokens.tolist() for rollout in other.step()] == [[6, 0]]
