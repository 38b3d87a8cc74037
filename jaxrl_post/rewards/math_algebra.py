r"""Equality of expressions by math-verify: x+1 is 1+x, \sqrt{8} is 2\sqrt{2}, (0,\infty) is x>0, \pm 2 is 2,-2.

- math-verify gets the result that rewards/math_reading.py found, not the whole text: its own search for the result takes
  48 of "ANSWER: 96. Check: 96/2 = 48." and reads no Chinese.
- What it misreads is not given to it: number words ("5 \text{ thousand}" would be 5) and exponents (1.5e3 would be 1.5e*3).
- Its time limits are off: they use signals, which threads do not have. The pool's deadline bounds a call.
- Expressions that can take it for ever, such as 9^{9^{9}} or \tan x > \cos x, are refused. They are equal to nothing.
- Expressions with different values at a few points are unequal. Only others are simplified, which may take very long.
- Random numbers of sympy are seeded for each call, so a verdict depends on the two texts alone.
"""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import re
from collections.abc import Sequence

_CHOOSES = "jaxrl_post.rewards.math:math"
_LONGEST = 200  # characters of an expression
_DIGITS = 30  # of one number
_LARGEST_POWER = 64
_LARGEST_FACTORIAL = 100
_LARGEST_DEGREE = 3  # of inequalities that are solved
_POINTS, _NEAR = (37, 53, 89), 1e-9  # numerators over 61, and a relative distance
_FUNCTIONS = {"sqrt", "sin", "cos", "tan", "log", "exp", "frac", "left", "right", "cdot", "times", "infty", "and"}
_BOTH = re.compile(r"\\pm\b")
_POWERS = re.compile(r"\^\s*\{?\s*\(?\s*[-+]?(\d*)")


@functools.cache
def grader() -> str:
    """Returns what `rewards.math:math` compares expressions with: math-verify, sympy, and their versions."""
    versions = {name: importlib.metadata.version(name) for name in ("math-verify", "sympy")}
    return f"math-verify {versions['math-verify']} (sympy {versions['sympy']})"


def graders(functions: Sequence[str]) -> dict[str, str]:
    """Returns, for each reward function whose verdicts depend on what is installed, what it compares with."""
    return {path: grader() for path in functions if path == _CHOOSES}


def prepare() -> None:
    """Imports math-verify, which takes about a second."""
    _library()


def equal(gold: str, given: str) -> bool:
    """Returns whether math-verify finds two expressions equal. Order matters to it: the truth is first."""
    gold, given = (_written(text) for text in (gold, given))
    if not (_readable(gold) and _readable(given)):
        return False
    parse, verify, seed = _library()
    seed(0)
    truth, found = (_joined(text, parse(rf"\boxed{{{text}}}", parsing_timeout=None)) for text in (gold, given))
    if not truth or not found or not _comparable(truth[0], found[0]) or _differ(truth[0], found[0]):
        return False
    return bool(verify(truth, found, allow_set_relation_comp=True, timeout_seconds=None))


def _written(text: str) -> str:
    r"""Returns an expression without what math-verify misreads: exponents (1.5e3), \pm in a formula, roman "and"."""
    text = re.sub(r"(?<![\w.])(\d+(?:\.\d+)?)[eE]([-+]?\d{1,3})(?!\w)", r"\1 \\cdot 10^{\2}", text)
    if len(_BOTH.findall(text)) == 1 and "," not in text:
        text = f"{_BOTH.sub('+', text)}, {_BOTH.sub('-', text)}"
    text = text.replace(r"\varnothing", r"\emptyset").replace("$", " ")
    return re.sub(r"\\(?:text|mathrm)\s*\{\s*(and|or)\s*\}", r" \1 ", text)


def _joined(text: str, parsed: list) -> list:
    """Returns what was parsed, with "x<1 or x>2" as one set."""
    from sympy import And, FiniteSet, Union
    from sympy.core.relational import Equality, Relational

    one = parsed[0] if parsed else None
    ranges = isinstance(one, FiniteSet) and all(isinstance(part, Relational | And) for part in one.args)
    if not ranges or not re.search(r"\bor\b", text) or one.atoms(Equality) or not _solvable(one):
        return parsed
    return [Union(*(part.as_set() for part in one.args))]


def _solvable(ranges) -> bool:
    """Returns whether inequalities of one variable are of low degree. sympy may solve others for ever."""
    from sympy import Expr
    from sympy.core.relational import Equality, Relational

    parts = [one for one in ranges.atoms(Relational) if not isinstance(one, Equality)]
    if len(ranges.free_symbols) != 1 or not all(isinstance(side, Expr) for one in parts for side in one.args):
        return False
    sides = [(one.lhs - one.rhs).as_poly(*ranges.free_symbols) for one in parts]
    return all(side is not None and side.degree() <= _LARGEST_DEGREE for side in sides)


def _polynomial(relation) -> bool:
    return all(side.is_polynomial() for side in relation.args if hasattr(side, "is_polynomial"))


def _comparable(gold, given) -> bool:
    """Returns whether a pair may be equal, and is compared soon. A set equals no number, and only simple inequalities."""
    from sympy import Expr, FiniteSet, Set
    from sympy.core.relational import Equality, Relational
    from sympy.logic.boolalg import Boolean

    for one, other in ((gold, given), (given, gold)):
        if isinstance(one, Set) and isinstance(other, Expr):
            return isinstance(one, FiniteSet) and len(one) == 1
        if isinstance(other, Relational) and not isinstance(other, Equality) and not _polynomial(other):
            return False
        if isinstance(one, Set) and isinstance(other, Boolean | Relational) and not isinstance(other, Equality):
            return _solvable(other)
    return True


def _differ(gold, given) -> bool:
    """Returns whether two expressions have different values at one of a few points. False for relations and sets."""
    import sympy

    if not (isinstance(gold, sympy.Expr) and isinstance(given, sympy.Expr)):
        return False
    names = sorted(gold.free_symbols | given.free_symbols, key=str)
    for point in _POINTS:
        at = {name: sympy.Rational(point + 7 * place, 61) for place, name in enumerate(names)}
        left, right = (sympy.N(one.subs(at)) for one in (gold, given))
        known = left.is_number and right.is_number and left.is_finite and right.is_finite
        if known and abs(left - right) > _NEAR * (1 + abs(left) + abs(right)):
            return True
    return False


@functools.cache
def _library():
    from math_verify import LatexExtractionConfig, parse, verify
    from sympy.core.random import seed

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its time limits are off
    only = (LatexExtractionConfig(boxed_match_priority=0),)
    return functools.partial(parse, extraction_config=only, fallback_mode="no_fallback"), verify, seed


def _readable(text: str) -> bool:
    """Returns whether a text is an expression of moderate size. Words are none: letters would be factors in any order."""
    words = re.findall(r"[A-Za-z]{3,}", re.sub(r"\\[A-Za-z]+", " ", text))
    digits = re.findall(r"\d+", text)
    return (
        0 < len(text) <= _LONGEST
        and not set(words) - _FUNCTIONS
        and all(len(run) <= _DIGITS for run in digits)
        and not re.search(r"\\infty\s*\}?\s*\^|\^\s*\{?[^{}]*\\infty", text)
        and _small_powers(text)
    )


def _small_powers(text: str) -> bool:
    """Returns whether no power or factorial is nested, or of a large number."""
    text = text.replace("**", "^")
    powers = _POWERS.findall(text)
    if any(int(power or 0) > _LARGEST_POWER for power in powers):
        return False
    if re.search(r"\)\s*\^\s*\{?\s*[2-9]\d", text) and len(set(re.findall(r"[A-Za-z]", text))) > 2:
        return False  # such a power of a sum has very many terms
    nested = re.search(r"\^\s*(?:\{[^{}]*[\^!]|\w\s*\^)|\)\s*!|!\s*[!^]|\}\s*!", text)
    factorials = [int(run) for run in re.findall(r"(\d+)\s*!", text)]
    return not nested and len(powers) <= 12 and all(run <= _LARGEST_FACTORIAL for run in factorials)
