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
from test_rewards_pool import group, pool, rollout
from test_rewards_sandbox import returned, score

from jaxrl_post.rewards import code
from jaxrl_post.rewards import sandbox as confined
from jaxrl_post.rewards.sandbox import Unavailable, host, system_calls

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="confinement is Linux's"),
    *(
        pytest.mark.filterwarnings(f"ignore:{words}")
        for words in ("os.fork:RuntimeWarning", "This process:DeprecationWarning")
    ),
]
# Calls by number, so that no library stands between. Each must fail.
TRIES = """
import ctypes, os, platform, struct
libc = ctypes.CDLL(None, use_errno=True)
column = ["x86_64", "aarch64"].index(platform.machine())
def call(numbers, *values):
    sent = [ctypes.c_char_p(v) if isinstance(v, bytes) else ctypes.c_long(v) for v in values]
    return libc.syscall(ctypes.c_long(numbers[column]), *sent) >= 0
CWD, none = -100, ctypes.c_long(0)
"""
PROCESS = {
    "prlimit": "call((302, 261), {victim}, 7, struct.pack('QQ', 0, 0), 0)",
    "prlimit, read": "call((302, 261), {victim}, 7, 0, bytes(16))",
    "prlimit of the parent": "call((302, 261), os.getppid() or {victim}, 7, struct.pack('QQ', 0, 0), 0)",
    "sched_setaffinity": "call((203, 122), {victim}, 8, struct.pack('Q', 1))",
    "sched_getaffinity": "call((204, 123), {victim}, 128, bytes(128))",
    "sched_setscheduler": "call((144, 119), {victim}, 5, struct.pack('i', 0))",
    "sched_setparam": "call((142, 118), {victim}, struct.pack('i', 0))",
    "sched_setattr": "call((314, 274), {victim}, struct.pack('IIQiIQQQ', 48, 3, 0, 5, 0, 0, 0, 0), 0)",
    "setpriority": "call((141, 140), 0, {victim}, 5)",
    "getpriority": "call((140, 141), 0, {victim})",
    "ioprio_set": "call((251, 30), 1, {victim}, 3 << 13)",
    "getpgid": "call((121, 155), {victim})",
    "clock": "call((228, 113), (~{victim} << 3) | 2, bytes(16))",
    "kill": "call((62, 129), {victim}, 0)",
    "kill the group": "call((62, 129), 0, 0)",
    "pidfd_open": "call((434, 434), {victim}, 0)",
    "process_vm_readv": "call((310, 270), {victim}, bytes(16), 0, bytes(16), 0, 0)",
    "kcmp": "call((312, 272), {victim}, {victim}, 2, 0, 0)",
    "owner of a pipe's signals": "call((72, 25), os.pipe()[0], 8, {victim})",
    "undo the parent's signal": "call((157, 167), 1, 0)",
    "core scheduling": "call((157, 167), 62, 2, {victim}, 0, 0)",
}
FILES = {
    "fchmodat": "call((268, 53), CWD, {file!r}.encode(), 0o777)",
    "fchmodat2": "call((452, 452), CWD, {file!r}.encode(), 0o777, 0)",
    "fchownat": "call((260, 54), CWD, {file!r}.encode(), os.getuid(), os.getgid(), 0)",
    "utimensat": "call((280, 88), CWD, {file!r}.encode(), bytes(32), 0)",
    "setxattr": "call((188, 5), {file!r}.encode(), b'user.a', b'1', 1, 0)",
    "getxattr": "call((191, 8), {file!r}.encode(), b'user.a', bytes(8), 8)",
    "truncate": "call((76, 45), {file!r}.encode(), 0)",
    "open to truncate": "call((257, 56), CWD, {file!r}.encode(), 0o1000, 0)",
    "open the path": "call((257, 56), CWD, {file!r}.encode(), 0o10000000, 0)",
    "faccessat": "call((269, 48), CWD, {file!r}.encode(), 0)",
    "statfs": "call((137, 43), os.path.dirname({file!r}).encode(), bytes(256))",
    "inotify": "call((254, 27), libc.inotify_init1(0), {file!r}.encode(), 2)",
    "readlink": "call((267, 78), CWD, {link!r}.encode(), bytes(256), 256)",
    "chdir": "call((80, 49), os.path.dirname({file!r}).encode())",
    "an interpreter's file": "call((268, 53), CWD, os.__file__.encode(), os.stat(os.__file__).st_mode & 0o7777)",
    "an open file": "call((91, 52), os.open(os.__file__, 0), os.stat(os.__file__).st_mode & 0o7777)",
    "lock an open file": "call((73, 32), os.open(os.__file__, 0), 5)",
    "attributes of an open file": "call((16, 29), os.open(os.__file__, 0), 0x40086602, bytes(8))",
}
CHANNELS = {
    "socket": "call((41, 198), 2, 1, 0)",
    "datagram pair": "call((53, 199), 1, 2, 0, bytes(8))",
    "bind": "call((49, 200), 3, struct.pack('H', 1) + b'\\0x', 4)",
    "connect": "call((42, 203), 3, struct.pack('H', 1) + b'\\0x', 4)",
    "shmget": "call((29, 194), 0, 4096, 0o1600)",
    "shmat": "call((30, 196), 0, 0, 4096)",
    "shmctl": "call((31, 195), 0, 14, bytes(256))",
    "semget": "call((64, 190), 0, 1, 0o1600)",
    "semctl": "call((66, 191), 0, 0, 19, bytes(256))",
    "msgget": "call((68, 186), 0, 0o1600)",
    "msgctl": "call((71, 187), 0, 12, bytes(256))",
    "mq_open": "call((240, 180), b'x', 0o100, 0o600, 0)",
    "mq_unlink": "call((241, 181), b'x')",
    "io_uring": "call((425, 425), 4, bytes(256))",
    "memfd_create": "call((319, 279), b'x', 0)",
    "perf_event_open": "call((298, 241), bytes(128), 0, -1, -1, 0)",
    "add_key": "call((248, 217), b'user', b'x', b'y', 1, -3)",
    "sync": "call((162, 81),)",
}


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


def test_a_program_touches_no_other_process_no_file_outside_and_no_channel(sandboxes, tmp_path):
    file, link = tmp_path / "file", tmp_path / "link"
    file.write_text("kept")
    file.chmod(0o644)
    link.symlink_to(file)
    before = file.stat()
    with subprocess.Popen(["sleep", "60"]) as victim:
        of_victim = Path(f"/proc/{victim.pid}/limits").read_text()
        things = {"victim": victim.pid, "file": str(file), "link": str(link)}
        tries = {name: text.format(**things) for name, text in (PROCESS | FILES | CHANNELS).items()}
        table = ", ".join(f"{name!r}: lambda: {text}" for name, text in tries.items())
        source = f"{TRIES}\ntries = {{{table}}}\ndef f(): return [name for name, one in tries.items() if one()]"
        for level, sandbox in sandboxes.items():
            launcher = Path(f"/proc/{sandbox._launcher.process.pid}/limits").read_text()
            own = (
                {"faccessat", "statfs", "readlink", "chdir", "open the path", "truncate"}
                if level == "strict"
                else set()
            )
            reached = {name for name in returned(sandbox, source) if name not in own}
            assert not reached, (level, reached)
            assert Path(f"/proc/{sandbox._launcher.process.pid}/limits").read_text() == launcher
            assert victim.poll() is None and Path(f"/proc/{victim.pid}/limits").read_text() == of_victim
        victim.kill()
    after = file.stat()
    assert file.read_text() == "kept"
    assert (after.st_mode, after.st_mtime_ns, after.st_ctime_ns) == (
        before.st_mode,
        before.st_mtime_ns,
        before.st_ctime_ns,
    )


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
        members = [rollout(ADD if index else "x = 1", index) for index in range(3)]
        for one in members:
            rewards.start(one)
        out = rewards.join(group(*members))
        figures = rewards.metrics()
        assert rewards.metrics()["reward/sandbox_restarts"] == 0
    assert out.scored.all() and out.rewards.tolist() == [0.0, 1.0, 1.0]
    assert figures["reward/sandbox_restarts"] == 3 and figures["reward/retries"] == 0
