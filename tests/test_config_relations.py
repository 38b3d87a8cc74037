"""No setting is inert: every option of algorithm and scheduler that is accepted under a setting of the others changes
something there.

The walk sets each option away from its default under every estimator, loss and correction, and under every scheduler. What
the config accepts must change the credits, the loss, the gate or a decision of the scheduler. What it refuses needs nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import made_groups
import numpy as np
import pytest
from config_arms import DISTILL, GKD, PAIRS, PIPE, REWARD_MODEL, SUPERVISED, TAIL, given

from jaxrl_post import config as configs
from jaxrl_post.algorithms import credit
from jaxrl_post.algorithms.kl_estimators import KlController
from jaxrl_post.config import fields
from jaxrl_post.models import layer_loop
from jaxrl_post.parallel import mesh
from jaxrl_post.ring import loop
from jaxrl_post.ring.types import Finish
from jaxrl_post.scheduler.decision_log import Recorder
from jaxrl_post.simulate import settings, simulation
from jaxrl_post.trainer import packing, programs
from jaxrl_post.trainer.old_logprobs import OldLogprobs
from jaxrl_post.trainer.update_gate import Gate

STEP, LIMIT, ROWS, TOKENS = 3, 20, 8, 32
pytestmark = pytest.mark.usefixtures("quick_compilation")

ARMS_OF_ALGORITHM = {  # values that are set one at a time; those that the arms choose are in _CHOSEN
    "gamma": ("0.9",),
    "lam": ("0.5",),
    "loss_agg_mode": ("seq-mean-token-sum", "prompt-mean"),
    "clip_ratio_low": ("0.05",),
    "clip_ratio_high": ("0.05",),
    "clip_ratio_c": ("1.05",),
    "tau_pos": ("3",),
    "tau_neg": ("3",),
    "kl_loss_type": ("k1", "k2"),
    "kl_loss_coef": ("0.3",),
    "use_kl_in_reward": ("true",),
    "kl_coef": ("0.5",),
    "kl_target": ("0.1",),
    "kl_horizon": ("7",),
    "entropy_coef": ("0.1",),
    "rollout_is": ("token", "sequence"),
    "rollout_is_threshold": ("[1.01]",),
    "rollout_rs": ("token_k1", "seq_sum_k3"),
    "rollout_rs_threshold": ("[0.01]",),
    "prox_logp_method": ("rollout", "loglinear"),
    "min_ess": ("0.999",),
    "max_rollout_kl": ("1e-4",),
    "overlong_buffer": ("15",),
    "overlong_penalty": ("3",),
    "overlong_filtering": ("true",),
    "old_kl_coef": ("0.7",),
    "clip_cov_ratio": ("0.01",),
    "clip_cov_lb": ("0.3",),
    "clip_cov_ub": ("0.5",),
    "kl_cov_ratio": ("0.5",),
    "ppo_kl_coef": ("0.7",),
    "top_entropy_quantile": ("0.5",),
    "opsm_delta": ("1e-3",),
    "use_bias_correction_kl": ("true",),
    "positive_nll_coef": ("0.3",),
    "lam_value": ("0.5",),
    "lam_alpha": ("0.5",),
    "gdpo_reward_keys": ("['a']",),
    "gdpo_reward_weights": ("[1,3]",),
    "rae_decay": ("0.2",),
    "dpo_beta": ("0.5",),
    "label_smoothing": ("0.2",),
    "opd_kl_coef": ("0.5",),
    "gkd_beta": ("0.5",),
    "center_rewards_coefficient": ("0.1",),
    "neftune_alpha": ("5",),
}
_CHOSEN = ("adv_estimator", "loss_mode")
_OF_ROUTERS = (  # see test_trainer_routing.py
    *("router_aux_loss_coef", "router_z_loss_coef", "router_replay", "router_replay_reference"),
)
_CHOICES = {name: fields.members(configs.AlgorithmConfig)[name][1].metadata.get("choices") for name in _CHOSEN}
_ESTIMATORS = [name for name in _CHOICES["adv_estimator"] if name != "pairs"]
_LOSSES = [name for name in _CHOICES["loss_mode"] if name not in ("sft", "dpo", "ipo", "bradley_terry", "gkd")]
_EXTRA = (
    "rollout_is=token",
    "rollout_is=span",
    "rollout_rs=token_k1",
    "rollout_rs=seq_sum_k3",
    "rollout_rs=m2po",
    "use_kl_in_reward=true",
    "kl_loss_coef=0.3",
    "prox_logp_method=rollout",
    "prox_logp_method=loglinear",
    "overlong_buffer=15",
)
_WITH = {  # what an estimator or a loss cannot do without, or has an effect with
    "distill": DISTILL[1:],
    "gdpo": ("algorithm.gdpo_reward_keys=['a','b']",),
    "dro": ("algorithm.old_kl_coef=0.5",),
    "rae": ("algorithm.rae_decay=0.5", "algorithm.overlong_buffer=15", "algorithm.overlong_penalty=3"),
    "clip_cov": ("algorithm.clip_cov_ratio=0.5", "algorithm.clip_cov_lb=0.1"),
    "luspo": ("algorithm.loss_agg_mode=seq-mean-token-mean",),
}
_PASSES = ("scheduler.mini_batches=2", "eval.every=0")


def _read(arm: Sequence[str]) -> bool:
    """Whether something reads all of these settings."""
    try:
        configs.resolve(given(), arm)
    except ValueError as refused:
        assert "would be ignored" in str(refused)
        return False
    return True


def _arms(losses: Sequence[str]) -> list[tuple[str, ...]]:
    """Every estimator, every loss with two of them, every extra with these losses, and what lets tokens grow old."""
    pairs = [
        (
            f"algorithm.adv_estimator={estimator}",
            f"algorithm.loss_mode={loss}",
            *_WITH.get(estimator, ()),
            *(() if (estimator, loss) == ("ones", "clip_cov") else _WITH.get(loss, ())),
        )
        for estimator in _ESTIMATORS
        for loss in (_LOSSES if estimator in ("grpo", "ones") else _LOSSES[:1])
    ]
    extras = [
        (f"algorithm.loss_mode={loss}", f"algorithm.{extra}", *_WITH.get(loss, ()))
        for loss in losses
        for extra in _EXTRA
    ]
    extras = [arm for arm in extras if _read(arm)]
    supervised = [SUPERVISED, (*SUPERVISED, "algorithm.kl_loss_coef=0.3"), (*SUPERVISED, "algorithm.entropy_coef=0.1")]
    supervised += [PAIRS, (*PAIRS, "algorithm.loss_mode=ipo"), (*PAIRS, "algorithm.kl_loss_coef=0.3"), REWARD_MODEL]
    moved = ("algorithm.use_kl_in_reward=true", "algorithm.kl_target=0.1")
    taught = [("algorithm.opd_kl_coef=0.3", *DISTILL[1:]), GKD, (*GKD, "algorithm.entropy_coef=0.1")]
    return [*pairs, *extras, *supervised, moved, *taught, ("mesh.engine=1",), PIPE, TAIL, _PASSES]


def _groups() -> list:
    """Scored groups of rollouts of several versions, one of them cut at the limit."""
    out = []
    for group in made_groups.groups(3, 4, longest=LIMIT, seed=5):
        rollouts = []
        for rollout in group.rollouts:
            versions = np.minimum(np.arange(len(rollout)) // 6, STEP - 1)
            finish = Finish.LENGTH if len(rollout) >= LIMIT - 6 else Finish.EOS
            entropies = (np.arange(len(rollout)) * 7 % 11) / 5
            rollouts.append(dataclasses.replace(rollout, versions=versions, finish=finish, entropies=entropies))
        parts = {name: (np.arange(len(rollouts)) * step % 3) / 2 for name, step in (("a", 1), ("b", 2))}
        out.append(dataclasses.replace(group, rollouts=tuple(rollouts), components=parts))
    return out


GROUPS = _groups()
PAIRED = [
    dataclasses.replace(g, rollouts=g.rollouts[:2], rewards=g.rewards[:2], scored=g.scored[:2], components={})
    for g in GROUPS
]
ROLLOUTS = [rollout for group in GROUPS for rollout in group.rollouts]


def _near(seed: int, scale: float) -> dict:
    """Log-probs near those of the engine, by rollout id."""
    rng = np.random.default_rng(seed)
    return {r.id: r.logprobs + scale * rng.standard_normal(len(r)).astype(np.float32) for r in ROLLOUTS}


OLD, REFERENCE, POLICY, VALUES, _NORMS, TEACHER = (_near(seed, 0.9) for seed in range(1, 7))
NORMS = {id: np.abs(values) for id, values in _NORMS.items()}


@pytest.fixture
def scored(monkeypatch):
    """The policy's log-probs are POLICY's, and its entropies the positions, without a model."""

    def score(policy, batch, recipe):
        return policy, (batch.positions % 5).astype(policy.dtype)

    def compared(policy, teacher, batch, recipe):
        return *score(policy, batch, recipe), recipe.algorithm.gkd_beta * policy**2, policy

    monkeypatch.setattr(programs, "score", score)
    monkeypatch.setattr(programs, "compared", compared)


def _recipe(algorithm: configs.AlgorithmConfig) -> programs.Recipe:
    """Settings of a loss whose log-probs are given."""
    how = dict(temperature=1.0, head_chunk=8, dtype=jnp.float32, sums=jnp.float32, mesh=mesh.make_mesh(1, 1, 1))
    how |= dict(loop=layer_loop.LayerLoop(), split=False)
    own = programs.Recipe(model=made_groups.MODEL, algorithm=algorithm, **how)
    return dataclasses.replace(own, teacher=own) if algorithm.loss_mode == "gkd" else own


def _effect(config: configs.Config) -> list:
    """Returns all that the algorithm section makes of GROUPS: what the loss reads of credits, the loss, and the gate."""
    a = config.algorithm
    old = OldLogprobs(a)
    old.committed, old.of = True, OLD
    given = dict(old=OLD, reference=REFERENCE, values=VALUES if a.needs_critic else None, norms=NORMS, teacher=TEACHER)
    groups = PAIRED if a.compares_pairs else GROUPS
    credits, found = credit.assign(groups, a, max_tokens=LIMIT, **given)
    trained, controller = credit.trained(groups, a), KlController(a)
    controller.update(found.kls)
    leaves = {"corrections": a.corrects_rollouts, "values": a.needs_critic, "returns": a.needs_critic}
    leaves = [name for name, there in leaves.items() if there]
    how = dict(rows=ROWS, tokens=TOKENS, leaves=[*leaves, *a.marks])
    given = old.leaves(ROLLOUTS, STEP) | ({"ref_logprobs": REFERENCE} if a.needs_reference else {})
    (batch,), _ = packing.pack(trained, credits, given=given, **how)
    (placed,), _ = packing.pack(trained, credits, given={"old_logprobs": POLICY}, **how)
    policy, batch = jnp.asarray(placed.old_logprobs), jax.tree.map(jnp.asarray, batch)
    total, (counted, _) = programs.numerator(policy, batch, _recipe(a))
    terms = programs.losses.Terms(policy, batch.old_logprobs, batch.advantages, batch.loss_mask, batch.segment_ids, a)
    per_token, _ = programs.losses.LOSSES[a.loss_mode](terms)
    gate = Gate(a.min_ess, a.max_rollout_kl)
    known = ROLLOUTS if old.compared else ()
    pairs = [(OLD[r.id][r.sampled], r.logprobs[r.sampled]) for r in known if r.sampled.any()]
    stale = config.scheduler.name != "sync" or config.scheduler.updates > 1 or config.mesh.engine > 0
    versions = [np.full(1, -1 if stale else STEP)]
    return [
        float(total),
        int(counted.count),
        np.asarray(per_token * batch.loss_mask).tobytes(),
        gate.lets(pairs, versions, STEP),
        controller.value,
        [own.returns.tobytes() for own in credits.values() if own.returns is not None],
        a.neftune_alpha,  # of the decoder's input; test_trainer_embedding_noise.py has the gradient
    ]


def test_the_walk_sets_every_option_of_the_algorithm():
    assert {*ARMS_OF_ALGORITHM, *_CHOSEN, *_OF_ROUTERS} == set(fields.members(configs.AlgorithmConfig))


@pytest.mark.parametrize("losses", [_LOSSES[:1], pytest.param(_LOSSES[1:], marks=pytest.mark.shown("variants"))])
def test_no_option_of_the_algorithm_is_inert(scored, losses):
    """Under every estimator, loss, correction and scheduler: it is refused, or it changes the loss or the gate."""
    inert, counted = [], dict.fromkeys(ARMS_OF_ALGORITHM, 0)
    for arm in _arms(losses):
        base = configs.resolve(given(), arm)
        plain = _effect(base)
        for name, values in ARMS_OF_ALGORITHM.items():
            for value in values:
                try:
                    changed = configs.resolve(given(), [*arm, f"algorithm.{name}={value}"])
                except ValueError:
                    continue
                if getattr(changed.algorithm, name) == getattr(base.algorithm, name):
                    continue
                counted[name] += 1
                if _effect(changed) == plain:
                    inert.append(f"{' '.join(arm)}: algorithm.{name}={value}")
    assert not inert
    assert all(counted.values()), counted


# The scheduler, in the simulator.

SMALL = (
    "rounds=8",
    "workload.name=lognormal",
    "workload.prompts=16",
    "workload.prompt_tokens=4",
    "workload.cap=64",
    "workload.mean=12",
    "workload.tail=1.8",
    "workload.tv=0.02",
    "cluster.replicas=2",
    "cluster.slots=8",
    "cluster.step_s=0.01",
    "learner.token_s=0.002",
    "scheduler.prompts=6",
    "scheduler.group_size=4",
)
RACES = {
    "sync": (),
    "sync, filtered": ("scheduler.filter_groups=true",),
    "tail_batching": TAIL,
    "rollpacker": ("scheduler.name=rollpacker", "scheduler.over=1.5"),
    "pipeline": PIPE,
    "pipeline with a learner apart": (*PIPE, "learner.apart=true"),
    "pipeline without staleness": ("scheduler.name=pipeline",),
}
ARMS_OF_SCHEDULER = {
    "placement": ("divided", "longest_first"),
    "over": ("1.75",),
    "over_samples": ("1.5",),
    "prefix_mode": ("recompute", "restart"),
    "long_batches": ("2",),
    "lane": ("0.9",),
    "stream": ("2",),
    "max_staleness": ("1",),
    "ahead": ("3",),
    "max_unscored": ("12",),
    "max_ready": ("6",),
    "prompts": ("8",),
    "group_size": ("6",),
    "filter_groups": ("true",),
    "mini_batches": ("3",),
    "ppo_epochs": ("3",),
}
# On shared devices complete groups wait for late ones alone, near the bound of staleness, which this workload never meets.
RARE = {"pipeline: scheduler.max_ready=6"}
# Which no simulation of this size can show: a name, loans and turns with the learner, a bound that ends the run, and
# lengths for a choice that is made before, and what a filter reads where the reward is the accuracy.
APART = ("filter_metric", "name", "lend", "interleave", "max_waves", "auto_history")


def _decisions(given: settings.Simulation) -> list[str]:
    lines: list[str] = []
    made = simulation.assemble(given)
    steps = given.rounds * given.scheduler.updates
    made.scheduler = Recorder(made.scheduler, lines.append)
    ring = simulation.tallied(made)
    simulation.listen(ring, made, [])
    loop.run(ring, made.engine, made.scheduler, made.rewards, made.learner, simulation.publish, steps)
    return [*lines, str(simulation.figures(made.tally.rounds, made.tally.counts))]


def test_the_walk_sets_every_option_of_the_scheduler():
    assert {*ARMS_OF_SCHEDULER, *APART} == set(fields.members(configs.SchedulerConfig))


def test_no_option_of_the_scheduler_is_inert():
    """Under every scheduler: it is refused, or it changes a decision or when it is taken."""
    inert, counted = [], dict.fromkeys(ARMS_OF_SCHEDULER, 0)
    for arm, base in RACES.items():
        plain = settings.resolve(settings.default(), [*SMALL, *base])
        before = _decisions(plain)
        for name, values in ARMS_OF_SCHEDULER.items():
            for value in values:
                try:
                    changed = settings.resolve(settings.default(), [*SMALL, *base, f"scheduler.{name}={value}"])
                except ValueError:
                    continue
                if getattr(changed.scheduler, name) == getattr(plain.scheduler, name):
                    continue
                counted[name] += 1
                if _decisions(changed) == before:
                    inert.append(f"{arm}: scheduler.{name}={value}")
    assert not set(inert) - RARE
    assert all(counted.values()), counted
