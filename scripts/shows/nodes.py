"""A decode step on one H100 takes few kernels, and no small copies: ten a layer and fifteen outside for 1.5B.

scripts/compile_tier/nodes.py counts kernels and bytes in dispatches that the compiler made for the H100 which wrote down what it
is. It counts them with the kernels that a step has on a GPU, and by XLA's operations alone. The latter have one fused combination
of stretches too. With engine.one_graph a dispatch is one CUDA graph, whose nodes are counted. No GPU has run any of this: whether
fewer kernels are faster is for gpu_check to say.

Tests compare what the kernels compute, interpreted, with the forms of all other platforms. Planted faults of them are caught.
"""

from __future__ import annotations

import compilers
import planted

MINUTES = 14.0
PLATFORM = "cpu"
SOURCES = ("scripts/compile_tier",)
FILE = "scripts/compile_tier/nodes.py"
LAYER = {"qwen2_5_1_5b": 10, "qwen2_5_7b": 11}  # of 7B, gate and up are two products
ROWS, OUTSIDE = (16, 64, 256), 20
TESTS = ("tests/test_engine_between_products.py", "tests/test_engine_row_numbers.py", "tests/test_kernels_row_tiles.py")
FAULTS = ("rows_gpu", "row_numbers", "row_tiles", "small_arrays")
COLUMNS = ("in_a_layer", "outside", "mb_in_a_layer", "mb_outside")


def show(record) -> None:
    python = compilers.python(record.root, "nodes")
    for preset, most in LAYER.items():
        for rows in ROWS:
            here = f"{preset}.{rows}_rows"
            found = compilers.told(record, python, FILE, preset, str(rows), "ours")
            record.figure(f"{here}.layer", found["layer"], at_most=most)
            record.figure(f"{here}.outside", found["outside"], at_most=OUTSIDE)
            record.figure(f"{here}.copies_under_4_kb", found["small_copies"], equals=0)
            plain = compilers.told(record, python, FILE, preset, str(rows), "xla")
            record.figure(f"{here}.layer_by_xla", plain["layer"], at_least=most + 1)
            record.figure(f"{here}.outside_by_xla", plain["outside"], at_least=OUTSIDE + 1)
            for name, one in (("mb", found), ("mb_by_xla", plain)):
                record.figure(f"{here}.{name}", round(one["step_mb"], 1))
            record.figure(f"{here}.bytes_over_xla", round(found["step_mb"] / plain["step_mb"], 4), at_most=1.0)
            for which, one in (("ours", found), ("xla", plain)):
                for name, numbers in one["by_name"].items():
                    told = dict(zip(COLUMNS, numbers, strict=True))
                    record.figure(f"{here}.{which}.{name}", " ".join(f"{key}={told[key]:g}" for key in COLUMNS))
        graphs = compilers.told(record, python, FILE, preset, str(ROWS[0]), "one_graph")
        record.figure(f"{preset}.one_graph.graphs", graphs["graphs"], equals=1)
        record.figure(f"{preset}.one_graph.graphs_with_the_loop", graphs["graphs_with_the_loop"], equals=1)
        record.figure(f"{preset}.one_graph.nodes", graphs["nodes"])
    record.figure("tests_passed", sum(record.passed(file, "") for file in TESTS), at_least=22)
    faults = [one for one in planted.known() if one.id.split(".")[0] in FAULTS]
    caught = [one.verdict == "caught" for one in planted.tried(faults, root=record.root)]
    record.figure("planted", len(caught), at_least=8)
    record.figure("planted_caught", sum(caught), equals=len(caught))
