"""The config: defaults, files, overrides, and one sentence for every kind of mistake."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import ml_collections
import pytest

from jaxrl_post import config
from jaxrl_post.algorithms.advantages import WHOLE_ROUND

PIPE = ("scheduler.name=pipeline", "scheduler.max_staleness=2")
TAIL = ("scheduler.name=tail_batching", "scheduler.over=1.25")


def given(**changes) -> ml_collections.ConfigDict:
    """The default with a preset, and dotted names (a__b) changed."""
    out = config.default()
    out.model.preset = "tiny"
    for name, value in changes.items():
        out.update_from_flattened_dict({name.replace("__", "."): value})
    return out


def error(*overrides: str, **changes) -> str:
    """The sentence that resolving gives: exactly one line, no trailing full stop noise."""
    with pytest.raises(ValueError) as caught:
        config.resolve(given(**changes), overrides)
    sentence = str(caught.value)
    assert "\n" not in sentence and len(sentence) < 400
    return sentence


def test_defaults_are_those_of_the_dataclasses():
    assert config.resolve(given()) == config.Config(model=config.Model(preset="tiny"))


def test_overrides_win_in_order_and_keep_their_kind():
    got = config.resolve(
        given(engine__slots=4),
        [
            "engine.slots=8",
            "engine.slots=16",
            "optimizer.lr=3",
            "optimizer.weight_decay=1e-2",
            "model.remat=true",
            "engine.row_sizes=64,128,256",
            "reward.functions=['a.b:c', 'd.py:e']",
            "name=7",
            "model.path=True",
            "data.task.digits=3",
            "data.task.kind=easy",
            "data.task.deep.x=[1]",
        ],
    )
    assert got.engine.slots == 16
    assert got.optimizer.lr == 3.0 and isinstance(got.optimizer.lr, float) and got.optimizer.weight_decay == 0.01
    assert got.model.remat is True
    assert got.engine.row_sizes == (64, 128, 256)
    assert got.reward.functions == ("a.b:c", "d.py:e")
    assert got.name == "7" and got.model.path == "True"  # a text stays text
    assert dict(got.data.task) == {"digits": 3, "kind": "easy", "deep": {"x": [1]}}
    assert config.resolve(given(), ["data.task={'digits': 2}"]).data.task == {"digits": 2}
    assert config.resolve(given(), ["name=a=b"]).name == "a=b"


def test_resolving_leaves_its_input_alone():
    plain = given().to_dict()
    before = json.dumps(plain, sort_keys=True)
    config.resolve(plain, ["engine.slots=3", "data.task.digits=3"])
    assert json.dumps(plain, sort_keys=True) == before


def test_the_result_is_frozen_and_plain_json_gives_it_back():
    got = config.resolve(given(data__task={"digits": 3}), ["engine.row_sizes=[64]", "reward.weights=[0.5]"])
    with pytest.raises(dataclasses.FrozenInstanceError):
        got.engine.slots = 3
    with pytest.raises(TypeError):
        got.data.task["digits"] = 4
    assert config.resolve(json.loads(json.dumps(config.to_dict(got)))) == got


def test_derived_values():
    got = config.resolve(
        given(),
        [
            "mesh.data=2",
            "mesh.fsdp=2",
            "mesh.tensor=2",
            "scheduler.prompts=6",
            "scheduler.group_size=4",
            "engine.slots=10",
            "engine.max_length=50",
            "engine.page_size=16",
            "sampling.max_tokens=20",
        ],
    )
    assert (got.devices, got.replicas, got.rollouts_per_step) == (8, 4, 24)
    assert (got.head_rows, got.pages) == (10, 40)  # ceil(50 / 16) = 4 pages for each of 10 slots
    assert config.resolve(given(), ["engine.head_rows=99", "engine.pages=77"]).pages == 77


# What ml_collections lets pass.


def test_true_is_no_int():
    assert "engine.slots must be int, got bool True" in error(engine__slots=True)
    assert "engine.slots must be int, got bool True" in error("engine.slots=true")
    assert "optimizer.lr must be float, got bool True" in error("optimizer.lr=True")
    assert "model.remat must be bool, got int 1" in error("model.remat=1")


def test_an_unknown_key_inside_a_dict_override_is_found():
    out = given()
    out.engine = {"slot": 3}  # a locked ConfigDict takes it
    with pytest.raises(ValueError, match="unknown name 'engine.slot'; nearest valid name is 'engine.slots'"):
        config.resolve(out)
    assert "is a section" in error("engine={'slots': 3}")


def test_no_default_is_none():
    """ml_collections cannot override a None with a value of another type."""

    def values(node):
        return [leaf for value in node.values() for leaf in (values(value) if isinstance(value, dict) else [value])]

    assert None not in values(config.default().to_dict())
    assert "engine.slots must be int, got NoneType None" in error("engine.slots=None")


def test_a_type_is_checked_even_where_the_config_dict_would_cast():
    assert "engine.slots must be int, got float 8.0" in error("engine.slots=8.0")
    assert "engine.slots must be int, got str 'many'" in error("engine.slots=many")
    assert "optimizer.lr must be float, got str '1e-4x'" in error("optimizer.lr=1e-4x")
    assert "engine.row_sizes must be a list of int, got 64; write [64]" in error("engine.row_sizes=64")
    assert "engine.row_sizes[1] must be int, got str 'x'" in error("engine.row_sizes=[64,'x']")
    assert "sampling.stop_strings must be a list of str, got '###'; write ['###']" in error("sampling.stop_strings=###")
    assert "name must be str, got int 3" in error(name=3)


def test_ranges():
    assert "engine.slots=0 is below its bound; the nearest valid value is 1" in error("engine.slots=0")
    assert "optimizer.b1=1.0 is above its bound; the nearest valid value is 0.9999" in error("optimizer.b1=1")
    assert "optimizer.lr=-0.1 is below its bound" in error("optimizer.lr=-0.1")
    assert "optimizer.lr must be float, got float inf" in error("optimizer.lr=1e999")


def test_choices():
    sentence = error("algorithm.adv_estimator=gpro")
    assert (
        "algorithm.adv_estimator='gpro' is not one of grpo, dr_grpo, rloo, opo, maxrl, reinforce_plus_plus, "
        "reinforce_plus_plus_baseline, ones; nearest is 'grpo'"
    ) in sentence


# Names.


@pytest.mark.parametrize(
    "wrong, right",
    [
        ("slots", "engine.slots"),
        ("engine.slot", "engine.slots"),
        ("enigne.slots", "engine"),
        ("lr", "optimizer.lr"),
        ("engine.lr", "optimizer.lr"),
        ("engine.temprature", "sampling.temperature"),
        ("step", "steps"),
        ("sampling.temprature", "sampling.temperature"),
        ("optimizer.wd_decay", "optimizer.weight_decay"),
        ("group_size", "scheduler.group_size"),
        ("data.tasks", "data.task"),
        ("eval.tokens", "batch.tokens"),
    ],
)
def test_an_unknown_name_gets_the_nearest_one(wrong, right):
    assert error(f"{wrong}=1").startswith("config: unknown name ")
    assert error(f"{wrong}=1").endswith(f"nearest valid name is {right!r}")


def test_a_name_like_no_other_gets_the_list():
    assert "unknown name 'mesh.zzzzzzzz'; valid names are data, fsdp, tensor" in error("mesh.zzzzzzzz=1")


def test_malformed_overrides():
    assert "--config.engine.slots: write --config.engine.slots=VALUE" in error("engine.slots")
    assert "--config.engine is a section: set one of its fields" in error("engine=3")
    assert "--config.seed.x: seed has no fields" in error("seed.x=3")


# Cross-field rules.


@pytest.mark.parametrize(
    "overrides, sentence",
    [
        (["model.preset="], "model.path and model.preset are both empty"),
        (["sampling.top_p=0.0"], "sampling.top_p=0.0 leaves nothing to draw"),
        (["engine.slots=129"], "must reach engine.slots=129"),
        (["engine.row_sizes=[]"], "engine.row_sizes must hold at least one positive size"),
        (["engine.row_sizes=[64,-1]"], "engine.row_sizes must hold at least one positive size"),
        (["engine.head_rows=3"], "engine.head_rows=3 must be 0 or at least engine.slots=64"),
        (["sampling.max_tokens=512"], "sampling.max_tokens=512 must be below engine.max_length=512"),
        (
            ["engine.pages=31"],
            "engine.pages=31 cannot hold one rollout of engine.max_length=512 tokens: at least 32 pages",
        ),
        (
            ["batch.tokens=511"],
            "batch.tokens=511 cannot hold a rollout of engine.max_length=512 tokens; nearest valid value is 512",
        ),
        (["mesh.data=3"], "batch.rows=8 must be a multiple of mesh.data*mesh.fsdp=3; nearest valid value is 9"),
        (["scheduler.group_size=1"], "scheduler.group_size=1 must be at least 2"),
        (["algorithm.adv_estimator=reinforce_plus_plus_baseline", "scheduler.group_size=1"], "must be at least 2"),
        (
            ["scheduler.mini_batches=5"],
            "scheduler.mini_batches=5 must divide scheduler.prompts=32; nearest valid value is 4",
        ),
        (
            ["scheduler.mini_batches=4", "scheduler.ppo_epochs=2"],
            "steps=10 must be a multiple of the 8 optimizer steps of a "
            "round (scheduler.mini_batches * scheduler.ppo_epochs); nearest valid value is 16",
        ),
        (["scheduler.mini_batches=2", "eval.every=5"], "eval.every=5 must be a multiple of the 2 optimizer steps"),
        (["eval.at=[2,11,12]"], "eval.at=[11] is never reached: it must be at least 0 and at most steps=10"),
        (["eval.at=[-1]"], "eval.at=[-1] is never reached"),
        (["scheduler.mini_batches=2", "eval.at=[4,5]"], "eval.at=5 must be a multiple of the 2 optimizer steps"),
        (["algorithm.clip_ratio_c=1"], "algorithm.clip_ratio_c=1.0 must be 0 (off) or above 1"),
        (
            ["algorithm.clip_ratio_c=3", "algorithm.loss_mode=gspo"],
            "is of algorithm.loss_mode='vanilla' and not of 'gspo'",
        ),
        (["algorithm.loss_mode=sft", "algorithm.rollout_is=token"], "algorithm.loss_mode='sft' has no old log-probs"),
        (
            ["algorithm.loss_mode=sft", "algorithm.use_kl_in_reward=true"],
            "algorithm.loss_mode='sft' has no old log-probs",
        ),
        (["engine.name=demonstrations"], "supervised training is 'demonstrations' with 'sft' and 'ones'"),
        (
            ["algorithm.loss_mode=sft", "algorithm.adv_estimator=ones"],
            "engine.name='rows' with algorithm.loss_mode='sft'",
        ),
        (
            ["algorithm.prox_logp_method=loglinear", "algorithm.rollout_rs=token_k1"],
            "and algorithm.rollout_rs need; the nearest valid",
        ),
        (
            ["algorithm.prox_logp_method=rollout", "algorithm.rollout_is=token"],
            "algorithm.rollout_is='token' must be 'none'",
        ),
        (
            ["algorithm.prox_logp_method=loglinear", "algorithm.rollout_is=span"],
            "algorithm.rollout_is='span' must be 'token' or 'none'",
        ),
        (["algorithm.overlong_buffer=300"], "algorithm.overlong_buffer=300 is above sampling.max_tokens=256"),
        (["algorithm.adv_estimator=maxrl", "algorithm.overlong_buffer=3"], "'maxrl' needs rewards of at least 0"),
        (
            ["algorithm.rollout_is_threshold=[]"],
            "algorithm.rollout_is_threshold=() must be [upper] or [lower, upper], above 0 "
            "and rising, for algorithm.rollout_is='none'",
        ),
        (["algorithm.rollout_is_threshold=[2,1]"], "algorithm.rollout_is_threshold=(2.0, 1.0) must be"),
        (
            ["algorithm.rollout_rs=token_k3", "algorithm.rollout_rs_threshold=[0.1,1]"],
            "algorithm.rollout_rs_threshold=(0.1, 1.0) must be [upper], above 0",
        ),
        (["reward.weights=[1,2]"], "reward.weights has 2 entries, reward.functions 1"),
        (["scheduler.over=1.25"], "scheduler.name='sync' waits for all it launches: scheduler.over=1.25 and"),
        (
            ["scheduler.name=tail_batching"],
            "races prompts and drops no answer: scheduler.over=1.0 must be above 1, 1.25 is usual",
        ),
        ([*TAIL, "scheduler.over_samples=1.25"], "scheduler.over_samples=1.25 must be 1"),
        (["scheduler.name=rollpacker"], "scheduler.name='rollpacker' races nobody"),
        (
            ["scheduler.name=rollpacker", "scheduler.over=1.25", "speculation.drafter=ours"],
            "the answers that are hard to draft",
        ),
        (
            [*TAIL, "engine.name=demonstrations", "algorithm.loss_mode=sft", "algorithm.adv_estimator=ones"],
            "needs answers that take their time: engine.name='demonstrations' has none; the nearest valid name is 'sync'",
        ),
        (
            ["reward.test_limit_s=20"],
            "reward.timeout_s=10 ends a grader before the program that it judges reaches its limit of 20 s",
        ),
        (["reward.adaptive_limit=True"], "reaches its limit of 30 s"),
        (
            ["mesh.engine=3", "mesh.tensor=2"],
            "mesh.engine=3 must be a multiple of mesh.tensor=2, the devices of a replica; the nearest valid value is 2",
        ),
        (
            ["mesh.engine=1", "scheduler.mini_batches=2"],
            "mesh.engine=1 publishes after each optimizer step: scheduler.mini_batches=2",
        ),
        (["mesh.engine=2", "engine.layouts=[2]"], "mesh.engine=2: weights come in the midst of a round"),
        (
            ["scheduler.max_staleness=2"],
            "scheduler.max_staleness=2 is of scheduler.name='pipeline'; for 'sync' it must be 0",
        ),
        (
            ["scheduler.interleave=0.5"],
            "scheduler.interleave=0.5 is of scheduler.name='pipeline'; for 'sync' it must be 0",
        ),
        (
            [*PIPE, "mesh.engine=1", "scheduler.interleave=0.5"],
            "scheduler.interleave=0.5 divides the time of shared devices",
        ),
        (
            [*TAIL, "scheduler.ahead=2"],
            "scheduler.ahead=2 is of scheduler.name='pipeline'; for 'tail_batching' it must be 0",
        ),
        ([*PIPE, "scheduler.ppo_epochs=2"], "scheduler.mini_batches=1 and scheduler.ppo_epochs=2 must be 1"),
        ([*PIPE, "scheduler.over=1.25"], "scheduler.name='pipeline' has no rounds to race in: scheduler.over=1.25"),
        ([*PIPE, "scheduler.stream=4"], "scheduler.stream=4 hands over pieces of a round"),
        (
            [*PIPE, "scheduler.placement=longest_first"],
            "scheduler.placement='longest_first' orders the answers of a round",
        ),
        ([*PIPE, "mesh.data=2", "engine.layouts=[2]"], "engine.layouts=(2,) are changed between rounds"),
        (
            [*PIPE, "scheduler.max_unscored=31"],
            "scheduler.max_unscored=31 never holds a batch: it must be 0 or at least scheduler.prompts=32",
        ),
        (
            ["engine.carry_over=verify"],
            "engine.carry_over='verify' and engine.carry_share=1.0 are of answers that run while weights",
        ),
        (["algorithm.loss_mode=sft", "algorithm.min_ess=0.5"], "algorithm.loss_mode='sft' has no old log-probs"),
        (
            [*TAIL, "scheduler.lane=0.5", "history.epochs=0"],
            "scheduler.lane=0.5 asks the history which prompts are long, and history.epochs=0",
        ),
        (["scheduler.long_batches=2"], "scheduler.long_batches=2 is of the long rounds of 'tail_batching'"),
        (
            [*TAIL, "scheduler.long_batches=2", "scheduler.stream=4"],
            "with scheduler.name='tail_batching' and scheduler.stream=4 it",
        ),
        (["scheduler.stream=33"], "scheduler.stream=33 is above scheduler.prompts=32"),
        (
            ["scheduler.stream=4", "scheduler.ppo_epochs=2"],
            "weights stand still until the round's one commit: scheduler."
            "mini_batches=1 and scheduler.ppo_epochs=2 must be 1",
        ),
        (
            ["scheduler.stream=4", "scheduler.filter_groups=true"],
            "scheduler.stream=4 hands groups on before it is known",
        ),
        *[
            (
                ["scheduler.stream=4", f"algorithm.adv_estimator={name}"],
                f"algorithm.adv_estimator='{name}' whitens over all tokens "
                "of a round, which scheduler.stream=4 hands on in pieces; the nearest valid stream is 0",
            )
            for name in WHOLE_ROUND
        ],
    ],
)
def test_fields_that_contradict_each_other(overrides, sentence):
    assert sentence in error(*overrides)


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
            "algorithm.clip_ratio_c=1.5",
            "algorithm.overlong_buffer=511",
            "algorithm.rollout_rs=seq_mean_k1",
            "algorithm.rollout_rs_threshold=[0.5,2]",
        ],
    )
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


# Files.


def write(folder: Path, body: str) -> str:
    file = folder / "recipe.py"
    file.write_text(f"from jaxrl_post.config import default\ndef get_config():\n    config = default()\n{body}\n")
    return str(file)


def test_a_file_assigns(tmp_path):
    path = write(
        tmp_path,
        "    config.model.preset = 'tiny'\n    config.engine.slots = 4\n"
        "    config.data.task.digits = 3\n    config.eval.task = {'digits': 4}\n    return config",
    )
    got = config.resolve(config.load(path), ["engine.slots=5"])
    assert got.engine.slots == 5 and got.data.task == {"digits": 3} and got.eval.task == {"digits": 4}


@pytest.mark.parametrize(
    "body, line, sentence",
    [
        (
            "    config.engine.slot = 4\n    return config",
            4,
            "unknown name 'slot'; nearest valid name is 'engine.slots'",
        ),
        (
            "    x = 1\n    config.enginee = 4\n    return config",
            5,
            "unknown name 'enginee'; nearest valid name is 'engine'",
        ),
        (
            "    print(config.engine.slotz)\n    return config",
            4,
            "unknown name 'slotz'; nearest valid name is 'engine.slots'",
        ),
        ("    config.engine.slots = four\n    return config", 4, "name 'four' is not defined"),
        ("    config.engine.slots = = 4", 4, "invalid syntax"),
        ("    config.engine.slots = int('x')", 4, "invalid literal for int"),
        ("    import jaxrl_post.nothing", 4, "No module named 'jaxrl_post.nothing'"),
        ("    open('/nowhere/x.json')", 4, "[Errno 2] No such file or directory: '/nowhere/x.json'"),
        ("    config.steps = 1 // 0", 4, "integer division or modulo by zero"),
        ("    config.steps = [1][2]", 4, "list index out of range"),
        ("    assert config.steps == 3", 4, "AssertionError"),
        ("    raise RuntimeError('no\\nluck')", 4, "no"),
        ("    import json; json.loads('')", 4, "Expecting value"),
    ],
)
def test_a_mistake_in_a_file_is_one_sentence_with_its_line(tmp_path, body, line, sentence):
    path = write(tmp_path, body)
    with pytest.raises(ValueError) as caught:
        config.load(path)
    assert str(caught.value).startswith(f"--config={path}:{line}: ") and sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_that_are_none(tmp_path):
    path = write(tmp_path, "    return 3")
    with pytest.raises(ValueError, match="get_config.. must return the ConfigDict .* got int"):
        config.load(path)
    with pytest.raises(ValueError, match="no such Python file; nearest is .*recipe.py"):
        config.load(str(tmp_path / "recip.py"))
    with pytest.raises(ValueError, match="no such Python file; nearest is .*recipe.py"):
        config.load(str(tmp_path / "recipe"))
    with pytest.raises(ValueError, match="no such Python file$"):
        config.load(str(tmp_path / "nowhere" / "x.py"))
    (tmp_path / "empty.py").write_text("")
    with pytest.raises(ValueError, match="has no attribute 'get_config'"):
        config.load(str(tmp_path / "empty.py"))
