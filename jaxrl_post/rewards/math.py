r"""Scorers of short results: exact text, the last number, "#### n", \boxed{...}. Each returns 1.0 or 0.0.

All take verl's arguments (data_source, solution_str, ground_truth, extra_info).

- Of a ground truth with "####" (GSM8K's whole solution), the text after the last one counts.
- Numbers are compared as exact fractions. So 0.5, 1/2 and \frac{1}{2} are one number, and no tolerance is needed.
- There is no algebra: 2+2 is not 4 and x+1 is not 1+x. Other forms than numbers, tuples and sets must have the same
  text.
- No input can hang a scorer. The last 20,000 characters of a solution are read. A result longer than 1,000 characters,
  or nested deeper than 4, is plain text.
"""

from __future__ import annotations

import re
from fractions import Fraction

_TAIL = 20_000  # characters of a solution that are read
_NUMBER = re.compile(
    r"(?<![\w.])[-+]?\$?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:/\d+(?:\.\d+)?(?!\d))?"
    r"|(?<![\w.])[-+]?\$?\.\d+"
)
_LOOSE = re.compile(r"\d[\d,]*(?:\.\d+)?|\.\d+")
_STRICT = re.compile(r"#### (-?[0-9.,]+)")
_LONGEST = 1_000  # characters; a longer result is plain text
_DEEPEST = 4


def exact(data_source: str, solution_str: str, ground_truth: str, extra_info: dict) -> float:
    """Returns 1.0 if the solution, or its text after the last "#", is the ground truth to the character.

    Whitespace around the solution does not count. So "12+30=42#42" and "42" are both right for "42". "042" and "42."
    are not.
    """
    text, gold = solution_str.strip(), _gold(ground_truth)
    return float(gold in (text, text.rpartition("#")[2].strip()))


def strict(data_source: str, solution_str: str, ground_truth: str, extra_info: dict) -> float:
    """Returns 1.0 if verl's strict GSM8K rule finds the ground truth.

    The rule takes the last match of `#### (-?[0-9.,]+)` in the last 300 characters. Here it is compared as a number,
    in verl as text. So "72.0" and "72." are right for "72" here.
    """
    found = _STRICT.findall(solution_str[-300:])
    return float(bool(found) and same(found[-1].rstrip(".,"), _gold(ground_truth)))


def flexible(data_source: str, solution_str: str, ground_truth: str, extra_info: dict) -> float:
    """Returns 1.0 if the last number anywhere is the ground truth: "$1,080", "-3", "0.5", "3/4".

    A minus after a digit is a subtraction, not a sign.
    """
    found = last_number(solution_str)
    return float(found is not None and same(found, _gold(ground_truth)))


def boxed(data_source: str, solution_str: str, ground_truth: str, extra_info: dict) -> float:
    r"""Returns 1.0 if the content of the last \boxed{...} or \fbox{...} is the ground truth, 0.0 without a box."""
    found = last_boxed(solution_str)
    return float(found is not None and same(found, _gold(ground_truth)))


def math(data_source: str, solution_str: str, ground_truth: str, extra_info: dict) -> float:
    r"""Returns 1.0 if the first of these that the solution has is the ground truth:

    1. the last \boxed{...}
    2. the text after the last "####"
    3. the text after the last "answer is" or "answer:" on its line
    4. the last number
    """
    found = answer(solution_str)
    return float(found is not None and same(found, _gold(ground_truth)))


def answer(solution: str) -> str | None:
    """Returns the text that `math` compares, or None if the solution has none of its forms."""
    found = last_boxed(solution)
    if found is not None:
        return found
    tail = solution[-_TAIL:]
    if "####" in tail:
        return tail.rpartition("####")[2].strip().split("\n")[0]
    said = re.findall(r"(?i)\banswer(?: is|:)[:\s]*([^\n]{1,200})", tail)
    if not said:
        return last_number(solution)
    text = said[-1].strip().rstrip(".")
    return (last_number(text) or text) if isinstance(_value(text), str) else text


def last_number(text: str) -> str | None:
    """Returns the last number of `text` as written, or None."""
    tail = text[-_TAIL:]
    found = _NUMBER.findall(tail) or _LOOSE.findall(tail)
    return found[-1] if found else None


def last_boxed(text: str) -> str | None:
    r"""Returns the content of the last \boxed or \fbox whose braces balance ("\boxed 5" gives "5"), or None."""
    tail = text[-_TAIL:]
    closing = _pairs(tail)
    for match in reversed(list(re.finditer(r"\\(?:boxed|fbox)\s*", tail))):
        start = match.end()
        if tail[start : start + 1] != "{":
            return re.match(r"[^\s$.,]*", tail[start:]).group()
        if start in closing:
            return tail[start + 1 : closing[start]]
    return None


def same(given: str, gold: str) -> bool:
    """Returns whether two results are the same number, tuple, set or list, or else the same text.

    Texts are compared without LaTeX's variants of writing. A percent sign may stand for itself or for a hundredth.
    """
    return _equal(_value(given), _value(gold))


def _gold(ground_truth: str) -> str:
    return str(ground_truth).rpartition("####")[2].strip()


def _pairs(text: str) -> dict[int, int]:
    """Returns the position of each opening brace that is closed -> the position of its closing brace."""
    opened, closing = [], {}
    for match in re.finditer(r"[{}]", text):
        if match.group() == "{":
            opened.append(match.start())
        elif opened:
            closing[opened.pop()] = match.start()
    return closing


# A result is a Fraction, a ("%", Fraction), a (brackets, members), or else its plain text.

_DROP = re.compile(r"\\left|\\right|\\!|\\,|\\;|\\:|\\ |\\displaystyle|\\\$|\$|\\degree|\^\{?\\circ\}?|[°€£~]")
_WRAP = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}")
_UNIT = re.compile(
    r"(?<=[\d}])(?:\s*(?:mm|cm|km|kg|mg|ml|mL|inches|feet|ft)|\s+[A-Za-z]{2,}(?:\s+[A-Za-z]+)*"
    r"|\s+[mgshLl])\.?(?:\s*\^\s*\{?[23]\}?)?$"
)
_PLAIN = re.compile(r"[-+]?(?:\d+|\d{1,3}(?:,\d{3})+)?(?:\.\d*)?")
_MIXED = re.compile(r"([-+]?)(\d+)\s+(\d+)/(\d+)")
_BRACKETS = {"(": ")]", "[": ")]", "{": "}"}


def _value(text: str, depth: int = 0):
    if len(text) > _LONGEST or depth > _DEEPEST:
        return re.sub(r"\s+", "", text)
    text = _simple(text)
    head = re.fullmatch(r"[A-Za-z]\w?\s*=\s*([^=]+)", text)
    text = head.group(1) if head else text
    percent = text.endswith("%")
    number = _number(text[:-1].strip() if percent else text)
    if number is not None:
        return ("%", number) if percent else number
    if text[:1] in _BRACKETS and text[-1:] in _BRACKETS[text[0]] and _outer(text):
        return (text[0] + text[-1], tuple(_value(member, depth + 1) for member in _members(text[1:-1])))
    members = _members(text)
    if len(members) > 1:
        return ("{}", tuple(_value(member, depth + 1) for member in members))
    return re.sub(r"\s+", "", text)


def _simple(text: str) -> str:
    text = _WRAP.sub(lambda m: m.group(1) if m.group(0) == text.strip() else " " + m.group(1), text.strip())
    text = _DROP.sub("", text).replace("\\{", "{").replace("\\}", "}").replace("\\%", "%").replace("−", "-").strip()
    text = re.sub(r"\\[dtc]frac", r"\\frac", text)
    text = re.sub(r"\\(frac|sqrt)\s*(\d)", r"\\\1{\2}", text)
    text = re.sub(r"(\\frac\{[^{}]*\})\s*(\d)", r"\1{\2}", text)
    text = re.sub(r"(?<=\d)\s*\\frac\{(\d+)\}\{(\d+)\}", r" \1/\2", text)
    text = re.sub(r"\\frac\{\s*([-+]?[\d.]+)\s*\}\{\s*([-+]?[\d.]+)\s*\}", r"\1/\2", text)
    text = _UNIT.sub("", text.rstrip(". ")).strip()
    return text


def _number(text: str) -> Fraction | None:
    mixed = _MIXED.fullmatch(text)
    if mixed and int(mixed.group(4)):
        value = int(mixed.group(2)) + Fraction(int(mixed.group(3)), int(mixed.group(4)))
        return -value if mixed.group(1) == "-" else value
    over, slash, under = text.partition("/")
    if not slash:
        return _decimal(text)
    numerator, denominator = _decimal(over), _decimal(under)
    return numerator / denominator if numerator is not None and denominator else None


def _decimal(text: str) -> Fraction | None:
    text = text.strip()
    if not _PLAIN.fullmatch(text) or not any(c.isdigit() for c in text):
        return None
    return Fraction(text.replace(",", ""))


def _outer(text: str) -> bool:
    """Returns whether the first bracket closes at the very end. Kinds of brackets may differ: (1,2] is an interval."""
    depth = 0
    for place, letter in enumerate(text):
        depth += (letter in "([{") - (letter in ")]}")
        if depth == 0:
            return place == len(text) - 1
    return False


def _members(text: str) -> list[str]:
    members, depth, start = [], 0, 0
    for place, letter in enumerate(text):
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            members.append(text[start:place])
            start = place + 1
    members.append(text[start:])
    return [member.strip() for member in members]


def _equal(a, b) -> bool:
    if isinstance(a, tuple) and isinstance(b, tuple) and "%" not in (a[0], b[0]):
        if a[0] != b[0] or len(a[1]) != len(b[1]):
            return False
        return _matched(list(a[1]), list(b[1])) if a[0] == "{}" else all(map(_equal, a[1], b[1]))
    if isinstance(a, str) or isinstance(b, str):
        return isinstance(a, str) and a == b and a != ""
    left, right = _readings(a), _readings(b)
    return bool(left & right)


def _matched(left: list, right: list) -> bool:
    for member in left:
        place = next((i for i, other in enumerate(right) if _equal(member, other)), None)
        if place is None:
            return False
        del right[place]
    return True


def _readings(value) -> set:
    """Returns the numbers that a value may stand for: "50%" is 50 as a percentage and 1/2 as a number."""
    if isinstance(value, Fraction):
        return {value}
    return {value[1], value[1] / 100} if value[0] == "%" else set()
