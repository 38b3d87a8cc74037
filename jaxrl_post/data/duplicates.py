"""Rows whose id came before: refused (prompts.py), left out, or told apart by a number. Never silently.

A row without an id and without an index is known by its content. So equal rows have one id.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxrl_post.ring.json_text import shown

REFUSE, DROP, NUMBER = "refuse", "drop", "number"


def settled(rows: Sequence[dict], mode: str, option: str, source: str) -> tuple[list[dict], tuple[str, ...]]:
    """Returns the rows with ids of their own, and at most one line on what became of the others.

    `mode`: REFUSE leaves all rows as they are. `option`: data.train or eval.data. `source`: what it names.
    """
    ids = {row["id"] for row in rows}
    if mode == REFUSE or len(ids) == len(rows):
        return list(rows), ()
    kept, seen, places = [], dict.fromkeys(ids, 0), []
    for number, row in enumerate(rows, start=1):
        id = row["id"]
        seen[id] += 1
        if seen[id] > 1:
            places.append(f"{row.get('where', f'{source}, row {number}')} (id {shown(id)})")
            if mode == DROP:
                continue
            while f"{id}#{seen[id]}" in ids:
                seen[id] += 1
            row = row | {"id": f"{id}#{seen[id]}"}
            ids.add(row["id"])
        kept.append(row)
    many, done = len(places) > 1, "left out" if mode == DROP else "numbered"
    return kept, (
        f"{option}={source}: {len(places)} row{'s have' if many else ' has'} an id that came before and {'are' if many else 'is'} "
        f"{done} (data.duplicates={mode!r}); the first is {places[0]}",
    )
