"""Two real processes, of which one learns and one generates: weights cross bit for bit, and host values reach the other one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxrl_post.launch.jobs import roles
from jaxrl_post.parallel import exchange, relayout
from jaxrl_post.parallel import mesh as meshes

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

import joined_jobs  # noqa: E402

PROGRAM = """
import json, os, sys
import numpy as np
from jaxrl_post.parallel import exchange, mesh as meshes, processes, weight_sync
processes.start(os.environ)
import jax, jax.numpy as jnp

me, found = jax.process_index(), []
axes = {"a": ("embed", "ffw"), "b": ("vocab", "embed"), "c": (None,)}
for sizes in ((1, 4, 1, 4), (2, 2, 1, 4, 2), (1, 2, 2, 4, 4), (4, 1, 1, 4, 2)):
    learner, engine = meshes.make_split(*sizes)
    assert meshes.is_here(learner) == (me == 0) and meshes.is_here(engine) == (me == 1)
    noise = np.random.default_rng(7)
    host = {name: noise.integers(0, 2**32, shape, np.uint32).view(np.float32)  # any bits, also those of no number
            for name, shape in (("a", (8, 12)), ("b", (16, 8)), ("c", (5,)))}
    there = meshes.param_shardings(learner, axes, "learner")
    wanted = meshes.param_shardings(engine, axes, "engine")
    new = meshes.put(host, there) if me == 0 else {
        name: jax.ShapeDtypeStruct(host[name].shape, np.float32, sharding=there[name]) for name in host}
    for dtype in (np.float32, jnp.bfloat16):
        relays = exchange.Relays()
        layout = weight_sync.CrossingLayout(wanted, dtype, relays, 0)
        old = layout.place(new)
        got = layout.replace(old, new)
        if me == 0:
            assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(got))
            assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(new)), "the learner keeps its weights"
        else:
            assert all(leaf.is_deleted() for leaf in jax.tree.leaves(old))
            for name, leaf in got.items():
                assert leaf.sharding.is_equivalent_to(wanted[name], leaf.ndim) and leaf.dtype == dtype
                cast = np.asarray(jnp.asarray(host[name]).astype(dtype))
                for shard in leaf.addressable_shards:
                    same = np.asarray(shard.data).tobytes() == cast[shard.index].tobytes()
                    found.append(bool(same) if dtype == np.float32 else bool(np.array_equal(
                        np.asarray(shard.data), cast[shard.index], equal_nan=True)))
        for told in (None, True, False):  # what the process that learns knows of the weights
            try:
                # the random bits of some weights are no finite number
                layout.check(old, new, None if told is None or me else jnp.bool_(told))
                found.append("passed")
            except weight_sync.NotFinite:
                found.append("refused")
long = np.arange(3 * (1 << 20), dtype=np.uint8) + me
told = relays.open("scores", 1).broadcast_array(long)
found.append(int(told[0]))
relays.release_received()
relays.release_received()
print("FOUND " + json.dumps(found))
"""


def test_weights_cross_bit_for_bit_and_both_processes_hear_alike(tmp_path):
    port = joined_jobs.free_port()
    jobs = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            cwd=ROOT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=os.environ
            | {
                "JAX_PLATFORMS": "cpu",
                "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
                "PYTHONPATH": str(ROOT),
                "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
                "JAX_NUM_PROCESSES": "2",
                "JAX_PROCESS_ID": str(index),
            },
        )
        for index in range(2)
    ]
    said = [job.communicate(timeout=120)[0] for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], said
    learns, generates = (
        json.loads(next(line for line in text.splitlines() if line.startswith("FOUND "))[6:]) for text in said
    )
    assert learns == ["refused", "passed", "refused"] * 8 + [1]
    pieces = [one for one in generates if isinstance(one, bool)]
    assert len(pieces) == 4 * 2 * 3 * 4 and all(pieces)
    assert [one for one in generates if not isinstance(one, bool)] == learns


@pytest.mark.parametrize("sizes", [(1, 4, 1, 4), (1, 4, 1, 12, 4), (2, 8, 1, 16, 4)])
def test_every_device_gets_its_piece_once_from_one_that_has_it(sizes):
    """Followed by hand: pieces are rows of numbers, which the rounds hand on."""
    devices = roles.planned_here((sizes[0] * sizes[1] * sizes[2] + sizes[3]) // 4, sum((sizes[0] * sizes[1], sizes[3])))
    learner, engine = meshes.make_split(*sizes, devices=devices)
    axes, shape = {"w": ("embed", "ffw")}, (16, 8)
    (source,) = meshes.param_shardings(learner, axes, "learner").values()
    (home,) = meshes.param_shardings(engine, axes, "engine").values()
    way, whole = relayout._way(shape, source, home), np.arange(128).reshape(shape)
    line = [*learner.devices.flat, *engine.devices.flat]
    held = {line.index(device): whole[index] for device, index in way.cut.devices_indices_map(shape).items()}
    got: dict[int, np.ndarray] = {}
    for pairs in way.rounds:
        givers, getters = zip(*pairs)
        assert len(set(givers)) == len(givers) and len(set(getters)) == len(getters)
        assert not set(getters) & got.keys()
        got |= {target: held[giver] for giver, target in pairs}
    wanted = {line.index(device): whole[index] for device, index in way.landing.devices_indices_map(shape).items()}
    assert got.keys() == wanted.keys() and all(np.array_equal(got[at], wanted[at]) for at in got)
    assert len(way.rounds) == -(-len(engine.devices.flat) // len(learner.devices.flat)) or len(way.rounds) == 1


def test_weights_come_from_the_own_slice():
    """Two slices of two hosts, each with a whole copy: no pair of a round lies in both."""
    devices = roles._equal(4, 16, "tpu", "TPU v5 lite")
    devices = tuple(
        roles.PlannedDevice(
            **{name: getattr(one, name) for name in ("id", "process_index", "core_on_chip", "platform", "device_kind")},
            slice_index=one.id // 8,
            coords=(one.id % 8 % 4, one.id % 8 // 4, 0),
        )
        for one in devices
    )
    learner, engine = meshes.make_split(2, 4, 1, 8, 4, devices=devices)
    axes = {"w": ("embed", "ffw")}
    (source,) = meshes.param_shardings(learner, axes, "learner").values()
    (home,) = meshes.param_shardings(engine, axes, "engine").values()
    line = [*learner.devices.flat, *engine.devices.flat]
    pairs = [pair for own in relayout._way((16, 8), source, home).rounds for pair in own]
    assert len(pairs) == 8 and all(line[a].slice_index == line[b].slice_index for a, b in pairs)


def test_arrays_keep_their_bits_as_bytes():
    given = [
        np.array(3, np.int32),
        np.array([np.nan, -0.0, 1 / 3]),
        np.zeros((2, 0, 3), np.uint8),
        np.arange(6).reshape(2, 3),
    ]
    got = exchange.unpacked(exchange.packed(given))
    assert [(a.dtype, a.shape, a.tobytes()) for a in got] == [(a.dtype, a.shape, a.tobytes()) for a in given]


def test_lending_between_processes_is_refused_in_one_sentence():
    """One process learns and one generates: the lent devices would need weights of another process."""
    learner, engine = meshes.make_split(1, 4, 1, 4, devices=roles.planned_here(2, 8))
    with pytest.raises(
        ValueError, match="scheduler.lend: each of 2 processes lends half .* the nearest valid lend is 0"
    ):
        meshes.divided(engine, 2, learner)
