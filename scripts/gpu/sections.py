"""The sections of scripts/gpu_check.py, in the order in which they run.

First comes the half hour on one H100, three calls of at most ten minutes, in order of worth. These are device, decoding,
the timeline, the learner's attention, flags of XLA, training, peers on the same card, and swaps. Then comes the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu import device, expected

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, kw_only=True)
class Section:
    """One section, which runs in a process of its own.

    - name: of the function that scripts/gpu/child.py calls
    - needs_s: seconds that must be left when it begins, its process's start and compilers included
    - limit_s: seconds after which it counts as hanging
    - after: a section that must have finished
    - option: it tries what may not be there. Then its absence is a figure and no failure.
    - flags: of XLA, with which its process begins, behind those of the whole command
    """

    name: str
    needs_s: float
    limit_s: float
    after: str = ""
    option: bool = False
    flags: str = ""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """One command: which devices it is for, and what it runs there.

    - name: of the command. Its results are called the same, with a hyphen.
    - file: the script, from which the sources are found that a result vouches for
    - table: its sections, in their order
    - child: the script that runs a section
    - why_not: the sentence that refuses a device, or an empty text
    - expected: figures by the kind of a device, as jax names it, and by those that were measured
    - left_out: sections of other profiles that it has not, with the reason
    - belongs: what else a result belongs to, beside commit, sources, device, versions and flags
    - about: what the help says
    """

    name: str
    file: Path
    table: Sequence[Section]
    child: Path
    why_not: Callable[[Mapping[str, Any]], str]
    expected: Callable[[str, Mapping[str, Any]], Mapping[str, expected.Expected]]
    left_out: Mapping[str, str] = field(default_factory=dict)
    belongs: Mapping[str, Any] = field(default_factory=dict)
    about: str = ""

    @property
    def result(self) -> str:
        """Returns the name of a result, and of its file without the ending."""
        return self.name.replace("_", "-")


# A step as one graph also around its loop. CONCURRENT lets nodes overlap that do not wait for each other.
WHILE = "--xla_gpu_enable_command_buffer=+WHILE"
CONCURRENT = f"{WHILE} --xla_gpu_command_buffer_scheduling_mode=CONCURRENT"
CUBLASLT = "--xla_gpu_enable_triton_gemm=false"
TRITON = "--xla_gpu_cublas_fallback=false"
# One tile and no split of K for every number of rows, so that bits need not depend on that number.
ONE_TILE = (
    f"{TRITON} --xla_gpu_experimental_force_split_k=1 --xla_gpu_override_gemm_autotuner="
    "block_m:64,block_n:32,block_k:128,split_k:1,num_stages:3,num_warps:4,num_ctas:1"
)
GRAPHS = "--xla_enable_command_buffers_during_profiling=true"  # else the profiler would record a program without graphs


def _decoding(name: str, flags: str) -> Section:
    return Section(name=name, needs_s=45, limit_s=150, after="decode_1_5b", option=True, flags=flags)


SECTIONS = (
    Section(name="device", needs_s=15, limit_s=60),
    Section(name="decode_1_5b", needs_s=45, limit_s=180, after="device"),
    Section(name="timeline", needs_s=60, limit_s=240, flags=GRAPHS),
    Section(name="packed_rows", needs_s=20, limit_s=240),
    Section(name="packed_rows_times", needs_s=20, limit_s=120),
    Section(name="packed_rows_tiles", needs_s=20, limit_s=240),
    _decoding("flags_while", WHILE),
    _decoding("flags_concurrent", CONCURRENT),
    _decoding("flags_cublaslt", CUBLASLT),
    _decoding("flags_triton", TRITON),
    _decoding("flags_one_tile", ONE_TILE),
    Section(name="row_bits_one_tile", needs_s=30, limit_s=180, option=True, flags=ONE_TILE),
    Section(name="train", needs_s=70, limit_s=260),
    Section(name="train_head_chunk", needs_s=60, limit_s=200),
    Section(name="train_no_scan", needs_s=90, limit_s=300),
    Section(name="tokamax", needs_s=20, limit_s=120, option=True),
    Section(name="generate_eager", needs_s=45, limit_s=150, after="decode_1_5b", option=True),
    Section(name="generate_compiled", needs_s=60, limit_s=240, after="decode_1_5b", option=True),
    Section(name="torch_train", needs_s=60, limit_s=240, after="train", option=True),
    Section(name="swap", needs_s=45, limit_s=180, after="device"),
    Section(name="sampling", needs_s=20, limit_s=90),
    Section(name="paged_attention", needs_s=20, limit_s=90),
    Section(name="row_bits", needs_s=20, limit_s=180),
    Section(name="row_products", needs_s=30, limit_s=180, after="device"),
    Section(name="decode_library", needs_s=45, limit_s=150, after="decode_1_5b"),
    Section(name="decode_fixed", needs_s=45, limit_s=150, after="decode_1_5b"),
    Section(name="equality", needs_s=25, limit_s=120),
    Section(name="rl_same_bits", needs_s=150, limit_s=360),
    Section(name="rl_pipelined", needs_s=60, limit_s=240, after="rl_same_bits"),
    Section(name="trl_steps", needs_s=60, limit_s=240, after="rl_same_bits", option=True),
    Section(name="decode_7b", needs_s=60, limit_s=240, after="device"),
    Section(name="sampling_times", needs_s=20, limit_s=90, after="device"),
    Section(name="cudnn", needs_s=15, limit_s=90, option=True),
    Section(name="transformer_engine", needs_s=15, limit_s=90, option=True),
    Section(name="target", needs_s=10, limit_s=60),
    Section(name="paged_attention_times", needs_s=20, limit_s=400, after="device"),
)

GPU = Profile(
    name="gpu_check",
    file=ROOT / "scripts" / "gpu_check.py",
    table=SECTIONS,
    child=ROOT / "scripts" / "gpu" / "child.py",
    why_not=device.why_not,
    expected=lambda kind, figures: expected.EXPECTED,
    about="Checks and times kernels, engine, learner and runs on a GPU.",
)
