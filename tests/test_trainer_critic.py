"""The critic: its gradient against plain code, its values, its own optimizer, its warm-up, and its place in the state."""

import dataclasses

import critic_arms as critics
import gradient_arms as arms
import jax
import jax.numpy as jnp
import made_groups
import numpy as np
import pytest
from gradient_arms import host, same
from refusals import refused

from jaxrl_post import config
from jaxrl_post.parallel import mesh as meshes
from jaxrl_post.trainer import optimizer as optimizers
from jaxrl_post.trainer.critic import Critic
from jaxrl_post.trainer.state import abstract

pytestmark = pytest.mark.usefixtures("quick_compilation")
GROUPS = made_groups.groups()
EXACT, SINGLE = 1e-12, 5e-6


def turn(one, groups=GROUPS):
    return arms.turn(one, groups)


@pytest.mark.parametrize(
    "trunk, how",
    [
        ("own", {}),
        ("policy", {}),
        pytest.param("own", dict(parts=3, scan_layers="yes", remat=True), marks=pytest.mark.extended),
        pytest.param("policy", dict(parts=3, scan_layers="yes"), marks=pytest.mark.extended),
        pytest.param("own", dict(sizes=(2, 2, 2)), marks=pytest.mark.extended),
        pytest.param("policy", dict(sizes=(2, 2, 2), model=critics.UNTIED), marks=pytest.mark.extended),
        pytest.param("own", dict(model=critics.UNTIED), marks=pytest.mark.extended),
    ],
)
def test_both_gradients_are_those_of_plain_code_in_x64(trunk, how):
    got = critics.gradients(GROUPS, np.float64, trunk=trunk, **how)
    want = critics.plain_gradients(GROUPS, np.float64, trunk=trunk, model=how.get("model", made_groups.MODEL))
    assert arms.worst(got[0], want[0]) <= EXACT
    assert arms.worst(got[1], want[1]) <= EXACT


@pytest.mark.extended
@pytest.mark.parametrize("estimator", ["gae", "gae_turn"])
def test_both_gradients_in_f32(estimator):
    given = dataclasses.replace(critics.ALGORITHM, adv_estimator=estimator)
    got, want = critics.gradients(GROUPS, given=given), critics.plain_gradients(GROUPS, np.float64, given=given)
    assert arms.worst(got[0], want[0]) <= SINGLE and arms.worst(got[1], want[1]) <= SINGLE


@pytest.fixture(scope="module")
def shared():
    one = critics.learner(
        settings=dataclasses.replace(critics.CRITIC, lr=3e-3),
        optimizer=config.OptimizerConfig(lr=1e-2, max_grad_norm=0.0),
    )
    one.compile()
    return one


def test_values_and_metrics_against_a_plain_forward(shared):
    state = jax.tree.map(jnp.asarray, host(shared.state.params))
    tokens, mask, members = made_groups.unpacked(GROUPS)
    values = np.asarray(critics.plain_values(state["critic"], state["policy"], made_groups.MODEL, tokens), float)
    _, returns = critics.plain_estimates(GROUPS, values, mask, members, critics.ALGORITHM)
    metrics = turn(shared)
    v, g = values[mask], returns[mask]
    for name, found in (("values", v), ("returns", g)):
        for statistic in ("mean", "max", "min"):
            want = getattr(found, statistic)()
            assert metrics[f"critic/{name}/{statistic}"] == pytest.approx(want, rel=1e-4, abs=1e-6)
    explained = 1 - np.var(g - v, ddof=1) / (np.var(g, ddof=1) + 1e-5)
    assert metrics["critic/vf_explained_var"] == pytest.approx(explained, rel=1e-4)
    # at the weights of the round's start nothing is clipped, and the prediction is the value itself
    assert metrics["critic/vf_loss"] == pytest.approx(np.mean((v - g) ** 2) / 2, rel=1e-4)
    assert metrics["critic/vpred_mean"] == pytest.approx(v.mean(), rel=1e-4, abs=1e-6)
    assert metrics["critic/vf_clipfrac"] == 0 and metrics["critic/skipped_updates"] == 0
    assert metrics["critic/advantages/mean"] == pytest.approx(0, abs=1e-6)  # whitened over the round


def test_the_critics_step_is_adam_with_its_own_rate(shared):
    before, moments = host(shared.state.params["critic"]), host(shared.state.opt_state["critic"])
    shared.prepare(GROUPS)
    shared.accumulate(GROUPS)
    grads = host(shared._critic.gradient())
    metrics = shared.commit()
    assert float(metrics["critic/lr"]) == pytest.approx(3e-3) and float(metrics["actor/lr"]) == pytest.approx(1e-2)
    transform = optimizers.transform(config.OptimizerConfig(max_grad_norm=0.0), None)
    updates, _ = transform.update(grads, moments, before)
    for got, old, step in zip(*map(jax.tree.leaves, (shared.state.params["critic"], before, updates)), strict=True):
        np.testing.assert_allclose(got, old - 3e-3 * step, rtol=1e-5, atol=1e-7)
    norm = np.sqrt(sum(float(np.sum(np.square(g, dtype=float))) for g in jax.tree.leaves(grads)))
    assert float(metrics["critic/grad_norm"]) == pytest.approx(norm, rel=1e-5)
    assert all(not np.any(g) for g in jax.tree.leaves(host(shared._critic.gradient())))


def test_a_second_step_of_a_round_keeps_the_rounds_values(shared):
    turn(shared)
    shared.prepare(GROUPS)
    kept = {name: own.values.copy() for name, own in shared._credits.items()}
    shared.accumulate(GROUPS)
    shared.commit()
    shared.prepare(())
    shared.accumulate(GROUPS)
    second = {name: float(value) for name, value in shared.commit().items()}
    assert all(np.array_equal(shared._credits[name].values, values) for name, values in kept.items())
    mean = np.concatenate(
        [v[r.sampled] for g in GROUPS for r, s in zip(g.rollouts, g.scored) if s for v in [kept[r.id]]]
    )
    assert second["critic/values/mean"] == pytest.approx(mean.mean(), rel=1e-5)
    assert second["critic/vpred_mean"] != pytest.approx(second["critic/values/mean"], abs=1e-5)  # it has moved


def test_a_step_that_is_not_finite_leaves_every_bit_of_the_critic(shared):
    turn(shared)
    before = host((shared.state.params["critic"], shared.state.opt_state["critic"]))
    shared.prepare(GROUPS)
    name = GROUPS[0].rollouts[0].id
    own = shared._credits[name]
    shared._credits[name] = dataclasses.replace(own, returns=np.full_like(own.returns, np.nan))
    shared.accumulate(GROUPS)
    metrics = shared.commit()
    assert float(metrics["critic/skipped_updates"]) == 1 and float(metrics["training/skipped_updates"]) == 0
    assert same(before, host((shared.state.params["critic"], shared.state.opt_state["critic"])))
    assert turn(shared)["critic/skipped_updates"] == 0


def test_a_closed_gate_stops_the_critic_too(shared, monkeypatch):
    turn(shared)
    monkeypatch.setattr(shared.gate, "lets", lambda *_: False)
    before = host(shared.state.params)
    metrics = turn(shared)
    assert metrics["critic/skipped_updates"] == metrics["training/skipped_updates"] == 1
    assert same(before, host(shared.state.params))


def test_groups_in_pieces_are_refused(shared):
    turn(shared)
    shared.prepare(GROUPS[:2])
    refused("algorithm.adv_estimator='gae' .* the nearest valid scheduler.stream is 0", shared.prepare, GROUPS[2:])
    shared.accumulate(GROUPS[:2])
    shared.commit()


def test_the_policy_stands_still_over_the_warm_up():
    settings = dataclasses.replace(critics.CRITIC, warmup_steps=2, lr=1e-2)
    one = critics.learner(settings=settings, optimizer=config.OptimizerConfig(lr=1e-2, weight_decay=0.1))
    policy, moments = host(one.params), host(one.state.opt_state["policy"])
    for step in range(3):
        critic = host(one.state.params["critic"])
        metrics = turn(one)
        assert metrics["training/skip_reason"] == 0 and metrics["actor/grad_norm"] > 0
        assert not same(critic, host(one.state.params["critic"]))
        stands = same(policy, host(one.params)) and same(moments, host(one.state.opt_state["policy"]))
        assert stands == (step < 2) and one.step == step + 1


def test_the_critic_learns_what_the_rewards_are():
    """The policy stands still; values of a fixed batch approach the returns of lambda 1, which do not move."""
    settings = dataclasses.replace(critics.CRITIC, warmup_steps=40, lr=1e-2, cliprange_value=0.0)
    given = dataclasses.replace(critics.ALGORITHM, gamma=1.0, lam=1.0)
    one = critics.learner(settings=settings, given=given, steps=41)
    found = [turn(one) for _ in range(40)]
    assert found[-1]["critic/vf_loss"] < 0.2 * found[0]["critic/vf_loss"]
    assert found[0]["critic/vf_explained_var"] < 0.3 and found[-1]["critic/vf_explained_var"] > 0.7


def test_first_values_are_zero_and_the_trunk_is_the_policys():
    critic = Critic(
        critics.UNTIED,
        made_groups.weights(0, model=critics.UNTIED),
        meshes.make_mesh(),
        settings=critics.CRITIC,
        optimizer=config.OptimizerConfig(),
        steps=3,
    )
    policy = made_groups.weights(0, model=critics.UNTIED)
    assert same(host(critic.weights["trunk"]), {name: part for name, part in policy.items() if name != "head"})
    assert not np.any(critic.weights["value"]) and critic.weights["bias"].shape == ()


@pytest.mark.parametrize("trunk", ["own", "policy"])
def test_a_restored_state_goes_on_bit_for_bit(trunk):
    """The whole state as named arrays, as a checkpoint has them."""
    settings = dataclasses.replace(critics.CRITIC, trunk=trunk)
    one, other = critics.learner(settings=settings), critics.learner(settings=settings)
    turn(one)
    kept = host(one.state)
    assert {"policy", "critic"} == set(kept.params) == set(kept.opt_state)
    shapes = abstract(one.state)
    turn(other, made_groups.groups(2, 3, seed=5))
    other.restore(
        lambda like: (
            jax.tree.map(lambda x, home: meshes.put(x, home.sharding), kept, like)
            if jax.tree.structure(like) == jax.tree.structure(shapes)
            else None
        ),
        one.step,
    )
    assert turn(one) == turn(other)
    assert same(host(one.state), host(other.state))
