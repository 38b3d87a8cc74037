"""Programs judged by tests. Each test runs the program in a process of its own, within a limit of CPU seconds.

`tests` has verl's signature. Tests are Python statements that raise if the program is wrong. They come from

- `extra_info["test_list"]`, with `test_setup_code` before them (MBPP);
- `extra_info["test"]` with a function `check` and `entry_point`. If `extra_info["prompt"]` holds the head of the
  function, it goes before the program (HumanEval);
- or the ground truth: one test, or a JSON list of tests.

Program and tests are compiled apart and run in different processes (rewards/sandbox). The tests call the program's
functions over a channel and compare values of built-in types, so nothing that a program defines decides a comparison.

Invariants:

- The limit `extra_info["rollout"]["limit_s"]` is of CPU seconds of the program alone (rewards/limits.py). A program
  over its limit has failed, which is a verdict. So verdicts depend neither on the load nor on the number of workers.
- A program that sleeps for longer than `sleep_s` in all has failed too. Waiting for a processor is no sleep.
"""

from __future__ import annotations

import json
import math
import os
import re
import resource
import signal
import socket
import time
import warnings
from collections.abc import Mapping, Sequence
from functools import cache

from jaxrl_post.rewards import Overrun
from jaxrl_post.rewards.lifetime import die_with
from jaxrl_post.rewards.sandbox import AUTO
from jaxrl_post.rewards.sandbox.examiner import Names, ProgramTest, Unsupported, examine, names
from jaxrl_post.rewards.sandbox.host import Program, Sandbox, runs

LIMIT_S = 5.0  # CPU seconds, where a rollout has no limit_s
_MEMORY = 2 << 30  # bytes that a test may take beside what its process holds already
_CROWD = 20.0  # times `sleep_s` after which a test ends whatever its state, with one worker a core
_FENCE = re.compile(r"```(?:python|py)?[ \t]*\r?\n(.*?)(?:```|\Z)", re.DOTALL)
_NEAR, _FAR = 0.001, 0.02  # seconds between two polls of a running test, at first and at most
_PASSED, _FAILED, _UNSUPPORTED = 17, 1, 18  # exit statuses of the process that runs a test


def tests(data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping) -> dict[str, float]:
    """Returns 1 if every test passes, as score and acc. The first test that fails is the last one run.

    Further numbers are `passed`, the share of passed tests, and `cpu_s`, the CPU seconds of the slowest test.

    Raises:
      Overrun: a test ran over the limit; scores 0.
      ValueError: there are no tests.
      SyntaxError: a test is no Python.
    """
    asked = _asked(ground_truth, extra_info)
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


def budget(data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping) -> float:
    """Returns the seconds of wall-clock that `tests` takes at most for these arguments."""
    about = extra_info.get("rollout", {})
    crowd = float(about.get("workers_per_core", 1.0))
    return len(_asked(ground_truth, extra_info)) * (wall_s(float(about.get("limit_s", LIMIT_S)), crowd) + 1.0) + 5.0


tests.budget, tests.sandboxed = budget, True
tests.instead_of_truth = ("test_list", "test")  # columns of extra_info


def sleep_s(limit_s: float) -> float:
    """Returns the seconds that a test and its program may sleep in all."""
    return 2 * limit_s + 1


def wall_s(limit_s: float, workers_per_core: float) -> float:
    """Returns the seconds of wall-clock after which a test ends even if it neither runs nor sleeps."""
    return sleep_s(limit_s) * _CROWD * max(1.0, workers_per_core)


def code(text: str) -> str:
    """Returns the content of the last code fence of a rollout, or all of its text if there is none."""
    found = _FENCE.findall(text)
    return found[-1] if found else text


@cache
def sandbox_at(level: str) -> Sandbox:
    """Returns this process's sandbox of a level."""
    return Sandbox(level)


def _asked(ground_truth: str, extra: Mapping) -> Sequence[ProgramTest]:
    """Returns the tests of a prompt."""
    if extra.get("test_list"):
        return [ProgramTest(str(test), setup=str(extra.get("test_setup_code") or "")) for test in extra["test_list"]]
    if extra.get("test"):
        return [
            ProgramTest(str(extra["test"]), head=str(extra.get("prompt") or ""), entry_point=str(extra["entry_point"]))
        ]
    try:
        given = json.loads(ground_truth)
    except ValueError:
        given = ground_truth
    found = [ProgramTest(str(test)) for test in (given if isinstance(given, list) else [given]) if test]
    if not found:
        raise ValueError("a program needs tests: test_list, test with entry_point, or a ground truth of tests")
    return found


def judged(sandbox: Sandbox, source: str, test: ProgramTest, limit_s: float, crowd: float = 1.0) -> tuple[str, float]:
    """Runs one test of a program, and once more if its launcher died. Returns its verdict and its CPU seconds.

    The verdict is "passed" when the test reached its end, "overrun" when the program took too long, else "failed". Too
    long is more than `limit_s` CPU seconds, or more than `sleep_s(limit_s)` asleep.

    Raises:
      ValueError: the test passes a value that cannot be sent to a program, such as a function.
    """
    verdict, used = _once(sandbox, source, test, limit_s, crowd)
    if verdict == "lost":
        verdict, used = _once(sandbox, source, test, limit_s, crowd)
    return "failed" if verdict == "lost" else verdict, used


def _once(sandbox: Sandbox, source: str, test: ProgramTest, limit_s: float, crowd: float) -> tuple[str, float]:
    """Runs one test. The verdict "lost" means that the program ended because its launcher did."""
    read = names(test)
    program = sandbox.start(limit_s)
    try:
        judge, examiner = os.getpid(), os.fork()
        if examiner == 0:
            _child(judge, program, test, read, source, limit_s)
        late, used, status = _watched(program, examiner, limit_s, wall_s(limit_s, crowd))
        lost = program.lost()
    finally:
        program.end()
    if os.WIFEXITED(status) and os.WEXITSTATUS(status) == _UNSUPPORTED:
        raise ValueError(f"a test passes a value that cannot be sent to a program: {test.source[:200]!r}")
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


def _child(judge: int, program: Program, test: ProgramTest, read: Names, source: str, limit_s: float) -> None:
    """Runs the test and never returns. The exit status says whether it reached its end. It ends with the process `judge`."""
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
        examine(channel, test, read, source)
        status = _PASSED
    except Unsupported:
        status = _UNSUPPORTED
    finally:
        os._exit(status)
