"""What a run says of devices that it found: against descriptions of devices that are not there."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from jaxrl_post.config import load, resolve
from jaxrl_post.launch import device_check
from jaxrl_post.launch.parts import build, inputs
from jaxrl_post.launch.plan import memory_plan
from jaxrl_post.parallel import devices

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
SMALL = "models/gsm8k_qwen2_5_0_5b.py"
GIB = 1 << 30


def found(monkeypatch, kind, granted=0, count=1, platform="gpu", version="", **more):
    """Makes jax see devices of this kind, with so many bytes granted on each."""
    one = SimpleNamespace(
        **dict(device_kind=kind, platform=platform, process_index=0, id=0) | more,
        client=SimpleNamespace(platform_version=version),
        memory_stats=lambda: {"bytes_limit": granted} if granted else None,
    )
    monkeypatch.setattr(jax, "devices", lambda: [one] * count)
    monkeypatch.setattr(jax, "local_devices", lambda: [one])


def said(name, *overrides, platform="gpu"):
    config = resolve(load(str(CONFIGS / name)), list(overrides), platform=platform)
    model = inputs.shape(config)
    items = build.memory_of(config, model, generates=True, platform=platform, flash=True)
    return device_check.lines(config, model, memory_plan.by_device(config, items))


def test_a_cpu_is_no_news():
    assert said(SMALL) == []


@pytest.mark.parametrize(
    "name, kind, mib, count, platform",
    [
        (f"{SMALL}:t4", "Tesla T4", 15360, 1, "gpu"),
        (f"{SMALL}:l4", "NVIDIA L4", 23034, 1, "gpu"),
        (f"{SMALL}:v5e-1", "TPU v5 lite", 16128, 1, "tpu"),
        (SMALL, "NVIDIA H100 80GB HBM3", 81559, 1, "gpu"),
        ("models/gsm8k_qwen2_5_7b.py:8xh100", "NVIDIA H100 80GB HBM3", 81559, 8, "gpu"),
        ("models/gsm8k_qwen2_5_7b.py:8xh100", "NVIDIA B200", 183359, 8, "gpu"),
        ("models/gsm8k_qwen2_5_7b.py:v5e-16", "TPU v5 lite", 16128, 16, "tpu"),
        ("models/gsm8k_qwen2_5_7b.py", "TPU v6 lite", 32000, 16, "tpu"),
        ("models/gsm8k_qwen3.py:32b-v5p-64", "TPU v5", 98038, 32, "tpu"),
    ],
)
def test_what_the_page_of_presets_promises_is_not_refused(monkeypatch, name, kind, mib, count, platform):
    """A GPU grants 75 % of its memory, unless it is told more."""
    share = 0.75 if platform == "gpu" else 1.0
    found(monkeypatch, kind, int(mib * 2**20 * share), count, platform)
    lines = said(name, platform=platform)
    assert [line for line in lines if line.startswith("devices:")] == (
        ["devices: Tesla T4 has no units for bfloat16, whose products take as long as float32's"] * (kind == "Tesla T4")
    )
    assert not [line for line in lines if line.startswith("memory:")] or kind == "Tesla T4"


def test_what_cannot_fit_is_refused_with_what_does(monkeypatch):
    found(monkeypatch, "NVIDIA GeForce RTX 3090", 8 * GIB)
    with pytest.raises(ValueError) as told:
        said(SMALL)
    words = str(told.value)
    assert words.startswith("Qwen2.5-0.5B-Instruct on 1 x NVIDIA GeForce RTX 3090 does not fit: ")
    assert "of 8,192 MiB a device" in words and "XLA_PYTHON_CLIENT_MEM_FRACTION=0.95" in words and "\n" not in words


def test_what_fits_but_for_estimates_is_tried_with_a_line(monkeypatch):
    """The plan has activations of some GiB for 8 rows of 1,024 tokens."""
    found(monkeypatch, "TPU v6 lite", int(11.5 * GIB), platform="tpu")
    (line,) = said(SMALL, platform="tpu")
    assert line.startswith("memory: Qwen2.5-0.5B-Instruct on 1 x TPU v6 lite does not fit") and "it is tried" in line


@pytest.mark.parametrize("kind, platform", [("NVIDIA GB10", "gpu"), ("TPU v3", "tpu"), ("Radeon RX 7900 XTX", "gpu")])
def test_an_unknown_kind_is_one_line(monkeypatch, kind, platform):
    found(monkeypatch, kind, 100 * GIB, platform=platform)
    assert said(SMALL, platform=platform) == [devices.estimated(devices.of(kind, platform), kind)]


def test_a_gpu_that_cuda_13_has_given_up(monkeypatch):
    kind = "Tesla V100-SXM2-32GB"
    for capability, version, refused in (("7.0", 13000, True), ("7.0", 12090, False), ("7.5", 13000, False)):
        found(monkeypatch, kind, version=f"PJRT C API\ncuda {version}", compute_capability=capability)
        if refused:
            with pytest.raises(ValueError, match='has compute capability 7.0, and CUDA 13 .*install "jax.cuda12."'):
                said(SMALL)
        else:
            assert said(SMALL) == [
                f"devices: {kind} has no units for bfloat16, whose products take as long as float32's"
            ]
