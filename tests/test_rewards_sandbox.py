"""Judged programs: what earns a reward, what reaches the host, what the wire refuses, and what the levels give."""

import decimal
import fractions
import json
import math
import mmap
import os
import random
import socket
import string
import struct
import time
import zlib
from dataclasses import replace

import pytest
from test_rewards_pool import FORKS, joined, pool, rollout, scores

from jaxrl_post.rewards import Overrun, code
from jaxrl_post.rewards.limits import Fixed
from jaxrl_post.rewards.sandbox import Unavailable, host, wire
from jaxrl_post.rewards.sandbox.examiner import Failed, Link, ProgramTest, names

pytestmark = FORKS
ADD = ["assert add(1, 2) == 3", "assert add(-1, 1) == 0"]


def score(text, tests=ADD, limit_s=2.0, level="auto", **extra):
    about = {"limit_s": limit_s, "sandbox": level}
    given = {"test_list": tests, **extra} if tests else extra
    try:
        return code.tests("src", text, "", {**given, "rollout": about})["score"]
    except Overrun as error:
        return error.args[0]["score"]


# ---- The wire


def no_reference(value):
    raise TypeError(f"{value!r} is no plain value")


def plain(draw: random.Random, depth: int = 3):
    """Returns a random value of the types that cross the channel."""
    kinds = ["leaf"] * 3 + ["list", "tuple", "dict", "set", "frozenset"] * (depth > 0)
    kind = draw.choice(kinds)
    if kind == "dict":
        return {draw.choice([1, "a", (2, "b"), None, True, 2.5]): plain(draw, depth - 1) for _ in range(3)}
    if kind in ("set", "frozenset"):
        return {"set": set, "frozenset": frozenset}[kind](draw.choices([1, "x", (1, 2), None, 3.5, b"y"], k=3))
    if kind in ("list", "tuple"):
        return {"list": list, "tuple": tuple}[kind](plain(draw, depth - 1) for _ in range(draw.randint(0, 3)))
    return draw.choice(
        [
            None,
            True,
            draw.randint(-(10**30), 10**30),
            draw.random() * 10 ** draw.randint(-300, 300),
            math.inf,
            "".join(draw.choices(string.printable + "ä\ud800\0", k=5)),
            bytes(draw.choices(range(256), k=4)),
            bytearray(b"\xff\0"),
            complex(1.5, -2),
            range(1, 10**20, 7),
            decimal.Decimal("1.10"),
            fractions.Fraction(-7, 3),
        ]
    )


def typed(value) -> str:
    """Returns a text that tells values and types apart, whatever the order in a set."""
    if isinstance(value, (set, frozenset)):
        return f"{type(value).__name__}{sorted(map(typed, value))}"
    if isinstance(value, dict):
        return f"dict{[(typed(key), typed(item)) for key, item in value.items()]}"
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__}{list(map(typed, value))}"
    return repr(value)


def test_values_cross_the_wire_with_their_types():
    draw = random.Random(0)
    for _ in range(300):
        value = plain(draw)
        frame = bytearray(wire.pack({"value": wire.encode(value, no_reference)}))
        back = wire.decode(wire.unpack(frame)["value"], no_reference)
        assert typed(back) == typed(value) and not frame


def test_subclasses_arrive_as_built_in_types():
    class Liar(int):
        def __eq__(self, other):
            return True

        __hash__ = int.__hash__

    class Text(str):
        def __eq__(self, other):
            return True

        __hash__ = str.__hash__

    for value, want in ((Liar(5), 5), (Text("a"), "a"), ({Liar(1): [Text("b")]}, {1: ["b"]})):
        back = wire.decode(json.loads(json.dumps(wire.encode(value, no_reference))), no_reference)
        assert back == want and type(back) is type(want) and back != 6


def framed(body: bytes) -> bytes:
    return struct.pack("!II", len(body), zlib.crc32(body)) + body


@pytest.mark.parametrize(
    "frame",
    [
        struct.pack("!II", 5, 0) + b'{"a":',
        struct.pack("!II", 1 << 31, 0),
        framed(b"[1, 2]"),
        framed(b"\xff\xfe"),
        framed(b"nothing"),
        framed(b"[" * 100_000),
    ],
)
def test_a_malformed_frame_is_refused(frame):
    with pytest.raises(wire.Broken):
        wire.unpack(bytearray(frame))


@pytest.mark.parametrize(
    "given",
    [
        {},
        ["?"],
        ["h"],
        ["h", -1],
        ["i", "zz"],
        ["d", 1],
        ["s", ["l", 1]],
        ["c", "x"],
        [],
        ["T", "x"],
        [[]],
        ["r", "0x0", "0x1", "0x0"],
    ],
)
def test_a_malformed_value_is_refused(given):
    link = Link(None)
    with pytest.raises(Failed):
        link.decode(given)


# ---- Verdicts


def test_an_answer_and_its_tests_are_compiled_apart():
    """Each of these passed every test while the tests were text behind the answer."""
    assert score("def add(a, b): return 7\nx = 1\\") == 0
    assert score("def add(a, b): return 7\n'''") == 0
    check = "def check(candidate):\n    assert candidate(2) == 4\n"
    head = {"test": check, "entry_point": "twice", "prompt": 'def twice(n):\n    """Doubles."""\n'}
    assert score("    return 2 * n\n", None, **head) == 1
    assert score("    return 1\nimport functools\n@lambda f: (lambda *a: None)", None, **head) == 0
    assert score("    return 1\ndef check(candidate): pass\n", None, **head) == 0
    assert score("    return 1\ndef check(candidate): pass\ncandidate = lambda n: 4\nassert True\n", None, **head) == 0


@pytest.mark.parametrize(
    "text",
    [
        "class A:\n    def __eq__(self, o): return True\ndef add(a, b): return A()",
        "class A(int):\n    def __eq__(self, o): return True\ndef add(a, b): return A(9)",
        "class A(list):\n    def __eq__(self, o): return True\ndef add(a, b): return A()",
        "import os\nos._exit(0)",
        "import os\nos._exit(17)",
        "import sys\nsys.exit(0)",
        "def add(a, b):\n    import os\n    os.write(3, b'passed')\n    return 1",
        "def add(a, b): raise StopIteration",
        "abs = len = isinstance = lambda *a: True\ndef add(a, b): return 9",
        "def add(a, b): return float('nan')",
        "def add(a, b): return ['h', 0]",
        "def add(a, b): return '3'",
        "def add(a, b):\n    x = []\n    x.append(x)\n    return x",
        "def add(a, b): return 'x' * (1 << 28)",
        "def add(a, b):\n    x = []\n    for _ in range(10 ** 5): x = [x]\n    return x",
    ],
)
def test_tricks_earn_nothing(text):
    assert score(text) == 0


def test_an_early_end_of_an_iteration_earns_nothing():
    """A call that raises StopIteration would end the test's own loop over `map`."""
    stops = "def f(x): raise StopIteration"
    assert score(stops, ["assert all(map(f, [1, 2]))"]) == 0
    assert score(stops, ["for y in map(f, [1, 2]):\n    assert y == 1"]) == 0
    iterated = "class F:\n    def __iter__(self): return iter([1, 2])\ndef f(): return F()"
    assert score(iterated, ["assert list(f()) == [1, 2] and next(iter(f())) == 1"]) == 1


def test_what_decides_a_test_belongs_to_the_test():
    """Builtins, modules and functions of the head are the test's own, whatever the program calls so."""
    assert score("abs = lambda x: 0\ndef f(): return 9.0", ["assert abs(f() - 3.0) < 1e-6"]) == 0
    fake = "class math:\n    isclose = staticmethod(lambda *a, **k: True)\ndef f(): return 9.0"
    assert score(fake, ["assert math.isclose(f(), 3.0)"]) == 0
    honest = "import math\ndef f(): return math.sqrt(9)"
    assert score(honest, ["assert math.isclose(f(), 3.0)"]) == 1
    head = {
        "test": "def check(f):\n    assert double(f(2)) == 8\n",
        "entry_point": "twice",
        "prompt": 'def double(n):\n    return 2 * n\n\ndef twice(n):\n    """Doubles."""\n',
    }
    assert score("    return 2 * n\n", None, **head) == 1
    assert score("    return 1\ndef double(n): return 8\n", None, **head) == 0


def test_a_function_with_the_name_of_a_builtin_is_the_programs_where_nothing_else_is():
    """As in MBPP's task 126. Where the test calls two builtins, both are its own."""
    source = "def sum(a, b): return a + b\n"
    assert score(source, ["assert sum(1, 2) == 3"]) == 1
    assert score(source, ["import math\nassert sum(1, 2) == math.floor(3.5)"]) == 1
    assert score("def abs(x): return 0\ndef sum(a, b): return 9\n", ["assert abs(sum(1, 2) - 3) < 1"]) == 0
    assert score("def abs(x): return 0\ndef f(): return 9\n", ["assert abs(f() - 3) < 1"]) == 0
    assert score("", ["assert sum([1, 2]) == 3"]) == 0  # the builtin would pass


def test_types_are_passed_and_functions_are_no_verdict():
    source = "def f(xs, kind): return [x for x in xs if isinstance(x, kind)]\n"
    assert score(source, ["assert f([1, 'a', 2.5], str) == ['a']"]) == 1
    with pytest.raises(ValueError, match="cannot be sent to a program"):
        score("def f(g): return g(1)", ["assert f(lambda x: x + 1) == 2"])
    with pytest.raises(ValueError, match="cannot be sent to a program"):
        score("def f(g): return 7", ["try:\n    f(lambda: 1)\nexcept TypeError:\n    pass"])
    with pytest.raises(ValueError, match="cannot be sent to a program"):
        score("def f(s): return len(s)", ["assert f('x' * (17 << 20)) == 17 << 20"])
    echo = "def f(): return 'x' * ((16 << 20) - 50)\ndef g(s, t): return 1"
    assert score(echo, ["x = f()\nassert g(x, x) == 1"]) == 0  # the program's own value is too large


def test_objects_generators_exceptions_and_changed_arguments_work():
    node = "class Node:\n    def __init__(self, v): self.v, self.next = v, None\ndef second(n): return n.next.v\n"
    setup = {"test_setup_code": "a = Node(1)\na.next = Node(2)"}
    assert score(node, ["assert second(a) == 2", "assert a.next.v == 2 and a.next.next is None"], **setup) == 1
    pair = (
        "class Pair:\n    def __init__(self, a, b): self.a, self.b = a, b\ndef total(ps): return sum(p.b for p in ps)"
    )
    assert score(pair, ["assert total([Pair(1, 2), Pair(3, 4)]) == 6"]) == 1
    assert score("def f(n):\n    yield from range(n)", ["assert list(f(3)) == [0, 1, 2]"]) == 1
    raising = "try:\n    f(0)\n    assert False\nexcept ZeroDivisionError:\n    pass\nassert f(2) == 0.5"
    assert score("def f(n): return 1 / n", [raising]) == 1
    assert score("def f(xs): xs.sort()", ["xs = [3, 1, 2]\nassert f(xs) is None and xs == [1, 2, 3]"]) == 1
    assert score("def f(xs): return sorted(xs)", ["xs = [3, 1]\nassert f(xs) == [1, 3] and xs == [3, 1]"]) == 1
    assert score("def f(xs): xs.append(1)", ["xs = [0]\nf(xs=xs)\nassert xs == [0, 1]"]) == 1
    turned = "from collections import deque\nxs = deque([1, 2])\nf(xs)\nassert xs == deque([2, 1])"
    assert score("def f(xs): xs.rotate(1)", [turned]) == 1
    counter = "from collections import Counter\ndef f(s): return Counter(s)"
    assert score(counter, ["assert f('aab') == {'a': 2, 'b': 1}"]) == 1


def test_a_grader_with_a_large_address_space_judges_alike():
    """As one that imports a large framework: the limit is of what a test takes beside it."""
    with mmap.mmap(-1, 3 << 30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS):
        assert score("def f(n): return 'x' * n", ["assert f(3) + 'x' * (200 << 20) == 'x' * (3 + (200 << 20))"]) == 1


def test_a_program_is_imported_not_started():
    """What a program does when it is started as a script is not part of what is tested."""
    script = "def add(a, b): return a + b\nif __name__ == '__main__':\n    import sys\n    sys.exit(input())"
    assert score(script) == 1
    typed = (
        "from __future__ import annotations\nimport dataclasses, typing\n@dataclasses.dataclass\nclass Pair:\n"
        "    a: int\n    b: typing.ClassVar[Pair | None] = None\ndef f(): return typing.get_type_hints(Pair)['a'] is int"
    )
    assert score(typed, ["assert f()"]) == 1


def test_attributes_of_the_programs_objects_are_read_and_set_wherever_a_test_names_them():
    box = "class Box:\n    size = 1\n    def __init__(self, n): self.n = n\n    def grow(self, by=1): self.n += by; return self"
    tests = [
        "b = Box(2)\nb.n += 3\nassert b.n == 5 and b.grow().n == 6",
        "b = Box([1, 2])\nb.n[0:1] = []\nassert b.n == [1, 2], 'a list is read as a copy'",
        "assert getattr(Box(1), 'n') == 1 and getattr(Box(1), 'm', 7) == 7 and hasattr(Box(1), 'n')",
        "assert not hasattr(Box(1), 'm') and Box.size == 1",
        "class Own:\n    __x = 4\n    def get(self): return self.__x\nassert Own().get() == Box(4).n",
        "class Base:\n    def f(self): return 1\nclass Own(Base):\n    def f(self): return super().f() + 1\nassert Own().f() == Box(2).n",
        "import math\nassert math.floor(Box(2.5).n) == 2 and sorted([Box(2), Box(1)], key=lambda b: b.n)[0].n == 1",
        "try:\n    Box(1).m\n    assert False\nexcept AttributeError:\n    pass",
    ]
    for test in tests:
        assert score(box, [test]) == 1, test
        assert score(box.replace("self.n = n", "self.m = n"), ["Box(0).n\n" + test]) == 0, test


def test_a_broken_test_is_no_verdict():
    with pytest.raises(SyntaxError):
        names(ProgramTest("assert add(1, 2) == "))
    with pytest.raises(SyntaxError):
        score("def add(a, b): return a + b", ["assert add(1, 2) =="])


@pytest.mark.parametrize("level", [pytest.param("none", marks=pytest.mark.extended), "auto"])
def test_sleepers_and_burners_are_verdicts_at_every_level(level):
    begun = time.monotonic()
    assert score("import time\ntime.sleep(60)", limit_s=0.2, level=level) == 0
    assert score("while True: pass", limit_s=0.2, level=level) == 0
    assert score("import signal\nsignal.pause()", limit_s=0.2, level=level) == 0
    assert score("import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)", limit_s=0.2, level=level) == 0
    assert time.monotonic() - begun < 30


def test_cpu_seconds_are_the_programs_own():
    burn = (
        "import time\ndef f(s):\n    t = time.process_time()\n    while time.process_time() - t < s: pass\n    return s"
    )
    about = {"limit_s": 5.0}
    numbers = code.tests("s", burn, "", {"test_list": ["assert f(0.3) == 0.3"], "rollout": about})
    assert 0.3 <= numbers["cpu_s"] < 0.45
    waits = "import time\nt = time.monotonic()\nwhile time.monotonic() - t < 0.4: pass\nassert f(0) == 0"
    assert code.tests("s", burn, "", {"test_list": [waits], "rollout": about})["cpu_s"] < 0.1


# ---- The host


@pytest.fixture(scope="module")
def sandbox():
    try:
        made = host.Sandbox("strict")
    except Unavailable as error:
        pytest.skip(str(error))
    yield made
    made.close()


def returned(sandbox, source):
    """Returns what the function `f` of a program returns, as the tests would see it."""
    program = sandbox.start(2.0)
    try:
        link = Link(program.channel)
        given = link.ask(do="load", source=source, before=[], wanted=["f"])["names"]["f"]
        return link.decode(given[1])()
    finally:
        program.end()


def test_a_program_sees_no_files_processes_network_or_secrets(sandbox, tmp_path, monkeypatch):
    secret = tmp_path / "secret"
    secret.write_text("key")
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    source = f"""
import os, socket
def tried(function, *arguments):
    try:
        function(*arguments)
    except OSError as error:
        return type(error).__name__
    return "done"
def f():
    return [
        tried(open, {str(secret)!r}), tried(open, "/etc/passwd"), tried(open, {str(tmp_path / "new")!r}, "w"),
        tried(os.fork), tried(os.kill, {os.getpid()}, 9), tried(os.kill, -1, 9), tried(os.execv, "/bin/true", ["true"]),
        tried(socket.create_connection, ("127.0.0.1", {listener.getsockname()[1]})), tried(os.mkdir, "/usr/x"),
        tried(os.listdir, "/proc"), sorted(os.environ), [n for n in range(4, 64) if tried(os.fstat, n) == "done"],
        os.getpid(),
    ]
"""
    found = returned(sandbox, source)
    assert "done" not in found[:10] and found[11] == [] and found[12] == 1
    assert found[10] == ["LC_CTYPE", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "PYTHONHASHSEED"] or len(found[10]) == 3
    with pytest.raises(BlockingIOError):
        listener.accept()
    listener.close()
    assert not (tmp_path / "new").exists()


def test_a_program_has_a_bounded_folder_and_bounded_memory(sandbox):
    source = """
def f():
    out = []
    try:
        for n in range(100):
            with open(f"/tmp/{n}", "wb") as file:
                file.write(bytes(1 << 19))
    except OSError as error:
        out.append(type(error).__name__)
    try:
        bytearray(2 << 30)
    except MemoryError:
        out.append("memory")
    import threading
    try:
        threading.Thread(target=print).start()
    except RuntimeError:
        out.append("threads")
    return out
"""
    assert returned(sandbox, source) == ["OSError", "memory", "threads"]


def test_an_unknown_level_and_a_missing_layer_are_named(monkeypatch):
    with pytest.raises(Unavailable, match=r"reward.sandbox='tight': .* no such level; levels are none, basic, strict"):
        host.Sandbox("tight")
    monkeypatch.setattr(host, "_paths", lambda: ["/missing"])
    with pytest.raises(Unavailable, match="layer 'root'|layer 'namespaces'"):
        host.Sandbox("strict")


def test_an_orphan_that_holds_the_channel_ends_no_verdict():
    """Only the level "none" lets a program start another. tests/test_rewards_confinement.py sees that it ends."""
    forks = "import os, time\nchild = os.fork()\nif child == 0:\n    time.sleep(999)\ndef f(): return child"
    assert score(forks, ["assert f() > 0"], level="none") == 1


def test_the_launcher_ends_with_its_sandbox():
    made = host.Sandbox("none")
    pid = made._launcher.process.pid
    program = made.start(1.0)
    made.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    program.end()


# ---- The pool's protocol

WRITER = """
import os, socket, struct, sys, zlib

def channel():
    for fd in range(3, 64):
        try:
            return socket.socket(fileno=os.dup(fd)) if os.path.islink(f"/proc/self/fd/{fd}") and "socket" in os.readlink(
                f"/proc/self/fd/{fd}") else next(x for x in ())
        except (OSError, StopIteration):
            continue

def frame(body):
    return struct.pack("!II", len(body), zlib.crc32(body)) + body

JUNK = {
    "junk": b"\\xff" * 64,
    "list": frame(b"[1, 2]"),
    "text": frame(b"\\xff\\xfe"),
    "huge": struct.pack("!II", 1 << 30, 0),
    "other": frame(b'{"task": 1, "numbers": [{"score": 9.0}], "overrun": false, "seconds": 0.1, "restarts": 0}'),
    "old": frame(b'{"task": 1, "numbers": {"score": 9.0}, "overrun": false, "seconds": 0.1}'),
    "form": frame(b'{"numbers": {"score": 9.0}}'),
}

def writes(data_source, solution_str, ground_truth, extra_info):
    if solution_str in JUNK:
        channel().sendall(JUNK[solution_str])
    return 1.0

def early(data_source, solution_str, ground_truth, extra_info):
    return 0.25

def child(data_source, solution_str, ground_truth, extra_info):
    import subprocess, time
    print(subprocess.Popen(["sleep", "60"]).pid, file=open(solution_str, "w"), flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize(
    "word",
    ["junk", "list", "other", *(pytest.param(w, marks=pytest.mark.extended) for w in ("old", "text", "huge", "form"))],
)
def test_what_is_no_reply_ends_its_worker_and_no_other_score(tmp_path, word):
    (tmp_path / "writer.py").write_text(WRITER)
    texts = ["fine", word, "fine", "fine"]
    with pool(str(tmp_path / "writer.py"), "writes", workers=1) as rewards:
        out, figures = scores(rewards, *texts), rewards.metrics()
    assert out.scored.tolist() == [True, False, True, True] and out.rewards.tolist() == [1.0, 0.0, 1.0, 1.0]
    assert figures["reward/broken_workers"] == 2 and figures["reward/unscored"] == 1


def test_a_workers_end_kills_what_it_started(tmp_path):
    (tmp_path / "writer.py").write_text(WRITER)
    told = tmp_path / "pid"
    with pool(str(tmp_path / "writer.py"), "child", workers=1, timeout_s=30.0) as rewards:
        rewards.start(rollout(str(told)))
        while not (told.exists() and told.read_text().strip()):
            time.sleep(0.01)
    pid = int(told.read_text())
    deadline = time.monotonic() + 10
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < deadline:
        with open(f"/proc/{pid}/stat") as file:
            if file.read().rpartition(")")[2].split()[0] == "Z":
                break
        time.sleep(0.01)
    else:
        assert not os.path.exists(f"/proc/{pid}")


def test_a_judged_sleeper_scores_zero_though_the_pool_would_wait_less(tmp_path):
    """Three tests of 0.3 CPU seconds take longer than the pool's own limit. The answer keeps its verdict."""
    row = {"test_list": ["assert f(0.5) == 1"] * 3}
    burn = (
        "import time\ndef f(s):\n    t = time.process_time()\n    while time.process_time() - t < s: pass\n    return 1"
    )
    with pool("jaxrl_post.rewards.code", "tests", workers=2, timeout_s=1.0, limits=Fixed(1.0)) as rewards:
        members = [rollout(text, index) for index, text in enumerate([burn, "import time\ntime.sleep(60)"])]
        members = [replace(one, prompt=replace(one.prompt, extra=row)) for one in members]
        out = joined(rewards, *members)
        confined, figures = rewards.confined, rewards.metrics()
    assert out.scored.all() and out.rewards.tolist() == [1.0, 0.0]
    assert figures["reward/overruns"] == 1 and figures["reward/retries"] == 0
    assert confined["level"] in ("basic", "strict") and "seccomp" in confined["layers"]


def test_a_level_that_the_host_lacks_stops_the_pool():
    with pytest.raises(ValueError, match=r"reward.sandbox='tight'"):
        pool("jaxrl_post.rewards.code", "tests", workers=1, sandbox="tight")
