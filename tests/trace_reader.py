"""Reads a trace as a viewer of the Trace Event Format would, and refuses what it would not show rightly."""

from __future__ import annotations

import itertools
from collections import defaultdict

import numpy as np


def check(events):
    """What the Trace Event Format asks of the events that are used, and that spans of one thread do not overlap."""
    needed = {
        "X": {"name", "pid", "tid", "ts", "dur"},
        "C": {"name", "pid", "ts", "args"},
        "M": {"name", "pid", "args"},
    }
    lanes = defaultdict(list)
    for event in events:
        assert needed[event["ph"]] <= event.keys() and isinstance(event["pid"], int) and isinstance(event["name"], str)
        if event["ph"] != "M":
            assert event["ts"] >= 0 and np.isfinite(event["ts"])
        if event["ph"] == "C":
            assert all(isinstance(value, (int, float)) for value in event["args"].values())
        if event["ph"] == "X":
            assert event["dur"] >= 0
            lanes[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for spans in lanes.values():
        spans.sort()
        assert all(after[0] >= before[1] - 2e-3 for before, after in itertools.pairwise(spans)), "spans overlap"
    named = {(e["pid"], e.get("tid")) for e in events if e["ph"] == "M"}
    assert {(e["pid"], e.get("tid")) for e in events if e["ph"] == "X"} <= named


def tracks(events):
    """Thread or counter -> [(name or value, start s, end s)]."""
    words = {(e["pid"], e.get("tid")): e["args"].get("name") for e in events if e["ph"] == "M" and "name" in e["args"]}
    out = defaultdict(list)
    for e in events:
        if e["ph"] == "X":
            out[words[e["pid"], None], words[e["pid"], e["tid"]]].append(
                (e["name"], round(e["ts"] / 1e6, 6), round((e["ts"] + e["dur"]) / 1e6, 6))
            )
        if e["ph"] == "C":
            out[words[e["pid"], None], e["name"]].append((e["args"]["value"], round(e["ts"] / 1e6, 6)))
    return out
