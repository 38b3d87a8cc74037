"""Imports google-jetstream 0.2.2, the last on PyPI, with what it needs beside a jax of today.

- `seqio` and `tiktoken` may be absent: two tokenizers of JetStream's own need them, and the first brings TensorFlow. Empty
  modules stand for them during the import.
- Its orchestrator sets the root logger to DEBUG and adds a handler. Both are undone.
- Its orchestrator frees a prefix by `jax.tree_map`, which is gone. `jax.tree.map` is the same function.

Refused: another version, and PyPI's project `jetstream`, which has the same import name.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import logging
import sys
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax

VERSION = "0.2.2"
BESIDE = ("grpcio", "prometheus-client", "shortuuid")  # all that it needs beside jax, flax and numpy
_ABSENT = {  # modules that may be missing, with the names that JetStream takes from them
    "seqio": (),
    "seqio.vocabularies": ("Vocabulary", "SentencePieceVocabulary"),
    "tiktoken": (),
    "tiktoken.load": ("load_tiktoken_bpe",),
}


class Package(NamedTuple):
    """Modules of google-jetstream."""

    config_lib: Any
    orchestrator: Any
    server_lib: Any
    engine_api: Any
    token_utils: Any
    tokenizer_api: Any
    tokenizer_pb2: Any
    grpc: Any


def missing() -> str:
    """Returns why google-jetstream cannot be used here, or an empty text."""
    try:
        version = importlib.metadata.version("google-jetstream")
    except importlib.metadata.PackageNotFoundError:
        return (
            "jetstream: google-jetstream is not installed; write pip install 'jaxrl_post[jetstream]', and not PyPI's "
            "jetstream, which is another project"
        )
    if version != VERSION:
        return f"jetstream: google-jetstream {version} is installed; the nearest valid version is {VERSION}"
    if importlib.util.find_spec("jetstream.engine") is None:
        return "jetstream: another project is imported as jetstream; write pip uninstall jetstream, then install google-jetstream again"
    return ""


def load() -> Package:
    """Returns the modules. A ValueError says what is not installed, or has another version."""
    why = missing()
    if why:
        raise ValueError(why)
    core = ("core.config_lib", "core.orchestrator", "core.server_lib")
    engine = ("engine.engine_api", "engine.token_utils", "engine.tokenizer_api", "engine.tokenizer_pb2")
    names = [f"jetstream.{name}" for name in (*core, *engine)]
    with _logging_kept(), _absent_named():
        try:
            package = Package(*map(importlib.import_module, [*names, "grpc"]))
        except ModuleNotFoundError as error:
            raise ValueError(
                f"jetstream: {error}, which google-jetstream needs; write pip install {' '.join(BESIDE)}"
            ) from error
    package.orchestrator.delete_pytree = _free
    return package


def _free(tree: Any) -> None:
    """Frees the device arrays of a prefix."""
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.Array):
            leaf.delete()


@contextlib.contextmanager
def _logging_kept() -> Iterator[None]:
    """Restores level and handlers of the root logger."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    try:
        yield
    finally:
        root.setLevel(level)
        root.handlers[:] = handlers


@contextlib.contextmanager
def _absent_named() -> Iterator[None]:
    """Lets modules that are not installed be imported, as empty ones."""
    stand_ins = {}
    for name, attributes in _ABSENT.items():
        if name.partition(".")[0] in stand_ins or importlib.util.find_spec(name) is None:
            stand_ins[name] = types.ModuleType(name)
            stand_ins[name].__dict__.update({attribute: type(attribute, (), {}) for attribute in attributes})
    sys.modules.update(stand_ins)
    try:
        yield
    finally:
        for name in stand_ins:
            del sys.modules[name]
