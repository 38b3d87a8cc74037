"""What the shows `report` and `notebook` look with: an environment with TensorBoard and Weights & Biases, a headless browser.

Both are installed below .cache/ the first time, which takes a few minutes.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

from record import Missing

# node 20 runs both; the first brings a headless Chromium with its libraries and fonts
PACKAGES = ("@sparticuz/chromium@147.0.0", "puppeteer-core@24.43.1")
EXTRAS = "tensorboard,wandb"


def python(root: Path) -> Path:
    """Returns the interpreter of an environment with the libraries, made by scripts/make_venv.sh.

    Raises:
      Missing: it cannot be made.
    """
    place, stamp = root / ".cache" / "venv-report", root / ".cache" / "venv-report" / "installed.stamp"
    needed = [root / "pyproject.toml", *(root / "constraints").glob("*.txt")]
    if not stamp.is_file() or any(file.stat().st_mtime > stamp.stat().st_mtime for file in needed):
        print(f"making {place.relative_to(root)} with the extras {EXTRAS}", flush=True)
        said = _ran(["sh", "scripts/make_venv.sh", str(place), "", EXTRAS], root)
        if said:
            raise Missing(f"report: the environment with the extras {EXTRAS} was not made: {said}")
        stamp.touch()
    return place / "bin" / "python"


def browser(root: Path) -> Path:
    """Returns the folder with the packages of the browser.

    Raises:
      Missing: node or npm is not there, or the packages cannot be installed.
    """
    place = root / ".cache" / "browser"
    for program in ("node", "npm"):
        if shutil.which(program) is None:
            raise Missing(
                f"the browser: {program} is missing, which installs and drives a headless Chromium; install Node.js 20"
            )
    have = [place / "node_modules" / name.rpartition("@")[0] / "package.json" for name in PACKAGES]
    versions = [json.loads(file.read_text())["version"] if file.is_file() else "" for file in have]
    if versions != [name.rpartition("@")[2] for name in PACKAGES]:
        print(f"installing {', '.join(PACKAGES)} into {place.relative_to(root)}", flush=True)
        place.mkdir(parents=True, exist_ok=True)
        said = _ran(["npm", "install", "--no-fund", "--no-audit", "--prefix", str(place), *PACKAGES], place)
        if said:
            raise Missing(f"the browser: the headless Chromium was not installed: {said}")
    return place


def look(root: Path, page: Path, planted: str, out: Path) -> dict:
    """Opens a page in the browser and writes screenshots; searches it, where it can be searched. Returns what was found.

    Raises:
      Missing: see `browser`. RuntimeError: the browser failed.
    """
    modules = browser(root)
    out.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        ["node", "scripts/browser/look.cjs", str(page), planted, str(out)],
        cwd=root,
        env={**os.environ, "JAXRL_BROWSER": str(modules), "TMPDIR": str(modules)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    if done.returncode:
        raise RuntimeError(f"the browser failed: {done.stderr[-2000:]}")
    return json.loads(done.stdout)


def _ran(command: list[str], where: Path) -> str:
    """Runs a command. Returns its last words where it failed, else an empty text."""
    done = subprocess.run(command, cwd=where, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=1800)
    return " ".join(done.stdout.split())[-400:] if done.returncode else ""
