"""The rule for running rollouts when new weights arrive, bounded by a share of all rows.

- keep: tokens and KV stay. The new weights sample the next token over keys and values of the old weights. This is an
  in-flight update. PipelineRL (arXiv 2509.19128, section 4) measures its effect at 2,048 tokens.
- recompute: tokens, log-probs and versions stay. The new weights compute the KV again.
- verify: tokens become candidates. The final rollout is the one that the new weights give from the start.
- auto: verify where at least half of the tokens are expected to be accepted, by the acceptance so far. Otherwise
  recompute.

Under keep, a rollout that is preempted when pages are short loses its KV. The current weights then compute the KV
again. So a rollout of an older version continues with another KV (counted as sched/recomputed_older_versions).

Invariant: a choice depends on counts alone. Rows computed again are at most `share` of all rows so far (share 1: no
bound). The shortest rollouts are served first. A rollout beyond the bound keeps its tokens and KV. A rollout without a
token starts again, so that the new weights sample all its tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields

from jaxrl_post.engine.host.sequence import SequenceState

RULES = ("keep", "recompute", "verify", "auto")
_COUNTERS = ("num_kept", "num_recomputed", "num_verified", "num_started_again", "num_beyond_share", "rows")
_NAMES = {"keep": "num_kept", "recompute": "num_recomputed", "verify": "num_verified", "again": "num_started_again"}


@dataclass
class Accounts:
    """Counts since the last reset."""

    computed: int = 0  # rows in all
    again: int = 0  # rows computed again because of swaps
    agreed: int = 0  # candidates that were confirmed
    checked: int = 0  # candidates that were checked


class SwapPolicy:
    """Applies one of RULES and counts its cost. `share` is a share of all rows, 0 to 1."""

    def __init__(self, rule: str = "keep", share: float = 1.0):
        assert rule in RULES, rule
        self._rule, self._share = rule, share
        self.reset()

    def reset(self) -> None:
        self._state = Accounts()
        self._counts: Counter[str] = Counter()

    def modes(self, sequences: Iterable[SequenceState]) -> list[tuple[SequenceState, str]]:
        """Returns each sequence with its mode: keep, recompute, verify, or again.

        Mode `again` is for a sequence in a slot that has no token yet.
        """
        out = []
        for sequence in sorted(sequences, key=lambda sequence: (sequence.num_tokens, sequence.age)):
            mode = self._mode(sequence)
            if mode in ("recompute", "verify"):
                if self._share < 1 and self._state.again + sequence.num_computed > self._share * self._state.computed:
                    mode = "keep"
                    self._counts["num_beyond_share"] += 1
                else:
                    self._state.again += sequence.num_computed
                    self._counts["rows"] += sequence.num_computed
            if sequence.slot >= 0 or mode == "verify":
                self._counts[_NAMES[mode]] += 1
            out.append((sequence, mode))
        return out

    def _mode(self, sequence: SequenceState) -> str:
        """Returns the mode by the rule, without the bound."""
        if not sequence.num_answered:
            return "again" if sequence.slot >= 0 else "keep"
        if self._rule != "auto":
            return self._rule if sequence.slot >= 0 or self._rule == "verify" else "keep"
        if 2 * self._accepted(sequence.num_answered) >= sequence.num_answered:
            return "verify"
        return "recompute" if sequence.slot >= 0 else "keep"

    def _accepted(self, length: int) -> float:
        """Returns the expected accepted tokens of `length` candidates, each accepted with the rate so far."""
        chance = (self._state.agreed + 1) / (self._state.checked + 1)
        return length if chance == 1 else chance * (1 - chance**length) / (1 - chance)

    def record_outcome(self, candidates: Sequence[int], tokens: Sequence[int]) -> None:
        """Counts which candidates the settled `tokens` at their positions confirmed."""
        seen = min(len(candidates), len(tokens))
        agreed = next((i for i in range(seen) if candidates[i] != tokens[i]), seen)
        self._state.agreed += agreed
        self._state.checked += min(agreed + 1, seen)

    def used(self, rows: int) -> None:
        self._state.computed += rows
        self._counts["computed"] += rows

    def metrics(self) -> dict[str, float]:
        """Returns counters since the last call; without a swap, none.

        swap/num_*: rollouts by mode. swap/rows: rows computed again. swap/rows_share: their share of all rows."""
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
