"""Reward functions of a program, as text that a reward process can load.

A function of a module that can be imported goes by its import path. Any other, of a notebook, a script or a closure, is
pickled by value with cloudpickle. Its hash is that of its source and of what it uses of its own module, so that a
resumed run can tell whether it grades alike.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import importlib.machinery
import inspect
import json
import os
import pickle
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

import cloudpickle

from jaxrl_post.ring.json_text import shown

_PLAIN = (str, int, float, complex, bytes, bool, type(None))


class Carried(NamedTuple):
    """Reward functions by the names that a config has for them, in order.

    `code` and `digests` have those that go by value: their text, and the hash of their source.
    """

    names: tuple[str, ...]
    code: Mapping[str, str]
    digests: Mapping[str, str]


def carried(functions: str | Callable | Sequence[str | Callable], prefix: str) -> Carried:
    """Returns the functions as a config and a reward process take them. An import path stays as it is.

    Args:
      functions: several, or one alone.
      prefix: of the name of each function that goes by value.

    Raises:
      ValueError: something that is neither a function nor a path, or that holds what no other process can have.
    """
    names, code, digests = [], {}, {}
    functions = several("rewards", functions)
    for function in functions:
        name = str(function) if isinstance(function, (str, os.PathLike)) else _path(function)
        if name is None:
            short = _name(function)
            own = [f"{prefix}{short}", *(f"{prefix}{short}_{n}" for n in range(2, len(functions) + 2))]
            name = next(one for one in own if one not in code)
            code[name], digests[name] = _text(function), digest(function)
        names.append(name)
    return Carried(tuple(names), code, digests)


def several(what: str, given: Any) -> tuple:
    """Returns functions or paths, of which one may stand alone. None is none of them.

    Raises:
      ValueError: it is nothing that holds them in an order.
    """
    if given is None:
        return ()
    if isinstance(given, (str, os.PathLike)) or callable(given):
        return (given,)
    if isinstance(given, Iterable) and not isinstance(given, (Mapping, Set, bytes)):
        return tuple(given)
    raise ValueError(f"{what} must be one alone or a list, got {shown(given, 80)}, a {type(given).__name__}")


def _name(function: Any) -> str:
    if not callable(function):
        raise ValueError(
            f"rewards: {str(function)[:80]!r} is a {type(function).__name__}, neither a function nor a path"
        )
    own = _inner(function)
    return getattr(own, "__name__", type(own).__name__)


def _inner(function: Any) -> Any:
    """Returns the function inside of partial applications."""
    return _inner(function.func) if isinstance(function, functools.partial) else function


def _path(function: Any) -> str | None:
    """Returns the import path of a function that another process can import, else None."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    if module in (None, "__main__") or getattr(sys.modules.get(module), name, None) is not function:
        return None
    return f"{module}:{name}" if _importable(module) else None


def _importable(module: str) -> bool:
    """Returns whether a process that imports the module by name gets the same file. It searches sys.path alone."""
    file, place = getattr(sys.modules[module], "__file__", None), None
    for depth in range(1, module.count(".") + 2):
        name = module.rsplit(".", module.count(".") + 1 - depth)[0]
        spec = importlib.machinery.PathFinder.find_spec(name, place)
        place = spec.submodule_search_locations if spec else None
        if spec is None:
            return False
    return file is not None and spec.origin is not None and os.path.samefile(spec.origin, file)


def _text(function: Callable) -> str:
    with _by_value(function):
        try:
            return base64.b64encode(cloudpickle.dumps(function)).decode()
        except (pickle.PicklingError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(
                f"rewards: {_name(function)} cannot go to a reward process: {error}; make within the function what it needs"
            ) from error


@contextlib.contextmanager
def _by_value(function: Callable) -> Iterator[None]:
    """Pickles a module that only this process has by value, as cloudpickle does with __main__."""
    name = getattr(_inner(function), "__module__", None)
    if name is None or name == "__main__" or name not in sys.modules or _importable(name):
        yield
        return
    module = sys.modules[name]
    fresh = name not in cloudpickle.list_registry_pickle_by_value()
    if fresh:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        if fresh:
            cloudpickle.unregister_pickle_by_value(module)


def digest(function: Callable) -> str:
    """Returns a hash of a function: its source, its defaults, and what it uses of its own module and of closures.

    Values that are neither plain nor of that module count by their kind alone.
    """
    parts: list[Any] = []
    _describe(function, getattr(_inner(function), "__module__", None), parts, set())
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()


def _describe(value: Any, module: str | None, parts: list, seen: set[int]) -> None:
    """Appends what tells a value from another."""
    if isinstance(value, _PLAIN):
        parts.append(repr(value))
    elif id(value) in seen:
        parts.append("again")
    elif isinstance(value, types.ModuleType):
        parts.append(value.__name__)
    else:
        seen.add(id(value))
        parts.append(type(value).__qualname__)
        for one in _held(value, module, parts):
            _describe(one, module, parts, seen)


def _held(value: Any, module: str | None, parts: list) -> list:
    """Returns the values inside of a value, and appends its own source."""
    if isinstance(value, (list, tuple)):
        return list(value)
    if isinstance(value, (set, frozenset)):
        return sorted(map(repr, value))
    if isinstance(value, Mapping):
        return [one for pair in value.items() for one in pair]
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, types.MethodType):
        return [value.__func__, value.__self__]
    if getattr(value, "__module__", None) != module:
        return [getattr(value, "__qualname__", "")]
    if isinstance(value, types.FunctionType):
        parts.append(_source(value, value.__code__))
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        used = [value.__globals__[name] for name in _names(value.__code__) if name in value.__globals__]
        return [value.__defaults__, value.__kwdefaults__, vars(value), *cells, *used]
    if isinstance(value, type):
        parts.append(_source(value, None))
        return [one for _, one in sorted(vars(value).items()) if isinstance(one, types.FunctionType)]
    return [type(value), getattr(value, "__dict__", {})]


def _source(value: Any, code: types.CodeType | None) -> str:
    """Returns the source of a function or class; of a function without source its code."""
    try:
        return inspect.getsource(value)
    except (OSError, TypeError):
        return "" if code is None else repr(_code(code))


def _code(code: types.CodeType) -> list:
    inner = [_code(one) if isinstance(one, types.CodeType) else repr(one) for one in code.co_consts]
    return [code.co_code.hex(), code.co_names, code.co_varnames, inner]


def _names(code: types.CodeType) -> list[str]:
    """Returns the names that a function and those inside of it look up, sorted."""
    inner = [name for one in code.co_consts if isinstance(one, types.CodeType) for name in _names(one)]
    return sorted({*code.co_names, *inner})
