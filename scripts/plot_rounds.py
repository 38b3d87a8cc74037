"""Draws a few rounds of a run or a simulation, slot by slot: python scripts/plot_rounds.py TRACE [TRACE ...] --out FILE

A TRACE is a trace_*.json of a run folder (trace_rounds in the config), or the folder. Traces are drawn below one another on
one scale, so that the shorter one is the faster one. FILE ends in .svg or .png.

    --rounds A:B     rounds A to B - 1, counted from 0 (default: all that were traced)
    --replicas A:B   replicas A to B - 1 (default: all); where there are many slots, a few replicas make a picture
    --axis steps     engine steps instead of seconds: the time of reward, learner and swap is left out
    --title TEXT     of the next trace (default: its path)

What is red is the bubble: a slot without an answer while others of its replica are at work. Green answers ended, blue ones go
on from before, grey ones were parked; above them the seconds of engine, reward, learner and swap.
"""

from __future__ import annotations

import argparse
import json
import sys
from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path

from drawing import TEXT, Picture

COLORS = {"ended": "#5aa469", "again": "#4a7fb5", "parked": "#a9a9a9", "bubble": "#f6c7c3", "line": "#222222"}
PARTS = {"engine": "#7d8ba1", "reward": "#e0a458", "learner": "#8e5ea2", "swap": "#3b3b3b"}
WIDTH, LEFT, ROW, STRIP, GAP = 1500, 90, 4, 13, 26


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


def draw(panels: list[Panel], steps: bool) -> Picture:
    """All of them on one scale."""
    heights = [2 * TEXT + (0 if steps else len(PARTS) * STRIP) + len(p.slots) * ROW + GAP for p in panels]
    longest = max(p.length for p in panels)
    picture = Picture(WIDTH, sum(heights) + 2 * GAP)
    scale, top = (WIDTH - LEFT - 20) / longest, GAP // 2
    for one, height in zip(panels, heights):
        _panel(picture, one, top, scale, steps)
        top += height
    _axis(picture, top - GAP // 2, longest, scale, "engine steps" if steps else "seconds")
    return picture


def _panel(picture: Picture, one: Panel, top: float, scale: float, steps: bool) -> None:
    unit = "engine steps" if steps else "s"
    picture.text(
        LEFT,
        top,
        f"{one.title}: {len(one.rounds)} rounds in {one.length:.4g} {unit}, "
        f"{100 * one.bubble():.0f} % of slot time idle while generating",
    )
    top += 2 * TEXT
    for name, color in () if steps else PARTS.items():
        picture.text(4, top - 1, name)
        for span in one.spans:
            if span.track == ("ring", name):
                picture.rectangle(LEFT + span.start * scale, top, (span.end - span.start) * scale, STRIP - 2, color)
        top += STRIP
    picture.text(4, top + 2, f"{len(one.slots)} slots")
    rows = {track: top + ROW * place for place, track in enumerate(one.slots)}
    for start, end in one.windows():
        picture.rectangle(LEFT + start * scale, top, (end - start) * scale, ROW * len(one.slots), COLORS["bubble"])
    for span in one.spans:
        if span.track in rows:
            ended = span.about["finish"] in ("eos", "stop", "length")
            kind = "again" if span.about["again"] else "ended" if ended else "parked"
            width = max((span.end - span.start) * scale - 0.6, 0.4)
            picture.rectangle(LEFT + span.start * scale, rows[span.track], width, ROW - 1, COLORS[kind])
    for span in one.rounds:
        picture.rectangle(LEFT + span.end * scale - 1, top - STRIP, 1, ROW * len(one.slots) + STRIP, COLORS["line"])


def _axis(picture: Picture, top: float, longest: float, scale: float, unit: str) -> None:
    tick = next(
        size * 10.0**power for power in range(-6, 9) for size in (1, 2, 5) if size * 10.0**power * 12 >= longest
    )
    for number in range(int(longest / tick) + 1):
        picture.rectangle(LEFT + number * tick * scale, top, 1, 4, COLORS["line"])
        picture.text(LEFT + number * tick * scale + 3, top + 4, f"{number * tick:g}{f' {unit}' if number == 0 else ''}")


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
        if given.out.suffix not in (".svg", ".png"):
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
    if given.out.suffix == ".svg":
        given.out.write_text(picture.svg(), encoding="utf-8")
    else:
        given.out.write_bytes(picture.png())
    print(
        f"{given.out}: " + "; ".join(f"{p.title}: {p.length:.4g} {given.axis}, bubble {p.bubble():.0%}" for p in panels)
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
