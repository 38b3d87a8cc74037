r"""Equality of expressions by math-verify, where it is installed: x+1 is 1+x, and \sqrt{8} is 2\sqrt{2}.

It is the extra `math`: pip install 'jaxrl_post[math]'. Without it the rules of rewards/math_values.py decide alone.

- math-verify compares single expressions. Its reading of a whole text is not used: it takes "5 \text{ thousand}" for 5.
- Its time limits are off, because they use signals and do not always fire. The pool's deadline bounds a call.
- Expressions that can take it for ever, such as 9^{9^{9}}, are refused by their text. They are equal to nothing.
- Expressions with different values at a few points are unequal. Only others are simplified, which may take very long.
- Random numbers of sympy are seeded for each call, so a verdict depends on the two texts alone.
"""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import re
from collections.abc import Callable, Sequence

_PACKAGE, _SERIES = "math-verify", "0.9."
OWN = "own rules"
_CHOOSES = "jaxrl_post.rewards.math:math"
_LONGEST = 200  # characters of an expression
_DIGITS = 30  # of one number
_LARGEST_POWER = 64
_LARGEST_FACTORIAL = 100
_POINTS, _NEAR = (37, 53, 89), 1e-9  # numerators over 61, and a relative distance
_FUNCTIONS = {"sqrt", "sin", "cos", "tan", "log", "exp", "frac", "left", "right", "cdot", "times", "infty"}
_POWERS = re.compile(r"\^\s*\{?\s*\(?\s*[-+]?(\d*)")


@functools.cache
def grader() -> str:
    """Returns what `rewards.math:math` compares expressions with: math-verify and its version, or this project's rules."""
    try:
        version = importlib.metadata.version(_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return f"{OWN} ({_PACKAGE} is not installed)"
    if not version.startswith(_SERIES):
        return f"{OWN} ({_PACKAGE} {version} is installed, {_SERIES}x is used)"
    return f"{_PACKAGE} {version} (sympy {importlib.metadata.version('sympy')})"


def graders(functions: Sequence[str]) -> dict[str, str]:
    """Returns, for each reward function whose verdicts depend on what is installed, what it compares with."""
    return {path: grader() for path in functions if path == _CHOOSES}


@functools.cache
def expressions() -> Callable[[str, str], bool] | None:
    """Returns `equal`, or None where the own rules decide alone. It imports math-verify, which takes about a second.

    Raises:
      ImportError: math-verify is installed and cannot be imported.
    """
    if grader().startswith(OWN):
        return None
    try:
        _library()
    except ImportError as error:
        raise ImportError(
            f"{grader()} is installed and cannot be imported: {error}; install it with pip install 'jaxrl_post[math]', "
            "or uninstall it"
        ) from error
    return equal


def equal(gold: str, given: str) -> bool:
    """Returns whether math-verify finds two expressions equal. Order matters to it: the truth is first."""
    if not (_readable(gold) and _readable(given)):
        return False
    parse, verify, seed = _library()
    seed(0)
    truth, found = (parse(rf"\boxed{{{text}}}", parsing_timeout=None) for text in (gold, given))
    if not truth or not found or _differ(truth[0], found[0]):
        return False
    return bool(verify(truth, found, timeout_seconds=None))


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
        and (r"\infty" not in text or text.strip("+- ") == r"\infty")
        and _small_powers(text)
    )


def _small_powers(text: str) -> bool:
    """Returns whether no power or factorial is nested, or of a large number."""
    text = text.replace("**", "^")
    powers = _POWERS.findall(text)
    if any(int(power or 0) > _LARGEST_POWER for power in powers):
        return False
    nested = re.search(r"\^\s*(?:\{[^{}]*[\^!]|\w\s*\^)|\)\s*!|!\s*[!^]|\}\s*!", text)
    factorials = [int(run) for run in re.findall(r"(\d+)\s*!", text)]
    return not nested and len(powers) <= 12 and all(run <= _LARGEST_FACTORIAL for run in factorials)
