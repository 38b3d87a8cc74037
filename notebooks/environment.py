"""Where the run of a notebook lives: in the notebook's kernel, or in an environment of its own beside it.

Rule: a package that the notebook's kernel has is never changed, because the kernel may have imported it. The kernel gets
only packages that it lacks. Where one is too old, or pip finds no versions that fit to the others, an environment is made in
.venv-notebook. A kernel of that environment then runs the cells (kernel_beside.py).

Nothing here imports jax or the project. JAXRL_NOTEBOOK_PYTHON names an interpreter that has the project already; it is used
instead of a new environment.
"""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

FOLDER = ".venv-notebook"
EXTRA = "notebook"  # of pyproject.toml
OWN = "JAXRL_NOTEBOOK_PYTHON"
PYTHONS = ((3, 11), (3, 13))
CUDA_13_DRIVER = 580  # the first driver of CUDA 13
LIMIT_S = 1800.0


def prepare(root: Path) -> None:
    """Makes the cells after this one run where the project's packages are, in the folder `root`.

    Raises:
      ValueError: no environment can be made for this Python. RuntimeError: pip failed.
    """
    needed = requirements(root)
    lacking, old = unmet(needed)
    if not old and (not lacking or _installed(lacking)):
        print(f"The cells run in this kernel: Python {sys.version.split()[0]}, jax {metadata.version('jax')}.")
        _enter(root)
        return
    why = f"this kernel has {', '.join(old)}" if old else "pip found no versions that fit to this kernel's packages"
    print(f"The cells run in an environment of their own, because {why}. No package of this kernel changes.")
    python = Path(os.environ[OWN]) if os.environ.get(OWN) else _made(root)

    from kernel_beside import KernelBeside

    beside = KernelBeside(python, root, {**_alone(), "PYTHONPATH": str(root)})
    beside.run(f"import sys\nsys.path[:0] = {_paths(root)!r}\nfrom importlib import metadata\n{TOLD}")
    beside.take_over()


TOLD = "print(f'Python {sys.version.split()[0]}, jax {metadata.version(\"jax\")}')"


def requirements(root: Path) -> list[Requirement]:
    """Returns what pyproject.toml says that the notebook needs here."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found = map(Requirement, [*project["dependencies"], *project["optional-dependencies"][EXTRA]])
    return [one for one in found if one.marker is None or one.marker.evaluate()]


def unmet(needed: Sequence[Requirement]) -> tuple[list[str], list[str]]:
    """Returns the requirements that this kernel lacks, and its packages that are too old, "jax 0.7.2 and not >=0.10.2"."""
    lacking, old = [], []
    for one in needed:
        try:
            version = metadata.version(one.name)
        except metadata.PackageNotFoundError:
            lacking.append(str(one))
            continue
        if not one.specifier.contains(version, prereleases=True):
            old.append(f"{one.name} {version} and not {one.specifier}")
    return lacking, old


def pins() -> str:
    """Returns a constraint for each package of this kernel, so that pip changes none of them."""
    found = {one.name: one.version for one in metadata.distributions() if one.name}
    return "".join(f"{name}=={version}\n" for name, version in sorted(found.items()))


def _installed(lacking: Sequence[str]) -> bool:
    """Installs packages into this kernel beside those that are there. Returns whether pip found versions that fit."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "pins.txt")
        file.write_text(pins())
        print(f"Installing {', '.join(lacking)} into this kernel.", flush=True)
        done = subprocess.run(
            [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "-c", str(file), *lacking],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
    importlib.invalidate_caches()
    if done.returncode and "ResolutionImpossible" not in done.stderr:
        raise RuntimeError(f"pip install {' '.join(lacking)} failed: {done.stderr[-1000:]}")
    return done.returncode == 0


def _made(root: Path) -> Path:
    """Returns the interpreter of the environment, which is made where it is not there or older than what it is made of."""
    place, stamp = root / FOLDER, root / FOLDER / "installed.stamp"
    sources = [root / "pyproject.toml", *(root / "constraints").glob("*.txt")]
    if not stamp.is_file() or any(file.stat().st_mtime > stamp.stat().st_mtime for file in sources):
        print(f"Making {place}, which takes a few minutes once.", flush=True)
        for command in commands(root, place, sys.version_info[:2], accelerator()):
            done = subprocess.run(command, env=_alone(), capture_output=True, text=True, timeout=LIMIT_S)
            if done.returncode:
                raise RuntimeError(f"{' '.join(command)} failed: {(done.stderr or done.stdout)[-1000:]}")
        stamp.touch()
    return place / "bin" / "python"


def _alone() -> dict[str, str]:
    """Returns the variables of this process without those that would lead an environment to packages of another one."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}


def commands(root: Path, place: Path, version: tuple[int, int], extra: Sequence[str]) -> list[list[str]]:
    """Returns the commands that make the environment. pip of this kernel installs into it, since Colab has no ensurepip.

    extra: further requirements, those of the accelerator.

    Raises:
      ValueError: the project does not run on this Python.
    """
    if not PYTHONS[0] <= version <= PYTHONS[1]:
        least, most = (".".join(map(str, one)) for one in PYTHONS)
        raise ValueError(
            f"notebook: this kernel has Python {version[0]}.{version[1]}, and the project needs {least} to {most}"
        )
    constraints = root / "constraints" / f"py{version[0]}.{version[1]}.txt"
    pip = [sys.executable, "-m", "pip", "--python", str(place / "bin" / "python")]
    return [
        [sys.executable, "-m", "venv", "--clear", "--without-pip", str(place)],
        [*pip, "install", "-q", "-c", str(constraints), "-e", f"{root}[{EXTRA}]", *extra],
    ]


def accelerator() -> list[str]:
    """Returns what jax needs for the device of this machine, found without jax: jax[tpu], jax[cuda13], jax[cuda12] or nothing."""
    if any(Path("/dev").glob("accel[0-9]*")) or any(Path("/dev/vfio").glob("[0-9]*")):
        return ["jax[tpu]"]
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        done = subprocess.run(query, capture_output=True, text=True, timeout=60)
    except FileNotFoundError:
        return []
    found = re.match(r"\d+", done.stdout)
    if done.returncode or not found:
        return []
    return ["jax[cuda13]" if int(found[0]) >= CUDA_13_DRIVER else "jax[cuda12]"]


def _paths(root: Path) -> list[str]:
    return [str(root), str(root / "notebooks"), str(root / "scripts")]


def _enter(root: Path) -> None:
    """Makes this kernel, and the processes that it starts, find the project."""
    os.chdir(root)
    sys.path[:0] = [path for path in _paths(root) if path not in sys.path]
    before = [one for one in os.environ.get("PYTHONPATH", "").split(os.pathsep) if one and one != str(root)]
    os.environ["PYTHONPATH"] = os.pathsep.join([str(root), *before])
