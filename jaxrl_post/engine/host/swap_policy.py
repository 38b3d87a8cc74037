"""What becomes of answers on their way when new weights come, each by a rule, within a share of all rows.

  keep       tokens and KV stay: the next token is the new weights', over keys and values of the old ones
             (PipelineRL, arXiv 2509.19128, section 4, measures how little that matters at 2,048 tokens)
  recompute  tokens, log-probs and versions stay; KV is computed anew by the new weights
  verify     tokens become candidates: what is there in the end is what the new weights would have given from the start
  auto       verify where at least half of the tokens are expected to survive, by what candidates did so far; else recompute

Invariant: a choice follows from counts alone, and what is computed again is never more than `share` of all rows so far (1: no
bound): the shortest answers first, whoever is beyond it keeps. An answer without a token starts again: all it ever says is the new
weights'.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields

from jaxrl_post.engine.host.sequence import Live

RULES = ("keep", "recompute", "verify", "auto")
_COUNTERS = ("num_kept", "num_recomputed", "num_verified", "num_started_again", "num_beyond_share", "rows")


@dataclass
class Accounts:
    """Rows `computed`, of everything, and `again`, because of swaps. Candidates `agreed`, that came out again, and
    `checked`."""

    computed: int = 0
    again: int = 0
    agreed: int = 0
    checked: int = 0


class Carry:
    """The rule and its accounts; `share`: of all rows, 0 to 1."""

    def __init__(self, rule: str = "keep", share: float = 1.0):
        assert rule in RULES, rule
        self._rule, self._share = rule, share
        self.reset()

    def reset(self) -> None:
        self._state = Accounts()
        self._counts: Counter[str] = Counter()

    def modes(self, lives: Iterable[Live]) -> list[tuple[Live, str]]:
        """What becomes of each: keep, recompute, verify, or again for one in a slot without a token."""
        out = []
        for live in sorted(lives, key=lambda live: (live.known, live.age)):
            mode = self._mode(live)
            if mode in ("recompute", "verify"):
                if self._share < 1 and self._state.again + live.filled > self._share * self._state.computed:
                    mode = "keep"
                    self._counts["num_beyond_share"] += 1
                else:
                    self._state.again += live.filled
                    self._counts["rows"] += live.filled
            if live.slot >= 0 or mode == "verify":
                self._counts[_NAMES[mode]] += 1
            out.append((live, mode))
        return out

    def _mode(self, live: Live) -> str:
        if not live.tokens:
            return "again" if live.slot >= 0 else "keep"
        if self._rule != "auto":
            return self._rule if live.slot >= 0 or self._rule == "verify" else "keep"
        if 2 * self._surviving(len(live.tokens)) >= len(live.tokens):
            return "verify"
        return "recompute" if live.slot >= 0 else "keep"

    def _surviving(self, length: int) -> float:
        """Tokens of an answer that are expected to come out again, each with the chance that candidates had so far."""
        chance = (self._state.agreed + 1) / (self._state.checked + 1)
        return length if chance == 1 else chance * (1 - chance**length) / (1 - chance)

    def told(self, candidates: Sequence[int], tokens: Sequence[int]) -> None:
        """Candidates, and the tokens that came out where they were."""
        seen = min(len(candidates), len(tokens))
        agreed = next((i for i in range(seen) if candidates[i] != tokens[i]), seen)
        self._state.agreed += agreed
        self._state.checked += min(agreed + 1, seen)

    def used(self, rows: int) -> None:
        """Rows that a dispatch computed."""
        self._state.computed += rows
        self._counts["computed"] += rows

    def metrics(self) -> dict[str, float]:
        """swap/num_* answers by what became of them, swap/rows that they had computed again and its share of all rows, since
        the last call; nothing where no weights were exchanged."""
        counts, self._counts = self._counts, Counter()
        out = {f"swap/{name}": float(counts[name]) for name in _COUNTERS if counts[name]}
        return (
            out | {"swap/rows_share": counts["rows"] / counts["computed"]}
            if counts["rows"] and counts["computed"]
            else out
        )

    def state_dict(self) -> dict:
        return asdict(self._state) | {"counts": dict(self._counts)}

    def load_state_dict(self, state: Mapping) -> None:
        self._state = Accounts(**{field.name: state[field.name] for field in fields(Accounts)})
        self._counts = Counter(state["counts"])


_NAMES = {"keep": "num_kept", "recompute": "num_recomputed", "verify": "num_verified", "again": "num_started_again"}
