"""Runs every Python block of the pages that are named, each in a namespace of its own; a config is resolved."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]

import pages  # noqa: E402

from jaxrl_post import config  # noqa: E402


def main(names: list[str]) -> int:
    """Returns 0 and prints the number of blocks; an exception of a block ends the process."""
    count = 0
    for name in names:
        for block in pages.python_blocks(pages.ROOT / name):
            space = {"__name__": "block"}
            exec(compile(block, f"{name}, block {count}", "exec"), space)
            if "get_config" in space:
                config.resolve(space["get_config"]())
            count += 1
    print(f"{count} blocks")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
