"""The page report.html: template, style, scripts and data in one file that needs no network.

All texts of a run are data: JSON in a script element that no browser runs, from which the scripts set text contents.
Invariant: no character of a run can end that element, because each `<` is written as an escape.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrl_post.ring import written
from jaxrl_post.ring.json_text import shown
from jaxrl_post.runs.run_logs import RunLogs, opened
from jaxrl_post.telemetry.page.curves import curves
from jaxrl_post.telemetry.page.rollouts import TOKENS, pieces, rollouts, words_of
from jaxrl_post.telemetry.page.spans import lengths, times

NAME = "report.html"
_HERE = Path(__file__).resolve().parent
_SCRIPTS = ("elements.js", "charts.js", "sections.js", "rollouts.js", "start.js")
_MOST = 8  # runs of a page: as many as there are colours


def write(folders: Sequence[str | Path], out: str | Path) -> Path:
    """Writes the page of several runs, whole or not at all, and returns its path.

    Raises:
      ValueError: no run, too many, one twice, a folder that is no run's, or a damaged log.
    """
    text = page(data(folders))
    written.whole(out, text.encode("utf-8", "backslashreplace"))
    return Path(out)


def data(folders: Sequence[str | Path]) -> dict[str, Any]:
    """Returns all that a page says, as values that JSON can hold.

    Raises:
      ValueError: as in `write`.
    """
    places = [Path(folder).resolve() for folder in folders]
    if not 1 <= len(places) <= _MOST:
        raise ValueError(f"a report has 1 to {_MOST} runs, {len(places)} were named")
    twice = [place for place in places if places.count(place) > 1]
    if twice:
        raise ValueError(f"{shown(str(twice[0]))} was named twice")
    return {"runs": [_run(opened(place), name, len(places)) for place, name in zip(places, _names(places))]}


def page(told: Mapping[str, Any]) -> str:
    """Returns the page with this data."""
    names = ", ".join(run["name"] for run in told["runs"])
    filled = {
        "title": f"jaxrl_post: {names}".replace("&", "&amp;").replace("<", "&lt;"),
        "style": (_HERE / "style.css").read_text(encoding="utf-8"),
        "scripts": "\n".join((_HERE / name).read_text(encoding="utf-8") for name in _SCRIPTS),
        "data": _safe(told),
    }
    text = (_HERE / "page.html").read_text(encoding="utf-8")
    pieces = text.split("@@")  # text, name, text, name, ..., text
    return "".join(filled[piece] if place % 2 else piece for place, piece in enumerate(pieces))


def _run(files: RunLogs, name: str, runs: int) -> dict[str, Any]:
    words = words_of(files)
    seen: dict[bytes, list[str]] = {}  # prompts come again with every rollout of their group

    def text(ids: Sequence[int], before: Sequence[int] = ()) -> list[str]:
        key = repr((ids, before)).encode()
        if key not in seen:
            seen[key] = pieces(words, ids, before)
        return seen[key]

    some, rule = rollouts(files, text, TOKENS // runs)
    return {
        "name": name,
        "config": files.kept,
        "derived": files.derived,
        "summary": files.summary,
        "curves": curves(files.rows, files.written),
        "times": times(files.step_rows),
        "lengths": lengths(files),
        "rollouts": some,
        "rule": rule,
        "decoded": words is not None,
    }


def _names(places: Sequence[Path]) -> list[str]:
    """Returns a name for each run: its folder's, with those above it where two would be equal."""
    depth = 1
    while len({place.parts[-depth:] for place in places}) < len(places):
        depth += 1
    return ["/".join(place.parts[-depth:]) for place in places]


def _safe(value: Any) -> str:
    """Returns JSON that may stand in a script element."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
