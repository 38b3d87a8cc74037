"""No TPU program has a loop over rows outside of kernels: decode, prompts, scoring, a judge's rows, and the train step.

scripts/compile_tier/serial_loops.py compiles the first layers of a dense model, of one with recurrent states and of one with
experts, at full width. The planted gather is the one that the row program had: the count must find its loop. The seconds of the
compiler with it and without it stand side by side.
"""

from __future__ import annotations

import compilers

MINUTES = 25.0
PLATFORM = "cpu"
SOURCES = ("scripts/compile_tier",)
DENSE, RECURRENT, EXPERTS = "qwen2_5_1_5b", "qwen3_5_0_8b", "qwen3_30b_a3b"
COMPILED = (
    *((part, DENSE, target) for target in ("v5e", "v6e") for part in ("engine", "scoring", "learner")),
    *((part, model, "v6e") for model in (RECURRENT, EXPERTS) for part in ("engine", "learner")),
)
PLANTED = ("planted", DENSE, "v6e")


def show(record) -> None:
    python = compilers.python(record.root, "serial-loops")
    file, programs = "scripts/compile_tier/serial_loops.py", 0
    for words in COMPILED:
        part, model, target = words
        found = compilers.told(record, python, file, *words)
        programs += len(found["loops"])
        for program, loops in found["loops"].items():
            record.figure(f"{model}.{target}.{part}.{program}", loops, equals=[])
        record.figure(f"{model}.{target}.{part}.cpu_s", round(found["cpu_s"], 1))
    record.figure("programs", programs, at_least=30)
    found, sound = (compilers.told(record, python, file, part, *PLANTED[1:]) for part in (PLANTED[0], "scoring"))
    loops = [one for some in found["loops"].values() for one in some]
    record.figure("planted.loops", len(loops), at_least=1)
    record.figure("planted.name", loops[0]["name"] if loops else "")
    record.figure("planted.cpu_s", round(found["cpu_s"], 1))
    record.figure("without.cpu_s", round(sound["cpu_s"], 1))
