"""The commit that the present tree is compared with, and its files on this machine.

BASE moves when a commit changes bits on purpose, or when a comparison with a newer commit says more. The commit that moves
it says which bits changed and why.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from record import Missing

BASE = "9ce6881f4262918d90a0e6c8bbdc9c4647aeaffc"


def checkout(root: Path) -> Path:
    """Returns a git worktree of BASE below .cache/base/, made if it is not there.

    Raises:
      Missing: git does not have the commit, for example in a shallow clone.
    """
    place = root / ".cache" / "base" / BASE[:12]
    if _git(place, "rev-parse", "HEAD") == BASE and _git(place, "status", "--porcelain", "--untracked-files=no") == "":
        return place
    _git(root, "worktree", "prune")
    if _git(root, "worktree", "add", "--detach", "--force", str(place), BASE) is None:
        raise Missing(f"commit {BASE[:12]}, with which the tree is compared, is not in this repository; fetch it")
    return place


def _git(folder: Path, *arguments: str) -> str | None:
    """What git prints, or None where it fails."""
    if not folder.is_dir():
        return None
    done = subprocess.run(["git", *arguments], cwd=folder, text=True, capture_output=True)
    return None if done.returncode else done.stdout.strip()
