"""A decode step with top-k and top-p moves little more than one without, on sm_90 and v6e, and cuts as the reference does.

1. scripts/compile_tier/cuts.py counts the bytes of a step of Qwen2.5-1.5B at 64 and 256 rows, with cuts and without. On a GPU some
   passes run only where a row needs them. Requests with a top-k below 520 need none of them, those with top-p alone need half,
   and a larger top-k with top-p needs all.
2. Every form of finding a threshold keeps the ids that a twin in numpy keeps, ties included. A row has equal bits beside other
   rows, at other places and in other numbers of rows. Planted faults of each form are caught.
"""

from __future__ import annotations

import compilers
import planted

MINUTES = 12.0
PLATFORM = "cpu"
SOURCES = ("scripts/compile_tier",)
TARGETS, ROWS, OVER = ("sm_90", "v6e"), (64, 256), 1.15
TESTS = "tests/test_kernels_thresholds.py"
FAULTS = ("thresholds", "thresholds_gpu", "thresholds_tpu")


def show(record) -> None:
    python = compilers.python(record.root, "cuts")
    for target in TARGETS:
        for rows in ROWS:
            found = compilers.told(record, python, "scripts/compile_tier/cuts.py", target, str(rows))
            for name, value in found.items():
                bound = {"at_most": OVER} if name.endswith("over_uncut") else {}
                record.figure(f"{target}.{rows}_rows.{name}", round(value, 4), **bound)
    record.figure("tests_passed", record.passed(TESTS, ""), at_least=9)
    faults = [one for one in planted.known() if one.id.split(".")[0] in FAULTS]
    caught = [one.verdict == "caught" for one in planted.tried(faults, root=record.root)]
    record.figure("planted", len(caught), at_least=9)
    record.figure("planted_caught", sum(caught), equals=len(caught))
