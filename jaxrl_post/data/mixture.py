"""Several sources of prompts in one endless order, each with a weight. grain says which source stands at a position.

Each source is shuffled by itself and begins anew when it is through, so a small one is seen more often. Which prompt stands
at a position depends on (seed, names, sizes, weights, position) alone. So a resumed run goes on exactly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import grain

from jaxrl_post.data.prompts import Prompts
from jaxrl_post.json_text import shown
from jaxrl_post.types import Prompt

_ENDLESS = 1 << 48  # positions of a source; no run reaches them


class Mixture(Prompts):
    """Prompts of several sources. The epoch of a prompt is that of its own source.

    Among the first N positions, a source with share w of the weights has N * w prompts, up to one. grain rounds weights: the
    smallest one counts as 100, and the others are cut to whole numbers beside it.

    Args:
      parts: the prompts of each source, by its name. Ids are unique over all of them.
      weights: one for each source, above 0.
      seed: of the run.

    Raises:
      ValueError: a source without prompts.
    """

    def __init__(self, parts: Mapping[str, Sequence[Prompt]], weights: Sequence[float], seed: int):
        super().__init__([prompt for part in parts.values() for prompt in part], seed)
        self._parts = [Prompts(part, seed, name=name) for name, part in parts.items()]
        places = grain.MapDataset.range(_ENDLESS)
        self._mixed = grain.MapDataset.mix(
            [places.map(lambda place, part=part: (part, int(place))) for part in range(len(self._parts))], weights
        )

    def at(self, position: int) -> tuple[int, Prompt]:
        """Returns the prompt at a position and its epoch, which counts how often its source was through before."""
        part, place = self._mixed[self._detour.get(position, position)]
        return self._parts[part].at(place)


def named(sources: Sequence[str]) -> dict[str, str]:
    """Returns the sources by name: that of a task, or of a file without its ending.

    Raises:
      ValueError: two sources have one name, which begins the ids of their prompts.
    """
    out: dict[str, str] = {}
    for source in sources:
        name = source.removeprefix("task:") if source.startswith("task:") else Path(source).stem
        if name in out:
            raise ValueError(
                f"data.sources: {shown(out[name])} and {shown(source)} are both called {shown(name)}, which begins the ids of "
                "their prompts; rename one of the files"
            )
        out[name] = source
    return out


def labelled(name: str, rows: Sequence[Mapping]) -> list[dict]:
    """Returns the rows of a source with ids of their own: `name`/ID. A row without a source gets the name as its source."""
    return [{**row, "id": f"{name}/{row['id']}", "source": row["source"] or name} for row in rows]
