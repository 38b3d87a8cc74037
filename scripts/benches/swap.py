"""New weights for a running engine: shared, cast and relayout, against a plain copy and one plain program.

Beside the relayout stands jax.device_put of the same bytes, without a bound. It goes through the host, which costs
nothing where the devices are the host.

The tree is random, of at least 256 MiB in float32, on 1, 2 and 4 forced devices. Times are medians of interleaved
repetitions. Memory is what the compiler says of the compiled program. The check that new weights are finite is timed
apart.
"""

from __future__ import annotations

import os
import statistics
import time

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

TURNS = 9
LAYERS, WIDTH, FFW = 4, 1024, 4096  # 4 * (4 * 1024 * 1024 + 3 * 1024 * 4096) * 4 B = 256 MiB and the embedding


def bench(record) -> None:
    import jax
    import jax.numpy as jnp

    from jaxrl_post.models import decoder
    from jaxrl_post.parallel import mesh as meshes
    from jaxrl_post.parallel.weight_sync import WeightLayout

    model = decoder.ModelConfig(
        vocab_size=8192,
        embed=WIDTH,
        layers=LAYERS,
        heads=16,
        kv_heads=16,
        head_dim=64,
        ffw=FFW,
        max_length=128,
        tied=True,
    )
    axes = decoder.axes(model)
    record.figure("tree_mib", sum(x.size * 4 for x in jax.tree.leaves(decoder.abstract(model))) / 2**20, at_least=256)
    one, four = meshes.make_mesh(), meshes.make_mesh(1, 2, 2)
    engine = meshes.param_shardings(one, axes, "engine")

    shared = WeightLayout(engine, jnp.float32)
    new = _tree(model, meshes.param_shardings(one, axes, "learner"))
    record.figure("shared_case", shared.case(new), equals="shared")
    old = shared.place(new)
    record.figure("shared_buffers_equal", _addresses(shared.replace(old, new)) == _addresses(new), equals=True)

    cast = WeightLayout(engine, jnp.bfloat16)
    record.figure("cast_case", cast.case(new), equals="cast")
    copy = jax.jit(
        lambda old, tree: jax.tree.map(lambda x: jnp.array(x, copy=True), tree), donate_argnums=0, keep_unused=True
    )
    times = _race(
        {
            "replace": _replacing(cast.replace, cast.place(new), new),
            "check": lambda: cast.check(new, new),
            "plain": _replacing(copy, jax.tree.map(jnp.array, new), new),
        }
    )
    _report(record, "cast", times, "plain", "plain_copy", cast.memory(cast.place(new), new).temp_size_in_bytes, 2)

    home, away = (meshes.param_shardings(four, axes, room) for room in ("learner", "engine"))
    relayout = WeightLayout(away, jnp.float32)
    new = _tree(model, home)
    record.figure("relayout_case", relayout.case(new), equals="relayout")
    times = _race(
        {
            "replace": _replacing(relayout.replace, relayout.place(new), new),
            "check": lambda: relayout.check(new, new),
            "plain": _replacing(_freeing(jax.jit(lambda tree: tree, out_shardings=away)), relayout.place(new), new),
            "device_put": lambda: jax.device_put(new, away),
        }
    )
    _report(record, "relayout", times, "plain", "plain_program", _most_live_beside(relayout, new), 4)
    record.figure("relayout_device_put_s", times["device_put"])
    record.figure("relayout_over_device_put", times["replace"] / times["device_put"])


def _most_live_beside(layout, new) -> int:
    """Returns the most bytes of device arrays alive after any group of a relayout, beyond both sides' weights."""
    import jax

    held = layout.place(new)

    def live():
        """Counts by buffer, because a sharded array and the pieces it was made of are both listed over the same memory."""
        shards = [shard.data for x in jax.live_arrays() if not x.is_deleted() for shard in x.addressable_shards]
        return sum({x.unsafe_buffer_pointer(): x.nbytes for x in shards}.values())

    before, seen, send = live(), [], layout._sent

    def watched(leaves, homes):
        out = send(leaves, homes)
        seen.append(live())
        return out

    layout._sent = watched
    layout.replace(held, new)
    return max(seen) - before


def _tree(model, shardings):
    from jaxrl_post.models import decoder
    from jaxrl_post.parallel import mesh as meshes

    return meshes.put(decoder.init(model, 0), shardings)


def _addresses(tree) -> list[int]:
    import jax

    return [x.addressable_shards[0].data.unsafe_buffer_pointer() for x in jax.tree.leaves(tree)]


def _freeing(program):
    """Returns a program of the new weights that frees the old ones first, as a swap does."""
    import jax

    def call(old, new):
        for leaf in jax.tree.leaves(old):
            leaf.delete()
        return program(new)

    return call


def _replacing(program, old, new):
    """Returns a call that passes the last result in as the buffers to be written."""
    held = [old]

    def call():
        held[0] = program(held[0], new)
        return held[0]

    return call


def _race(calls: dict) -> dict[str, float]:
    """Returns the median seconds of each, taken in turns after one unmeasured call."""
    import jax

    seconds = {name: [] for name in calls}
    for turn in range(TURNS + 1):
        for name, call in calls.items():
            begun = time.perf_counter()
            jax.block_until_ready(call())
            if turn:
                seconds[name].append(time.perf_counter() - begun)
    return {name: statistics.median(times) for name, times in seconds.items()}


def _report(record, case: str, times: dict, other: str, word: str, extra: int, width: int) -> None:
    record.figure(f"{case}_s", times["replace"])
    record.figure(f"{case}_{word}_s", times[other])
    record.figure(f"{case}_over_{word}", times["replace"] / times[other], at_most=1.3)
    record.figure(f"{case}_finite_check_s", times["check"])
    record.figure(f"{case}_extra_memory_mib", extra / 2**20)
    record.figure(
        f"{case}_extra_memory_over_largest_leaf", extra / (max(8192 * WIDTH, WIDTH * FFW) * width), at_most=1.0
    )
