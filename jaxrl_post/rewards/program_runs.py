"""How a whole program is run and a function of one is called, and when what it prints or returns is right.

Output is compared as LiveCodeBench and APPS do: line by line, without whitespace at the ends of lines and without blank
lines around. Where a line differs, its numbers are compared as numbers. One that the expected output writes with a
point or an exponent may differ by TOLERANCE, absolute or relative; any other is exact.
"""

from __future__ import annotations

import decimal
import json
import re

from jaxrl_post.rewards.program_tests import Called
from jaxrl_post.rewards.sandbox.examiner import ProgramTest

TOLERANCE = 1e-6
_NUMBER = re.compile(r"[+-]?(?:0|[1-9]\d*|(?=\.\d))(?:\.\d*)?(?:[eE][+-]?\d{1,4})?")
_LONGEST = 4000  # digits of a number

# Runs in the judged program's process, as a program itself. A thread runs where it is started, because there are no others.
RUN = """
import atexit, builtins, os, sys, threading, types

class Ended(BaseException):
    pass

def ended(status):
    raise Ended(status)

def run(source):
    os._exit = ended
    builtins.exit = builtins.quit = sys.exit
    threading.Thread.start = threading.Thread.run
    threading.Thread.join = lambda self, timeout=None: None
    sys.stdin = open(0, encoding="utf-8", closefd=False)
    sys.stdout = out = open(1, "w", encoding="utf-8", closefd=False)
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    status = None
    try:
        exec(compile(source, "<program>", "exec", dont_inherit=True), vars(main))
    except SystemExit as end:
        status = end.code
    except Ended as end:
        status, out = end.args[0], None
    if out is not None:
        atexit._run_exitfuncs()
        for stream in (sys.stdout, out):
            if not getattr(stream, "closed", False):
                stream.flush()
    if status not in (None, 0):
        raise RuntimeError(f"exit status {status}")
"""
_BEFORE = """
import bisect, collections, functools, heapq, itertools, math, re, string, sys
from bisect import *
from collections import *
from functools import *
from heapq import *
from itertools import *
from typing import *
import bisect
"""
_SAME = """
import json

def _plain(value):
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if isinstance(value, dict):
        return {key if isinstance(key, str) else json.dumps(key): _plain(one) for key, one in value.items()}
    return value

def _same(got, wanted):
    if isinstance(wanted, list) and isinstance(got, list):
        return len(got) == len(wanted) and all(map(_same, got, wanted))
    if isinstance(wanted, dict) and isinstance(got, dict):
        return got.keys() == wanted.keys() and all(_same(got[key], wanted[key]) for key in wanted)
    if isinstance(wanted, float) and type(got) in (int, float):
        return got == wanted or abs(got - wanted) <= {tolerance} * max(1.0, abs(wanted)) or got != got and wanted != wanted
    return got == wanted
""".replace("{tolerance}", repr(TOLERANCE))


def call(test: Called, source: str) -> tuple[ProgramTest, str]:
    """Returns a call as statements, and the program with the function as a name of its own.

    A method of a class Solution goes before a function of that name. The modules that LeetCode and APPS import are there.
    """
    arguments, wanted = json.dumps(list(test.arguments)), json.dumps(list(test.wanted))
    numbered = json.dumps(
        [isinstance(one, dict) and all(isinstance(key, int) for key in one) for one in test.arguments]
    )
    statements = f"""{_SAME}
def check(candidate):
    given = json.loads({arguments!r})
    for place, numbered in enumerate(json.loads({numbered!r})):
        if numbered:
            given[place] = {{int(key): value for key, value in given[place].items()}}
    got = _plain(candidate(*given))
    assert any(_same(got, _plain(one)) for one in json.loads({wanted!r}))
"""
    method = f'if hasattr(globals().get("Solution"), {test.name!r}): {test.name} = Solution().{test.name}'
    return ProgramTest(statements, entry_point=test.name, prelude=_BEFORE), f"{source}\n{method}"


def same_output(printed: str, expected: str) -> bool:
    """Returns whether a program printed what is expected."""
    ours, theirs = _lines(printed), _lines(expected)
    return len(ours) == len(theirs) and all(map(_same_line, ours, theirs))


def _lines(text: str) -> list[str]:
    lines = [line.rstrip() for line in text.split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    first = next((place for place, line in enumerate(lines) if line), 0)
    return lines[first:]


def _same_line(ours: str, theirs: str) -> bool:
    if ours == theirs:
        return True
    mine, wanted = ours.split(), theirs.split()
    if len(mine) != len(wanted) or not all(map(_same_token, mine, wanted)):
        return False
    return all(map(_number, wanted)) or re.split(r"\S+", ours) == re.split(r"\S+", theirs)


def _number(token: str) -> bool:
    return len(token) <= _LONGEST and any(map(str.isdigit, token)) and _NUMBER.fullmatch(token) is not None


def _same_token(ours: str, theirs: str) -> bool:
    if ours == theirs:
        return True
    if not (_number(ours) and _number(theirs)):
        return False
    with decimal.localcontext(prec=2 * _LONGEST, Emax=10**6, Emin=-(10**6)):
        mine, wanted = decimal.Decimal(ours), decimal.Decimal(theirs)
        if mine == wanted or not re.search(r"[.eE]", theirs):
            return mine == wanted
        return abs(mine - wanted) <= decimal.Decimal(repr(TOLERANCE)) * max(decimal.Decimal(1), abs(wanted))
