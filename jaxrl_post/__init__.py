"""jaxrl_post: RL post-training of language models in JAX; what makes it fast never changes a token.

`train`, `load` and `evaluate` are those of api.py, which is imported at their first use.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"
_API = ("evaluate", "load", "train")


def __getattr__(name: str) -> Any:
    if name in _API:
        return getattr(importlib.import_module(f"{__name__}.api"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_API})
