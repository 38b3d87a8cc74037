"""scripts/tpu_check.py where there is no TPU: it refuses, covers what gpu_check does or says why not, and compares kernels in small."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

import gpu_check  # noqa: E402
import sources  # noqa: E402
from gpu import device, sections  # noqa: E402
from gpu.part import Part  # noqa: E402
from tpu import child, expected, grouped, recurrent, small, training  # noqa: E402
from tpu.sections import LEFT_OUT, SECTIONS, TPU, why_not  # noqa: E402

V5E = {"platform": "tpu", "kind": "TPU v5 lite", "count": 8, "capability": 0}


@pytest.mark.parametrize(
    "kind, word",
    [("TPU v5 lite", ""), ("TPU v6 lite", ""), ("TPU v5", ""), ("TPU v4", "1 x TPU v4"), ("TPU7x", "TPU7x")],
)
def test_it_takes_one_host_of_three_kinds(kind, word):
    said = why_not(V5E | {"kind": kind, "count": 1})
    assert (word in said and "v5e, v6e or v5p" in said) if word else not said


def test_it_refuses_a_gpu_before_it_writes(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(device, "ask", lambda root: V5E | {"platform": "gpu", "kind": "NVIDIA H100 80GB HBM3"})
    file = tmp_path / "x.json"
    assert gpu_check.main([f"--json={file}"], profile=TPU) == 2
    assert "tpu_check needs one host" in capsys.readouterr().err and not file.exists()


def test_every_section_of_a_gpu_is_run_or_left_out_with_a_reason():
    names = [one.name for one in SECTIONS]
    assert len(set(names)) == len(names) and {*names} == set(child.RUN) == set(small.SECTIONS)
    others = {one.name for one in sections.SECTIONS}
    assert others - {*names} == set(LEFT_OUT) and {*names} - others == {"recurrent", "grouped"}
    for place, one in enumerate(SECTIONS):
        assert one.needs_s + gpu_check.MARGIN_S < one.limit_s and (not one.after or one.after in names[:place])
        assert not one.flags


def test_a_result_vouches_for_its_own_sections():
    found = set(sources.closure(ROOT, ROOT / "scripts" / "tpu_check.py"))
    own = {path.relative_to(ROOT).as_posix() for path in (ROOT / "scripts" / "tpu").glob("*.py")}
    assert own | {"scripts/gpu/decoding.py", "kernels/attention_tpu.py", "jaxrl_post/main.py"} <= found


def test_expected_figures_by_hand():
    found = expected.of_kind("TPU v5 lite", {})
    assert found["device.product_tflops"].high == 197.0 and found["device.copy_gb_per_s"].high == 819.0
    # 1,543,714,304 weights of 2 bytes, and 28,672 bytes for each of 16 x 1,024 tokens.
    step = 1e3 * (2 * 1_543_714_304 + 16 * 1024 * 28_672) / (0.85 * 8.19e11)
    assert found["decode.qwen2_5_1_5b.batch_16_context_1024/step_ms"].low == pytest.approx(step, abs=1e-3)
    assert not expected.of_kind("NVIDIA H100 80GB HBM3", {}) and not expected.of_kind("cpu", {})


def test_a_result_is_shown_beside_the_expectations_of_its_device(tmp_path, capsys):
    told = {
        "device": V5E,
        "commit": "0" * 40,
        "seconds": 1.0,
        "figures": {"device.product_tflops": 150.0},
        "bounds": {},
    }
    (tmp_path / "x.json").write_text(json.dumps(told))
    assert gpu_check.main(["--show", str(tmp_path / "x.json")], profile=TPU) == 0
    assert "157.6 to 197 (published)" in capsys.readouterr().out


def test_training_takes_the_largest_model_that_fits(monkeypatch):
    made = []
    monkeypatch.setattr(
        training.training, "steps", lambda part, model, rows, name, chips: made.append((name, rows, chips))
    )
    monkeypatch.setattr(training, "of_host", lambda: 8)
    training.steps(Part(), room=16e9)
    monkeypatch.setattr(training, "of_host", lambda: 1)
    part = Part()
    training.steps(part, room=16e9)
    assert made == [("qwen2_5_1_5b", {4096: 8, 8192: 8}, 8), ("qwen2_5_0_5b", {4096: 4, 8192: 2}, 1)]
    assert part.figures["train.without_room"] == ["qwen2_5_1_5b"]


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("name", ["recurrent", "grouped"])
def test_kernels_agree_in_small(name):
    part = Part()
    small.SECTIONS[name](part)
    assert part.ok and len(part.bounds) >= 5


@pytest.mark.usefixtures("quick_compilation")
def test_wrong_kernels_miss_a_bound():
    part = Part()
    grouped.against_reference(part, 4, (32, 16), 24, lambda x, w, sizes: jnp.roll(x, 1, 0) @ w[0])
    assert not part.bounds["grouped.output_difference"]["ok"]

    def forgetful(state, *given):
        return recurrent.by_turns(jnp.zeros_like(state), *given)

    part = Part()
    recurrent._walked(part, small.HEADS, forgetful)
    assert not part.bounds["recurrent.walk.states_difference"]["ok"]
    assert np.isfinite(part.figures["recurrent.walk.states_difference"])
