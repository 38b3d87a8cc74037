"""What a judged program reaches outside at each level, what outlives its judge, and a launcher that died."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
from test_rewards_pool import FORKS, pool, scores
from test_rewards_sandbox import returned, score

sys.path.append(str(Path(__file__).resolve().parents[1] / "scripts"))
import hostile_programs

from jaxrl_post.rewards import code
from jaxrl_post.rewards import sandbox as confined
from jaxrl_post.rewards.sandbox import Unavailable, host, system_calls

pytestmark = [*FORKS, pytest.mark.skipif(sys.platform != "linux", reason="confinement is Linux's")]


def levels():
    """Returns the levels that confine and that this host gives."""
    out = {}
    for level in ("basic", "strict"):
        with contextlib.suppress(Unavailable):
            out[level] = host.Sandbox(level)
    return out


@pytest.fixture(scope="module")
def sandboxes():
    made = levels()
    yield made
    for one in made.values():
        one.close()


def test_a_program_makes_no_call_that_reaches_outside(sandboxes):
    """Every line of scripts/attacks/calls.txt in one program. Files, processes and queues stay as they are."""
    calls = [one for one in hostile_programs.attacks() if one.source.startswith(hostile_programs.CALLS[:20])]
    assert len(calls) > 100
    with hostile_programs.host_things() as things:
        reached = things.pop("reached")
        parts = [f"{one.filled(things)}\nfound[{one.name!r}] = attack" for one in calls]
        source = "\n".join(["found = {}", *parts, "def f(): return [name for name, one in found.items() if one()]"])
        for level, sandbox in sandboxes.items():
            limits = Path(f"/proc/{sandbox._launcher.process.pid}/limits")
            before = limits.read_text()
            assert (level, returned(sandbox, source)) == (level, [])
            assert limits.read_text() == before and reached() == []


def test_what_programs_need_is_allowed(sandboxes):
    """Event loops, clocks, own limits and own signals are a program's own."""
    source = """
import asyncio, os, resource, signal, time
async def soon():
    await asyncio.sleep(0)
    return 1
def f():
    resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))
    signal.signal(signal.SIGUSR1, lambda *about: None)
    os.kill(os.getpid(), signal.SIGUSR1)
    return [asyncio.run(soon()), time.process_time() > 0, len(os.sched_getaffinity(0)) > 0, os.isatty(0)]
"""
    for sandbox in sandboxes.values():
        assert returned(sandbox, source) == [1, True, True, False]


def test_a_program_works_on_files_of_its_own_folder(sandboxes):
    if "strict" not in sandboxes:
        pytest.skip("this host does not give strict")
    source = """
import os, shutil, tempfile
def f():
    with tempfile.TemporaryDirectory() as folder:
        one, two = os.path.join(folder, "one"), os.path.join(folder, "two")
        open(one, "w").write("text")
        os.chmod(one, 0o600), os.utime(one, (1, 1))
        shutil.copy2(one, two), os.rename(two, one)
        return [open(one).read(), os.stat(one).st_mtime, os.path.realpath(one) == one, shutil.disk_usage(folder).total]
"""
    assert returned(sandboxes["strict"], source) == ["text", 1.0, True, 16 << 20]


HEADERS = {0: ("/usr/include/x86_64-linux-gnu/asm/unistd_64.h",), 1: ("/usr/include/asm-generic/unistd.h",)}


@pytest.mark.parametrize("column", HEADERS)
def test_the_numbers_of_calls_are_the_kernels(column):
    files = [Path(name) for name in HEADERS[column] if Path(name).is_file()]
    if not files:
        pytest.skip("the kernel's headers are not installed")
    found = re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", files[0].read_text())
    known = {name: int(number) for name, number in found}
    known.setdefault("newfstatat", known.get("fstatat"))  # its name in the generic table
    plain = ("_ALLOWED", "_IN_OWN_ROOT", "_SELF", "_SELF_OR_ZERO", "_CLOCKS", "_ACCOUNTS")
    table = {name: numbers for part in plain for name, numbers in getattr(system_calls, part).items()}
    for part in ("_VALUES", "_OPEN", "_LACKING"):
        table |= {name: numbers for name, (numbers, *_) in getattr(system_calls, part).items()}
    table |= {"prctl": system_calls._PRCTL, "socketpair": system_calls._PAIR}
    assert {name: numbers[column] for name, numbers in table.items()} == {name: known.get(name, -1) for name in table}


# ---- What outlives


def named(name):
    """Returns the processes whose name a program has set to this."""
    out = []
    for file in Path("/proc").glob("[0-9]*/comm"):
        with contextlib.suppress(OSError):
            state = Path(file.parent, "stat").read_text().rpartition(")")[2].split()[0]
            if file.read_text().strip() == name and state != "Z":
                out.append(int(file.parent.name))
    return out


def ends(name):
    """Returns whether all processes of a name have ended within seconds."""
    end = time.monotonic() + 10
    while found := named(name):
        if time.monotonic() > end:
            for pid in found:
                os.kill(pid, signal.SIGKILL)
            return False
        time.sleep(0.01)
    return True


STAYS = """
import ctypes, os, time
libc = ctypes.CDLL(None)
libc.prctl(15, b"{name}")
libc.prctl(1, 0)
try:
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            libc.prctl(1, 0)
            time.sleep(600)
except OSError:
    pass
def f(): return 1
"""
JUDGE = """
import os, sys, time
from jaxrl_post.rewards.sandbox import host
from jaxrl_post.rewards.sandbox.examiner import Link
host._APART["none"] = ({apart!r},)
sandbox = host.Sandbox({level!r})
program = sandbox.start(60.0)
print(Link(program.channel).ask(do="load", source={source!r}, before=[], wanted=[]), flush=True)
if {ends}:
    program.end()
    print("ended", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("ends_itself", [False, True])
@pytest.mark.parametrize(
    "level, apart", [("none", "pid namespace"), ("none", "reaper"), ("basic", ""), ("strict", "namespaces")]
)
def test_nothing_of_a_program_outlives_its_judge_or_its_end(sandboxes, level, apart, ends_itself):
    """The program undoes the signal at its parent's end, and starts a process in a session of its own where it can."""
    if level != "none" and level not in sandboxes:
        pytest.skip(f"this host does not give {level}")
    name = uuid.uuid4().hex[:12]
    judge = JUDGE.format(level=level, apart=apart, source=STAYS.format(name=name), ends=ends_itself)
    with subprocess.Popen([sys.executable, "-c", judge], stdout=subprocess.PIPE, text=True) as process:
        if not process.stdout.readline():
            pytest.skip(f"this host does not give {apart}")
        if ends_itself:
            assert process.stdout.readline() == "ended\n"
        else:
            assert named(name)
            process.kill()
        assert ends(name)
        process.kill()


# ---- Launchers that died

ADD = "def add(a, b): return a + b"


def launcher(level="auto"):
    return code.sandbox_at(level)._launcher.process


def test_a_launcher_that_died_is_started_again_and_counted():
    assert score(ADD) == 1
    confined.counts.clear()
    for times in (1, 2):
        os.kill(launcher().pid, signal.SIGKILL)
        assert score(ADD) == 1 and score("def add(a, b): return 7") == 0
        assert confined.counts == {"restarts": times}


def test_a_program_whose_launcher_dies_is_judged_once_more(tmp_path):
    """The test's own process kills the launcher while the program runs."""
    assert score(ADD) == 1
    once = tmp_path / "killed"
    kills = (
        f"import os, pathlib\nonce = pathlib.Path({str(once)!r})\n"
        f"if not once.exists():\n    once.touch()\n    os.kill({launcher().pid}, 9)\n    import time\n    time.sleep(0.2)\n"
    )
    confined.counts.clear()
    assert score(ADD, [f"{kills}assert add(1, 2) == 3"]) == 1
    assert once.exists() and confined.counts == {"restarts": 1}


KILLER = """
import os
from jaxrl_post.rewards import code

def score(data_source, solution_str, ground_truth, extra_info):
    level = extra_info["rollout"]["sandbox"]
    os.kill(code.sandbox_at(level)._launcher.process.pid, 9)
    return code.tests(data_source, solution_str, "assert add(1, 2) == 3", extra_info)

score.sandboxed = True
"""


def test_the_pool_counts_launchers_that_were_started_again(tmp_path):
    file = tmp_path / "killer.py"
    file.write_text(KILLER)
    with pool(str(file), "score", workers=1, timeout_s=30.0) as rewards:
        out, figures = scores(rewards, "x = 1", ADD, ADD), rewards.metrics()
        assert rewards.metrics()["reward/sandbox_restarts"] == 0
    assert out.scored.all() and out.rewards.tolist() == [0.0, 1.0, 1.0]
    assert figures["reward/sandbox_restarts"] == 3 and figures["reward/retries"] == 0
