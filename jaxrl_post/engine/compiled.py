"""The compiled programs of the engine, placed on a mesh: dispatches, and what the host writes between them. `read` is the one
function that reads from the device.

With a drafter, each program exists twice. The plain one is the program of an engine without a drafter and never reads
the drafter's arrays. The drafting one does. Invariant: only compiled programs run, so a new shape is an error and never
a recompilation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxrl_post.engine import between_products, recurrent_rows
from jaxrl_post.engine.eight_bit_weights import stored
from jaxrl_post.engine.host.device import DispatchOrder
from jaxrl_post.engine.host.wire import (
    BULK,
    FIXED,
    PARTS,
    PROMPT_TILE,
    TABLE,
    TILE_TABLE,
    UPLOAD,
    DispatchResult,
    EngineSettings,
    Entry,
)
from jaxrl_post.engine.prompt_program import prefill
from jaxrl_post.engine.row_program import dispatch
from jaxrl_post.engine.row_state import Program, RowProgram, State
from jaxrl_post.engine.speculation.interface import Drafter
from jaxrl_post.kernels import attention, choice, hardware, verify
from jaxrl_post.models import cache_kinds, decoder, experts
from jaxrl_post.models.model_config import RowBlocks
from jaxrl_post.parallel import mesh as meshes

# For matrices in codes on GPUs, and for products that rows_gpu.product cuts itself. XLA would cut the sum of a product into parts,
# more of them where rows are few, and keep the parts in memory in float32.
ONE_SUM = {"xla_gpu_experimental_force_split_k": 1}
# What CUDA graphs may hold: XLA's defaults (jaxlib 0.11), and loops.
_IN_GRAPHS = "FUSION CUBLAS CUBLASLT CUDNN CUSTOM_CALL CONDITIONAL DYNAMIC_SLICE_FUSION WHILE"
ONE_GRAPH = {"xla_gpu_enable_command_buffer": _IN_GRAPHS.replace(" ", ",")}


def row_platforms(mesh: jax.sharding.Mesh) -> frozenset[str]:
    """Returns the platforms whose kernels of products and norms may be used. No compiler can divide them over devices."""
    first = mesh.devices.flat[0]
    return hardware.platforms(first, hardware.without_flash) if mesh.size == 1 else frozenset({"cpu"})


def insert(drafter: Drafter, state: State, entry: Entry) -> State:
    """Returns the state after texts entered slots and pages were copied. The drafter learns the texts."""
    states, pages = (entry.state, entry.slot), (entry.source, entry.target)
    cache = tuple(
        jax.vmap(attention.copy)(one, *pages)
        if isinstance(one, attention.Cache)
        else jax.vmap(recurrent_rows.copy)(one, *states)
        for one in state.cache
    )
    put = jax.vmap(lambda old, where, new: old.at[where].set(new, mode="drop"))
    learn = entry.argmax_tokens if entry.argmax_tokens.shape[-1] else entry.tokens
    memory = jax.vmap(drafter.enter)(state.memory, entry._replace(argmax_tokens=learn))
    tokens = put(state.tokens, entry.slot, entry.tokens)
    argmax_tokens = put(state.argmax_tokens, entry.slot, entry.argmax_tokens)
    return State(cache, tokens, argmax_tokens, memory)


def upload(tables: Any, replica: Array, offset: Array, pieces: tuple) -> Any:
    """Writes one piece of each flat array into one replica's tables, at `offset`."""
    flat = [jax.lax.dynamic_update_slice(old, new[None], (replica, offset)) for old, new in zip(tables, pieces)]
    return tables._replace(**dict(zip(tables._fields, flat)))


class Programs:
    """The compiled programs: an insertion, and one dispatch for each row size; with a drafter, each of them twice.

    Where sizes.prompt_rows is positive, also the wide prompt program, which has nothing to draft."""

    def __init__(
        self, config: decoder.ModelConfig, mesh: jax.sharding.Mesh, sizes: EngineSettings, drafter: Drafter = Drafter()
    ):
        shards = verify.Shards(functools.partial(meshes.by_vocab, mesh), meshes.TENSOR, mesh.shape[meshes.TENSOR])
        sizes = between_products.resolved(config, mesh, sizes)
        self.sizes = replace(sizes, shards=shards if mesh.size > 1 else None)
        if sizes.products == FIXED:
            config = replace(config, row_blocks=RowBlocks(row_platforms(mesh)))
        self.config, self.mesh, self.drafter = config, mesh, drafter
        self._fixed = dict(
            config=config,
            dtype=sizes.dtype,
            spread=functools.partial(meshes.by_heads, mesh, cache=attention.divided(meshes.head_axis, sizes.kv)),
            spread_states=functools.partial(meshes.by_state_heads, mesh, recurrent_rows.divided(meshes.head_axis)),
            routing=experts.Routing(
                experts.highest, functools.partial(meshes.by_experts, mesh), choice.of_experts(mesh.devices.flat[0])
            ),
            platforms=hardware.platforms(mesh.devices.flat[0]),
            of_states=hardware.platforms(mesh.devices.flat[0], hardware.without_flash),
        )
        of = functools.partial(between_products.of, config, functools.partial(meshes.by_replicas, mesh))
        self._between = of if self.sizes.products == PARTS else None
        self._small = choice.of_small_arrays(mesh.devices.flat[0], functools.partial(meshes.by_replicas, mesh))
        self._whole = meshes.replicated(mesh)
        self._blocks = meshes.slot_sharding(mesh)
        by_axis = functools.partial(meshes.head_axis, replicas=True)
        pages, states = jax.tree.map(
            functools.partial(jax.sharding.NamedSharding, mesh),
            (attention.divided(by_axis, sizes.kv), recurrent_rows.divided(by_axis)),
        )
        self._on_gpu = mesh.devices.flat[0].platform in hardware.GPU
        self._options = ONE_SUM if self._on_gpu and config.eight_bits is not None else None
        own = [one for one in config.kept if one.of is None]
        self._placed = State(
            tuple(pages if isinstance(one, cache_kinds.Pages) else states for one in own), *[self._blocks] * 3
        )
        self._dispatches: dict[tuple[int, bool], Callable] = {}
        self._inserts: dict[bool, Callable] = {}
        self._prefills: dict[int, Callable] = {}  # by rows of the wide prompt program, where there is one

    def compile(self, params: Any) -> None:
        """Compiles every program for weights of these shapes, dtypes and shardings."""
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), params)
        for drafter in dict.fromkeys((Drafter(), self.drafter)):
            for rows in sorted(self.sizes.row_sizes):
                self._dispatches[rows, drafter.width > 0] = self._dispatch_program(like, drafter, rows)
            self._inserts[drafter.width > 0] = self._insert_program(drafter)
        if self.sizes.prompt_rows:
            self._prefills[self.sizes.prompt_rows] = self._prefill_program(like)
        self._blanks = self._blank_programs(self.drafter)
        self._uploads = self._upload_programs(self.drafter)

    def _dispatch_program(self, params: Any, drafter: Drafter, rows: int) -> Callable:
        s, (state, tables) = self.sizes, self._shapes(drafter)
        own = dict(small=self._small, between=self._between)
        program = RowProgram(rows=rows, sizes=s, drafter=drafter, **own, **self._fixed)
        run = functools.partial(dispatch, program)
        options = ONE_SUM if self._between else self._options or {}
        options |= ONE_GRAPH if s.one_graph and self._on_gpu else {}
        run = jax.jit(
            run, donate_argnums=2, out_shardings=(self._placed, self._whole), compiler_options=options or None
        )
        given = params, tables, state, self._ints((s.replicas, s.slots, TABLE + s.blocks)), self._ints((3,))
        # The mesh names the device to kernels of Triton where there is none.
        with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
            return run.lower(*given).compile()

    def _insert_program(self, drafter: Drafter) -> Callable:
        s, (state, _) = self.sizes, self._shapes(drafter)
        entry = self._ints((s.replicas, s.inserts, len(Entry._fields) - 2 + s.max_length + self.watched(drafter)))

        def put(state: State, joined: jax.Array) -> State:
            return insert(drafter, state, Entry.parted(joined, s.max_length))

        return jax.jit(put, donate_argnums=0, out_shardings=self._placed).lower(state, entry).compile()

    def _prefill_program(self, params: Any) -> Callable:
        s, (state, _) = self.sizes, self._shapes(Drafter())
        tiles = self._ints((s.replicas, s.prompt_rows // PROMPT_TILE, TILE_TABLE + s.blocks))
        plain = replace(self.config, row_blocks=None)  # the wide program has one number of rows
        run = functools.partial(prefill, Program(**self._fixed | {"config": plain}))
        run = jax.jit(run, donate_argnums=2, out_shardings=self._placed.cache, compiler_options=self._options)
        return run.lower(params, state.tokens, state.cache, tiles).compile()

    def _blank_programs(self, drafter: Drafter) -> tuple[Callable, ...]:
        """Returns what makes an empty state, empty tables, and what stands for a drafter's state where none is read."""
        return tuple(
            jax.jit(make, out_shardings=home).lower().compile()
            for make, home in (
                (lambda: self.blanks(drafter)[0], self._placed),
                (lambda: self.blanks(drafter)[1], self._blocks),
                (lambda: self.blanks(Drafter())[0][2:], self._placed[2:]),
            )
        )

    def _upload_programs(self, drafter: Drafter) -> dict[int, Callable]:
        """Returns what writes pieces of a drafter's tables, by the entries of a piece."""
        _, tables = self._shapes(drafter)
        sizes = [size for size in (UPLOAD, BULK) if tables and tables[0].shape[1] >= size]
        return {
            size: jax.jit(upload, donate_argnums=0, out_shardings=self._blocks)
            .lower(
                tables,
                self._ints(()),
                self._ints(()),
                tuple(jax.ShapeDtypeStruct((size,), x.dtype, sharding=self._whole) for x in tables[:-1]),
            )
            .compile()
            for size in sizes
        }

    def _ints(self, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=self._whole)

    def _shapes(self, drafter: Drafter) -> tuple[State, Any]:
        """Describes state and tables with this drafter, with their places."""
        state, tables = jax.eval_shape(lambda: self.blanks(drafter))
        return self._described(state, self._placed), self._described(tables, self._blocks)

    @staticmethod
    def _described(tree: Any, homes: Any) -> Any:
        homes = jax.tree.map(
            lambda home, part: jax.tree.map(lambda _: home, part),
            homes,
            tree,
            is_leaf=lambda x: isinstance(x, jax.sharding.Sharding),
        )
        return jax.tree.map(lambda x, home: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=home), tree, homes)

    def watched(self, drafter: Drafter) -> int:
        """Returns the positions of a slot whose argmax token is kept."""
        return self.sizes.max_length if drafter.watches else 0

    def temporaries(self) -> dict[str, int]:
        """Returns the bytes of temporary memory on a device, by program."""
        return {name: program.memory_analysis().temp_size_in_bytes for name, program in self.compiled.items()}

    @property
    def compiled(self) -> dict[str, Any]:
        """Returns the programs of a step, by name."""
        programs = {f"dispatch_{rows}{'_drafting' * drafts}": run for (rows, drafts), run in self._dispatches.items()}
        programs |= {f"insert{'_drafting' * drafts}": run for drafts, run in self._inserts.items()}
        return programs | {f"prefill_{rows}": run for rows, run in self._prefills.items()}

    def blanks(self, drafter: Drafter) -> tuple[State, Any]:
        """Returns an empty state and empty tables, not placed on devices."""
        s = self.sizes

        def each(x):
            return jnp.broadcast_to(x, (s.replicas, *x.shape))

        def kept(one: cache_kinds.Kind) -> Any:
            if isinstance(one, cache_kinds.Pages):
                return attention.empty(s.pages, s.page_size, one.kv_heads, one.head_dim, s.dtype, s.kv)
            return recurrent_rows.empty(s.slots, s.state_rows, one, s.dtype)

        cache = tuple(jax.tree.map(each, kept(one)) for one in self.config.kept if one.of is None)
        tables, memory = jax.tree.map(each, drafter.empty(s.slots))
        texts = (jnp.zeros((s.replicas, s.slots, size), jnp.int32) for size in (s.max_length, self.watched(drafter)))
        return State(cache, *texts, memory), tables

    def blank(self) -> tuple[State, Any]:
        """Returns an empty state and empty tables on the devices."""
        state, tables, nothing = self._blanks
        self._nothing = nothing()
        return state(), tables()

    def _through(self, run: Callable[[State], tuple], drafts: bool, state: State) -> tuple:
        """Runs a program on the state. A program that does not draft gets an empty drafter's state instead of the real
        one."""
        if drafts or not self.drafter.width:
            return run(state)
        state, kept = State(*state[:2], *self._nothing), state[2:]
        state, *more = run(state)
        self._nothing = state[2:]
        return State(*state[:2], *kept), *more

    def dispatch(self, order: DispatchOrder, params: Any, tables: Any, state: State) -> tuple[State, DispatchResult]:
        """Starts one dispatch. Returns the new state, and the result to `read`."""
        run, tables = self._dispatches[order.rows, order.drafts], tables if order.drafts else ()
        scalars = np.array([self.sizes.steps_per_dispatch, order.freed, order.clones], np.int32)
        packed, scalars = meshes.put((order.packed, scalars), self._whole)
        return self._through(lambda state: run(params, tables, state, packed, scalars), order.drafts, state)

    def prefill(self, params: Any, state: State, tiles: np.ndarray) -> State:
        run, tiles = self._prefills[self.sizes.prompt_rows], meshes.put(tiles, self._whole)
        return state._replace(cache=run(params, state.tokens, state.cache, tiles))

    def insert(self, state: State, entry: Entry, drafts: bool) -> State:
        """Returns the state after an insertion. `drafts`: the drafter learns the texts too."""
        joined = meshes.put(entry.joined(), self._whole)
        return self._through(lambda state: (self._inserts[drafts](state, joined),), drafts, state)[0]

    def upload(self, tables: Any, replica: int, offset: int, arrays: tuple[np.ndarray, ...]) -> Any:
        """Writes equally long flat arrays at `offset` of a replica's tables, in pieces of BULK and UPLOAD entries.

        The last piece is padded with zeros to a whole UPLOAD, and the tables must have room for it."""
        end = -(-arrays[0].size // UPLOAD) * UPLOAD
        padded = [np.pad(array, (0, end - array.size)) for array in arrays]
        at = 0
        while at < end:
            size = max(size for size in self._uploads if at + size <= end)
            pieces = tuple(array[at : at + size] for array in padded)
            tables = self._uploads[size](
                tables,
                *(meshes.put(np.int32(x), self._whole) for x in (replica, offset + at)),
                meshes.put(pieces, self._whole),
            )
            at += size
        return tables

    def rated(self, tables: Any, rates: np.ndarray) -> Any:
        """Returns the tables with new rates, the same for every replica."""
        return tables._replace(
            rates=meshes.put(np.broadcast_to(rates, (self.sizes.replicas, rates.size)).copy(), self._blocks)
        )


def of_shapes(
    model: decoder.ModelConfig, mesh: jax.sharding.Mesh, sizes: EngineSettings, drafter: Drafter = Drafter()
) -> Programs:
    """Returns the compiled programs of an engine of these sizes. Needs shapes alone, so that a plan can use it."""
    own = stored(model, sizes.weights)
    homes = meshes.param_shardings(mesh, decoder.axes(own), "engine")
    programs = Programs(own, mesh, replace(sizes, replicas=meshes.replicas(mesh)), drafter)
    params = decoder.abstract(own, sizes.dtype)
    programs.compile(jax.tree.map(lambda x, home: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=home), params, homes))
    return programs


def temporaries(
    model: decoder.ModelConfig, mesh: jax.sharding.Mesh, sizes: EngineSettings, drafter: Drafter = Drafter()
) -> dict[str, int]:
    """Returns the bytes of temporary memory on a device, by program, for an engine of these sizes.

    Weights, pages and tokens are not counted."""
    return of_shapes(model, mesh, sizes, drafter).temporaries()


def read(tree: Any) -> Any:
    """Waits for device arrays and returns them as numpy. Every read of the engine from a device is made here."""
    return jax.device_get(tree)
