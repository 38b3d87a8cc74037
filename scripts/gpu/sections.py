"""The sections of scripts/gpu_check.py, in the order in which they run: what is promised, then figures, then long sweeps."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Section:
    """One section, which runs in a process of its own.

    - name: of the function that scripts/gpu/child.py calls
    - needs_s: seconds that must be left when it begins, its process's start and compilers included
    - limit_s: seconds after which it counts as hanging
    - after: a section that must have finished
    - option: it tries what may not be there. Then its absence is a figure and no failure.
    """

    name: str
    needs_s: float
    limit_s: float
    after: str = ""
    option: bool = False


SECTIONS = (
    Section(name="device", needs_s=15, limit_s=60),
    Section(name="sampling", needs_s=20, limit_s=90),
    Section(name="paged_attention", needs_s=20, limit_s=90),
    Section(name="packed_rows", needs_s=20, limit_s=240),
    Section(name="row_bits", needs_s=20, limit_s=180),
    Section(name="equality", needs_s=25, limit_s=120),
    Section(name="decode_1_5b", needs_s=45, limit_s=180, after="device"),
    Section(name="train", needs_s=70, limit_s=260),
    Section(name="swap", needs_s=45, limit_s=180, after="device"),
    Section(name="rl_same_bits", needs_s=150, limit_s=360),
    Section(name="rl_pipelined", needs_s=60, limit_s=240, after="rl_same_bits"),
    Section(name="timeline", needs_s=60, limit_s=240),
    Section(name="decode_7b", needs_s=60, limit_s=240, after="device"),
    Section(name="packed_rows_times", needs_s=20, limit_s=120),
    Section(name="packed_rows_tiles", needs_s=20, limit_s=240),
    Section(name="sampling_times", needs_s=20, limit_s=90, after="device"),
    Section(name="cudnn", needs_s=15, limit_s=90, option=True),
    Section(name="transformer_engine", needs_s=15, limit_s=90, option=True),
    Section(name="target", needs_s=10, limit_s=60),
    Section(name="paged_attention_times", needs_s=20, limit_s=400, after="device"),
)
