"""Text of single tokens, so that the pieces of a rollout, joined, are its text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrl_post.data import tokenizer

_BROKEN = "\N{REPLACEMENT CHARACTER}"  # what a part of a character's bytes decodes to
_BEFORE = 8  # tokens before a piece that are decoded with it: the first token of a text may lose its space


def found(folder: Path, config: Mapping[str, Any]) -> tokenizer.Tokenizer | None:
    """Returns the tokenizer of a run: that of its policy, else the one that its config names, if it is still there."""
    model = config.get("model", {})
    exported = sorted((folder / "policy").glob("*.bin"))
    for place in (folder / "policy", *exported, Path(model.get("tokenizer") or "-"), Path(model.get("path") or "-")):
        try:
            if place.is_dir() and (place / "tokenizer.json").is_file():
                return tokenizer.load(place)
            if place.is_file():
                return tokenizer.load(tokenizer.beside(place) if place == Path(model.get("path", "")) else place)
        except ValueError:
            continue  # another file of that name: the next place may have one
    return None


def pieces(words: tokenizer.Tokenizer | None, ids: Sequence[int]) -> list[str]:
    """Returns the text of each token. Bytes of one character belong to the token that completes it.

    Without a tokenizer a piece is the id in brackets. Tokens that end a text are shown by name.
    """
    if words is None:
        return [f"[{id}]" for id in ids]
    return _decoded(lambda part: words.decode(part, skip_special=False), [int(id) for id in ids])


def _decoded(decode: Callable[[Sequence[int]], str], ids: list[int]) -> list[str]:
    out, start = [], 0  # `start`: the first token whose text is not told yet
    for end in range(1, len(ids) + 1):
        first = max(start - _BEFORE, 0)
        before, whole = decode(ids[first:start]), decode(ids[first:end])
        if whole.endswith(_BROKEN) and end < len(ids) and end - start < _BEFORE:
            out.append("")
            continue
        out.append(whole[len(before) :] if whole.startswith(before) else decode(ids[start:end]))
        start = end
    return out
