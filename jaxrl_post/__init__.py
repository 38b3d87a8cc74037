"""jaxrl_post: RL post-training of language models in JAX; what makes it fast never changes a token.

`train`, `load` and `evaluate` are those of commands/api.py, which is imported at their first use. Old names of rooms answer with
the new ones.
"""

from __future__ import annotations

import importlib
import importlib.abc
import sys
from typing import Any

__version__ = "0.1.0"
_API = ("evaluate", "load", "train")
_MOVED = {  # the first part of a module's name -> what it is now
    "api": "commands.api",
    "buckets": "runs.buckets",
    "checkpoint": "runs.checkpoint",
    "evaluation": "launch.parts.evaluation",
    "history": "ring.history",
    "json_text": "ring.json_text",
    "loop": "ring.loop",
    "protocols": "ring.protocols",
    "sim": "simulate",
    "types": "ring.types",
    "written": "ring.written",
}


def __getattr__(name: str) -> Any:
    if name in _API:
        return getattr(importlib.import_module(f"{__name__}.commands.api"), name)
    if name in _MOVED:
        raise AttributeError(_new_name(name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _new_name(old: str) -> str:
    return f"`{__name__}.{old}` is now `{__name__}.{_MOVED[old]}`"


class _Moved(importlib.abc.MetaPathFinder):
    """Is asked for a module of this package that no other finder knows."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        package, _, rest = fullname.partition(".")
        old = rest.partition(".")[0]
        if package == __name__ and old in _MOVED:
            raise ModuleNotFoundError(f"{fullname}: {_new_name(old)}")  # with a name, `from .. import` would swallow it


sys.meta_path.append(_Moved())


def __dir__() -> list[str]:
    return sorted({*globals(), *_API})
