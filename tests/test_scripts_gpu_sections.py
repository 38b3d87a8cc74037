"""The sections of scripts/gpu_check.py at sizes of a CPU: what they compare, count and leave out. Kernels are interpreted."""

from __future__ import annotations

import functools
import json
import math
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

import gpu_check  # noqa: E402
from gpu import (  # noqa: E402
    decoding,
    device,
    drawing,
    options,
    packed_rows,
    paged_attention,
    rl_config,
    rl_reward,
    rl_runs,
    row_bits,
    row_products,
    small,
    swap,
    timeline,
    timing,
    training,
    weights,
)
from gpu.part import Part  # noqa: E402

from jaxrl_post.config import resolve  # noqa: E402
from jaxrl_post.kernels import attention, flash_gpu, verify  # noqa: E402
from jaxrl_post.kernels.pallas_gpu import RECENT  # noqa: E402
from jaxrl_post.models import decoder  # noqa: E402
from jaxrl_post.models.presets import PRESETS  # noqa: E402
from jaxrl_post.ring.types import Finish, Group, Prompt, Rollout, RolloutId  # noqa: E402
from jaxrl_post.runs.rollout_log import RolloutLog  # noqa: E402

MODEL = decoder.ModelConfig(
    vocab_size=1100, embed=16, layers=2, heads=2, kv_heads=1, head_dim=8, ffw=16, max_length=512, tied=True
)
KERNEL = functools.partial(flash_gpu.attention, interpret=True, tiles=flash_gpu.square(16))
SMALL = dict(kernel=KERNEL, lengths=(32,), heads=(4, 2, 16))
quick = pytest.mark.usefixtures("quick_compilation")


def fresh(seconds: float = math.inf) -> Part:
    return Part(told={"device.copy_gb_per_s": 1.0}, seconds=seconds)


# ---- what a section leaves


def test_a_part_is_whole_after_each_figure_and_knows_what_there_is(tmp_path):
    file = tmp_path / "part.json"
    part = Part(file, seconds=10.0)
    assert part.wants("a", 1.0) and not part.wants("b", 11.0)
    part.figure("a", 2, at_most=1)
    told = json.loads(file.read_text())
    assert told == {"figures": {"a": 2}, "bounds": {"a": {"at_most": 1, "ok": False}}, "not_reached": ["b"]}
    later = Part(file)
    assert not later.wants("a", 0.0) and later.wants("b", 0.0) and later.not_reached == [] and not later.ok


def test_a_group_that_a_kill_cut_is_measured_again(tmp_path):
    file = tmp_path / "part.json"
    bounds = {"a": {"at_most": 0, "ok": False}}
    file.write_text(json.dumps({"figures": {"a": 1, "b": 2}, "bounds": bounds, "not_reached": []}))
    part = Part(file)
    part.figure("a", 3)
    assert part.figures == {"b": 2, "a": 3} and part.bounds == {}
    with pytest.raises(ValueError, match="written before"):
        part.figure("a", 4)


def test_sweeps_leave_out_what_is_there_and_what_comes_too_late():
    part = fresh(seconds=0.0)
    drawing.times(part, rows_of=(4,), vocab=1100)
    packed_rows.times(part, **SMALL)
    options.cudnn(part, **SMALL)
    decoding.decode(part, "x", MODEL, batches=(3,), contexts=(70,))
    swap.cast(part, {"x": MODEL})
    training.steps(part, MODEL, {64: 2}, "tiny")
    paged_attention.times(part)
    assert part.figures == {"decode.x.without_room": []} and len(part.not_reached) == 7 + 45
    assert len(set(part.not_reached)) == len(part.not_reached)


# ---- arithmetic, by hand


def test_useful_flops_by_hand():
    one = decoder.ModelConfig(
        vocab_size=10, embed=4, layers=3, heads=2, kv_heads=1, head_dim=8, ffw=5, max_length=64, tied=True
    )
    products = 3 * (4 * 16 + 2 * 4 * 8 + 16 * 4 + 3 * 4 * 5) + 4 * 10
    pairs = 3 * 2 * 8 * (6**2 + 2**2)  # a causal half of all pairs, two products of two FLOPs, and backward twice that
    assert training.useful(one, [6, 2]) == 6 * products * 8 + 6 * pairs


def test_useful_flops_of_qwen_are_six_for_each_weight_and_token():
    model = PRESETS["qwen2_5_1_5b"]
    count = sum(x.size for x in jax.tree.leaves(decoder.abstract(model)))
    attention = 6.0 * 28 * 12 * 128 * 4096**2
    np.testing.assert_allclose(training.useful(model, [4096]) - attention, 6 * count * 4096, rtol=1e-3)


def test_flops_of_causal_attention():
    assert packed_rows.work([4, 2], heads=3, width=8) == (2 * 3 * 8 * 20, 7 * 3 * 8 * 20)


def test_peaks_by_the_device_name():
    assert timing.chip("NVIDIA H100 80GB HBM3").flops == timing.chip("NVIDIA H200").flops == 9.89e14
    assert timing.chip("cpu") is None and timing.share_of_peak(1e12, 1.0) is None
    assert timing.memory() == math.inf


def test_pages_of_7b_that_an_h100_has_no_room_for_are_named():
    """By hand: 57,344 bytes of keys and values a token, 15.2 GB of weights, 4 GiB to spare, 92 % of 85 GB."""
    part = fresh(seconds=0.0)
    decoding.decode(part, "7b", PRESETS["qwen2_5_7b"], room=0.92 * 81559 * 2**20)
    assert part.figures["decode.7b.without_room"] == ["decode.7b.batch_256_context_4096"]
    part = fresh(seconds=0.0)
    decoding.decode(part, "7b", PRESETS["qwen2_5_7b"], room=0.92 * 143771 * 2**20)
    assert part.figures["decode.7b.without_room"] == [] and len(part.not_reached) == 6
    part = fresh()
    swap.cast(part, {"7b": PRESETS["qwen2_5_7b"]}, room=4e10)
    assert 60 < part.figures["swap.7b"]["without_room_gib"] < 61


def test_seconds_to_a_reward():
    run = {"rewards": [0.0, 0.3, 0.3, 0.6, 0.9], "seconds": [2.0, 1.0, 1.0, 1.0, 1.0]}
    assert rl_runs.seconds_to(run, 0.19) == 4.0 and rl_runs.seconds_to(run, 0.59) == 6.0
    assert rl_runs.seconds_to(run, 0.7) is None


def test_what_a_run_left(tmp_path):
    """Of two steps of a pipeline that follow each other at once, one has the seconds of both."""
    rows = [
        {
            "training/global_step": step,
            "critic/score/mean": step / 10,
            "off_policy/max": step % 3,
            "off_policy/mean": 0.5,
            "actor/grad_norm": 0.25,
        }
        | ({} if took is None else {"timing_s/step": took, "perf/throughput": 100.0 * took})
        for step, took in enumerate((50.0, 2.0, None, 3.0, 1.0), 1)
    ]
    lines = [json.dumps(row) for row in [{"step": 0, "eval/score": 1.0}, *rows]]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "model.safetensors").write_bytes(b"weights")
    told = rl_runs.left_by(tmp_path)
    assert told["seconds"] == [1.5, 2.0, 0.0, 3.0, 1.0] and told["step_s"] == 1.5
    assert told["trained_tokens_per_s"] == 200.0 and told["generated_tokens_per_s"] is None
    assert told["staleness"] == 2 and told["reward_before"] == 0.1 and abs(told["reward_after"] - 0.4) < 1e-12
    (tmp_path / "policy" / "model.safetensors").write_bytes(b"Weights")
    assert rl_runs.left_by(tmp_path)["policy"] != told["policy"]


def test_rollouts_that_differ_are_counted_by_step(tmp_path):
    def rollout(sample: int, **changes) -> Rollout:
        given = dict(tokens=[1, 2], sampled=[True] * 2, logprobs=[-1.0] * 2, entropies=[0.5] * 2, versions=[0] * 2)
        name, prompt = RolloutId(0, "train", 0, "a", sample), Prompt(id="a", tokens=np.array([5]))
        more = dict(drafted=[False] * 2, finish=Finish.LENGTH, start_clock=0, finish_clock=1)
        return Rollout(id=name, prompt=prompt, **given | more | changes)

    def leave(name: str, *steps: tuple[Rollout, ...]) -> Path:
        log = RolloutLog(tmp_path / name / "rollouts")
        for step, rollouts in enumerate(steps, 1):
            scores = dict(rewards=[0.0] * len(rollouts), scored=[True] * len(rollouts))
            log.write(step, [Group(prompt=rollouts[0].prompt, rollouts=rollouts, **scores)])
        return tmp_path / name

    one = leave("one", (rollout(0), rollout(1)), (rollout(0), rollout(1)))
    other = leave(
        "other",
        (rollout(0), rollout(1, clocks=[7, 7], drafted=[True] * 2)),
        (rollout(0, tokens=[1, 3], logprobs=[-1.0, -2.0]), rollout(1, logprobs=[-1.0, -1.0 - 2**-20])),
    )
    assert rl_runs.differences(one, one) == {"tokens": [0, 0], "logprobs": [0, 0], "entropies": [0, 0]}
    assert rl_runs.differences(one, other) == {"tokens": [0, 1], "logprobs": [0, 2], "entropies": [0, 0]}


def test_a_hash_tells_pieces_apart():
    assert len({rl_runs.digest(pieces) for pieces in ([b"ab"], [b"a", b"b"], [b"ab", b""], [])}) == 4


def test_a_timeline_by_hand():
    """Two streams: 0 to 3 and 2 to 4, then nothing until 6."""
    told = [("dot_3", 0.0, 3.0), ("add_1", 2.0, 2.0), ("dot_12.1", 6.0, 1.0)]
    found = timeline.summary([timeline.Event(*one) for one in told], turns=2)
    assert (found["launches"], found["busy_ms"], found["idle_ms"], found["products_ms"]) == (1.5, 2.5, 1.0, 2.0)
    assert found["kernels"] == [
        {"name": "dot", "launches": 1.0, "ms": 2.0},
        {"name": "add", "launches": 0.5, "ms": 1.0},
    ]


def test_the_reward_of_the_runs():
    score = lambda text: rl_reward.digits("", text, "", {})  # noqa: E731
    assert score("12ab") == 0.5 and score("") == 0.0 and score("7") == 1.0


@pytest.mark.parametrize("more", [(), rl_runs.DRAFTS, rl_runs.PIPELINED], ids=["sync", "drafted", "pipelined"])
def test_the_settings_of_the_runs_are_valid(more):
    config = resolve(rl_config.get_config(), ["model.path=x", *more])
    assert config.steps == 20 and config.engine.page_size == 64 and config.eval.prompts == 0


# ---- on this machine's device


@pytest.mark.extended
def test_copies_and_products_of_the_device():
    part = fresh()
    device.speed(part, numbers=1 << 12, width=16)
    device.target(part)
    assert part.figures["device.copy_gb_per_s"] > 0 < part.figures["device.product_tflops"]
    assert isinstance(part.figures["device.target_config"], str)


@pytest.mark.extended
def test_comparisons_and_times_of_the_engines_kernels():
    part = fresh()
    drawing.against_reference(part, shapes=((4, 1100),))
    paged_attention.against_reference(part, shapes=((2, 100, 2),))
    drawing.times(part, rows_of=(4,), vocab=1100)
    assert part.ok and len(part.bounds) == 11
    told = part.figures["verify_sample.4_rows"]
    assert told["floor_ms"] == 1e3 * 4 * 4 * 1100 / 1e9
    np.testing.assert_allclose(told["share_of_bandwidth"], told["floor_ms"] / told["ms"])


@pytest.mark.extended
def test_bits_of_rows_at_other_places(monkeypatch):
    monkeypatch.setattr(row_bits, "CONTEXTS", (12, 68))
    part = fresh()
    row_bits.everywhere(part, {"x": MODEL}, (4, 8))
    assert part.ok and len(part.bounds) == 6 + 2 + 2 and len(part.figures) == 6 * 2 + 2 + 2 * 2


@pytest.mark.extended
def test_bits_that_depend_on_other_rows_are_seen(monkeypatch):
    monkeypatch.setattr(row_bits, "CONTEXTS", (12,))
    right, drawn = attention.attention, verify.verify_sample

    def leaking(q, *given, **how):
        return right(q, *given, **how) + jnp.mean(q)

    def moved(logits, *given):
        return drawn(logits * (1 + 0.001 * jnp.arange(len(logits)))[:, None], *given)

    monkeypatch.setattr(attention, "attention", leaking)
    monkeypatch.setattr(verify, "verify_sample", moved)
    part = fresh()
    row_bits.attending(part, "x", MODEL)
    row_bits.sampling(part, "x", MODEL.vocab_size, 4, 8)
    assert part.bounds and not any(bound["ok"] for bound in part.bounds.values())


def leaks(monkeypatch):
    right = flash_gpu.stretches
    monkeypatch.setattr(flash_gpu, "stretches", lambda ids, window: right(jnp.ones_like(ids), window))


def has_no_slope(monkeypatch):
    right = flash_gpu._How.scores
    monkeypatch.setattr(flash_gpu._How, "scores", lambda how, product: (right(how, product)[0], 1.0))


@quick
@pytest.mark.extended
def test_packed_rows_agree_with_jnp():
    part = fresh()
    packed_rows.against_reference(part, KERNEL, shapes=((2, 64, 4, 2, 16),))
    assert part.ok and len(part.bounds) == 12


@quick
@pytest.mark.extended
@pytest.mark.parametrize(
    "fault, seen",
    [(leaks, ("output", "dq", "dk", "dv", "beside")), (has_no_slope, ("dq", "dk"))],
    ids=["leaks", "slope"],
)
def test_planted_faults_of_packed_rows_are_seen(monkeypatch, fault, seen):
    fault(monkeypatch)
    monkeypatch.setattr(packed_rows, "CASES", {"window": dict(window=40, soft_cap=1.5)})
    part = fresh()
    packed_rows.against_reference(part, KERNEL, shapes=((2, 64, 4, 2, 16),))
    missed = {key.rpartition(".")[2].partition("_")[0] for key, bound in part.bounds.items() if not bound["ok"]}
    assert missed >= set(seen) - {"beside"}
    assert ("beside" in seen) != part.figures["packed_rows.window_2x64x4x2x16.bits_equal_beside_others"]


@quick
@pytest.mark.extended
def test_times_of_packed_rows_and_of_another_library_beside():
    """jax's own form in the place of cuDNN's: the masks and scales that both are given agree."""
    part = fresh()
    packed_rows.times(part, **SMALL)
    options.cudnn(part, implementation="xla", **SMALL)
    assert part.figures["packed_rows.32_tokens_4_segments"]["reference"]["with_backward_ms"] > 0
    assert max(part.figures["cudnn.32_tokens"]["difference"].values()) < packed_rows.FAR


def test_a_hopper_has_two_kernels_of_packed_rows(monkeypatch):
    """Both are tried there, each at the shapes that it serves."""
    tried = []
    monkeypatch.setattr(
        packed_rows, "against_reference", lambda part, kernel, shapes, name: tried.append((name, len(shapes)))
    )
    packed_rows.everywhere(fresh())
    assert tried == [("packed_rows", 4)]
    monkeypatch.setattr(packed_rows.hardware, "without_kernels", lambda device: "")
    packed_rows.everywhere(fresh())
    assert tried[1:] == [("packed_rows", 4), ("packed_rows.hopper", 2 * RECENT)]


@quick
@pytest.mark.extended
def test_times_of_other_tiles():
    part, sizes = fresh(), {"forward": ((8, 16),), "by_keys": ((16, 8), (32, 16))}
    packed_rows.tiles(part, sizes, 32, (4, 2, 16), flash_gpu.square(16), interpret=True)
    ends = "forward.8x16_ms", "by_keys.16x8_ms", "by_keys.32x16_ms"
    assert [*part.figures] == [f"packed_rows.tiles.{end}" for end in ends] and min(part.figures.values()) > 0


@quick
@pytest.mark.extended
def test_decoding_reads_weights_and_cache_once_a_step(monkeypatch):
    """By hand: bf16, 2 bytes; a key and a value of 8 numbers for each of 2 layers and each position of 3 answers."""
    monkeypatch.setattr(decoding, "STEPS", 2)
    part = fresh()
    decoding.decode(part, "x", MODEL, batches=(3, 4), contexts=(70,))
    read = 2 * sum(np.prod(x.shape) for x in jax.tree.leaves(decoder.abstract(MODEL))) + 3 * 70 * 2 * 2 * 8 * 2
    told = part.figures["decode.x.batch_3_context_70"]
    np.testing.assert_allclose(told["floor_ms"], 1e3 * read / 1e9)
    assert told["tokens_per_s"] > 0 and "decode.x.batch_4_context_70" in part.figures


@quick
@pytest.mark.extended
def test_steps_under_flags_are_beside_those_as_is(monkeypatch):
    monkeypatch.setattr(decoding, "STEPS", 2)
    monkeypatch.setenv("XLA_FLAGS", "--some")
    part = Part(told={"decode.x.batch_3_context_70": {"step_ms": 2.0}})
    decoding.under_flags(part, "flags_while", "x", MODEL, ((3, 70),))
    told = part.figures["flags_while.x.batch_3_context_70"]
    assert part.figures["flags_while.flags"] == "--some" and told["step_ms"] > 0
    assert told["over_as_is"] == told["step_ms"] / 2 and told["longer_than_as_is_ms"] == told["step_ms"] - 2


@quick
@pytest.mark.extended
def test_a_swap_reads_four_bytes_of_a_weight_and_writes_two():
    part = fresh()
    swap.cast(part, {"x": MODEL})
    told, count = part.figures["swap.x"], sum(x.size for x in jax.tree.leaves(decoder.abstract(MODEL)))
    np.testing.assert_allclose(told["floor_s"], 6 * count / 1e9)
    np.testing.assert_allclose(told["gb_per_s"] * told["swap_s"], 6 * count / 1e9)


@quick
@pytest.mark.extended
def test_train_steps(monkeypatch):
    monkeypatch.setattr(training, "PROMPT", 8)
    monkeypatch.setattr(timing, "share_of_peak", lambda flops, took: flops / took)
    part = fresh()
    training.steps(part, MODEL, {64: 2}, "tiny")
    one, four = (part.figures[f"train.tiny.64_tokens_{count}_sequences"] for count in (1, 4))
    for told, lengths in ((one, 8 * [64]), (four, 32 * [16])):
        np.testing.assert_allclose(told["mfu"] * told["step_s"], training.useful(MODEL, lengths))
        np.testing.assert_allclose(told["tokens_per_s"] * told["step_s"], 512)
    assert part.ok and part.figures["train.tiny.64_tokens.gradient_bits_equal_again"] is True


@quick
@pytest.mark.extended
def test_another_gradient_is_seen(monkeypatch):
    monkeypatch.setattr(training, "PROMPT", 8)
    trainer, sequences = training.learner(MODEL, "tiny", 2, 64), training.groups(MODEL, 2, 64)
    numbers, right = iter((1.0, 1.0 + 2**-23)), trainer.gradient
    monkeypatch.setattr(trainer, "gradient", lambda number=numbers: _scaled(right(), next(number)))
    assert not training.twice(trainer, sequences)


def _scaled(tree, number):
    return jax.tree.map(lambda x: x * np.float32(number), tree)


@quick
@pytest.mark.extended
def test_timelines_of_both(monkeypatch):
    """The threads of XLA:CPU stand for the streams of a device."""
    right = timeline.recorded
    with pytest.raises(RuntimeError, match="saw nothing on /device:GPU"):
        right(lambda: jnp.ones(2) + 1)
    monkeypatch.setattr(timeline, "recorded", lambda run: right(run, "/host:CPU", "tf_XLA"))
    for name, value in (("DECODED", ((2, 70),)), ("TOKENS", 64)):
        monkeypatch.setattr(timeline, name, value)
    monkeypatch.setattr(training, "ROWS", {64: 2})
    monkeypatch.setattr(training, "PROMPT", 8)
    part = fresh()
    timeline.of_both(part, MODEL, "tiny")
    assert [*part.figures] == ["timeline.decode.tiny.batch_2_context_70", "timeline.train.tiny.64_tokens"]
    for told in part.figures.values():
        assert told["busy_ms"] > 0 and 0 < len(told["kernels"]) <= timeline.KERNELS


@pytest.mark.extended
def test_random_weights_are_finite():
    leaves = jax.tree.leaves(weights.drawn(MODEL))
    assert all(leaf.dtype == jnp.bfloat16 and bool(jnp.isfinite(leaf).all()) for leaf in leaves)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(weights.drawn(MODEL, jnp.float32)))


@pytest.mark.extended
def test_a_real_section_in_its_own_process(tmp_path):
    """It imports what it should: nothing of Transformer Engine is installed here."""
    (tmp_path / "told.json").write_text("{}")
    done = subprocess.run(
        [sys.executable, gpu_check.CHILD, "transformer_engine", tmp_path / "part.json", tmp_path / "told.json", "60"],
        cwd=ROOT,
        env=gpu_check.environment(),
        text=True,
        capture_output=True,
    )
    assert done.returncode == 1 and "No module named 'transformer_engine'" in done.stderr.splitlines()[-1]
    assert json.loads((tmp_path / "part.json").read_text())["figures"] == {}


@pytest.mark.shown("variants")
@pytest.mark.slow
def test_three_runs_by_the_command(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    part = fresh()
    rl_runs.same_bits(part, "stories260k", small.RUN)
    assert part.ok and set(part.bounds) == {
        "rl.reward_gain",
        "rl.num_drafted",
        "rl.steps_that_train",
        "rl.policy_equal_with_drafts",
        "rl.first_rollouts_equal_with_drafts",
        "rl.rollouts_equal_with_drafts",
    }
    assert len(part.figures["rl.sync"]["rewards"]) == 3 and part.figures["rl.sync_seconds_to_reward"] > 0
    later = Part(told=part.figures)
    rl_runs.pipelined(later, "stories260k", small.RUN)
    assert later.ok and 0 < later.figures["rl.pipelined"]["mean_staleness"] <= rl_runs.STALENESS
    assert later.figures["rl.pipelined"]["policy"] != part.figures["rl.sync"]["policy"]


def test_products_of_one_shape_are_timed_and_compared_beside_the_librarys():
    """Planted is a product whose sum is cut by the number of rows."""
    part, rows = fresh(), (4, 8)
    row_products.beside_library(part, {"x": small.WIDER}, rows, small.PRODUCT)
    assert part.ok and len(part.bounds) == 3 * 6 and len(part.figures) == 4 * 6 + 1
    assert set(part.figures["row_products.x.layer_over_library"]) == {"4_rows", "8_rows"}

    def cut(x, w, dtype):
        half = 8 if len(x) < 8 else 4
        parts = [x[:, at].astype(dtype) @ w[at].astype(dtype) for at in (slice(half), slice(half, None))]
        return sum(parts).astype(dtype)

    part = fresh()
    row_products.beside_library(part, {"x": small.WIDER}, rows, cut)
    assert not part.ok and not part.bounds["row_products.x.up.bits_equal"]["ok"]
