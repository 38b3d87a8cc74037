"""Scores texts by a reward model: one program over rows of one fixed shape, on the engine's devices.

A row is a token at its position. Products with weights run over all rows at once, whichever texts they belong to.
Attention runs text by text, in a window that begins with the text.

Invariant: the bits of a score depend neither on the other texts nor on the text's place among them. `keeps_bits` asks the
device itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from jaxrl_post.models import decoder, layer_loop
from jaxrl_post.parallel import mesh as meshes
from jaxrl_post.trainer import recurrence

TILE = 64  # rows: XLA:CPU computes a row of a product alike at every place where counts are multiples of it
_TEXTS = 16  # of a call
_WINDOWS = 4  # of a call: its rows are as many texts of the greatest length


class RewardScorer:
    """Maps texts to rewards. `load`: from shardings and a dtype to the weights of `model`.

    Args:
      mesh: of the engine. Replicas compute the same; a replica's devices divide the weights.
      longest: tokens of the longest text, prompt and rollout together.
      dtype: of weights and activations. Rewards are float32.
    """

    def __init__(self, model: decoder.ModelConfig, load: Callable[..., Any], mesh: Mesh, *, longest: int, dtype: Any):
        self._mesh, self._longest, self._vocab = mesh, longest, model.used_vocab or model.vocab_size
        self._tokens = tiled(longest)
        program, shapes = scoring(model, mesh, self._tokens, dtype)
        self._params = load(jax.tree.map(lambda x: x.sharding, shapes[0]), dtype)
        self._program = program.lower(*shapes).compile()

    def __call__(self, texts: Sequence[np.ndarray]) -> Float[np.ndarray, " n"]:
        """Returns the reward of each text, int32[T] token ids each."""
        out = [np.zeros(0, np.float32)]
        for some in _calls(texts, _WINDOWS * self._tokens):
            given = meshes.put(_laid_out(some, self._tokens), meshes.replicated(self._mesh))
            out.append(np.asarray(jax.device_get(self._program(self._params, *given)))[: len(some)])
        return np.concatenate(out)

    def keeps_bits(self) -> bool:
        """Returns whether some texts have the same bits alone, among others, and at other places."""
        size = min(self._longest, TILE - 1)
        lengths = np.linspace(1, size, _TEXTS).astype(int)
        texts = [np.arange(n, n + length, dtype=np.int32) * 7 % self._vocab for n, length in enumerate(lengths)]
        among, turned = self(texts), self(texts[::-1])[::-1]
        alone = {at: self([texts[at]])[0] for at in (0, _TEXTS // 2, _TEXTS - 1)}
        return np.array_equal(among, turned) and all(among[at] == score for at, score in alone.items())


def tiled(tokens: int) -> int:
    return -(-tokens // TILE) * TILE


def scoring(model: decoder.ModelConfig, mesh: Mesh, tokens: int, dtype: Any) -> tuple[Any, tuple]:
    """Returns the program, not compiled, and the shapes of its arguments. `tokens`: of the longest text, in whole tiles."""
    one = meshes.replicated(mesh)
    homes = meshes.param_shardings(mesh, decoder.axes(model), "engine")
    params = jax.tree.map(
        lambda x, home: jax.ShapeDtypeStruct(x.shape, dtype, sharding=home), decoder.abstract(model), homes
    )
    rows, texts = (jax.ShapeDtypeStruct((n,), np.int32, sharding=one) for n in (_WINDOWS * tokens, _TEXTS))
    loop = layer_loop.LayerLoop(scan=mesh.devices.flat[0].platform != "cpu")

    def run(params: Any, ids: Array, positions: Array, owners: Array, starts: Array, ends: Array) -> Array:
        attend = _by_text(positions, owners, starts, tokens)
        recur = recurrence.by_text(positions, owners, starts, tokens)
        h, _ = decoder.hidden(params, model, ids, positions, attend, None, dtype=dtype, loop=loop, recur=recur)
        return decoder.rewards(params, h[ends]).astype(jnp.float32)

    return jax.jit(run, out_shardings=one), (params, rows, rows, rows, texts, texts)


def _by_text(positions: Int[Array, " R"], owners: Int[Array, " R"], starts: Int[Array, " S"], tokens: int) -> Callable:
    """Returns an `attend` by which a row sees the earlier rows of its own text.

    A text's window holds `tokens` rows from its start on. Rows of later texts in it are hidden by their order alone.
    """

    def attend(layer, q, k, v, cache, *, scale, window, soft_cap, sinks=None):
        heads = q.shape[1] // k.shape[1]
        q, k, v = (jnp.pad(x, ((0, tokens), (0, 0), (0, 0))) for x in (q, k, v))
        wide = jnp.promote_types(q.dtype, jnp.float32)
        every = jnp.arange(tokens)

        def text(start: Array) -> Array:
            mine, keys, values = (jax.lax.dynamic_slice_in_dim(x, start, tokens) for x in (q, k, v))
            keys, values = (jnp.repeat(x, heads, axis=1) for x in (keys, values))

            def block(given: tuple[Array, Array]) -> Array:
                queries, places = given
                scores = jnp.einsum("qnh,snh->nqs", queries, keys, preferred_element_type=wide) * scale
                if soft_cap is not None:
                    scores = soft_cap * jnp.tanh(scores / soft_cap)
                distance = places[:, None] - every
                seen = (distance >= 0) & (True if window is None else distance < window)
                scores = jnp.where(seen, scores, -jnp.inf)
                high, own = scores.max(-1, keepdims=True), None
                if sinks is not None:
                    own = sinks.astype(wide)[:, None, None]
                    high = jnp.maximum(high, own)
                weights = jnp.where(seen, jnp.exp(scores - high), 0)
                total = weights.sum(-1, keepdims=True)
                weights = weights / (total if own is None else total + jnp.exp(own - high))
                return jnp.einsum("nqs,snh->qnh", weights.astype(values.dtype), values)

            blocks = mine.reshape(-1, TILE, *mine.shape[1:]), every.reshape(-1, TILE)
            return jax.lax.map(block, blocks).reshape(mine.shape)

        return jax.lax.map(text, starts)[owners, positions], cache

    return attend


def _calls(texts: Sequence[np.ndarray], rows: int) -> Iterator[list[np.ndarray]]:
    """Yields texts in order, as many at a time as a call holds."""
    some: list[np.ndarray] = []
    for text in texts:
        if some and (len(some) == _TEXTS or sum(map(len, some)) + len(text) > rows):
            yield some
            some = []
        some.append(text)
    if some:
        yield some


def _laid_out(texts: Sequence[np.ndarray], tokens: int) -> tuple[np.ndarray, ...]:
    """Returns ids, positions and owner of each row, and the first and last row of each text. Rows behind are padding."""
    ids, positions, owners = (np.zeros(_WINDOWS * tokens, np.int32) for _ in range(3))
    starts, ends = np.zeros(_TEXTS, np.int32), np.zeros(_TEXTS, np.int32)
    at = 0
    for number, text in enumerate(texts):
        rows = slice(at, at + len(text))
        ids[rows], positions[rows], owners[rows] = text, np.arange(len(text)), number
        starts[number], ends[number] = at, at + len(text) - 1
        at += len(text)
    return ids, positions, owners, starts, ends
