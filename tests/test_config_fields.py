"""How options are declared: what each must say of itself, the language of conditions, and that nothing set is ignored."""

from __future__ import annotations

import dataclasses
import re
import shlex

import pytest
from config_arms import DISTILL, PAIRS, PIPE, REWARD_MODEL, SUPERVISED, TAIL, error, given
from refusals import refused

from jaxrl_post import config
from jaxrl_post.config import fields
from jaxrl_post.simulate import settings

OPTIONS = [*fields.options(config.Config), *fields.options(settings.Simulation)]
NAMES = [option.name for option in fields.options(config.Config)]
GAE = ("algorithm.adv_estimator=gae",)
ENVIRONMENT = ("environment.name=jaxrl_post.rewards.environments.calculator:Calculator",)
NO_NUMBER = (
    "seed",
    "workload.tv",
    "sampling.temperature",
    "eval.temperature",
)  # and what algorithm, optimizer, critic and lora have no unit for


def named(override: str) -> str:
    """The option of an override, also of one inside a mapping."""
    return next(name for name in NAMES if override.startswith((f"{name}=", f"{name}.")))


def test_every_option_says_what_it_does():
    assert len(OPTIONS) > 120
    for option in OPTIONS:
        about = option.about
        assert about.doc[-1:] == "." and about.doc[0] not in " ." and len(about.doc.split()) <= 48, option.name
        assert all(len(sentence.split()) <= 30 for sentence in about.doc.split(". ")), option.name
        assert not about.why or about.used_when.text, option.name
        assert (about.low is not None) == (option.kind in (int, float) and option.name != "reward_slope"), option.name
        assert option.default in about.choices or not about.choices, option.name


def test_every_number_has_a_unit():
    """But for factors of the algorithm, the optimizer, the critic and LoRA, which are plain numbers."""
    bare = {option.name for option in OPTIONS if option.kind in (int, float) and not option.about.unit}
    assert {name for name in bare if not name.startswith(("algorithm.", "optimizer.", "critic.", "lora."))} == set(
        NO_NUMBER
    )
    assert not [option.name for option in OPTIONS if option.name.endswith("_s") and "seconds" not in option.about.unit]


@pytest.mark.parametrize(
    "text, value, holds",
    [
        ("a=x", "x", True),
        ("a=x", "y", False),
        ("a=x|y", "y", True),
        ("a!=x|y", "y", False),
        ("a!=x|y", "z", True),
        ("a=x*", "xyz", True),
        ("a=x*", "yx", False),
        ("a!=x*", "xyz", False),
        ("a=", "", True),
        ("a=", (), True),
        ("a=", {}, True),
        ("a=", (0,), False),
        ("a!=", "x", True),
        ("a>0", 1, True),
        ("a>0", 0, False),
        ("a>0.5", 0.6, True),
        ("a=0", 0.0, True),
        ("a=1", True, None),
        ("a=true", True, True),
        ("a=false", True, False),
        ("a!=false", True, True),
        ("", 3, True),
        ("a=x or a=y", "y", True),
        ("a=x and a!=x", "x", False),
        ("a=z or a=x and a!=y", "x", True),
    ],
)
def test_the_language_of_conditions(text, value, holds):
    found = fields.parse(text)
    if holds is None:
        with pytest.raises(KeyError):
            found.holds(lambda name: value)
    else:
        assert found.holds(lambda name: value) is holds


def test_alternatives_bind_weaker_than_conjunctions():
    found = fields.parse("a=1 or b=1 and c=1")
    values = [dict(zip("abc", map(int, bits))) for bits in ("100", "010", "001", "011", "000")]
    assert [found.holds(one.get) for one in values] == [True, False, False, True, False]
    assert found.names == ("a", "b", "c")


@pytest.mark.parametrize(
    "text, words",
    [
        ("a=x|y", "a is 'x' or 'y'"),
        ("a!=x", "a is not 'x'"),
        ("a=v|x|y|z", "a is one of 'v', 'x', 'y', 'z'"),
        ("a!=x|y", "a is none of 'x', 'y'"),
        ("a>0", "a is above 0"),
        ("a=task:*", "a begins with 'task:'"),
        ("a!=task:*", "a does not begin with 'task:'"),
        ("a=", "a is empty"),
        ("a!=", "a is not empty"),
        ("a=true", "a is true"),
        ("a!= and a!=task:*", "a is not empty and does not begin with 'task:'"),
        ("a=0 and b=x or c>1", "a is 0 and b is 'x', or c is above 1"),
    ],
)
def test_conditions_as_words(text, words):
    assert fields.parse(text).words() == words


@pytest.mark.parametrize("text", ["a", "a<3", "a == b", "a=x or", "a=x, b=y", "and"])
def test_a_condition_that_is_none_is_refused(text):
    refused("must be name=value, name!=value or name>number", fields.parse, text)


@pytest.mark.parametrize("schema", [config.Config, settings.Simulation])
def test_every_condition_names_an_option_and_a_value_that_it_may_have(schema):
    known = {option.name: option for option in fields.options(schema)}
    for option in known.values():
        for term in option.about.used_when.terms():
            asked = known[term.name]
            if asked.about.choices:
                assert set(term.values) <= set(asked.about.choices), option.name
            elif asked.kind is bool:
                assert set(term.values) <= {"true", "false"}, option.name
            elif asked.kind in (int, float):
                assert all(float(value) >= asked.about.low for value in term.values), option.name


def test_what_a_default_is_read_for_is_not_asked():
    """An option at its default is never refused, whatever else is set."""
    plain = config.resolve(given())
    for section in ("engine", "scheduler", "algorithm", "eval", "speculation"):
        config.resolve(
            given(),
            [
                f"{section}.{f.name}={getattr(getattr(plain, section), f.name)!r}".replace("'", "")
                for f in dataclasses.fields(getattr(plain, section))
                if f.name != "task"
            ],
        )


# What nothing would read: options with values other than their defaults, what else is set, and what makes each count.
_IGNORED = [
    (
        "engine.page_size=8 engine.pages=2000 engine.row_sizes=[64] engine.head_rows=64 "
        "engine.steps_per_dispatch=4 engine.refill_slots=1 engine.dtype=bfloat16 engine.cost_table=x.json engine.one_graph=true "
        "engine.prompt_rows=64 speculation.drafter=ours sampling.stop_strings=['.']",
        (*SUPERVISED, "eval.prompts=0"),
        SUPERVISED,
    ),
    ("engine.layouts=[2]", ("mesh.data=2", *SUPERVISED), ("mesh.data=2",)),
    (
        "engine.sleep=true sampling.top_k=5 algorithm.use_kl_in_reward=true "
        "algorithm.rollout_is=token algorithm.rollout_rs=token_k1 algorithm.prox_logp_method=rollout "
        "algorithm.overlong_buffer=8 alarms.max_mismatch=0.5 data.sources=['a.jsonl'] "
        "curriculum.interest=variance curriculum.skip_epochs=2 algorithm.top_entropy_quantile=0.2",
        SUPERVISED,
        (),
    ),
    ("sampling.top_p=0.5", SUPERVISED, ("sampling.top_k=5",)),
    ("sampling.keep_mask=false", (), ("sampling.top_k=5",)),
    ("sampling.keep_routes=false", SUPERVISED, ()),
    ("mesh.engine_tensor=2", ("mesh.data=2", *SUPERVISED, "eval.prompts=0"), ("mesh.data=2", *SUPERVISED)),
    ("mesh.engine_expert=2", ("mesh.data=2", *SUPERVISED, "eval.prompts=0"), ("mesh.data=2", *SUPERVISED)),
    ("batch.split_head=yes", ("mesh.data=2",), ("mesh.fsdp=2",)),
    ("model.remat_policy=attention", (), ("model.remat=true",)),
    ("engine.carry_over=verify scheduler.max_unscored=64 scheduler.max_ready=64 scheduler.interleave=0.5", (), PIPE),
    ("engine.carry_over=verify scheduler.ahead=2", TAIL, PIPE),
    (
        "engine.carry_over=verify scheduler.max_unscored=64 scheduler.max_ready=64 scheduler.interleave=0.5",
        ("scheduler.name=pipeline",),
        PIPE,
    ),
    ("engine.carry_share=0.5", ("engine.carry_over=keep", *PIPE), ("engine.carry_over=auto", *PIPE)),
    ("engine.weights=int8", (*SUPERVISED, "eval.prompts=0"), ("algorithm.rollout_is=token",)),
    ("engine.kv=int8", (*SUPERVISED, "eval.prompts=0"), ("algorithm.rollout_is=token",)),
    ("engine.products=fixed", (*SUPERVISED, "eval.prompts=0"), ()),
    ("engine.uncorrected=true", (), ("engine.kv=int8",)),
    ("speculation.width=5", (), ("speculation.drafter=histospec",)),
    ("speculation.clones=false", (), ("speculation.drafter=ngram",)),
    ("speculation.prompt_entries=9999", ("speculation.drafter=ngram",), ("speculation.drafter=histospec_rewards",)),
    ("speculation.shared_entries=9999", ("speculation.drafter=histospec",), ("speculation.drafter=ours",)),
    ("speculation.live_entries=9999", ("speculation.drafter=histospec",), ("speculation.drafter=ngram",)),
    ("scheduler.auto_history=runs/x", (), ("scheduler.name=auto",)),
    ("scheduler.over=1.25", (), ("scheduler.name=tail_batching",)),
    ("scheduler.over=1.25", ("scheduler.name=auto",), ("scheduler.name=tail_batching",)),
    ("scheduler.over=1.25", PIPE, ("scheduler.name=rollpacker",)),
    ("scheduler.over_samples=1.25", (), ("scheduler.name=rollpacker",)),
    ("scheduler.over_samples=1.25", TAIL, ("scheduler.name=rollpacker",)),
    ("scheduler.prefix_mode=restart scheduler.long_batches=2 scheduler.lane=0.5", (), TAIL),
    ("scheduler.prefix_mode=restart", PIPE, TAIL),
    ("scheduler.long_batches=2", ("scheduler.name=rollpacker", "scheduler.over=2"), TAIL),
    ("scheduler.stream=4", PIPE, ()),
    ("scheduler.max_staleness=2", (), ("scheduler.name=pipeline",)),
    ("scheduler.max_waves=3 scheduler.filter_metric=acc", (), ("scheduler.filter_groups=true",)),
    (
        "algorithm.gamma=0.9",
        ("algorithm.adv_estimator=reinforce_plus_plus_baseline",),
        ("algorithm.adv_estimator=reinforce_plus_plus",),
    ),
    ("algorithm.clip_ratio_low=0.1", ("algorithm.loss_mode=sapo",), ("algorithm.loss_mode=cispo",)),
    (
        "algorithm.clip_ratio_low=0.1 algorithm.clip_ratio_c=3 algorithm.use_kl_in_reward=true "
        "algorithm.overlong_buffer=8 reward.shuffle=true algorithm.opsm_delta=0.1 "
        "algorithm.positive_nll_coef=0.1",
        ("algorithm.adv_estimator=ones",),
        (),
    ),
    ("algorithm.clip_ratio_high=0.1", SUPERVISED, ("algorithm.loss_mode=gspo",)),
    ("algorithm.clip_ratio_c=3", ("algorithm.loss_mode=gspo",), ()),
    ("algorithm.tau_pos=2", (), ("algorithm.loss_mode=sapo",)),
    ("algorithm.dpo_beta=0.5", (), PAIRS),
    ("algorithm.label_smoothing=0.1", (*PAIRS, "algorithm.loss_mode=ipo"), PAIRS),
    ("algorithm.neftune_alpha=5 algorithm.label_smoothing=0.1", REWARD_MODEL, PAIRS),
    ("algorithm.neftune_alpha=5 eval.completions=8", (), SUPERVISED),
    ("algorithm.center_rewards_coefficient=0.1", PAIRS, REWARD_MODEL),
    ("algorithm.tau_neg=2", ("algorithm.loss_mode=cispo",), ("algorithm.loss_mode=sapo",)),
    (
        "algorithm.tau_neg=2",
        ("algorithm.adv_estimator=ones", "algorithm.loss_mode=sapo"),
        ("algorithm.loss_mode=sapo",),
    ),
    ("algorithm.kl_loss_type=k1", ("algorithm.use_kl_in_reward=true",), ("algorithm.kl_loss_coef=0.1",)),
    ("algorithm.kl_coef=0.1", ("algorithm.kl_loss_coef=0.1",), ("algorithm.use_kl_in_reward=true",)),
    ("algorithm.rollout_is_threshold=[3]", ("algorithm.rollout_rs=token_k2",), ("algorithm.rollout_is=span",)),
    ("algorithm.rollout_rs_threshold=[3]", ("algorithm.rollout_is=token",), ("algorithm.rollout_rs=token_k3",)),
    ("algorithm.min_ess=0.5", (*SUPERVISED, "scheduler.mini_batches=2"), PIPE),
    ("algorithm.max_rollout_kl=0.5", (*SUPERVISED, "scheduler.mini_batches=2"), ("scheduler.mini_batches=2",)),
    ("algorithm.overlong_penalty=2", (), ("algorithm.overlong_buffer=8",)),
    (
        "watchdog.evaluate_s=9 eval.data=b.jsonl eval.samples=1 eval.temperature=0.5 eval.top_p=0.5 "
        "eval.every=2 eval.at=[2] eval.show=1",
        ("eval.prompts=0",),
        (),
    ),
    ("optimizer.final_lr_ratio=0.5", (), ("optimizer.schedule=cosine",)),
    (
        "data.format=trl data.template=a{prompt} data.chat=true data.system_prompt=s data.duplicates=drop "
        "data.source=s data.columns.id=n",
        ("data.train=task:sums", "eval.data=task:sums"),
        ("data.train=a.jsonl", "eval.data=b.jsonl"),
    ),
    (
        "data.format=trl data.template=a{prompt} data.chat=true data.system_prompt=s data.duplicates=drop "
        "data.source=s data.columns.id=n",
        ("data.train=task:sums", "eval.data=task:sums"),
        ("eval.data=b.jsonl",),
    ),
    ("data.chat_template_kwargs.think=1", ("data.train=task:sums",), ("data.train=a.jsonl",)),
    ("data.chat_template_kwargs.think=1", ("data.train=task:sums",), ("environment.name=calculator",)),
    ("data.assistant_only_loss=true", SUPERVISED, ("data.train=a.jsonl", *SUPERVISED)),
    ("data.assistant_only_loss=true", ("data.train=a.jsonl",), ("data.train=a.jsonl", *SUPERVISED)),
    ("data.overlong=cut", ("data.train=a.jsonl", *SUPERVISED, "eval.prompts=0"), ("data.train=a.jsonl", *SUPERVISED)),
    ("data.size=8 eval.task.more=1", ("data.train=a.jsonl",), ()),
    ("data.train=a.jsonl data.task.more=1", ("data.sources=['task:sums','task:sorting']",), ()),
    ("data.weights=[2]", (), ("data.sources=['task:sums']",)),
    ("curriculum.interest=variance history.max_bytes=9", ("history.epochs=0",), ()),
    ("curriculum.share=0.25 curriculum.weighted=true", (), ("curriculum.interest=variance",)),
    ("curriculum.uniform=0.5", ("curriculum.skip_epochs=1",), ("curriculum.interest=failure",)),
    ("curriculum.solved=0.9", ("curriculum.interest=variance",), ("curriculum.skip_epochs=1",)),
    ("curriculum.hopeless=0.1 curriculum.groups=2", (), ("curriculum.skip_epochs=1",)),
    ("data.task.more=1", ("data.train=a.jsonl", "eval.data=b.jsonl"), ("data.train=a.jsonl", "eval.data=task:sums")),
    ("reward.test_limit_s=4", ("reward.adaptive_limit=true", "reward.timeout_s=60"), ()),
    ("eval.task.more=1", ("eval.data=b.jsonl",), ("eval.data=task:sums",)),
    ("checkpoint.keep_last=9 checkpoint.max_failures=9", ("checkpoint.every=0",), ()),
    ("logger.project=p logger.name=n", (), ("logger.wandb=offline",)),
    (
        "algorithm.lam=0.9 algorithm.lam_value=0.9 algorithm.lam_alpha=0.1 critic.warmup_steps=2 "
        "critic.cliprange_value=0.1",
        (),
        GAE,
    ),
    (
        "algorithm.lam=0.9",
        (*GAE, "algorithm.lam_alpha=0.1", "algorithm.lam_value=1"),
        (*GAE, "algorithm.lam_alpha=0.1"),
    ),
    ("algorithm.old_kl_coef=0.1", ("algorithm.loss_mode=gpg",), ("algorithm.loss_mode=dro",)),
    ("algorithm.clip_cov_ratio=0.1", (), ("algorithm.loss_mode=clip_cov",)),
    (
        "algorithm.clip_cov_lb=2 algorithm.clip_cov_ub=2",
        ("algorithm.loss_mode=kl_cov",),
        ("algorithm.loss_mode=clip_cov",),
    ),
    ("algorithm.kl_cov_ratio=0.1", (), ("algorithm.loss_mode=kl_cov",)),
    ("algorithm.ppo_kl_coef=0.2", ("algorithm.loss_mode=clip_cov",), ("algorithm.loss_mode=kl_cov",)),
    ("algorithm.opsm_delta=0.1", ("algorithm.loss_mode=gpg",), ()),
    ("algorithm.use_bias_correction_kl=true", (), ("algorithm.kl_loss_coef=0.1",)),
    ("algorithm.gdpo_reward_weights=[1]", (), ("algorithm.adv_estimator=gdpo", "algorithm.gdpo_reward_keys=['a']")),
    ("algorithm.gdpo_reward_keys=['a','b']", (), ("algorithm.adv_estimator=gdpo",)),
    ("algorithm.rae_decay=0.5", (), ("algorithm.adv_estimator=rae",)),
    ("algorithm.kl_target=0.1", (), ("algorithm.use_kl_in_reward=true",)),
    (
        "algorithm.kl_horizon=99",
        ("algorithm.use_kl_in_reward=true",),
        ("algorithm.use_kl_in_reward=true", "algorithm.kl_target=0.1"),
    ),
    ("critic.trunk=policy", ("algorithm.adv_estimator=remax",), GAE),
    ("critic.path=m", (*GAE, "critic.trunk=policy"), GAE),
    ("critic.lr=0.5", (), ("algorithm.adv_estimator=gae_turn",)),
    ("critic.loss_coef=0.1", GAE, (*GAE, "critic.trunk=policy")),
    ("algorithm.gkd_beta=0.5", DISTILL, (*DISTILL, "algorithm.loss_mode=gkd")),
    ("algorithm.opd_kl_coef=0.5", DISTILL, DISTILL[1:]),
    ("algorithm.use_kl_in_reward=true reward.shuffle=true", DISTILL, ()),
    ("teacher.path=m", (), ("algorithm.opd_kl_coef=0.5",)),
    ("teacher.dtype=bfloat16", (), DISTILL),
    (
        "lora.alpha=8 lora.targets=['q_proj'] lora.rslora=true lora.base_dtype=bfloat16 lora.adapter=a",
        (),
        ("lora.rank=4",),
    ),
    (
        "reward.functions=['a.b:c'] reward.weights=[2] reward.model=m reward.workers=2 reward.timeout_s=60 "
        "reward.sandbox=none reward.skip_special_tokens=false",
        ENVIRONMENT,
        (),
    ),
    ("reward.model_weight=2", (), ("reward.model=m",)),
    ("judge.model=m", ENVIRONMENT, ("judge.question={answer}",)),
    (
        "judge.question={answer}! judge.high=2 judge.weight=2 judge.max_length=512 judge.max_tokens=2 "
        "judge.asleep=true",
        (),
        ("judge.model=m", "judge.question={answer}"),
    ),
    ("reward.adaptive_limit=true", ENVIRONMENT, ("reward.timeout_s=60",)),
    ("environment.workers=3", ("environment.name=harness",), ENVIRONMENT),
    ("algorithm.router_replay_reference=false", (), ("algorithm.router_replay=true",)),
    (
        "environment.arguments.size=4 environment.workers=2 environment.timeout_s=60 environment.max_turns=2 "
        "environment.max_s=9 environment.delay=4 environment.tool_calls=hermes environment.cut_turns=mask",
        (),
        ENVIRONMENT,
    ),
]
IGNORED = [(option, others, enough) for options, others, enough in _IGNORED for option in options.split()]


SAID = re.compile(r"([\w.]+)=.* would be ignored: it is read only where .*, and here .*; leave it at .* or change ")


def test_what_nothing_would_read_is_refused():
    """With one sentence that names it, and not where something reads it; alone the same settings are allowed."""
    wrong = []
    for option, others, enough in IGNORED:
        found = SAID.match(sentence := error(*others, option))
        if found is None or found[1] != named(option):
            wrong.append((option, sentence))
        config.resolve(given(), others)
        config.resolve(given(), [*enough, *(["scheduler.over=1.25"] if TAIL[0] in enough else []), option])
    assert wrong == []


def test_every_condition_is_in_the_table():
    conditional = {option.name for option in fields.options(config.Config) if option.about.used_when.text}
    assert conditional == {
        name for name in NAMES for option, _, _ in IGNORED if option.startswith((f"{name}=", f"{name}."))
    }


def test_the_sentence_of_what_is_ignored():
    assert error("scheduler.lane=0.5") == (
        "scheduler.lane=0.5 would be ignored: it is read only where scheduler.name is 'tail_batching' (only tail batching can "
        "send a group to a long round at once), and here scheduler.name='sync'; leave it at 0.0 or change scheduler.name"
    )
    assert "scheduler.name is 'tail_batching' or 'rollpacker' (sync waits for all it launches" in error(
        "scheduler.over=2"
    )
    assert "has no log-probs of an engine" in error(*SUPERVISED, "algorithm.rollout_is=token")


def test_all_that_would_be_ignored_is_said_at_once_and_the_flags_leave_it_at_its_default():
    asked = ["model.preset=tiny", "eval.data=task:sums", "eval.samples=2", "eval.at=[1]", "eval.prompts=0"]
    with pytest.raises(ValueError, match="eval.data='task:sums' would be ignored") as error:
        config.resolve(config.default(), asked)
    _, _, flags = str(error.value).rpartition("to leave all of them at their defaults, add ")
    undone = [flag.removeprefix("--config.") for flag in shlex.split(flags)]
    assert len(undone) == 3
    assert config.resolve(config.default(), [*asked, *undone]).eval.prompts == 0
