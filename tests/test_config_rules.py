"""Relations between options: each broken once, and its edge allowed; a run and the simulator share those of a scheduler."""

from __future__ import annotations

import pytest
from config_arms import PIPE, SUPERVISED, TAIL, error, given, unlike

from jaxrl_post import config
from jaxrl_post.algorithms.advantages import WHOLE_ROUND
from jaxrl_post.config import relations, rules
from jaxrl_post.engine.host.wire import PROMPT_TILE
from jaxrl_post.simulate import settings

PIPED, RACING, WRITTEN = " ".join(PIPE), " ".join(TAIL), " ".join(SUPERVISED)
JUDGED = "judge.model=m judge.question={answer}"
LENT = "scheduler.lend=0.5 scheduler.stream=1 mesh.data=2"


REFUSED = {  # overrides of a run, divided by spaces, and a part of the sentence that refuses them
    "model.preset=": "model.path and model.preset are both empty",
    "sampling.top_p=0.0": "sampling.top_p=0.0 leaves nothing to draw",
    "sampling.top_p=1e-40": "sampling.top_p=1e-40 leaves nothing to draw",
    "sampling.top_p=0.9": "sampling.top_p=0.9 leaves any number of ids, and sampling.keep_mask=True records them: a "
    "sampling.top_k from 1 to 1024 bounds them, and sampling.keep_mask=False records none and trains on the whole law; the "
    "nearest valid sampling.top_k is 512",
    "sampling.top_k=1025": "sampling.top_k=1025 records up to so many ids a token (sampling.keep_mask=True): at most 1024 are; "
    "sampling.keep_mask=False records none and trains on the whole law; the nearest valid sampling.top_k is 1024",
    "algorithm.router_replay=true sampling.keep_routes=false": "sampling.keep_routes=False records no route, and",
    f"{WRITTEN} algorithm.router_replay=true": "records no route, and algorithm.router_replay=True repeats recorded ones",
    "sampling.temperature=1e-40": "sampling.temperature=1e-40 must be 0, which is greedy, or from 1e-30 to 1e+30; the",
    "engine.slots=129": "must reach engine.slots=129",
    "engine.row_sizes=[]": "engine.row_sizes must hold at least one positive size",
    "engine.row_sizes=[64,-1]": "engine.row_sizes must hold at least one positive size",
    "engine.head_rows=3": "engine.head_rows=3 must be 0 or at least engine.slots=64",
    "engine.prompt_rows=100": f"engine.prompt_rows=100 must be a multiple of {PROMPT_TILE}, the rows of a tile of one "
    "prompt; the nearest valid engine.prompt_rows is 128",
    "judge.model=m": "judge.question='' must say where the rollout goes: it lacks the word answer in braces",
    f"{JUDGED} reward.model=r": "judge.model='m' and reward.model='r' would both be added to the reward",
    f"{JUDGED} {LENT}": "of which scheduler.lend=0.5 lends some to the learner: leave one of them empty or 0",
    f"{JUDGED} judge.max_tokens=1024": "judge.max_tokens=1024 must be below judge.max_length=1024, which holds the "
    "question too; the nearest valid judge.max_tokens is 1023",
    "sampling.max_tokens=512": "sampling.max_tokens=512 must be below engine.max_length=512",
    "engine.pages=31": "engine.pages=31 cannot hold one rollout of engine.max_length=512 tokens in pages of 16 "
    "tokens; the nearest valid engine.pages is 32",
    "batch.tokens=511": "batch.tokens=511 cannot hold a rollout of engine.max_length=512 tokens; the nearest valid "
    "batch.tokens is 512",
    "mesh.data=3": "batch.rows=8 must be a multiple of mesh.data*mesh.fsdp*mesh.expert=3; the nearest valid batch.rows is 9",
    "scheduler.group_size=1": "scheduler.group_size=1 must be at least 2",
    "algorithm.adv_estimator=reinforce_plus_plus_baseline scheduler.group_size=1": "must be at least 2",
    "scheduler.mini_batches=5": "scheduler.mini_batches=5 must divide scheduler.prompts=32; the nearest valid "
    "scheduler.mini_batches is 4",
    "scheduler.mini_batches=4 scheduler.ppo_epochs=2": "steps=10 must be a multiple of the 8 optimizer steps of a "
    "round (scheduler.mini_batches * scheduler.ppo_epochs); the nearest valid steps is 16",
    "scheduler.mini_batches=2 eval.every=5": "eval.every=5 must be a multiple of the 2 optimizer steps",
    "eval.at=[2,11,12]": "eval.at=(2, 11, 12): 11 is never reached: it must be at least 0 and at most steps=10",
    "eval.at=[-1]": "eval.at=(-1,): -1 is never reached",
    "scheduler.mini_batches=2 eval.at=[4,5]": "eval.at=(4, 5): 5 must be a multiple of the 2 optimizer steps",
    "algorithm.clip_ratio_c=1": "algorithm.clip_ratio_c=1.0 must be 0 (off) or above 1",
    "engine.name=demonstrations": "supervised training is 'demonstrations' with 'sft' and 'ones'",
    "algorithm.loss_mode=sft algorithm.adv_estimator=ones": "engine.name='rows' with algorithm.loss_mode='sft'",
    "algorithm.prox_logp_method=loglinear algorithm.rollout_rs=token_k1": "and algorithm.rollout_rs='token_k1' need; "
    "the nearest valid",
    "algorithm.prox_logp_method=rollout algorithm.rollout_is=token": "algorithm.rollout_is='token' must be 'none'",
    "algorithm.prox_logp_method=loglinear algorithm.rollout_is=span": "algorithm.rollout_is='span' must be 'token' "
    "or 'none'",
    "optimizer.moments_dtype=bfloat16 optimizer.b2=0.999": "optimizer.b2=0.999 moves a moment by less than the "
    "rounding of optimizer.moments_dtype='bfloat16': it must be at most 0.99; the nearest valid optimizer.b2 is 0.99",
    "algorithm.min_ess=0.5": "algorithm.min_ess=0.5 would be ignored: a batch whose tokens are all of the weights in "
    "use always moves them, and scheduler.name='sync' with one optimizer step a round and shared devices has no "
    "other; the nearest valid algorithm.min_ess is 0.0",
    "algorithm.max_rollout_kl=0.5": "algorithm.max_rollout_kl=0.5 would be ignored",
    "eval.top_p=0.0": "eval.top_p=0.0 leaves nothing to draw",
    "eval.temperature=1e39": "eval.temperature=1e+39 must be 0, which is greedy",
    "model.remat_policy=offload": "model.remat_policy='offload' would be ignored",
    "algorithm.overlong_buffer=300": "algorithm.overlong_buffer=300 is above sampling.max_tokens=256",
    "algorithm.adv_estimator=maxrl algorithm.overlong_buffer=3": "'maxrl' needs rewards of at least 0",
    "algorithm.rollout_is=token algorithm.rollout_is_threshold=[]": "algorithm.rollout_is_threshold=() must be "
    "[upper] or [lower, upper], above 0 and rising, for algorithm.rollout_is='token'",
    "algorithm.rollout_is=token algorithm.rollout_is_threshold=[2,1]": "algorithm.rollout_is_threshold=(2.0, 1.0) "
    "must be",
    "algorithm.rollout_rs=token_k3 algorithm.rollout_rs_threshold=[0.1,1]": "algorithm.rollout_rs_threshold=(0.1, "
    "1.0) must be [upper], above 0",
    "data.sources=['task:sums'] data.weights=[1,2]": "data.weights has 2 entries, data.sources 1",
    "data.sources=['task:sums'] data.weights=[0]": "must all be finite and above 0",
    "curriculum.skip_epochs=1 curriculum.groups=3": "curriculum.groups=3 is more than history.epochs=2 keeps of a "
    "prompt; the nearest valid curriculum.groups is 2",
    "curriculum.skip_epochs=1 curriculum.solved=0.5 curriculum.hopeless=0.5": "curriculum.hopeless=0.5 must be below "
    "curriculum.solved=0.5",
    "reward.weights=[1,2]": "reward.weights has 2 entries, reward.functions 1",
    "scheduler.name=tail_batching": "races prompts and drops no rollout: scheduler.over=1.0 must be above 1, 1.25 is "
    "usual",
    "scheduler.name=rollpacker": "scheduler.name='rollpacker' races nobody",
    "scheduler.name=rollpacker scheduler.over=1.25 speculation.drafter=ours": "the rollouts that are hard to draft",
    f"{RACING} {WRITTEN}": "needs rollouts that take their time: engine.name='demonstrations' has none; the nearest "
    "valid scheduler.name is 'sync'",
    "reward.test_limit_s=20": "reward.timeout_s=10.0 ends a grader before the program that it judges reaches its "
    "limit of 20.0 s",
    "reward.adaptive_limit=True": "reaches its limit of 30.0 s",
    "mesh.engine=3 mesh.tensor=2": "mesh.engine=3 must be a multiple of 2, the devices of a replica "
    "(mesh.engine_tensor, or mesh.tensor, times mesh.engine_expert, or mesh.expert); the nearest valid mesh.engine is 2",
    "mesh.engine=1 scheduler.mini_batches=2": "mesh.engine=1 publishes after each optimizer step: "
    "scheduler.mini_batches=2",
    "mesh.engine=2 engine.layouts=[2]": "mesh.engine=2: weights come in the midst of a round",
    f"{PIPED} mesh.engine=1 scheduler.interleave=0.5": "scheduler.interleave=0.5 divides the time of shared devices",
    f"{PIPED} scheduler.ppo_epochs=2": "scheduler.mini_batches=1 and scheduler.ppo_epochs=2 must be 1",
    f"{PIPED} scheduler.placement=longest_first": "scheduler.placement='longest_first' orders the rollouts of a round",
    f"{PIPED} mesh.data=2 engine.layouts=[2]": "engine.layouts=(2,) are changed between rounds",
    f"{PIPED} scheduler.max_unscored=31": "scheduler.max_unscored=31 never holds a batch: it must be 0 or at least "
    "scheduler.prompts=32",
    f"{PIPED} scheduler.max_ready=40 scheduler.max_unscored=48": "scheduler.max_ready=40 stops admission before a "
    "batch is whole and scored: it must be 0 or at least scheduler.prompts=32 and scheduler.max_unscored=48",
    f"{RACING} scheduler.lane=0.5 history.epochs=0": "scheduler.lane=0.5 asks the history which prompts are long, and "
    "history.epochs=0",
    f"{RACING} scheduler.long_batches=2 scheduler.stream=4": "with scheduler.stream=4 it must be 1",
    "scheduler.stream=33": "scheduler.stream=33 is above scheduler.prompts=32",
    "scheduler.stream=4 scheduler.ppo_epochs=2": "weights stand still until the round's one commit: "
    "scheduler.mini_batches=1 and scheduler.ppo_epochs=2 must be 1",
    "scheduler.stream=4 scheduler.filter_groups=true": "scheduler.stream=4 hands groups on before it is known",
    **{
        f"scheduler.stream=4 algorithm.adv_estimator={name}": f"algorithm.adv_estimator='{name}' whitens over all tokens "
        "of a round, which scheduler.stream=4 hands on in pieces; the nearest valid scheduler.stream is 0"
        for name in WHOLE_ROUND
    },
}


def test_fields_that_contradict_each_other():
    assert unlike(REFUSED, error) == {}


def test_edges_of_the_cross_field_rules_are_allowed():
    got = config.resolve(
        given(),
        [
            "engine.row_sizes=[64]",
            "engine.pages=32",
            "sampling.max_tokens=511",
            "mesh.data=8",
            "algorithm.adv_estimator=ones",
            "scheduler.group_size=1",
            "engine.head_rows=64",
            "scheduler.mini_batches=2",
            "scheduler.ppo_epochs=5",
            "algorithm.rollout_rs=seq_mean_k1",
            "algorithm.rollout_rs_threshold=[0.5,2]",
        ],
    )
    config.resolve(given(), ["sampling.max_tokens=511", "algorithm.overlong_buffer=511", "algorithm.clip_ratio_c=1.5"])
    config.resolve(given(), ["algorithm.min_ess=0.5", "mesh.engine=1"])
    config.resolve(given(), ["algorithm.max_rollout_kl=0.5", "scheduler.ppo_epochs=2"])
    config.resolve(given(), [*TAIL, "history.epochs=0", "speculation.drafter=ours"])
    config.resolve(given(), [*TAIL, "scheduler.long_batches=3"])
    config.resolve(
        given(),
        [
            *PIPE,
            "scheduler.max_unscored=32",
            "scheduler.placement=divided",
            "engine.carry_over=auto",
            "engine.carry_share=0.2",
            "scheduler.filter_groups=true",
        ],
    )
    config.resolve(given(), [*TAIL, "scheduler.stream=32", "scheduler.prefix_mode=recompute"])
    config.resolve(
        given(), ["scheduler.name=rollpacker", "scheduler.over_samples=1.25", "scheduler.filter_groups=true"]
    )
    assert (got.scheduler.updates, got.rounds) == (10, 1)
    assert got.engine.row_sizes == (64,)


def test_an_evaluation_is_at_the_first_publish_that_reaches_it():
    got = config.resolve(given(), ["eval.every=4", "eval.at=[6]"])
    published = [1, 2, 3, 5, 6, 8, 9, 10]  # a long round of two batches publishes once
    found = [now for before, now in zip([0, *published], published) if got.evaluated_at(before, now)]
    assert found == [5, 6, 8]


def test_every_relation_names_options():
    """So a name that was mistyped is found without breaking the rule."""
    run, simulation = config.Config(model=config.PolicyConfig(preset="tiny")), settings.Simulation()
    for rule in (*rules.RUN, *settings.RELATIONS):
        names = relations.Names(run if rule in rules.RUN else simulation, {})
        values = [names.value(name) for name in (*rule.names, *rule.when.names)]
        assert values and rule.need(*values[: len(rule.names)]) in (True, False), rule.says
        text = names.filled(rule.says.replace("{culprit}", "x"))
        assert "{" not in text.replace("{}", "") and len(text) > 30, rule.says


@pytest.mark.parametrize("text", ["scheduler.lend", "scheduler.lend=0", "a < ", "-> a is 0", "a > 3"])
def test_a_row_that_is_none_is_refused(text):
    with pytest.raises(ValueError, match="must be NAME is VALUE"):
        relations.rows({text: "a sentence"})


# The simulator: the same rules under its own names.


def simulated(*overrides: str) -> str:
    with pytest.raises(ValueError) as caught:
        settings.resolve(settings.default(), overrides)
    return str(caught.value)


REFUSED_SIMULATIONS = {  # overrides of a simulation, and a part of the sentence that refuses them
    "cluster.layouts=[3]": "cluster.layouts=(3,): 3 devices a replica must be a multiple of 1 above it that divides "
    "the 16 devices",
    "cluster.layouts=[2,2]": "cluster.layouts=(2, 2) names a layout twice",
    "cluster.layouts=[2] cluster.cost_table=t": "cluster.cost_table='t' was measured in one layout",
    "cluster.layouts=[2] cluster.step_s=0.1": "cluster.layouts=(2,) need the analytic cost, not cluster.step_s=0.1",
    "learner.apart=True cluster.layouts=[2]": "learner.apart=True: weights come in the midst of a round, and "
    "cluster.layouts=(2,)",
    "learner.apart=True scheduler.mini_batches=2": "learner.apart=True publishes after each optimizer step: "
    "scheduler.mini_batches=2",
    f"{PIPED} learner.apart=True scheduler.interleave=0.5": "and with learner.apart=True none are shared",
    f"{PIPED} cluster.layouts=[2]": "cluster.layouts=(2,) are changed between rounds",
    f"{PIPED} scheduler.ppo_epochs=2": "scheduler.ppo_epochs=2 must be 1",
    "scheduler.name=rollpacker": "scheduler.name='rollpacker' races nobody",
    "scheduler.stream=33": "scheduler.stream=33 is above scheduler.prompts=32",
    "scheduler.lend=0.5": "scheduler.lend=0.5 moves rollouts in the midst of a round, which the simulator does not",
    "fitted=['x']": "fitted='x' names no figure of published; the nearest valid fitted is ()",
    "scheduler.over=1.5": "scheduler.over=1.5 would be ignored",
    "scheduler.lane=0.5": "scheduler.lane=0.5 would be ignored",
    "scheduler.lane=0.5 workload.mean=9.0": "; to leave all of them at their defaults, add --config.",
    "workload.mean=9.0": "workload.mean=9.0 would be ignored: it is read only where workload.name is 'lognormal'",
    "cluster.request_s=0.1": "cluster.request_s=0.1 would be ignored: it is read only where cluster.step_s is above 0",
    "cluster.step_s=0.1 cluster.model=qwen2.5-14b": "would be ignored: it is read only where cluster.cost_table is "
    "empty and cluster.step_s is 0, or cluster.bounded is true, and here",
    "cluster.move_s=1.0": "cluster.move_s=1.0 would be ignored: it is read only where cluster.layouts is not empty",
}


def test_a_simulation_is_refused_what_a_run_is():
    assert unlike(REFUSED_SIMULATIONS, simulated) == {}
