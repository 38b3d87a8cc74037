"""The type checker that tests/conftest.py hangs into jaxrl_post: beartype on every function with an array annotation.

Functions without one stay as they are: scalars may come as numpy scalars, constructors convert what they are given, and
a pytree class is rebuilt by jax with leaves that are no arrays.
"""

from __future__ import annotations

import typing

from beartype import BeartypeConf, beartype
from jaxtyping import AbstractArray

CONF = BeartypeConf(is_pep484_tower=True)  # an int is a valid float


def holds_array(annotation) -> bool:
    """Whether a jaxtyping array type occurs in it, at any depth."""
    if isinstance(annotation, type) and issubclass(annotation, AbstractArray):
        return True
    return any(holds_array(part) for part in typing.get_args(annotation))


def check(function):
    """The function itself, or its checked twin when its signature names an array."""
    if function.__name__ == "__init__" or not any(map(holds_array, function.__annotations__.values())):
        return function
    return beartype(conf=CONF)(function)
