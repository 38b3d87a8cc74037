"""Math graders agree with labels: own rules, math-verify, and math-verify by itself, with every disagreement classified.

Three graders read the same texts:

- `rules`: rewards.math:rules, this project's own.
- `math`: rewards.math:math, which asks math-verify about expressions.
- `alone`: math-verify's own reading of the whole text, as TRL's users call it.

The texts are all golds of GSM8K, 5,276 model solutions of its test set with labels, and GRPO completions of
Countdown. A completion has no recorded target: it is the first number that the text says it wants to reach.

Labels of 684 texts in 13 kinds were written before the graders of today: scripts/tables/math_answers.jsonl.
scripts/tables/math_verdicts.json holds what the graders of before said. No row that was right then is wrong now.
"""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import test_rewards_math as written
from math_verify import parse, verify

from jaxrl_post.rewards import math, math_algebra

MINUTES = 2.0
SOURCES = ("jaxrl_post/rewards/math*.py", "tests/test_rewards_math.py", "scripts/tables/math_*.json*")
NAMES = ("rules", "math", "alone")
TARGET = re.compile(r"(?:equals?(?: to)?|equaling|make|get|reach|results? in|=)\s+(\d+)\b")
EXAMPLES = 3  # of each class, in the results


def show(record) -> None:
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    record.figure("grader", math_algebra.grader())
    _pairs(record)
    _golds(record, _rows(record.data("gsm8k", "train.jsonl")) + _rows(record.data("gsm8k", "test.jsonl")))
    _labelled(record, _rows(record.data("gsm8k", "example_model_solutions.jsonl")))
    before = json.loads((record.root / "scripts/tables/math_verdicts.json").read_text())
    known = set(before["completions_right"])
    _completions(record, record.data("rollout-samples", "smollm2_countdown_grpo_completions.txt"), known)
    rows = _rows(record.root / "scripts/tables/math_answers.jsonl")
    _answers(record, rows, set(before["answers_wrong"]))
    _threads(record, rows)


def _rows(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def _graders() -> dict[str, Callable[[str, str], bool]]:
    return {
        "rules": lambda text, gold: math.rules("", text, gold, {}) == 1.0,
        "math": lambda text, gold: math.math("", text, gold, {}) == 1.0,
        "alone": lambda text, gold: verify(parse(rf"\boxed{{{gold}}}"), parse(text)),
    }


def _pairs(record) -> None:
    """Grades the pairs of results that tests/test_rewards_math.py holds, each within a box."""
    wrong = {name: [] for name in NAMES}
    pairs = [(*pair, True) for pair in written.SAME] + [(*pair, False) for pair in written.DIFFERENT]
    for given, gold, same in pairs:
        for name, grade in _graders().items():
            if len(given) < 100 and grade(rf"\boxed{{{given}}}", gold) != same:
                wrong[name].append(f"{given} | {gold} | {'same' if same else 'different'}")
    record.figure("pairs.count", len(pairs), at_least=60)
    record.figure("pairs.wrong.rules", wrong["rules"], equals=[])
    record.figure("pairs.wrong.math", [line for line in wrong["math"] if _by_rules(line)], equals=[])
    record.figure("pairs.equal_by_algebra.math", [line for line in wrong["math"] if not _by_rules(line)])
    record.figure("pairs.wrong.alone", wrong["alone"])


def _by_rules(line: str) -> bool:
    """Returns whether a verdict of `math` is wrong, not only beyond the own rules: x+1 is 1+x."""
    return line != "x+1 | 1+x | different"


def _golds(record, rows: list[dict]) -> None:
    """Grades each solution against its own truth, and against the next row's where that differs."""
    right, wrong, apart = Counter(), Counter(), _Apart()
    for row, other in zip(rows, [*rows[1:], rows[0]], strict=True):
        text, (gold, next_gold) = row["answer"], (one["answer"].rpartition("####")[2].strip() for one in (row, other))
        verdicts = {name: grade(text, gold) for name, grade in _graders().items()}
        right.update(name for name, verdict in verdicts.items() if verdict)
        apart.add(verdicts, text, gold, True)
        if gold.replace(",", "") != next_gold.replace(",", ""):
            wrong["pairs"] += 1
            wrong.update(name for name, grade in _graders().items() if name != "alone" and grade(text, next_gold))
    record.figure("golds.count", len(rows), equals=8792)
    record.figure("golds.other_truths", wrong["pairs"], at_least=8000)
    for name in NAMES:
        bounds = {} if name == "alone" else {"equals": len(rows)}
        record.figure(f"golds.right.{name}", right[name], **bounds)
        if name != "alone":
            record.figure(f"golds.right_for_another_truth.{name}", wrong[name], equals=0)
    apart.write(record, "golds")


def _labelled(record, rows: list[dict]) -> None:
    """Compares each verdict with the label that came with the text."""
    against, count, apart = Counter(), 0, _Apart()
    for row in rows:
        gold = row["ground_truth"].rpartition("A:")[2].strip()
        for given in (value for value in row.values() if isinstance(value, dict)):
            count += 1
            verdicts = {name: grade(given["solution"], gold) for name, grade in _graders().items()}
            against.update(name for name, verdict in verdicts.items() if verdict != given["is_correct"])
            apart.add(verdicts, given["solution"], gold, given["is_correct"])
    record.figure("labelled.count", count, equals=5276)
    for name in NAMES:
        record.figure(f"labelled.against_the_label.{name}", against[name], **({} if name == "alone" else {"equals": 0}))
    apart.write(record, "labelled")


def _answers(record, rows: list[dict], wrong_before: set[int]) -> None:
    """Compares verdicts with the labels. Accepted wrong ones count like refused right ones."""
    wrong, slowest = {"math": set(), "alone": set()}, 0.0
    for place, row in enumerate(rows):
        begun = time.process_time()
        verdict = getattr(math, row.get("function", "math"))("", row["text"], row["truth"], {}) == 1.0
        slowest = max(slowest, time.process_time() - begun)
        truths = row["truth"] if isinstance(row["truth"], list) else [row["truth"]]
        alone = any(_graders()["alone"](row["text"], truth) for truth in truths)
        wrong["math"] |= {place} if verdict != row["right"] else set()
        wrong["alone"] |= {place} if alone != row["right"] else set()
    count = Counter(row["kind"] for row in rows)
    record.figure("answers.count", len(rows), at_least=400)
    record.figure("answers.kinds", len(count), at_least=12)
    record.figure("answers.to_be_refused", sum(not row["right"] for row in rows), at_least=100)
    record.figure("answers.wrong_before", len(wrong_before), at_least=150)
    record.figure("answers.right_before_and_wrong_now", sorted(wrong["math"] - wrong_before), equals=[])
    record.figure("answers.wrong", [rows[place] for place in sorted(wrong["math"])])
    record.figure("answers.wrong.alone", len(wrong["alone"]))
    for kind, number in count.items():
        errors = sum(rows[place]["kind"] == kind for place in wrong["math"])
        record.figure(f"answers.errors.{kind}", errors / number, at_most=0.01)
    record.figure("answers.slowest_s", slowest, at_most=2.0)


def _threads(record, rows: list[dict]) -> None:
    """Grades in four threads at once, where math-verify's own time limits would raise."""

    def verdicts(part: list[dict]) -> list[float]:
        return [math.math("", row["text"], row["truth"], {}) for row in part]

    found, part = {}, rows[::4]
    threads = [threading.Thread(target=lambda at=at: found.update({at: verdicts(part)})) for at in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    record.figure("threads.like_one", sum(found.get(at) == verdicts(part) for at in range(4)), equals=4)


def _completions(record, file: Path, right_before: set[int]) -> None:
    texts = [text.strip() for text in re.split(r"\n=+\n", file.read_text(encoding="utf-8")) if text.strip()]
    right, count, apart, lost = Counter(), 0, _Apart(), []
    for place, text in enumerate(texts):
        target = TARGET.search(text)
        if target is None:
            continue
        count += 1
        verdicts = {name: grade(text, target[1]) for name, grade in _graders().items()}
        right.update(name for name, verdict in verdicts.items() if verdict)
        lost += [place] if place in right_before and not verdicts["math"] else []
        apart.add(verdicts, text, target[1], None)
    record.figure("completions.count", len(texts), equals=818)
    record.figure("completions.right_before", len(right_before), equals=281)
    record.figure("completions.right_before_and_wrong_now", lost, equals=[])
    record.figure("completions.with_a_target", count, at_least=700)
    for name in NAMES:
        record.figure(f"completions.right.{name}", right[name])
    apart.write(record, "completions")


class _Apart:
    """Disagreements between graders, by class."""

    def __init__(self):
        self._classes: dict[str, list[dict]] = {}

    def add(self, verdicts: dict[str, bool], text: str, gold: str, label: bool | None) -> None:
        if len(set(verdicts.values())) > 1:
            told = {"truth": gold, "verdicts": verdicts, "label": label, "end": text[-80:]}
            self._classes.setdefault(_class(verdicts, text, gold), []).append(told)

    def write(self, record, name: str) -> None:
        counts = {kind: len(found) for kind, found in sorted(self._classes.items())}
        record.figure(f"{name}.disagreements", sum(counts.values()))
        record.figure(f"{name}.disagreements_by_class", counts)
        record.figure(f"{name}.unclassified", counts.get("unclassified", 0), equals=0)
        record.figure(f"{name}.examples", {kind: found[:EXAMPLES] for kind, found in sorted(self._classes.items())})


def _class(verdicts: dict[str, bool], text: str, gold: str) -> str:
    """Names the reason of a disagreement, from what each grader read."""
    from jaxrl_post.rewards.math_values import same

    read, parsed = str(math.answer(text)), parse(text)
    theirs = str(parsed[-1]) if parsed else ""
    if verdicts["math"] and not verdicts["rules"]:
        return "an expression that is worked out: right by algebra, not by the own rules"
    if not theirs:
        return "math-verify alone reads nothing"
    after_word = re.search(r"(?i)answer", text) is not None
    if verdicts["math"] and "=" in text.rpartition("\n")[2] and re.search(r"[-+*/]", theirs):
        return "math-verify alone reads the side before the last '=', or a part of it"
    if verdicts["math"] and after_word:
        return "math-verify alone reads a number near the word 'answer', not the last one"
    if verdicts["math"]:
        return "math-verify alone reads an earlier number or expression"
    if verdicts["alone"] and same(theirs, gold):
        return "math-verify alone reads an earlier number, which is the target"
    return "unclassified" if same(read, gold) else "math-verify alone works out another expression"
