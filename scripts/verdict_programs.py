"""The table of programs for the show of verdicts: right ones, wrong ones, and those over a limit of 1 CPU second.

Each defines `f(n)`, which must square its argument. Burners use a number of CPU seconds that is not within 25 % of the
limit. Sleepers sleep for longer than twice the limit and one second.
"""

from __future__ import annotations

BURN = "import time\ndef burn(s):\n    t = time.process_time()\n    while time.process_time() - t < s: pass\n"
SQUARE = "def f(n): return n * n\n"
RIGHT = {
    "plain": SQUARE,
    "loop": "def f(n):\n    return sum(n for _ in range(n)) if n > 0 else n * n\n",
    "import": "import math\ndef f(n): return int(math.pow(n, 2))\n",
    "class": "class A:\n    def __call__(self, n): return n * n\nf = A()\n",
    "closure": "def g():\n    return lambda n: n * n\nf = g()\n",
    "recursion": "def f(n): return 0 if n == 0 else f(abs(n) - 1) + 2 * abs(n) - 1\n",
    "float": "def f(n): return float(n * n)\n",
    "output": "def f(n):\n    print('x' * 100000)\n    return n * n\n",
    "file": "def f(n):\n    try: open('/tmp/x', 'w').write('x')\n    except OSError: pass\n    return n * n\n",
    "naps": "import time\ndef f(n):\n    time.sleep(0.2)\n    return n * n\n",
}
WRONG = {
    "off by one": "def f(n): return n * n + 1\n",
    "nothing": "",
    "no syntax": "def f(n",
    "raises": "def f(n): raise ValueError\n",
    "exit": "import os\nos._exit(0)\n",
    "text": "def f(n): return str(n * n)\n",
    "liar": "class A:\n    def __eq__(self, o): return True\ndef f(n): return A()\n",
    "memory": "x = bytearray(2 << 30)\n" + SQUARE,
    "crash": "import ctypes\ndef f(n): return ctypes.string_at(0)\n",
    "recursion": "def f(n): return f(n)\n",
}


def table() -> list[tuple[str, str, float]]:
    """Returns 60 programs as (name, source, score)."""
    out = [(f"right: {name}", source, 1.0) for name, source in RIGHT.items()]
    out += [(f"wrong: {name}", source, 0.0) for name, source in WRONG.items()]
    for seconds in (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.65, 0.7, 0.72):
        out.append((f"right: burns {seconds} s", f"{BURN}def f(n):\n    burn({seconds})\n    return n * n\n", 1.0))
        out.append((f"wrong: burns {seconds} s", f"{BURN}def f(n):\n    burn({seconds})\n    return n * n + 1\n", 0.0))
    for seconds in (1.3, 1.4, 1.5, 1.7, 2.0, 3.0):
        out.append((f"over: burns {seconds} s", f"{BURN}def f(n):\n    burn({seconds})\n    return n * n\n", 0.0))
    for name, line in (
        ("for ever", "while True: pass"),
        ("power", "3 ** (10 ** 9)"),
        ("starts", "burn(5)"),
        ("sum", "sum(range(1 << 40))"),
    ):
        out.append((f"over: {name}", f"{BURN}{line}\n{SQUARE}", 0.0))
    for name, line in (
        ("sleeps", "time.sleep(60)"),
        ("pauses", "import signal; signal.pause()"),
        ("reads", "import os; r, w = os.pipe(); os.read(r, 1)"),
    ):
        out.append((f"asleep: {name}", f"import time\n{line}\n{SQUARE}", 0.0))
    for seconds in (4.0, 8.0, 30.0):
        out.append(
            (
                f"asleep: {seconds} s in a call",
                f"import time\ndef f(n):\n    time.sleep({seconds})\n    return n * n\n",
                0.0,
            )
        )
    for n in range(4):
        out.append((f"right: number {n}", f"def f(n): return n ** 2 + {n} - {n}\n", 1.0))
    return out
