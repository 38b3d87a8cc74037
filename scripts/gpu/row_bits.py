"""Which bits of a row depend on its place among the rows: those of products, of paged attention and of sampling.

An engine's promise needs that none does. Bits may depend on the number of rows, as a run drops such sizes at its start
(jaxrl_post/engine/bit_probe.py). Figures without a bound tell where they do.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from gpu import drawing, packed_rows, paged_attention
from gpu.part import Part

from jaxrl_post.kernels import attention, verify
from jaxrl_post.models.model_config import ModelConfig
from jaxrl_post.models.presets import PRESETS

NAMES = ("qwen2_5_0_5b", "qwen2_5_7b")
ROWS = (128, 256)
SLOTS, DRAFTS = 16, 7
CONTEXTS = (68, 196, 1026)  # the last rows of each lie in two pages


def everywhere(part: Part, models: Mapping[str, ModelConfig] | None = None, rows: Sequence[int] = ROWS) -> None:
    """Compares the bits of rows at other places, beside other rows."""
    for name, model in (models or {name: PRESETS[name] for name in NAMES}).items():
        products(part, name, model, *rows)
        attending(part, name, model)
        sampling(part, name, model.vocab_size, *rows)


def of_one_tile(part: Part, models: Mapping[str, ModelConfig] | None = None, rows: Sequence[int] = ROWS) -> None:
    """Compares the bits of products in a process whose flags fix one tile. Whether 128 rows have those of 256 is asked."""
    for name, model in (models or {name: PRESETS[name] for name in NAMES}).items():
        products(part, name, model, *rows, section="row_bits_one_tile")


def shapes(m: ModelConfig) -> dict[str, tuple[int, int]]:
    """Returns inputs and outputs of the matrices of a layer and of the head."""
    return {
        "q": (m.embed, m.heads * m.head_dim),
        "kv": (m.embed, m.kv_heads * m.head_dim),
        "o": (m.heads * m.head_dim, m.embed),
        "up": (m.embed, m.ffw),
        "down": (m.ffw, m.embed),
        "head": (m.embed, m.vocab_size),
    }


def products(part: Part, name: str, m: ModelConfig, few: int, many: int, section: str = "row_bits") -> None:
    """Compares each product with weights of a layer and of the head: rows reversed, and fewer rows."""
    for what, (width, out) in shapes(m).items():
        key = f"{section}.{name}.{what}"
        if not part.wants(f"{key}_equal_in_{few}_rows", 3.0):
            continue
        dtype = jnp.float32 if what == "head" else jnp.bfloat16
        x = jax.random.normal(jax.random.key(5), (many, width), jnp.bfloat16)
        w = jax.random.normal(jax.random.key(6), (width, out), jnp.bfloat16)
        run = jax.jit(functools.partial(jnp.matmul, preferred_element_type=dtype))
        whole = run(x, w)
        same = packed_rows.same_bits([whole], [run(x[::-1], w)[::-1]])
        part.figure(f"{key}_equal_at_other_places", same, equals=True)
        part.figure(f"{key}_equal_in_{few}_rows", packed_rows.same_bits([whole[:few]], [run(x[:few], w)]))


def attending(part: Part, name: str, m: ModelConfig) -> None:
    """Compares rows of a slot that share a tile with the same rows, each alone."""
    each, shape = 1 + DRAFTS, (m.heads, m.kv_heads, m.head_dim)
    q, cache, rows = paged_attention.inputs(SLOTS, max(CONTEXTS), DRAFTS, *shape)
    run = jax.jit(functools.partial(attention.attention, scale=m.head_dim**-0.5, window=None, soft_cap=None))
    for context in CONTEXTS:
        key = f"row_bits.{name}.attention_of_{context}_equal_alone"
        if not part.wants(key, 5.0):
            continue
        rows = rows._replace(position=jnp.tile(jnp.arange(context - each, context, dtype=jnp.int32), SLOTS))
        together = run(q, cache, rows)
        same = [
            packed_rows.same_bits([together[row::each]], [run(*_every(q, cache, rows, row, each))])
            for row in range(each)
        ]
        part.figure(key, all(same), equals=True)


def _every(q: jax.Array, cache: attention.Cache, rows: attention.Rows, first: int, step: int) -> tuple:
    """Returns queries, cache and rows with row `first` of each slot alone."""
    chosen = slice(first, None, step)
    fewer = rows._replace(slot=rows.slot[chosen], position=rows.position[chosen], real=rows.real[chosen])
    return q[chosen], cache, fewer


def sampling(part: Part, name: str, vocab: int, few: int, many: int) -> None:
    """Compares what rows draw, from wide and from narrow distributions: rows reversed, and fewer rows."""
    run = jax.jit(verify.verify_sample)

    def drawn(given: Sequence[jax.Array], order: slice) -> list[jax.Array]:
        return jax.tree.leaves(run(*(x[order] for x in given)))

    back, first = slice(None, None, -1), slice(few)
    for what, scale in (("wide", 1.0), ("narrow", 10.0)):
        key = f"row_bits.{name}.{what}_draws"
        if not part.wants(f"{key}_equal_in_{few}_rows", 3.0):
            continue
        logits, *numbers = drawing.inputs(many, vocab)
        given = (scale * logits, *numbers)
        whole = drawn(given, slice(None))
        same = packed_rows.same_bits(whole, [x[back] for x in drawn(given, back)])
        part.figure(f"{key}_equal_at_other_places", same, equals=True)
        part.figure(f"{key}_equal_in_{few}_rows", packed_rows.same_bits([x[first] for x in whole], drawn(given, first)))
