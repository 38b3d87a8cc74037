r"""Finds an expression in a line: the longest run of numbers, letters, operators, brackets and LaTeX around a number.

It begins after the last "=". So the last expression of "so 29-(53-2)/3" is all of it, not the operand 3. That of
"3 + 4 = 7 apples" is 7. Number words belong to it: "5 thousand". Units do not.
"""

from __future__ import annotations

import re

from jaxrl_post.rewards.math_values import is_number_word, known

_TAIL = 20_000  # characters of a text that are read
_LINE = 1_000  # characters of a line in which an expression is sought
SEPARATOR = re.compile(r"(?<=\d)(?:\{,\}|\\,|\\!,|,\\!)(?=\d{3}(?!\d))")  # between thousands

_TOKEN = re.compile(
    r"(?P<tag></?[A-Za-z]+>|<<|>>|[-=]>|\\[\[\]()])"
    r"|(?P<number>\d+(?:,\d{3})*(?:\.\d+)?(?:[eE][-+]?\d{1,3}(?!\w))?|\.\d+)"
    r"|(?P<scale>[万亿만억])"
    r"|(?P<space>\s+|\\[,;:! ])"
    r"|(?P<command>\\[A-Za-z]+)"
    r"|(?P<word>[A-Za-z]{2,})"
    r"|(?P<operator>\*\*|[-+*/^_×÷·−<>≤≥≠]|:(?=\d)|(?<=\d\s)[xX](?=\s\d))"
    r"|(?P<letter>[A-Za-zπ√∞])"
    r"|(?P<post>\\?%|!|°|²|³)"
    r"|(?P<open>\\?\{|[(\[])|(?P<close>\\?\}|[)\]])"
    r"|(?P<currency>\\?\$|[€£])"
    r"|(?P<other>.)",
    re.DOTALL,
)
_HALF = re.compile(r"\s+and\s+(?:a|one|two|three)\s+(?:half|third|quarter|fourth|fifth)s?\b", re.IGNORECASE)
_FUNCTIONS = {"sqrt", "sin", "cos", "tan", "log", "ln", "exp", "pi"}
_BINARY = {"plus", "minus", "times", "over", "divided", "multiplied", "mod", "modulo"}
_RELATIONS = {r"\approx", r"\equiv", r"\implies", r"\to", r"\Rightarrow", r"\rightarrow", r"\boxed", r"\fbox"}
_JOINERS = {r"\cdot", r"\times", r"\div", r"\pm", r"\le", r"\leq", r"\ge", r"\geq", r"\neq", r"\ne", r"\pmod", r"\bmod"}


_AND = re.compile(r"\s*(?:,\s*(?:(?:and|or)\b)?|\b(?:and|or)\b)\s*(?:[A-Za-z]\w?\s*=\s*)?(?=[-+]?[\d(])")
_END = re.compile(r"\s*(?:$|[.;:!?](?!\d))")
_WORD_AFTER = re.compile(r"\s*[A-Za-z]+(?:\s*\^\s*\{?-?\d\}?)?")
_MEASURE = re.compile(r"\s+(?:and\s+)?([\w.]+)(?:\s+[A-Za-z]+)?")


def last_expression(text: str) -> str | None:
    """Returns the expression around the last number of `text`, or None where `text` has no number."""
    tail = SEPARATOR.sub(",", text[-_TAIL:])
    digits = [match.end() for match in re.finditer(r"\d", tail)][-1:]
    if not digits:
        return None
    start = max(tail.rfind("\n", 0, digits[0]) + 1, digits[0] - _LINE)
    end = tail.find("\n", digits[0])
    line = tail[start : min(len(tail) if end < 0 else end, digits[0] + _LINE)]
    tokens = _tokens(line)
    begin, end = _span(line, tokens, max(i for i, token in enumerate(tokens) if token.kind == "number"))
    return _bare(line[begin:end])


def first_expression(clause: str) -> str | None:
    """Returns the expression around the first number of `clause`, or the list that it begins. None: there is no number.

    Of a chain the last side counts: "3 + 4 = 7 apples" is 7. "3 hours 20 minutes" is one result, which is no number.
    """
    line = SEPARATOR.sub(",", clause[:_LINE])
    tokens = _tokens(line)
    place = next((i for i, token in enumerate(tokens) if token.kind == "number"), None)
    if place is None:
        return None
    members = []
    while place is not None:
        begin, end = _span(line, tokens, place)
        side = re.compile(r"\s*=\s*(?=[^,;.]*\d)").match(line, end)
        joined = side is None and _AND.match(line, end)
        if joined or (side is None and members and _END.match(line, end)):
            members.append(line[begin:end])
        elif side is None and members:
            return members[0]
        if not (side or joined):
            break
        beyond = (side or joined).end()
        place = next((i for i, token in enumerate(tokens) if token.kind == "number" and token.start >= beyond), None)
    if len(members) > 1:
        return ", ".join(members)
    return _bare(line[begin : _measured(line, begin, end)])


def _measured(line: str, begin: int, end: int) -> int:
    """Returns the end of an expression with a listed unit after it, and with a second measure: 3 hours 20 minutes."""
    unit = _WORD_AFTER.match(line, end)
    if unit is None or known(line[begin : unit.end()]) is None:
        return end
    more = _MEASURE.match(line, unit.end())
    if more and (known(more[0]) or is_number_word(more[1])):
        return more.end()
    return unit.end()


def _tokens(line: str) -> list[_Token]:
    return [_Token(match) for match in _TOKEN.finditer(line)]


def _span(line: str, tokens: list[_Token], place: int) -> tuple[int, int]:
    """Returns where the expression around the number at `place` begins and ends in the line."""
    first, last = _reach(tokens, place)
    half = _HALF.match(line, tokens[last].end)
    return tokens[first].start, half.end() if half else tokens[last].end


class _Token:
    """A piece of a line. `kind`: what it may do in an expression."""

    __slots__ = ("end", "kind", "start", "text")

    def __init__(self, match: re.Match):
        self.kind, self.text, (self.start, self.end) = match.lastgroup, match.group(), match.span()
        if self.kind == "word":
            name = self.text.lower()
            self.kind = "letter" if name in _FUNCTIONS else "operator" if name in _BINARY else "word"
            if self.kind == "word" and is_number_word(name):
                self.kind = "number word"
        elif self.kind == "scale":
            self.kind = "number word"
        elif self.text in _JOINERS:
            self.kind = "operator"
        elif self.text in _RELATIONS:
            self.kind = "other"


_OPERAND = ("number", "number word", "letter", "command", "close", "post")
_SKIPPED = ("space", "currency")
_AFTER_WORDS = {"+", "*", "/", "^", "×", "÷", "·", "<", ">", "≤", "≥", "≠", *_JOINERS}  # price * 5; but: Total - 5


def _bare(expression: str) -> str:
    """Returns an expression without brackets around the whole of it: (5) is 5, but (1, 2) stays."""
    text = expression.strip()
    while "," not in text and _outer(text):
        text = text[1:-1].strip()
    return text


def _outer(text: str) -> bool:
    """Returns whether a round or curly bracket opens a text and closes at its very end."""
    depth = 0
    for place, letter in enumerate(text):
        depth += (letter in "({") - (letter in ")}")
        if depth <= 0:
            return place == len(text) - 1 and place > 0
    return False


def _reach(tokens: list[_Token], place: int) -> tuple[int, int]:
    """Returns the first and the last token of the expression around `place`, the line's last number."""
    partner = _partners(tokens)
    first = last = place
    for left in range(place, -1, -1):  # brackets around the number, from the innermost one on
        right = partner.get(left, -1)
        if tokens[left].kind == "open" and right > place:
            if any(t.kind in ("word", "tag") or (t.kind == "other" and t.text != ",") for t in tokens[left:right]):
                break
            first, last = left, right
    while (before := _left(tokens, first, partner)) is not None:
        first = before
    while (after := _right(tokens, last, partner)) is not None:
        last = after
    return first, last


def _partners(tokens: list[_Token]) -> dict[int, int]:
    """Returns the place of each bracket that has a partner -> the place of the partner."""
    opened, partner = [], {}
    for place, token in enumerate(tokens):
        if token.kind == "open":
            opened.append(place)
        elif token.kind == "close" and opened:
            partner[place] = opened.pop()
            partner[partner[place]] = place
    return partner


def _left(tokens: list[_Token], first: int, partner: dict[int, int]) -> int | None:
    """Returns the token to which an expression that begins at `first` extends to the left, or None."""
    at = first - 1
    while at >= 0 and tokens[at].kind in _SKIPPED:
        at -= 1
    if at < 0:
        return None
    kind, here = tokens[at].kind, tokens[first].kind
    gap = any(token.kind == "space" for token in tokens[at:first])
    if kind == "operator":
        return at if _has_left(tokens, at, gap) or (not gap and tokens[at].text in "-+−") else None
    if kind == "word":
        return at if here == "operator" and tokens[first].text in _AFTER_WORDS else None
    if kind == "close" and (here == "operator" or not gap):
        return partner.get(at)
    if kind == "number word":
        return at if here == "operator" else None
    mixed = kind == here == "number" and tokens[at].text.isdigit() and tokens[first + 1 : first + 2]
    if kind in ("number", "letter", "post") and mixed and tokens[first + 1].text == "/":
        return at
    joined = here == "operator" or not gap
    return at if kind == "command" or (kind in ("number", "letter", "post") and joined) else None


def _has_left(tokens: list[_Token], at: int, gap: bool) -> bool:
    """Returns whether the operator at `at` has a left operand. `gap`: whether a space follows the operator."""
    before = next((i for i in range(at - 1, -1, -1) if tokens[i].kind not in _SKIPPED), None)
    if before is None:
        return False
    even = gap == any(token.kind == "space" for token in tokens[before:at])  # unlike: is *5*
    return tokens[before].kind in _OPERAND or (
        tokens[before].kind == "word" and tokens[at].text in _AFTER_WORDS and even
    )


def _right(tokens: list[_Token], last: int, partner: dict[int, int]) -> int | None:
    """Returns the token to which an expression that ends at `last` extends to the right, or None."""
    following = [i for i in range(last + 1, len(tokens)) if tokens[i].kind not in _SKIPPED][:2]
    if not following:
        return None
    at, token, here = following[0], tokens[following[0]], tokens[last].kind
    gap = any(token.kind == "space" for token in tokens[last:at])
    after = tokens[following[1]].kind if following[1:] else ""
    if token.kind == "operator":
        return at if after in ("number", "number word", "letter", "command", "open") else None
    if token.kind == "number":
        mixed = tokens[last].text.isdigit() and after == "operator" and tokens[following[1]].text == "/"
        return at if here == "operator" or (here == "number" and mixed) else None
    if token.text == "!":  # a factorial, or the end of a sentence
        after_next = tokens[at + 1].text if tokens[at + 1 : at + 2] else ""
        chained = following[1:] and tokens[following[1]].text == "="
        return at if after in ("operator", "close") or after_next == "$" or chained else None
    if token.kind in ("post", "number word", "command") or token.text.lower() in ("percent", "pct"):
        return at
    if token.kind == "letter":
        return at if here == "operator" or not gap else None
    return partner.get(at) if token.kind == "open" and (here == "operator" or not gap) else None
