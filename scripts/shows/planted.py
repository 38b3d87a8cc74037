"""Every planted fault is caught by a test: off-by-ones, dropped conditions, swapped arguments, wrong signs in every room.

The list is scripts/faults/*.txt. scripts/planted.py plants each in a copy of the tree and runs the tests that are named with it.
Faults are found by tokens, so that they outlive a move or another layout of their function. First these tests must pass without
a fault.
"""

from __future__ import annotations

import time
from collections import Counter

import planted

MINUTES = 30.0
SOURCES = ("scripts/faults/*",)
LEAST, LONGEST_MINUTES = 120, 40.0


def show(record) -> None:
    begun = time.monotonic()
    faults = planted.known()
    record.figure("num_faults", len(faults), at_least=LEAST)
    for room, count in sorted(Counter(fault.room for fault in faults).items()):
        record.figure(f"num_faults.{room}", count)
    outcomes = planted.tried(faults, root=record.root)
    of = {verdict: [o.fault.id for o in outcomes if o.verdict == verdict] for verdict in planted.VERDICTS}
    record.figure("survived", of["survived"], equals=[])
    record.figure("not_planted", of["not planted"], equals=[])
    record.figure("num_caught", len(of["caught"]), equals=len(faults))
    record.figure("num_caught_by_the_clock", sum(o.by.startswith("the clock") for o in outcomes))
    record.figure("caught_by", {o.fault.id: o.by for o in outcomes if o.verdict == "caught"})
    record.figure("minutes", (time.monotonic() - begun) / 60, at_most=LONGEST_MINUTES)
