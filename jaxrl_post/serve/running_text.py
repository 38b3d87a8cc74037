"""The text of a rollout that is still being sampled, piece by piece.

Invariant: the pieces together are the text of the whole rollout. What a later token may still change is held back: the
bytes of a character that is not complete, and the beginning of a stop string. Neither a stop string nor the token that
ended the rollout is part of the text.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from jaxrl_post.data.continuations import BROKEN, Decode
from jaxrl_post.types import Finish, Sampling


class RunningText:
    """The text of one rollout.

    Args:
      decode: token ids to text. `settled`: how many of the first tokens no later token changes.
      before: the ids of its prompt.
    """

    def __init__(
        self, decode: Decode, law: Sampling, before: Sequence[int] = (), settled: Callable[[Sequence[int]], int] = len
    ):
        self._settled = settled
        self._decode, self._law = functools.partial(decode, before=before), law
        self._told = 0  # characters that were returned

    def more(self, tokens: Sequence[int]) -> str:
        """Returns the new text of an unfinished rollout. `tokens`: all of them so far."""
        text = self._decode(tokens[: self._settled(tokens)]).rstrip(BROKEN)
        return self._new(text[: len(text) - _begun(text, self._law.stop_strings)])

    def rest(self, tokens: Sequence[int], finish: Finish) -> tuple[str, str | int | None]:
        """Returns the last piece of a finished rollout, and the stop string or stop id that ended it."""
        tokens, reason = list(tokens), None
        text = self._decode(tokens)
        found = [(place, one) for one in self._law.stop_strings if (place := text.find(one)) >= 0]
        if finish is Finish.STOP and found:
            place, reason = min(found)
            text = text[:place]
        elif finish in (Finish.EOS, Finish.STOP):
            reason = self._named(tokens[-1]) if finish is Finish.STOP else None
            text = self._decode(tokens[:-1])
        return self._new(text), reason

    def _named(self, token: int) -> str | int:
        """Returns the stop string that a special token is, else its id."""
        text = self._decode([token], skip_special=False)
        return text if text in self._law.stop_strings else token

    def _new(self, text: str) -> str:
        new, self._told = text[self._told :], max(self._told, len(text))
        return new


def _begun(text: str, strings: Sequence[str]) -> int:
    """Returns how many characters at the end of a text may be the beginning of a string."""
    return max(
        (size for one in strings for size in range(1, min(len(one), len(text) + 1)) if text.endswith(one[:size])),
        default=0,
    )
