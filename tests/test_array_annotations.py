"""The import hook of tests/conftest.py really checks arrays, also under string annotations, and nothing else."""

from __future__ import annotations

import sys

import jax.numpy as jnp
import pytest

PLANTED = """
from __future__ import annotations
from dataclasses import dataclass
from jaxtyping import Array, Float, Int
from jaxrl_post.ring.protocols import Engine

def weigh(x: Float[Array, "B T"], y: Float[Array, "B"], scale: float = 1) -> Float[Array, "B T"]:
    return x * y[:, None] * scale

def maybe(x: Float[Array, "B T"] | None, y: Int[Array, "B"]) -> None:
    return None

def wrong(x: Float[Array, "B T"]) -> Float[Array, "B"]:
    return x

def engine(engine: Engine):
    return 1

@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    x: Float[Array, "B T"]
"""


@pytest.fixture
def planted(tmp_path, monkeypatch):
    import jaxrl_post.kernels

    (tmp_path / "planted.py").write_text(PLANTED)
    monkeypatch.setattr(jaxrl_post.kernels, "__path__", [str(tmp_path)])
    import jaxrl_post.kernels.planted as module

    yield module
    del sys.modules["jaxrl_post.kernels.planted"]


def test_right_arrays_pass(planted):
    x, y = jnp.ones((2, 3)), jnp.ones(2)
    assert planted.weigh(x, y, 2).sum() == 12  # an int where a float is expected is fine
    planted.maybe(None, jnp.ones(2, int))


@pytest.mark.parametrize(
    "call",
    [
        lambda m: m.weigh(jnp.ones((2, 3)), jnp.ones(3)),  # letters disagree
        lambda m: m.weigh(jnp.ones((2, 3)), jnp.ones((2, 3))),  # rank
        lambda m: m.maybe(None, jnp.ones(2)),  # dtype
        lambda m: m.wrong(jnp.ones((2, 3))),  # what is returned
    ],
)
def test_wrong_arrays_fail(planted, call):
    with pytest.raises(TypeError, match="Type-check"):
        call(planted)


def test_signatures_without_arrays_and_constructors_are_left_alone(planted):
    assert planted.engine(3) == 1
    assert planted.Point(x=3).x == 3
    assert hasattr(planted.maybe, "__wrapped__") and not hasattr(planted.engine, "__wrapped__")
