"""Compiles train steps at full depth for slices that are not there, and writes the bytes that each needs of a device.

    python scripts/compile_tier/memories.py            compiles what scripts/compile_tier/memories.json lacks
    python scripts/compile_tier/memories.py NAME ...   compiles these cases, present or not
    python scripts/compile_tier/memories.py --list     prints the cases that the file lacks
    python scripts/compile_tier/memories.py --print NAME ...   compiles these cases and prints them, as JSON

Run it with the Python of the compile tier (`make test-compile` makes .venv-aot). The plan's formulas are tested against
the file (tests/test_launch_slice_plan.py), and the show `fits` compiles some of the cases again. After a change of the
train step, remove the file and run this.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILE = Path(__file__).with_name("memories.json")
BF16 = "optimizer.sums_dtype=bfloat16", "optimizer.moments_dtype=bfloat16"


def case(model: str, where: str, mesh: tuple[int, int, int], tokens: int, policy: str = "full", *more: str) -> tuple:
    """Returns (name, model, slice, overrides). Each shard of the batch has one row, unless `more` says so."""
    data, fsdp, tensor = mesh
    rows = [one for one in more if one.startswith("rows=")]
    options = [one for one in more if not one.startswith("rows=")]
    each = int(rows[0].removeprefix("rows=")) if rows else 1
    given = (
        f"mesh.data={data}",
        f"mesh.fsdp={fsdp}",
        f"mesh.tensor={tensor}",
        f"batch.rows={each * data * fsdp}",
        f"batch.tokens={tokens}",
        f"model.remat_policy={policy}",
        *options,
    )
    shape = "x".join(map(str, mesh))
    words = " bf16" * (BF16[0] in more) + "".join(f" {one}" for one in more if one not in BF16)
    return f"{model} {where} {shape} T{tokens} {policy}{words}", model, where, given


CASES = (
    case("qwen2_5_7b", "8xh100", (1, 8, 1), 4096),
    case("qwen2_5_7b", "v5e-16", (1, 16, 1), 4096),
    case("qwen2_5_7b", "8xh100", (1, 8, 1), 8192),
    case("qwen2_5_0_5b", "h100", (1, 1, 1), 2048),
    case("qwen2_5_0_5b", "h100", (1, 1, 1), 2048, "full", "rows=4"),
    case("qwen2_5_7b", "8xh100", (1, 8, 1), 4096, "attention"),
    case("qwen2_5_7b", "8xh100", (1, 8, 1), 4096, "projections"),
    case("qwen2_5_7b", "v5e-16", (1, 16, 1), 8192, "full", *BF16),
    case("qwen2_5_0_5b", "v5e-1", (1, 1, 1), 2048),
    case("qwen2_5_7b", "8xh100", (1, 8, 1), 2048, "full", *BF16),
    case("qwen2_5_7b", "8xh100", (1, 4, 2), 4096),
    case("qwen2_5_7b", "8xh100", (2, 4, 1), 4096),
    case("qwen3_32b", "4x8xh100", (1, 32, 1), 4096),
    case("qwen3_32b", "4x8xh100", (1, 32, 1), 2048, "attention", *BF16),
    case("qwen3_8b", "v6e-16", (1, 16, 1), 4096),
    case("qwen2_5_1_5b", "h100", (1, 1, 1), 2048),
    case("qwen2_5_1_5b", "h100", (1, 1, 1), 4096, "projections", *BF16),
    case("qwen2_5_1_5b", "8xh100", (1, 8, 1), 8192),
    case("qwen2_5_7b", "v5e-16", (1, 4, 4), 4096),
    case("qwen2_5_7b", "8xh100", (1, 8, 1), 4096, "full", "rows=2"),
    case("qwen3_8b", "8xh100", (1, 8, 1), 4096),
    case("qwen3_8b", "8xh100", (1, 8, 1), 8192, "attention", *BF16),
    case("qwen3_32b", "v5p-64", (1, 32, 1), 4096),
    case("qwen3_32b", "4x8xh100", (1, 8, 4), 4096),
    case("qwen2_5_0_5b", "h100", (1, 1, 1), 4096, "attention"),
    case("qwen2_5_0_5b", "h100", (1, 1, 1), 8192, "projections"),
    case("qwen2_5_0_5b", "8xh100", (8, 1, 1), 4096),
    case("qwen2_5_1_5b", "8xh100", (1, 8, 1), 2048, "attention", "rows=4"),
    case("qwen2_5_7b", "v5e-16", (1, 16, 1), 4096, "attention", *BF16),
    case("qwen3_8b", "8xh100", (1, 8, 1), 2048, "projections"),
    case("qwen2_5_7b", "4x8xh100", (4, 8, 1), 4096, "full", "batch.head_chunk=8192"),
    case("qwen3_8b", "8xh100", (1, 8, 1), 2048, "full", "rows=2"),
    case("qwen2_5_7b", "8xh100", (1, 2, 4), 8192),
    case("qwen3_32b", "4x8xh100", (2, 16, 1), 4096, "full", *BF16),
    case("qwen2_5_1_5b", "h100", (1, 1, 1), 4096, "full", "rows=2"),
)

COMMITS = {CASES[0][0], CASES[1][0], CASES[3][0], CASES[7][0], CASES[8][0]}


def compiled(model: str, where: str, given: tuple[str, ...], commits: bool = False) -> dict:
    """Returns bytes on a device by program and kind, and the seconds of the compiler.

    Args:
      commits: the optimizer's step is compiled too. It needs less beside the moments than a gradient does.
    """
    from jaxrl_post.config import default, resolve
    from jaxrl_post.launch.parts import build
    from jaxrl_post.launch.plan import chips, device_less
    from jaxrl_post.models import decoder
    from jaxrl_post.models.presets import PRESETS

    device_less.take_none()
    there = chips.read(where)
    config = resolve(default(), [f"model.preset={model}", *ALWAYS, *given])
    mesh = device_less.mesh(there, config.mesh.sizes)
    devices = build.DevicePlan(learner=mesh, engine={}, lent=None)
    learner = build.learner(config, PRESETS[model], decoder.abstract(PRESETS[model]), devices)
    out: dict = {}
    for name, (program, shapes) in learner.jitted().items():
        if name == "accumulate" or (name == "commit" and commits):
            begun = time.process_time()
            told = program.lower(*shapes).compile().memory_analysis()
            out[name] = {
                "arguments": told.argument_size_in_bytes,
                "results": told.output_size_in_bytes - told.alias_size_in_bytes,
                "temporaries": told.temp_size_in_bytes,
                "cpu_s": round(time.process_time() - begun, 1),
            }
    return out


ALWAYS = (
    "model.compute_dtype=bfloat16",
    "model.remat=true",
    "engine.dtype=bfloat16",
    "engine.max_length=512",
    "sampling.max_tokens=256",
)


def main(arguments: list[str]) -> int:
    done = json.loads(FILE.read_text()) if FILE.is_file() else {}
    if arguments[:1] == ["--print"]:
        again = [one for one in CASES if one[0] in arguments]
        print(json.dumps({name: compiled(model, where, given) for name, model, where, given in again}))
        return 0
    missing = [one for one in CASES if (one[0] in arguments if arguments else one[0] not in done)]
    if arguments == ["--list"]:
        print("\n".join(name for name, *_ in CASES if name not in done))
        return 0
    for name, model, where, given in missing:
        found = compiled(model, where, given, commits=name in COMMITS)
        done = json.loads(FILE.read_text()) if FILE.is_file() else {}
        done[name] = {"model": model, "slice": where, "options": [*ALWAYS, *given]} | found
        text = json.dumps({one[0]: done[one[0]] for one in CASES if one[0] in done}, indent=1) + "\n"
        aside = FILE.with_suffix(".part")
        aside.write_text(text)
        aside.replace(FILE)
        sums = {part: sum(v for k, v in of.items() if k != "cpu_s") >> 20 for part, of in found.items()}
        print(f"{name}: {sums} MiB, {sum(of['cpu_s'] for of in found.values())} CPU s", flush=True)
    return 0


if __name__ == "__main__":
    os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)  # a cache would answer for the compiler
    os.environ |= {"JAX_PLATFORMS": "cpu"}  # with "cuda" the plugin looks for cuDNN, which compiling does not need
    sys.path.insert(0, str(ROOT))
    sys.exit(main(sys.argv[1:]))
