"""The placement of arrays: meshes of four axes, and the only PartitionSpecs of the project.

Learner and engine have one mesh together or one each. Axes: `data` copies weights and splits the batch, `fsdp` splits
both, and `tensor` splits heads, kv_heads, ffw and vocab. `expert` splits the experts. For all other weights it is like
`data` in the learner, and in the engine all of a replica's devices along it compute the same.

Other modules ask by logical axis name and never write a spec. All axes are Auto: the compiler (GSPMD) places what is
not constrained. A division with a remainder is refused in one sentence.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxrl_post.parallel import device_order

AXES = DATA, FSDP, EXPERT, TENSOR = "data", "fsdp", "expert", "tensor"
LINE = "device"  # the axis of devices that stand in line to give pieces to each other
REPLICAS = (DATA, FSDP)  # the engine's replicas are spread over both
COPIES = (DATA, EXPERT)  # the learner's weights, but for experts, are the same along both
ROWS = (*COPIES, FSDP)  # of the learner's batch; those of one place along COPIES lie one after another
VOCAB_SHARDS = (TENSOR, FSDP)  # the learner's head is split over both

# Logical axis name -> mesh axis, by room. A name that is absent, or None, is replicated.
ENGINE_RULES = {"heads": TENSOR, "kv_heads": TENSOR, "ffw": TENSOR, "vocab": TENSOR, "expert": EXPERT}
LEARNER_RULES = ENGINE_RULES | {"embed": FSDP}
RULES = {"learner": LEARNER_RULES, "engine": ENGINE_RULES}
LOGICAL_AXES = ("vocab", "embed", "heads", "kv_heads", "head_dim", "ffw", "expert", "layers", None)


def make_mesh(
    data: int = 1, fsdp: int = 1, tensor: int = 1, devices: Sequence[Any] | None = None, expert: int = 1
) -> Mesh:
    """Returns the mesh over the first data*fsdp*expert*tensor devices of all processes, ordered for their network.

    Args:
      devices: what is there; None: what jax sees.

    Raises:
      ValueError: a size is below 1, more devices are asked for than exist, or an axis but data would cross TPU slices.
    """
    sizes = (data, fsdp, expert, tensor)
    if min(sizes) < 1:
        raise ValueError(f"mesh: every axis must be at least 1, got {device_order.named(sizes)}")
    needed, devices = int(np.prod(sizes)), devices or jax.devices()
    if needed > len(devices):
        raise ValueError(
            f"mesh: {device_order.product(sizes)}={'*'.join(map(str, device_order.shown(sizes).values()))}={needed} devices "
            f"were asked for and {len(devices)} are there; the largest valid product is {len(devices)}"
        )
    return _mesh(device_order.ordered(device_order.chosen(devices, sizes), sizes), sizes)


def make_split(
    data: int,
    fsdp: int,
    tensor: int,
    engine: int,
    engine_tensor: int = 0,
    devices: Sequence[Any] | None = None,
    expert: int = 1,
    engine_expert: int = 0,
) -> tuple[Mesh, Mesh]:
    """Returns two meshes without a common device: the learner's and the engine's.

    The learner's has data*fsdp*expert*tensor devices. The engine's has `engine` devices in replicas of engine_expert*engine_tensor,
    where 0 stands for the learner's size. With several processes there are two forms:
    - Whole processes, where both numbers are multiples of the devices of a process, and no process is left over. The
      first processes learn, and the others generate.
    - Else every process has an equal part of both meshes: as many learner devices as engine devices.

    Args:
      devices: as in `make_mesh`.

    Raises:
      ValueError: there are too few devices, or processes cannot have equal parts, or learner and engine differ in their
        number of devices where processes have both. With several slices also: an axis but the learner's data, or a
        replica, would lie in two of them.
    """
    sizes, learner, devices = (data, fsdp, expert, tensor), data * fsdp * expert * tensor, devices or jax.devices()
    inner = (engine_expert or expert, engine_tensor or tensor)
    replica = math.prod(inner)
    theirs = (engine // replica, 1, *inner)
    processes = 1 + max(device.process_index for device in devices)
    own = [[device for device in devices if device.process_index == process] for process in range(processes)]
    if parts := _whole_processes(own, learner, engine, data):
        learners, engines = ([device for some in part for device in some] for part in parts)
        device_order.check_replicas(engines, replica)
        return _mesh(device_order.ordered(learners, sizes), sizes), _mesh(device_order.ordered(engines, theirs), theirs)
    if processes > 1 and engine != learner:
        raise ValueError(
            f"mesh.engine={engine}: {processes} processes hand weights over from each device of the learner to one "
            f"of the engine, so it must be {device_order.product(sizes)}={learner}, or both must be multiples of the "
            f"{len(own[0])} devices of a process and take all processes"
        )
    if learner % processes or engine % processes:
        raise ValueError(
            f"mesh: {learner} devices that learn cannot be divided among {processes} processes; the nearest valid "
            f"product is {-(-learner // processes) * processes}"
        )
    mine, rest = learner // processes, engine // processes
    if min(map(len, own)) < mine + rest:
        raise ValueError(
            f"mesh: {mine} devices that learn and mesh.engine={rest} that generate are needed in each of "
            f"{processes} processes, and {min(map(len, own))} are there; on a CPU "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={mine + rest} makes them"
        )
    learners, engines = (
        [device for some in own for device in some[part]] for part in (slice(mine), slice(mine, mine + rest))
    )
    whole = device_order.ordered(learners, sizes)
    if processes > 1:  # weights are handed over in pairs, so the engine's devices follow the learner's
        twin = dict(zip(learners, engines, strict=True))
        others = np.array([twin[device] for device in whole.flat], object)
        device_order.check_replicas(others, replica)
    else:
        others = device_order.ordered(engines, theirs)
    return _mesh(whole, sizes), _mesh(others, theirs)


def _whole_processes(
    own: Sequence[Sequence[Any]], learner: int, engine: int, data: int
) -> tuple[list[Sequence[Any]], list[Sequence[Any]]] | None:
    """Returns the devices of processes that learn and of those that generate, or None where the numbers do not allow that.

    The same number learns in each slice where the learner's data can be divided over the slices. Then no weight crosses the
    network between slices.
    """
    each = len(own[0])
    if len(own) == 1 or any(len(some) != each for some in own):
        return None
    if learner % each or engine % each or learner + engine != each * len(own):
        return None
    slices: dict[int, list[Sequence[Any]]] = {}
    for some in own:
        slices.setdefault(device_order.slice_of(some[0]), []).append(some)
    count = learner // each
    if count % len(slices) == data % len(slices) == 0 and count // len(slices) < min(map(len, slices.values())):
        first = count // len(slices)
        return [x for one in slices.values() for x in one[:first]], [x for one in slices.values() for x in one[first:]]
    return list(own[:count]), list(own[count:])


def divided(engine: Mesh, stay: int, learner: Mesh) -> tuple[Mesh, Mesh]:
    """Returns an engine's mesh in two parts: `stay` replicas that keep generating, and the others, lent to `learner`.

    Each process keeps its first replicas. The lent part has the shape of `along`. Experts are not split: the config refuses it.

    Raises:
      ValueError: with several processes, a process has an odd number of replicas, so that it cannot lend half. Or it
        cannot bring the lent replicas their weights by itself. It cannot if learner and engine have separate devices,
        if fsdp is above 1, or if a replica spans processes.
    """
    tensor, count = engine.shape[TENSOR], len(processes(engine) | processes(learner))
    homes: dict[int, list[np.ndarray]] = {}
    straddles = False
    for replica in engine.devices.reshape(-1, tensor):
        homes.setdefault(replica[0].process_index, []).append(replica)
        straddles |= len({device.process_index for device in replica}) > 1
    apart = set(engine.devices.flat).isdisjoint(learner.devices.flat)
    if count > 1 and (apart or straddles or learner.shape[FSDP] > 1 or any(len(own) % 2 for own in homes.values())):
        raise ValueError(
            f"scheduler.lend: each of {count} processes lends half of its replicas and brings them their weights "
            f"itself: mesh.engine and mesh.fsdp must be 0 and 1, and a process's {jax.local_device_count()} devices "
            f"an even number of replicas of mesh.tensor={tensor}; the nearest valid lend is 0"
        )
    kept, gone = [], []
    for own in homes.values():
        at = stay * len(own) // replicas(engine)
        kept, gone = kept + own[:at], gone + own[at:]
    of = [[device for replica in some for device in replica] for some in (kept, gone)]
    return _mesh(of[0], (stay, 1, 1, tensor)), _mesh(of[1], (*along(len(gone), learner.shape[FSDP]), 1, tensor))


def along(shards: int, fsdp: int) -> tuple[int, int]:
    """Returns (data, fsdp) for `shards` lent shards of devices, given the learner's `fsdp`.

    Weights are split as the learner's are, or into fewer pieces, each a whole number of the learner's pieces. So every
    size that the learner's mesh divides is divided here too.
    """
    ways = math.gcd(shards, fsdp)
    return shards // ways, ways


def _mesh(devices: Sequence[jax.Device] | np.ndarray, sizes: tuple[int, int, int, int]) -> Mesh:
    # The order is kept: a part of a mesh has its replicas as they were.
    # Explicit, because the default of jax.make_mesh differs between versions (Auto before 0.9, Explicit after).
    return Mesh(np.array(devices).reshape(sizes), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def on_each_host(mesh: Mesh, shape: tuple[int, ...]) -> NamedSharding:
    """Returns the sharding that gives each process a whole array, split over its devices where they divide it."""
    order = sorted(mesh.devices.flat, key=lambda device: (device.process_index, device.id))
    count = len({device.process_index for device in order})
    own = len(order) // count
    split = next((at for at, size in enumerate(shape) if size % own == 0 and size), None)
    return NamedSharding(
        _mesh(order, (count, own, 1, 1)), PartitionSpec(*(FSDP if at == split else None for at in range(len(shape))))
    )


def processes(mesh: Mesh) -> set[int]:
    """Returns the indices of the processes that have a device of the mesh."""
    return {device.process_index for device in mesh.devices.flat}


def is_here(mesh: Mesh) -> bool:
    """Returns whether this process has a device of the mesh."""
    return jax.process_index() in processes(mesh)


def in_line(devices: Sequence[jax.Device]) -> NamedSharding:
    """Returns the sharding that divides the first axis of an array over the devices, in their order."""
    return NamedSharding(Mesh(np.array(devices), (LINE,), axis_types=(AxisType.Auto,)), PartitionSpec(LINE))


def permuted(home: NamedSharding, rounds: Sequence[Sequence[tuple[int, int]]]) -> Callable[[jax.Array], jax.Array]:
    """Returns a function of an array in line, after which the second device of each pair has the part of the first.

    Args:
      home: of the array, by `in_line`.
      rounds: pairs of places in the line. A place gives and gets at most once in a round, and gets in one round alone.
    """

    def run(part: jax.Array) -> jax.Array:
        out, me = part, jax.lax.axis_index(LINE)
        for pairs in rounds:
            moved = jax.lax.ppermute(part, LINE, pairs)
            getting = jnp.isin(me, jnp.array([target for _, target in pairs]))
            out = jnp.where(getting, moved, out)
        return out

    return jax.shard_map(run, mesh=home.mesh, in_specs=home.spec, out_specs=home.spec, check_vma=False)


def replicas(mesh: Mesh) -> int:
    """Returns data x fsdp: the number of the engine's replicas."""
    return mesh.shape[DATA] * mesh.shape[FSDP]


def shards(mesh: Mesh) -> int:
    """Returns data x expert x fsdp: the number of the parts of the learner's batch."""
    return math.prod(mesh.shape[axis] for axis in ROWS)


def param_shardings(mesh: Mesh, axes: Mapping, room: str) -> Any:
    """Returns the sharding of every weight.

    Args:
      axes: nested dict, each leaf a tuple of logical names, one per dimension.
      room: "learner" (embed over fsdp; heads, kv_heads, ffw, vocab over tensor; expert over expert) or "engine" (the same
        without fsdp).
    Raises:
      ValueError: an unknown room or logical name.
    """
    if room not in RULES:
        raise ValueError(f"mesh: room must be one of {', '.join(RULES)}, got {room!r}")
    return jax.tree.map(lambda names: NamedSharding(mesh, _spec(names, RULES[room])), axes, is_leaf=_is_names)


def of_entries(sharding: jax.sharding.Sharding) -> jax.sharding.Sharding:
    """Returns the sharding of one entry of the first axis: on the same devices, and its own axes divided as there."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))


def stacked(sharding: NamedSharding) -> NamedSharding:
    """Returns the sharding of many arrays of `sharding` as one array with a leading axis, which is not divided."""
    return NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec))


def check_divisible(
    mesh: Mesh,
    axes: Mapping,
    shapes: Any,
    room: str,
    counts: Mapping[str, int] | None = None,
    options: Mapping[str, str] | None = None,
) -> None:
    """Refuses weights that the mesh cannot split evenly.

    Args:
      axes: as in `param_shardings`.
      shapes: the same tree with arrays or ShapeDtypeStructs.
      counts: indivisible units of a dimension, by logical name. Example: {"heads": 4, "kv_heads": 2} where a weight
        holds heads*head_dim in one dimension.
      options: what the config calls the size of a mesh axis, where that is not the axis's name.
    Raises:
      ValueError: one sentence with axis, size, bound and the nearest size of the mesh axis that divides all it splits.
    """
    rules, counts = RULES[room], counts or {}
    sizes = dict.fromkeys(counts.items())  # of one name several, where layers differ
    leaves = jax.tree.leaves(axes, is_leaf=_is_names)
    for names, leaf in zip(leaves, jax.tree.leaves(shapes), strict=True):
        sizes |= {pair: None for pair in zip(names, leaf.shape, strict=True) if pair[0] not in counts}
    for name, size in sizes:
        if name not in rules:
            continue
        ways = mesh.shape[rules[name]]
        if size % ways:
            all_sizes = math.gcd(*(n for other, n in sizes if rules.get(other) == rules[name]))
            near = min((n for n in range(1, all_sizes + 1) if all_sizes % n == 0), key=lambda n: (abs(n - ways), n))
            option = rules[name]
            raise ValueError(
                f"mesh.{(options or {}).get(option, option)}={ways} does not divide the model's {name}={size}; the nearest "
                f"valid value is {near}"
            )


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of [B, ...]: rows of a batch over data x expert x fsdp, all other axes whole."""
    return NamedSharding(mesh, PartitionSpec(ROWS))


def copied_rows(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of [B, ...] whose rows all devices along fsdp have: rows over data x expert."""
    return NamedSharding(mesh, PartitionSpec(COPIES))


def embedded_sharding(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of [tokens, D] on the way from rows over all of ROWS to D over fsdp: tokens over data x expert."""
    return NamedSharding(mesh, PartitionSpec(COPIES, FSDP))


def heads_sharding(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of the learner's [B, T, N or K, H]: rows over data x expert x fsdp, heads over tensor."""
    return NamedSharding(mesh, PartitionSpec(ROWS, None, TENSOR))


def replicated(mesh: Mesh) -> NamedSharding:
    """Returns the sharding that puts the same whole value on every device."""
    return NamedSharding(mesh, PartitionSpec())


def slot_sharding(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of [replica, ...] for the engine's slots, rows and pages: replicas over data x fsdp."""
    return NamedSharding(mesh, PartitionSpec(REPLICAS))


def cache_sharding(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of [replica, pages, page, 2K, H], the engine's KV pages.

    Pairs of a key head and a value head are split over tensor.
    """
    return NamedSharding(mesh, PartitionSpec(REPLICAS, None, None, TENSOR))


def by_heads(mesh: Mesh, attend: Callable, cache: Any = None) -> Callable:
    """Returns `attend` of one replica such that every device runs it on its own heads.

    `attend(q [R, N, H], cache of [pages, page, 2K, H], rows) -> [R, N, H]`, with sinks [N] behind the rows where a model
    has them. `cache`: how the arrays of one replica's cache are divided; None: there are pages alone. Two kinds need this:
    - A kernel written by hand, which the compiler cannot split.
    - A loop over pages. vmap would make one loop for all replicas: as long as the longest, with a collective in every
      iteration.

    Map over replicas by vmap(..., spmd_axis_name=REPLICAS).
    """
    heads = PartitionSpec(None, TENSOR)
    specs = heads, cache or PartitionSpec(None, None, TENSOR), PartitionSpec(), PartitionSpec(TENSOR)

    def run(*given):
        mine = specs[: len(given)]
        return jax.shard_map(attend, mesh=mesh, in_specs=mine, out_specs=heads, check_vma=False)(*given)

    return run


def by_replicas(mesh: Mesh, run: Callable) -> Callable:
    """Returns `run` of one replica such that every device of the replica computes all of it, with a kernel written by hand.

    Map over replicas by vmap(..., spmd_axis_name=REPLICAS).
    """
    return jax.shard_map(run, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False)


def head_axis(axis: int | None, *, replicas: bool = False) -> PartitionSpec:
    """Returns how an array of one replica is divided: the heads on its axis `axis` over tensor; None: it has no heads.

    `replicas`: a leading axis of replicas stands before its own.
    """
    heads = () if axis is None else (*(None,) * axis, TENSOR)
    return PartitionSpec(*((REPLICAS,) if replicas else ()), *heads)


def by_state_heads(mesh: Mesh, cache: Any, read: Callable) -> Callable:
    """Returns `read(cache, rows, slot, inputs, g, beta, weights) -> (out, cache)` such that every device runs it on its own heads.

    A loop over rows needs this, as one over pages does (`by_heads`).

    Args:
      cache: how the arrays of one replica's cache are divided, a tree of PartitionSpec. Heads are the second axis of all else, and
        of rows and slots nothing is divided.
    """
    heads, whole = PartitionSpec(None, TENSOR), PartitionSpec()
    of_others = whole, whole, heads, heads, heads, heads

    def run(given: Any, *others: Any) -> tuple[jax.Array, Any]:
        # An array without elements ends XLA's partitioner (jax 0.11) by a segmentation fault. So none enters or leaves.
        arrays, tree = jax.tree.flatten(given)
        specs, some = jax.tree.leaves(jax.tree.broadcast(cache, given)), [x.size > 0 for x in arrays]
        shapes = [NamedSharding(mesh, spec).shard_shape(x.shape) for spec, x in zip(specs, arrays, strict=True)]

        def own(parts: Sequence[jax.Array], *others: Any) -> tuple[jax.Array, list[jax.Array]]:
            rest = iter(parts)
            mine = [next(rest) if there else jnp.zeros(shape, x.dtype) for there, shape, x in zip(some, shapes, arrays)]
            out, after = read(jax.tree.unflatten(tree, mine), *others)
            return out, list(itertools.compress(jax.tree.leaves(after), some))

        parts = list(itertools.compress(specs, some))
        placed = jax.shard_map(own, mesh=mesh, in_specs=(parts, *of_others), out_specs=(heads, parts), check_vma=False)
        out, after = placed(list(itertools.compress(arrays, some)), *others)
        rest = iter(after)
        return out, jax.tree.unflatten(tree, [next(rest) if there else x for there, x in zip(some, arrays)])

    return run


def by_experts(mesh: Mesh, run: Callable, axes: Mapping[str, tuple], rows: tuple[str, ...] = ()) -> Callable:
    """Returns `run` such that every device runs it on its own part of the experts' matrices, and rows that it needs there.

    `run(x [M, D], experts [M, k], gates [M, k], matrices) -> [M, D]`. Experts count from the first of the given matrices, and
    `run` leaves out those that have none. A sort by expert of all rows would move each row to every device.

    Devices along the axis `expert` exchange rows, where it splits them, once before `run` and sums once behind it. Never the
    k copies of a row travel. Parts of a sum over a split axis of the matrices are added here, in an order that no load changes.
    The learner's matrices are gathered along fsdp here, so that each device gets the sum of its own part of their gradient.

    Args:
      axes: logical names of each matrix. "ffw" is split over tensor, "expert" over expert, and the learner's "embed" over fsdp.
      rows: mesh axes that split the rows. None of them: all devices have the same rows, and the function may be mapped over
        replicas by vmap(..., spmd_axis_name=REPLICAS).
    """
    mine, divided = PartitionSpec(rows or None), mesh.shape[EXPERT] > 1
    rules = RULES["learner" if rows else "engine"]
    matrices = {name: _spec(names, rules) for name, names in axes.items()}
    alone = run if rows else _one_by_one(run)

    def whole(name: str, matrix: jax.Array) -> jax.Array:
        if not rows or mesh.shape[FSDP] == 1 or "embed" not in axes[name]:
            return matrix
        return jax.lax.all_gather(matrix, FSDP, axis=axes[name].index("embed"), tiled=True)

    def part(x: jax.Array, ids: jax.Array, gates: jax.Array, given: Mapping[str, jax.Array]) -> jax.Array:
        given = {name: whole(name, matrix) for name, matrix in given.items()}
        if not divided:
            out = alone(x, ids, gates, given)
            return jax.lax.psum(out, TENSOR) if mesh.shape[TENSOR] > 1 else out
        if EXPERT in rows:
            x, ids, gates = (jax.lax.all_gather(one, EXPERT, tiled=True) for one in (x, ids, gates))
        first = jax.lax.axis_index(EXPERT) * given["down"].shape[0]
        out = alone(x, ids - first, gates, given)
        if EXPERT not in rows:
            return jax.lax.psum(out, (EXPERT, TENSOR))
        return jax.lax.psum(jax.lax.psum_scatter(out, EXPERT, tiled=True), TENSOR)

    return jax.shard_map(part, mesh=mesh, in_specs=(mine, mine, mine, matrices), out_specs=mine, check_vma=False)


def _one_by_one(run: Callable) -> Callable:
    """Returns `run` such that vmap calls it once for each element: a grouped product has no batch axis."""
    alone = jax.custom_batching.custom_vmap(run)

    @alone.def_vmap
    def mapped(size: int, batched: Sequence[Any], *given: Any) -> tuple[jax.Array, bool]:
        def at(index: int) -> Any:
            return jax.tree.map(lambda x, there: x[index] if there else x, given, tuple(batched))

        return jnp.stack([alone(*at(index)) for index in range(size)]), True

    return alone


def by_vocab(mesh: Mesh, draw: Callable) -> Callable:
    """Returns `draw` of one replica such that every device runs it on its own ids of V.

    `draw(logits [R, V], values a row, ...)`. A kernel written by hand needs this, because the compiler cannot split
    it. Map over replicas by vmap(..., spmd_axis_name=REPLICAS).
    """
    rows = PartitionSpec()

    def run(logits, *numbers):
        specs = (PartitionSpec(None, TENSOR), *(rows for _ in numbers))
        return jax.shard_map(draw, mesh=mesh, in_specs=specs, out_specs=rows, check_vma=False)(logits, *numbers)

    return run


def vocab_shards(mesh: Mesh) -> int:
    """Returns fsdp x tensor: the number of parts of the learner's split head."""
    return mesh.shape[FSDP] * mesh.shape[TENSOR]


def by_rows_and_heads(sharding: NamedSharding | None, run: Callable) -> Callable:
    """Returns `run` over (q, k, v, segment ids) such that every device runs it on its own rows and heads.

    Where a model has sinks [N], they are a fifth argument, of which every device gets those of its heads.

    Args:
      sharding: of q, k, v and the result (heads_sharding); None on one device.
    """
    if sharding is None:
        return run
    heads = sharding.spec
    specs = heads, heads, heads, PartitionSpec(heads[0]), PartitionSpec(heads[2])

    def split(*given):
        mine = specs[: len(given)]
        return jax.shard_map(run, mesh=sharding.mesh, in_specs=mine, out_specs=heads, check_vma=False)(*given)

    return split


def by_rows_and_state_heads(sharding: NamedSharding | None, run: Callable) -> Callable:
    """Returns `run(inputs, g, beta, weights, segment ids)` such that every device runs it on its own rows and heads.

    Args:
      sharding: of inputs and of the result [B, T, heads, size] (heads_sharding), whose first three axes g and beta have too; None
        on one device. Of weights the second axis is that of heads.
    """
    if sharding is None:
        return run
    heads = sharding.spec
    specs = heads, heads, heads, PartitionSpec(None, heads[2]), PartitionSpec(heads[0])
    return jax.shard_map(run, mesh=sharding.mesh, in_specs=specs, out_specs=heads, check_vma=False)


def by_vocab_shards(mesh: Mesh, run: Callable, axis: int, given: str, made: str) -> Callable:
    """Returns `run` such that every device runs it on its own part of the vocabulary, with collectives of its own.

    Args:
      axis: of the vocabulary in the matrix.
      given, made: what each argument and each result is, one letter each: "r" is [B, ...] with rows over ROWS, "m" is
        the matrix, and "h" the matrix as the learner's weights lie. A matrix made must be equal along COPIES.
    """
    at_home = _spec(("embed", "vocab") if axis else ("vocab", "embed"), LEARNER_RULES)
    specs = {"r": PartitionSpec(ROWS), "m": PartitionSpec(*(None,) * axis, VOCAB_SHARDS), "h": at_home}
    ins, outs = (tuple(specs[letter] for letter in letters) for letters in (given, made))
    return jax.shard_map(run, mesh=mesh, in_specs=ins, out_specs=outs, check_vma=False)


def put(tree: Any, shardings: Any) -> Any:
    """Returns host values, the same in every process, as global arrays.

    Args:
      tree: numpy arrays, or values that numpy can read.
      shardings: the same tree, or one sharding for all leaves.
    """
    if isinstance(shardings, jax.sharding.Sharding):
        one = shardings
        if one.is_fully_addressable:  # one call for all leaves: the call costs more than small leaves
            return jax.device_put(jax.tree.map(_host, tree), one)
        return jax.tree.map(lambda leaf: _place(leaf, one), tree)
    return jax.tree.map(_place, tree, shardings)


def _host(leaf) -> np.ndarray:
    host = np.asarray(leaf)
    return host.astype(jax.dtypes.canonicalize_dtype(host.dtype), copy=False)


def _place(leaf, sharding) -> jax.Array:
    host = _host(leaf)
    if sharding.is_fully_addressable:
        return jax.device_put(host, sharding)
    # The transfer is intended, but jax counts this call as an implicit one. dtype is given because a process that owns
    # no shard never calls the callback.
    with jax.transfer_guard_host_to_device("allow"):
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index], dtype=host.dtype)


def _is_names(node) -> bool:
    return isinstance(node, tuple) and all(name is None or isinstance(name, str) for name in node)


def _spec(names: tuple, rules: Mapping[str, str]) -> PartitionSpec:
    for name in names:
        if name not in LOGICAL_AXES:
            raise ValueError(
                f"mesh: unknown logical axis {name!r}; valid names are {', '.join(str(n) for n in LOGICAL_AXES)}"
            )
    parts = [rules.get(name) for name in names]
    # A mesh axis may split only one dimension of an array: the first one that names it gets it.
    return PartitionSpec(*(p if p is not None and p not in parts[:i] else None for i, p in enumerate(parts)))
