"""Runs every Python block of the pages that are named, each in a namespace of its own; a config is resolved.

What a block trains, loads or evaluates is made short, and a run lies in a temporary folder.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]

import pages  # noqa: E402

import jaxrl_post  # noqa: E402
from jaxrl_post import config  # noqa: E402

ENGINE = {"engine__slots": 16, "engine__row_sizes": (64,), "engine__max_length": 64, "sampling__max_tokens": 48}
RUN = {"steps": 1, "scheduler__prompts": 4, "checkpoint__every": 0}
OF_A_FILE = {
    "scheduler__group_size": 4,
    "history__epochs": 1,
    **ENGINE,
}  # a block that sets options itself is small already


def shortened(folder: str) -> dict:
    """Returns the three functions of the package with options that need few seconds, before those of a block."""
    train, load, evaluate = jaxrl_post.train, jaxrl_post.load, jaxrl_post.evaluate
    opened = lambda path, **options: load(path, **options | ENGINE)  # noqa: E731

    def trained(given, **options):
        return train(given, **options | RUN | (OF_A_FILE if isinstance(given, str) else {}) | {"run_dir": folder})

    return {
        "train": trained,
        "load": opened,
        "evaluate": lambda policy, *given, **how: evaluate(opened(policy), *given, **how | {"most": 4}),
    }


def main(names: list[str]) -> int:
    """Returns 0 and prints the number of blocks; an exception of a block ends the process."""
    count = 0
    with tempfile.TemporaryDirectory() as folder:
        for short, function in shortened(folder).items():
            setattr(jaxrl_post, short, function)
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
