"""Procedural tasks: any number of problems with exact results, and worked solutions for supervised training.

Invariant: the splits of a task are disjoint. A problem's split is a function of its text alone. So no seed, size or
argument can move a held-out problem into training. Within a split no problem comes twice. The text of a problem is its
id. A size that the arguments cannot fill is refused.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from jaxrl_post.data import turn_tasks

SHARES = {"eval": 2, "train": 4, "sft": 10}  # sixteenths of all problems
SOLVED = {"sft": "sft", "eval-sft": "eval"}  # splits whose rows are solved, and whose problems they have
ALPHABET = "0123456789+=#"  # every character of the arithmetic tasks here
_GOLDEN = (math.sqrt(5.0) - 1.0) / 2.0
_DRAWS = 1000  # attempts at a new problem before its kind counts as used up


@dataclass(frozen=True, kw_only=True)
class Task:
    """A procedural task.

    Attributes:
      rows: rows(seed, split, size, **arguments) gives `size` rows {id, prompt, answer, source, extra} of a split of
        SHARES or SOLVED.
      demonstrate: demonstrate(extra, seed uint32[2]) gives the text of a solution. It depends only on the row's
        `extra` and the seed.
      longest: longest(extra) gives the longest of these texts over all seeds.
      prefer: prefer(extra) gives the texts of a better and a worse solution, where the task has preferences.
    """

    rows: Callable[..., list[dict]]
    demonstrate: Callable[[Mapping, np.ndarray], str]
    longest: Callable[[Mapping], str]
    prefer: Callable[[Mapping], tuple[str, str]] | None = None


def split_of(text: str) -> str:
    """Returns the split that a problem belongs to, from 4 bits of BLAKE2b of its text."""
    bucket = hashlib.blake2b(text.encode(), digest_size=1).digest()[0] % 16
    for split, share in SHARES.items():
        bucket -= share
        if bucket < 0:
            return split
    raise AssertionError("SHARES must add up to sixteen")


# ---- sums: a chain of additions


def sum_rows(
    seed: int,
    split: str,
    size: int,
    *,
    shortest: int = 3,
    usual: int = 6,
    longest: int = 9,
    gap: int = 0,
    more: float = 0.35,
    tail: float = 0.05,
    careful: float = 0.35,
    luck: float = 0.15,
) -> list[dict]:
    """Returns sums of one number of two digits and several of one digit, as "47+8+5=" with answer "60".

    The number of terms is geometric from `shortest` to `usual`: each further term has probability `more`. A share
    `tail` has `usual` + `gap` + 1 to `longest` terms, with equal probability. Every run of consecutive rows has nearly
    these shares, by a golden ratio sequence instead of independent draws. So small held-out sets have the same tail as
    large ones.

    Args:
      gap: how many numbers of terms between the usual ones and the tail do not occur. A wider gap makes the longest
        rollout of a round longer relative to the mean.
      careful, luck: how rows of SOLVED are solved (`solve_sum`). Other splits carry no solution.
    """
    solved, split = split in SOLVED, SOLVED.get(split, split)
    _need(
        2 <= shortest <= usual <= usual + gap < longest <= 20,
        f"task sums: shortest={shortest}, usual={usual}, gap={gap}, "
        f"longest={longest} must satisfy 2 <= shortest <= usual <= usual + gap < longest <= 20",
    )
    for name, value in (("more", more), ("tail", tail), ("careful", careful), ("luck", luck)):
        _need(0.0 <= value <= 1.0, f"task sums: {name}={value} must lie from 0 to 1")
    start = np.random.default_rng(_words("sums", seed, split)).random()

    def terms(index: int) -> int:
        return _terms((start + index * _GOLDEN) % 1.0, shortest, usual, usual + gap, longest, more, tail)

    def problem(noise: np.random.Generator, index: int) -> tuple[str, str, dict]:
        numbers = [int(noise.integers(10, 100)), *map(int, noise.integers(1, 10, terms(index) - 1))]
        extra = {"terms": numbers} | ({"careful": careful, "luck": luck} if solved else {})
        return "+".join(map(str, numbers)) + "=", str(sum(numbers)), extra

    return _distinct("sums", seed, split, size, problem)


def _terms(u: float, shortest: int, usual: int, below: int, longest: int, more: float, tail: float) -> int:
    """Returns the number of terms of the problem at quantile u in [0, 1). The tail has more than `below` terms."""
    if u >= 1.0 - tail:
        return below + 1 + min(int((u - 1.0 + tail) / tail * (longest - below)), longest - below - 1)
    rest = 1.0 - u / (1.0 - tail)
    return min(usual, shortest + (int(math.log(rest) / math.log(more)) if 0.0 < more < 1.0 else int(more) * usual))


def solve_sum(extra: Mapping, seed: np.ndarray) -> str:
    """Returns a solution. The text after "#" is its result.

    With probability `careful` the solution adds one term at a time, "55+5=60#60". Otherwise it is a guess, "#55". With
    probability `luck` the guess is right. A wrong guess forgets one of the terms of one digit.

    The choice depends on the seed alone. So long problems are guessed as often as short ones.
    """
    noise, terms = np.random.default_rng(_words("solve", *map(int, seed))), list(extra["terms"])
    style, fortune, forgotten = noise.random(), noise.random(), int(noise.integers(1, len(terms)))
    if style < extra["careful"]:
        return work_out(terms)
    return f"#{sum(terms) - (0 if fortune < extra['luck'] else terms[forgotten])}"


def longest_sum(extra: Mapping) -> str:
    """Returns the careful solution if there is one, else the right guess."""
    return work_out(list(extra["terms"])) if extra["careful"] > 0 else f"#{sum(extra['terms'])}"


def prefer_sum(extra: Mapping) -> tuple[str, str]:
    """Returns the careful solution, and a guess that forgets one of the terms of one digit."""
    terms = list(extra["terms"])
    return work_out(terms), f"#{sum(terms) - terms[1 + sum(terms) % (len(terms) - 1)]}"


def work_out(terms: list[int]) -> str:
    """Returns the careful solution. Each step adds the first two terms and copies the others, until one is left.

    Its length grows with the square of the number of terms.
    """
    steps = [[sum(terms[:k]), *terms[k:]] for k in range(2, len(terms) + 1)]
    return "=".join("+".join(map(str, step)) for step in steps) + f"#{steps[-1][0]}"


# ---- sorting: the digits of a number in order


def sorting_rows(seed: int, split: str, size: int, *, shortest: int = 4, longest: int = 8) -> list[dict]:
    """Returns digits to be sorted, as "5203=" with answer "0235".

    Lengths from `shortest` to `longest` are equally frequent.
    """
    _need(
        1 <= shortest <= longest <= 100,
        f"task sorting: shortest={shortest}, longest={longest} must satisfy 1 <= shortest <= longest <= 100",
    )

    def problem(noise: np.random.Generator, index: int) -> tuple[str, str, dict]:
        digits = "".join(map(str, noise.integers(0, 10, shortest + index % (longest - shortest + 1))))
        return digits + "=", "".join(sorted(digits)), {"digits": digits}

    return _distinct("sorting", seed, split, size, problem)


def solve_sorting(extra: Mapping, seed: np.ndarray | None = None) -> str:
    """Returns the sorted digits behind "#". The seed is not read."""
    return "#" + "".join(sorted(extra["digits"]))


# ---- openings: first sentences of a children's story, to be continued

_WHO = ("girl", "boy", "dog", "cat", "bird", "bear", "bunny", "mouse", "duck", "frog")
_NAMES = (
    "Lily",
    "Tom",
    "Mia",
    "Ben",
    "Sue",
    "Max",
    "Anna",
    "Sam",
    "Lucy",
    "Tim",
    "Amy",
    "Jack",
    "Molly",
    "Bob",
    "Jane",
    "Spot",
)
_THINGS = (
    "ball",
    "kite",
    "toy car",
    "red box",
    "big tree",
    "blue hat",
    "book",
    "drum",
    "cake",
    "flower",
    "stick",
    "boat",
)


def opening_rows(seed: int, split: str, size: int, *, word: str = "happy") -> list[dict]:
    """Returns openings such as "Once upon a time, there was a little girl named Lily. Lily loved to play with a kite."

    The column `required` makes the scorer rewards.format:required look for `word` in the rollout. There is no answer.
    """
    _need(bool(word), "task openings: word is empty; name the word that a story must have, for example 'happy'")

    def problem(noise: np.random.Generator, index: int) -> tuple[str, str, dict]:
        who, name, thing = (str(noise.choice(words)) for words in (_WHO, _NAMES, _THINGS))
        text = f"Once upon a time, there was a little {who} named {name}. {name} loved to play with a {thing}."
        return text, "", {"required": [word]}

    return _distinct("openings", seed, split, size, problem)


def solve_opening(extra: Mapping, seed: np.ndarray | None = None) -> str:
    """Returns the shortest story that has the required words. The seed is not read."""
    return f" Everybody was {' and '.join(extra['required'])}."


# ---- verdicts of a judge on responses to sums


def verdict_rows(seed: int, split: str, size: int) -> list[dict]:
    """Returns a sum and a response to it, as messages to a judge such as "47+8+5= 55+5=60#60". The answer is its verdict.

    A third of the responses is worked out (verdict 2), a third is a guess, right or wrong (1), and a third breaks off
    before a result (0).
    """
    split = SOLVED.get(split, split)

    def problem(noise: np.random.Generator, index: int) -> tuple[str, str, dict]:
        terms = [int(noise.integers(10, 100)), *map(int, noise.integers(1, 10, noise.integers(2, 9)))]
        worked, verdict = work_out(terms), (2, 1, 0)[index % 3]
        guess = f"#{sum(terms) - int(noise.choice([0, *terms[1:]]))}"
        broken = worked[: noise.integers(0, worked.index("#"))]
        response = (broken, guess, worked)[verdict]
        return f"{'+'.join(map(str, terms))}= {response}", str(verdict), {"verdict": verdict}

    rows = _distinct("verdicts", seed, split, size, problem)
    return [row | {"prompt": [{"role": "user", "content": row["prompt"]}]} for row in rows]


def give_verdict(extra: Mapping, seed: np.ndarray | None = None) -> str:
    """Returns the verdict in the form of rewards.judge. The seed is not read."""
    return f"VERDICT: {extra['verdict']}"


# ---- conversations with an environment


def turn_rows(kind: str, seed: int, split: str, size: int, *, careful: float = 0.35) -> list[dict]:
    """Returns problems of a kind (data/turn_tasks.py), or in a split of SOLVED turns of worked conversations.

    Problems are as "127*48+31=" with answer "6127", or places of a grid as "12,40". A share `careful` of the turns is a right
    one. Other splits carry no solution.
    """
    _need(0.0 <= careful <= 1.0, f"task {kind}: careful={careful} must lie from 0 to 1")
    problem, turn, _ = turn_tasks.KINDS[kind]
    if split not in SOLVED:
        return _distinct(kind, seed, split, size, problem)
    several = 1 if kind == "calculator" else 100  # there are few places in a grid, and many ways that lead there
    rows = _distinct(kind, seed, SOLVED[split], -(-size // several), problem)
    return [turn(rows[index // several], index, careful) for index in range(size)]


def mixed_rows(seed: int, split: str, size: int, *, careful: float = 0.35) -> list[dict]:
    both = [turn_rows(kind, seed, split, (size + 1) // 2, careful=careful) for kind in turn_tasks.KINDS]
    return [row for pair in zip(*both) for row in pair][:size]


def solve_turn(extra: Mapping, seed: np.ndarray) -> str:
    """Returns what the policy says in a turn. The choice depends on the seed alone."""
    kind = "calculator" if "worked" in extra else "grid_world"
    return turn_tasks.KINDS[kind][2](extra, np.random.default_rng(_words("turn", *map(int, seed))))


def longest_turn(extra: Mapping) -> str:
    return max(extra["worked"], "#00000" if extra["guess"] else "", key=len) if "worked" in extra else "u"


TASKS = {
    **{
        kind: Task(rows=functools.partial(turn_rows, kind), demonstrate=solve_turn, longest=longest_turn)
        for kind in turn_tasks.KINDS
    },
    "turns": Task(rows=mixed_rows, demonstrate=solve_turn, longest=longest_turn),
    "sums": Task(rows=sum_rows, demonstrate=solve_sum, longest=longest_sum, prefer=prefer_sum),
    "sorting": Task(rows=sorting_rows, demonstrate=solve_sorting, longest=solve_sorting),
    "verdicts": Task(rows=verdict_rows, demonstrate=give_verdict, longest=give_verdict),
    "openings": Task(rows=opening_rows, demonstrate=solve_opening, longest=solve_opening),
}


def _distinct(task: str, seed: int, split: str, size: int, problem: Callable) -> list[dict]:
    """Returns `size` different problems of a split. `problem(noise, index)` draws a row (prompt, answer, extra)."""
    split = SOLVED.get(split, split)
    _need(split in SHARES, f"task {task}: split {split!r} is not one of {', '.join(SHARES)}")
    noise = np.random.default_rng(_words(task, "rows", seed, split))
    rows: dict[str, dict] = {}
    for index in range(size):
        for _ in range(_DRAWS):
            prompt, answer, extra = problem(noise, index)
            if split_of(prompt) == split and prompt not in rows:
                break
        else:
            raise ValueError(
                f"task {task}: size={size} is more than split {split!r} has of every kind of problem; the "
                f"nearest valid size with these arguments is about {len(rows)}"
            )
        rows[prompt] = {"id": f"{task}/{prompt}", "prompt": prompt, "answer": answer, "source": task, "extra": extra}
    return list(rows.values())


def _words(*parts) -> list[int]:
    """Returns a seed for numpy's generator: 16 bytes of BLAKE2b over the parts' text, as four words."""
    digest = hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=16).digest()
    return np.frombuffer(digest, "<u4").tolist()


def _need(condition: bool, sentence: str) -> None:
    if not condition:
        raise ValueError(sentence)
