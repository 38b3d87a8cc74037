"""Prompts over the limit: refused, dropped, or cut. Never silently: what was dropped or cut is counted and named.

`cut` keeps the right end of a prompt, as verl's data.truncation=left does. What stands in front is lost, for example a BOS or
a system message.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from jaxrl_post.data.tokenizer import Tokenizer

REFUSE, DROP, CUT = "refuse", "drop", "cut"


@dataclass(kw_only=True)
class Overlong:
    """What becomes of prompts over the limit.

    `places`: the prompts that were dropped or cut so far, each by its place in the data.
    """

    mode: str = REFUSE
    places: list[str] = field(default_factory=list)

    def fitted(self, place: str, text: str, tokenizer: Tokenizer, special: bool, limit: int) -> list[int]:
        """Returns the token ids of a prompt, 1 to `limit` of them; none of a prompt that is dropped.

        Tokenising needs hundreds of bytes for a character, so a text that cannot fit is never tokenised whole. Twice the
        characters that `limit` tokens can have are enough to cut it.

        Args:
          special: whether the tokenizer adds its BOS.
          limit: most tokens a prompt may have.

        Raises:
          ValueError: an empty prompt, or one over the limit where such are refused.
        """
        most = limit * tokenizer.longest
        if self.mode == REFUSE:
            measured("the prompt", text, tokenizer, limit)
        long = len(text) > most
        ids = (
            [] if long and self.mode == DROP else tokenizer.encode(text[-2 * most :] if long else text, special=special)
        )
        if 0 < len(ids) <= limit and not long:
            return ids
        if self.mode == REFUSE or not (ids or long):
            raise ValueError(
                f"the prompt has {len(ids)} tokens; it must have 1 to {limit}, so that a rollout fits behind it "
                "(engine.max_length - sampling.max_tokens); data.overlong says whether such prompts are refused, dropped or cut"
            )
        self.places.append(place)
        return [] if self.mode == DROP else ids[-limit:]

    def words(self, option: str, source: str, limit: int) -> str:
        """Returns one line on what was dropped or cut, or an empty text. `option`: data.train or eval.data."""
        count = len(self.places)
        if not count:
            return ""
        many, done = count > 1, "dropped" if self.mode == DROP else "cut to the last tokens"
        return (
            f"{option}={source}: {count} prompt{'s have' if many else ' has'} more than {limit} tokens and "
            f"{'are' if many else 'is'} {done} (data.overlong={self.mode!r}); the first is {self.places[0]}"
        )


def measured(what: str, text: str, tokenizer: Tokenizer, limit: int) -> None:
    """Refuses a text that has too many characters for `limit` tokens, before it is tokenised.

    Raises:
      ValueError: one sentence with both lengths.
    """
    most = limit * tokenizer.longest
    if len(text) > most:
        raise ValueError(
            f"{what} has {len(text)} characters; {limit} tokens of at most {tokenizer.longest} characters hold {most}"
        )
