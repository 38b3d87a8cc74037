"""Collects what a show or a bench measures: figures under stable keys, their bounds, and what later readers need.

A result names the commit, versions, flags and machine of its run, and a hash of every source file that it vouches for.
Finished work is kept under .cache/, by commit and circumstances, so that a killed show can go on.

Invariant: a figure is written once, is a plain JSON value, and its bound is written beside it. A tree with uncommitted
changes neither reads nor keeps finished work: a cached figure always belongs to the code that is there.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import math
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import sources

ROOT = Path(__file__).resolve().parents[1]
LIBRARIES = ("jax", "jaxlib", "flax", "optax", "numpy")
FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")  # recorded beside every JAX_* variable
PLACES = ("JAX_COMPILATION_CACHE_DIR",)  # their values are folders of one machine; only that they are set is recorded
DEVICES = "import json, jax; d = jax.devices(); print(json.dumps([d[0].platform, d[0].device_kind, len(d)]))"


class Missing(Exception):
    """Says in one sentence which real input is not there. The exit code is 2."""


class Record:
    """Collects the figures of one show or bench.

    Args:
      name: as on the command line. command: the whole command. args: what followed the name.
      root: of the project. file: the source of the show, from which the files it vouches for are found.
    """

    def __init__(
        self, name: str, command: Sequence[str], args: Sequence[str] = (), root: Path = ROOT, file: Path | None = None
    ):
        self.name, self.command, self.args, self.root = name, list(command), list(args), root
        self.figures: dict[str, Any] = {}
        self.bounds: dict[str, dict[str, Any]] = {}
        self.started = time.monotonic()
        self.flags = flags()
        self.commit = commit_of(root)
        self.sources = sources.hashes(root, sources.closure(root, file)) if file else {}

    def figure(
        self, key: str, value: Any, *, at_least: float | None = None, at_most: float | None = None, equals: Any = None
    ) -> Any:
        """Writes a figure with its bounds, both ends included, and returns it.

        A figure that is no number, or is nan, meets no numeric bound.

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
        """Whether every bound holds."""
        return all(bound["ok"] for bound in self.bounds.values())

    def data(self, *parts: str) -> Path:
        """Returns a path below the folder of real inputs: JAXRL_DATA, else ../shared/data.

        Raises:
          Missing: nothing is there.
        """
        path = Path(os.environ.get("JAXRL_DATA", self.root.parent / "shared" / "data")).joinpath(*parts)
        if not path.exists():
            raise Missing(f"{self.name}: real input {path} is missing; set JAXRL_DATA to the folder that holds it")
        return path

    def cached(self, key: str, work: Callable[[], Any]) -> Any:
        """Returns `work()`, a JSON value, or what it returned before under the same key and circumstances.

        Circumstances are commit, arguments, versions, flags and machine. On a tree with uncommitted changes the work is
        always done, and its result is not kept.
        """
        commit = commit_of(self.root)
        if commit["dirty"]:
            return plain(work())
        told = json.dumps(self._circumstances, sort_keys=True)
        folder = self.root / ".cache" / "shows" / commit["commit"] / hashlib.sha256(told.encode()).hexdigest()[:16]
        file = folder / self.name / f"{key}.json"
        if not file.is_file():
            value = plain(work())
            file.parent.mkdir(parents=True, exist_ok=True)
            write_json(folder / "circumstances.json", self._circumstances)
            write_json(file, value)
        return json.loads(file.read_text())

    @functools.cached_property
    def _circumstances(self) -> dict[str, Any]:
        return {"versions": versions(), "flags": self.flags, "machine": machine(), "args": self.args}

    def run(self, *arguments: str, timeout_s: float, env: Mapping[str, str] | None = None) -> float:
        """Runs `python *arguments` in the root of the project, with `env` added, and returns its seconds.

        Prints the output only if the command fails, or at once where JAXRL_SHOW_OUTPUT is set.

        Raises:
          RuntimeError: the exit code is not 0. subprocess.TimeoutExpired: it took longer than `timeout_s`.
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

    def said(
        self,
        *arguments: str | Path,
        timeout_s: float,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        python: str | Path = sys.executable,
    ) -> str:
        """Returns what `python *arguments` prints, in the root of the project or in `cwd`, with `env` added.

        Raises:
          RuntimeError: the exit code is not 0. subprocess.TimeoutExpired: it took longer than `timeout_s`.
        """
        command, env = [str(one) for one in (python, *arguments)], {**os.environ, **(env or {})}
        done = subprocess.run(command, cwd=cwd or self.root, env=env, timeout=timeout_s, text=True, capture_output=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} exited {done.returncode}:\n{(done.stdout + done.stderr)[-4000:]}")
        return done.stdout

    def passed(self, file: str, selection: str, timeout_s: float = 900, env: Mapping[str, str] | None = None) -> int:
        """Counts the tests of `file` that pytest's `-k selection` chooses and that pass. Skipped ones do not count."""
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.xml"
            pytest = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
            self.run(*pytest, f"--junitxml={report}", file, "-k", selection, timeout_s=timeout_s, env=env)
            cases = list(ElementTree.parse(report).iter("testcase"))
        return sum(not {"failure", "error", "skipped"} & {child.tag for child in case} for case in cases)

    def planted(self, file: str, count: int) -> None:
        """Writes the figure `planted_faults_caught`: the passing tests of `file` with "planted" in their name.

        Each of those tests plants a fault and passes only if an equality breaks. All `count` of them must.
        """
        self.figure("planted_faults_caught", self.passed(file, "planted"), equals=count)

    @property
    def options(self) -> dict[str, str]:
        """The arguments as name -> value.

        Raises:
          ValueError: an argument is not of the form --name=value.
        """
        for argument in self.args:
            if not argument.startswith("--") or "=" not in argument:
                raise ValueError(f"{self.name}: argument {argument!r} is not of the form --name=value")
        return dict(argument.removeprefix("--").split("=", 1) for argument in self.args)

    def to_dict(self) -> dict:
        """Returns the object that is written. A file edited during the run keeps the hash that it began with."""
        moved = self.commit != commit_of(self.root)
        return {
            "name": self.name,
            "command": self.command,
            "versions": versions(),
            "flags": self.flags,
            "machine": machine(),
            "device": device(self.root),
            "commit": self.commit["commit"],
            "dirty": self.commit["dirty"] or moved,
            "seconds": round(time.monotonic() - self.started, 3),
            "figures": self.figures,
            "bounds": self.bounds,
            "ok": self.ok,
            "sources": dict(sorted({**self._loaded(), **self.sources}.items())),
        }

    def _loaded(self) -> dict[str, str]:
        """Hashes of the modules of this project that the process has loaded, for those that no source names."""
        if not self.sources:
            return {}
        root = self.root.resolve()
        files = [Path(module.__file__).resolve() for module in list(sys.modules.values()) if _has_file(module)]
        inside = (file.relative_to(root) for file in files if file.is_relative_to(root))
        frame = {"scripts/show.py", "scripts/bench.py", "scripts/record.py", "scripts/sources.py"}
        wanted = (path.as_posix() for path in inside if not path.parts[0].startswith("."))
        return sources.hashes(root, (path for path in wanted if path not in frame | self.sources.keys()))

    def table(self) -> str:
        """Returns one line per figure: name, value, bound, ok or FAIL."""
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


def _has_file(module: Any) -> bool:
    file = getattr(module, "__file__", None)
    return isinstance(file, str) and file.endswith(".py")


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
    """Returns the value as JSON has it: scalars of numpy and jax become numbers, arrays and tuples become lists."""
    if isinstance(value, Mapping):
        return {str(key): plain(member) for key, member in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(member) for member in value]
    return value.tolist() if hasattr(value, "tolist") else value


def write_json(file: Path, value: Any) -> None:
    """Writes the whole file or none of it, also where the process is killed meanwhile."""
    part = file.with_name(f"{file.name}.{os.getpid()}.part")
    part.write_text(json.dumps(value, indent=1) + "\n")
    part.replace(file)


def versions() -> dict[str, str]:
    """Python's and the libraries' versions."""
    return {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in LIBRARIES}}


def flags() -> dict[str, str]:
    """The environment variables that change what XLA compiles or what jax computes."""
    names = sorted(name for name in os.environ if name in FLAGS or name.startswith("JAX_"))
    return {name: "set" if name in PLACES else os.environ[name] for name in names}


def machine() -> dict[str, Any]:
    """The model of the CPU, its cores, the memory in GiB, and how many accelerators the system lists."""
    listed = Path("/proc/cpuinfo")
    models = re.findall(r"^model name\s*:\s*(.+)$", listed.read_text(), re.M) if listed.is_file() else []
    accelerators = [*Path("/dev").glob("nvidia[0-9]*"), *Path("/dev").glob("accel[0-9]*")]
    return {
        "cpu": models[0] if models else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30),
        "accelerators": len(accelerators),
    }


def device(root: Path) -> dict[str, Any]:
    """What jax sees. A process that has not loaded jax asks another process, and so holds no accelerator itself."""
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
    """Returns {"commit", "dirty"}. Results of shows make no tree dirty. Without git the commit is None, and dirty."""

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
