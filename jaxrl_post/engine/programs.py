"""The compiled programs of the engine, placed on a mesh, and the one door from device to host.

Invariant: only what was compiled before ever runs, so a new shape is an error and never a recompilation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_post import mesh as meshes
from jaxrl_post.engine.drafter import Drafter
from jaxrl_post.engine.drafts import Off
from jaxrl_post.engine.rows import BULK, TABLE, UPLOAD, Entry, Sizes, State, Told, dispatch, insert, upload
from jaxrl_post.kernels import attention, verify
from jaxrl_post.models import decoder


class Programs:
    """The compiled programs, one dispatch for each row size, and one more that drafts. Only these ever run, so a new shape is
    an error, not a recompilation."""

    def __init__(self, config: decoder.ModelConfig, mesh: jax.sharding.Mesh, sizes: Sizes, row_sizes: tuple[int, ...],
                 dtype: Any, drafter: Drafter = Off()):
        shards = verify.Shards(functools.partial(meshes.by_vocab, mesh), meshes.TENSOR, mesh.shape[meshes.TENSOR])
        self.sizes = replace(sizes, shards=shards if mesh.size > 1 else None)
        self.config, self.mesh, self.row_sizes, self.dtype = config, mesh, row_sizes, dtype
        self.drafter = drafter
        self._whole = meshes.replicated(mesh)
        self._blocks = meshes.slot_sharding(mesh)
        cached = meshes.cache_sharding(mesh)
        self._placed = State(tuple(attention.Cache(cached) for _ in range(config.layers)), *[self._blocks] * 3)
        self._dispatches: dict[tuple[int, bool], Callable] = {}

    def compile(self, params: Any) -> None:
        """Compiles everything for weights like these."""
        s = self.sizes
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), params)
        tables, memory = (self._described(x, self._blocks) for x in jax.eval_shape(self._blank_drafter))
        state = self._described(jax.eval_shape(self._blank), self._placed)
        ints = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32, sharding=self._whole)
        spread = functools.partial(meshes.by_heads, self.mesh)
        for rows in self.row_sizes:
            for drafter in dict.fromkeys((Off(), self.drafter)):
                run = jax.jit(functools.partial(dispatch, rows, s, self.config, self.dtype, drafter, spread),
                              donate_argnums=2, out_shardings=(self._placed, self._whole))
                self._dispatches[rows, drafter.width > 0] = run.lower(
                    like, tables, state, ints((s.replicas, s.slots, TABLE + s.blocks)), ints((3,))).compile()
        some = ints((s.replicas, s.inserts))
        texts = {"tokens": s.max_length, "favourites": self.watched}
        entry = Entry(**{name: some for name in Entry._fields}
                      | {name: ints((s.replicas, s.inserts, size)) for name, size in texts.items()})
        self._insert = jax.jit(functools.partial(insert, self.drafter), donate_argnums=0,
                               out_shardings=self._placed).lower(state, entry).compile()
        self._blanks = tuple(jax.jit(make, out_shardings=home).lower().compile() for make, home in (
            (self._blank, self._placed), (lambda: self._blank_drafter()[0], self._blocks)))
        self._uploads = {}
        for size in (UPLOAD, BULK) if tables else ():
            if tables[0].shape[1] >= size:
                pieces = tuple(jax.ShapeDtypeStruct((size,), x.dtype, sharding=self._whole) for x in tables[:-1])
                self._uploads[size] = jax.jit(upload, donate_argnums=0, out_shardings=self._blocks).lower(
                    tables, ints(()), ints(()), pieces).compile()

    @staticmethod
    def _described(tree: Any, homes: Any) -> Any:
        homes = jax.tree.map(lambda home, part: jax.tree.map(lambda _: home, part), homes, tree,
                             is_leaf=lambda x: isinstance(x, jax.sharding.Sharding))
        return jax.tree.map(lambda x, home: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=home), tree, homes)

    @property
    def watched(self) -> int:
        """Positions of a slot of which the likeliest token is kept."""
        return self.sizes.max_length if self.drafter.watches else 0

    def temporaries(self) -> dict[str, int]:
        """Bytes that each compiled program needs on a device beside what it is given and gives back."""
        return {name: program.memory_analysis().temp_size_in_bytes for name, program in self.compiled.items()}

    @property
    def compiled(self) -> dict[str, Any]:
        """What a step runs of what `compile` made, by name."""
        programs = {f"dispatch_{rows}{'_drafting' * drafts}": run for (rows, drafts), run in self._dispatches.items()}
        return programs | {"insert": self._insert}

    def _blank_drafter(self) -> tuple[Any, Any]:
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (self.sizes.replicas, *x.shape)),
                            self.drafter.empty(self.sizes.slots))

    def _blank(self) -> State:
        s, c = self.sizes, self.config
        cache = tuple(jax.tree.map(lambda x: jnp.broadcast_to(x, (s.replicas, *x.shape)),
                                   attention.empty(s.pages, s.page, c.kv_heads, c.head_dim, self.dtype))
                      for _ in range(c.layers))
        return State(cache, *(jnp.zeros((s.replicas, s.slots, size), jnp.int32) for size in (s.max_length, self.watched)),
                     self._blank_drafter()[1])

    def blank(self) -> tuple[State, Any]:
        """An empty state and empty tables, placed."""
        state, tables = self._blanks
        return state(), tables()

    def dispatch(self, rows: int, drafts: bool, params: Any, tables: Any, state: State, packed: np.ndarray, *, steps: int,
                 freed: int, clones: bool) -> tuple[State, Told]:
        """One dispatch; the new state, and on the host what it told."""
        scalars = np.array([steps, freed, clones], np.int32)
        state, told = self._dispatches[rows, drafts](params, tables, state, meshes.put(packed, self._whole),
                                                     meshes.put(scalars, self._whole))
        return state, read(told)

    def insert(self, state: State, entry: Entry) -> State:
        """Puts texts and copies pages, `Sizes.inserts` a replica at once."""
        return self._insert(state, meshes.put(entry, self._whole))

    def upload(self, tables: Any, replica: int, offset: int, arrays: tuple[np.ndarray, ...]) -> Any:
        """Puts equally long flat arrays at `offset` of a replica's tables, in pieces of BULK and UPLOAD; what lies behind them
        up to a whole UPLOAD is overwritten with zeros, and there must be room for it."""
        end = -(-arrays[0].size // UPLOAD) * UPLOAD
        padded = [np.pad(array, (0, end - array.size)) for array in arrays]
        at = 0
        while at < end:
            size = max(size for size in self._uploads if at + size <= end)
            pieces = tuple(array[at:at + size] for array in padded)
            tables = self._uploads[size](tables, *(meshes.put(np.int32(x), self._whole) for x in (replica, offset + at)),
                                         meshes.put(pieces, self._whole))
            at += size
        return tables

    def rated(self, tables: Any, rates: np.ndarray) -> Any:
        """The tables with other rates, the same for every replica."""
        return tables._replace(rates=meshes.put(np.broadcast_to(rates, (self.sizes.replicas, rates.size)).copy(), self._blocks))


def temporaries(model: decoder.ModelConfig, mesh: jax.sharding.Mesh, *, row_sizes: Sequence[int], dtype: Any,
                drafter: Drafter = Off(), **sizes: int | bool) -> dict[str, int]:
    """Bytes that each program of an engine of these settings needs on a device beside weights, pages and tokens: for a
    plan, from shapes alone."""
    homes = meshes.param_shardings(mesh, decoder.axes(model), "engine")
    programs = Programs(model, mesh, Sizes.of(meshes.replicas(mesh), **sizes), tuple(sorted(row_sizes)), dtype, drafter)
    programs.compile(jax.tree.map(lambda x, home: jax.ShapeDtypeStruct(x.shape, dtype, sharding=home),
                                  decoder.abstract(model), homes))
    return programs.temporaries()


def read(tree: Any) -> Any:
    """The one door from device to host: waits, and returns numpy."""
    return jax.device_get(tree)
