"""Weights and vocabularies of llama2.c."""

from __future__ import annotations

import struct
from pathlib import Path

from fuzz import mutations
from fuzz.child import sentence

HEADER = (8, 12, 1, 2, 2, 10, 4)  # embed, ffw, layers, heads, kv_heads, vocab_size, max_length
NUMBERS = (0, 1, -1, 2, 3, 7, 255, 1 << 16, 1 << 24, (1 << 31) - 1, -(1 << 31), 0x616B3432)
WORDS = 10 * 8 + 2 * 8 + 4 * 64 + 3 * 96 + 8 + 2 * 4 * 2


class Cases:
    """Half are weights, half vocabularies."""

    def __init__(self, folder: Path):
        from jaxrl_post.data import tokenizer
        from jaxrl_post.models import llama2c

        self._weights, self._words = folder / "weights.bin", folder / "tok.bin"
        self._load, self._read = llama2c.load, tokenizer.load
        self._body = struct.pack(f"<{WORDS}f", *(0.01 * i for i in range(WORDS)))
        pieces = [
            b"<unk>",
            b"\n<s>\n",
            b"\n</s>\n",
            *(f"<0x{i:02X}>".encode() for i in range(256)),
            b" ",
            b"a",
            b"b",
            b"ab",
        ]
        self._vocabulary = struct.pack("<i", 7) + b"".join(
            struct.pack("<fi", -float(i), len(piece)) + piece for i, piece in enumerate(pieces)
        )

    def valid(self) -> None:
        self._weights.write_bytes(struct.pack("<7i", *HEADER) + self._body)
        self._load(self._weights)
        self._words.write_bytes(self._vocabulary)
        self._encode()

    def own(self, error: BaseException) -> bool:
        return sentence(error, "weights.bin") or sentence(error, "tok.bin")

    def case(self, index, random):
        if index % 2:
            what, data = mutations.damaged(random, self._vocabulary)
            self._words.write_bytes(data)
            return f"vocabulary: {what}", self._encode
        header, body = list(HEADER), self._body
        if random.random() < 0.5:
            at = random.randrange(7)
            header[at] = random.choice(NUMBERS)
            what = f"header {at} = {header[at]}"
        elif random.random() < 0.3:
            at = 4 * random.randrange(WORDS)
            number = random.choice((float("nan"), float("inf"), -float("inf"), 3e38))
            what, body = f"number {number} at {at}", body[:at] + struct.pack("<f", number) + body[at + 4 :]
        else:
            what, body = mutations.damaged(random, body)
        self._weights.write_bytes(struct.pack("<7i", *header) + body)
        return f"weights: {what}", self._finite

    def _encode(self) -> None:
        words = self._read(self._words)
        assert isinstance(words.decode(words.encode("ab a\n")), str)

    def _finite(self) -> None:
        """Asserts that accepted weights are finite, by another way than the reader's."""
        import jax
        import numpy as np

        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(self._load(self._weights)[1]))
