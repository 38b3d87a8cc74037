"""Compiled programs: kept between runs in a cache folder, never made in the middle of one, and known by their digests.

The cache lies where JAX_COMPILATION_CACHE_DIR says, which may be SCHEME://BUCKET/NAME, else in jaxrl_post/jax under the user's cache folder
(XDG_CACHE_HOME, else ~/.cache). It changes start-up time only.

By its digests a resumed run sees that the compiler has made other programs. On a GPU the compiler times several forms of a
product and keeps the fastest. So two compilations of one program, by the same versions and on the same kind of device, may
round differently.

Invariant: a digest depends on the optimised instructions, and not on files, lines and functions of their source. A program
that comes from the compilation cache has the digest that it had.

Two limits. A kernel's own program holds lines of its source, so an edited file or another folder of this package gives
another digest. And the text leaves out what a constant of more than a few numbers holds.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from jaxrl_post.config import check_place, refuse_url
from jaxrl_post.config.address import is_bucket
from jaxrl_post.engine.elastic import Elastic
from jaxrl_post.engine.row_engine import MeshDevice, RowEngine
from jaxrl_post.runs import program_cache
from jaxrl_post.runs.checkpoint import store
from jaxrl_post.trainer.learner import Learner

_FOLDER = "JAX_COMPILATION_CACHE_DIR"
_COMPILED = "/jax/core/compile/backend_compile_duration"  # also when the program then comes out of the cache folder
_SETTINGS = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_enable_xla_caches",
)
_LOGGER = "jax._src.interpreters.pxla"  # says, per program, "Compiling NAME with global shapes and types [...]"
DIGESTS = "programs"  # of the digests, where a run says what its bits depend on
# What the text of a program says of its source: a table at its head, places of instructions, and names.
_SOURCE = re.compile(
    r"^(?:FileNames|FunctionNames|FileLocations|StackFrames|\d+ [{\"].*)$\n?|^HloModule \S+"
    r'|,? ?metadata=\{(?:"(?:\\.|[^"\\])*"|[^}"])*\}'
    r"|\b[\w.\-]+: (?=\(|[a-z]\w*\[)",
    re.MULTILINE,
)
_INSTRUCTION = re.compile(r"%[\w.\-]+")


def use_cache(environment: Mapping[str, str]) -> Path:
    """Turns the persistent compilation cache on and returns its folder.

    Raises:
      ValueError: the environment names a URL that is no place in a bucket, or the bucket refuses.
    """
    given = environment.get(_FOLDER, "")
    check_place(given, _FOLDER, bucket=True)
    refuse_url(environment.get("XDG_CACHE_HOME", ""), "XDG_CACHE_HOME")
    if is_bucket(given):
        given = str(program_cache.opened(given, _FOLDER).folder)
    home = Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = Path(given) if given else home / "jaxrl_post" / "jax"
    folder.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    jax.config.update("jax_persistent_cache_enable_xla_caches", program_cache.AUTOTUNING)
    return folder


@contextlib.contextmanager
def restored() -> Iterator[None]:
    """Gives a program back its own settings of jax's cache."""
    before = {name: getattr(jax.config, name) for name in _SETTINGS}
    try:
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


class CompileGuard:
    """Fails the run when a program is compiled after `arm()`: its shapes changed, or nothing warmed it up.

    The error is raised where the compilation happens, and names function and shapes. Use as a context manager.
    """

    def __init__(self):
        self._armed = False
        self._last = "unknown shapes"

    def __enter__(self) -> CompileGuard:
        logger = logging.getLogger(_LOGGER)
        self._level = logger.level
        logger.setLevel(logging.DEBUG)
        logger.addFilter(self._read)
        jax.monitoring.register_event_duration_secs_listener(self._compiled)
        return self

    def __exit__(self, *_) -> None:
        self._armed = False
        logger = logging.getLogger(_LOGGER)
        logger.setLevel(self._level)
        logger.removeFilter(self._read)
        jax.monitoring.unregister_event_duration_listener(self._compiled)

    def arm(self) -> None:
        """From now on every compilation is an error."""
        self._armed = True

    def disarm(self) -> None:
        self._armed = False

    @contextlib.contextmanager
    def lifted(self) -> Iterator[None]:
        """Within it compilations are none of the run's: a library's own, at its first use."""
        armed, self._armed = self._armed, False
        try:
            yield
        finally:
            self._armed = armed

    def _read(self, record: logging.LogRecord) -> bool:
        """Remembers what is being compiled; lets through what would have been logged without the guard."""
        if str(record.msg).startswith("Compiling"):
            self._last = " ".join(record.getMessage().split())[:2000]
        return record.levelno >= logging.WARNING

    def _compiled(self, event: str, seconds: float, **labels) -> None:
        if self._armed and event == _COMPILED:
            self._armed = False  # the error's own handling may compile
            name = labels.get("fun_name", "a program")
            raise RuntimeError(
                f"recompilation after warm-up of {name} ({seconds:.2f} s): {self._last}; every program "
                "of a run has one shape, made before its second round"
            )


def with_digests(
    about: Mapping, saved: store.Saved | None, found: Mapping[str, str], say: Callable[[str], object]
) -> dict:
    """Returns `about` with the digests, and says which programs differ from those of the save. It compares what both have."""
    then = saved.about.get(DIGESTS, {}) if saved is not None else {}
    others = sorted(name for name in then.keys() & found.keys() if then[name] != found[name])
    if others:
        say(f"programs that differ from those of the save, so that bits may differ: {', '.join(others)}")
    return {**about, DIGESTS: dict(found)}


def digests(learner: Learner, engines: Iterable[Any]) -> dict[str, str]:
    """Returns the digest of every program that this process runs of the learner and of row engines, by name."""
    out = {f"learner.{name}": digest(program) for name, program in learner.compiled.items()}
    for engine in engines:
        layouts = engine.engines if isinstance(engine, Elastic) else {None: engine}
        for layout, one in layouts.items():
            where = f"engine.{layout.replicas} x {layout.tensor}" if layout else "engine"
            device = one.device if isinstance(one, RowEngine) else None
            programs = device.programs.compiled if isinstance(device, MeshDevice) else {}
            out |= {f"{where}.{name}": digest(program) for name, program in programs.items()}
    return out


def digest(program: Any) -> str:
    """Returns 16 hex digits of a compiled program's instructions."""
    numbers: dict[str, str] = {}
    bare = _SOURCE.sub("", program.as_text())
    text = _INSTRUCTION.sub(lambda name: numbers.setdefault(name[0], f"%{len(numbers)}"), bare)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
