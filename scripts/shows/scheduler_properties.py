"""Schedulers train on every prompt exactly once, starve nobody, repeat themselves and go on from any point.

Hypothesis draws cases:

- policy: synchronous, tail batching, RollPacker; how groups go on, and over-provisioning;
- delivery: whole rounds or streamed; dynamic sampling;
- placement: least loaded, or one that releases, places and migrates as it likes;
- slots, dispatch lengths, random completion orders, weights that move, failing graders.

Each case runs twice: undisturbed, and with the scheduler written and read by a new one before every few calls. A
witness objects to whatever breaks a promise, and both runs must decide alike. Planted faults must be found. On the real
engine at frozen weights tail batching trains on the very (prompt, seed, tokens) of synchronous rounds.
"""

from __future__ import annotations

import sys
from collections import Counter

MINUTES = 5.0
EXAMPLES = 400


def show(record) -> None:
    sys.path[:0] = [str(record.root), str(record.root / "tests")]
    _drawn(record)
    _planted(record)
    _on_the_real_engine(record)


def _drawn(record) -> None:
    from hypothesis import given, settings
    from hypothesis import strategies as st
    from test_scheduler_properties import CASES, holds, solvable

    seen: Counter[str] = Counter()

    @settings(max_examples=EXAMPLES, deadline=None, derandomize=True, database=None)
    @given(case=st.fixed_dictionaries(CASES).filter(solvable))
    def every_promise_holds(case):
        seen["cases"] += 1
        seen[case["name"]] += 1
        try:
            seen["restarts"] += holds(case)
        except AssertionError as objection:
            seen["objections"] += 1
            print(f"{case}: {objection}")

    every_promise_holds()
    record.figure("cases", seen["cases"], at_least=EXAMPLES)
    for name in ("sync", "tail_batching", "rollpacker"):
        record.figure(f"cases_{name}", seen[name], at_least=EXAMPLES // 10)
    record.figure("restarts", seen["restarts"], at_least=10 * EXAMPLES)
    record.figure("objections", seen["objections"], equals=0)


def _planted(record) -> None:
    from test_scheduler_properties import FAULTS

    passed = record.passed("tests/test_scheduler_properties.py", "planted or drawn_anew")
    record.figure("planted_faults_found", passed - 1, equals=len(FAULTS) + 1)  # one test has no fault, and passes


def _on_the_real_engine(record) -> None:
    from frozen_rounds import multiset, rounds

    steps = 12
    expected = multiset(rounds("sync", steps=steps)[0])
    record.figure("engine.rollouts", len(expected), at_least=100)
    for mode in ("verify", "recompute", "restart"):
        found, counts = rounds("tail_batching", steps=steps, over=1.5, prefix_mode=mode)
        missing = sum((Counter(expected) - Counter(multiset(found))).values())
        record.figure(f"engine.{mode}.groups_deferred", int(counts["sched/num_groups_deferred"]), at_least=10)
        record.figure(
            f"engine.{mode}.rollouts_that_differ_from_sync", missing + len(multiset(found)) - len(expected), equals=0
        )
