"""Tables of step costs."""

from __future__ import annotations

import math
from pathlib import Path

from fuzz import mutations
from fuzz.child import sentence

TABLE = {
    "name": "cost",
    "figures": {
        "step_s": {"64": 0.002, "128": 0.003, "256": 0.005},
        "drafting_s": 0.0002,
        "opening_s": 0.05,
        "train_token_s": 0.0001,
    },
}


class Cases:
    """Reads the table and asks it for costs, as a run does."""

    def __init__(self, folder: Path):
        from jaxrl_post.engine import step_cost

        self._file, self._costs = folder / "table.json", step_cost

    def valid(self) -> None:
        self._file.write_bytes(mutations.dumped(TABLE))
        self._use()

    def own(self, error: BaseException) -> bool:
        return sentence(error, "table.json")

    def case(self, index, random):
        what, data = mutations.damaged_json(random, TABLE)
        self._file.write_bytes(data)
        return what, self._use

    def _use(self) -> None:
        cost = self._costs.load(str(self._file))
        assert len(cost.digest) == 16
        assert all(0 < cost(rows) < math.inf for rows in (1, 64, 100, 4096))
        self._costs.best_size(cost, (64, 128), 3, 10, lambda rows: rows / 2)
        assert self._costs.tries_apart(cost) >= 0
