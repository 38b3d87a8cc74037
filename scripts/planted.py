"""Plants faults, one at a time, in a copy of the tree, and says which test catches each.

    python scripts/planted.py [--only NAME] ... [--list] [--workers N] [--limit-s SECONDS]

The faults are those of scripts/faults/*.txt. A name is a room (`engine`), a file of it (`row_plan`) or the id of one fault
(`row_plan.floor_for_ceil`). Every worker has a copy of the tree; a fault is planted in it, the tests that are named with
the fault are run, and the file is put back. Before that all these tests must pass in the untouched copy. A test that hangs for
`--limit-s` seconds has caught its fault, by the clock.

Exit codes: 0 every fault was caught; 1 one survived, could not be planted, or a test fails without a fault; 2 no such name.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from faults.fault import Fault, Mismatch, plant, read

ROOT = Path(__file__).resolve().parents[1]
PYTEST = ("-m", "pytest", "-x", "-q", "--tb=line", "--no-header", "-p", "no:cacheprovider", "-p", "no:xdist")
VERDICTS = ("caught", "survived", "not planted")
FAILED = re.compile(r"^(?:FAILED|ERROR) (?:tests/)?(\S+)", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Of one fault. `verdict`: caught, survived or not planted; `by`: the test, the clock, or why not."""

    fault: Fault
    verdict: str
    by: str
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.verdict:<11}  {self.seconds:6.1f} s  {self.fault.id:<44}  {self.by}"


class Red(Exception):
    """Tests fail without a fault; the message is what they said."""


def known(folder: Path = ROOT / "scripts" / "faults") -> list[Fault]:
    return [fault for path in sorted(folder.glob("*.txt")) for fault in read(path)]


def chosen(faults: Sequence[Fault], only: Sequence[str]) -> list[Fault]:
    """Those that one of the names stands for; all where there is no name.

    Raises:
      KeyError: a name stands for none.
    """
    for name in only:
        if not any(_stands_for(name, fault) for fault in faults):
            raise KeyError(name)
    return [fault for fault in faults if not only or any(_stands_for(name, fault) for name in only)]


def _stands_for(name: str, fault: Fault) -> bool:
    return name in (fault.room, fault.id, fault.id.partition(".")[0])


class Selection:
    """Names of tests as pytest wants them: a file, or a function in whichever file of tests/ it lies, or `file::function`."""

    def __init__(self, root: Path):
        self._files = {path.name for path in (root / "tests").glob("test_*.py")}
        self._homes: dict[str, list[str]] = {}
        for name in sorted(self._files):
            for node in ast.parse((root / "tests" / name).read_text(encoding="utf-8")).body:
                if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                    self._homes.setdefault(node.name, []).append(name)

    def ids(self, fault: Fault) -> list[str]:
        """For pytest's command line.

        Raises:
          Mismatch: there is no such test.
        """
        out = []
        for test in fault.tests:
            file, _, function = test.rpartition("::")
            homes = self._homes.get(function.partition("[")[0], [])
            if test in self._files or file in homes:
                out.append(f"tests/{test}")
            elif homes:  # of no file, or of one that it has left
                out += [f"tests/{home}::{function}" for home in homes]
            else:
                raise Mismatch(f"{fault.id}: there is no test {test!r}")
        return out


class Worker:
    """A copy of the tree in which one fault at a time is planted."""

    def __init__(self, root: Path, copy: Path, number: int):
        self._copy, self._planted = copy, 0
        for name in listed(root):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, copy / name)
        cache = os.environ.get("JAX_COMPILATION_CACHE_DIR", str(root / ".cache" / "jax"))
        data = os.environ.get("JAXRL_DATA", str(root.parent / "shared" / "data"))
        path = os.pathsep.join([str(copy / "scripts"), *filter(None, [os.environ.get("PYTHONPATH")])])
        bytecode = str(copy.parent / "bytecode")  # of libraries too, which a run would else compile anew
        self._env = os.environ | {
            "JAX_COMPILATION_CACHE_DIR": cache,
            "JAXRL_DATA": data,
            "PYTHONPATH": path,
            "PYTHONPYCACHEPREFIX": bytecode,
        }
        self._env.pop("PYTHONDONTWRITEBYTECODE", None)

    def run(self, ids: Sequence[str], limit_s: float) -> tuple[int | None, str]:
        """Exit code of pytest, None over the limit, and what it said."""
        with tempfile.TemporaryFile("w+") as said:
            process = subprocess.Popen(
                [sys.executable, *PYTEST, "-p", "faults.unshrunk", *ids],
                cwd=self._copy,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            said.seek(0)
            return code, said.read()

    def tried(self, fault: Fault, ids: Sequence[str], limit_s: float) -> Outcome:
        """Plants it, runs its tests, takes it out."""
        path, begun = self._copy / fault.file, time.monotonic()
        source, stat = path.read_bytes(), path.stat()
        path.write_text(plant(self._copy, fault), encoding="utf-8")
        # Python knows compiled code by time and size of its source: every fault has a time of its own.
        self._planted += 1
        os.utime(path, (stat.st_atime, stat.st_mtime + 10 * self._planted))
        try:
            code, said = self.run(ids, limit_s)
        finally:
            path.write_bytes(source)
            os.utime(path, (stat.st_atime, stat.st_mtime))
        verdict, by = _verdict(code, said, limit_s)
        return Outcome(fault=fault, verdict=verdict, by=by, seconds=time.monotonic() - begun)


def listed(root: Path) -> list[str]:
    """Returns the files that git tracks or would; without git those of the folders that tests need."""
    asked = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    done = subprocess.run(asked, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    if done.returncode == 0:
        names = [name for name in done.stdout.split("\0") if name]
    else:
        names = [path.relative_to(root).as_posix() for path in root.rglob("*") if "__pycache__" not in path.parts]
    return [name for name in names if (root / name).is_file()]


def _verdict(code: int | None, said: str, limit_s: float) -> tuple[str, str]:
    found = FAILED.search(said)
    if code is None:
        return "caught", f"the clock: no end after {limit_s:g} s"
    if code == 0:
        return "survived", said.strip().splitlines()[-1]
    if found:
        return "caught", found[1]
    if code == 1 or code < 0:
        return "caught", f"exit code {code}"
    return "not planted", f"pytest ended with {code}: {said[-400:]}"


def sound(workers: Sequence[Worker], ids: Sequence[str], limit_s: float) -> None:
    """Every test that is named passes where nothing is planted.

    Raises:
      Red: one does not.
    """
    files = sorted({id.partition("::")[0] for id in ids})
    whole = {id for id in ids if "::" not in id}
    shares = [
        [id for id in sorted(set(ids)) if id.partition("::")[0] in files[n :: len(workers)]]
        for n in range(len(workers))
    ]
    shares = [[id for id in share if id in whole or id.partition("::")[0] not in whole] for share in shares]
    with ThreadPoolExecutor(len(workers)) as pool:
        runs = pool.map(lambda pair: pair[0].run(pair[1], limit_s) if pair[1] else (0, ""), zip(workers, shares))
        for code, said in runs:
            if code != 0:
                raise Red(f"a test fails though nothing is planted (exit code {code}):\n{said[-4000:]}")


def tried(
    faults: Sequence[Fault], *, root: Path = ROOT, workers: int = 2, limit_s: float = 300.0, checked: bool = True
) -> list[Outcome]:
    """What became of each fault, in order; one line is printed for each.

    Raises:
      Red: as `sound`.
    """
    ids, out = {}, {}
    selection = Selection(root)
    for fault in faults:
        try:
            ids[fault.id] = selection.ids(fault)
            plant(root, fault)
        except Mismatch as mismatch:
            out[fault.id] = Outcome(fault=fault, verdict="not planted", by=str(mismatch))
            print(out[fault.id], flush=True)
    left = [fault for fault in faults if fault.id not in out]
    with tempfile.TemporaryDirectory() as folder:
        team = [Worker(root, Path(folder) / f"copy_{n}", n) for n in range(workers)]
        if checked and left:
            begun = time.monotonic()
            sound(team, [id for fault in left for id in ids[fault.id]], 10 * limit_s)
            print(f"without a fault all tests pass: {time.monotonic() - begun:.0f} s", flush=True)
        free: SimpleQueue[Worker] = SimpleQueue()
        for worker in team:
            free.put(worker)

        def one(fault: Fault) -> Outcome:
            worker = free.get()
            try:
                outcome = worker.tried(fault, ids[fault.id], limit_s)
            finally:
                free.put(worker)
            print(outcome, flush=True)
            return outcome

        with ThreadPoolExecutor(workers) as pool:
            out |= {outcome.fault.id: outcome for outcome in pool.map(one, left)}
    return [out[fault.id] for fault in faults]


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="planted.py", description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", default=[], help="a room, a file of it, or the id of a fault")
    parser.add_argument("--list", action="store_true", help="print the faults and plant none")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--limit-s", type=float, default=300.0)
    parser.add_argument("--unchecked", action="store_true", help="do not run the tests without a fault first")
    given = parser.parse_args(argv)
    try:
        faults = chosen(known(), given.only)
    except KeyError as name:
        rooms = sorted({fault.room for fault in known()})
        print(f"no fault is called {name}; rooms are {', '.join(rooms)}", file=sys.stderr)
        return 2
    if given.list:
        print("\n".join(f"{fault.id:<44}  {fault.why}" for fault in faults))
        return 0
    begun = time.monotonic()
    try:
        outcomes = tried(faults, workers=given.workers, limit_s=given.limit_s, checked=not given.unchecked)
    except Red as red:
        print(red, file=sys.stderr)
        return 1
    loud = [outcome for outcome in outcomes if outcome.verdict != "caught"]
    minutes = (time.monotonic() - begun) / 60
    print(f"{len(outcomes)} faults, {len(outcomes) - len(loud)} caught, {minutes:.1f} minutes")
    for outcome in loud:
        print(f"{outcome.verdict.upper()}: {outcome.fault.id} ({outcome.fault.why}): {outcome.by}")
    return 1 if loud else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
