"""Plans for slices that are not there: names, words, refusals, seconds by hand, and the formulas beside the compilers."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import compiled_memories
import pytest

from jaxrl_post import main
from jaxrl_post.config import default, load, resolve
from jaxrl_post.launch.command_line import parse
from jaxrl_post.launch.parts import inputs
from jaxrl_post.launch.plan import activations, chips, device_less, memory_plan, roofline, slice_plan
from jaxrl_post.models.presets import PRESETS, published

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = ROOT / "configs"
SEVEN = "models/gsm8k_qwen2_5_7b.py:v5e-16"


@pytest.fixture(autouse=True)
def without_compilers(monkeypatch):
    monkeypatch.setattr(device_less, "is_there", lambda where: False)


@pytest.mark.parametrize(
    "name, devices, hosts, topology",
    [
        ("v5e-16", 16, 4, "4x4"),
        ("v5litepod-16", 16, 4, "4x4"),
        ("v5e-1", 1, 1, "1x1"),
        ("v6e-16", 16, 4, "4x4"),
        ("v5p-64", 32, 8, "2x4x4"),  # TensorCores, of which a chip has two
        ("tpu7x-8", 8, 1, "2x2x1"),  # four chips of two cores, each a device
        ("tpu7x-16", 16, 2, "2x2x2"),
        ("v5e-8", 8, 1, "2x4"),
        ("v6e-32", 32, 8, "4x8"),
        ("h100", 1, 1, "1x1x1"),
        ("8xH100", 8, 1, "1x1x8"),
        ("4x8xh100", 32, 4, "1x4x8"),
        ("t4", 1, 1, "1x1x1"),
    ],
)
def test_a_name_is_a_slice(name, devices, hosts, topology):
    found = chips.read(name)
    assert (found.devices, found.hosts, found.topology) == (devices, hosts, topology)


@pytest.mark.parametrize("name", ["h100", "v5e-1"])
def test_what_is_not_set_follows_the_slice(name, monkeypatch):
    seen = []
    monkeypatch.setattr(slice_plan, "predicted", lambda config, *rest: seen.append(config))
    flags = [f"--config={CONFIGS / 'demo.py'}", "--dry-run", f"--slice={name}"]
    assert main.main(flags) == 0 == main.main([*flags, "--config.engine.page_size=auto"])
    sizes = [(one.model.compute_dtype, one.engine.dtype, one.engine.page_size) for one in seen]
    assert sizes == [("bfloat16", "bfloat16", 16), ("bfloat16", "bfloat16", 64)]


@pytest.mark.parametrize(
    "name, said",
    [
        ("v5e-15", "nearest valid one is v5e-16"),
        ("v5p-32x", "no such accelerator; nearest is v5p"),
        ("h1000", "nearest is 8xh100"),
        ("16xh100", "at most 8 devices; the nearest valid slice is 2x8xh100"),
        ("8xv5e-16", "no such slice"),
        ("0xh100", "write h100, 8xh100 or 4x8xh100"),
        ("h100-8", "write h100, 8xh100 or 4x8xh100"),
        ("", "no such accelerator"),
        ("\n" * 3 + "x" * 10000, "no such accelerator"),
    ],
)
def test_another_name_is_one_sentence(name, said):
    with pytest.raises(ValueError, match=re.escape(said)) as told:
        chips.read(name)
    assert "\n" not in str(told.value) and len(str(told.value)) < 300


def test_links_of_a_host_and_between_hosts():
    hosts = chips.read("4x8xh100")
    assert hosts.link(8) == hosts.chip.link > hosts.link(16) == hosts.chip.network > 0
    assert chips.read("v5p-64").link(32) == chips.KINDS["v5p"].link


def test_several_of_a_slice():
    two = chips.read("v6e-32").times(2)
    assert (two.devices, two.hosts, two.slices, two.chips, two.topology) == (64, 16, 2, 64, "4x8")
    assert two.link(32) == two.chip.link > two.link(64) == two.chip.network > 0
    four = chips.read("8xh200").times(4)
    assert four == chips.read("4x8xh200") and four.slices == 1
    assert chips.read("tpu7x-16").chips == 8 and chips.read("v5p-64").chips == 32


def test_a_mesh_of_another_size_is_refused():
    config = resolve(load(str(CONFIGS / SEVEN)))
    with pytest.raises(ValueError, match="has 8 devices.* takes 16; the nearest valid value is mesh.fsdp=8$"):
        slice_plan.check_devices(config, chips.read("8xh100"))
    odd = resolve(default(), ["model.preset=tiny", "mesh.data=3", "batch.rows=3"])
    with pytest.raises(ValueError, match="nearest valid value is mesh.fsdp=8 with all other sizes as they are"):
        slice_plan.check_devices(odd, chips.read("8xh100"))


def test_the_formulas_are_within_a_tenth_of_the_compilers():
    """Of whole train steps at full depth: see scripts/compile_tier/memories.py."""
    ratios = compiled_memories.ratios()
    assert len(ratios) >= 30 and {name.split()[0] for name in ratios} >= {"qwen2_5_0_5b", "qwen2_5_7b", "qwen3_32b"}
    assert not {name: ratio for name, ratio in ratios.items() if not 0.9 <= ratio <= 1.1}


def test_formulas_that_leave_a_part_out_are_not(monkeypatch):
    for name in ("_one_layer", "_matrices", "stacked"):
        with monkeypatch.context() as patch:
            patch.setattr(activations, name, lambda *given: 0)
            assert min(compiled_memories.ratios("qwen2_5_7b v5e-16 1x16x1 T8192 full bf16").values()) < 0.9, name


@pytest.mark.parametrize(
    "platform, flash, tokens, bytes_",
    [
        ("gpu", True, 2048, 14 * 2048 * 8),  # two sums of a query
        ("tpu", True, 2048, 14 * 2048 * 512),  # one, along 128 lanes
        ("gpu", False, 2048, 14 * 512 * 2048 * 8),  # a loop over blocks of 512 queries with all keys
        ("gpu", False, 512, 14 * 64 * 64 * 36 * 8),  # 8 blocks with the keys up to their end
        ("cpu", True, 512, 14 * 64 * 64 * 36 * 8),
    ],
)
def test_attention_of_a_layer_by_hand(platform, flash, tokens, bytes_):
    options = f"model.preset=qwen2_5_0_5b batch.tokens={tokens} model.compute_dtype=bfloat16 batch.rows=1"
    config = resolve(default(), options.split())
    assert activations._attention(config, PRESETS["qwen2_5_0_5b"], 1, platform, flash) == bytes_


PLANS = {  # config and choice: slice
    "models/gsm8k_qwen2_5_0_5b.py:t4": "t4",
    "models/gsm8k_qwen2_5_0_5b.py:l4": "l4",
    "models/gsm8k_qwen2_5_0_5b.py": "h100",
    "models/gsm8k_qwen2_5_0_5b.py:v5e-1": "v5e-1",
    SEVEN: "v5e-16",
    "models/gsm8k_qwen2_5_7b.py:8xh100": "8xh100",
    "models/gsm8k_qwen2_5_7b.py": "v6e-16",
    "models/gsm8k_qwen3.py": "v6e-16",
    "models/gsm8k_qwen3.py:32b-v5p-64": "v5p-64",
    "models/gsm8k_qwen3.py:32b-4x8xh100": "4x8xh100",
    "models/gsm8k_qwen3.py:30b-a3b-v5p-64": "v5p-64",
    "models/gsm8k_qwen3.py:30b-a3b-v6e-64": "v6e-64",
    "models/gsm8k_qwen3.py:30b-a3b-2x8xh100": "2x8xh100",
}


@pytest.mark.parametrize("name", PLANS)
def test_the_roofline_counts_as_many_steps_a_dispatch_as_these_configs_take(name):
    spec = importlib.util.spec_from_file_location("rooflines", ROOT / "scripts" / "compile_tier" / "roofline.py")
    rooflines = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(rooflines)
    assert load(str(CONFIGS / name)).engine.steps_per_dispatch == rooflines.STEPS


@pytest.mark.parametrize("name", PLANS)
def test_a_preset_fits_its_slice(name, capsys, monkeypatch, tmp_path):
    """Neither models nor data are there."""
    monkeypatch.setenv("JAXRL_MODELS", str(tmp_path))
    monkeypatch.setenv("JAXRL_DATA", str(tmp_path))
    assert main.main([f"--config={CONFIGS / name}", "--dry-run", f"--slice={PLANS[name]}"]) == 0
    said = capsys.readouterr().out
    assert f"{PLANS[name]}: fits: " in said and "predicted, not measured" in said
    found = compiled_memories.preset(CONFIGS / name, PLANS[name])
    assert found.answers >= 64 and found.most <= 0.9 * found.room
    assert f"fits: {found.most / 2**20:,.0f} of {found.room / 2**20:,.0f} MiB" in said


def test_a_resident_engine_on_v5e_16_is_refused_and_the_named_setting_fits(capsys):
    resident = ["engine.sleep=false", "optimizer.moments_dtype=float32", "optimizer.sums_dtype=float32"]
    flags = [f"--config={CONFIGS / SEVEN}", "--dry-run", "--slice=v5e-16", *(f"--config.{one}" for one in resident)]
    assert main.main(flags) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "Qwen2.5-7B-Instruct on v5e-16 does not fit: " in said
    named = re.findall(r"--config\.\S+", said)
    assert named == ["--config.engine.sleep=true"]
    assert main.main([*flags, *named]) == 0
    assert f"with {re.search(r'fits: ([0-9,]+) of', capsys.readouterr().out)[1]} MiB" in said


def test_one_word_by_hand():
    model, where = PRESETS["tiny"], chips.read("h100")
    config = resolve(default(), ["model.preset=tiny", "engine.max_length=64", "sampling.max_tokens=30"])
    items = slice_plan.plan(config, model, where).held
    held = sum(item.bytes for item in items["device"] if item.kind is not memory_plan.Kind.ACTIVATIONS)
    for temporaries, word in (
        (0.9 * where.chip.memory - held - 1, "fits"),
        (where.chip.memory - held, "tight"),
        (where.chip.memory - held + 1, "does not fit"),
    ):
        found = slice_plan.plan(config, model, where, {"accumulate": int(temporaries), "commit": 1})
        assert found.word == word and found.compiled and found.most == held + int(temporaries)


def test_what_no_setting_saves_asks_for_a_larger_slice():
    config = resolve(load(str(CONFIGS / "models/gsm8k_qwen2_5_0_5b.py:t4")))
    assert slice_plan.nearest(config, PRESETS["qwen3_32b"], chips.read("t4")) is None


def test_several_changes_where_one_is_too_few():
    given = ["engine.sleep=false", "mesh.engine_tensor=1", "model.remat_policy=projections", "engine.slots=128"]
    config = resolve(load(str(CONFIGS / SEVEN)), given)
    found = slice_plan.nearest(config, PRESETS["qwen2_5_7b"], chips.read("v5e-16"))
    assert len(found.options) > 1 and found.options[0] == "engine.sleep=true" and found.plan.word == "fits"


def test_seconds_by_hand():
    """Eight H100, each a replica: of 128 x 8 rollouts up to 512 tokens after 512 of a prompt."""
    config = resolve(load(str(CONFIGS / "models/gsm8k_qwen2_5_7b.py:8xh100")))
    model = PRESETS["qwen2_5_7b"]
    got = roofline.seconds(config, model, chips.read("8xh100"), 512)
    weights = 7615616512
    assert roofline.parameters(model) == weights
    steps = 512  # 128 rollouts of a replica have 128 slots
    cache = 128 * (512 * 256 + 512**2 / 6) * 57344
    assert got["decode"] == pytest.approx((steps * 2 * weights + cache) / (3.35e12 * 0.85))
    row = 512 + 256
    flops = 3 * 1024 * (2 * weights * row + 2 * 28 * 28 * 128 * row**2)
    assert got["train"] == pytest.approx(flops / (8 * 9.89e14 * 0.45))
    assert got["publish"] == pytest.approx(2 * weights / (4.5e11 * 0.85))
    assert got["collectives of decode"] == 0 < got["collectives of training"]
    assert got["host"] == pytest.approx(512 / 32 * (1e-3 + 2e-6 * 1024))
    assert got["all"] == pytest.approx(sum(value for part, value in got.items() if part != "all"))


def test_collectives_of_training_by_hand():
    """Two micro-batches of 8 rows of 4,096 tokens: 7/8 of the weights twice and of the gradient once, and the head's rows."""
    config = resolve(load(str(CONFIGS / "models/gsm8k_qwen2_5_7b.py:8xh100")), ["scheduler.prompts=8"])
    got = roofline.seconds(config, PRESETS["qwen2_5_7b"], chips.read("8xh100"), 512)
    a_batch = 7 / 8 * 7615616512 * 6 + 3 * 8 * 4096 * 3584 * 2
    assert got["collectives of training"] == pytest.approx(2 * a_batch / (4.5e11 * 0.85))


def test_a_refused_division_names_a_value_that_is_valid():
    """Of Qwen2.5-7B, with 4 KV heads, on 16 devices."""
    for option in ("tensor", "engine_tensor"):
        given = [f"mesh.{option}=8", *(["mesh.fsdp=2", "mesh.engine_tensor=0"] if option == "tensor" else [])]
        config = resolve(load(str(CONFIGS / SEVEN)), given)
        said = f"mesh.{option}=8 does not divide.* (kv_)?heads=(4|28); the nearest .* is 4"
        with pytest.raises(ValueError, match=said):
            slice_plan.plan(config, PRESETS["qwen2_5_7b"], chips.read("v5e-16"))
        near = resolve(load(str(CONFIGS / SEVEN)), [one.replace("=8", "=4") for one in given])
        assert slice_plan.plan(near, PRESETS["qwen2_5_7b"], chips.read("v5e-16")).most > 0


def test_shapes_of_models_that_are_not_here(tmp_path):
    assert published("Qwen2.5-7B-Instruct") is PRESETS["qwen2_5_7b"] and published("Qwen3-32B") is PRESETS["qwen3_32b"]
    assert published("Llama-3.1-8B") is PRESETS["llama3_1_8b"]
    assert published("gemma-4-31B-it") is PRESETS["gemma4_31b"] and published("Qwen3.5-0.8B") is PRESETS["qwen3_5_0_8b"]
    assert published("Qwen2.5-Coder-1.5B-Instruct") is PRESETS["qwen2_5_1_5b"]
    assert published("Qwen2.5-72B") is published("tinyllama") is None and published("tiny") is PRESETS["tiny"]
    config = resolve(default(), [f"model.path={tmp_path / 'Qwen2.5-72B'}"])
    with pytest.raises(ValueError, match="no shape is known by this name.*nearest is 'qwen2_5_7b'"):
        inputs.shape(config)


COUNTS = {  # as published; of Qwen3.5 and Gemma 4 those of the text models, as transformers 5.24.0 counts them
    "qwen2_5_7b": 7615616512,
    "qwen3_8b": 8190735360,
    "qwen3_32b": 32762123264,
    "qwen3_5_0_8b": 752393024,
    "qwen3_5_9b": 8953803264,
    "qwen3_5_35b_a3b": 34660610688,
    "gemma4_e4b": 7463013418,
    "gemma4_31b": 30697345340,
}


@pytest.mark.parametrize("name, count", COUNTS.items())
def test_counts_of_weights_are_the_published_ones(name, count):
    assert roofline.parameters(PRESETS[name]) == count


def test_a_slice_without_a_dry_run_is_refused():
    with pytest.raises(ValueError, match="add --dry-run"):
        parse(["--config=a.py", "--slice=v5e-16"])


def test_a_choice_of_a_config_file(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("from jaxrl_post.config import default\ndef get_config():\n    return default()\n")
    with pytest.raises(ValueError, match="takes 0 positional arguments"):
        load(f"{file}:v5e-16")
    with pytest.raises(ValueError, match="no choice 'v5e-17'; nearest is v5e-16, all are v6e-16, v5e-16, 8xh100"):
        load(str(CONFIGS / "models/gsm8k_qwen2_5_7b.py:v5e-17"))
    assert load(str(CONFIGS / SEVEN)).mesh.fsdp == 16
