"""What a show or a bench writes: figures under stable keys, their bounds, and everything needed to read them later.

Invariant: a figure is written once, is a plain JSON value, and its bound is written beside it. Finished work is kept by
commit under .cache/, and never on a tree with uncommitted changes: a cached figure always belongs to the code that is
there.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
LIBRARIES = ("jax", "jaxlib", "flax", "optax", "numpy")
DEVICES = "import json, jax; d = jax.devices(); print(json.dumps([d[0].platform, d[0].device_kind, len(d)]))"


class Missing(Exception):
    """Real inputs are not there: the message is the one sentence to print; exit code 2."""


class Record:
    """Collects the figures of one named show or bench. `args`: what followed the name on the command line."""

    def __init__(self, name: str, command: Sequence[str], args: Sequence[str] = (), root: Path = ROOT):
        self.name, self.command, self.args, self.root = name, list(command), list(args), root
        self.figures: dict[str, Any] = {}
        self.bounds: dict[str, dict[str, Any]] = {}
        self.started = time.monotonic()

    def figure(
        self, key: str, value: Any, *, at_least: float | None = None, at_most: float | None = None, equals: Any = None
    ) -> Any:
        """Writes a figure, with its bounds if it has any (both ends included), and returns it. A figure that is not a
        number, or is nan, meets no numeric bound.

        Raises:
          ValueError: the key was written before.
        """
        if key in self.figures:
            raise ValueError(f"{self.name}: figure {key!r} was written before, with value {self.figures[key]!r}")
        value = plain(value)
        self.figures[key] = value
        bounds = {
            kind: plain(bound)
            for kind, bound in (("at_least", at_least), ("at_most", at_most), ("equals", equals))
            if bound is not None
        }
        if bounds:
            self.bounds[key] = {**bounds, "ok": all(_within(value, kind, bound) for kind, bound in bounds.items())}
        return value

    @property
    def ok(self) -> bool:
        """Every bound holds."""
        return all(bound["ok"] for bound in self.bounds.values())

    def data(self, *parts: str) -> Path:
        """A path below the folder of real inputs (JAXRL_DATA, else ../shared/data); Missing when it is not there."""
        path = Path(os.environ.get("JAXRL_DATA", self.root.parent / "shared" / "data")).joinpath(*parts)
        if not path.exists():
            raise Missing(f"{self.name}: real input {path} is missing; set JAXRL_DATA to the folder that holds it")
        return path

    def cached(self, key: str, work: Callable[[], Any]) -> Any:
        """`work()`, a JSON value; finished work of this commit and key is not done again. On a tree with uncommitted
        changes nothing is read or kept."""
        commit = commit_of(self.root)
        if commit["dirty"]:
            return plain(work())
        file = self.root / ".cache" / "shows" / commit["commit"] / self.name / f"{key}.json"
        if not file.is_file():
            value = plain(work())
            file.parent.mkdir(parents=True, exist_ok=True)
            write_json(file, value)
        return json.loads(file.read_text())

    def run(self, *arguments: str, timeout_s: float, env: Mapping[str, str] | None = None) -> float:
        """Runs `python *arguments` in the root of the project, with `env` added, and returns its seconds. Its output is
        shown only when it fails, or at once with JAXRL_SHOW_OUTPUT set.

        Raises:
          RuntimeError: another exit code than 0. subprocess.TimeoutExpired: over `timeout_s`.
        """
        start = time.monotonic()
        loud = bool(os.environ.get("JAXRL_SHOW_OUTPUT"))
        done = subprocess.run(
            [sys.executable, *map(str, arguments)],
            cwd=self.root,
            env={**os.environ, **(env or {})},
            timeout=timeout_s,
            text=True,
            stdout=None if loud else subprocess.PIPE,
            stderr=None if loud else subprocess.STDOUT,
        )
        if done.returncode:
            raise RuntimeError(
                f"python {' '.join(map(str, arguments))} exited {done.returncode}:\n{(done.stdout or '')[-4000:]}"
            )
        return time.monotonic() - start

    def passed(self, file: str, selection: str, timeout_s: float = 900) -> int:
        """How many tests of `file` that the selection (pytest's -k) names pass; neither skipped nor failing ones count."""
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.xml"
            self.run(
                "-m",
                "pytest",
                "-q",
                "-p",
                "no:cacheprovider",
                "-p",
                "no:xdist",
                f"--junitxml={report}",
                file,
                "-k",
                selection,
                timeout_s=timeout_s,
            )
            cases = list(ElementTree.parse(report).iter("testcase"))
        return sum(not {"failure", "error", "skipped"} & {child.tag for child in case} for case in cases)

    def planted(self, file: str, count: int) -> None:
        """Figure `planted_faults_caught`: tests of `file` with "planted" in their name, each of which plants a fault and
        passes only when an equality breaks, that passed; all `count` of them must."""
        self.figure("planted_faults_caught", self.passed(file, "planted"), equals=count)

    @property
    def options(self) -> dict[str, str]:
        """The arguments, each --name=value.

        Raises:
          ValueError: one that is not of this form.
        """
        for argument in self.args:
            if not argument.startswith("--") or "=" not in argument:
                raise ValueError(f"{self.name}: argument {argument!r} is not of the form --name=value")
        return dict(argument.removeprefix("--").split("=", 1) for argument in self.args)

    def to_dict(self) -> dict:
        """The object that is written: name, command, versions, device, commit, seconds, figures, bounds, ok."""
        return {
            "name": self.name,
            "command": self.command,
            "versions": versions(),
            "device": device(self.root),
            **commit_of(self.root),
            "seconds": round(time.monotonic() - self.started, 3),
            "figures": self.figures,
            "bounds": self.bounds,
            "ok": self.ok,
        }

    def table(self) -> str:
        """One line per figure: name, value, bound, ok or FAIL."""
        rows = [("figure", "value", "bound", "")]
        for key, value in self.figures.items():
            bound = self.bounds.get(key, {})
            text = " and ".join(
                f"{sign} {_short(bound[kind])}"
                for kind, sign in (("at_least", ">="), ("at_most", "<="), ("equals", "="))
                if kind in bound
            )
            rows.append((key, _short(value), text, ("ok" if bound["ok"] else "FAIL") if bound else ""))
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)


def _within(value: Any, kind: str, bound: Any) -> bool:
    if kind == "equals":
        return value == bound
    if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value):
        return False
    return value >= bound if kind == "at_least" else value <= bound


def _short(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 48 else f"{text[:45]}..."


def plain(value: Any) -> Any:
    """A JSON value of it: numpy and jax scalars become numbers, arrays and tuples lists."""
    if isinstance(value, Mapping):
        return {str(key): plain(member) for key, member in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(member) for member in value]
    return value.tolist() if hasattr(value, "tolist") else value


def write_json(file: Path, value: Any) -> None:
    """All or nothing: a reader, or a run that is killed, never leaves half a file."""
    part = file.with_name(f"{file.name}.{os.getpid()}.part")
    part.write_text(json.dumps(value, indent=1) + "\n")
    part.replace(file)


def versions() -> dict[str, str]:
    return {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in LIBRARIES}}


def device(root: Path) -> dict[str, Any]:
    """What jax sees. Where this process has not loaded jax it asks another one, and holds no accelerator itself."""
    if "jax" in sys.modules:
        devices = sys.modules["jax"].devices()
        seen = [devices[0].platform, devices[0].device_kind, len(devices)]
    else:
        seen = json.loads(
            subprocess.run(
                [sys.executable, "-c", DEVICES], cwd=root, text=True, check=True, stdout=subprocess.PIPE
            ).stdout
        )
    return {**dict(zip(("platform", "kind", "count"), seen)), "host": platform.machine(), "cores": os.cpu_count()}


def commit_of(root: Path) -> dict[str, Any]:
    """{"commit", "dirty"}; results of shows do not make a tree dirty. Without git: commit None, dirty."""

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", *arguments], cwd=root, text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
        except FileNotFoundError:
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    commit = git("rev-parse", "HEAD")
    changes = git("status", "--porcelain", "--", ".", ":(exclude)scripts/results")
    return {"commit": commit, "dirty": commit is None or changes != ""}
