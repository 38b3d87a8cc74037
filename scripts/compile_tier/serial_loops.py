"""Loops over rows that a TPU's compiler made, outside of kernels, as one JSON line.

    python scripts/compile_tier/serial_loops.py PART MODEL TARGET

- PART: engine (rows with drafts and without, cut samples and their records, prompts, texts that enter), scoring (rows of a
  judge or of given tokens), or learner (gradient, scores, optimizer). `planted`: scoring, with a gather of which the compiler
  makes a loop
- MODEL: a preset, whose first layers are compiled at full width

A compiler for TPUs turns some gathers and scatters into a loop that moves one row a turn, while all else waits. Such a loop has
the name of the gather. Loops of the source, and those over calls of one kernel, have names of their own. They count where they
turn as often as there are rows, heads, slots or tokens. Run it with the Python of the compile tier.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]
# Sizes that no other size of a program equals, so that a loop's turns say what it walks.
ROWS, SLOTS, HEADS, KEPT, PAGE, LENGTH, PAGES, STEPS, WIDE, POOL = 80, 48, 56, 20, 64, 4096, 1024, 7, 2048, 1 << 16
TOKENS, LAYERS, PERIOD = 4096, 2, 4
WALKED = {ROWS, SLOTS, HEADS, WIDE, TOKENS, LENGTH}
WRITTEN = ("while", "pallas_call")  # the last part of the names of loops that a source has
GATHER = (
    "own[:, c.FIRST_END : c.TABLE]",
    "packed[slot, c.FIRST_END : c.TABLE]",
)  # in row_program.py, and what is planted


def found(text: str, walked: Collection[int] = WALKED) -> list[dict[str, Any]]:
    """Returns the loops over rows of a compiled text, each with its name and its turns. 0 turns: the text does not say.

    walked: turns with which a loop counts, whatever its name."""
    import compiled_text

    program, out = compiled_text.read(text), []
    for run in program.runs():
        if run.line.operation == "while":
            turns = program.turns(run.line, run.inside)
            if run.line.scope.rsplit("/", 1)[-1] not in WRITTEN or turns in walked:
                out.append({"name": run.line.scope or run.line.name, "turns": turns})
    return out


def programs(part: str, preset: str, target: str) -> dict[str, Any]:
    """Returns the compiled programs of a part, by name."""
    from jaxrl_post.models.presets import PRESETS

    whole = PRESETS[preset]
    linear, layers = whole.linear, PERIOD if whole.linear else LAYERS
    if linear is not None:
        linear = linear._replace(layers=tuple(at for at in linear.layers if at < layers))
    model = replace(whole, layers=layers, windows=whole.windows[:layers], linear=linear)
    if part == "learner":
        return learner(model, preset, target)
    if part == "planted":
        plant()
    return engine(model, target, scoring=part != "engine")


def plant() -> None:
    """Imports the row program with the other gather."""
    spec = importlib.util.find_spec("jaxrl_post.engine.row_program")
    source = Path(spec.origin).read_text()
    assert source.count(GATHER[0]) == 1, "serial-loops: the row program has another gather now"
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    exec(compile(source.replace(*GATHER), spec.origin, "exec"), module.__dict__)


def learner(model: Any, preset: str, target: str) -> dict[str, Any]:
    """Returns the gradient of a micro-batch, the scores of one, and the optimizer's step."""
    import test_train

    from jaxrl_post.launch.plan import chips, device_less

    mesh = device_less.mesh(chips.read("v5p-2" if target == "v5p" else f"{target}-1"), (1, 1, 1, 1))
    made = test_train.on_mesh(test_train.Step(preset, "", (1, 1, 1), TOKENS), model, mesh).jitted()
    chosen = {name: made[name] for name in ("accumulate", "score", "commit")}
    return {name: program.lower(*shapes).compile() for name, (program, shapes) in chosen.items()}


def engine(model: Any, target: str, *, scoring: bool) -> dict[str, Any]:
    """Returns the programs of rows, prompts and texts that enter. Those that score have no drafts and no cuts."""
    import jax.numpy as jnp
    from targets import TARGETS

    from jaxrl_post.engine import compiled
    from jaxrl_post.engine.host.wire import EngineSettings
    from jaxrl_post.engine.speculation.interface import Drafter
    from jaxrl_post.engine.speculation.suffix_drafter import Histospec
    from jaxrl_post.models import experts

    chip, whole = TARGETS[target], not scoring
    sizes = dict(slots=SLOTS, head_rows=HEADS, max_length=LENGTH, page_size=PAGE, pages=PAGES, steps_per_dispatch=STEPS)
    sizes |= dict(restricted=whole, kept_ids=KEPT * whole, route_words=experts.route_words(model) * whole)
    sizes |= dict(row_sizes=(ROWS,), prompt_rows=WIDE * whole, scoring=scoring, dtype=jnp.bfloat16)
    drafter = Histospec(width=8, entries=POOL) if whole else Drafter()
    return compiled.of_shapes(model, chip.mesh(chip.one), EngineSettings(**sizes), drafter).compiled


def main(part: str, preset: str, target: str) -> dict[str, Any]:
    begun = time.process_time()
    made = programs(part, preset, target)
    loops = {name: found(program.as_text()) for name, program in made.items()}
    return {"cpu_s": time.process_time() - begun, "programs": len(made), "loops": loops}


if __name__ == "__main__":
    os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)  # a cache would answer for the compiler
    os.environ |= {"JAX_PLATFORMS": "cpu"}
    from jaxrl_post.launch.plan import device_less

    device_less.take_none()
    print(json.dumps(main(*sys.argv[1:])))
