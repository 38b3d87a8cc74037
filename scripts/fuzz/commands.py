"""Command lines, in this process and as the shell runs them; config files; replies of a judge; and faults in a reader."""

from __future__ import annotations

import contextlib
import functools
import http.server
import io
import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest import mock

from fuzz.kind import Kind, Outcome
from fuzz.mutations import SCALARS, damaged, damaged_json

ROOT = Path(__file__).resolve().parents[2]
SMALL = ("--config=configs/demo.py", "--config.data.size=8", "--config.eval.prompts=4")
FILE = (
    "--config.data=default",
    "--config.data.train=FOLDER/rows.jsonl",
    "--config.eval=default",
    "--config.eval.prompts=0",
    "--config.data.format=trl",
)
VALID = (
    ("train", *SMALL, "--dry-run"),
    ("train", *SMALL, "--config.steps=3", "--config.scheduler.prompts=8"),
    ("train", *SMALL, "--run-dir=FOLDER/run", "--resume"),
    ("train", *SMALL, "--config.data.task={'shortest': 3}", "--resume=FOLDER/run"),
    ("train", "--config=configs/demo.py", *FILE, "--config.data.columns={'answer': 'answer'}"),
    ("train", "--help", "scheduler"),
    ("simulate", "--config=configs/sim/uniform.py", "--config.rounds=2"),
    ("simulate", "--config=configs/sim/uniform.py", "--config.workload.cap=64", "--config.scheduler=default"),
    ("options", "engine"),
)
UNBOUNDED = ("data.size", "eval.prompts")  # a valid large number of them is long work
VALUES = (
    "",
    "0",
    "-1",
    "1",
    "1e999",
    "-1e999",
    "nan",
    "inf",
    "1e308",
    "9" * 5000,
    "0.5",
    "true",
    "None",
    "default",
    "off",
    "[" * 3000,
    "(" * 90 + ")" * 90,
    "{'a': 1}",
    "{[]: 1}",
    "{{}}",
    "(1,2",
    "'",
    '"\\',
    "\ud800",
    "\x00",
    "é",
    "a" * 5000,
    "(1, 'a')",
    "[None]",
    "1_000",
    "0x10",
    "1j",
    "b'a'",
    "...",
    "-" * 3000 + "1",
    "/",
    "/dev/null",
    "/dev/zero",
    ".",
    "task:",
    "task:sums",
    "task:x",
    "configs",
    "{'shortest': None}",
    "lambda: 1",
    "__import__('os')",
    "10**10**10",
)
WORDS = ("--", "-h", "--help", "help", "", "--config", "--resume=", *VALUES)
CONFIGS = ("demo.py", "demo/pipeline.py", "demo/speculation.py", "recipes/gspo.py", "models/gsm8k_qwen2_5_0_5b.py")
SPECIAL = (
    "",
    "\x00",
    "def get_config(",
    "get_config = 1",
    "def get_config(): return 1",
    "def get_config(): return None",
    "raise MemoryError",
    "raise RecursionError",
    "import nothing_like_it",
    "1/0",
    "def get_config(a): pass",
    "exit(3)",
    "raise SystemExit(0)",
    "raise StopIteration",
    "x = '\\d'",
    "\\",
    "é = '\udcff'",
    "# coding: nothing",
    "(" * 500,
    "def get_config():\n  return get_config()",
    f"x = {'[' * 150 + ']' * 150}",
    f"x = {'-' * 50_000}1",
)
TIMEOUT_S = 120
REPLY = {"id": "x", "choices": [{"index": 0, "message": {"role": "assistant", "content": "It is.\nVERDICT: 0.5"}}]}
WANTED = ("accepted", "refused", "TRACEBACK", "TRACEBACK", "HANG", "MEMORY", "CRASH", "accepted")  # of planted faults


class Started(BaseException):
    """The command line was accepted: the work would begin here."""


class Refused(Exception):
    """The command ended with an exit code that is not 0. Its text is what was written to the terminal."""


def _start(*given, **named):
    raise Started


def _one_line(error: BaseException) -> bool:
    """Whether a command said one line that begins with "error: "."""
    lines = str(error).splitlines()
    return type(error) is Refused and len(lines) == 1 and lines[0].startswith("error: ") and len(lines[0]) < 2000


class CommandLines:
    """Draws command lines with one to three faults, and runs them up to where work would begin."""

    def __init__(self, folder: Path):
        from jaxrl_post import __main__, config
        from jaxrl_post.config import fields
        from jaxrl_post.launch import dry_run
        from jaxrl_post.simulate import simulation

        self._folder, self._main = folder, __main__.main
        self._replaced = ((dry_run, "planned"), (simulation, "report"))
        options = [option.name for option in fields.options(config.Config) if option.name not in UNBOUNDED]
        self._options = [*options, "data.task.shortest", "data.task.usual", "data.columns.prompt", "data.columns.id"]
        rows = ({"id": str(i), "prompt": f"{i}+1=", "answer": "1"} for i in range(9))
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def filled(self, arguments: Sequence[str]) -> list[str]:
        """Returns arguments with the folder in them."""
        return [argument.replace("FOLDER", str(self._folder)) for argument in arguments]

    def valid(self) -> None:
        for arguments in VALID:
            self.run(self.filled(arguments))

    def drawn(self, random) -> list[str]:
        out = self.filled(random.choice(VALID))
        for _ in range(random.choice((1, 1, 2, 3))):
            at = random.randrange(len(out))
            kind = random.choice(("drop", "repeat", "letter", "value", "option", "option", "option", "word", "name"))
            if kind == "drop" and len(out) > 1:
                del out[at]
            elif kind == "repeat":
                out.insert(at, out[at])
            elif kind == "letter" and out[at]:
                place = random.randrange(len(out[at]))
                out[at] = out[at][:place] + random.choice("-=.x\x00é\udcff ") + out[at][place + random.randrange(2) :]
            elif kind == "value" and "=" in out[at]:
                out[at] = f"{out[at].partition('=')[0]}={random.choice(VALUES)}"
            elif kind == "word":
                out.insert(at + 1, random.choice(WORDS))
            else:
                name = random.choice(self._options)
                out.append(f"--config.{name[:-1] if kind == 'name' else name}={random.choice(VALUES)}")
        return out

    def run(self, arguments: Sequence[str]) -> None:
        said = io.StringIO()
        with contextlib.ExitStack() as stack:
            for owner, name in self._replaced:
                stack.enter_context(mock.patch.object(owner, name, _start))
            stack.enter_context(contextlib.redirect_stderr(said))
            stack.enter_context(contextlib.redirect_stdout(io.TextIOWrapper(io.BytesIO(), encoding="utf-8")))
            with contextlib.suppress(Started, SystemExit):  # the help of a command exits
                if self._main(arguments):
                    raise Refused(said.getvalue())

    def refused(self, arguments: Sequence[str]) -> bool:
        """Whether a command line is refused in this process: an accepted one would begin to train."""
        with Outcome() as outcome:
            self.run(arguments)
        return type(outcome.error) is Refused


def command_line(folder: Path) -> Kind:
    """Through the function that the shell's command calls."""
    lines = CommandLines(folder)

    def case(index, random):
        arguments = lines.drawn(random)
        return repr(arguments)[:300], lambda: lines.run(arguments)

    return Kind(valid=lines.valid, case=case, own=_one_line)


def processes(folder: Path) -> Kind:
    """As the shell runs them: a process of its own for each, its exit code and its last words. Its memory is not measured here."""
    lines = CommandLines(folder)

    def spawn(arguments: list[str]) -> None:
        words = [one.encode("utf-8", errors="surrogatepass") for one in arguments]
        command = [sys.executable, "-m", "jaxrl_post", *words]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=TIMEOUT_S)
        if done.returncode != 1:
            raise RuntimeError(f"exit code {done.returncode}")
        raise Refused(done.stderr.decode("utf-8", errors="replace"))

    def case(index, random):
        while True:
            arguments = [one.replace("\x00", "") for one in lines.drawn(random)]
            if lines.refused(arguments):
                return repr(arguments)[:300], functools.partial(spawn, arguments)

    return Kind(
        valid=lines.valid, case=case, own=_one_line, seconds=150.0, bounded=False
    )  # it loads all libraries first


def config(folder: Path) -> Kind:
    """A third are damaged Python, a third mappings, a third overrides, with values of every type for every option."""
    from jaxrl_post import config as configs
    from jaxrl_post.config import fields

    options, file = list(fields.options(configs.Config)), folder / "configured.py"
    sources = [(ROOT / "configs" / name).read_bytes() for name in CONFIGS]

    def read(source: bytes) -> Callable[[], object]:
        file.write_bytes(source)
        return lambda: configs.resolve(configs.load(str(file)))

    def put(name: str, value: object) -> None:
        given = configs.default().to_dict()
        where, _, leaf = name.rpartition(".")
        (given[where] if where else given)[leaf] = value
        configs.resolve(given)

    def case(index, random):
        if index < len(SPECIAL):
            return repr(SPECIAL[index][:60]), read(SPECIAL[index].encode("utf-8", errors="surrogateescape"))
        if index % 3 == 0:
            what, source = damaged(random, random.choice(sources))
            return what, read(source)
        option = random.choice(options)
        value = random.choice((*SCALARS, option.default, [option.default], {1: 2}, (), (1, None), b"a", object))
        if index % 3 == 1:
            return f"{option.name}={repr(value)[:60]}", lambda: put(option.name, value)
        text = f"{option.name}{random.choice(('', '.a', '.a.b', '[0]'))}={value}"
        return repr(text)[:100], lambda: configs.resolve(configs.default(), [text])

    return Kind(valid=read(sources[0]), case=case, names=(" ",))


class _Endpoint(http.server.BaseHTTPRequestHandler):
    """Sends the server's `body` to each question, and says that it is `length` bytes long."""

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", str(self.server.length))
        self.end_headers()
        self.wfile.write(self.server.body)

    def log_message(self, *given):
        pass


def judge(folder: Path) -> Kind:
    """A server on this machine sends a damaged reply to each question. Every fifth case damages the cache."""
    from jaxrl_post.rewards import judge as judges

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Endpoint)
    threading.Thread(target=server.serve_forever, daemon=True).start()

    def reply(body: bytes, more: int = 0) -> None:
        server.body, server.length = body, max(len(body) + more, 0)

    def ask(cache: str | None = None) -> None:
        url = f"http://127.0.0.1:{server.server_address[1]}/v1"
        asked = judges.Judge(url, model="m", question="{answer}", attempts=1, deadline_s=1.0, cache=cache)
        found = asked("source", "answer", "truth", {})
        assert isinstance(found, float) and math.isfinite(found) and 0.0 <= found <= 1.0

    def valid() -> None:
        reply(json.dumps(REPLY).encode())
        ask()

    def case(index, random):
        if index % 5:
            what, data = damaged_json(random, REPLY)
            reply(data, random.choice((0, 0, 0, -1, 5)))
            return what, ask
        reply(json.dumps(REPLY).encode())
        cache = folder / f"cache{index}"
        ask(str(cache))
        what, data = damaged_json(random, {"verdict": 0.5})
        next(cache.rglob("*.json")).write_bytes(data)
        return f"cache: {what}", lambda: ask(str(cache))

    def own(error: BaseException) -> bool:
        text = str(error)
        return type(error) is judges.Undecided and "judge" in text and "\n" not in text and len(text) < 2000

    return Kind(valid=valid, case=case, own=own)


def _refuse(text: str) -> None:
    raise ValueError(text)


def planted(folder: Path) -> Kind:
    """Case n has the outcome WANTED[n], which shows that the harness notices each kind of fault."""
    actions = (
        lambda: None,
        lambda: _refuse("planted: one sentence"),
        lambda: _refuse("planted: two\nlines"),
        lambda: {}["planted"],
        lambda: time.sleep(60),
        lambda: bytearray(2 << 30),
        os.abort,
        lambda: None,
    )
    return Kind(valid=lambda: None, case=lambda index, random: (WANTED[index], actions[index]), names=("planted",))


KINDS = {"command_line": command_line, "processes": processes, "config": config, "judge": judge, "planted": planted}
