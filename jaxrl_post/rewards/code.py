"""Programs judged by tests. Each test runs the program in a process of its own, within a limit of CPU seconds.

`tests` has verl's signature. Tests are Python statements that raise if the program is wrong. They come from

- `extra_info["test_list"]`, with `test_setup_code` before them (MBPP);
- `extra_info["test"]` with a function `check` and `entry_point`. If `extra_info["prompt"]` holds the head of the
  function, it goes before the program (HumanEval);
- or the ground truth: one test, or a JSON list of tests.

The limit is `extra_info["rollout"]["limit_s"]` (rewards/limits.py). A program over its limit has failed, which is a
verdict. There is no sandbox: a process has limits on CPU, memory, file size and wall-clock only.
"""

from __future__ import annotations

import json
import math
import os
import re
import resource
import secrets
import signal
import time
import warnings
from collections.abc import Mapping, Sequence

from jaxrl_post.rewards import Overrun

LIMIT_S = 5.0  # CPU seconds, where a rollout has no limit_s
_MEMORY, _FILE = 1 << 30, 1 << 20  # bytes
_FENCE = re.compile(r"```(?:python|py)?[ \t]*\r?\n(.*?)(?:```|\Z)", re.DOTALL)
_NEAR, _FAR = 0.001, 0.02  # seconds between two polls of a running test, at first and at most


def tests(data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping) -> dict[str, float]:
    """Returns 1 if every test passes, as score and acc. The first test that fails is the last one run.

    Further numbers are `passed`, the share of passed tests, and `cpu_s`, the CPU seconds of the slowest test.

    Raises:
      Overrun: a test ran over the limit; scores 0.
      ValueError: there are no tests.
    """
    setup, asked = _asked(ground_truth, extra_info)
    program = f"{setup}\n{code(solution_str)}\n"
    limit_s = float(extra_info.get("rollout", {}).get("limit_s", LIMIT_S))
    slowest, passed, verdict = 0.0, 0, "passed"
    for test in asked:
        verdict, cpu_s = judged(program + test, limit_s)
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


def code(text: str) -> str:
    """Returns the content of the last code fence of a rollout, or all of its text if there is none."""
    found = _FENCE.findall(text)
    return found[-1] if found else text


def _asked(ground_truth: str, extra: Mapping) -> tuple[str, Sequence[str]]:
    """Returns the text that goes before the program, and the tests."""
    if extra.get("test_list"):
        return str(extra.get("test_setup_code") or ""), [str(test) for test in extra["test_list"]]
    if extra.get("test"):
        return str(extra.get("prompt") or ""), [f"{extra['test']}\ncheck({extra['entry_point']})\n"]
    try:
        given = json.loads(ground_truth)
    except ValueError:
        given = ground_truth
    found = [str(test) for test in (given if isinstance(given, list) else [given]) if test]
    if not found:
        raise ValueError("a program needs tests: test_list, test with entry_point, or a ground truth of tests")
    return "", found


def judged(program: str, limit_s: float) -> tuple[str, float]:
    """Runs a program in a child. Returns its verdict and its CPU seconds.

    The verdict is "passed" when the program reached its end, "overrun" when it took too long, else "failed". Too long
    is more than `limit_s` CPU seconds, or more than twice that plus one second of wall-clock.
    """
    reads, writes = os.pipe()
    word = secrets.token_bytes(16)
    child = os.fork()
    if child == 0:
        _child(program, limit_s, reads, writes, word)
    os.close(writes)
    late = False
    deadline, pause = time.monotonic() + 2 * limit_s + 1, _NEAR
    while (ended := os.wait4(child, os.WNOHANG))[0] == 0:
        if time.monotonic() > deadline:
            late = True
            os.kill(child, signal.SIGKILL)
            ended = os.wait4(child, 0)
            break
        time.sleep(pause)
        pause = min(2 * pause, _FAR)
    with os.fdopen(reads, "rb") as end:
        said = end.read()
    status, used = ended[1], ended[2].ru_utime + ended[2].ru_stime
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGPROF, signal.SIGXCPU, signal.SIGKILL)
    return "overrun" if late or (killed and used >= 0.9 * limit_s) else "passed" if said == word else "failed", used


def _child(program: str, limit_s: float, reads: int, writes: int, word: bytes) -> None:
    """Runs the program and never returns.

    The parent gets `word` only from a program that reached its end, not from an early exit.
    """
    try:
        os.close(reads)
        channel = os.dup2(writes, 3, inheritable=False)
        for stream in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        os.closerange(4, 256)
        warnings.simplefilter("ignore")
        for name, most in (
            (resource.RLIMIT_AS, _MEMORY),
            (resource.RLIMIT_FSIZE, _FILE),
            (resource.RLIMIT_CORE, 0),
            (resource.RLIMIT_CPU, math.ceil(limit_s) + 1),
        ):
            resource.setrlimit(name, (most, most))
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_PROF, limit_s)
        exec(compile(program, "<answer>", "exec"), {"__name__": "__main__"})
        os.write(channel, word)
    finally:
        os._exit(0)


tests.needs_truth = False  # the tests may stand in extra_info instead
