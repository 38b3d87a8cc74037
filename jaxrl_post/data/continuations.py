"""The text of a continuation: decode(before + ids) minus decode(before).

Decoders treat the first token of a text in their own way: most of SentencePiece's kind drop its space. So the ids of a
rollout, decoded alone, may lack a character. Only a few tokens before the rollout are decoded with it.

Invariant: the text equals that of decoding everything. The few tokens begin with one that shows a visible character and is
no byte token. What a decoder strips in front, and bytes of a character before, then stay in what is subtracted. A decoder
for which this is not known decodes everything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

BROKEN = "\ufffd"  # what bytes that are no character decode to
_MOST_PARTS = 8  # tokens of one character, before its bytes are shown as broken
_FIRST_ONLY = ("ByteLevel", "Metaspace", "WordPiece", "BPEDecoder", "ByteFallback", "Fuse", "Strip")

Decode = Callable[..., str]  # decode(ids, skip_special=True, before=())


def text(plain: Callable[[Sequence[int]], str], shows: Callable[[int], bool], before: Sequence[int], ids: list) -> str:
    """Returns the text of `ids` behind those of `before`.

    `plain`: the text of ids that stand alone. `shows`: whether `before` may be cut in front of a token.
    """
    first = len(before) - 1
    while first > 0 and not shows(int(before[first])):
        first -= 1
    few = [int(id) for id in before[max(first, 0) :]]
    head, whole = plain(few), plain(few + ids)
    if whole.startswith(head):
        return whole[len(head) :]
    return whole[common(head, whole) :]


def common(one: Sequence, other: Sequence) -> int:
    """Returns how many first tokens or characters are equal."""
    return next((place for place, pair in enumerate(zip(one, other)) if pair[0] != pair[1]), min(len(one), len(other)))


def visible(text: str) -> bool:
    """Returns whether a text has a character that no decoder strips."""
    return any(not (letter.isspace() or letter in (BROKEN, "▁")) for letter in text)


def local(decoder: dict | None) -> bool:
    """Returns whether a decoder of a tokenizer.json treats only the first and the last token of a text in its own way."""
    steps, fused = [decoder] if decoder else [], False
    while steps:
        one = steps.pop(0)
        kind = one["type"]
        if kind == "Sequence":
            steps = one["decoders"] + steps
            continue
        fused = fused or kind == "Fuse"
        strips = kind == "Strip" and visible(one["content"])
        if strips or (kind not in _FIRST_ONLY and (fused or kind != "Replace")):
            return False
    return True


class Pieces:
    """The texts of single tokens, which joined are the text of all, special tokens included.

    The bytes of a character belong to the token that completes it. Where a byte is broken, the texts may show others of its
    run of bytes, which the text of all hides. `decode`: as Decode. `before`: ids of the prompt.
    """

    def __init__(self, decode: Decode, before: Sequence[int] = ()):
        self._decode, self._ids, self._start = decode, np.asarray(before, np.int64), len(before)

    def more(self, ids: Sequence[int], last: bool = True) -> list[str]:
        """Returns the texts of further tokens. `last`: none follow, so that nothing is held back."""
        out, begin = [], self._ids.size
        self._ids = np.concatenate([self._ids, np.asarray(ids, np.int64)])
        for end in range(begin + 1, self._ids.size + 1):
            text = self._decode(self._ids[self._start : end], skip_special=False, before=self._ids[: self._start])
            follows = not last or end < self._ids.size
            if text.endswith(BROKEN) and follows and end - self._start < _MOST_PARTS:
                out.append("")
                continue
            out.append(text)
            self._start = end
        return out
