"""Compiles a program once for all tests of a worker that ask for the same one: an engine's by sizes and drafter, learners by settings.

Tracing, lowering and loading from the compilation cache took a third of the CPU seconds of the runs that tests start.
Two requests are the same where every setting is, and where nothing in the project has been replaced since: a planted
fault, by monkeypatch or otherwise, is compiled anew. What is shared is a finished program; arrays are never shared.
An engine that is made within `on_demand` traces its programs then, and compiles one when it first runs.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import os
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
OURS = tuple(
    f"{ROOT / folder}{os.sep}" for folder in ("jaxrl_post", "kernels", "tests")
)  # an environment may lie in ROOT
KEPT = 64  # so many programs of engines and learners stay; a worker's memory is bounded
UNTRACED = {
    "checkpoint",
    "chores",
    "hf",
    "launch",
    "main",
    "metrics",
    "observers",
    "rewards",
    "runs",
    "scheduler",
    "telemetry",
}  # rooms and files of which no program is made; tests that kill a run replace functions of theirs


class Made(NamedTuple):
    """Stands for a jitted program that was compiled before."""

    program: Any

    def lower(self, *_) -> Made:
        return self

    def compile(self) -> Any:
        return self.program


class ProgramCache:
    """What was compiled, by key. An entry holds the objects whose identity is in its key: no id is used twice."""

    def __init__(self):
        self.entries: OrderedDict[tuple, tuple[list, Any]] = OrderedDict()

    def ask(self, settings: tuple, make: Callable[[], Any]) -> tuple[Any, bool]:
        """Returns what was made for these settings, and whether `make` was called for it now."""
        objects = list(parts_of_the_project())
        key = (*settings, _flags(), tuple(map(id, objects)))
        try:
            found = self.entries.pop(key, None)
        except TypeError:  # a setting without a hash: never the same
            return make(), True
        new = found is None
        if not new:  # who listens for compilations, as the guard of a run does, hears of this one too
            _tell()
        self.entries[key] = found = found or (objects, make())
        if len(self.entries) > KEPT:
            self.entries.popitem(last=False)
        return found[1], new


CACHE = ProgramCache()


def forget() -> None:
    """Drops all shared programs: what is still asked for is compiled again, or loaded."""
    CACHE.entries.clear()


def parts_of_the_project() -> Iterator[Any]:
    """Everything that a module of this checkout names from which programs are made, and what its classes and dictionaries
    hold."""
    for module in list(sys.modules.values()):
        if not (getattr(module, "__file__", None) or "").startswith(OURS) or UNTRACED & set(module.__name__.split(".")):
            continue
        for name, value in list(vars(module).items()):
            if name.startswith("__"):
                continue
            yield value
            if isinstance(value, type) and value.__module__ == module.__name__:
                yield from list(vars(value).values())
            elif isinstance(value, dict) and len(value) < 1000:
                yield from list(value.values())


def _tell() -> None:
    import jax

    jax.monitoring.record_event_duration_secs(
        "/jax/core/compile/backend_compile_duration", 0.0, fun_name="a shared program"
    )


def _flags() -> tuple:
    import jax
    import numpy as np

    return jax.dtypes.canonicalize_dtype(np.float64), jax.config.read("jax_disable_most_optimizations")


def described(tree: Any) -> tuple:
    """Structure, shapes, types and places of a pytree of arrays, or of shapes."""
    import jax

    leaves, structure = jax.tree.flatten(tree)
    return structure, tuple((leaf.shape, leaf.dtype, leaf.sharding) for leaf in leaves)


def share() -> None:
    """Makes engines and learners of this process share their programs, where it has loaded jax."""
    if "jax" in sys.modules:
        from jaxrl_post.engine.compiled import Programs
        from jaxrl_post.trainer.learner import Learner

        _share_engines(CACHE, Programs)
        _share_learners(CACHE, Learner)


class OnDemand:
    """Stands for a compiled program that is made when something of it is first asked for."""

    def __init__(self, make: Callable[[], Any]):
        self._make = make

    @functools.cached_property
    def _program(self) -> Any:
        return self._make()

    def __call__(self, *given) -> Any:
        return self._program(*given)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._program, name)


_ON_DEMAND = contextvars.ContextVar("on_demand", default=False)


@contextlib.contextmanager
def on_demand() -> Iterator[None]:
    """Lets engines that are made within it compile a program when it first runs: most tests run few of them.

    It is traced at once, so that a fault which is planted now is in it."""
    before = _ON_DEMAND.set(True)
    try:
        yield
    finally:
        _ON_DEMAND.reset(before)


@contextlib.contextmanager
def _postponed() -> Iterator[None]:
    """Compiles what is lowered within it when it is first asked for."""
    from jax.stages import Lowered

    real = Lowered.compile
    Lowered.compile = lambda self, *given: OnDemand(functools.partial(real, self, *given))
    try:
        yield
    finally:
        Lowered.compile = real


def _share_engines(cache: ProgramCache, programs: type) -> None:
    for name in ("_dispatch_program", "_insert_program", "_prefill_program", "_blank_programs", "_upload_programs"):
        setattr(programs, name, _shared(cache, name, getattr(programs, name)))


def _shared(cache: ProgramCache, name: str, real: Callable) -> Callable:
    @functools.wraps(real)
    def program(self, *given):
        # Shards follow from the mesh, and a program has one row size and no slots to refill.
        alike = dict(shards=None, row_sizes=(), refill_slots=1, dtype=str(self.sizes.dtype))
        sizes = dataclasses.replace(self.sizes, **alike)
        asked = tuple(described(x) if isinstance(x, dict) else x for x in given)  # weights are a dictionary
        settings = (name, self.config, self.mesh, sizes, *asked)

        def make():
            with _postponed() if _ON_DEMAND.get() else contextlib.nullcontext():
                return real(self, *given)

        return cache.ask((*settings, _ON_DEMAND.get()), make)[0]

    return program


def _share_learners(cache: ProgramCache, learner: type) -> None:
    begin, real = learner.__init__, learner.compile

    @functools.wraps(begin)
    def __init__(self, model, params, mesh, settings, **parts):
        begin(self, model, params, mesh, settings, **parts)
        own = tuple((name, value) for name, value in sorted(parts.items()) if name != "reference")
        self._settings = (model, mesh, settings, own)

    @functools.wraps(real)
    def compile(self):
        if self._programs:
            return
        settings = type(self), *self._settings, described(self.state.params), described(self._reference)
        made, new = cache.ask(settings, lambda: real(self) or dict(self._programs))
        if not new:
            self.jitted = lambda: {name: (Made(program), ()) for name, program in made.items()}
            real(self)
            del self.jitted

    learner.__init__, learner.compile = __init__, compile
