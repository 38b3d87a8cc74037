"""Runs one section of scripts/rl_check.py: `python scripts/rl/child.py NAME PART TOLD SECONDS [small]`, as scripts/gpu/child.py."""

from __future__ import annotations

import sys

from gpu import child
from rl.sections import REAL, SHAPES, TINY, functions

if __name__ == "__main__":
    child.main(*sys.argv[1:], run=functions((*SHAPES, REAL)), in_small=functions((TINY,)))
