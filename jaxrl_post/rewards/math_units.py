r"""Words after a number: units, which do not count, and number words, which do.

A unit is words ("5 square meters"), with powers, slashes and "per" ("72 km/h", "9.8 m/s^2"). A word of three letters or
more is a unit unless it is listed here. Words of one or two letters are units only if they are listed: 5 xy is a product.
"""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction

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
