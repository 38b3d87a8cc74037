"""Reads weights of karpathy/llama2.c in its export "version 0", the format of stories260K.bin.

The file holds, in this order:
- Seven little-endian int32: embed, ffw, layers, heads, kv_heads, vocab_size, max_length. A negative vocab_size means
  that the head is not the embedding.
- float32 matrices [out, in], each kind for all layers at once.
- Two tables of cosines and sines, which are not used here.
- The head, if it is separate.

The format rotates neighbouring pairs (2i, 2i+1) of a head. q and k are reordered for the decoder's pairs (i, i + H/2),
which changes no score.

Refuses the later, versioned exports, and any file whose length differs from what its header requires.
"""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np

from jaxrl_post.models import tensor_file
from jaxrl_post.models.model_config import ModelConfig

_HEADER = 7
_VERSIONED = 0x616B3432  # "ak42", the first word of exports that are not read here
_SANE, _LAYERS = 1 << 24, 1 << 12  # no field of a real header is larger, and no number of layers


def load(path: str | Path) -> tuple[ModelConfig, dict]:
    """Returns the shape and the float32 params (host numpy) of a llama2.c file.

    Raises:
      ValueError: the file is missing, of another format, or shorter or longer than its header says. Or a number is
        not finite.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"llama2.c weights {path}: no such file")
    data = path.read_bytes()
    if len(data) % 4 or len(data) < 4 * _HEADER:
        raise ValueError(
            f"llama2.c weights {path}: {len(data)} bytes are no header of {4 * _HEADER} bytes followed by "
            f"float32 numbers"
        )
    words = np.frombuffer(data, "<f4")
    config = _config(path, words[:_HEADER].view("<i4"))
    shapes = _shapes(config)
    need = _HEADER + sum(int(np.prod(shape)) for shape in shapes.values())
    if words.size != need:
        raise ValueError(
            f"llama2.c weights {path}: the header asks for {4 * need} bytes, the file has {4 * words.size}"
        )
    raw, at = {}, _HEADER
    for name, shape in shapes.items():
        size = int(np.prod(shape))
        raw[name] = words[at : at + size].reshape(shape).astype(np.float32)
        tensor_file.refuse_not_finite(f"llama2.c weights {path}", name, raw[name])
        at += size
    return config, _params(config, raw)


def _config(path: Path, header: np.ndarray) -> ModelConfig:
    if int(header[0]) == _VERSIONED:
        raise ValueError(
            f"llama2.c weights {path}: a versioned export (first word 'ak42'); only version 0 is read, "
            f"export it with --version 0"
        )
    names = ("embed", "ffw", "layers", "heads", "kv_heads", "vocab_size", "max_length")
    given = dict(zip(names, map(int, header), strict=True))
    tied, given["vocab_size"] = given["vocab_size"] > 0, abs(given["vocab_size"])
    embed, heads, kv_heads = given["embed"], given["heads"], given["kv_heads"]
    for name, number in given.items():
        if not 1 <= number <= (_LAYERS if name == "layers" else _SANE):
            raise ValueError(f"llama2.c weights {path}: the header says {name}={number}, which no such file has")
    if embed % heads or (embed // heads) % 2 or heads % kv_heads:
        raise ValueError(
            f"llama2.c weights {path}: the header says embed={embed}, heads={heads}, kv_heads={kv_heads}, "
            f"which do not divide into even head sizes"
        )
    return ModelConfig(**given, head_dim=embed // heads, tied=tied, rope_theta=10000.0, norm_eps=1e-5)


def _shapes(c: ModelConfig) -> dict[str, tuple[int, ...]]:
    shapes = {
        "embed": (c.vocab_size, c.embed),
        "attn_norm": (c.layers, c.embed),
        "q": (c.layers, c.heads * c.head_dim, c.embed),
        "k": (c.layers, c.kv_heads * c.head_dim, c.embed),
        "v": (c.layers, c.kv_heads * c.head_dim, c.embed),
        "o": (c.layers, c.embed, c.heads * c.head_dim),
        "ffw_norm": (c.layers, c.embed),
        "gate": (c.layers, c.ffw, c.embed),
        "down": (c.layers, c.embed, c.ffw),
        "up": (c.layers, c.ffw, c.embed),
        "final_norm": (c.embed,),
        "cosines": (c.max_length, c.head_dim // 2),
        "sines": (c.max_length, c.head_dim // 2),
    }
    return shapes if c.tied else {**shapes, "head": (c.vocab_size, c.embed)}


def _params(c: ModelConfig, raw: dict[str, np.ndarray]) -> dict:
    halves = np.concatenate([np.arange(0, c.head_dim, 2), np.arange(1, c.head_dim, 2)])

    def heads(name: str, layer: int, count: int) -> np.ndarray:
        return raw[name][layer].T.reshape(c.embed, count, c.head_dim)

    def one(layer: int) -> dict:
        return {
            "attn_norm": raw["attn_norm"][layer],
            "q": heads("q", layer, c.heads)[..., halves],
            "k": heads("k", layer, c.kv_heads)[..., halves],
            "v": heads("v", layer, c.kv_heads),
            "o": raw["o"][layer].T.reshape(c.heads, c.head_dim, c.embed),
            "ffw_norm": raw["ffw_norm"][layer],
            "gate": raw["gate"][layer].T,
            "up": raw["up"][layer].T,
            "down": raw["down"][layer].T,
        }

    params = {
        "embed": raw["embed"],
        "layers": {str(layer): one(layer) for layer in range(c.layers)},
        "final_norm": raw["final_norm"],
    }
    if not c.tied:
        params["head"] = raw["head"].T
    return jax.tree.map(np.ascontiguousarray, params)
