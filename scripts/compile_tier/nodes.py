"""Kernels of a decode step on an H100, and the bytes that they move: of a layer and outside of the layers, as one JSON line.

    python scripts/compile_tier/nodes.py PRESET ROWS ours|xla|one_graph

The dispatch of ROWS rows and 256 slots of CONTEXT tokens is compiled with 2 and with 4 layers of the model's width. The target is
the H100 that wrote down what it is, in scripts/results/gpu-check-first.json. A kernel is an instruction of the dispatch's loop that the
device runs: a fusion, a custom call, a reduction, a sort, a copy. Names are those of the functions that made them.

- ours: with the kernels that a step has on a GPU
- xla: without those for small arrays, for samples, and between products
- one_graph: nodes of the CUDA graphs of a dispatch of 2 and of 4 layers, of which one holds the loop

Run it with the Python of the compile tier.
"""

from __future__ import annotations

import collections
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]
CARD = ROOT / "scripts" / "results" / "gpu-check-first.json"
SLOTS, PAGE, BLOCKS, STEPS, CONTEXT = 256, 64, 67, 32, 1024
FEW, MORE = 2, 4  # layers
SMALL = 4096  # bytes of a copy that should not be a kernel


def dispatch(preset: str, rows: int, layers: int, **how) -> str:
    """Returns the compiled text of a dispatch."""
    import targets
    import test_programs
    from jax.experimental import topologies

    from jaxrl_post.models.presets import PRESETS

    told = json.loads(CARD.read_text())["figures"]["device.target_config"]
    card = topologies.get_topology_desc(platform="cuda", target_config=told, topology="1x1x1").devices
    model = replace(PRESETS[preset], layers=layers, windows=())
    sizes = dict(slots=SLOTS, head_rows=SLOTS, max_length=PAGE * BLOCKS, page_size=PAGE, pages=SLOTS * BLOCKS) | how
    programs, _ = test_programs.programs_of(
        model, targets.mesh_of(card, (1, 1, 1)), (rows,), steps_per_dispatch=STEPS, **sizes
    )
    return programs.compiled[f"dispatch_{rows}"].as_text()


def kernels(text: str, rows: int) -> list[tuple[str, float, int]]:
    """Returns of each kernel of a step the name of what made it, the bytes that it moves, and the size of a copy. 0: it is none."""
    import compiled_text
    import kernel_costs
    import traffic

    program, found = compiled_text.read(text), []
    formulas = kernel_costs.paged(lambda _: [CONTEXT] * rows, rows)
    for run in traffic.launched(program):
        if run.loops:
            copied = sum(one.bytes for one in run.line.arrays) if _copies(program, run) else 0
            found.append((named(run.line), traffic.moved(program, run, formulas), copied))
    return found


def _copies(text, run) -> bool:
    """Returns whether a kernel is a copy and nothing else."""
    inside = [one.line.operation for one in text.within(run)]
    return run.line.operation == "copy" or (bool(inside) and set(inside) <= {"parameter", "copy", "bitcast", "tuple"})


def named(line) -> str:
    """Returns the innermost function or scope that made a line, and its operation."""
    scopes = [part for part in line.scope.split("/") if not re.match(r"(jit|vmap|while|body|closed_call|pjit)\b", part)]
    return "/".join(scopes[-2:]) or line.operation


def main(preset: str, rows: int, form: str) -> dict:
    from jaxrl_post.kernels import choice, sampling_gpu, small_arrays, tiles

    if form == "one_graph":
        return graphs(preset, rows)
    off = (
        mock.patch.object(choice, "of_small_arrays", lambda device, spread: small_arrays.run),
        mock.patch.object(sampling_gpu, "sampled", tiles.sampled),
    )
    for one in off if form == "xla" else ():
        one.start()
    how = {"products": "library"} if form == "xla" else {}
    few, more = (kernels(dispatch(preset, rows, layers, **how), rows) for layers in (FEW, MORE))
    layer = (len(more) - len(few)) / (MORE - FEW)
    return {
        "layer": layer,
        "outside": len(few) - FEW * layer,
        "small_copies": sum(0 < size < SMALL for _, _, size in few),
        "step_mb": _whole(preset, *(sum(size for _, size, _ in found) for found in (few, more))) / 1e6,
        "by_name": _by_name(few, more),
    }


def _whole(preset: str, few: float, more: float) -> float:
    """Returns the number of a step with all layers, from those of 2 and of 4."""
    from jaxrl_post.models.presets import PRESETS

    return few + (PRESETS[preset].layers - FEW) * (more - few) / (MORE - FEW)


def _by_name(few: list, more: list) -> dict[str, list[float]]:
    """Returns by name the kernels of a layer, those outside, and megabytes of both."""
    sums = []
    for found in (few, more):
        launches, moved = collections.Counter(), collections.Counter()
        for name, size, _ in found:
            launches[name] += 1
            moved[name] += size / 1e6
        sums.append((launches, moved))
    out = {}
    for name in sorted({name for name, *_ in (*few, *more)}):
        own = [(both[1][name] - both[0][name]) / (MORE - FEW) for both in zip(*sums, strict=True)]
        rest = [one[name] - FEW * each for one, each in zip(sums[0], own, strict=True)]
        out[name] = [round(number, 3) for number in (own[0], rest[0], own[1], rest[1])]
    return out


def graphs(preset: str, rows: int) -> dict[str, int]:
    """Returns the graphs of a dispatch, how many of them hold the loop, and nodes of a dispatch with all layers.

    XLA writes down the order in which it launches things, beside the compiled text."""
    counts = []
    for layers in (FEW, MORE):
        with tempfile.TemporaryDirectory() as folder:
            flags = f"--xla_dump_to={folder} --xla_dump_hlo_module_re=.*dispatch.*"
            with mock.patch.dict(os.environ, {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}"}):
                _in_child(preset, rows, layers)
            (told,) = Path(folder).glob("*dispatch.thunk_sequence_after_thunk_passes.txt")
            counts.append(read_graphs(told.read_text()))
    graphs, with_loop = counts[0][:2]
    nodes = _whole(preset, *(one[2] for one in counts))
    return {"graphs": graphs, "graphs_with_the_loop": with_loop, "nodes": round(nodes)}


def read_graphs(told: str) -> tuple[int, int, int]:
    """Returns, of a sequence of launches as XLA writes it: graphs, graphs that hold a loop, and what they launch."""
    graphs, loops, nodes, inside, depth = 0, 0, 0, False, 0
    for line in told.splitlines():
        launch = re.match(r"( *)\d+: k(\w+)", line)
        if not launch:
            continue
        at, kind = len(launch[1]), launch[2]
        if kind == "CommandBuffer":
            graphs, inside, depth = graphs + 1, True, at
        elif inside and at > depth:
            loops, nodes = loops + (kind == "While"), nodes + (kind != "While")
        else:
            inside = False
    return graphs, loops, nodes


def _in_child(preset: str, rows: int, layers: int) -> None:
    """Compiles a dispatch as one graph in a process of its own: XLA reads its flags once."""
    subprocess.run([sys.executable, __file__, preset, str(rows), f"compile_{layers}"], check=True, capture_output=True)


if __name__ == "__main__":
    os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)  # a cache would answer for the compiler
    os.environ |= {"JAX_PLATFORMS": "cpu"}
    from jaxrl_post.launch.plan import device_less

    device_less.take_none()
    asked, count, form = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    if form.startswith("compile_"):
        dispatch(asked, count, int(form.removeprefix("compile_")), one_graph=True)
    else:
        print(json.dumps(main(asked, count, form)))
