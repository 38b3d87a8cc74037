"""Verdicts depend on the program alone: not on workers, load or sandbox, and not on what a program says about itself.

A table of 60 right and wrong programs is judged with 1, 4 and 16 workers, on an idle and on a loaded machine. None uses
a number of CPU seconds within 25 % of its limit. Labelled programs of 60 problems that read stdin or are called get their
labels: an accepted wrong one counts as an error like a refused right one. All reference
solutions of HumanEval and MBPP pass in strict mode.
Programs that end in a backslash, replace the check or hide behind a decorator earn nothing on any row. The cost of
confinement is measured in turns beside the same programs without it.
"""

from __future__ import annotations

import gzip
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

import numpy as np
from stdin_and_call_problems import problems
from verdict_programs import table

from jaxrl_post.rewards import Overrun, code
from jaxrl_post.rewards.limits import Fixed
from jaxrl_post.rewards.pool import Graders, Pool
from jaxrl_post.rewards.program_tests import refusal
from jaxrl_post.rewards.sandbox import LEVELS
from jaxrl_post.rewards.sandbox.examiner import ProgramTest
from jaxrl_post.ring.types import Finish, Group, Prompt, Rollout, RolloutId

MINUTES = 15.0
SOURCES = ("scripts/tables/*_problems.txt",)
LIMIT_S = 1.0
WORKERS = (1, 4, 16)
WRONG_AT_THE_END = {
    "backslash": "{code}\nx = 1\\",
    "open string": "{code}\nx = '''",
    "decorator": "{code}\nimport functools\n@lambda f: lambda *a: None",
}


def show(record) -> None:
    programs = table()
    record.figure("programs", len(programs), at_least=60)
    _judged_alike(record, programs)
    _labelled(record)
    rows = [json.loads(line) for line in record.data("mbpp", "mbpp.jsonl").read_text().splitlines()]
    with gzip.open(record.data("humaneval", "HumanEval.jsonl.gz"), "rt") as file:
        tasks = [json.loads(line) for line in file]
    _references(record, rows, tasks)
    _ends(record, rows[:120], tasks[:120])
    _cost(record)
    for file, selection, count in (
        ("sandbox", "sleeper", 2),
        ("sandbox", "kills_what_it_started", 1),
        ("sandbox", "no_reply", 3),
        ("math", "", 50),
        ("math_algebra", "", 1),
    ):
        name = f"tests.{file}.{selection or 'all'}"
        record.figure(name, record.passed(f"tests/test_rewards_{file}.py", selection), at_least=count)
    record.figure("tests.truths", record.passed("tests/test_data_truths.py", ""), at_least=10)


def _judged_alike(record, programs: Sequence[tuple[str, str, float]]) -> None:
    """Judges the table with every number of workers, idle and loaded."""
    wanted = {name: score for name, _, score in programs}
    differing, nearest, unscored = [], 1.0, 0
    for workers, loaded in itertools.product(WORKERS, (False, True)):
        hogs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4 * loaded)]
        begun = time.monotonic()
        try:
            scores, used, missing = _through_a_pool(programs, workers)
        finally:
            for hog in hogs:
                hog.kill()
                hog.wait()
        unscored += missing
        differing += [
            f"{name} with {workers} workers, {'loaded' if loaded else 'idle'}"
            for name in wanted
            if scores[name] != wanted[name]
        ]
        nearest = min(nearest, *(abs(seconds / LIMIT_S - 1.0) for seconds in used if seconds <= LIMIT_S))
        print(f"{workers:2} workers, {'loaded' if loaded else 'idle':6}: {time.monotonic() - begun:5.1f} s", flush=True)
    record.figure("verdicts_that_differ", differing, equals=[])
    record.figure("unscored", unscored, equals=0)
    record.figure("nearest_to_the_limit", round(nearest, 3), at_least=0.25)


def _through_a_pool(programs, workers: int) -> tuple[dict[str, float], list[float], int]:
    """Returns the score of each program, the CPU seconds of those that end, and the number of unscored ones."""
    rollouts = _rollouts(len(programs))
    kept: list[Mapping] = []

    class Journal:
        write = staticmethod(kept.append)

    graders = Graders(
        functions=("jaxrl_post.rewards.code:tests",), workers=workers, timeout_s=LIMIT_S, limits=Fixed(LIMIT_S)
    )
    with Pool(
        graders, lambda tokens, before=(), skip_special=True: programs[int(tokens[0])][1], journal=Journal()
    ) as pool:
        for rollout in rollouts:
            pool.start(rollout)
        none = np.zeros(len(rollouts))
        group = pool.join(Group(prompt=rollouts[0].prompt, rollouts=rollouts, rewards=none, scored=none == 1))
    scores = {name: float(reward) for (name, _, _), reward in zip(programs, group.rewards, strict=True)}
    used = [record["cpu_s"] for record in kept if record["counts"]["overruns"] == 0]
    return scores, used, int((~group.scored).sum())


def _rollouts(count: int) -> tuple:
    """Returns rollouts to one prompt. The token of each is its number, which stands for its program."""
    prompt = Prompt(
        id="p", tokens=[1], answer="", source="s", extra={"test_list": ["assert f(3) == 9", "assert f(-2) == 4"]}
    )
    names = (RolloutId(0, "train", 0, "p", index) for index in range(count))
    return tuple(Rollout.written(name, prompt, [name.sample], Finish.EOS) for name in names)


def _score(row: Mapping, text: str, limit_s: float = 40.0, truth: object = "") -> float:
    try:
        return code.tests("", text, truth, {**row, "rollout": {"limit_s": limit_s, "sandbox": "strict"}})["score"]
    except Overrun as error:
        return error.args[0]["score"]


def _labelled(record) -> None:
    """Judges programs of stdin and call problems, which were labelled before the graders read their forms."""
    labelled = list(problems())
    for kind in ("stdin", "call"):
        own = [one for one in labelled if one.kind == kind]
        wrong = [
            one.name
            for one in own
            if refusal(one.truth, one.extra)
            or _score(one.extra, f"```python\n{one.program}\n```", 1.0, one.truth) != one.right
        ]
        record.figure(f"{kind}.problems", len({one.name.partition(":")[0] for one in own}), at_least=30)
        record.figure(f"{kind}.programs", len(own), at_least=150)
        record.figure(f"{kind}.wrong_programs", sum(one.right == 0 for one in own), at_least=100)
        record.figure(f"{kind}.errors", wrong)
        record.figure(f"{kind}.share_of_errors", round(len(wrong) / len(own), 4), at_most=0.01)


def _references(record, rows: Sequence[Mapping], tasks: Sequence[Mapping]) -> None:
    failed = [row["task_id"] for row in rows if _score(row, row["code"]) != 1.0]
    record.figure("mbpp.references", len(rows))
    record.figure("mbpp.references_that_fail", failed, equals=[])
    failed = [task["task_id"] for task in tasks if _score(task, task["canonical_solution"]) != 1.0]
    record.figure("humaneval.references", len(tasks))
    record.figure("humaneval.references_that_fail", failed, equals=[])


def _ends(record, rows: Sequence[Mapping], tasks: Sequence[Mapping]) -> None:
    """Wrong programs with an end that disarmed the tests while these were text behind the program."""
    for name, form in WRONG_AT_THE_END.items():
        earned = [row["task_id"] for row in rows if _score(row, form.format(code="def wrong(): return 0")) == 1.0]
        earned += [task["task_id"] for task in tasks if _score(task, form.format(code="    return None")) == 1.0]
        record.figure(f"earned_by.{name.replace(' ', '_')}", earned, equals=[])


def _cost(record) -> None:
    """Milliseconds for each program at each level, in turns, above those of level none."""
    test, spent = ProgramTest("assert f(3) == 9"), {level: [] for level in LEVELS}
    for _ in range(60):
        for level in LEVELS:
            begun = time.perf_counter()
            verdict, _ = code.judged(code.sandbox_at(level), "def f(n): return n * n\n", test, 5.0)
            spent[level].append(1000 * (time.perf_counter() - begun))
            assert verdict == "passed", verdict
    middle = {level: statistics.median(values) for level, values in spent.items()}
    record.figure("ms_per_program.none", round(middle["none"], 2))
    record.figure("ms_above_none.basic", round(middle["basic"] - middle["none"], 2), at_most=40.0)
    record.figure("ms_above_none.strict", round(middle["strict"] - middle["none"], 2), at_most=80.0)
    record.figure("cores", os.cpu_count())
