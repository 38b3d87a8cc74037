"""Text of single tokens, so that the pieces of a rollout, joined, are its text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrl_post.data import tokenizer
from jaxrl_post.data.continuations import Pieces


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


def pieces(words: tokenizer.Tokenizer | None, ids: Sequence[int], before: Sequence[int] = ()) -> list[str]:
    """Returns the text of each token, behind those `before`. Bytes of one character belong to the token that completes it.

    Without a tokenizer a piece is the id in brackets. Tokens that end a text are shown by name.
    """
    return [f"[{id}]" for id in ids] if words is None else Pieces(words.decode, before).more(ids)
