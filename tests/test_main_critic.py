"""Whole runs with a critic or a greedy baseline: resumed bit for bit, exported without the critic, logged by verl's names."""

import numpy as np
import pytest
from resumed_runs import final_state, here, kill, resume, same_run, whole_run  # noqa: F401  (a fixture, and its kin)

from jaxrl_post.models import hf
from jaxrl_post.runs import metric_rows, rollout_log
from jaxrl_post.runs.checkpoint import store

pytestmark = pytest.mark.usefixtures("quick_compilation")

PPO = (
    "--config.algorithm.adv_estimator=gae",
    "--config.algorithm.lam=0.9",
    "--config.algorithm.use_kl_in_reward=True",
    "--config.algorithm.kl_target=0.01",
    "--config.algorithm.kl_horizon=20.0",
    "--config.critic.warmup_steps=1",
    "--config.critic.lr=1e-2",
)
RUNS = {
    "ppo": PPO,
    "two_updates": (*PPO, "--config.scheduler.mini_batches=2", "--config.steps=6"),
    "value_head": (*PPO, "--config.critic.trunk=policy", "--config.algorithm.adv_estimator=gae_turn"),
    "pipeline": (*PPO, "--config.scheduler.name=pipeline", "--config.scheduler.max_staleness=1"),
    "remax": ("--config.algorithm.adv_estimator=remax",),
}


def rows(folder):
    return [row for row in metric_rows.read(folder / "metrics.jsonl") if "actor/grad_norm" in row]


@pytest.mark.parametrize(
    "name", ["ppo", *(pytest.param(name, marks=pytest.mark.shown("variants")) for name in RUNS if name != "ppo")]
)
def test_killed_in_a_save_and_resumed_it_is_the_same_run(here, name):  # noqa: F811
    whole, target = whole_run(here, f"whole_{name}", *RUNS[name]), here / f"killed_{name}"
    kill(here, target, store, "manifest", 2, flags=RUNS[name])
    assert resume(here, target, *RUNS[name]) == 0
    same_run(whole, target)


def test_what_a_run_with_a_critic_leaves(here):  # noqa: F811
    """The critic is in the checkpoint and its moments too; the policy alone is exported, as it stands there."""
    folder = whole_run(here, "whole_ppo", *RUNS["ppo"])
    state = final_state(folder)
    names = {".".join(name.split(".")[:2]) for name in state}
    assert {"params.policy", "params.critic", "opt_state.policy", "opt_state.critic"} <= names
    _, policy = hf.load(folder / "policy")
    np.testing.assert_array_equal(policy["embed"], state["params.policy.embed"])
    assert np.any(state["params.critic.value"]) and np.any(state["params.critic.bias"])
    found = rows(folder)
    for name in ("vf_loss", "vf_clipfrac", "vpred_mean", "vf_explained_var", "values/mean", "returns/mean", "lr"):
        assert all(np.isfinite(row[f"critic/{name}"]) for row in found), name
    assert found[0]["critic/values/max"] == found[0]["critic/values/min"] == 0  # the head begins at 0
    assert found[-1]["critic/values/max"] > found[-1]["critic/values/min"]
    coefficients = [row["actor/reward_kl_penalty_coeff"] for row in found]
    assert coefficients[0] == 0.001 and len(set(coefficients)) > 1
    one, two = found[:2]  # after the warm-up of one step the policy is still the reference
    assert one["actor/reward_kl_penalty"] == pytest.approx(0, abs=1e-6)
    assert two["actor/reward_kl_penalty"] == pytest.approx(0, abs=1e-6) and found[2]["actor/reward_kl_penalty"] != 0


@pytest.mark.extended
def test_the_last_rollout_of_a_group_of_remax_is_greedy(here):  # noqa: F811
    """At the weights of the start, two groups of one prompt in different epochs have one greedy rollout, and others."""
    folder = whole_run(here, "whole_remax", *RUNS["remax"])
    groups = rollout_log.read(folder / "rollouts" / "step_000001.npz")
    for group in groups:
        greedy = group.rollouts[-1]
        np.testing.assert_array_equal(greedy.tokens, greedy.argmax_tokens)
    samples = [rollout for group in groups for rollout in group.rollouts[:-1]]
    assert any(np.any(rollout.tokens != rollout.argmax_tokens) for rollout in samples) or len(
        {rollout.tokens.tobytes() for rollout in samples}
    ) > len(groups)
