"""Makes a mistake in an empty folder, and says what of the promise does not hold: one sentence, and nothing lost.

    python scripts/refusals.py          reads cases as JSON on its input, one a line; writes one line for each: null, or what is wrong

A case is a dict:

    name     what the mistake is
    files    path -> text, written into an empty folder before anything runs
    before   lists of arguments of python that run first, in turn; each must end with exit code 0
    lost     paths that are removed after that
    argv     what follows `python` on the command line
    says     a regular expression; the only line of stderr that begins with "error: " must match it
    code     the exit code; 1 without it
    may_appear   patterns of paths that the command may make; none without it

Every file that was there must have the same bytes afterwards. Commands of the package run in a fork of one process that
has imported them, because the imports take most of the time; any other command runs as it stands. Folders that the same
files and the same `before` make are made once and copied.
"""

from __future__ import annotations

import fnmatch
import hashlib
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_S = 900.0
MODULES = ("jaxrl_post", "jaxrl_post.main", "jaxrl_post.simulate")
KEYS = {"name", "files", "before", "lost", "argv", "says", "code", "may_appear"}


def wrong(case: Mapping, made: Path) -> str | None:
    """Returns what of the promise does not hold, or None.

    Args:
      made: the folder that keeps what `before` makes.
    """
    if unknown := set(case) - KEYS:
        return f"unknown keys {sorted(unknown)}"
    folder, failed = _prepare(case, made)
    if failed:
        return failed
    there = _contents(folder)
    code, said = _ran(case["argv"], folder)
    # A config's relative paths become absolute. What a case expects does not know the folder.
    return _broken(case, code, said.replace(f"{folder}/", ""), there, _contents(folder))


def _broken(case: Mapping, code: int, said: str, there: Mapping[str, bytes], then: Mapping[str, bytes]) -> str | None:
    errors = [line for line in said.splitlines() if line.startswith("error: ")]
    changed = [path for path, data in there.items() if then.get(path) != data]
    allowed = case.get("may_appear", ())
    made = [path for path in then if path not in there and not any(fnmatch.fnmatch(path, one) for one in allowed)]
    if code != case.get("code", 1):
        return f"exit code {code}; it said: {said[-1500:]}"
    if "Traceback (most recent call last)" in said:
        return f"a traceback: {said[-1500:]}"
    if len(errors) != 1:
        return f"{len(errors)} lines begin with 'error: ': {said[-1500:]}"
    if not re.search(case["says"], errors[0]):
        return f"it says {errors[0]!r}, not {case['says']!r}"
    if changed:
        return f"it changed or removed {changed[:5]}"
    return f"it left {made[:5]}" if made else None


def _prepare(case: Mapping, made: Path) -> tuple[Path, str | None]:
    """Makes the folder of a case. Returns it, and why it cannot be made, or None.

    Equal files and `before` give the same folder, since a run names its files by their absolute paths.
    """
    before = case.get("before", [])
    key = hashlib.sha256(json.dumps([case["files"], before]).encode()).hexdigest()[:16]
    folder, kept = made.resolve() / key / "here", made / key / "kept"
    shutil.rmtree(folder, ignore_errors=True)
    if not kept.is_dir():
        folder.mkdir(parents=True)
        for path, text in case["files"].items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text, encoding="utf-8")
        for argv in before:
            code, said = _ran(argv, folder)
            if code:
                return folder, f"before: exit code {code}: {said[-1500:]}"
        shutil.copytree(folder, kept)
        shutil.rmtree(folder)
    shutil.copytree(kept, folder)
    for path in case.get("lost", ()):
        target = folder / path
        shutil.rmtree(target) if target.is_dir() else target.unlink()
    return folder, None


def _contents(folder: Path) -> dict[str, bytes]:
    """Path -> bytes of every file; an empty folder counts as a file without bytes."""
    return {
        f"{path.relative_to(folder)}{'/' * path.is_dir()}": path.read_bytes() if path.is_file() else b""
        for path in sorted(folder.rglob("*"))
        if path.is_file() or not any(path.iterdir())
    }


def _ran(argv: Sequence[str], folder: Path) -> tuple[int, str]:
    """Runs `python *argv` in a folder. Returns its exit code and its stderr."""
    with tempfile.TemporaryFile() as said:
        if list(argv[:1]) == ["-m"] and argv[1] in MODULES:
            code = _forked(argv[1], list(argv[2:]), folder, said.fileno())
        else:
            done = subprocess.run(
                [sys.executable, *argv], cwd=folder, stdout=subprocess.DEVNULL, stderr=said, timeout=TIMEOUT_S
            )
            code = done.returncode
        said.seek(0)
        return code, said.read().decode("utf-8", errors="replace")


def _forked(module: str, arguments: list[str], folder: Path, said: int) -> int:
    """Runs a command of the package in a fork of this process. Returns its exit code."""
    main = importlib.import_module(f"{module}.__main__" if module == "jaxrl_post" else module).main
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        os.chdir(folder)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(said, 2)
        _finish(main, arguments)
    end = time.monotonic() + TIMEOUT_S
    while (done := os.waitpid(child, os.WNOHANG)) == (0, 0):
        if time.monotonic() > end:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return 124
        time.sleep(0.02)
    return os.waitstatus_to_exitcode(done[1])


def _finish(main: Callable[[list[str]], int | None], arguments: list[str]) -> NoReturn:
    """Ends this process as Python ends after the command."""
    code = 1
    try:
        code = main(arguments) or 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    finally:  # whatever it raised: the fork must not go on with the parent's work
        if sys.exc_info()[0] is not None:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    """Judges the cases on the input."""
    sys.dont_write_bytecode = True  # Python's own files beside a reward function are no part of the promise
    sys.path.insert(0, str(ROOT))
    for module in MODULES[1:]:
        importlib.import_module(module)
    with tempfile.TemporaryDirectory() as made:
        for line in sys.stdin:
            print(json.dumps(wrong(json.loads(line), Path(made))), flush=True)


if __name__ == "__main__":
    main()
