"""The folder of a run: chosen once, made new, never written over.

With several processes process 0 makes it and tells the others; each then writes below process_K, so that their files
can be compared byte by byte.
"""

from __future__ import annotations

from pathlib import Path

import jax

from jaxrl_post.launch.distributed import share_text


def make(exact: str, parent: str, name: str, seed: int) -> Path:
    """`exact` if given, else parent/NAME-SEED-NNN with the next free number; the same path on every process.

    Raises:
      ValueError: `exact` exists and is not an empty folder.
    """
    made = ""
    if jax.process_index() == 0:
        made = _exact(Path(exact)) if exact else _numbered(Path(parent), f"{name}-{seed}")
    path = share_text(made)
    if not path:
        raise ValueError(f"--run-dir={exact} exists already and is not an empty folder: a run is never written over; "
                         "name a new one, or leave --run-dir out")
    return Path(path)


def own(folder: Path) -> Path:
    """Where this process writes: the folder itself when it is alone, else process_K inside."""
    if jax.process_count() == 1:
        return folder
    mine = folder / f"process_{jax.process_index()}"
    mine.mkdir(parents=True, exist_ok=True)
    return mine


def _exact(path: Path) -> str:
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        return ""
    path.mkdir(parents=True, exist_ok=True)
    return str(path)


def _numbered(parent: Path, stem: str) -> str:
    parent.mkdir(parents=True, exist_ok=True)
    taken = [p.name.removeprefix(f"{stem}-") for p in parent.glob(f"{stem}-*")]
    number = 1 + max((int(t) for t in taken if t.isdigit()), default=0)
    path = parent / f"{stem}-{number:03d}"
    path.mkdir()  # fails, rather than shares, when another run was faster
    return str(path)
