"""math-verify, what it is not asked, and how a run says which grader it uses."""

from __future__ import annotations

import importlib.metadata
import time

import pytest

from jaxrl_post.rewards import math, math_algebra, math_values, worker
from jaxrl_post.runs.checkpoint import identity

MATH = "jaxrl_post.rewards.math:math"


def test_the_grader_has_a_name():
    versions = {name: importlib.metadata.version(name) for name in ("math-verify", "sympy")}
    said = f"math-verify {versions['math-verify']} (sympy {versions['sympy']})"
    assert math_algebra.graders((MATH, "jaxrl_post.rewards.math:strict")) == {MATH: said}


def test_math_verify_is_imported_when_the_function_is_loaded(monkeypatch):
    """Not at the first answer. Where it cannot be imported, no other grader is taken instead."""

    def broken():
        raise ImportError("no antlr4")

    monkeypatch.setattr(math_algebra, "_library", broken)
    with pytest.raises(ImportError, match="no antlr4"):
        worker.load(MATH)
    assert worker.load("jaxrl_post.rewards.math:rules").signature == "verl"


def test_a_run_is_not_resumed_under_another_grader():
    then, now = ({"graders": {MATH: by}} for by in ("math-verify 0.9.0 (sympy 1.14.0)", "own rules"))
    identity.check_same(then, then, 3)
    with pytest.raises(ValueError, match=r'resume refused: graders.*math "math-verify 0.9.0 .*" -> "own rules"'):
        identity.check_same(then, now, 3)


ENDLESS = [
    "9^{9^{9}}",
    "9**9**9",
    "9^999999999",
    "x^{9!}",
    "(9!)!",
    "99999!",
    "9!!!",
    "{3!}!",
    "2^{2^{2^{2}}}",
    "1" * 31,
    "x+" * 200 + "x",
    "a" * 3,
    "(x+y+z)^{60}",
    r"\infty^{x}+1",
    "Mondya",
    "",
]


@pytest.mark.parametrize("text", ENDLESS)
def test_what_math_verify_is_not_asked(monkeypatch, text):
    monkeypatch.setattr(math_algebra, "_library", lambda: pytest.fail("asked"))
    assert not math_algebra.equal("5", text) and not math_algebra.equal(text, "5")


EQUAL = [
    ("4", "2+2"),
    ("12", "29-(53-2)/3"),
    ("x+1", "1+x"),
    (r"2\sqrt{2}", r"\sqrt{8}"),
    (r"\sqrt{2}", "sqrt(2)"),
    ("(x+1)^2", "x^2+2x+1"),
    ("1024", "2^{10}"),
    ("x<5", "5>x"),
    (r"(x+1,\sqrt8)", r"(1+x, 2\sqrt2)"),
    (r"\frac{x}{2}", r"\frac{1}{2}x"),
    (r"\{\sqrt{8},1\}", r"\{1,2\sqrt{2}\}"),
    ("x>0", r"(0,\infty)"),
    (r"(-\infty,1)\cup(2,\infty)", r"x<1 \text{ or } x>2"),
    (r"\pm 2", "-2, 2"),
    (r"2+\sqrt{3},2-\sqrt{3}", r"2\pm\sqrt{3}"),
    (r"\mathbb{R}", r"(-\infty,\infty)"),
]
UNEQUAL = [
    ("3", "29-(53-2)/3"),
    ("5", r"5\text{ thousand}"),
    ("72", r"72\text{ million}"),
    ("(1,2)", r"\{1,2\}"),
    (r"\pi", "3.141593"),
    ("1/3", "0.333333"),
    ("no", "on to"),
    ("Monday", "Mondya"),
    ("5", "5x"),
    ("5", "x>5"),
    ("5", "5 or 6"),
    (r"(-\infty,1)\cup(2,\infty)", r"\tan x>\cos x"),  # is not solved: it would take minutes
    ("x<1", r"\tan x>\cos x"),
    (r"(-\infty,1)", "|x-|x-|x-1|||<3"),
    ("x=2, y=3", "x=3, y=2"),
]


@pytest.mark.extended
@pytest.mark.parametrize("gold, given, equal", [(*pair, True) for pair in EQUAL] + [(*pair, False) for pair in UNEQUAL])
def test_expressions_by_math_verify(gold, given, equal):
    assert math_values.same(given, gold, math_algebra.equal) == equal


@pytest.mark.extended
def test_math_verify_needs_no_signals_and_ends():
    """In a thread, where its own time limits would raise; and within seconds on texts that grow."""
    import threading

    begun, found = time.monotonic(), []
    thread = threading.Thread(target=lambda: found.append(math.math("", r"\boxed{2+2}", "4", {})))
    thread.start()
    thread.join(30)
    assert found == [1.0]
    for text in (r"\binom{99}{50}", "64^{64}", r"\sqrt{" * 20 + "2" + "}" * 20, "(x+1)^{64}", "100!", "1+" * 90 + "1"):
        math.math("", rf"\boxed{{{text}}}", "x", {})
    assert time.monotonic() - begun < 60
