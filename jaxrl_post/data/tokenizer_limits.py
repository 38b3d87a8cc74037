"""Bounds on a downloaded tokenizer.json, checked before the tokenizers library reads it.

A component may ask for any multiple of a text's memory. A normalizer may replace a letter by a gigabyte, and forty in a row
may each double it. A decoder may do so with the tokens of a rollout. The library then aborts the process. Every
bound is far beyond the tokenizers in use, and a file beyond one is refused with one sentence.
"""

from __future__ import annotations

import base64
import binascii
import re
import struct
from collections.abc import Iterator, Mapping
from typing import Any

from jaxrl_post.ring.json_text import shown

LARGEST = 3 << 25  # bytes of a tokenizer.json; those of 260,000 tokens have 3 << 23
_TOKENS, _MERGES, _ADDED = 1 << 20, 1 << 22, 1 << 17
_CHARACTERS = 1 << 24  # of all tokens together; a Unigram's trie has 200 bytes for each
_LONGEST = 4096  # characters of a token
_TEXT = 8192  # characters of a text of a component, such as a regular expression
_PARTS = 256  # components of one kind
_GROWTH = 64  # times that components together may lengthen a text
_WORD = 10_000  # characters of a word of a WordPiece, whose time is their square
_ROOMS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
_CHARSMAP = "precompiled_charsmap"
_BETWEEN = ("(?=", "(?!", "(?<", "\\b", "\\B", "\\G", "\\K")  # of expressions that match no character


def check(data: Mapping[str, Any], where: str) -> None:
    """Refuses a file that could take the memory or the time of the process.

    `data`: what a tokenizer.json holds. `where`: its place, which begins the error.
    """
    for name in _ROOMS:
        _check_room(data.get(name), f"{where}: {name}")
    model = data["model"]
    if isinstance(model, dict):
        _check_vocabulary(model, f"{where}: model")
    added = data.get("added_tokens")
    if isinstance(added, list):
        _bound(len(added), _ADDED, f"{where}: added_tokens has", "tokens")
        texts = [one.get("content") for one in added if isinstance(one, dict)]
        _check_texts([text for text in texts if isinstance(text, str)], f"{where}: added_tokens")


def _check_room(room: Any, where: str) -> None:
    """Checks a normalizer, pre-tokenizer, post-processor or decoder with all that is inside."""
    growth, parts, ids = 1, 0, 0
    for one in _inside(room):
        parts += "type" in one
        for name, value in one.items():
            if isinstance(value, str) and name != _CHARSMAP:
                _bound(len(value), _TEXT, f"{where}: {name} of a {shown(one.get('type', 'part'))} has", "characters")
        ids += sum(len(one[name]) for name in ("ids", "tokens") if isinstance(one.get(name), list))
        growth *= _grows(one, where)
        if growth > _GROWTH:
            raise ValueError(
                f"{where}: its parts can make a text {growth} times as long; at most {_GROWTH} times is taken: "
                f"the part {shown(one)} is the first too many"
            )
        if one.get("type") == "Strip" and one.get("stop"):
            raise ValueError(
                f"{where}: Strip with stop={shown(one['stop'])} fails on short texts; only stop=0 is taken"
            )
    _bound(parts, _PARTS, f"{where} has", "parts")
    _bound(ids, _TEXT, f"{where} adds", "tokens to a text")


def _grows(one: Mapping[str, Any], where: str) -> int:
    """Returns how many times a component may lengthen a text."""
    content, prepended = (one.get(name) if isinstance(one.get(name), str) else "" for name in ("content", "prepend"))
    pattern = one.get("pattern")
    regex = pattern.get("Regex") if isinstance(pattern, dict) else None
    times = max(len(content) + _matches_nothing(regex), 1) if one.get("type") == "Replace" and content else 1
    for name in ("single", "pair"):  # a template of a post-processor
        if isinstance(one.get(name), list):
            times = max(times, sum("Sequence" in part for part in one[name]))
            _bound(len(one[name]), _GROWTH, f"{where}: {name} has", "parts")
    return times * (1 + len(prepended) // 16) * _charsmap(one.get(_CHARSMAP), where)


def _matches_nothing(regex: Any) -> bool:
    """Returns whether an expression may match between two characters, where a replacement adds to the text."""
    try:
        return isinstance(regex, str) and (
            re.compile(regex).match("") is not None or any(mark in regex for mark in _BETWEEN)
        )
    except (re.error, RecursionError, OverflowError):
        return True  # of another dialect


def _charsmap(text: Any, where: str) -> int:
    """Returns the times by which sentencepiece's table of characters may lengthen a text, in steps beyond Unicode's own.

    Its form: the size of a trie, the trie, and texts that end with a zero byte.
    """
    if not isinstance(text, str):
        return 1
    _bound(len(text), 1 << 23, f"{where}: {_CHARSMAP} has", "characters")
    try:
        data = base64.b64decode(text, validate=True)
        (size,) = struct.unpack_from("<I", data) if data else (0,)
    except (binascii.Error, struct.error) as error:
        raise ValueError(f"{where}: {_CHARSMAP} is no table of sentencepiece: {error}") from error
    return 1 + max(map(len, data[4 + size :].split(b"\0")), default=0) // 128  # NFKC's longest has 33 bytes


def _check_vocabulary(model: Mapping[str, Any], where: str) -> None:
    vocabulary, merges = model.get("vocab"), model.get("merges")
    if isinstance(vocabulary, (dict, list)):
        _bound(len(vocabulary), _TOKENS, f"{where}: vocab has", "tokens")
        texts = (
            vocabulary
            if isinstance(vocabulary, dict)
            else [one[0] for one in vocabulary if isinstance(one, list) and one]
        )
        _check_texts([text for text in texts if isinstance(text, str)], f"{where}: vocab")
    if isinstance(merges, list):
        _bound(len(merges), _MERGES, f"{where}: merges has", "pairs")
    word = model.get("max_input_chars_per_word")
    if isinstance(word, int):
        _bound(word, _WORD, f"{where}: max_input_chars_per_word is", "characters")
    for name, value in model.items():
        if isinstance(value, str):
            _bound(len(value), _TEXT, f"{where}: {name} has", "characters")


def _check_texts(texts: list[str], where: str) -> None:
    longest = max(texts, key=len, default="")
    _bound(len(longest), _LONGEST, f"{where}: the token {shown(longest)} has", "characters")
    _bound(sum(map(len, texts)), _CHARACTERS, f"{where}: all tokens together have", "characters")


def _bound(value: int, most: int, what: str, unit: str) -> None:
    if value > most:
        raise ValueError(f"{what} {value} {unit}; at most {most} are taken")


def _inside(value: Any) -> Iterator[Mapping[str, Any]]:
    """Yields the objects of a component, itself first, in the order of the file."""
    if isinstance(value, dict):
        yield value
    for one in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _inside(one)
