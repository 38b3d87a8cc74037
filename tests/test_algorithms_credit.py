"""From scored groups to what the loss is told, by hand: penalties, masks, KL in the reward, corrections."""

import dataclasses

import made_groups
import numpy as np
import pytest

from jaxrl_post.algorithms import credit
from jaxrl_post.config import AlgorithmConfig
from jaxrl_post.ring.types import Finish, Group, Prompt

PROMPT = Prompt(id="a", tokens=[1])
LIMIT = 10


def group(lengths=(2, 6, 8, 10), rewards=(1.0, 0.0, 1.0, 1.0), scored=(1, 1, 1, 1), prompt=PROMPT, logprobs=-1.0):
    """Answers of these lengths; one of LIMIT tokens was cut."""
    rollouts = tuple(
        made_groups.rollout(
            prompt, i, np.arange(n), logprobs=np.full(n, logprobs), finish=Finish.LENGTH if n == LIMIT else Finish.EOS
        )
        for i, n in enumerate(lengths)
    )
    return Group(prompt=prompt, rollouts=rollouts, rewards=rewards, scored=scored)


def assign(groups, old=None, reference=None, **settings):
    credits, found = credit.assign(
        groups, AlgorithmConfig(**settings), max_tokens=LIMIT, old=old or {}, reference=reference or {}
    )
    return [[credits[r.id] for r in g.rollouts] for g in groups], credit.describe([found], AlgorithmConfig(**settings))


@pytest.mark.parametrize("tokens, penalty", [(1, 0.0), (6, 0.0), (7, -0.5), (8, -1.0), (10, -2.0)])
def test_overlong_by_hand(tokens, penalty):
    """10 tokens at most, a buffer of 4, factor 2."""
    shaped = AlgorithmConfig(overlong_buffer=4, overlong_penalty=2.0)
    assert credit.overlong(tokens, shaped, LIMIT) == penalty
    assert credit.overlong(tokens, AlgorithmConfig(), LIMIT) == 0.0


def test_the_penalty_for_length_is_in_the_advantage():
    (got,), metrics = assign([group()], adv_estimator="dr_grpo", overlong_buffer=4)
    rewards = np.array([1.0, 0.0, 0.5, 0.0])
    np.testing.assert_allclose([own.reward for own in got], rewards)
    for own, n, value in zip(got, (2, 6, 8, 10), rewards - rewards.mean(), strict=True):
        np.testing.assert_allclose(own.advantages, np.full(n, value))
    assert metrics == {"reward/overlong/mean": -0.375, "reward/overlong/share": 0.5}


def test_overlong_filtering_masks_and_keeps_the_baseline():
    (plain,), _ = assign([group()], loss_agg_mode="prompt-mean")
    (got,), metrics = assign([group()], loss_agg_mode="prompt-mean", overlong_filtering=True)
    assert metrics == {}
    for a, b in zip(plain, got, strict=True):
        np.testing.assert_array_equal(a.advantages, b.advantages)  # the same baseline and deviation
    assert [own.weight for own in plain] == [1 / 26] * 4 and [own.weight for own in got] == [1 / 16] * 3 + [0.0]
    (got,), _ = assign([group()], overlong_filtering=True)
    assert [own.count for own in got] == [2, 6, 8, 0]  # it leaves the count too, as in TRL and NeMo-RL


def test_the_weight_of_a_prompt_multiplies_its_loss_and_nothing_else():
    heavy = dataclasses.replace(PROMPT, id="heavy", weight=2.5)
    (plain, weighed), _ = assign([group(), group(prompt=heavy)])
    for a, b in zip(plain, weighed, strict=True):
        assert b.weight == 2.5 * a.weight > 0 and b.count == a.count
        np.testing.assert_array_equal(a.advantages, b.advantages)


def test_an_unscored_rollout_weighs_and_counts_nothing():
    (got,), _ = assign([group(rewards=(1.0, np.nan, 0.0, 0.0), scored=(1, 0, 1, 1))], adv_estimator="dr_grpo")
    assert [own.weight for own in got] == [1, 0, 1, 1] and [own.count for own in got] == [2, 0, 8, 10]
    assert not got[1].advantages.any() and got[0].advantages[0] == pytest.approx(2 / 3)


def logprobs(groups, *values):
    return {r.id: np.full(len(r), value) for g in groups for r, value in zip(g.rollouts, values, strict=True)}


def test_kl_in_the_reward_by_hand():
    """k1 of 0.5 and -0.25 a token at coefficient 0.1: rewards fall by 0.1 * 2 * 0.5, rise by 0.1 * 4 * 0.25."""
    given = [group(lengths=(2, 4), rewards=(1.0, 0.0), scored=(1, 1))]
    old, reference = logprobs(given, -1.0, -1.0), logprobs(given, -1.5, -0.75)
    (got,), metrics = assign(given, old, reference, adv_estimator="dr_grpo", use_kl_in_reward=True, kl_coef=0.1)
    assert [own.reward for own in got] == pytest.approx([0.9, 0.1])
    np.testing.assert_allclose(got[0].advantages, [0.4, 0.4])
    assert metrics == pytest.approx({"actor/reward_kl_penalty": 0.125, "actor/reward_kl_penalty_coeff": 0.1})
    # reinforce_plus_plus: the return at t holds the penalties from t on only
    (got,), _ = assign(given, old, reference, adv_estimator="reinforce_plus_plus", use_kl_in_reward=True, kl_coef=0.1)
    returns = np.array([0.9, 0.95, 0.1, 0.075, 0.05, 0.025])
    white = (returns - returns.mean()) / np.sqrt(returns.var(ddof=1) + 1e-8)
    np.testing.assert_allclose(np.concatenate([own.advantages for own in got]), white, rtol=1e-9)


def test_whole_round_advantages_see_every_group():
    b = Prompt(id="b", tokens=[1])
    one, two = group(lengths=(1, 1), rewards=(1, 0), scored=(1, 1)), group((1, 1), (3, 0), (1, 1), prompt=b)
    both, _ = assign([one, two], adv_estimator="reinforce_plus_plus_baseline")
    values = np.array([0.5, -0.5, 1.5, -1.5])
    np.testing.assert_allclose([own.advantages[0] for g in both for own in g], values / np.sqrt(5 / 3 + 1e-8))
    alone, _ = assign([one], adv_estimator="reinforce_plus_plus_baseline")
    assert alone[0][0].advantages[0] == pytest.approx(np.sqrt(0.5))


def test_remax_by_hand():
    """The last rollout is greedy: its reward, with its penalty for length, is taken from the others', and it is gone."""
    given = [group(lengths=(2, 4, 8), rewards=(1.0, 0.0, 1.0), scored=(1, 1, 1))]
    (trained,) = credit.trained(given, AlgorithmConfig(adv_estimator="remax"))
    assert [r.id.sample for r in trained.rollouts] == [0, 1] and trained.rewards.tolist() == [1.0, 0.0]
    credits, _ = credit.assign(
        given, AlgorithmConfig(adv_estimator="remax", overlong_buffer=4), max_tokens=LIMIT, old={}, reference={}
    )
    assert {id.sample for id in credits} == {0, 1}
    np.testing.assert_allclose(credits[given[0].rollouts[0].id].advantages, [0.5, 0.5])  # 1 - (1 - 0.5)
    np.testing.assert_allclose(credits[given[0].rollouts[1].id].advantages, [-0.5] * 4)
    assert [own.weight for own in credits.values()] == [1, 1]


def test_remax_without_its_baseline_trains_nothing():
    given = [group(lengths=(2, 4, 8), rewards=(1.0, 0.0, np.nan), scored=(1, 1, 0))]
    credits, _ = credit.assign(given, AlgorithmConfig(adv_estimator="remax"), max_tokens=LIMIT, old={}, reference={})
    assert [own.weight for own in credits.values()] == [0, 0] and [own.count for own in credits.values()] == [0, 0]
    assert not any(own.advantages.any() for own in credits.values())
    assert credit.trained(given, AlgorithmConfig()) is given


@pytest.mark.parametrize("estimator", ["gae", "gae_turn"])
def test_gae_has_values_and_returns_and_whitened_advantages(estimator):
    """Values of 0.5 everywhere, lambda and gamma 1: returns are the rewards, advantages rewards - 0.5, whitened."""
    given = [group(lengths=(2, 4), rewards=(1.0, 0.0), scored=(1, 1))]
    values = {r.id: np.full(len(r), 0.5, np.float32) for r in given[0].rollouts}
    credits, _ = credit.assign(
        given, AlgorithmConfig(adv_estimator=estimator), max_tokens=LIMIT, old={}, reference={}, values=values
    )
    one, two = (credits[r.id] for r in given[0].rollouts)
    np.testing.assert_allclose(one.returns, [1.0, 1.0])
    np.testing.assert_allclose(two.returns, np.zeros(4))
    plain = np.array([0.5, 0.5, -0.5, -0.5, -0.5, -0.5])
    white = (plain - plain.mean()) / np.sqrt(plain.var(ddof=1) + 1e-8)
    np.testing.assert_allclose(np.concatenate([one.advantages, two.advantages]), white)
    seen = [(r, credits[r.id]) for r in given[0].rollouts]
    told = credit.spreads(seen)
    assert told["critic/values/mean"] == 0.5 and told["critic/returns/mean"] == pytest.approx(1 / 3)
    assert told["critic/vf_explained_var"] == pytest.approx(0.0, abs=1e-4)
    assert credit.spreads([]) == {}


def test_corrections_by_hand():
    """rho is 4 and 1/2 a token, over 1 and 2 tokens; the engine's log-probs are -1."""
    given = [group(lengths=(1, 2), rewards=(1.0, 0.0), scored=(1, 1))]
    old = logprobs(given, -1 + np.log(4), -1 - np.log(2))
    (got,), metrics = assign(given, old, rollout_is="sequence", rollout_is_threshold=(2.0,))
    np.testing.assert_allclose(got[0].correction, [2.0])
    np.testing.assert_allclose(got[1].correction, [0.25, 0.25])
    assert metrics["rollout_corr/rollout_is_mean"] == pytest.approx(2.5 / 3)
    assert not any("_rs_" in name for name in metrics)
    (got,), metrics = assign(given, old, rollout_rs="token_k1", rollout_rs_threshold=(3.0,))
    np.testing.assert_array_equal(got[0].correction, [0.0])
    np.testing.assert_array_equal(got[1].correction, [1.0, 1.0])
    assert metrics == pytest.approx(
        {"rollout_corr/rollout_rs_masked_fraction": 1 / 3, "rollout_corr/rollout_rs_seq_masked_fraction": 0.5}
    )
    assert got[0].count == 1 and got[0].weight == 1.0  # rejected tokens stay in the count
    (got,), metrics = assign(given, old)
    assert got[0].correction is None and metrics == {}


def test_observed_tokens_get_nothing():
    rollout = made_groups.rollout(PROMPT, 0, [1, 2, 3], sampled=[True, False, True])
    other = made_groups.rollout(PROMPT, 1, [1])
    given = Group(prompt=PROMPT, rollouts=(rollout, other), rewards=[1, 0], scored=[1, 1])
    (got,), _ = assign(
        [given],
        {rollout.id: np.zeros(3), other.id: np.zeros(1)},
        adv_estimator="dr_grpo",
        rollout_is="token",
        rollout_is_threshold=(9.0,),
    )
    np.testing.assert_allclose(got[0].advantages, [0.5, 0, 0.5])
    np.testing.assert_allclose(got[0].correction, [np.e, 0, np.e])
    assert got[0].count == 2 and dataclasses.asdict(got[1])["count"] == 1


def test_the_optimal_baseline_weighs_by_sampled_tokens():
    """2 sampled of 4 with reward 1 and 1 of 1 with 0: the baseline is 2 / 3, not 4 / 5."""
    rollout = made_groups.rollout(PROMPT, 0, [1, 2, 3, 4], sampled=[True, False, False, True])
    given = Group(prompt=PROMPT, rollouts=(rollout, made_groups.rollout(PROMPT, 1, [1])), rewards=[1, 0], scored=[1, 1])
    (got,), _ = assign([given], adv_estimator="opo")
    np.testing.assert_allclose(got[0].advantages, [1 / 3, 0, 0, 1 / 3])
    np.testing.assert_allclose(got[1].advantages, [-2 / 3])


def test_spans_are_of_sampled_tokens():
    """Of versions 3, 9 (observed), 3, 4: the product of the two of version 3, and that of 4 alone."""
    rollout = made_groups.rollout(PROMPT, 0, [1, 2, 3, 4], sampled=[True, False, True, True])
    rollout = dataclasses.replace(rollout, versions=np.array([3, 3, 3, 4]))
    given = Group(prompt=PROMPT, rollouts=(rollout,), rewards=[1], scored=[1])
    old = {rollout.id: np.array([np.log(2), 99, np.log(3), np.log(5)]) - 1.0}
    (got,), _ = assign([given], old, rollout_is="span", rollout_is_threshold=(50.0,))
    np.testing.assert_allclose(got[0].correction, [6, 0, 6, 5])


def test_a_positive_reward_is_a_mark():
    """The mark is of the reward itself, before penalties."""
    (got,), _ = assign([group()], positive_nll_coef=0.1, overlong_buffer=10, overlong_penalty=5.0)
    assert [own.marks for own in got] == [{"positives": mark} for mark in (1.0, 0.0, 1.0, 1.0)]
    (plain,), _ = assign([group()])
    assert not any(own.marks for own in plain)


def test_filtered_and_rejected_tokens_are_in_no_rank():
    """A loss at -1 and a gain at -2: both covariances are below 0, and that of the gain is nearer to it. The gain was cut."""
    made = group(lengths=(2, 10), rewards=(0.0, 1.0), scored=(1, 1))
    gain = dataclasses.replace(made.rollouts[1], logprobs=np.full(10, -2.0))
    made = dataclasses.replace(made, rollouts=(made.rollouts[0], gain))
    for filtering, places in ((False, [0, 1]), (True, [1, 0])):
        (got,), _ = assign([made], loss_mode="kl_cov", kl_cov_ratio=0.1, overlong_filtering=filtering)
        assert [int(own.marks["held"].sum()) for own in got] == places
    old = {
        r.id: r.logprobs + moved for r, moved in zip(made.rollouts, (0.0, 1.0), strict=True)
    }  # M2PO rejects the gain
    (got,), _ = assign(
        [made], old, loss_mode="kl_cov", kl_cov_ratio=0.1, rollout_rs="m2po", rollout_rs_threshold=(0.1,)
    )
    assert [int(own.marks["held"].sum()) for own in got] == [1, 0]


def in_parts(prompt, scored, **components):
    """A group with components, as rewards/jobs.py makes it: NaN where a rollout has no score, none where all have none."""
    known = np.array(scored, bool)
    parts = {name: np.where(known, values, np.nan) for name, values in components.items() if known.any()}
    made = group(rewards=np.where(known, 1.0, 0.0), scored=scored, prompt=dataclasses.replace(PROMPT, id=prompt))
    return dataclasses.replace(made, components=parts)


def test_gdpo_leaves_out_what_no_grader_scored():
    """One group is whole, of another one rollout failed, and of a third all did. The third changes nothing."""
    x, y = np.array([0.0, 1.0, 1.0, 2.0]), np.array([3.0, 0.0, 1.0, 1.0])
    whole, some = in_parts("whole", (1, 1, 1, 1), x=x, y=y), in_parts("some", (1, 0, 1, 1), x=x, y=y)
    lost = in_parts("lost", (0, 0, 0, 0), x=x, y=y)
    how = dict(adv_estimator="gdpo", gdpo_reward_keys=("x", "y"), gdpo_reward_weights=(1.0, 0.5))
    want, _ = assign([whole, some], **how)
    got, _ = assign([whole, lost, some], **how)
    for a, b in zip([*want[0], *want[1]], [*got[0], *got[2]], strict=True):
        np.testing.assert_array_equal(a.advantages, b.advantages)
        assert (a.weight, a.count) == (b.weight, b.count)
    left_out = [*got[1], got[2][1]]
    assert not any(own.advantages.any() or own.weight or own.count for own in left_out)
    kept, parts = [0, 2, 3], [(1.0, x), (0.5, y)]
    sums = [
        sum(w * (v[rows] - v[rows].mean()) / (v[rows].std(ddof=1) + 1e-6) for w, v in parts)
        for rows in ([0, 1, 2, 3], kept)
    ]
    lengths = [(2, 6, 8, 10), (2, 8, 10)]
    tokens = np.concatenate([np.repeat(one, n) for one, n in zip(sums, lengths, strict=True)])
    tokens = (tokens - tokens.mean()) / np.sqrt(tokens.var(ddof=1) + 1e-8)
    own = np.concatenate([one.advantages for one in [*got[0], *(got[2][i] for i in kept)]])
    np.testing.assert_allclose(own, tokens, rtol=1e-6)


def test_gdpo_names_a_missing_component():
    with pytest.raises(
        ValueError, match="gdpo_reward_keys: the reward of prompt 'a' has no component 'x'; it has none"
    ):
        assign([group()], adv_estimator="gdpo", gdpo_reward_keys=("x",))


def test_m2po_rejects_tokens_of_the_whole_round():
    """Gaps 1 and 0: of the first rollout's two tokens and the other's six, mean 0.25, nothing fits below 0.1 but zeros."""
    made = group(lengths=(2, 6), rewards=(0.0, 1.0), scored=(1, 1))
    old = {r.id: np.full(len(r), -1.0 + (i == 0)) for i, r in enumerate(made.rollouts)}
    (got,), _ = assign([made], old, rollout_rs="m2po", rollout_rs_threshold=(0.1,))
    np.testing.assert_array_equal(np.concatenate([own.correction for own in got]), [0, 0] + [1] * 6)
    (got,), told = assign([made], old, rollout_rs="m2po", rollout_rs_threshold=(0.25,))
    assert all(own.correction.all() for own in got) and told["rollout_corr/rollout_rs_masked_fraction"] == 0
