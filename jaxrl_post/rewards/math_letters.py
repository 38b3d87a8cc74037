r"""Letters of Unicode as the ASCII and LaTeX that math readers know: 42 in full width, ½, ², ∞, ≤, and no invisible ones.

What a letter stands for comes from the Unicode database: its compatibility decomposition and its name. Only signs of
mathematics that the database does not decompose are listed here.
"""

from __future__ import annotations

import re
import unicodedata

# Signs, each before the LaTeX command that it stands for.
_COMMANDS = """∞ infty; √ sqrt; ∛ sqrt[3]; × times; ÷ div; · cdot; ⋅ cdot; ± pm; ∓ mp; ≤ le; ⩽ le; ≥ ge; ⩾ ge; ≠ ne; ≈ approx;
∪ cup; ∩ cap; ∈ in; ∅ emptyset; ∖ setminus"""
_SIGNS = {
    **{sign: rf"\{command} " for sign, command in map(str.split, _COMMANDS.split(";"))},
    **{sign: rf"\mathbb{{{letter}}}" for sign, letter in zip("ℝℚℤℕℂ", "RQZNC")},
    **dict.fromkeys("–‐‑‒−﹣－﹘", "-"),  # not the long dash: it parts clauses
    **{"⁄": "/", "∕": "/", "∶": ":", "\t": " "},
    **{"。": ". ", "、": ", ", "，": ", ", "；": "; ", "：": ": ", "！": "! ", "？": "? ", "「": " ", "」": " "},
}
_THIN = "\u2009\u202f\u2006\u2005"  # between thousands
_FOREIGN = re.compile(r"[^\x00-\x7f]")
_RAISED = re.compile(r"[⁰¹²³⁴-⁹⁻⁺ⁿ]+")
_LOWERED = re.compile(r"[₀-₉₋₊ₙ]+")
_RADICAND = re.compile(r"\\sqrt(\[3\])? (?:\(([^()]*)\)|([A-Za-z]|\d+(?:\.\d+)?))")
_SCALE = re.compile(r"(?<=\d)\s*([万萬만亿億억])\s*")
_FRACTION = re.compile(r"(?<=\d)(?=[¼½¾⅐-⅞])")


def plain(text: str) -> str:
    """Returns a text with the letters that math readers know. Letters of other scripts stay."""
    if not _FOREIGN.search(text):
        return text
    text = re.sub(rf"(?<=\d)[{_THIN}，](?=\d{{3}}(?!\d))", ",", text)
    text = _RAISED.sub(lambda run: f"^{{{_decomposed(run[0])}}}", text)
    text = _LOWERED.sub(lambda run: f"_{{{_decomposed(run[0])}}}", text)
    text = _SCALE.sub(r" \1 ", "".join(map(_letter, _FRACTION.sub(" ", text))))
    return _RADICAND.sub(lambda found: rf"\sqrt{found[1] or ''}{{{found[2] or found[3]}}}", text)


def _letter(letter: str) -> str:
    if letter in _SIGNS:
        return _SIGNS[letter]
    if letter < "\x80":
        return letter
    kind = unicodedata.category(letter)
    if kind == "Cf":  # joiners, marks of direction, soft hyphens
        return ""
    if kind == "Zs":
        return " "
    decomposed = unicodedata.decomposition(letter)
    if decomposed.startswith(("<wide>", "<font>", "<small>")):
        return _decomposed(letter)
    if decomposed.startswith("<fraction>"):
        over, _, under = _decomposed(letter).partition("/")
        return f"{over}/{under}"
    greek = re.fullmatch(r"GREEK (SMALL|CAPITAL) LETTER ([A-Z]+)", unicodedata.name(letter, ""))
    if greek and greek[2] not in ("OMICRON", "FINAL"):
        name = greek[2].replace("LAMDA", "LAMBDA")
        return f"\\{name.lower() if greek[1] == 'SMALL' else name.capitalize()} "
    return letter


def _decomposed(letters: str) -> str:
    return unicodedata.normalize("NFKC", letters).replace("−", "-").replace("⁄", "/")
