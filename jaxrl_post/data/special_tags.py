"""Special tokens in the texts of rollouts that graders get."""

from __future__ import annotations

import re
from collections.abc import Sequence

from jaxrl_post.data.continuations import Decode
from jaxrl_post.data.tokenizer import Tokenizer

_TAG = re.compile(r"(?P<open>[<\[]\|?)(?P<name>\w[\w-]*)(?P<close>\|?[>\]])")
_BEGINS, _ENDS = ("begin_of_", "start_of_", "start_"), ("end_of_", "end_of_", "end_")


def graded(words: Tokenizer, ends: Sequence[int], *, skip: bool) -> Decode:
    """Returns what decodes a rollout for graders.

    Args:
      ends: ids that end a rollout. A special one at the end is never part of the text.
      skip: whether all special tokens are left out.
    """
    if skip:
        return words.decode
    last = set(ends) & set(words.special_ids)

    def shown(ids: Sequence[int], skip_special: bool = False, before: Sequence[int] = ()) -> str:
        ended = len(before) and len(ids) and int(ids[-1]) in last
        return words.decode(ids[:-1] if ended else ids, skip_special, before)

    return shown


def hidden(words: Tokenizer, prompt: Sequence[int]) -> list[str]:
    """Returns the special tokens that open and close a part of a rollout, such as <think>, opening ones alone.

    `prompt`: ids of a prompt. Tags that it opens and closes are those of the template.
    """
    seen, ends = {int(id) for id in prompt}, {*words.eos_ids, words.bos_id}
    special = {words.decode([id], skip_special=False): id for id in words.special_ids if id not in ends}
    pairs = ((name, other) for name in special for other in _closing(name) if other in special)
    return sorted({name for name, other in pairs if not {special[name], special[other]} <= seen})


def _closing(tag: str) -> list[str]:
    """Returns how the counterparts of an opening tag may be written."""
    if (found := _TAG.fullmatch(tag)) is None:
        return []
    begin, name, end = found.groups()
    swapped = [other + name[len(one) :] for one, other in zip(_BEGINS, _ENDS, strict=True) if name.startswith(one)]
    return [begin + other + end for other in (f"/{name}", *swapped)]
