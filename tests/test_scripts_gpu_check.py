"""scripts/gpu_check.py where there is no GPU: it refuses, and its parts do what they say, at sizes of a CPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

import gpu_check  # noqa: E402
import record as records  # noqa: E402

from jaxrl_post.models import decoder  # noqa: E402

MODEL = decoder.ModelConfig(
    vocab_size=1100, embed=16, layers=2, heads=2, kv_heads=1, head_dim=8, ffw=16, max_length=512, tied=True
)


def fresh() -> records.Record:
    return records.Record("gpu-check", [])


def test_it_refuses_in_one_sentence_where_there_is_no_gpu(tmp_path):
    done = subprocess.run(
        [sys.executable, "scripts/gpu_check.py", f"--json={tmp_path / 'x.json'}"],
        cwd=ROOT,
        text=True,
        capture_output=True,
        timeout=120,
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "needs an NVIDIA GPU" in done.stderr
    assert not (tmp_path / "x.json").exists()


def test_an_older_gpu_is_refused_and_a_newer_one_is_not():
    gpu = lambda capability: [SimpleNamespace(platform="gpu", device_kind="X", compute_capability=capability)]  # noqa: E731
    assert "1 x X (gpu)" in gpu_check.why_not(gpu("8.0"))
    assert not gpu_check.why_not(gpu("9.0")) and not gpu_check.why_not(gpu("10.0"))


def test_the_deadline_names_what_it_leaves_out():
    deadline = gpu_check.Deadline(10.0)
    assert deadline.reaches("short", 1.0) and not deadline.reaches("long", 11.0) and deadline.not_reached == ["long"]


@pytest.mark.extended
def test_comparisons_and_times_of_the_kernels():
    record = fresh()
    gpu_check.sampling_against_reference(record, shapes=((4, 1100),))
    gpu_check.attention_against_reference(record, shapes=((2, 100, 2),))
    gpu_check.sampling_times(record, 1e9, rows_of=(4,), vocab=1100)
    assert record.ok and len(record.bounds) == 10
    told = record.figures["verify_sample.4_rows"]
    assert told["floor_ms"] == 1e3 * 4 * 4 * 1100 / 1e9
    np.testing.assert_allclose(told["share_of_bandwidth"], told["floor_ms"] / told["ms"])


@pytest.mark.extended
def test_decoding_reads_weights_and_cache_once_a_step(monkeypatch):
    """By hand: bf16, 2 bytes; a key and a value of 8 numbers for each of 2 layers and each position of 3 answers."""
    monkeypatch.setattr(gpu_check, "STEPS", 2)
    record = fresh()
    gpu_check.decode(record, "x", MODEL, 1e9, gpu_check.Deadline(1e9), batches=(3, 4), contexts=(70,))
    weights = 2 * sum(np.prod(x.shape) for x in jax.tree.leaves(decoder.abstract(MODEL)))
    told = record.figures["decode.x.batch_3_context_70"]
    np.testing.assert_allclose(told["floor_ms"], 1e3 * (weights + 3 * 70 * 2 * 2 * 8 * 2) / 1e9)
    assert told["tokens_per_s"] > 0 and "decode.x.batch_4_context_70" in record.figures


@pytest.mark.extended
def test_random_weights_are_bf16_and_finite():
    leaves = jax.tree.leaves(gpu_check.random_weights(MODEL))
    assert all(leaf.dtype == jnp.bfloat16 and bool(jnp.isfinite(leaf).all()) for leaf in leaves)
