"""Attacks of judged programs on other processes, on their launcher, on their judge's end, and on what lies outside.

Right values do not depend on the code under test: the kernel's tables of limits, priorities and processes, the files
themselves, and the score that each program must get.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

import hostile_programs

from jaxrl_post.rewards import Overrun, code
from jaxrl_post.rewards.sandbox import Unavailable
from strangers import Members

_ADD = "def add(a, b): return a + b"


def _levels() -> Iterator[str]:
    """Yields the levels that confine and that this host gives."""
    for level in ("basic", "strict"):
        with contextlib.suppress(Unavailable):
            code.sandbox_at(level)
            yield level


def _score(text: str, tests: list[str], level: str, limit_s: float = 2.0) -> float:
    try:
        return code.tests("", text, "", {"test_list": tests, "rollout": {"limit_s": limit_s, "sandbox": level}})[
            "score"
        ]
    except Overrun as error:
        return error.args[0]["score"]


def limits() -> Members:
    """Every limit of the launcher, of the judge and of a third process, lowered or read: the kernel's tables stay."""
    wrong, tried = [], 0
    kinds = {name: getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")}
    for level in _levels():
        with subprocess.Popen(["sleep", "600"]) as victim:
            launcher = code.sandbox_at(level)._launcher.process.pid
            targets = {"launcher": launcher, "judge": os.getpid(), "process": victim.pid}
            before = {pid: Path(f"/proc/{pid}/limits").read_text() for pid in targets.values()}
            for (who, pid), (name, kind), change in itertools.product(targets.items(), kinds.items(), ("", ", (0, 0)")):
                text = f"import resource\ndef attack():\n    resource.prlimit({pid}, {kind}{change})\n    return 1"
                tried += 1
                if _score(text, ["assert attack() == 1"], level):
                    wrong.append(f"{level}: {name} of the {who} is {'lowered' if change else 'read'}")
            wrong += [
                f"{level}: {pid} has other limits"
                for pid in before
                if Path(f"/proc/{pid}/limits").read_text() != before[pid]
            ]
            victim.kill()
        wrong += [] if _score(_ADD, ["assert add(1, 2) == 3"], level) else [f"{level}: no program starts afterwards"]
    return Members(tried, tuple(wrong))


def launchers() -> Members:
    """A launcher that is killed before, between or while programs run: every program gets the score that it must get."""
    wrong, tried = [], 0
    programs = ((_ADD, 1.0), ("def add(a, b): return 7", 0.0), ("import time\ntime.sleep(0.2)\n" + _ADD, 1.0))
    for level, at_s, (text, right) in itertools.product(("none", *_levels()), (0.0, 0.01, 0.05, 0.1), programs):
        _score(_ADD, ["assert add(1, 2) == 3"], level)  # with a launcher that lives
        pid, timer = code.sandbox_at(level)._launcher.process.pid, None
        if at_s:
            timer = threading.Timer(at_s, os.kill, (pid, signal.SIGKILL))
            timer.start()
        else:
            os.kill(pid, signal.SIGKILL)
        found = [_score(text, ["assert add(1, 2) == 3"], level) for _ in range(2)]
        if timer is not None:
            timer.join()
        tried += 1
        if found != [right, right]:
            wrong.append(f"{level}, launcher killed after {at_s} s: scores {found}, not {right} twice")
    return Members(tried, tuple(wrong))


def _left(before: set[int], patience_s: float = hostile_programs.PATIENCE_S) -> int:
    """Counts the processes that are left and were not there before. On a busy machine their ends take a while."""
    until = time.monotonic() + patience_s
    while (left := len(set(hostile_programs.left_behind(os.getpid())) - before)) and time.monotonic() < until:
        time.sleep(0.1)
    return left


def outliving() -> Members:
    """Programs that try to outlive their verdict, or their judge that is killed: none of their processes is left."""
    wrong, tried = [], 0
    with tempfile.TemporaryDirectory() as folder:
        for level in ("none", *_levels()):
            for name, count in hostile_programs.killed(level).items():
                tried += 1
                wrong += [f"{level}: {name}: {count} left by a killed judge"] if count else []
            for attack in hostile_programs.attacks():
                if attack.kind == "outlive":
                    before = set(hostile_programs.left_behind(os.getpid()))
                    hostile_programs.judged(attack, {"outside": folder}, level)
                    tried += 1
                    left = _left(before)
                    wrong += [f"{level}: {attack.name}: {left} left by a verdict"] if left else []
    return Members(tried, tuple(wrong))


def outside() -> Members:
    """System calls and programs that reach files, processes, sockets and queues outside: none succeeds, nothing changes."""
    wrong, tried = [], 0
    for level in _levels():
        with hostile_programs.host_things() as things:
            reached = things.pop("reached")
            for attack in hostile_programs.attacks():
                if attack.kind == "reach":
                    tried += 1
                    wrong += [f"{level}: {attack.name}"] if hostile_programs.judged(attack, things, level)[0] else []
            wrong += [f"{level}: {what}" for what in reached()]
    return Members(tried, tuple(wrong))


KINDS = {"A06": limits, "A07": launchers, "A08": outliving, "A09": outside}
