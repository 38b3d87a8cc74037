"""Solutions as models write them, by the kinds of faults that graders had: each member is a text, a truth, and its right score.

Right values come from how a member is made: the number is drawn first, and then written, and its wrong neighbours too.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator
from fractions import Fraction

from jaxrl_post.rewards import format as form
from jaxrl_post.rewards import math
from strangers import Members

COUNT = 12  # numbers of each kind, each with several forms
Case = tuple[str, str, object, float]  # grader, text, ground truth, right score

_FULL = str.maketrans("0123456789-./%(),", "０１２３４５６７８９－．／％（），")
_RAISED = str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻")
_INVISIBLE = ("\u200b", "\u200e", "\u200f", "\ufeff", "\u2060", "\u00ad", "\u2062")


def _members(cases: Callable[[random.Random], Iterator[Case]]) -> Callable[[], Members]:
    def judged() -> Members:
        found, wrong = 0, []
        for grader, text, truth, right in cases(random.Random(43)):
            found += 1
            score = getattr(math, grader)("", text, truth, {})
            if score != right:
                wrong.append(f"{grader} of {text!r} for {truth!r} gives {score:g}, {right:g} is right")
        return Members(tried=found, wrong=tuple(wrong))

    return judged


def _numbers(draw: random.Random, least: int = 2, most: int = 999) -> Iterator[tuple[int, int]]:
    """Draws pairs of different numbers: the answer and a number that is none."""
    for _ in range(COUNT):
        answer, other = draw.sample(range(least, most), 2)
        yield answer, other


def _behind_words(draw: random.Random) -> Iterator[Case]:
    """F02: the first expression behind "answer is" counts."""
    forms = (
        "The answer is {}. She works {} days.",
        "Answer: {} (line {} above)",
        "The final answer is ${}, which is not ${}.",
        "**The answer is {}**, because {} of them are left.",
        "The answer is:\n\n{} apples, not {}",
        "The answer is $x = {}$ for {} cases.",
        "Answer: {}; the other {} were eaten.",
    )
    for (answer, other), text in itertools.product(_numbers(draw), forms):
        for grader in ("math", "rules"):
            yield grader, text.format(answer, other), str(answer), 1.0
            yield grader, text.format(answer, other), str(other), 0.0


def _lists(draw: random.Random) -> Iterator[Case]:
    """F06: of a list any member is right. A number is a truth."""
    for answer, other in _numbers(draw):
        text = rf"so \boxed{{{answer}}}"
        rights = (answer, float(answer), [other, answer], [str(answer)], [f"{2 * answer}/2"])
        wrongs = (other, float(other), [other], [str(other), str(-answer)], [], [f"{answer}.5"])
        for truth, score in [*((one, 1.0) for one in rights), *((one, 0.0) for one in wrongs)]:
            for grader in ("math", "boxed", "rules"):
                yield grader, text, truth, score
        for truth, score in (([str(answer), str(other)], 1.0), ([str(other)], 0.0), ([answer], 1.0)):
            yield "math", text, json.dumps(truth), score


def _scripts(draw: random.Random) -> Iterator[Case]:
    """F07: letters of Chinese, Japanese and Korean touch the number."""
    said = ("答案是{}", "最终答案：{}。检查第 1 步", "答えは{}です。", "정답은 {}입니다", "所以答案为{}个")
    boxes = (r"\boxed{{{}个}}", r"\boxed{{{}元}}", r"\boxed{{{}円}}", r"\boxed{{{}명}}", r"\boxed{{{}平方厘米}}")
    for (answer, other), text in itertools.product(_numbers(draw), (*said, *boxes)):
        yield "math", text.format(answer), str(answer), 1.0
        yield "math", text.format(-answer), str(answer), 0.0
        yield "math", text.format(-answer), str(-answer), 1.0
        yield "math", text.format(answer), str(other), 0.0
    for answer, other in _numbers(draw):
        for text in ("先有 {1} 只鸟，所以答案是{0}", "{1}人のうち{0}人", "처음 {1}개, 지금 {0}개"):
            yield "flexible", text.format(answer, other), str(answer), 1.0
            yield "flexible", text.format(answer, other), str(other), 0.0
        yield "math", rf"\boxed{{{answer}万}}", str(answer * 10**4), 1.0
        yield "math", rf"\boxed{{{answer}万}}", str(answer), 0.0


def _boxes(draw: random.Random) -> Iterator[Case]:
    """F08: a box that is cut off hides earlier ones. Empty boxes and the bare command hide nothing."""
    for answer, other in _numbers(draw):
        for grader, command in itertools.product(("math", "boxed", "rules"), (r"\boxed", r"\fbox")):
            yield grader, rf"so \boxed{{{answer}}}. wait, no: {command}{{{other}", str(answer), 0.0
            yield grader, rf"first {command}{{{other}}}, then \boxed{{{answer}}}", str(answer), 1.0
            yield grader, rf"\boxed{{{answer}}} as asked in {command}{{}}.", str(answer), 1.0
        for empty in (r"\boxed{}", r"\boxed", r"\boxed{ }", r"\fbox{}"):
            yield "math", f"Use {empty} for the result. The answer is {answer}.", str(answer), 1.0
            yield "math", f"Use {empty} for the result. The answer is {answer}.", str(other), 0.0
        yield "math", rf"\boxed{{\boxed{{{answer}}}}}", str(answer), 1.0


def _exponents(draw: random.Random) -> Iterator[Case]:
    """F09: numbers with an exponent, on both sides."""
    for (mantissa, _), power in itertools.product(_numbers(draw), (-6, -2, 3, 8)):
        value = Fraction(mantissa) * Fraction(10) ** power
        plain = f"{mantissa}{'0' * power}" if power > 0 else f"{float(value):.12f}".rstrip("0")
        for text in (f"{mantissa}e{power}", f"{mantissa}E{power:+d}", rf"{mantissa} \times 10^{{{power}}}"):
            for grader in ("math", "rules"):
                yield grader, rf"\boxed{{{text}}}", plain, 1.0
                yield grader, rf"\boxed{{{text}}}", str(mantissa), 0.0
            yield "math", rf"\boxed{{{plain}}}", text, 1.0
        yield "flexible", f"so v = {mantissa}e{power} m/s", plain, 1.0
        yield "flexible", f"so v = {mantissa}e{power} m/s", str(mantissa), 0.0
        yield "math", rf"\boxed{{{plain}}}", float(value), 1.0


def _relations(draw: random.Random) -> Iterator[Case]:
    """F10: unions, lists, choices, equations."""
    for low, high in (sorted(pair) for pair in _numbers(draw)):
        union = rf"(-\infty,{low})\cup({high},\infty)"
        same = {
            union: [rf"({high},\infty)\cup(-\infty,{low})", rf"x<{low} \text{{ or }} x>{high}"],
            f"{low}, {high}": [rf"x={high} \text{{ or }} x={low}", rf"{low} \text{{ and }} {high}", f"{high}, {low}"],
            rf"\pm {low}": [f"-{low}, {low}", rf"x = \pm {low}", f"±{low}"],
            f"[{low},{high}]": [rf"x \in [{low},{high}]", rf"{low} \le x \le {high}"],
            str(low): [f"({low})", f"x={low}", rf"\left({low}\right)"],
            f"{low}x+y-{high}=0": [f"y={high}-{low}x", f"{low}x+y={high}"],
        }
        unlike = {
            union: [rf"(-\infty,{low}]\cup({high},\infty)", rf"(-\infty,{low})\cap({high},\infty)"],
            f"{low}, {high}": [str(low), f"{low}, -{high}", rf"x={low} \text{{ or }} x=-{high}"],
            rf"\pm {low}": [str(low), f"-{low}", f"±{high}"],
            f"[{low},{high}]": [f"({low},{high})", rf"x \in [{low},{high})"],
            str(low): [f"{low} or {high}", f"({high})", f"[{low},{high}]"],
            f"{low}x+y-{high}=0": [f"y={high}+{low}x", str(high)],
        }
        for table, score in ((same, 1.0), (unlike, 0.0)):
            for truth, texts in table.items():
                yield from (("math", rf"\boxed{{{text}}}", truth, score) for text in texts)
    for letter, other in itertools.permutations("ABCDE", 2):
        for text in (
            r"\boxed{{({})}}",
            r"\boxed{{\textbf{{({})}}}}",
            "The answer is ({}).",
            "**Answer: {}**",
            "#### {}",
        ):
            yield "math", text.format(letter), letter, 1.0
            yield "math", text.format(letter), f"({other})", 0.0


def _letters(draw: random.Random) -> Iterator[Case]:
    """F11: letters of Unicode for LaTeX, full width, invisible ones."""
    for (answer, other), hidden in itertools.product(_numbers(draw), _INVISIBLE):
        for text in (f"{answer}{hidden}", f"{hidden}{answer}"):
            yield "math", rf"\boxed{{{text}}}", str(answer), 1.0
            yield "boxed", rf"\boxed{{{text}}}", str(other), 0.0
    for answer, other in _numbers(draw):
        wide = str(-answer).translate(_FULL)
        pairs = {
            wide: str(-answer),
            f"–{answer}": str(-answer),
            f"−{answer}": str(-answer),
            f"{other}√{answer}": rf"{other}\sqrt{{{answer}}}",
            f"x{str(other).translate(_RAISED)}": f"x^{{{other}}}",
            f"(−∞, {answer}]": rf"(-\infty,{answer}]",
            f"{answer}½": f"{answer}.5",
            f"{answer}π": rf"{answer}\pi",
            f"x ≤ {answer}": rf"x \le {answer}",
            f"{answer}\u202f{other % 1000:03d}": f"{answer}{other % 1000:03d}",
        }
        for text, truth in pairs.items():
            yield "math", rf"\boxed{{{text}}}", truth, 1.0
            yield "math", rf"\boxed{{{text}}}", str(answer), 0.0
        yield "math", f"#### **{answer}**", str(answer), 1.0


def _strict(draw: random.Random) -> Iterator[Case]:
    """F17: verl's rule stays: the last 300 characters, no sign of currency, no plus."""
    for answer, _ in _numbers(draw):
        for text, score in ((f"#### {answer}", 1.0), (f"#### ${answer}", 0.0), (f"#### +{answer}", 0.0)):
            yield "strict", text, str(answer), score
            yield "math", text, str(answer), 1.0
        for tail in (100, 400):
            yield "strict", f"#### {answer}\n" + "." * tail, str(answer), float(tail < 300)


def _thinking() -> Members:
    """F29: a <think> at the prompt's end is the text's first tag."""
    tried, wrong = 0, []
    ends = {"<think>": 1, "<think>\n": 1, "assistant\n<think>\n\n": 1, "": 0, "<think>\n\n</think>\n\n": 0, "think>": 0}
    texts = ("two</think><answer>4</answer>", "a\nb\n</think>\n<answer>4</answer>\n", "</think>\n\n<answer></answer>")
    for (end, opened), text, tag in itertools.product(ends.items(), texts, (0, 1)):
        tried += 1
        score = form.thinking("", "<think>" * tag + text, "", {"rollout": {"prompt_end": end}})
        if score != float(opened + tag == 1):
            wrong.append(f"thinking of {text!r} after {end!r} with {tag} tag gives {score:g}")
    return Members(tried=tried, wrong=tuple(wrong))


KINDS = {
    "F02": _members(_behind_words),
    "F06": _members(_lists),
    "F07": _members(_scripts),
    "F08": _members(_boxes),
    "F09": _members(_exponents),
    "F10": _members(_relations),
    "F11": _members(_letters),
    "F17": _members(_strict),
    "F29": _thinking,
}
