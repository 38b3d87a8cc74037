"""Stop strings that are special tokens: they end a rollout by their ids."""

from __future__ import annotations

import dataclasses

from jaxrl_post.data.tokenizer import Tokenizer
from jaxrl_post.ring.json_text import shown
from jaxrl_post.ring.types import MOST_ENDS, Sampling


def with_special_stops(sampling: Sampling, words: Tokenizer) -> Sampling:
    """Returns the sampling parameters, in which each stop string that is a special token is a stop id, too.

    No text shows a special token, so that the string alone would never be found.

    Raises:
      ValueError: a stop string holds a special token beside other text, or too many ids end a rollout.
    """
    special = {
        words.decode([id], skip_special=False): id for id in (words.special_ids if sampling.stop_strings else ())
    }
    ids = list(sampling.stop_ids)
    for text in sampling.stop_strings:
        inside = next((name for name in special if name and name in text and name != text), None)
        if text in special:
            ids += [special[text]] if special[text] not in (*sampling.eos_ids, *ids) else []
        elif inside is not None:
            raise ValueError(
                f"stop_strings: {shown(text)} holds the special token {shown(inside)}, which no text shows; "
                f"name {special[inside]} in stop_ids instead"
            )
    if len(ids) + len(sampling.eos_ids) > MOST_ENDS:
        raise ValueError(
            f"{len(ids)} stop ids, with those of stop strings that are special tokens, and {len(sampling.eos_ids)} end "
            f"tokens of the tokenizer: at most {MOST_ENDS} together can end a rollout"
        )
    return dataclasses.replace(sampling, stop_ids=tuple(ids))
