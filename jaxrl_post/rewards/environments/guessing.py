"""Number guessing: the policy names numbers and is told "low" or "high" until it names the secret one.

Rows have the column `secret`, and optionally `least` and `most` (0 and 63).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class Guessing:
    """A right guess scores 1 and ends the conversation."""

    def reset(self, row: Mapping) -> list[dict]:
        """Returns the range of the secret number."""
        self._secret = int(row["secret"])
        return [{"role": "user", "content": f"{row.get('least', 0)}-{row.get('most', 63)}"}]

    def step(self, messages: Sequence[Mapping]) -> tuple[list[dict], float, bool, dict]:
        """Returns whether the guess is too low or too high, or the score."""
        text = messages[-1]["content"].strip()
        guess = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None
        if guess == self._secret:
            return [], 1.0, True, {"acc": 1.0}
        told = "?" if guess is None else "low" if guess < self._secret else "high"
        return [{"role": "user", "content": told}], 0.0, False, {"acc": 0.0}
