"""The type checker that tests/conftest.py hangs into jaxrl_post: beartype on every function with an array annotation.

Functions without one stay as they are: scalars may come as numpy scalars, constructors convert what they are given, and
a pytree class is rebuilt by jax with leaves that are no arrays. They are not wrapped either: jaxtyping's wrapper binds
the arguments of every call, which took a quarter of the CPU seconds of the tests.
"""

from __future__ import annotations

import inspect
import typing

import jaxtyping
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


def install(package: str) -> None:
    """Hangs `check` into every module of the package that is imported from now on."""
    jaxtyping.jaxtyped = _sparingly(jaxtyping.jaxtyped)
    jaxtyping.install_import_hook(package, "array_annotations.check")


def _sparingly(jaxtyped):
    """jaxtyping's decorator for functions that `check` would check; other functions, and classes, are given back."""

    def decorator(*, typechecker):
        wrap = jaxtyped(typechecker=typechecker)
        return lambda made: wrap(made) if inspect.isfunction(made) and _may_hold_array(made) else made

    return decorator


def _may_hold_array(function) -> bool:
    """Whether an annotation holds an array type, or is one that only jaxtyping itself can resolve."""
    for annotation in function.__annotations__.values():
        if isinstance(annotation, str):
            try:
                annotation = eval(annotation, function.__globals__)
            except (NameError, AttributeError):  # jaxtyping takes what is not there yet for Any
                continue
        if holds_array(annotation) or any(
            isinstance(part, (str, typing.ForwardRef)) for part in typing.get_args(annotation)
        ):
            return True
    return False
