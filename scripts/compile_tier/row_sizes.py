"""How the products of a decode step are tiled at each number of rows, in the vendors' compiled text, as one JSON line.

    python scripts/compile_tier/row_sizes.py TARGET library|one_tile|fixed

The dispatch of Qwen2.5-1.5B on one device is compiled with LAYERS layer for each number of ROWS. `one_tile` is the library under
flags that name one tile and forbid to split a sum (scripts/gpu/sections.py: ONE_TILE). The line has by number of rows and product,
as INPUTSxOUTPUTS, the tilings of its sum:

- on TPUs the compiler's emitter, its turns along the sum, and the block of a turn; or the shapes of products of our kernel
- on GPUs the parts of the sum, the numbers of a turn, the tile, and which operand comes first; or the instructions of our kernel

`of_library` counts products that XLA makes, and `kernels` those of ours. Run it with the Python of the compile tier.
"""

from __future__ import annotations

import base64
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]
PRESET, LAYERS, SLOTS, CONTEXT, PAGE, STEPS = "qwen2_5_1_5b", 1, 16, 4096, 64, 32
ROWS = (16, 32, 64, 128, 256)
KERNEL, ALONE = "multiply_rows", "alone"
SPILLING = "xla_gpu_fail_ptx_compilation_on_register_spilling"


def compiled(target: str, form: str, rows: int) -> str:
    """Returns the text of a dispatch."""
    import test_programs
    from targets import TARGETS

    from jaxrl_post.models.presets import PRESETS

    chip, model = TARGETS[target], replace(PRESETS[PRESET], layers=LAYERS, windows=())
    sizes = dict(slots=SLOTS, head_rows=SLOTS, max_length=CONTEXT, page_size=PAGE, pages=SLOTS * CONTEXT // PAGE)
    sizes |= dict(steps_per_dispatch=STEPS, products="fixed" if form == "fixed" else "library")
    made, _ = test_programs.programs_of(model, chip.mesh(chip.one), (rows,), **sizes)
    return made.compiled[f"dispatch_{rows}"].as_text()


def of_library(text: str, rows: int) -> Iterator[tuple[str, str]]:
    """Yields product and tiling of each product of weights that XLA made. Its rows are the step's, or those of a tile of heads."""
    import compiled_text

    program = compiled_text.read(text)
    for run in program.runs():
        for inner in [*program.within(run), run]:
            if run.loops and inner.line.operation in ("convolution", "dot"):
                given = [one.arrays[0].dims for one in inner.inside.given(inner.line)]
                made = inner.line.arrays[0].dims
                if sides := _sides([math.prod(one) for one in given], made, rows):
                    about = run.line.rest + inner.line.rest
                    tiling = _on_tpu(about, inner.line) if "window_config" in about else _on_gpu(about, made, rows)
                    yield sides, tiling


def _sides(sizes: list[int], made: tuple[int, ...], rows: int) -> str:
    """Returns inputs and outputs of a product by the sizes of what goes in, or nothing where no side is rows."""
    for height in (rows, min(rows, 64)):
        for x, weights in (sizes, sizes[::-1]):
            inputs = x // height
            whole = x % height == 0 and weights % inputs == 0 and math.prod(made) % (height * (weights // inputs)) == 0
            if whole and weights >= x and height in made:
                return f"{inputs}x{weights // inputs}"
    return ""


def _on_tpu(about: str, line: Any) -> str:
    window = json.loads(re.search(r'"window_config":(\{.*?\})', about)[1])
    emitter = re.search(r'"emitter":"(\w+)"', about)[1]
    rows = 1 if "0" in re.search(r"dim_labels=(\w+)_", line.rest)[1] else 0  # which axis of a block they are
    block = [size for at, size in enumerate(window["input_window_bounds"]) if at != rows]
    return f"{emitter}, turns {'x'.join(window['iteration_bounds'][2:])}, block {'x'.join(block)}"


def _on_gpu(about: str, made: tuple[int, ...], rows: int) -> str:
    tiles = re.findall(r'"sizes":\[([^\]]*)\]', about)
    if len(tiles) < 2:
        return "no tile is told"
    tile, turn = ([int(size) for size in re.findall(r"\d+", one)] for one in tiles[:2])
    first = "rows" if made[-2] in (rows, min(rows, 64)) and made[-2] < made[-1] else "weights"
    height, width = tile[-2:] if first == "rows" else tile[:-3:-1]
    parts = made[0] if len(made) > 2 else 1
    return f"parts {parts}, turn {turn[-1]}, tile of {height} rows and {width} outputs, {first} first"


def of_kernels(text: str) -> Iterator[tuple[str, str]]:
    """Yields product and tiling of each call of our kernel on a TPU, from the program that it holds."""
    from jax._src.lib import tpu
    from jaxlib.mlir import ir

    for about, body in re.findall(rf'%{KERNEL}[\w.]* = (.*?)"body":"([^"]+)"', text):
        with ir.Context() as context:
            context.allow_unregistered_dialects = True
            tpu.register_dialect(context)
            code = str(ir.Module.parse(base64.b64decode(body)))
        found = re.findall(r'tpu\.matmul".*?: \(vector<(\w+)xbf16>, vector<(\w+)xbf16>', code)
        assert found, f"row-sizes: a kernel without a product: {code[:400]}"
        sides = re.search(r"\{bf16\[\d+,(\d+)\]\{1,0\}, bf16\[(\d+),(\d+)\]", about)
        inputs = int(sides[1])
        yield (
            f"{inputs}x{int(sides[2]) * int(sides[3]) // inputs}",
            " and ".join(sorted({" * ".join(one) for one in found})),
        )


def of_instructions(target: str, rows: int) -> Iterator[tuple[str, str]]:
    """Yields product and instructions of our kernel on a GPU for each shape, from the code that the compiler leaves.

    The kernels of a dispatch are those: they follow from shapes alone. In a process of its own, for its flags.
    """
    words = [sys.executable, __file__, target, ALONE, str(rows)]
    with tempfile.TemporaryDirectory() as folder:
        dump = f"--xla_dump_to={folder} --xla_gpu_dump_llvmir=true --xla_dump_emitter_re=triton-to-llvm"
        flags = f"{os.environ.get('XLA_FLAGS', '')} {dump}".strip()
        subprocess.run(words, env=os.environ | {"XLA_FLAGS": flags}, check=True, capture_output=True)
        for file in sorted(Path(folder).glob("*triton-to-llvm.txt")):
            found = set(re.findall(r"wgmma\.mma_async\.[\w.]+|mma\.sync\.[\w.]+", file.read_text()))
            yield re.search(r"(\d+x\d+)", file.name)[1], " and ".join(sorted(found))


def alone(target: str, rows: int) -> None:
    """Compiles our kernel of products for each matrix of the model, under the name of its sides. It may spill no register."""
    import jax
    import jax.numpy as jnp
    from gpu import row_bits
    from targets import TARGETS

    from jaxrl_post.kernels import product_gpu
    from jaxrl_post.models.presets import PRESETS
    from jaxrl_post.parallel import mesh as meshes

    mesh, model = TARGETS[target].mesh(TARGETS[target].one), PRESETS[PRESET]
    for inputs, outputs in sorted(set(row_bits.shapes(model).values())):
        turned = outputs == model.vocab_size and model.tied
        how = dict(dtype=jnp.float32, turned=True) if turned else dict(dtype=jnp.bfloat16)

        def multiply(x: Any, w: Any, how: Any = how) -> Any:
            return product_gpu.product(x, w, **how)

        multiply.__name__ = f"{inputs}x{outputs}"
        shapes = [(rows, inputs), (outputs, inputs) if turned else (inputs, outputs)]
        given = [jax.ShapeDtypeStruct(one, jnp.bfloat16, sharding=meshes.replicated(mesh)) for one in shapes]
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            jax.jit(multiply, compiler_options={SPILLING: True}).lower(*given).compile()


def _runs(text: str) -> Iterator[Any]:
    import compiled_text

    yield from compiled_text.read(text).runs()


def main(target: str, form: str) -> dict[str, Any]:
    from gpu.sections import ONE_TILE

    if form == "one_tile":
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {ONE_TILE}".strip()
    told = {}
    for rows in ROWS:
        text = compiled(target, form, rows)
        library, kernels = [*of_library(text, rows)], []
        if form == "fixed":
            kernels = [*(of_instructions(target, rows) if target == "sm_90" else of_kernels(text))]
        tilings = defaultdict(set)
        for product, tiling in (*library, *kernels):
            tilings[product].add(tiling)
        called = sum(one.line.operation == "custom-call" and KERNEL in one.line.scope for one in _runs(text))
        found = {product: sorted(several) for product, several in sorted(tilings.items())}
        told[rows] = {"of_library": len(library), "kernels": called, "tilings": found}
    return told


if __name__ == "__main__":
    os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)  # a cache would answer for the compiler
    os.environ |= {"JAX_PLATFORMS": "cpu"}
    from jaxrl_post.launch.plan import device_less

    device_less.take_none()
    if sys.argv[2] == ALONE:
        alone(sys.argv[1], int(sys.argv[3]))
    else:
        print(json.dumps(main(sys.argv[1], sys.argv[2])))
