"""Compiled programs: kept between runs in a cache folder, and never made in the middle of one.

The cache lies where JAX_COMPILATION_CACHE_DIR says, which may be SCHEME://BUCKET/NAME, else in jaxrl_post/jax under the user's cache folder
(XDG_CACHE_HOME, else ~/.cache). It changes start-up time only.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path

import jax

from jaxrl_post.buckets.address import is_bucket
from jaxrl_post.config import check_place, refuse_url
from jaxrl_post.launch import program_cache

_FOLDER = "JAX_COMPILATION_CACHE_DIR"
_COMPILED = "/jax/core/compile/backend_compile_duration"  # also when the program then comes out of the cache folder
_SETTINGS = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
_LOGGER = "jax._src.interpreters.pxla"  # says, per program, "Compiling NAME with global shapes and types [...]"


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
