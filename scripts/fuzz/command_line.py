"""Command lines of runs, simulations and other commands, through the function that the shell's command calls."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from unittest import mock

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
    *(
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
    ),
    *(
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
    ),
    *("(1, 'a')", "[None]", "1_000", "0x10", "1j", "b'a'", "...", "-" * 3000 + "1", "/", "/dev/null", "/dev/zero", "."),
    *("task:", "task:sums", "task:x", "configs", "{'shortest': None}", "lambda: 1", "__import__('os')", "10**10**10"),
)


class Started(BaseException):
    """The command line was accepted: the work would begin here."""


class Refused(Exception):
    """The command ended with an exit code that is not 0. Its text is what was written to the terminal."""


def _start(*given, **named):
    raise Started


class Cases:
    """`own` asks for one line that begins with "error: "."""

    def __init__(self, folder: Path):
        from jaxrl_post import __main__, config, simulate
        from jaxrl_post.config import fields
        from jaxrl_post.launch import assemble

        self._folder, self._main = folder, __main__.main
        self._replaced = ((assemble, "planned"), (simulate, "report"))
        options = [option.name for option in fields.options(config.Config) if option.name not in UNBOUNDED]
        self._options = [*options, "data.task.shortest", "data.task.usual", "data.columns.prompt", "data.columns.id"]
        rows = ({"id": str(i), "prompt": f"{i}+1=", "answer": "1"} for i in range(9))
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def valid(self) -> None:
        for arguments in VALID:
            self._run([argument.replace("FOLDER", str(self._folder)) for argument in arguments])

    def own(self, error: BaseException) -> bool:
        lines = str(error).splitlines()
        return type(error) is Refused and len(lines) == 1 and lines[0].startswith("error: ") and len(lines[0]) < 2000

    def case(self, index, random):
        arguments = self.arguments(random)
        return repr(arguments)[:300], lambda: self._run(arguments)

    def arguments(self, random) -> list[str]:
        """Returns a command line with one to three faults."""
        out = [argument.replace("FOLDER", str(self._folder)) for argument in random.choice(VALID)]
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
                out.insert(at + 1, random.choice(("--", "-h", "--help", "help", "", "--config", "--resume=", *VALUES)))
            else:
                name = random.choice(self._options)
                name = name[:-1] if kind == "name" else name
                out.append(f"--config.{name}={random.choice(VALUES)}")
        return out

    def _run(self, arguments) -> None:
        said = io.StringIO()
        with contextlib.ExitStack() as stack:
            for owner, name in self._replaced:
                stack.enter_context(mock.patch.object(owner, name, _start))
            stack.enter_context(contextlib.redirect_stderr(said))
            stack.enter_context(contextlib.redirect_stdout(io.TextIOWrapper(io.BytesIO(), encoding="utf-8")))
            with contextlib.suppress(Started):
                if self._main(arguments):
                    raise Refused(said.getvalue())
