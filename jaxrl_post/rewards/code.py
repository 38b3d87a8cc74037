"""Programs, judged by tests: each test runs the answer's code in a process of its own, within a limit of CPU seconds.

`tests` has verl's signature. Tests are Python statements that raise where the program is wrong: `extra_info["test_list"]` with
`test_setup_code` before them (MBPP), `extra_info["test"]` with a function `check` and `entry_point`, behind
`extra_info["prompt"]` where the data has the function's head there (HumanEval), or the ground truth, one test or a JSON list of
them. The limit is that of the rollout, `extra_info["rollout"]["limit_s"]` (rewards/limits.py); over it the program has failed,
which is a verdict. Here is no sandbox yet: a process has bounds on CPU, memory, file size and wall-clock, no more.
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

LIMIT_S = 5.0  # of CPU, where a rollout names none
_MEMORY, _FILE = 1 << 30, 1 << 20  # bytes
_FENCE = re.compile(r"```(?:python|py)?[ \t]*\r?\n(.*?)(?:```|\Z)", re.DOTALL)
_NEAR, _FAR = 0.001, 0.02  # seconds between two looks at a running test


def tests(data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping) -> dict[str, float]:
    """1 if every test passes: score, acc, `passed` (the share of tests), and `cpu_s`, the slowest test's CPU seconds. After a
    test that fails no other is run.

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
    """What is in the last fence of an answer; without one, all of it."""
    found = _FENCE.findall(text)
    return found[-1] if found else text


def _asked(ground_truth: str, extra: Mapping) -> tuple[str, Sequence[str]]:
    """What goes before the program, and the tests."""
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
    """Runs it in a child: "passed" when it came to its end, "failed", or "overrun" beyond `limit_s` CPU seconds, or beyond twice
    that and a second by the clock; and the CPU seconds it took."""
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
    """Never returns. Only who comes to the end says the word, which an early exit does not."""
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
