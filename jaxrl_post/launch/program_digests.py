"""Digests of a run's compiled programs, by which a resumed run sees that the compiler has made others.

On a GPU the compiler times several forms of a product and keeps the fastest. So two compilations of one program, by the
same versions and on the same kind of device, may round differently.

Invariant: a digest depends on the optimised instructions, and not on files, lines and functions of their source. A program
that comes from the compilation cache has the digest that it had.

Two limits. A kernel's own program holds lines of its source, so an edited file or another folder of this package gives
another digest. And the text leaves out what a constant of more than a few numbers holds.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jaxrl_post.checkpoint import store
from jaxrl_post.engine.elastic import Elastic
from jaxrl_post.engine.row_engine import MeshDevice, RowEngine
from jaxrl_post.trainer.learner import Learner

NAME = "programs"  # of the digests, where a run says what its bits depend on
# What the text of a program says of its source: a table at its head, places of instructions, and names.
_SOURCE = re.compile(
    r"^(?:FileNames|FunctionNames|FileLocations|StackFrames|\d+ [{\"].*)$\n?|^HloModule \S+"
    r'|,? ?metadata=\{(?:"(?:\\.|[^"\\])*"|[^}"])*\}'
    r"|\b[\w.\-]+: (?=\(|[a-z]\w*\[)",
    re.MULTILINE,
)
_NAME = re.compile(r"%[\w.\-]+")


def noted(about: Mapping, saved: store.Saved | None, found: Mapping[str, str], say: Callable[[str], object]) -> dict:
    """Returns `about` with the digests, and says which programs differ from those of the save. It compares what both have."""
    then = saved.about.get(NAME, {}) if saved is not None else {}
    others = sorted(name for name in then.keys() & found.keys() if then[name] != found[name])
    if others:
        say(f"programs that differ from those of the save, so that bits may differ: {', '.join(others)}")
    return {**about, NAME: dict(found)}


def told(learner: Learner, engines: Iterable[Any]) -> dict[str, str]:
    """Returns the digest of every program that this process runs of the learner and of row engines, by name."""
    out = {f"learner.{name}": of(program) for name, program in learner.compiled.items()}
    for engine in engines:
        layouts = engine.engines if isinstance(engine, Elastic) else {None: engine}
        for layout, one in layouts.items():
            where = f"engine.{layout.replicas} x {layout.tensor}" if layout else "engine"
            device = one.device if isinstance(one, RowEngine) else None
            programs = device.programs.compiled if isinstance(device, MeshDevice) else {}
            out |= {f"{where}.{name}": of(program) for name, program in programs.items()}
    return out


def of(program: Any) -> str:
    """Returns 16 hex digits of a compiled program's instructions."""
    numbers: dict[str, str] = {}
    bare = _SOURCE.sub("", program.as_text())
    text = _NAME.sub(lambda name: numbers.setdefault(name[0], f"%{len(numbers)}"), bare)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
