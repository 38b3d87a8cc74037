"""Everything that only a GPU can show, in one command of under ten minutes: `python scripts/gpu_check.py [--json FILE]`.

`--only NAME,NAME` runs some sections. What they wait for (`after`) must have finished, or be among them. `--show FILE`
runs nothing and prints the table of an earlier result.

Sections (scripts/gpu/sections.py) run one after another, each in a process of its own. The plan of half an hour, three
calls, comes first, and then the rest. A section that raises, crashes or hangs is named in `failed` with the end of
what it wrote, and the others still run. What time does not reach is named in `not_reached`. A call that is killed loses
at most the figure at which it was, and what it had begun ends with it.

The table has each figure beside the expected one (scripts/gpu/expected.py) and its bound.

FILE (scripts/results/gpu-check.json unless given) is written after every figure. A later call takes from it what is
finished, if commit, sources, device, versions and flags are the same, and goes on with the rest. Failed sections come
again last. With anything else in it, FILE begins anew. The object has the shape of a show's result (scripts/record.py).

Compiled programs are kept in .cache/gpu_check, unless JAX_COMPILATION_CACHE_DIR names a folder.

Exit codes:
- 0: every bound holds, also where something was not reached
- 1: a bound is missed, or a section failed
- 2: there is no NVIDIA GPU of compute capability 9.0 or later
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu import device, expected, held
from gpu.sections import GPU, Profile, Section
from record import ROOT, Record, flags, machine, versions, write_json

DEADLINE_S = 560.0
CHILD = GPU.child
RESULTS = ROOT / "scripts" / "results"  # alone, as a result that is written is no source of itself
MARGIN_S = 8.0  # within which the work that a section has begun should end
TAIL = 2000  # characters of what a failed section wrote
SMALL = "sizes of a CPU, kernels interpreted or plain jnp: no figure is a measurement"


@dataclass
class Found:
    """What is known of one section. `state`: finished, unfinished or failed. `begun`: how often its process began."""

    state: str = "unfinished"
    begun: int = 0
    seconds: float = 0.0
    error: str = ""
    figures: dict[str, Any] = field(default_factory=dict)
    bounds: dict[str, Any] = field(default_factory=dict)
    not_reached: list[str] = field(default_factory=list)

    def take(self, part: Path) -> bool:
        """Takes what the section has written by now. Returns whether it is news."""
        if not part.is_file():
            return False
        told = json.loads(part.read_text())
        news = any(getattr(self, name) != told[name] for name in told)
        self.figures, self.bounds, self.not_reached = told["figures"], told["bounds"], told["not_reached"]
        return news


class Report:
    """The file of results, and what it belongs to. `small`: it runs at sizes of a CPU."""

    def __init__(
        self,
        file: Path,
        command: Sequence[str],
        seen: dict[str, Any],
        table: Sequence[Section] = GPU.table,
        small: bool = False,
        profile: Profile = GPU,
    ):
        self._file, self._table = file, table
        self.record = Record(profile.result, command, file=profile.file)
        self._left_out = dict(profile.left_out)
        self._belongs = {
            **self.record.commit,
            "versions": versions(),
            "flags": flags(),
            "device": seen,
            "sources": self.record.sources,
            **profile.belongs,
            **({"small": SMALL} if small else {}),
        }
        self.small = small
        self.sections: dict[str, Found] = {}
        self._before = 0.0
        self._resume()

    def _resume(self) -> None:
        if not self._file.is_file():
            self._file.parent.mkdir(parents=True, exist_ok=True)
            return
        try:
            told = json.loads(self._file.read_text())
        except ValueError as error:
            print(f"{self._file.name} is no JSON ({error}): all sections run anew", flush=True)
            return
        other = [name for name, value in self._belongs.items() if told.get(name) != value]
        if other:
            print(f"{self._file.name} belongs to another {', '.join(other)}: all sections run anew", flush=True)
            return
        self._before = told["seconds"]
        for name, about in told["sections"].items():
            figures = {key: told["figures"][key] for key in about["figures"]}
            bounds = {key: told["bounds"][key] for key in about["figures"] if key in told["bounds"]}
            self.sections[name] = Found(**about | {"figures": figures, "bounds": bounds})

    def state(self, name: str) -> str:
        """Returns the state of a section, or an empty text where it has not begun."""
        return self.sections[name].state if name in self.sections else ""

    def told(self) -> dict[str, Any]:
        return {key: value for found in self.sections.values() for key, value in found.figures.items()}

    def not_reached(self) -> list[str]:
        """Returns sections, or figures of those that have begun, which another call would add."""
        out: list[str] = []
        for section in self._table:
            if self.state(section.name) == "":
                out.append(section.name)
            elif self.state(section.name) == "unfinished":
                out += self.sections[section.name].not_reached or [section.name]
        return out

    def write(self) -> None:
        record = self.record
        record.figures, record.bounds = self.told(), {}
        for found in self.sections.values():
            record.bounds |= found.bounds
        record.figure("failed", [name for name in self.sections if self.state(name) == "failed"], equals=[])
        record.figure("not_reached", self.not_reached())
        own = {"name": record.name, "command": record.command, "machine": machine()}
        own |= {"left_out": self._left_out} if self._left_out else {}
        seconds = round(self._before + time.monotonic() - record.started, 1)
        sections = {
            name: dataclasses.asdict(found) | {"figures": list(found.figures), "bounds": {}}
            for name, found in self.sections.items()
        }
        found = {"seconds": seconds, "figures": record.figures, "bounds": record.bounds, "ok": record.ok}
        write_json(self._file, own | self._belongs | found | {"sections": sections})


def order(report: Report, table: Sequence[Section]) -> list[Section]:
    """Returns what is to be run: the table's order, but failed sections last unless another one waits for them."""
    needed = {section.after for section in table}

    def late(section: Section) -> bool:
        return report.state(section.name) == "failed" and section.name not in needed

    return sorted((one for one in table if report.state(one.name) != "finished"), key=late)


def check(report: Report, table: Sequence[Section], seconds: float, child: Path = CHILD) -> None:
    """Runs every section that is not finished and that the seconds reach."""
    end = time.monotonic() + seconds
    for section in order(report, table):
        left = end - time.monotonic()
        if left < section.needs_s or (section.after and report.state(section.after) != "finished"):
            continue
        begun = time.monotonic()
        found = attempt(report, section, min(section.limit_s, left), child)
        found.seconds = round(time.monotonic() - begun, 1)
        report.write()
        print(f"{section.name}: {found.state} in {found.seconds} s {found.error}", flush=True)


def attempt(report: Report, section: Section, allowed: float, child: Path) -> Found:
    """Runs a section in a process of its own, which is killed after the allowed seconds."""
    earlier = report.sections.get(section.name)
    others = {
        key: value
        for name, one in report.sections.items()
        if name != section.name
        for key, value in one.figures.items()
    }
    found = report.sections[section.name] = Found(begun=earlier.begun + 1 if earlier else 1)
    with tempfile.TemporaryDirectory() as folder:
        part, told, said = (Path(folder) / name for name in ("part.json", "told.json", "said.txt"))
        told.write_text(json.dumps(others))
        if earlier and earlier.state == "unfinished":
            write_json(part, {"figures": earlier.figures, "bounds": earlier.bounds, "not_reached": []})
            found.take(part)
        report.write()
        command = [sys.executable, str(child), section.name, str(part), str(told), str(allowed - MARGIN_S)]
        command += ["small"] * report.small
        code = watched(report, found, command, part, said, allowed, environment(section.flags))
        text = scrubbed(said.read_text(errors="replace"))
    if code == 0:
        found.state = "unfinished" if found.not_reached else "finished"
    elif code is not None or allowed >= section.limit_s:
        why = f"took more than {allowed:.0f} s" if code is None else f"exit code {code}"
        found.state, found.error = "failed", f"{why}: {text[-TAIL:].strip()}"
    if section.option and found.state == "failed":
        found.figures[f"{section.name}.absent"] = f"{why}: {(text.strip().splitlines() or [''])[-1]}"
        found.state, found.error = "finished", ""
    return found


def watched(
    report: Report, found: Found, command: list[str], part: Path, said: Path, allowed: float, env: dict[str, str]
) -> int | None:
    """Runs a command and takes its figures as they come. Returns its exit code, or None where it had to be killed."""
    end = time.monotonic() + allowed
    with open(said, "w") as out, held.pipe() as pipe:
        env, apart = env | {held.VARIABLE: str(pipe)}, {"process_group": 0, "pass_fds": [pipe]}
        # A group and no session of its own: whoever ends this process's session ends the section too.
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=out, stderr=out, **apart)
        try:
            while process.poll() is None and time.monotonic() < end:
                time.sleep(0.1)
                if found.take(part):
                    report.write()
            code = process.poll()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with all that it started
            process.wait(timeout=30)
    found.take(part)
    return code


def environment(more: str = "") -> dict[str, str]:
    """Returns the variables of a section's process, with more flags of XLA. This checkout comes first on its path."""
    here = [str(ROOT), str(ROOT / "scripts"), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    path = os.pathsep.join(filter(None, here))
    xla = " ".join(filter(None, (os.environ.get("XLA_FLAGS", ""), more)))
    last = {"PYTHONPATH": path, "JAX_TRACEBACK_FILTERING": "off"}  # so that the last line names the error
    return {**os.environ, **last, **({"XLA_FLAGS": xla} if xla else {})}


def scrubbed(text: str) -> str:
    """Returns the text without the folders of this machine."""
    return text.replace(f"{ROOT}/", "").replace(sys.prefix, "ENVIRONMENT")


def settings(profile: Profile = GPU) -> None:
    """Sets variables that the sections' processes inherit, unless they are set."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")  # pages of 256 long rollouts need most of it
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".cache" / profile.name))


def main(
    argv: list[str], table: Sequence[Section] | None = None, child: Path | None = None, profile: Profile = GPU
) -> int:
    """Runs a profile's sections, or `table`, whose processes run the script `child`, and returns the exit code."""
    began, table, child = time.monotonic(), table or profile.table, child or profile.child
    options = arguments(argv, table, profile)
    if options.show:
        told = json.loads(options.show.read_text())
        print(expected.page(told, profile.expected(told["device"]["kind"], told["figures"])))
        return 0
    names = [name for name in options.only.split(",") if name] or [section.name for section in table]
    chosen = [section for section in table if section.name in names]
    settings(profile)
    seen = device.ask(ROOT)
    refusal = "" if options.small else profile.why_not(seen)
    if refusal:
        print(refusal, file=sys.stderr)
        return 2
    command = ["python", f"scripts/{profile.name}.py", *argv]
    report = Report(options.json, command, seen, table, options.small, profile)
    report.write()
    check(report, chosen, options.seconds - (time.monotonic() - began), child)
    known = profile.expected(seen["kind"], report.record.figures)
    print(expected.table(report.record.figures, report.record.bounds, known), flush=True)
    return 0 if report.record.ok else 1


def arguments(argv: list[str], table: Sequence[Section], profile: Profile) -> argparse.Namespace:
    """Reads the command line. What it refuses ends the process with exit code 2."""
    parser = argparse.ArgumentParser(description=profile.about)
    parser.add_argument("--json", type=Path, default=RESULTS / f"{profile.result}.json")
    parser.add_argument("--show", type=Path, metavar="FILE", help="prints the table of this result, and runs nothing")
    parser.add_argument("--small", action="store_true", help=argparse.SUPPRESS)  # of a show and of tests, on a CPU
    parser.add_argument(
        "--only", default="", help="names of sections, with commas between; the others stay as they are"
    )
    parser.add_argument("--seconds", type=float, default=DEADLINE_S, help="after which nothing runs any more")
    options = parser.parse_args(argv)
    if options.show and not options.show.is_file():
        parser.error(f"--show: there is no file {options.show}")
    if options.small and not options.show and options.json == parser.get_default("json"):
        parser.error("--small is no measurement: name another file by --json")
    every = [section.name for section in table]
    if unknown := {name for name in options.only.split(",") if name} - {*every}:
        parser.error(f"--only: there is no section {', '.join(sorted(unknown))}; all are {', '.join(every)}")
    return options


def end_with_sections() -> None:
    """From now on SIGTERM ends a section's process with this one."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


if __name__ == "__main__":
    end_with_sections()
    sys.exit(main(sys.argv[1:]))
