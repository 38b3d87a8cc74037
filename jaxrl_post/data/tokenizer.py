"""Text to token ids and back: Hugging Face's tokenizer.json, and llama2.c's vocabulary files.

Both kinds have encode(text, special=True) -> list[int], decode(ids, skip_special=True, before=()) -> str, eos_ids,
bos_id, special_ids, vocab_size and longest (characters of the longest token). With `special`, `encode` adds the tokens
that the tokenizer puts around a text (a BOS). Pass False for a continuation, and for a chat template's text, which
contains them. Pass `decode` the ids that stand before those of a continuation, such as a rollout's prompt
(data/continuations.py).

Refused:
- a folder without tokenizer.json (no slow tokenizers, no sentencepiece models)
- a tokenizer.json that could take the memory or the time of the process (data/tokenizer_limits.py)
- a text with a character that the tokenizer would silently turn into its unknown token
"""

from __future__ import annotations

import functools
import json
import os
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tokenizers

from jaxrl_post.data import continuations, tokenizer_limits
from jaxrl_post.ring import json_text
from jaxrl_post.ring.json_text import of_hub, said, shown

# A text is read alone, and threads of the library would make forks of the process unsafe.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
_BYTE = re.compile(rb"<0x([0-9A-F]{2})>")
_BYTE_TEXT = re.compile(r"<0x[0-9A-F]{2}>")


class _Panics:
    """Turns a panic of the tokenizers library, as of a regular expression without end, into an error of one sentence.

    The class of a panic is no Exception and cannot be imported, so that only its name tells.
    """

    def __init__(self, what: str):
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind, error, trace) -> None:
        if kind is not None and kind.__name__ == "PanicException":
            raise ValueError(f"{self._what}: {said(error)}") from error


@dataclass(frozen=True, kw_only=True)
class JsonTokenizer:
    """A tokenizer.json. `eos_ids`: every token that ends a rollout. `special_ids`: tokens that `decode` skips."""

    model: tokenizers.Tokenizer
    eos_ids: tuple[int, ...]
    bos_id: int | None
    special_ids: tuple[int, ...]
    vocab_size: int
    longest: int

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Returns the token ids of a text. What the tokenizer puts in front stands there once, though the text begins with it."""
        encoded = self._encoded(text, special)
        ids = encoded.ids
        front = next((n for n, added in enumerate(encoded.special_tokens_mask) if not added), 0) if special else 0
        twice = next((n for n in range(front, 0, -1) if ids[front - n : front] == ids[front : front + n]), 0)
        return ids[:front] + ids[front + twice :]

    def located(self, text: str) -> list[tuple[int, int, int]]:
        """Returns the tokens of a chat template's text, each with its start and end in characters."""
        found = self._encoded(text, special=False)
        return [(token, *place) for token, place in zip(found.ids, found.offsets, strict=True)]

    def _encoded(self, text: str, special: bool) -> tokenizers.Encoding:
        with _Panics("the tokenizer fails on a text"):
            (encoded,) = self.model.encode_batch(
                [text], add_special_tokens=special
            )  # lets other threads run, as encode does not
        if self._unknown is not None and self._unknown in encoded.ids:
            _refuse_unknown(encoded, self._unknown, self.model.id_to_token(self._unknown), text)
        return encoded

    def decode(self, ids: Sequence[int], skip_special: bool = True, before: Sequence[int] = ()) -> str:
        """Returns the text of token ids, behind those of a prompt where `before` has them."""
        plain = functools.partial(self.model.decode, skip_special_tokens=skip_special)
        ids = [int(i) for i in ids]
        if not len(before):
            return plain(ids)
        return continuations.text(plain, functools.partial(self._shows, skip_special), before, ids)

    def _shows(self, skip_special: bool, id: int) -> bool:
        """Returns whether a text may be cut in front of a token, and be decoded as before (data/continuations.py)."""
        if not self._local or _BYTE_TEXT.fullmatch(self.model.id_to_token(id) or "<0x00>"):
            return False
        return continuations.visible(self.model.decode([id], skip_special_tokens=skip_special))

    def settled(self, ids: Sequence[int]) -> int:
        """Returns how many of the first ids no later one changes the text of. One broken byte breaks all bytes of a run."""
        end = len(ids)
        while end and _BYTE_TEXT.fullmatch(self.model.id_to_token(int(ids[end - 1])) or ""):
            end -= 1
        return end

    @functools.cached_property
    def _unknown(self) -> int | None:
        """Returns the id that a character without a token becomes."""
        model = self.model.model
        if isinstance(model, tokenizers.models.Unigram):
            return json.loads(model.__getstate__())["unk_id"]
        name = getattr(model, "unk_token", None)
        return None if name is None else self.model.token_to_id(name)

    @functools.cached_property
    def _local(self) -> bool:
        decoder = self.model.decoder
        return continuations.local(None if decoder is None else json.loads(decoder.__getstate__()))

    def save(self, folder: str | Path) -> None:
        """Writes tokenizer.json, and a tokenizer_config.json that names BOS and EOS, for any reader of such folders."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.model.save(str(folder / "tokenizer.json"))
        names = {"bos_token": self.bos_id, "eos_token": self.eos_ids[0] if self.eos_ids else None}
        config = {name: self.model.id_to_token(i) for name, i in names.items() if i is not None}
        config |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


@dataclass(frozen=True, kw_only=True)
class Llama2cTokenizer:
    """llama2.c's vocabulary (run.c, `build_tokenizer`): `pieces` bytes and `scores` per id.

    Id 1 is BOS, id 2 is EOS, and ids 3 to 258 are the bytes. A story model ends a text with BOS, so both end a
    rollout.
    """

    pieces: tuple[bytes, ...]
    scores: tuple[float, ...]
    ids: dict[bytes, int]
    eos_ids: tuple[int, ...] = (1, 2)
    bos_id: int | None = 1
    special_ids: tuple[int, ...] = (0, 1, 2)

    @property
    def vocab_size(self) -> int:
        return len(self.pieces)

    @functools.cached_property
    def longest(self) -> int:
        return max(map(len, self.pieces))

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Encodes a text as run.c's `encode` does.

        1. BOS and, before a text that is not empty, a space. With `special` False neither is added.
        2. One token per character. A character without a token gives one token per byte.
        3. Neighbours merge, the best-scored pair first. Of equal pairs the leftmost merges first.
        """
        out = []
        if text and special:
            out.append(self.ids[b" "])
        for letter in text:
            data = letter.encode()
            out += [self.ids[data]] if data in self.ids else [byte + 3 for byte in data]
        while (best := self._best_merge(out)) is not None:
            place, merged = best
            out[place : place + 2] = [merged]
        return [self.bos_id, *out] if special else out

    def _best_merge(self, ids: list[int]) -> tuple[int, int] | None:
        best, score = None, -1e10
        for place in range(len(ids) - 1):
            merged = self.ids.get(self.pieces[ids[place]] + self.pieces[ids[place + 1]])
            if merged is not None and self.scores[merged] > score:
                best, score = (place, merged), self.scores[merged]
        return best

    def decode(self, ids: Sequence[int], skip_special: bool = True, before: Sequence[int] = ()) -> str:
        """Decodes as run.c's `decode` does, and joins the pieces. `before`: ids of a prompt that the ids continue.

        Right after BOS a leading space is dropped. "<0x0A>" stands for its byte. Bytes that are no UTF-8 become
        U+FFFD.
        """
        plain = functools.partial(self._plain, skip_special)
        ids = [int(i) for i in ids]
        if not len(before):
            return plain(ids)
        return continuations.text(plain, lambda id: continuations.visible(plain([id])), before, ids)

    def settled(self, ids: Sequence[int]) -> int:
        """Returns how many of the first ids no later one changes the text of: all."""
        return len(ids)

    def _plain(self, skip_special: bool, ids: Sequence[int]) -> str:
        out, before = [], None
        for i in map(int, ids):
            piece = self.pieces[i]
            if before == self.bos_id and piece.startswith(b" "):
                piece = piece[1:]
            byte = _BYTE.fullmatch(piece)
            if not (skip_special and i in self.special_ids):
                out.append(bytes([int(byte.group(1), 16)]) if byte else piece)
            before = i
        return b"".join(out).decode("utf-8", errors="replace")


Tokenizer = JsonTokenizer | Llama2cTokenizer


def _refuse_unknown(encoded: tokenizers.Encoding, unknown: int, name: str, text: str) -> None:
    """Refuses a character that became the unknown token. Kept are those that a text names, and those of no text."""
    for token, added, (start, end) in zip(encoded.ids, encoded.special_tokens_mask, encoded.offsets, strict=True):
        if token == unknown and not added and text[start:end].strip() != name:
            raise ValueError(
                f"the tokenizer has no token for {text[start:end]!r} at character {start} of {text[:80]!r}"
            )


def load(path: str | Path) -> Tokenizer:
    """Returns the tokenizer of a tokenizer.json, of a folder with one, or of a llama2.c vocabulary (*.bin).

    EOS ids of a folder are those of generation_config.json, else of config.json, and the eos_token of
    tokenizer_config.json, as in transformers and vLLM. Truncation and padding of a tokenizer.json are off.

    Raises:
      ValueError: no such path, no tokenizer.json in the folder, another kind of file, an EOS id outside the
        vocabulary.
    """
    path = Path(path)
    if path.is_dir():
        if not (path / "tokenizer.json").is_file():
            held = ", ".join(sorted(file.name for file in path.iterdir()))
            raise ValueError(f"{path} holds no tokenizer.json (it holds {held or 'nothing'})")
        return _json(path / "tokenizer.json")
    if not path.is_file():
        raise ValueError(f"there is no tokenizer at {path}{of_hub(path)}")
    return _llama2c(path) if path.suffix == ".bin" else _json(path)


def beside(model: str | Path) -> Path:
    """Returns the path of a model's tokenizer: in its folder, or the one vocabulary (tok*.bin) next to a llama2.c file."""
    model = Path(model)
    if model.is_dir():
        return model
    found = sorted(model.parent.glob("tok*.bin"))
    if len(found) != 1:
        raise ValueError(f"model.tokenizer is empty and beside {model} lie {len(found)} files tok*.bin; name one")
    return found[0]


def characters(alphabet: str, eos: str = "<eos>") -> JsonTokenizer:
    """Returns a tokenizer with one token per character.

    Id 0 is `eos`. Then follow the characters in order, then "<unk>", which is never produced.
    """
    if len(set(alphabet)) != len(alphabet):
        raise ValueError(f"the alphabet {alphabet!r} has a character twice")
    vocabulary = {word: i for i, word in enumerate((eos, *alphabet, "<unk>"))}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    model.decoder = tokenizers.decoders.Fuse()
    model.add_special_tokens([tokenizers.AddedToken(eos, special=True)])
    return _built(model, (0,), None)


def _json(path: Path) -> JsonTokenizer:
    data = _object(path, most=tokenizer_limits.LARGEST)
    if "model" not in data:
        raise ValueError(f"{path} is no tokenizer.json: it has no 'model'")
    tokenizer_limits.check(data, str(path))
    try:
        with _Panics(f"{path} is a tokenizer.json that the tokenizers library does not take"):
            model = tokenizers.Tokenizer.from_buffer(path.read_bytes())  # from_file raises a bare Exception
    except ValueError as error:
        raise ValueError(
            f"{path} is a tokenizer.json that the tokenizers library does not take: {said(error)}"
        ) from error
    model.no_truncation()
    model.no_padding()
    # What the library would find only in the middle of a text, where it raises a bare Exception.
    if not model.get_vocab(with_added_tokens=True):
        raise ValueError(f"{path} has a vocabulary of 0 tokens; at least 1 is needed")
    unknown = getattr(model.model, "unk_token", None)
    if unknown is not None and model.token_to_id(unknown) is None:
        raise ValueError(f"{path} names the unknown token {shown(unknown)}, which its vocabulary has not")
    config, generation, hub = (
        _object(path.parent / f"{name}.json", optional=True)
        for name in ("tokenizer_config", "generation_config", "config")
    )
    named = [_id(model, name, config, path) for name in ("eos_token", "bos_token")]
    places = (generation, hub, hub.get("text_config"))  # a model of several parts names its ends with its text
    found = [_ids("eos_token_id", one, path) for one in places if isinstance(one, dict)]
    eos = next(filter(None, found), []) + [i for i in named[:1] if i is not None]
    bos = [i for i in named[1:] if i is not None] or _ids("bos_token_id", hub, path)
    return _built(model, tuple(dict.fromkeys(eos)), bos[0] if bos else None, path)


def _built(model: tokenizers.Tokenizer, eos: tuple[int, ...], bos: int | None, path: Path | str = "") -> JsonTokenizer:
    vocabulary = model.get_vocab(with_added_tokens=True)
    size, longest = max(vocabulary.values()) + 1, max(map(len, vocabulary))
    for i in eos:
        if not 0 <= i < size:
            raise ValueError(f"{path}: eos_token_id {shown(i)} is outside its vocabulary of {size} tokens")
    special = tuple(sorted(i for i, token in model.get_added_tokens_decoder().items() if token.special))
    return JsonTokenizer(model=model, eos_ids=eos, bos_id=bos, special_ids=special, vocab_size=size, longest=longest)


def _object(path: Path, optional: bool = False, most: int = json_text.LARGEST) -> dict:
    return {} if optional and not path.is_file() else json_text.read_object(path, str(path), most)


def _id(model: tokenizers.Tokenizer, name: str, config: dict, path: Path) -> int | None:
    """Returns the id of a token that a config names as a string or as an object with "content"."""
    token = config.get(name)
    content = token.get("content") if isinstance(token, dict) else token
    if not isinstance(content, str | None):
        raise ValueError(f"{path.parent}: {name}={shown(token)} must be a text, or an object with the text 'content'")
    return model.token_to_id(content) if content else None


def _ids(name: str, config: dict, path: Path) -> list[int]:
    value = config.get(name)
    out = [] if value is None else list(value) if isinstance(value, list) else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in out):
        raise ValueError(f"{path.parent}: {name}={shown(value)} must be an id or a list of ids")
    return out


def _llama2c(path: Path) -> Llama2cTokenizer:
    """Reads int32 length of the longest piece, then per token float32 score, int32 length and bytes. All are little-endian."""
    data, place, pieces, scores = path.read_bytes(), 4, [], []
    while place < len(data):
        if place + 8 > len(data):
            raise ValueError(f"{path} ends inside token {len(pieces)}: it is no llama2.c vocabulary, or cut")
        score, length = struct.unpack_from("<fi", data, place)
        place += 8 + length
        if length < 0 or place > len(data):
            raise ValueError(f"{path} ends inside token {len(pieces)}: it is no llama2.c vocabulary, or cut")
        pieces.append(data[place - length : place])
        scores.append(score)
    if len(pieces) < 259 or pieces[3:5] != [b"<0x00>", b"<0x01>"]:
        raise ValueError(f"{path} has {len(pieces)} tokens and no bytes at ids 3 to 258: it is no llama2.c vocabulary")
    ids: dict[bytes, int] = {}
    for i, piece in enumerate(pieces):
        ids.setdefault(piece, i)
    return Llama2cTokenizer(pieces=tuple(pieces), scores=tuple(scores), ids=ids)
