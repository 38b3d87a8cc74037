"""Draws a few rounds of a run or a simulation, slot by slot: python scripts/plot_rounds.py TRACE [TRACE ...] --out FILE

A TRACE is a trace_*.json of a run folder (trace_rounds in the config), or the folder. Traces are drawn below one another on
one scale, so that the shorter one is the faster one. FILE ends in .svg or .png.

    --rounds A:B     rounds A to B - 1, counted from 0 (default: all that were traced)
    --replicas A:B   replicas A to B - 1 (default: all); where there are many slots, a few replicas make a picture
    --axis steps     engine steps instead of seconds: the time of reward, learner and swap is left out
    --title TEXT     of the next trace (default: its path)

Red is the bubble: a slot without a rollout while others of its replica run. Green rollouts finished. Blue ones continue from
an earlier round. Grey ones were parked. The strips above show the seconds of engine, reward, learner and weight swap. Drawing
needs matplotlib (the extra `plot`); reading a trace does not.
"""

from __future__ import annotations

import argparse
import json
import sys
from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import drawing

COLORS = {"ended": "#5aa469", "again": "#4a7fb5", "parked": "#a9a9a9", "bubble": "#f6c7c3"}
NAMES = {"ended": "finished", "again": "continued", "parked": "parked", "bubble": "idle slot"}
PARTS = {"engine": "#7d8ba1", "reward": "#e0a458", "learner": "#8e5ea2", "swap": "#3b3b3b"}
WIDTH, ROW, STRIP, MARGIN = 12.0, 0.035, 4, 0.75  # inches; a strip of the ring is as high as 4 slots


@dataclass(frozen=True, kw_only=True)
class Span:
    """Something on `track`: (process, thread), from `start` to `end` in seconds or steps."""

    track: tuple[str, str]
    name: str
    start: float
    end: float
    about: dict


@dataclass(frozen=True, kw_only=True)
class Panel:
    """Rounds of one trace, shifted to begin at 0. `slots`: of all replicas, by name."""

    title: str
    rounds: list[Span]
    spans: list[Span]
    slots: list[tuple[str, str]]

    @property
    def length(self) -> float:
        return self.rounds[-1].end

    def windows(self) -> list[tuple[float, float]]:
        """From when to when each round generates."""
        out = []
        for one in self.rounds:
            mine = [span for span in self.spans if span.track in self.slots and one.start <= span.start < one.end]
            out += [(min(span.start for span in mine), max(span.end for span in mine))] if mine else []
        return out

    def parts(self) -> list[str]:
        """Returns the parts of the ring that took time, from the top down."""
        return [name for name in PARTS if any(span.track == ("ring", name) for span in self.spans)]

    def bubble(self) -> float:
        """The share of slot time without an answer while a round generates."""
        whole = sum(end - start for start, end in self.windows()) * len(self.slots)
        busy = sum(span.end - span.start for span in self.spans if span.track in self.slots)
        return 1 - busy / whole if whole else 0.0


def read(path: Path) -> list[Span]:
    """Every span of a trace file, in seconds.

    Raises:
      ValueError: not a whole trace.
    """
    try:
        events = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(
            f"{path}: not a whole trace ({error}); a run that still draws writes its end when it has drawn "
            "trace_rounds rounds or stops"
        ) from error
    names = {(e["pid"], e.get("tid")): e["args"]["name"] for e in events if e["ph"] == "M" and "name" in e["args"]}
    return [
        Span(
            track=(names[e["pid"], None], names[e["pid"], e["tid"]]),
            name=e["name"],
            start=e["ts"] / 1e6,
            end=(e["ts"] + e["dur"]) / 1e6,
            about=e.get("args", {}),
        )
        for e in events
        if e["ph"] == "X"
    ]


def panel(spans: list[Span], title: str, rounds: slice, steps: bool, replicas: slice = slice(None)) -> Panel:
    """
    Raises:
      ValueError: those rounds or replicas were not traced.
    """
    clock = _clock(spans) if steps else lambda seconds: seconds
    ends = [span for span in spans if span.track == ("ring", "round")]
    chosen, known = ends[rounds], sorted({s.track[0] for s in spans if s.track[0].startswith("replica")}, key=_number)
    for what, wanted, found, there in (
        ("rounds", rounds, chosen, ends),
        ("replicas", replicas, known[replicas], known),
    ):
        if not found:
            raise ValueError(
                f"{title}: {what} {wanted.start or 0}:{'' if wanted.stop is None else wanted.stop} were not "
                f"traced; it has {len(there)}"
            )
    begin, end = chosen[0].start, chosen[-1].end
    zero = clock(begin)
    inside = [
        Span(track=s.track, name=s.name, start=clock(s.start) - zero, end=clock(s.end) - zero, about=s.about)
        for s in spans
        if begin <= s.start < end
    ]
    shown = set(known[replicas])
    slots = sorted(
        {span.track for span in spans if span.track[0] in shown}, key=lambda track: (_number(track[0]), track[1])
    )
    return Panel(
        title=title,
        rounds=[span for span in inside if span.track == ("ring", "round")],
        slots=slots,
        spans=[span for span in inside if span.track != ("ring", "round")],
    )


def _number(replica: str) -> int:
    return int(replica.split()[1])


def _part(text: str) -> slice:
    """A:B, either end left out where it is open."""
    first, colon, last = text.partition(":")
    if not (colon and all(end == "" or end.isdigit() for end in (first, last))):
        raise ValueError(f"{text!r} must be A:B, for example 2:8")
    return slice(int(first) if first else None, int(last) if last else None)


def _clock(spans: list[Span]):
    """Seconds -> engine steps, which grow evenly within a dispatch and stand still between two."""
    known = sorted(
        (s.start, s.end, s.about["clock"], int(s.name.split()[0])) for s in spans if s.track == ("ring", "engine")
    )
    starts = [start for start, *_ in known]

    def steps(seconds: float) -> float:
        at = bisect_right(starts, seconds) - 1
        if at < 0:
            return 0.0
        start, end, clock, count = known[at]
        return clock - count * max(0.0, (end - seconds) / (end - start))

    return steps


def draw(panels: list[Panel], steps: bool) -> Any:
    """Returns a figure of all panels, one below the other, on one scale.

    Raises:
      ValueError: matplotlib is not installed.
    """
    parts = [[] if steps else one.parts() for one in panels]
    heights = [len(one.slots) + STRIP * len(names) for one, names in zip(panels, parts)]
    picture = drawing.figure(WIDTH, sum(max(ROW * height, 0.6) + MARGIN for height in heights))
    all_axes = picture.subplots(len(panels), sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for one, axes, names, height in zip(panels, all_axes, parts, heights):
        _heading(axes, one, "engine steps" if steps else "s")
        _slots(axes, one)
        _strips(axes, one, names)
        axes.vlines([span.end for span in one.rounds], 0, height, colors=drawing.INK, linewidths=0.8)
        axes.set_ylim(0, height)
    all_axes[-1].set_xlim(0, max(one.length for one in panels))
    all_axes[-1].set_xlabel("engine steps" if steps else "seconds")
    _legend(picture, all_axes)
    return picture


def _legend(picture: Any, all_axes: Any) -> None:
    """Names each colour once, in the order of PARTS and COLORS."""
    handles = {label: handle for axes in all_axes for handle, label in zip(*axes.get_legend_handles_labels())}
    labels = [label for label in (*PARTS, *NAMES.values()) if label in handles]
    shown = [handles[label] for label in labels]
    picture.legend(shown, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=8)


def _heading(axes: Any, one: Panel, unit: str) -> None:
    axes.set_title(
        f"{one.title}: {len(one.rounds)} rounds in {one.length:.4g} {unit}, "
        f"{100 * one.bubble():.0f} % of slot time idle while generating",
        loc="left",
        fontsize=10,
    )


def _slots(axes: Any, one: Panel) -> None:
    """Draws the rollouts of each slot, the first slot at the top. The unit of height is a slot."""
    count = len(one.slots)
    shapes: dict[str, list] = {kind: [] for kind in COLORS}
    shapes["bubble"] = [(start, 0, end - start, count) for start, end in one.windows()]
    rows = {track: count - 1 - place for place, track in enumerate(one.slots)}
    for span in one.spans:
        if span.track in rows:
            shapes[_kind(span)].append((span.start, rows[span.track] + 0.1, span.end - span.start, 0.8))
    for kind in ("bubble", "ended", "again", "parked"):
        if shapes[kind]:
            drawing.rectangles(axes, shapes[kind], COLORS[kind], NAMES[kind])


def _strips(axes: Any, one: Panel, names: list[str]) -> None:
    """Draws a strip of the ring's time for each of `names` above the slots, and labels the vertical axis."""
    count = len(one.slots)
    ticks = {count / 2: f"{count} slots"}
    for place, name in enumerate(reversed(names)):
        bottom = count + STRIP * place
        spans = [span for span in one.spans if span.track == ("ring", name)]
        shapes = [(span.start, bottom + 0.4, span.end - span.start, STRIP - 0.8) for span in spans]
        drawing.rectangles(axes, shapes, PARTS[name], name)
        ticks[bottom + STRIP / 2] = name
    axes.set_yticks(list(ticks), list(ticks.values()), fontsize=8)
    axes.tick_params(axis="y", length=0)


def _kind(span: Span) -> str:
    if span.about["again"]:
        return "again"
    return "ended" if span.about["finish"] in ("eos", "stop", "length") else "parked"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Draws a few rounds, slot by slot.", allow_abbrev=False)
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", default=":")
    parser.add_argument("--replicas", default=":")
    parser.add_argument("--axis", choices=("seconds", "steps"), default="seconds")
    parser.add_argument("--title", action="append", default=[])
    given = parser.parse_args(arguments)
    try:
        if given.out.suffix not in drawing.SUFFIXES:
            raise ValueError(f"--out={given.out} must end in .svg or .png")
        files = [sorted(path.glob("trace_*.json"))[:1] or [path] if path.is_dir() else [path] for path in given.traces]
        titles = given.title + [str(file) for (file,) in files[len(given.title) :]]
        panels = [
            panel(read(file), title, _part(given.rounds), given.axis == "steps", _part(given.replicas))
            for (file,), title in zip(files, titles)
        ]
        picture = draw(panels, given.axis == "steps")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    drawing.save(picture, given.out)
    print(
        f"{given.out}: " + "; ".join(f"{p.title}: {p.length:.4g} {given.axis}, bubble {p.bubble():.0%}" for p in panels)
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
