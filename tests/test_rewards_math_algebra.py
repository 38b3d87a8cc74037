"""math-verify where it is installed, what it is not asked, and how a run says which grader it uses."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import time

import pytest

from jaxrl_post.checkpoint import identity
from jaxrl_post.rewards import math, math_algebra, math_values, worker

MATH = "jaxrl_post.rewards.math:math"


@pytest.fixture
def fresh():
    for cached in (math_algebra.grader, math_algebra.expressions):
        cached.cache_clear()
    yield
    for cached in (math_algebra.grader, math_algebra.expressions):
        cached.cache_clear()


def installed(monkeypatch, version):
    def of(name):
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version if name == "math-verify" else "1.14.0"

    monkeypatch.setattr(importlib.metadata, "version", of)


@pytest.mark.parametrize(
    "version, said",
    [
        (None, "own rules (math-verify is not installed)"),
        ("0.8.0", "own rules (math-verify 0.8.0 is installed, 0.9.x is used)"),
        ("0.9.3", "math-verify 0.9.3 (sympy 1.14.0)"),
    ],
)
def test_the_grader_has_a_name(monkeypatch, fresh, version, said):
    installed(monkeypatch, version)
    assert math_algebra.graders((MATH, "jaxrl_post.rewards.math:strict")) == {MATH: said}
    if version != "0.9.3":
        assert math_algebra.expressions() is None and math.math("", "2+2", "4", {}) == 0.0


def test_an_installed_grader_that_cannot_be_imported_is_said(monkeypatch, fresh):
    """When the function is loaded, not at the first answer; and the other grader is not taken instead."""
    installed(monkeypatch, "0.9.0")

    def broken():
        raise ImportError("no antlr4")

    monkeypatch.setattr(math_algebra, "_library", broken)
    with pytest.raises(ImportError, match=r"math-verify 0.9.0 .* cannot be imported: no antlr4; install it with"):
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
    r"\infty^{x}+1",
    "Mondya",
    "",
]


@pytest.mark.parametrize("text", ENDLESS)
def test_what_math_verify_is_not_asked(monkeypatch, text):
    monkeypatch.setattr(math_algebra, "_library", lambda: pytest.fail("asked"))
    assert not math_algebra.equal("5", text) and not math_algebra.equal(text, "5")


needed = pytest.mark.skipif(importlib.util.find_spec("math_verify") is None, reason="needs the extra `math`")

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
]


@needed
@pytest.mark.extended
@pytest.mark.parametrize("gold, given, equal", [(*pair, True) for pair in EQUAL] + [(*pair, False) for pair in UNEQUAL])
def test_expressions_by_math_verify(gold, given, equal):
    assert math_values.same(given, gold, math_algebra.equal) == equal


@needed
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
