"""Weights of Hugging Face and of llama2.c, config.json of every family, and tables of step costs."""

from __future__ import annotations

import json
import math
import shutil
import struct
from pathlib import Path
from typing import Any

from fuzz.kind import Kind
from fuzz.mutations import damaged, damaged_json, dumped

GOLDENS = Path(__file__).resolve().parents[2] / "tests" / "goldens"
FAMILIES = ("gemma2", "gemma3", "llama2", "llama3", "mistral", "qwen2", "qwen3")
INDEX = "model.safetensors.index.json"
HEADER = (8, 12, 1, 2, 2, 10, 4)  # embed, ffw, layers, heads, kv_heads, vocab_size, max_length
NUMBERS = (0, 1, -1, 2, 3, 7, 255, 1 << 16, 1 << 24, (1 << 31) - 1, -(1 << 31), 0x616B3432)
WORDS = 10 * 8 + 2 * 8 + 4 * 64 + 3 * 96 + 8 + 2 * 4 * 2
COSTS = {"step_s": {"64": 0.002, "128": 0.003, "256": 0.005}, "drafting_s": 0.0002, "opening_s": 0.05}
TABLE = {"name": "cost", "figures": {**COSTS, "train_token_s": 0.0001}}


def _finite(params: Any) -> None:
    """Asserts that accepted weights are finite, by another way than the readers'."""
    import jax
    import numpy as np

    assert all(np.isfinite(np.asarray(leaf, np.float64)).all() for leaf in jax.tree.leaves(params))


def safetensors(folder: Path) -> Kind:
    """Damages the bytes of the file, its header, its numbers, or the index of several files."""
    from jaxrl_post.models import hf

    one, several = folder / "one", folder / "several"
    shutil.copytree(GOLDENS / "llama2", one)
    hf.save(several, *hf.load(one), max_file_bytes=20_000)
    whole, index = (one / "model.safetensors").read_bytes(), json.loads((several / INDEX).read_text())
    origin = 8 + int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8:origin])

    def case(number, random):
        kind = random.choice(("header", "header", "bytes", "start", "numbers", "index"))
        if kind == "index":
            what, data = damaged_json(random, index)
            (several / INDEX).write_bytes(data)
            return f"index: {what}", lambda: hf.load(several)
        if kind == "header":
            what, text = damaged_json(random, header)
            data = len(text).to_bytes(8, "little") + text + whole[origin:]
        elif kind == "numbers":
            at = origin + 2 * random.randrange((len(whole) - origin) // 2)
            value = random.choice((b"\x00\x7e", b"\x00\x7c", b"\x00\xfc", b"\xff\xff", b"\x01\x00"))  # float16
            what, data = f"number {value.hex()} at {at}", whole[:at] + value + whole[at + 2 :]
        else:
            end = origin if kind == "start" else len(whole)
            what, data = damaged(random, whole[:end])
            data += whole[end:]
        (one / "model.safetensors").write_bytes(data)
        return f"{kind}: {what}", lambda: _finite(hf.load(one)[1])

    return Kind(valid=lambda: (hf.load(one), hf.load(several)), case=case, names=(one.name, several.name))


def llama2c(folder: Path) -> Kind:
    """Half are weights, half vocabularies."""
    from jaxrl_post.data import tokenizer
    from jaxrl_post.models import llama2c as reader

    weights, words = folder / "weights.bin", folder / "tok.bin"
    body = struct.pack(f"<{WORDS}f", *(0.01 * i for i in range(WORDS)))
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
    parts = (struct.pack("<fi", -float(i), len(piece)) + piece for i, piece in enumerate(pieces))
    vocabulary = struct.pack("<i", 7) + b"".join(parts)

    def encode() -> None:
        read = tokenizer.load(words)
        assert isinstance(read.decode(read.encode("ab a\n")), str)

    def valid() -> None:
        weights.write_bytes(struct.pack("<7i", *HEADER) + body)
        reader.load(weights)
        words.write_bytes(vocabulary)
        encode()

    def case(index, random):
        if index % 2:
            what, data = damaged(random, vocabulary)
            words.write_bytes(data)
            return f"vocabulary: {what}", encode
        header, data = list(HEADER), body
        if random.random() < 0.5:
            at = random.randrange(7)
            header[at] = random.choice(NUMBERS)
            what = f"header {at} = {header[at]}"
        elif random.random() < 0.3:
            at, value = 4 * random.randrange(WORDS), random.choice((math.nan, math.inf, -math.inf, 3e38))
            what, data = f"number {value} at {at}", body[:at] + struct.pack("<f", value) + body[at + 4 :]
        else:
            what, data = damaged(random, body)
        weights.write_bytes(struct.pack("<7i", *header) + data)
        return f"weights: {what}", lambda: _finite(reader.load(weights)[1])

    return Kind(valid=valid, case=case, names=(weights.name, words.name))


def model_config(folder: Path) -> Kind:
    """Changes one or two keys of a config.json beside valid weights: to placed weights and back to a config.json."""
    from jaxrl_post.models import hf

    given = {name: json.loads((GOLDENS / name / "config.json").read_text()) for name in FAMILIES}
    for name in FAMILIES:
        shutil.copytree(GOLDENS / name, folder / name)

    def load(name: str) -> None:
        hf.check_savable(hf.read_config(folder / name / "config.json"))
        hf.load(folder / name)

    def case(index, random):
        name = random.choice(FAMILIES)
        what, data = damaged_json(random, given[name])
        (folder / name / "config.json").write_bytes(data)
        return f"{name}: {what}", lambda: load(name)

    return Kind(valid=lambda: [load(name) for name in FAMILIES], case=case, names=(str(folder), "cannot be saved"))


def cost_table(folder: Path) -> Kind:
    """Reads a table and asks it for costs, as a run does."""
    from jaxrl_post.engine import step_cost

    file = folder / "table.json"

    def use() -> None:
        cost = step_cost.load(str(file))
        assert len(cost.digest) == 16
        assert all(0 < cost(rows) < math.inf for rows in (1, 64, 100, 4096))
        step_cost.best_size(cost, (64, 128), 3, 10, lambda rows: rows / 2)
        assert step_cost.tries_apart(cost) >= 0

    def case(index, random):
        what, data = damaged_json(random, TABLE)
        file.write_bytes(data)
        return what, use

    return Kind(valid=lambda: (file.write_bytes(dumped(TABLE)), use()), case=case, names=(file.name,))


KINDS = {"safetensors": safetensors, "llama2c": llama2c, "model_config": model_config, "cost_table": cost_table}
