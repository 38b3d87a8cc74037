r"""Values of written results: numbers, percentages, tuples, sets, matrices, or else plain text.

- Numbers are exact fractions. So 0.5, 1/2 and \frac{1}{2} are one number, and 0.333 is not 1/3.
- Units after a number do not count: "72 km/h" is 72. A unit is words ("5 square meters"), with powers, slashes and "per"
  ("9.8 m/s^2"). A word of three letters or more is a unit unless it is listed here. One of one or two letters is a unit only
  if it is listed: 5 xy is a product.
- Number words count: "5 thousand" is 5000, and "5 dozen" is 60. "5 plus six" is plain text.
- A percent sign, or the word percent, may stand for itself or for a hundredth.
- Matrices are compared entry by entry. pmatrix, bmatrix and array are one kind, determinants another.
- There is no algebra here: 2+2 is not 4, and x+1 is not 1+x. An `expressions` function may add it for plain texts.
- No input can hang. A result longer than 1,000 characters, or nested deeper than 4, is plain text.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from fractions import Fraction

from jaxrl_post.rewards.math_letters import plain

_LONGEST = 1_000  # characters; a longer result is plain text
_DEEPEST = 4

# A result is a Fraction, a ("%", Fraction), a (kind, members), or else its plain text.

_DROP = re.compile(
    r"\\left|\\right|(?<!\\)\\[!,;: ]|\\displaystyle|\\\$|\$|°\s*[CF]\b|\\degree|\^\{?\\circ\}?|[°~¢-¥₠-⃀]"
    r"|^\s*(?:USD|EUR|GBP)(?=\s*\d)"
)
_WRAP = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}")
_PLAIN = re.compile(r"[-+]?(?:\d+|\d{1,3}(?:,\d{3})+)?(?:\.\d*)?(?:[eE][-+]?\d{1,3})?", re.ASCII)
_POWER_OF_TEN = re.compile(
    r"([-+]?)(?:([\d.,]+)\s*(?:\\times|\\cdot|\*|[xX])\s*)?10\s*(?:\^|\*\*)\s*(\{)?([-+]?\d{1,3})(?(3)\})", re.ASCII
)
_REPEATING = re.compile(r"([-+]?)(\d*)\.(\d{0,9})\\overline\{(\d{1,9})\}", re.ASCII)
_AND = re.compile(r",?\s*(?:\\text\s*\{\s*(?:and|or)\s*\}|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z]))\s*|\s*;\s*")
_HEAD = re.compile(r"(?<![\w\\])(?:\\angle\s*)?([A-Za-z])(?:\w{1,2}|_\{?\w+\}?|\([a-z]\))?\s*=")
_CHOICE = re.compile(r"(?:(?:[Oo]ption|[Cc]hoice)\s+)?\(?([A-Z])(?:\)?[.:]?|[.):]\s*(?!\s|,|and\b|or\b|/).*)")
_MIXED = re.compile(r"([-+]?)(\d+)\s+(\d+)/(\d+)", re.ASCII)
# Only where nothing stands around them: \frac{1}{2}x is not 1/2x.
_FRACTION = re.compile(
    r"(^\s*[-+]?|=\s*[-+]?)\s*\\frac\{\s*([-+]?[\d.]+)\s*\}\{\s*([-+]?[\d.]+)\s*\}(?=\s*(?:%|$|\s[A-Za-z]{3}))"
)
_MIXED_FRACTION = re.compile(r"(^\s*[-+]?\d+|=\s*[-+]?\d+)\s*\\frac\{(\d+)\}\{(\d+)\}(?=\s*(?:%|$|\s[A-Za-z]{3}))")
_UNIT_FRACTION = re.compile(r"(?<=[\d}\s])\\frac\{\s*([A-Za-z]{2,}|[mgshLl])\s*\}\{\s*([A-Za-z]{2,}|[mgshLl])\s*\}")
_PERCENT = re.compile(r"(?<=[\d}])\s*(?:percent|per cent|pct)$", re.IGNORECASE)
_MATRIX = re.compile(
    r"(?:\\left)?([(\[|]?)\s*\\begin\{([pbBvV]?(?:small)?matrix|array)\}(?:\{[^{}]*\})?(.*)\\end\{\2\}\s*(?:\\right)?[)\]|]?",
    re.DOTALL,
)
_BRACKETS = {"(": ")]", "[": ")]", "{": "}"}


def same(given: str, gold: str, expressions: Callable[[str, str], bool] | None = None) -> bool:
    """Returns whether two results are the same number, tuple, set, list, matrix or choice, or else the same text.

    Texts are compared without LaTeX's variants of writing, and without spaces. A unit may be left out, but 5 m is not 5 km.

    Args:
      expressions: decides (gold, given) where one of them is not only numbers. None: such a pair is equal only as text.
    """
    given, gold = plain(given).strip(), plain(gold).strip()
    units = known(given), known(gold)
    if None not in units and units[0] != units[1]:
        return False
    if (letter := _choice(gold)) is not None and _choice(given) == letter:
        return True
    left, right = _value(given), _value(gold)
    if _equal(left, right, expressions):
        return True
    unread = expressions is not None and not (_read(left) and _read(right))
    return unread and expressions(gold, given)


def _choice(text: str) -> str | None:
    """Returns the letter of a choice: B, (B), "B. 12"."""
    found = _CHOICE.fullmatch(_simple(text))
    return found and found[1]


def _read(value) -> bool:
    """Returns whether a value holds numbers alone."""
    if isinstance(value, tuple):
        return value[0] == "%" or all(map(_read, value[1]))
    return not isinstance(value, str)


def _value(text: str, depth: int = 0):
    if len(text) > _LONGEST or depth > _DEEPEST:
        return text
    text = text.strip().rstrip(".,; ")
    matrix = _MATRIX.fullmatch(text)
    if matrix and r"\begin" not in matrix[3]:
        return _rows(matrix, depth)
    text = _simple(text)
    text = text.replace(r"\approx", "=").lstrip("= ")
    heads = _HEAD.findall(text)
    if len(heads) == 1 and (head := _HEAD.match(text)):
        text = text[head.end() :].strip()
    elif len(set(heads)) > 1:
        return text  # x=2, y=3
    percent = text.endswith("%")
    found = _number(text[:-1].strip() if percent else text)
    if found is not None:
        return ("%", found) if percent else found
    words = scaled(text)
    times = _number(words[0]) if words else None
    if times is not None:
        return times * words[1]
    if text[:1] in _BRACKETS and text[-1:] in _BRACKETS[text[0]] and _outer(text):
        inner = _members(text[1:-1])
        if len(inner) == 1 and text[0] == "(":
            return _value(inner[0], depth + 1)
        return (text[0] + text[-1], tuple(_value(member, depth + 1) for member in inner))
    members = _members(text)
    if len(members) > 1:
        return ("{}", tuple(_value(member, depth + 1) for member in members))
    return text


def _rows(matrix: re.Match, depth: int):
    """Returns a matrix, or a determinant, as rows of values. Empty last rows do not count."""
    kind = "determinant" if matrix[1] == "|" or matrix[2][0] in "vV" else "matrix"
    rows = [row for row in re.split(r"\\\\(?:\[[^\]]*\])?", matrix[3]) if row.strip()]
    return (kind, tuple(("row", tuple(_value(entry, depth + 1) for entry in row.split("&"))) for row in rows))


def _simple(text: str) -> str:
    text = _WRAP.sub(lambda m: m.group(1) if m.group(0) == text.strip() else " " + m.group(1), text.strip())
    text = re.sub(r"(?<=\d)\{,\}(?=\d)", ",", text)
    text = _DROP.sub("", text).replace("\\{", "{").replace("\\}", "}").replace("\\%", "%").replace("−", "-").strip()
    text = re.sub(r"\\[dtc]frac", r"\\frac", text).replace(r"\varnothing", r"\emptyset")
    text = re.sub(r"\\(frac|sqrt)\s*(\d)", r"\\\1{\2}", text)
    text = re.sub(r"(\\frac\{[^{}]*\})\s*(\d)", r"\1{\2}", text)
    text = _MIXED_FRACTION.sub(r"\1 \2/\3", text)
    text = _FRACTION.sub(r"\1\2/\3", text)
    text = _UNIT_FRACTION.sub(r" \1/\2", text)
    return without_unit(_PERCENT.sub("%", text.rstrip(". "))).strip()


def _number(text: str) -> Fraction | None:
    mixed = _MIXED.fullmatch(text)
    if mixed and int(mixed.group(4)):
        value = int(mixed.group(2)) + Fraction(int(mixed.group(3)), int(mixed.group(4)))
        return -value if mixed.group(1) == "-" else value
    power = _POWER_OF_TEN.fullmatch(text)
    if power:
        factor = _decimal(power[2]) if power[2] else Fraction(1)
        return factor and (-factor if power[1] == "-" else factor) * Fraction(10) ** int(power[4])
    repeating = _REPEATING.fullmatch(text)
    if repeating:
        return _repeated(*repeating.groups())
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


def _repeated(sign: str, whole: str, fixed: str, period: str) -> Fraction:
    r"""Returns the value of a repeating decimal: 0.\overline{3} is 1/3."""
    value = int(whole or 0) + (int(fixed or 0) + Fraction(int(period), 10 ** len(period) - 1)) / 10 ** len(fixed)
    return -value if sign == "-" else value


def _outer(text: str) -> bool:
    """Returns whether the first bracket closes at the very end. Kinds of brackets may differ: (1,2] is an interval."""
    depth = 0
    for place, letter in enumerate(text):
        depth += (letter in "([{") - (letter in ")]}")
        if depth == 0:
            return place == len(text) - 1
    return False


def _members(text: str) -> list[str]:
    text = _AND.sub(",", text)
    members, depth, start = [], 0, 0
    for place, letter in enumerate(text):
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            members.append(text[start:place])
            start = place + 1
    members.append(text[start:])
    return [member.strip() for member in members]


def _equal(a, b, expressions: Callable[[str, str], bool] | None) -> bool:
    if isinstance(a, tuple) and isinstance(b, tuple) and "%" not in (a[0], b[0]):
        if a[0] != b[0] or len(a[1]) != len(b[1]):
            return False
        if a[0] == "{}":
            return _matched(list(a[1]), list(b[1]), expressions)
        return all(_equal(left, right, expressions) for left, right in zip(a[1], b[1]))
    if isinstance(a, str) or isinstance(b, str):
        return _same_text(a, b) or (expressions is not None and _equal_expressions(a, b, expressions))
    left, right = _readings(a), _readings(b)
    return bool(left & right)


def _same_text(a, b) -> bool:
    return isinstance(a, str) and isinstance(b, str) and "".join(a.split()) == "".join(b.split()) != ""


def _equal_expressions(given, gold, expressions: Callable[[str, str], bool]) -> bool:
    """Asks `expressions`, where both are a text or a number. Others have nothing in common with a text."""
    if isinstance(given, tuple) or isinstance(gold, tuple):
        return False
    return expressions(str(gold), str(given))


def _matched(left: list, right: list, expressions: Callable[[str, str], bool] | None) -> bool:
    for member in left:
        place = next((i for i, other in enumerate(right) if _equal(member, other, expressions)), None)
        if place is None:
            return False
        del right[place]
    return True


def _readings(value) -> set:
    """Returns the numbers that a value may stand for: "50%" is 50 as a percentage and 1/2 as a number."""
    if isinstance(value, Fraction):
        return {value}
    return {value[1], value[1] / 100} if value[0] == "%" else set()


_SCALES = {"dozen": 12, "hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_SCALES |= {**dict.fromkeys("万萬만", 10**4), **dict.fromkeys("亿億억", 10**8)}
_SCALE = f"(?:{'|'.join(_SCALES)})s?"
_SCALED = re.compile(rf"([-+\d.,/\s]*\d[\d.,/]*)\s+({_SCALE}(?:\s+{_SCALE})*)((?:\s.*)?)", re.IGNORECASE | re.ASCII)

_PAIRS = r"mm|cm|dm|km|mg|kg|ml|mL|cL|dL|ft|in|yd|mi|oz|lb|hr|qt|pt|Hz|kW|kJ|MB|GB|TB|kB|am|pm"
_SHORT = rf"{_PAIRS}|[mgshLl]"
_SMALL = r"of|in|at|as|an|on|to|is|by|or|a"
_JOINED = r"(?:mm|cm|km|kg|mg|ml|mL|mph|kph|inches|feet|ft)"  # may follow the number without a space
_POWER = r"(?:\s*\^\s*(?:\{-?[1-4]\}|-?[1-4])|[²³])?"
_WORD = r"[A-Za-z]{3,}(?:-[A-Za-z]+)*"
_FIRST = rf"(?:\s+(?:{_WORD}|{_SHORT}|{_SMALL})|\s*{_JOINED}|\s*/\s*(?:{_WORD}|{_PAIRS}))"
_NEXT = rf"(?:\s*(?:/|\*|·|\\cdot)\s*(?:{_WORD}|{_SHORT})|\s+(?:{_WORD}|{_SHORT}|{_SMALL}))"
_COUNTER = re.compile(r"(?<=[\d}%])\s*([\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]+)\.?$")  # Chinese, Japanese, Korean
_MINUTES = {"分", "分钟", "分鐘", "分間"}
_NUMERALS = set("一二三四五六七八九十百千万萬亿億兆半多余几分之만억천백십반")
_UNIT = re.compile(rf"(?<=[\d}}])({_FIRST}(?![A-Za-z]){_POWER}(?:{_NEXT}(?![A-Za-z]){_POWER})*\.?)$")

_ONES = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen"
_TENS = "seventeen eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety"
_PARTS = "third fourth fifth sixth seventh eighth ninth tenth twelfth hundredth thousandth millionth"
_OPERATORS = "plus minus over divided multiplied mod modulo factorial repeating recurring negative"
_LARGE = "hundred thousand million billion trillion dozen lakh crore gross mill mil mio"
_NUMBERS = {
    *f"{_ONES} {_TENS} {_OPERATORS} {_LARGE} half halves".split(),
    *(f"{word}s" for word in f"{_PARTS} {_LARGE}".split()),
}
_NOT_FIRST = {"squared", "cubed", "and", "or", "to", "by"}  # 5 squared; 5 or more
_NOT_LAST = {*_PARTS.split(), "quarter"}  # 5 and a third, but 5 third graders

_ALIKE = """m meter meters metre metres; cm centimeter centimeters centimetre centimetres; mm millimeter millimeters
km kilometer kilometers kilometre kilometres; kg kilogram kilograms; g gram grams; mg milligram milligrams
s sec second seconds; min minute minutes; h hr hrs hour hours; day days; week weeks; month months; year years
mile miles mi; ft foot feet; inch inches; yd yard yards; lb lbs; oz ounce ounces
L l liter liters litre litres; mL ml milliliter milliliters millilitre millilitres; USD dollar dollars; cents cent
EUR euro euros"""
_KNOWN = {name: line.split()[0] for line in re.split(r"[;\n]", _ALIKE) for name in line.split()}
_COMPOUND = re.compile(r"[/*=]|\\cdot|\\frac|\bper\b")
_LAST_WORD = re.compile(r"(?<![A-Za-z\\])([A-Za-z]+)[\s}.$]*(\^\s*\{?[-\d]+\}?[\s.$]*)?$")
_MONEY = {"$": "USD", "€": "EUR", "£": "GBP", "¥": "JPY", "₹": "INR"}


def without_unit(text: str) -> str:
    """Returns a number's text without its unit. A text that ends otherwise is returned as it is."""
    counter = _COUNTER.search(text)
    if counter and (counter[1] in _MINUTES or not _NUMERALS.intersection(counter[1])):
        return text[: counter.start()]
    unit = _UNIT.search(text)
    return text[: unit.start()] if unit and _no_number(unit[1]) else text


def known(text: str) -> str | None:
    """Returns the unit that a number's text ends with, or its currency, by one name for each. None: no listed one."""
    if _COMPOUND.search(text):
        return None
    word = _LAST_WORD.search(text)
    name = word and (_KNOWN.get(word[1]) or _KNOWN.get(word[1].lower()))
    if name:
        return name + "".join(re.findall(r"[-\d]", word[2] or ""))
    return next((_MONEY.get(letter) for letter in text if unicodedata.category(letter) == "Sc"), None)


def scaled(text: str) -> tuple[str, Fraction] | None:
    """Returns the number before number words and their product: "5 thousand dollars" is ("5", 1000). None: no such text."""
    found = _SCALED.fullmatch(text)
    if found is None:
        return None
    rest = found[3].strip()
    if rest and without_unit(f"1 {rest.removeprefix('of ')}") != "1":
        return None
    product = 1
    for word in found[2].lower().split():
        product *= _SCALES[word.removesuffix("s") if word not in _SCALES else word]
    return found[1], Fraction(product)


def is_number_word(word: str) -> bool:
    """Returns whether a word after a number changes the number: thousand, plus, six, halves."""
    return word.lower() in _NUMBERS


def _no_number(unit: str) -> bool:
    words = [word.lower() for word in re.findall(r"[A-Za-z]+", unit)]
    return not (_NUMBERS.intersection(words) or words[0] in _NOT_FIRST or words[-1] in _NOT_LAST)
