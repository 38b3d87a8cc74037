"""Stop strings that are special tokens: they end a rollout by their ids."""

from __future__ import annotations

import dataclasses

from jaxrl_post.data.tokenizer import Tokenizer
from jaxrl_post.json_text import shown
from jaxrl_post.types import MOST_ENDS, Sampling


def with_special_stops(law: Sampling, words: Tokenizer) -> Sampling:
    """Returns a law in which each stop string that is a special token is a stop id, too.

    No text shows a special token, so that the string alone would never be found.

    Raises:
      ValueError: a stop string holds a special token beside other text, or too many ids end a rollout.
    """
    special = {words.decode([id], skip_special=False): id for id in (words.special_ids if law.stop_strings else ())}
    ids = list(law.stop_ids)
    for text in law.stop_strings:
        inside = next((name for name in special if name and name in text and name != text), None)
        if text in special:
            ids += [special[text]] if special[text] not in (*law.eos_ids, *ids) else []
        elif inside is not None:
            raise ValueError(
                f"stop_strings: {shown(text)} holds the special token {shown(inside)}, which no text shows; "
                f"name {special[inside]} in stop_ids instead"
            )
    if len(ids) + len(law.eos_ids) > MOST_ENDS:
        raise ValueError(
            f"{len(ids)} stop ids, with those of stop strings that are special tokens, and {len(law.eos_ids)} end "
            f"tokens of the tokenizer: at most {MOST_ENDS} together can end a rollout"
        )
    return dataclasses.replace(law, stop_ids=tuple(ids))
