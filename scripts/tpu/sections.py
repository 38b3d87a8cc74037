"""The sections of scripts/tpu_check.py, in order of worth, and those of gpu_check that no TPU has, with the reason.

Machinery, sizes and most functions are those of scripts/gpu. What TPUs have of their own is beside this file.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpu.sections import Profile, Section
from tpu import expected

from jaxrl_post.parallel import devices

ROOT = Path(__file__).resolve().parents[2]
KINDS = ("v5e", "v6e", "v5p")  # as jaxrl_post/parallel/devices.py names them

SECTIONS = (
    Section(name="device", needs_s=20, limit_s=90),
    Section(name="decode_1_5b", needs_s=60, limit_s=300, after="device"),
    Section(name="packed_rows", needs_s=30, limit_s=240),
    Section(name="packed_rows_times", needs_s=30, limit_s=180),
    Section(name="sampling", needs_s=30, limit_s=180),
    Section(name="paged_attention", needs_s=30, limit_s=180),
    Section(name="recurrent", needs_s=20, limit_s=120),
    Section(name="grouped", needs_s=20, limit_s=120),
    Section(name="row_bits", needs_s=30, limit_s=240),
    Section(name="row_products", needs_s=30, limit_s=240, after="device"),
    Section(name="decode_fixed", needs_s=60, limit_s=300, after="decode_1_5b"),
    Section(name="equality", needs_s=30, limit_s=240),
    Section(name="train", needs_s=90, limit_s=400),
    Section(name="swap", needs_s=45, limit_s=240, after="device"),
    Section(name="rl_same_bits", needs_s=150, limit_s=450),
    Section(name="rl_pipelined", needs_s=60, limit_s=300, after="rl_same_bits"),
    Section(name="decode_7b", needs_s=60, limit_s=300, after="device"),
    Section(name="sampling_times", needs_s=30, limit_s=180, after="device"),
    Section(name="paged_attention_times", needs_s=30, limit_s=400, after="device"),
)

# Sections whose functions are those of gpu_check.
SHARED = (
    "device",
    "decode_1_5b",
    "sampling",
    "paged_attention",
    "row_bits",
    "decode_fixed",
    "equality",
    "rl_same_bits",
    "rl_pipelined",
    "decode_7b",
    "sampling_times",
    "paged_attention_times",
)

_FLAGS = "it compares flags of XLA:GPU, which XLA:TPU does not have"
_PEER = "it runs torch on the same card, and torch sees no TPU without another backend"
_LIBRARY = "the other library's kernel is written for NVIDIA GPUs"
LEFT_OUT = {
    "timeline": "it counts launches of a GPU's streams and graphs, which a TPU's programs do not have",
    "packed_rows_tiles": "it tries tiles of the Triton kernel; on TPUs Splash attention of jax runs, with blocks by shape",
    **dict.fromkeys(("flags_while", "flags_concurrent", "flags_cublaslt", "flags_triton", "flags_one_tile"), _FLAGS),
    "row_bits_one_tile": _FLAGS,
    "train_head_chunk": "its expectation is a GPU's; sizes of the head's pieces are compared by the compilers of the TPU",
    "train_no_scan": "its expectation is a GPU's; unrolled layers take a TPU's compiler minutes",
    **dict.fromkeys(("generate_eager", "generate_compiled", "torch_train", "trl_steps"), _PEER),
    **dict.fromkeys(("tokamax", "cudnn", "transformer_engine"), _LIBRARY),
    "decode_library": "on TPUs XLA's operations run between products in any case",
    "target": "a TPU's compiler needs no description of the device: the topology's name is enough",
}


def why_not(seen: Mapping[str, Any]) -> str:
    """Returns the sentence of the refusal, or nothing."""
    if seen["platform"] == "tpu" and devices.of(seen["kind"]).name in KINDS:
        return ""
    return (
        f"tpu_check needs one host of TPU {', '.join(KINDS[:-1])} or {KINDS[-1]}, and jax sees {seen['count']} x "
        f"{seen['kind']} ({seen['platform']}); run it on such a host, with the extra jaxrl_post[tpu]"
    )


TPU = Profile(
    name="tpu_check",
    file=ROOT / "scripts" / "tpu_check.py",
    table=SECTIONS,
    child=ROOT / "scripts" / "tpu" / "child.py",
    why_not=why_not,
    expected=expected.of_kind,
    left_out=LEFT_OUT,
    about="Checks and times kernels, engine, learner and runs on one host of TPUs.",
)
