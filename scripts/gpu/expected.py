"""What figures of scripts/gpu_check.py are expected, and where from. The table of a result has them beside what was measured.

Sources of an expectation:
- H100: measured on one, by scripts/results/gpu-check.json or gpu-check-first.json
- published: by the makers of another library, on an H100
- estimate: from compiled programs, bytes and FLOPs. Nothing has confirmed it.

An expectation is no bound. A figure beside it says where to look.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Expected(NamedTuple):
    """A value, or both ends of a range, and its source."""

    low: Any
    high: Any
    source: str

    def __str__(self) -> str:
        ends = short(self.low) if self.low == self.high else f"{short(self.low)} to {short(self.high)}"
        return f"{ends} ({self.source})"


def _h100(values: Mapping[str, Any]) -> dict[str, Expected]:
    return {key: Expected(value, value, "H100") for key, value in values.items()}


def _estimate(values: Mapping[str, Any], source: str = "estimate") -> dict[str, Expected]:
    pairs = {key: value if isinstance(value, tuple) else (value, value) for key, value in values.items()}
    return {key: Expected(*pair, source) for key, pair in pairs.items()}


_DECODE, _TRAIN, _ROWS = "decode.qwen2_5_1_5b.batch_", "train.qwen2_5_1_5b.", "packed_rows."
_PRODUCTS = ".qwen2_5_1_5b.layer_over_library"
_TIMELINE, _PEER = "timeline.decode.qwen2_5_1_5b.batch_", ".qwen2_5_1_5b.batch_"
MEASURED = _h100(
    {
        "device.copy_gb_per_s": 2952,
        "device.product_tflops": 809,
        f"{_DECODE}16_context_1024/step_ms": 2.835,
        f"{_DECODE}64_context_1024/step_ms": 3.801,
        f"{_DECODE}256_context_1024/step_ms": 7.881,
        f"{_DECODE}16_context_4096/step_ms": 3.237,
        f"{_DECODE}64_context_4096/step_ms": 5.579,
        f"{_DECODE}256_context_4096/step_ms": 16.37,
        f"{_DECODE}16_context_1024/share_of_bandwidth": 0.425,
        f"{_DECODE}256_context_4096/share_of_bandwidth": 0.686,
        f"{_TRAIN}4096_tokens_1_sequences/mfu": 0.347,
        f"{_TRAIN}4096_tokens_4_sequences/mfu": 0.362,
        f"{_TRAIN}8192_tokens_1_sequences/mfu": 0.329,
        f"{_TRAIN}8192_tokens_4_sequences/mfu": 0.3565,
        "swap.qwen2_5_1_5b/swap_s": 0.0098,
        "swap.qwen2_5_7b/swap_s": 0.033,
        "decode.qwen2_5_7b.batch_16_context_1024/step_ms": 6.736,
        f"{_ROWS}8192_tokens_1_segments/forward_share_of_peak": 0.2355,
        f"{_ROWS}8192_tokens_1_segments/with_backward_share_of_peak": 0.2515,
        "cudnn.4096_tokens/forward_share_of_peak": 0.468,
        "cudnn.4096_tokens/with_backward_share_of_peak": 0.407,
        "cudnn.8192_tokens/forward_share_of_peak": 0.591,
        "rl.sync/step_s": 0.568,
        "rl.drafted/step_s": 0.477,
    }
)
ESTIMATES = _estimate(
    {
        "swap.qwen2_5_7b/with_flag_s": 0.020,  # the cast alone, and one program's launch
        # Nodes of a step's graph in the compiled programs, with 1.3 microseconds between two of them.
        f"{_TIMELINE}16_context_1024/launches": (425, 460),
        f"{_TIMELINE}256_context_1024/launches": 490,
        f"{_TIMELINE}16_context_1024/idle_ms": (0.4, 0.6),
        f"{_TIMELINE}16_context_1024/products_ms": 1.3,
        f"{_TIMELINE}256_context_1024/products_ms": (1.5, 3.0),
        # From what the kernel had before it was rewritten to what the best Triton kernel has.
        f"{_ROWS}4096_tokens_1_segments/forward_share_of_peak": (0.21, 0.35),
        f"{_ROWS}4096_tokens_1_segments/with_backward_share_of_peak": (0.20, 0.32),
        # The loop's own conditions and waits, and then nodes side by side.
        f"flags_while{_PEER}16_context_1024/longer_than_as_is_ms": (-0.05, -0.02),
        f"flags_while{_PEER}256_context_1024/longer_than_as_is_ms": (-0.05, -0.02),
        f"flags_concurrent{_PEER}16_context_1024/longer_than_as_is_ms": (-0.15, -0.07),
        f"flags_concurrent{_PEER}256_context_1024/longer_than_as_is_ms": (-0.15, -0.07),
        f"flags_one_tile{_PEER}16_context_1024/over_as_is": (1.0, 1.2),
        f"flags_one_tile{_PEER}256_context_1024/over_as_is": (1.0, 1.2),
        **{f"row_bits_one_tile.qwen2_5_7b.{name}_equal_in_128_rows": True for name in ("q", "kv", "o", "up", "down")},
        # At few rows both read the weights once. At many, ours reads rows and weights more often from the L2 cache.
        f"row_products{_PRODUCTS}/16_rows": (0.9, 1.3),
        f"row_products{_PRODUCTS}/256_rows": (1.2, 2.0),
        f"decode_fixed{_PEER}16_context_1024/over_as_is": (1.0, 1.1),
        f"decode_fixed{_PEER}256_context_1024/over_as_is": (1.05, 1.3),
        # 23 ms of a micro-batch by a head in larger pieces, and 18 to 25 by layers that no scan stacks.
        "train_head_chunk.qwen2_5_1_5b.4096_tokens_4_sequences/mfu": 0.39,
        "train_no_scan.qwen2_5_1_5b.4096_tokens_4_sequences/mfu": 0.41,
        f"{_TRAIN}4096_tokens.gradient_bits_equal_again": True,
        f"{_TRAIN}8192_tokens.gradient_bits_equal_again": True,
        # By what others have measured of a step of 1.5 billion weights.
        f"generate_eager{_PEER}16_context_1024/step_ms": (25, 30),
        f"generate_eager{_PEER}16_context_1024/ours_over_peer": (8, 10),
        f"generate_compiled{_PEER}16_context_1024/step_ms": (3.5, 5),
        f"generate_compiled{_PEER}16_context_1024/ours_over_peer": (1.2, 1.7),
        "torch_train.qwen2_5_1_5b.4096_tokens_1_sequences/mfu": (0.35, 0.42),
        "torch_train.qwen2_5_1_5b.4096_tokens_1_sequences/ours_over_peer": (0.83, 1.0),
    }
)
PUBLISHED = _estimate(
    {
        "tokamax.4096_tokens_1_segments/forward_share_of_peak": 0.57,
        "tokamax.4096_tokens_1_segments/with_backward_share_of_peak": 0.45,  # 0.41 of the backward pass alone
    },
    "published",
)
EXPECTED = MEASURED | ESTIMATES | PUBLISHED


def rows(
    figures: Mapping[str, Any], bounds: Mapping[str, Any], known: Mapping[str, Expected] = EXPECTED
) -> list[tuple[str, str, str, str, str]]:
    """Returns figure, measured, expected, bound, and ok or FAIL. A part of a figure that is expected has a row of its own.

    known: the expectations. Those of gpu_check, unless given."""
    out = []
    for key, value in figures.items():
        parts = {name: value[name.partition("/")[2]] for name in _parts(key, known) if _has(value, name)}
        bound = bounds.get(key, {})
        verdict = ("ok" if bound["ok"] else "FAIL") if bound else ""
        if bound or not parts:
            out.append((key, short(value), str(known.get(key, "")), _bound(bound), verdict))
        out += [(name, short(part), str(known[name]), "", "") for name, part in parts.items()]
    return out


def _parts(key: str, known: Mapping[str, Expected]) -> list[str]:
    return [name for name in known if name.startswith(f"{key}/")]


def _has(value: Any, name: str) -> bool:
    return isinstance(value, Mapping) and name.partition("/")[2] in value


def _bound(bound: Mapping[str, Any]) -> str:
    signs = {"at_least": ">=", "at_most": "<=", "equals": "="}
    return " and ".join(f"{sign} {short(bound[kind])}" for kind, sign in signs.items() if kind in bound)


def table(figures: Mapping[str, Any], bounds: Mapping[str, Any], known: Mapping[str, Expected] = EXPECTED) -> str:
    """Returns one line per row, in columns."""
    lines = [("figure", "measured", "expected", "bound", ""), *rows(figures, bounds, known)]
    widths = [max(len(line[column]) for line in lines) for column in range(5)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines)


def page(told: Mapping[str, Any], known: Mapping[str, Expected] = EXPECTED) -> str:
    """Returns the table of a result, below what it belongs to."""
    device, commit = told["device"], (told["commit"] or "unknown")[:7]
    head = f"{device['count']} x {device['kind']}, commit {commit}, {told['seconds']:.0f} s"
    return "\n".join(
        [head, *([told["small"]] if "small" in told else []), table(told["figures"], told["bounds"], known)]
    )


def short(value: Any) -> str:
    """Returns a value in at most 48 characters."""
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    text = " ".join(text.split())
    return text if len(text) <= 48 else f"{text[:45]}..."
