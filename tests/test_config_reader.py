"""Reading configs: defaults, overrides and files, and one sentence for every kind of mistake."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from config_arms import SUPERVISED, error, given
from refusals import refused

from jaxrl_post import config

CONFIGS = Path(__file__).resolve().parents[1] / "configs"


def test_defaults_are_those_of_the_dataclasses():
    assert config.resolve(given()) == config.Config(model=config.PolicyConfig(preset="tiny"))


def by_platform(*overrides, **how) -> tuple:
    """Returns the options whose default depends on the platform."""
    got = config.resolve(given(), overrides, **how)
    return got.model.compute_dtype, got.engine.dtype, got.engine.page_size


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_what_is_not_set_meets_the_kernels_of_an_accelerator(platform):
    on = dict(platform=platform)
    assert by_platform() == ("float32", "float32", 16) and by_platform(**on) == ("bfloat16", "bfloat16", 64)
    assert by_platform("engine.page_size=8", "engine=default", **on) == ("bfloat16", "bfloat16", 64)
    assert by_platform("engine.page_size=8", "engine.page_size=auto", **on) == ("bfloat16", "bfloat16", 64)
    # What is set stays, though it is the default of CPUs.
    assert by_platform("model.compute_dtype=float32", "engine.page_size=16", **on) == ("float32", "bfloat16", 16)
    # What nothing reads is not set.
    assert by_platform(*SUPERVISED, "eval.prompts=0", **on) == ("bfloat16", "float32", 16)


def test_a_run_that_goes_on_keeps_its_recorded_defaults():
    then = config.to_dict(config.resolve(given()))
    assert by_platform(platform="gpu", recorded=then) == ("float32", "float32", 16)
    assert by_platform("engine.page_size=32", platform="gpu", recorded=then) == ("float32", "float32", 32)


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


@pytest.mark.parametrize(
    "changes, verifies",
    [
        ([], False),
        (["speculation.drafter=ours"], True),
        (["scheduler.name=auto"], True),
        (["scheduler.name=tail_batching", "scheduler.over=1.25"], True),
        (["scheduler.name=tail_batching", "scheduler.over=1.25", "scheduler.prefix_mode=recompute"], False),
        (["scheduler.name=pipeline"], False),
        (["scheduler.name=pipeline", "scheduler.max_staleness=1", "engine.carry_over=verify"], True),
    ],
)
def test_tokens_may_be_proposed(changes, verifies):
    assert config.resolve(given(), changes).verifies is verifies


# What ml_collections lets pass.


def test_true_is_no_int():
    assert "engine.slots must be int, got bool True" in error(engine__slots=True)
    assert "engine.slots must be int, got bool True" in error("engine.slots=true")
    assert "optimizer.lr must be float, got bool True" in error("optimizer.lr=True")
    assert "model.remat must be bool, got int 1" in error("model.remat=1")


def test_an_unknown_key_inside_a_dict_override_is_found():
    out = given()
    out.engine = {"slot": 3}  # a locked ConfigDict takes it
    refused("unknown name 'engine.slot'; nearest valid name is 'engine.slots'", config.resolve, out)
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
        "reinforce_plus_plus_baseline, grpo_passk, lite_ppo, gpg, remax, gdpo, rae, "
        "optimal_token_baseline, gae, gae_turn, ones, pairs, distill; nearest is 'grpo'"
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
        ("scheduler.group", "scheduler.group_size"),
        ("scheduler.filter", "scheduler.filter_groups"),
        ("optimizer.max", "optimizer.max_grad_norm"),
    ],
)
def test_an_unknown_name_gets_the_nearest_one(wrong, right):
    assert error(f"{wrong}=1").startswith("config: unknown name ")
    assert error(f"{wrong}=1").endswith(f"nearest valid name is {right!r}")


def test_a_name_like_no_other_gets_the_list():
    assert "unknown name 'mesh.zzzzzzzz'; valid names are data, fsdp, expert, tensor" in error("mesh.zzzzzzzz=1")


def test_malformed_overrides():
    assert "--config.engine.slots: write --config.engine.slots=VALUE" in error("engine.slots")
    assert "--config.engine is a section: set one of its fields" in error("engine=3")
    assert "--config.seed.x: seed has no fields" in error("seed.x=3")


def test_a_section_is_given_its_defaults():
    """Also what a file set there; later overrides count."""
    got = config.resolve(
        given(engine__slots=3, engine__pages=99, eval__at=(2,)), ["engine=default", "engine.page_size=8"]
    )
    assert got.engine == config.EngineConfig(page_size=8) and got.eval.at == (2,)
    assert "or all of them by --config.engine=default" in error("engine=3")


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


def test_a_relative_path_in_a_file_is_looked_for_beside_it_first(tmp_path, monkeypatch):
    """Then in the working directory. One of an override is looked for there alone, and what is nowhere stays as it is."""
    recipe, elsewhere = tmp_path / "recipes", tmp_path / "elsewhere"
    for folder in (recipe, elsewhere):
        (folder / "words").mkdir(parents=True)
        (folder / "both.jsonl").touch()
    (recipe / "grade.py").touch()
    (elsewhere / "here.jsonl").touch()
    path = write(
        recipe,
        "    config.model.preset, config.model.tokenizer = 'tiny', 'words'\n    config.run_dir = 'words'\n"
        "    config.data.train, config.eval.data = 'both.jsonl', 'here.jsonl'\n"
        "    config.reward.functions = ('grade.py:f', 'a.b:c', 'none.py:g')\n    return config",
    )
    monkeypatch.chdir(elsewhere)
    got = config.resolve(config.load(path))
    assert got.model.tokenizer == str(recipe / "words") and got.run_dir == "words"
    assert (got.data.train, got.eval.data) == (str(recipe / "both.jsonl"), str(elsewhere / "here.jsonl"))
    assert got.reward.functions == (f"{recipe / 'grade.py'}:f", "a.b:c", "none.py:g")
    got = config.resolve(config.load(path), ["data.train=both.jsonl", "eval.data=task:sums", "model.path=nowhere"])
    assert (got.data.train, got.eval.data) == (
        str(elsewhere / "both.jsonl"),
        "task:sums",
    ) and got.model.path == "nowhere"
    assert config.resolve(config.to_dict(got)) == got


def test_files_that_are_none(tmp_path):
    path = write(tmp_path, "    return 3")
    refused("get_config.. must return the ConfigDict .* got int", config.load, path)
    refused("no such Python file; nearest is .*recipe.py", config.load, str(tmp_path / "recip.py"))
    refused("no such Python file; nearest is .*recipe.py", config.load, str(tmp_path / "recipe"))
    refused("no such Python file$", config.load, str(tmp_path / "nowhere" / "x.py"))
    with pytest.raises(ValueError, match="no such Python file; nearest is .*configs/demo/tail_batching.py"):
        config.load(str(CONFIGS / "demo_tail_batchin.py"))
    (tmp_path / "empty.py").write_text("")
    refused("has no attribute 'get_config'", config.load, str(tmp_path / "empty.py"))


@pytest.mark.parametrize(
    "override,words",
    [
        ("steps={[]: 1}", "steps must be int, got str"),
        ("steps=" + "(" * 90 + ")" * 90, "steps must be int"),
        ("steps=" + "[" * 3000, "steps must be int"),
        ("steps=" + "-" * 30_000 + "1", "steps must be int"),
        ("optimizer.lr=" + "9" * 400, "optimizer.lr must be float, got int 99999"),
        ("a" * 5000 + "=1", "no option has a name of 5000 characters"),
        ("name.b=1", "name has no fields"),
    ],
)
def test_an_override_of_any_kind_is_one_sentence_of_bounded_length(override, words):
    with pytest.raises(ValueError, match=words) as caught:
        config.resolve(given(), [override])
    assert type(caught.value) is ValueError and len(str(caught.value)) < 700


@pytest.mark.parametrize(
    "text,words",
    [
        ("raise SystemExit(0)", ":1: the file ends Python, with exit code 0"),
        ("x = 1\nraise MemoryError", ":2: MemoryError"),
        ("raise StopIteration", ":1: StopIteration"),
        ("x = " + "-" * 50_000 + "1", "given.py:?.*: (MemoryError|.*nested|.*recursion|.*too complex)"),
    ],
)
def test_a_config_file_that_ends_python_is_one_sentence(tmp_path, text, words):
    (tmp_path / "given.py").write_text(text)
    refused(words, config.load, str(tmp_path / "given.py"))


@pytest.mark.parametrize(
    "old, new",
    {
        "demo_tail_batching.py": "demo/tail_batching.py",
        "demo_ppo.py": "demo/ppo.py",
        "demo_sft.py": "demo/sft.py",
        "judge_sft.py": "demo/judge_sft.py",
        "nucleus.py": "demo/nucleus.py",
        "ppo.py": "recipes/ppo.py",
        "deepseek_v3_2.py": "recipes/deepseek_v3_2.py",
        "stories.py": "models/stories.py",
        "gsm8k_qwen2_5_7b.py:v5e-16": "models/gsm8k_qwen2_5_7b.py:v5e-16",
    }.items(),
)
def test_a_config_opens_under_the_name_that_it_had_in_the_last_release(old, new, capsys, monkeypatch):
    monkeypatch.chdir(CONFIGS)
    assert config.load(new) == config.load(str(CONFIGS / new)) and not capsys.readouterr().err
    for asked in (old, str(CONFIGS / old)):
        assert config.load(asked) == config.load(new)
        said = capsys.readouterr()
        assert not said.out and said.err.count("\n") == 1 and f"{new.partition(':')[0]};" in said.err


def test_no_other_folder_has_names_of_the_last_release(tmp_path):
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "dpo.py").write_bytes((CONFIGS / "demo" / "dpo.py").read_bytes())
    refused("no such Python file$", config.load, str(tmp_path / "demo_dpo.py"))


def test_a_config_file_is_read_as_it_is_now(tmp_path):
    """Python's cache of compiled files knows a text by its second and its size."""
    for words in ("raise StopIteration", "raise SystemExit(0)"):
        (tmp_path / "given.py").write_text(words)
        refused("StopIteration" if "Stop" in words else "ends Python", config.load, str(tmp_path / "given.py"))
    refused("no such Python file", config.load, "a" * 5000)
