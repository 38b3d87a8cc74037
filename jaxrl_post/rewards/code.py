"""Programs judged by tests. Each test runs the program in a process of its own, within a limit of CPU seconds.

`tests` has verl's signature. Its tests are of three kinds (rewards/program_tests.py), and come from

- `extra_info["test_list"]`, with `test_setup_code` before them (MBPP);
- `extra_info["test"]` with a function `check` and `entry_point`. If `extra_info["prompt"]` holds the head of the
  function, it goes before the program (HumanEval);
- or the ground truth: stdin pairs, call pairs, a list of cases, or statements. Each may be its JSON text.

Program and tests are compiled apart and run in different processes (rewards/sandbox). The tests call the program's
functions over a channel and compare values of built-in types, so nothing that a program defines decides a comparison.
No expected output reaches the program's process.

Invariants:

- The limit `extra_info["rollout"]["limit_s"]` is of CPU seconds of the program alone (rewards/limits.py). A program
  over its limit has failed, which is a verdict. So verdicts depend neither on the load nor on the number of workers.
- A program that sleeps for longer than `sleep_s` in all has failed too. Waiting for a processor is no sleep.
"""

from __future__ import annotations

import ast
import math
import os
import re
import resource
import signal
import socket
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

from markdown_it import MarkdownIt

from jaxrl_post.rewards import Overrun, program_runs, program_tests
from jaxrl_post.rewards.child import die_with
from jaxrl_post.rewards.program_tests import Called, Test, Whole
from jaxrl_post.rewards.sandbox import AUTO
from jaxrl_post.rewards.sandbox.examiner import Link, ProgramTest, Unsupported, examine, names
from jaxrl_post.rewards.sandbox.host import Program, Sandbox, runs

LIMIT_S = 5.0  # CPU seconds, where a rollout has no limit_s
_MEMORY = 2 << 30  # bytes that a test may take beside what its process holds already
_CROWD = 20.0  # times `sleep_s` after which a test ends whatever its state, with one worker a core
_PYTHON = re.compile(r"\{?\s*\.?(?:python[\d.]*|py[23]?)(?![\w+-])", re.IGNORECASE)  # begins the info string of a block
_INSIDE = re.compile(
    r"^(.*[^\s`~>*+\d.)-].*?)(`{3,}|~{3,})([ \t]*\{?\.?(?:python[\d.]*|py[23]?)\b[^`\n]*)$",
    re.IGNORECASE | re.MULTILINE,
)
_NEAR, _FAR = 0.001, 0.02  # seconds between two polls of a running test, at first and at most
_PASSED, _FAILED, _UNSUPPORTED = 17, 1, 18  # exit statuses of the process that runs a test


def tests(data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping) -> dict[str, float]:
    """Returns 1 if every test passes, as score and acc. The first test that fails is the last one run.

    Further numbers are `passed`, the share of passed tests, and `cpu_s`, the CPU seconds of the slowest test.

    No program passes a test that tests nothing of it. A run refuses rows with such tests when it reads them.

    Raises:
      Overrun: a test ran over the limit; scores 0.
      ValueError: there are no tests, or what they lack.
      SyntaxError: a test is no Python.
    """
    asked = program_tests.read(ground_truth, extra_info)
    program, about = code(solution_str), extra_info.get("rollout", {})
    limit_s, sandbox = float(about.get("limit_s", LIMIT_S)), sandbox_at(about.get("sandbox", AUTO))
    slowest, passed, verdict = 0.0, 0, "passed"
    for test in asked:
        verdict, cpu_s = judged(sandbox, program, test, limit_s, float(about.get("workers_per_core", 1.0)))
        slowest = max(slowest, cpu_s)
        if verdict != "passed":
            break
        passed += 1
    numbers = {
        "score": float(passed == len(asked)),
        "acc": float(passed == len(asked)),
        "passed": passed / len(asked),
        "cpu_s": slowest,
    }
    if verdict == "overrun":
        raise Overrun(numbers)
    return numbers


def budget(data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping) -> float:
    """Returns the seconds of wall-clock that `tests` takes at most for these arguments."""
    about = extra_info.get("rollout", {})
    crowd = float(about.get("workers_per_core", 1.0))
    asked = program_tests.read(ground_truth, extra_info)
    return len(asked) * (wall_s(float(about.get("limit_s", LIMIT_S)), crowd) + 1.0) + 5.0


tests.budget, tests.sandboxed = budget, True
tests.instead_of_truth = program_tests.COLUMNS  # of extra_info
tests.reader = program_tests.__name__


def sleep_s(limit_s: float) -> float:
    """Returns the seconds that a test and its program may sleep in all."""
    return 2 * limit_s + 1


def wall_s(limit_s: float, workers_per_core: float) -> float:
    """Returns the seconds of wall-clock after which a test ends even if it neither runs nor sleeps."""
    return sleep_s(limit_s) * _CROWD * max(1.0, workers_per_core)


def code(text: str) -> str:
    """Returns the program in a text: its last block of Python, else its last block without a language, else all of it.

    Blocks are CommonMark's fences: of backticks or tildes, indented, in lists and quotes, the last one without an end. A
    block is Python if its info string begins with python, python3 or py, in any case, also as {.python}. Two habits of
    models are read beside: an opening fence of Python behind words on its line, and a closing one behind code.
    """
    text = _INSIDE.sub(r"\1\n\2\3", text)
    blocks = [(one.info.strip(), one.content) for one in _markdown().parse(text) if one.type == "fence"]
    found = [content for info, content in blocks if _PYTHON.match(info)]
    found = found or [content for info, content in blocks if not info and content.strip()]
    return _closed(found[-1]) if found else text


def _closed(content: str) -> str:
    """Returns a block up to a fence that ends a line of code, where the block is no program with it."""
    begin, fence, _ = content.partition("```")
    if not fence:
        return content
    try:
        ast.parse(content)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return begin
    return content


@cache
def _markdown() -> MarkdownIt:
    """Returns a parser of blocks alone. Tags such as <answer> begin no block of HTML, which would hide a fence."""
    return MarkdownIt("commonmark").disable(["html_block", "inline"])


@cache
def sandbox_at(level: str) -> Sandbox:
    """Returns this process's sandbox of a level."""
    return Sandbox(level)


def judged(sandbox: Sandbox, source: str, test: Test, limit_s: float, crowd: float = 1.0) -> tuple[str, float]:
    """Runs one test of a program, and once more if its launcher died. Returns its verdict and its CPU seconds.

    The verdict is "passed" when the test reached its end and any output is right, "overrun" when the program took too
    long, else "failed". Too long is more than `limit_s` CPU seconds, or more than `sleep_s(limit_s)` asleep.

    Raises:
      ValueError: the test passes a value that cannot be sent to a program, such as a function.
    """
    if not program_tests.tests_something(test):
        return "failed", 0.0
    once = _whole if isinstance(test, Whole) else _called
    verdict, used = once(sandbox, source, test, limit_s, crowd)
    if verdict == "lost":
        verdict, used = once(sandbox, source, test, limit_s, crowd)
    return "failed" if verdict == "lost" else verdict, used


def _called(
    sandbox: Sandbox, source: str, test: Called | ProgramTest, limit_s: float, crowd: float
) -> tuple[str, float]:
    """Runs statements against a program."""
    statements, source = program_runs.call(test, source) if isinstance(test, Called) else (test, source)
    examination = partial(examine, test=statements, read=names(statements), source=source)
    return _examined(sandbox.start(limit_s), examination, statements.source, limit_s, crowd)


def _whole(sandbox: Sandbox, source: str, test: Whole, limit_s: float, crowd: float) -> tuple[str, float]:
    """Runs a program with a text on its stdin, and compares what it prints."""
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as printed:
        given.write(test.input.encode())
        given.seek(0)
        program = sandbox.start(limit_s, streams=(given.fileno(), printed.fileno()))
        verdict, used = _examined(program, partial(_run_whole, source=source), test.source, limit_s, crowd)
        printed.seek(0)
        text = printed.read().decode(errors="replace")
    return ("failed" if verdict == "passed" and not program_runs.same_output(text, test.output) else verdict), used


def _run_whole(channel: socket.socket, source: str) -> None:
    """Runs a program to its end behind `channel`. Raises what it raises, and for an exit status other than 0."""
    link = Link(channel)
    reply = link.ask(do="load", source=program_runs.RUN, before=[], wanted=["run"])
    link.decode(reply["names"]["run"][1])(source)


def _examined(program: Program, examination: Callable, shown: str, limit_s: float, crowd: float) -> tuple[str, float]:
    """Runs an examination of a started program in a process of its own, and ends both. `shown`: the test.

    The verdict "lost" means that the program ended because its launcher did.
    """
    try:
        judge, examiner = os.getpid(), os.fork()
        if examiner == 0:
            _child(judge, program, examination, limit_s)
        late, used, status = _watched(program, examiner, limit_s, wall_s(limit_s, crowd))
        lost = program.lost()
    finally:
        program.end()
    if os.WIFEXITED(status) and os.WEXITSTATUS(status) == _UNSUPPORTED:
        raise ValueError(f"a test passes a value that cannot be sent to a program: {shown[:200]!r}")
    if late or used > limit_s or (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU):
        return "overrun", used
    passed = os.WIFEXITED(status) and os.WEXITSTATUS(status) == _PASSED
    return "passed" if passed else "lost" if lost else "failed", used


def _watched(program: Program, examiner: int, limit_s: float, wall: float) -> tuple[bool, float, int]:
    """Waits for the end of a test. Returns whether it was ended as too long, CPU seconds, and its exit status."""
    used, asleep, late, pause = 0.0, 0.0, False, _NEAR
    begun = last = time.monotonic()
    while True:
        ended, status = os.waitpid(examiner, os.WNOHANG)
        seconds, now = program.cpu_s(), time.monotonic()
        moved, used = (seconds or used) - used, max(used, seconds or 0.0)
        if ended:
            return late, used, status
        if moved < 0.1 * (now - last) and not (runs(program.pid) or runs(examiner)):
            asleep += now - last
        last = now
        if not late and (used > limit_s or asleep > sleep_s(limit_s) or now - begun > wall):
            late = True
            os.kill(examiner, signal.SIGKILL)
        time.sleep(pause)
        pause = min(2 * pause, _FAR)


def _held() -> int:
    """Returns the bytes of this process's address space. A module that a grader imports may have taken gigabytes."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def _child(judge: int, program: Program, examination: Callable, limit_s: float) -> None:
    """Runs the examination and never returns. The exit status says whether it reached its end. It ends with the process
    `judge`."""
    status = _FAILED
    try:
        die_with(judge)
        fd = os.dup2(program.channel.fileno(), 3) if program.channel.fileno() != 3 else 3
        channel = socket.socket(fileno=fd)
        for stream in (0, 1, 2):
            os.dup2(os.open(os.devnull, os.O_RDWR), stream)
        os.closerange(4, 1 << 20)
        warnings.simplefilter("ignore")
        seconds = 2 * math.ceil(limit_s) + 2
        for name, most in (
            (resource.RLIMIT_AS, _held() + _MEMORY),
            (resource.RLIMIT_CORE, 0),
            (resource.RLIMIT_CPU, seconds),
        ):
            resource.setrlimit(name, (most, most + 1 if name == resource.RLIMIT_CPU else most))
        examination(channel)
        status = _PASSED
    except Unsupported:
        status = _UNSUPPORTED
    finally:
        os._exit(status)
