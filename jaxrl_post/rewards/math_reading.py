r"""Finds the result in a text: in the last box, behind the last "####", behind "answer is", or else the last number.

- Markdown's signs of emphasis around a result do not count. A heading "#### Step 3" above further text is no result.
- Behind "answer is" the first expression counts, unless a later sentence takes it back: "No, it is 21."
- A last box that never closes hides every earlier one. Boxes without a result do not count.
- No input can hang: the last 20,000 characters are read, and an expression is sought in 1,000 characters of one line.
"""

from __future__ import annotations

import re

from jaxrl_post.rewards.math_expressions import SEPARATOR, first_expression, last_expression
from jaxrl_post.rewards.math_letters import plain

_TAIL = 20_000  # characters of a text that are read
_FORMULAS = 1_000  # of them, those in which a last formula is sought
_NUMBER = re.compile(
    r"(?<![\w.])[-+]?\$?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:/\d+(?:\.\d+)?(?!\d)|[eE][-+]?\d{1,3}(?!\w))?"
    r"|(?<![\w.])[-+]?\$?\.\d+",
    re.ASCII,
)
_LOOSE = re.compile(r"\d[\d,]*(?:\.\d+)?|\.\d+")

_BARE_BOX = re.compile(r"[-+]?(?:\d[^\s$]*|\\[A-Za-z]+[^\s$]*|[B-Zb-z](?![A-Za-z]))")  # \boxed 5
_EMPHASIS = re.compile(r"(?<![\w)}])\*\*|\*\*(?![\w({\\])|(?<!\w)__|__(?!\w)|~~[^~\n]*~~|`|</?(?:b|i|strong|em)>")
_SINGLE = re.compile(r"(?<![\w*)}])\*([^\s*][^*\n]*)(?<!\s)\*(?![\w*({\\])")
_SAID = re.compile(
    r"\b(?:answer|correct (?:option|choice))(?: is|:)|选(?:择|项)?\s*:?\s*(?=(?-i:\(?[A-H]\b))"
    r"|(?:答案|答え|答|정답|답)\s*(?:应该|應該)?\s*(?:是|为|為|は|은|:)\s*:?",
    re.IGNORECASE,
)
_GAP = re.compile(r"[:\s]*(?:\n\s*(?:[-*>]\s+)?)?")
_TAKEN_BACK = re.compile(
    r"(?:^|[.!?\n])\s*(?:no|wait|actually|correction|sorry|oops)\b[^\n]{0,200}?"
    r"\b(?:should be|must be|it is|it's|rather|instead)\b:?(?=[^\n]{0,40}\d)",
    re.IGNORECASE,
)
_MATH = r"(?:\$\$(?P<a{0}>.+?)\$\$|\\\[(?P<b{0}>.+?)\\\]|\\\((?P<c{0}>.+?)\\\)|(?<![\\\d])\$(?P<d{0}>[^$\n]+)\$(?!\d))"
_FORMULA = re.compile(_MATH.format(0), re.DOTALL)
_MORE = re.compile(r"\s*(?:,\s*(?:and\b|or\b)?|;|\band\b|\bor\b)\s*" + _MATH.format(0), re.DOTALL)
_CHOICE = re.compile(
    r"(?:the\s+)?(?:(?:option|choice|letter)\s+)?(?:\(([A-Z])\)(?=\W|$)|([A-Z])(?=[.):,;]|\s*$|\s+(?:because|since|as|which|\()))",
    re.IGNORECASE,
)
_OTHER_CHOICE = re.compile(r"\s*(?:,\s*(?:and|or)?|/|or\b|and\b|&)\s*\(?[A-Z]\b(?![a-z])")
_RESULT_HEADING = re.compile(r"(?:(?:the|my)\s+)?(?:final\s+)?(?:answer|result|solution)\W*", re.IGNORECASE)


def last_number(text: str) -> str | None:
    """Returns the last number of `text` as written, or None."""
    tail = SEPARATOR.sub(",", plain(text[-_TAIL:]))
    found = _NUMBER.findall(tail) or _LOOSE.findall(tail)
    return found[-1] if found else None


def last_boxed(text: str) -> str | None:
    r"""Returns the content of the last \boxed or \fbox that has one ("\boxed 5" has "5"), or None.

    It is "" where the last such command opens a brace that never closes: its text was cut off, and no box before it counts.
    """
    tail = text[-_TAIL:]
    closing = _pairs(tail)
    for match in reversed(list(re.finditer(r"\\(?:boxed|fbox)(?![A-Za-z])\s*", tail))):
        start = match.end()
        if tail[start : start + 1] != "{":
            bare = _BARE_BOX.match(tail, start)
            if bare:
                return bare.group().rstrip(".,")
        elif start not in closing:
            return ""
        elif content := tail[start + 1 : closing[start]].strip():
            return content
    return None


def readings(solution: str) -> list[str]:
    """Returns what a solution may mean by its result: more than one where words stand around it, none without one."""
    text = plain(solution[-_TAIL:])
    found = last_boxed(text)
    if found is not None:
        return [found, *_labelled(found)]
    text = _SINGLE.sub(r"\1", _EMPHASIS.sub("", text))
    if "####" in text:
        line, _, below = text.rpartition("####")[2].strip().partition("\n")
        return _after_hashes(line.strip(), below)
    return _of_text(text)


def _of_text(text: str) -> list[str]:
    said = list(_SAID.finditer(text))
    if not said:
        last, formula = last_expression(text), _last_formula(text)
        found = [formula] if formula else []
        return (found if last is None else [*found, last]) or _choice(text.strip())
    rest = text[said[-1].end() :]
    back = list(_TAKEN_BACK.finditer(rest))
    return _clause(rest[back[-1].end() :] if back else rest)


def _last_formula(text: str) -> str | None:
    """Returns the last formula between LaTeX's signs, if no number stands behind it."""
    formulas = list(_FORMULA.finditer(text[-_FORMULAS:]))
    if not formulas or re.search(r"\d", text[-_FORMULAS:][formulas[-1].end() :]):
        return None
    return _inside(formulas[-1])


def _after_hashes(line: str, below: str) -> list[str]:
    if _RESULT_HEADING.fullmatch(line) or (
        below.strip() and re.match(r"[A-Za-z]{2,}.*\d", line) and _SAID.search(below)
    ):
        return _of_text(below)
    if _SAID.search(line):
        return _of_text(line)
    if re.match(r"[-+=(\[$\\]*\s*[\d.]|[A-Za-z]\w?\s*=", line):
        return [line, *_clause(line)]
    return [line, *_choice(line)]


def _labelled(box: str) -> list[str]:
    r"""Returns the result behind words in a box: \text{The area is } 42."""
    words = re.sub(r"\\text(?:bf|it)?\s*\{([^{}]*)\}", r"\1", box).strip()
    led = re.match(r"[A-Za-z][A-Za-z ]*(?: is| are|:)\s+(?=\S)|[A-Za-z]{3,}:\s*(?=\S)", words)
    return [words[led.end() :]] if led else []


def _clause(rest: str) -> list[str]:
    """Returns what the text behind "answer is" may mean."""
    rest = rest[_GAP.match(rest).end() :]
    negated = re.match(r"not\b[^.\n]*?(?:\bbut\b|$|(?=[.\n]))", rest)
    rest = rest[negated.end() :].lstrip() if negated else rest
    formula = _FORMULA.search(rest[:_FORMULAS])
    line = rest.partition("\n")[0].strip()
    if formula and not re.search(r"\d", rest[: formula.start()]) and formula.start() <= len(line):
        return [_formulas(rest, formula)]
    if choices := _choice(line):
        return choices
    first = first_expression(line)
    lead = re.split(r"[,;:(]|\.(?!\d)", line, maxsplit=1)[0].strip()
    found = [] if first is None else [first]
    return found + [words for words in dict.fromkeys((lead, line.rstrip("."))) if words and not _begins(words)]


def _begins(words: str) -> bool:
    """Returns whether a text begins with a number, so that it is no result in words."""
    return re.match(r"[-+(\[$]*\s*[\d.]", words) is not None


def _formulas(text: str, first: re.Match) -> str:
    """Returns a formula and those joined to it by commas, "and" or "or", as one list."""
    found, at = [_inside(first)], first.end()
    while more := _MORE.match(text, at):
        found.append(_inside(more))
        at = more.end()
    return ", ".join(found)


def _inside(formula: re.Match) -> str:
    return next(part for part in formula.groups() if part is not None).strip()


def _choice(line: str) -> list[str]:
    found = _CHOICE.match(line)
    letter = found and (found[1] or found[2])
    if not letter or not letter.isupper():
        return []
    return [line.rstrip(".")] if _OTHER_CHOICE.match(line, found.end()) else [letter]


def _pairs(text: str) -> dict[int, int]:
    """Returns the position of each opening brace that is closed -> the position of its closing brace."""
    opened, closing = [], {}
    for match in re.finditer(r"[{}]", text):
        if match.group() == "{":
            opened.append(match.start())
        elif opened:
            closing[opened.pop()] = match.start()
    return closing
