"""Digests of compiled programs: equal for one program however it was written, and other where the compiler made another."""

import json

import jax
import jax.numpy as jnp
import pytest
import resumed_runs
from jax._src.config import compilation_cache_include_metadata_in_key as metadata_in_the_cache_key
from resumed_runs import resume

from jaxrl_post.launch import compile_guard

SENTENCE = "programs that differ from those of the save, so that bits may differ"
here, whole, ended = resumed_runs.here, resumed_runs.whole, resumed_runs.ended  # fixtures


def made(function, size=8):
    return jax.jit(function).lower(*[jax.ShapeDtypeStruct((size, size), jnp.float32)] * 2).compile()


def test_lines_and_names_of_the_source_change_nothing():
    def near(a, b):
        with jax.named_scope('a{brace}"and a quote'):
            return jnp.tanh(a @ b)

    def far(left, right):
        inner = left @ right

        return jnp.tanh(inner)

    far.__name__ = "near"
    with metadata_in_the_cache_key(True):  # else the cache may give one text for both
        one, two = made(near), made(far)
    assert one.as_text() != two.as_text()  # the text names lines
    assert compile_guard.digest(one) == compile_guard.digest(two)


def test_instructions_and_shapes_change_it():
    digests = [
        compile_guard.digest(made(lambda a, b: a @ b)),
        compile_guard.digest(made(lambda a, b: a @ b + 1.0)),
        compile_guard.digest(made(lambda a, b: a @ b + 2.0)),
        compile_guard.digest(made(lambda a, b: a @ b, size=16)),
        compile_guard.digest(made(lambda a, b: jnp.dot(a, b, precision="highest"))),
    ]
    assert len(set(digests)) == len(digests) and all(len(one) == 16 for one in digests)


def test_a_resumed_run_says_which_programs_are_others(ended, here, capsys):
    """A longer cosine is another program of the step. With products of another precision, what multiplies is named, too."""
    told = json.loads((ended / "config.json").read_text())["derived"]["programs"]
    assert {"engine.dispatch_16", "engine.dispatch_32", "engine.insert", "learner.accumulate", "learner.commit"} <= set(
        told
    )
    assert resume(here, ended) == 0
    assert SENTENCE not in capsys.readouterr().out
    assert resume(here, ended, "--config.steps=6") == 0
    assert f"{SENTENCE}: learner.commit\n" in capsys.readouterr().out
    told = json.loads((ended / "config.json").read_text())["derived"]["programs"]
    with jax.default_matmul_precision("highest"):
        assert resume(here, ended, "--config.steps=7") == 0
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith(SENTENCE)]
    assert len(said) == 1
    named = said[0].split(": ")[1].split(", ")
    assert "learner.accumulate" in named
    assert not {"engine.insert", "learner.zeros"} & set(named)
    after = json.loads((ended / "config.json").read_text())["derived"]["programs"]
    assert {name for name in told if told[name] != after[name]} == set(named)


@pytest.mark.parametrize("then", [None, {}, {"programs": {}}, {"programs": {"learner.other": "0"}}])
def test_a_save_without_these_programs_says_nothing(then):
    class Saved:
        about = then

    found, said = {"learner.commit": "1"}, []
    saved = None if then is None else Saved
    assert compile_guard.with_digests({"data": 1}, saved, found, said.append) == {"data": 1, "programs": found}
    assert said == []
