"""The learner as the loop sees it: what prepare, accumulate and commit keep, change, refuse and report."""

import dataclasses

import gradient_arms as arms
import jax
import jax.numpy as jnp
import made_groups
import numpy as np
import pytest
from gradient_arms import host, same
from refusals import refused

from jaxrl_post import config
from jaxrl_post.algorithms import advantages
from jaxrl_post.parallel import mesh
from jaxrl_post.trainer import optimizer as optimizers
from jaxrl_post.trainer.learner import Learner, LearnerSettings
from jaxrl_post.trainer.update_gate import Gate

pytestmark = pytest.mark.usefixtures("quick_compilation")

GROUPS = made_groups.groups()
PLAIN = config.AlgorithmConfig()


def learner(**more):
    return arms.learner(reference=more.pop("reference", False), given=more.pop("given", PLAIN), **more)


@pytest.fixture(scope="module")
def shared():
    """One compiled learner whose optimizer moves; tests leave its sums empty."""
    one = learner(optimizer=config.OptimizerConfig(lr=1e-2, warmup_steps=2, max_grad_norm=0.0))
    one.compile()
    return one


def turn(one, groups=GROUPS):
    return arms.turn(one, groups)


def test_commit_is_adam_on_the_divided_gradient(shared):
    before, moments, step = host(shared.params), host(shared.state.opt_state), shared.step
    shared.prepare(GROUPS)
    shared.accumulate(GROUPS)
    grads = host(shared.gradient())
    metrics = shared.commit()
    transform = optimizers.transform(config.OptimizerConfig(lr=1e-2, max_grad_norm=0.0), None)
    updates, _ = transform.update(grads, moments, before)
    rate = float(optimizers.rate(config.OptimizerConfig(lr=1e-2, warmup_steps=2), 10)(step))
    assert float(metrics["actor/lr"]) == pytest.approx(rate)
    for path, want in jax.tree_util.tree_leaves_with_path(jax.tree.map(lambda p, u: p - rate * u, before, updates)):
        got = shared.params
        for key in path:
            got = got[key.key]
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-7)
    assert shared.step == step + 1 == int(shared.state.step)
    norm = np.sqrt(sum(float(np.sum(np.square(g, dtype=float))) for g in jax.tree.leaves(grads)))
    assert float(metrics["actor/grad_norm"]) == pytest.approx(norm, rel=1e-5)


def test_a_commit_empties_the_sums(shared):
    turn(shared)
    assert all(not np.any(g) for g in jax.tree.leaves(host(shared.gradient())))


def test_the_same_groups_at_the_same_weights_have_ratio_one(shared):
    metrics = turn(shared)
    assert metrics["actor/pg_clipfrac"] == 0 and abs(metrics["actor/ppo_kl"]) < 1e-6
    values = [advantages.grpo(g.rewards, g.scored, np.array([len(r) for r in g.rollouts])) for g in GROUPS]
    pairs = [
        (a, r.sampled.sum())
        for v, g in zip(values, GROUPS, strict=True)
        for a, r, s in zip(v, g.rollouts, g.scored, strict=True)
        if s
    ]
    a, n = np.array(pairs).T
    assert metrics["actor/pg_loss"] == pytest.approx(-(a @ n) / n.sum(), rel=1e-4)  # ratio 1: the loss is -mean A
    assert metrics["critic/advantages/mean"] == pytest.approx((a @ n) / n.sum())
    assert (metrics["critic/advantages/max"], metrics["critic/advantages/min"]) == (a.max(), a.min())
    assert metrics["training/trained_tokens"] == n.sum()
    whole = sum(r.prompt.tokens.size + len(r) for g in GROUPS for r in g.rollouts)
    assert 0.5 < metrics["training/packed_fill_ratio"] <= 1
    room = whole / metrics["training/packed_fill_ratio"]
    assert room % (4 * 48) == pytest.approx(0, abs=1e-6)


def test_entropy_and_mismatch_against_a_plain_forward(shared):
    params = jax.tree.map(jnp.asarray, host(shared.params))
    tokens, mask, members = made_groups.unpacked(GROUPS)
    logps, entropies = (np.asarray(x, float) for x in made_groups.plain_scores(params, made_groups.MODEL, tokens, 0.8))
    metrics = turn(shared)
    assert metrics["actor/entropy"] == pytest.approx(entropies[mask].mean(), rel=1e-5)
    gaps = []
    for n, (g, i) in enumerate(members):  # the engine's log-probs are compared wherever it sampled, scored or not
        r = GROUPS[g].rollouts[i]
        start = r.prompt.tokens.size
        gaps.append((logps[n, start : start + len(r)] - r.logprobs)[r.sampled])
    gaps = np.concatenate(gaps)
    assert metrics["training/rollout_logprobs_abs_diff_max"] == pytest.approx(np.abs(gaps).max(), rel=1e-5)
    assert metrics["training/rollout_logprobs_abs_diff_mean"] == pytest.approx(np.abs(gaps).mean(), rel=1e-5)
    assert metrics["rollout_corr/kl"] == pytest.approx(-gaps.mean(), rel=1e-4, abs=1e-5)


def test_nan_is_skipped_counted_and_leaves_every_bit(shared):
    turn(shared)
    before, step = host((shared.params, shared.state.opt_state)), shared.step
    shared.prepare(GROUPS)
    name = GROUPS[0].rollouts[0].id
    own = shared._credits[name]
    shared._credits[name] = dataclasses.replace(own, advantages=np.full_like(own.advantages, np.nan))
    shared.accumulate(GROUPS)
    metrics = shared.commit()
    assert float(metrics["training/skipped_updates"]) == 1 and not np.isfinite(float(metrics["actor/grad_norm"]))
    assert same(before, host((shared.params, shared.state.opt_state)))
    assert shared.step == step + 1 == int(shared.state.step)
    metrics = turn(shared)  # and the next one is sound again
    assert metrics["training/skipped_updates"] == 0 and np.isfinite(metrics["actor/grad_norm"])
    assert not same(before[0], host(shared.params))


def test_a_commit_of_nothing_is_skipped_too(shared):
    before = host(shared.params)
    metrics = shared.commit()
    assert float(metrics["training/skipped_updates"]) == 1 and float(metrics["actor/grad_norm"]) == 0
    assert same(before, host(shared.params))


def test_a_closed_gate_leaves_every_bit_and_empties_the_sums(shared, monkeypatch):
    """All tokens are of version 0 and the weights last moved at version 99, so nothing may open the gate."""
    turn(shared)
    closed = Gate(min_ess=0.5)
    closed.load_state_dict({"closed": True, "moved": 99})
    monkeypatch.setattr(shared, "gate", closed)
    before, step = host((shared.params, shared.state.opt_state)), shared.step
    metrics = turn(shared)
    assert metrics["training/gated_updates"] == 1 and metrics["actor/grad_norm"] == 0
    assert same(before, host((shared.params, shared.state.opt_state)))
    assert shared.step == step + 1


def test_a_commit_says_whether_the_weights_that_it_wrote_are_finite():
    """At this rate a step leaves what float32 can hold, and every later one is skipped."""
    one = learner(optimizer=config.OptimizerConfig(lr=3e38, weight_decay=10.0))
    saved = host(one.state)
    assert one.finite is None
    told = turn(one)
    assert told["training/skipped_updates"] == 0 and not any("finite" in name for name in told)
    assert not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(host(one.params)))
    assert one.finite.shape == () and not bool(one.finite)
    assert turn(one)["training/skipped_updates"] == 1 and not bool(one.finite)
    one.restore(lambda shapes: jax.tree.map(lambda x, s: jax.device_put(x, s.sharding), saved, shapes), 0)
    assert one.finite is None
    one.commit()  # of nothing: the weights stay
    assert bool(one.finite)


def test_what_was_not_prepared_in_this_round_is_refused(shared):
    turn(shared)
    shared.prepare(GROUPS[1:])  # fresh after a commit: another round
    refused(r"rollout \(0, 'train', 0, 'p0', 0, 0\) was not prepared in this round", shared.accumulate, GROUPS[:1])
    shared.prepare(GROUPS[:1])  # fresh before the commit: the same round
    shared.accumulate(GROUPS)
    shared.commit()


@pytest.mark.extended
def test_a_round_of_several_steps_keeps_the_policy_of_its_start():
    """The second step's gradient against the plain formula: old log-probs are those of the first weights."""
    with arms.precision(np.float64):
        given = config.AlgorithmConfig(loss_agg_mode="seq-mean-token-mean", clip_ratio_low=0.02, clip_ratio_high=0.03)
        one = arms.learner(np.float64, given=given, reference=False, optimizer=config.OptimizerConfig(lr=3e-3))
        start = host(one.params)
        one.prepare(GROUPS)
        one.accumulate(GROUPS[:2])
        first = one.commit()
        one.prepare(())
        one.accumulate(GROUPS[2:])
        now = jax.tree.map(jnp.asarray, host(one.params))
        values = [advantages.grpo(g.rewards, g.scored, np.ones(4, int)) for g in GROUPS[2:]]
        plain = made_groups.plain_gradient(
            now,
            made_groups.MODEL,
            GROUPS[2:],
            values,
            jax.tree.map(jnp.asarray, start),
            None,
            mode="seq-mean-token-mean",
            low=0.02,
            high=0.03,
            kl_coef=0.0,
            entropy_coef=0.0,
            max_tokens=24,
            temperature=0.8,
        )
        assert arms.worst(host(one.gradient()), jax.device_get(plain)) <= 1e-12
        second = one.commit()
        one.accumulate(GROUPS)  # another epoch
        third = one.commit()
    assert one.step == 3 and float(first["actor/ppo_kl"]) == pytest.approx(0, abs=1e-12)
    assert abs(float(second["actor/ppo_kl"])) > 1e-4 and float(second["actor/pg_clipfrac"]) > 0
    assert "training/rollout_probs_diff_mean" in first and "training/rollout_probs_diff_mean" not in third


def test_old_logprobs_come_from_the_gradients_own_pass_where_there_is_one():
    """Whichever pass gives them: those accumulated before the first commit have no pass of their own, the others do."""
    one = learner(optimizer=config.OptimizerConfig(lr=1e-2))
    want = one.logprobs(GROUPS)
    asked, real = [], one.logprobs
    one.logprobs = lambda groups: asked.append([g.prompt.id for g in groups]) or real(groups)
    one.prepare(GROUPS)
    one.accumulate(GROUPS[:2])
    one.accumulate(GROUPS[:2])
    assert not asked
    one.commit()
    assert asked == [[g.prompt.id for g in GROUPS[2:]]]
    assert one._old.of.keys() == want.keys()
    for name, logps in want.items():
        np.testing.assert_allclose(one._old.of[name], logps, atol=1e-5)
    one.accumulate(GROUPS)
    one.commit()
    assert len(asked) == 1


@pytest.mark.extended
def test_penalties_are_in_the_rewards_reported_and_in_the_advantages():
    """Against tests of credit.py by what the learner reports: the reference is the policy, moved."""
    given = config.AlgorithmConfig(
        adv_estimator="dr_grpo",
        use_kl_in_reward=True,
        kl_coef=0.5,
        overlong_buffer=20,
        rollout_is="token",
        rollout_rs="seq_mean_k2",
        rollout_rs_threshold=(4.55,),
    )
    one = learner(given=given, reference=True)
    params = jax.tree.map(jnp.asarray, host(one.params))
    tokens, mask, members = made_groups.unpacked(GROUPS)
    logps, ref = (
        np.asarray(made_groups.plain_scores(p, made_groups.MODEL, tokens, 0.8)[0], float)
        for p in (params, jax.tree.map(jnp.asarray, made_groups.moved(made_groups.weights(), 2)))
    )
    rewards, kls = [], []
    for n, (g, i) in enumerate(members):
        r = GROUPS[g].rollouts[i]
        if mask[n].any():
            kl = (logps - ref)[n][mask[n]]
            kls.append(kl.mean())
            rewards.append(float(GROUPS[g].rewards[i]) - max(0, len(r) - 4) / 20 - 0.5 * kl.sum())
    metrics = turn(one)
    assert metrics["critic/rewards/mean"] == pytest.approx(np.mean(rewards), rel=1e-4)
    assert metrics["actor/reward_kl_penalty"] == pytest.approx(np.mean(kls), rel=1e-3)
    assert 0 < metrics["rollout_corr/rollout_is_eff_sample_size"] < 1
    assert 0 < metrics["rollout_corr/rollout_rs_seq_masked_fraction"] < 1
    assert "actor/kl_loss" not in metrics


def test_a_sequence_longer_than_a_row_is_refused(shared):
    refused("batch.tokens=48 cannot hold", shared.prepare, made_groups.groups(1, 2, longest=60, seed=3))


def test_nothing_is_compiled_after_compile(shared, caplog):
    def compiled():
        return [record.message for record in caplog.records if "compil" in record.message.lower()]

    with jax.log_compiles(), caplog.at_level("WARNING"):
        turn(shared)
        turn(shared, made_groups.groups(2, 3, seed=5))
        assert not compiled()
        jax.jit(lambda x: x + 3)(np.float32(1))
        assert compiled()  # it would have been seen


def test_learning_rate_zero_leaves_every_bit_even_with_decay():
    one = learner(optimizer=config.OptimizerConfig(lr=0.0, weight_decay=0.5))
    before = host(one.params)
    for _ in range(2):
        turn(one)
    assert same(before, host(one.params))
    assert one.step == 2


def test_sft_needs_no_old_logprobs_and_lowers_the_likelihood_loss():
    given = config.AlgorithmConfig(adv_estimator="ones", loss_mode="sft", loss_agg_mode="token-mean")
    one = learner(given=given, optimizer=config.OptimizerConfig(lr=3e-2), temperature=1.0)
    params = jax.tree.map(jnp.asarray, host(one.params))
    tokens, mask, _ = made_groups.unpacked(GROUPS)
    nll = -np.asarray(made_groups.plain_scores(params, made_groups.MODEL, tokens)[0], float)[mask].mean()
    found = [turn(one) for _ in range(8)]
    assert found[0]["actor/pg_loss"] == pytest.approx(nll, rel=1e-5)
    assert found[-1]["actor/pg_loss"] < 0.8 * nll
    assert not {"actor/ppo_kl", "training/rollout_probs_diff_mean"} & set(found[0])


def test_kl_to_the_reference_itself_is_zero_and_is_reported():
    one = learner(reference=True, given=config.AlgorithmConfig(kl_loss_coef=0.1, kl_loss_type="k2"))
    one._reference = one.params
    assert turn(one)["actor/kl_loss"] == pytest.approx(0, abs=1e-10)


def test_callers_arrays_survive_the_donation():
    """Device arrays in the learner's own layout: the learner must not donate what is not its own."""
    devices = mesh.make_mesh(1, 1, 1)
    given = jax.device_put(made_groups.weights(), mesh.replicated(devices))
    one = learner(policy=given)
    turn(one)
    old = one.params
    np.testing.assert_array_equal(given["embed"], made_groups.weights()["embed"])
    turn(one)
    assert old["embed"].is_deleted()


def test_bfloat16_compute_keeps_float32_masters_and_a_close_gradient():
    full, half = (
        learner(),
        Learner(
            made_groups.MODEL,
            made_groups.weights(),
            mesh.make_mesh(),
            LearnerSettings(
                algorithm=PLAIN,
                optimizer=config.OptimizerConfig(),
                batch=config.BatchConfig(rows=4, tokens=48),
                temperature=0.8,
                steps=10,
                max_tokens=24,
                compute_dtype="bfloat16",
            ),
        ),
    )
    grads = []
    for one in (full, half):
        one.prepare(GROUPS)
        one.accumulate(GROUPS)
        grads.append(host(one.gradient()))
        assert {leaf.dtype for leaf in jax.tree.leaves((one.params, grads[-1]))} == {np.dtype(np.float32)}
    assert 1e-5 < arms.worst(grads[1], grads[0]) < 0.1


@pytest.mark.parametrize(
    "more, message",
    [
        (
            dict(sizes=(2, 1, 1), rows=3),
            r"batch.rows=3 must be a multiple of mesh.data\*mesh.fsdp\*mesh.expert=2; the nearest valid "
            "value is 4",
        ),
        (dict(sizes=(1, 1, 4)), "mesh.tensor=4 does not divide the model's kv_heads=2"),
        (dict(given=config.AlgorithmConfig(kl_loss_coef=0.1)), "kl_loss_coef=0.1 .*needs a reference model"),
    ],
)
def test_refusals(more, message):
    refused(message, learner, **more)
