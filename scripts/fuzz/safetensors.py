"""Weights of Hugging Face: one file, several files with an index, and numbers that are none."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from fuzz import mutations
from fuzz.child import sentence

GOLDEN = Path(__file__).resolve().parents[2] / "tests" / "goldens" / "llama2"
INDEX = "model.safetensors.index.json"


class Cases:
    """Damages the bytes of the file, its header, its numbers, or the index."""

    def __init__(self, folder: Path):
        from jaxrl_post.models import hf

        self._hf, self._one, self._several = hf, folder / "one", folder / "several"
        shutil.copytree(GOLDEN, self._one)
        hf.save(self._several, *hf.load(GOLDEN), max_file_bytes=20_000)
        self._data = (GOLDEN / "model.safetensors").read_bytes()
        self._origin = 8 + int.from_bytes(self._data[:8], "little")
        self._header = json.loads(self._data[8 : self._origin])
        self._index = json.loads((self._several / INDEX).read_text())

    def valid(self) -> None:
        self._hf.load(self._one)
        self._hf.load(self._several)

    def own(self, error: BaseException) -> bool:
        return sentence(error, self._one.name) or sentence(error, self._several.name)

    def case(self, index, random):
        kind = random.choice(("header", "header", "bytes", "start", "numbers", "index"))
        if kind == "index":
            what, data = mutations.damaged_json(random, self._index)
            (self._several / INDEX).write_bytes(data)
            return f"index: {what}", lambda: self._hf.load(self._several)
        if kind == "header":
            what, header = mutations.damaged_json(random, self._header)
            data = len(header).to_bytes(8, "little") + header + self._data[self._origin :]
        elif kind == "numbers":
            at = self._origin + 2 * random.randrange((len(self._data) - self._origin) // 2)
            number = random.choice((b"\x00\x7e", b"\x00\x7c", b"\x00\xfc", b"\xff\xff", b"\x01\x00"))  # float16
            what, data = f"number {number.hex()} at {at}", self._data[:at] + number + self._data[at + 2 :]
        else:
            part = self._origin if kind == "start" else len(self._data)
            what, data = mutations.damaged(random, self._data[:part])
            data += self._data[part:]
        (self._one / "model.safetensors").write_bytes(data)
        return f"{kind}: {what}", lambda: self._finite(self._hf.load(self._one)[1])

    def _finite(self, params) -> None:
        """Asserts that accepted weights are finite, by another way than the reader's."""
        import jax
        import numpy as np

        assert all(np.isfinite(np.asarray(leaf, np.float64)).all() for leaf in jax.tree.leaves(params))
