"""The order of devices: hops on the network of TPU slices, what may leave a slice, and that CPUs keep their order."""

from __future__ import annotations

import math
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxrl_post.parallel import mesh
from jaxrl_post.parallel.device_order import check_replicas, chosen, ordered

AXES = ("data", "fsdp", "expert", "tensor")


class Chip(SimpleNamespace):
    """A TPU chip: what mesh_utils reads of a device."""

    def __hash__(self) -> int:
        return self.id


def chips(shape, kind, slices=1, host=(2, 2, 1)):
    """The chips of equal slices in jax's order: host by host, x fastest within both."""
    inner = [
        (z, y, x)
        for hz in range(0, shape[2], host[2]) for hy in range(0, shape[1], host[1]) for hx in range(0, shape[0], host[0])
        for z in range(hz, hz + host[2]) for y in range(hy, hy + host[1]) for x in range(hx, hx + host[0])
    ]  # fmt: skip
    out: list[Chip] = []
    for index in range(slices):
        for z, y, x in inner:
            at, size = len(out), math.prod(host)
            out.append(
                Chip(
                    id=at,
                    platform="tpu",
                    device_kind=kind,
                    coords=(x, y, z),
                    core_on_chip=0,
                    slice_index=index,
                    process_index=at // size,
                )
            )
    return out


def hops(devices, axis, wraps):
    """Mean links between neighbours of a ring along an axis. `wraps`: the length of axes whose ends are linked."""
    lines = np.moveaxis(devices, axis, -1).reshape(-1, devices.shape[axis])
    steps = []
    for line in lines:
        for one, other in zip(line, np.roll(line, -1)):
            apart = [abs(a - b) for a, b in zip(one.coords, other.coords)]
            steps.append(sum(min(gap, size - gap) if size else gap for gap, size in zip(apart, wraps)))
    return np.mean(steps)


@pytest.mark.parametrize(
    "shape, kind, sizes, wraps, most",
    [
        ((4, 4, 1), "TPU v5 lite", (1, 4, 1, 4), (0, 0, 0), 1.5),
        ((4, 4, 1), "TPU v5 lite", (1, 16, 1, 1), (0, 0, 0), 1.0),
        ((4, 4, 1), "TPU v6 lite", (1, 16, 1, 1), (0, 0, 0), 1.0),
        ((2, 4, 4), "TPU v5", (1, 8, 1, 4), (0, 4, 4), 1.25),
    ],
)
def test_neighbours_along_fsdp_are_neighbours_on_the_network(shape, kind, sizes, wraps, most):
    devices = chips(shape, kind)
    got = ordered(chosen(devices, sizes), sizes)
    assert got.shape == sizes and {d.id for d in got.flat} == set(range(len(devices)))
    plain = np.array(devices, object).reshape(sizes)
    assert hops(got, 1, wraps) <= most < hops(plain, 1, wraps)


def test_only_data_crosses_slices():
    devices = chips((4, 4, 1), "TPU v5 lite", slices=2)
    got = ordered(chosen(devices, (4, 8, 1, 1)), (4, 8, 1, 1))
    assert [{d.slice_index for d in part.flat} for part in got] == [{0}, {0}, {1}, {1}]


@pytest.mark.parametrize(
    "sizes, near",
    [
        ((1, 32, 1, 1), "data=2, fsdp=16, tensor=1"),
        ((1, 8, 1, 4), "data=2, fsdp=4, tensor=4"),
        ((1, 1, 1, 32), "data=2, fsdp=1, tensor=16"),
        ((1, 4, 4, 2), "data=2, fsdp=2, expert=4, tensor=2"),
        ((1, 1, 32, 1), "data=2, fsdp=1, expert=16, tensor=1"),
    ],
)
def test_what_else_would_cross_is_refused_with_a_valid_choice(sizes, near):
    devices = chips((4, 4, 1), "TPU v5 lite", slices=2)
    with pytest.raises(ValueError, match=f"only data may cross the network between slices.* is {near}$"):
        chosen(devices, sizes)
    with pytest.raises(ValueError, match=f"the nearest valid choice is {near}$"):
        ordered(devices, sizes)
    words = dict(word.split("=") for word in near.split(", "))
    valid = tuple(int(words.get(axis, 1)) for axis in AXES)
    assert ordered(chosen(devices, valid), valid).shape == valid


def test_a_part_of_the_devices_lies_in_one_slice_or_equally_in_all():
    devices = chips((2, 2, 1), "TPU v5 lite", slices=2)
    assert [d.id for d in chosen(devices, (1, 4, 1, 1))] == [0, 1, 2, 3]
    assert [d.id for d in chosen(devices, (2, 3, 1, 1))] == [0, 1, 2, 4, 5, 6]
    with pytest.raises(ValueError, match="7 devices lie in 2 slices of 4 .*; the nearest valid product is 6"):
        chosen(devices, (7, 1, 1, 1))


def test_chips_that_form_no_cuboid_keep_their_order():
    three = chips((2, 2, 1), "TPU v5 lite")[:3]
    assert [d.id for d in ordered(three, (3, 1, 1, 1)).flat] == [0, 1, 2]


@pytest.mark.parametrize("kind", ["TPU v4", "TPU v5 lite", "TPU v6 lite", "TPU v5", "TPU7x", "TPU v99"])
def test_cores_that_are_devices_of_their_own_have_an_order(kind):
    """A v4 chip outside of megacore mode shows two devices, for which mesh_utils has no order but an AssertionError."""
    devices = chips((2, 2, 1), kind) + chips((2, 2, 1), kind)
    for index, device in enumerate(devices):
        device.id, device.core_on_chip = index, index // 4
    assert {d.id for d in ordered(devices, (1, 8, 1, 1)).flat} == set(range(8))


def test_a_replica_may_span_hosts_of_gpus():
    """Their slice_index is of a host, and no slice: a plan of planned devices takes such a replica too."""
    devices = [Chip(id=n, platform="gpu", device_kind="NVIDIA GB200", slice_index=n // 4) for n in range(8)]
    check_replicas(devices, 8)


@pytest.mark.parametrize("platform", ["gpu", "cpu"])
def test_hosts_of_gpus_are_no_slices(platform):
    """jax gives the GPUs of each host a slice_index of their own; fsdp over two hosts is valid there."""
    devices = [Chip(id=n, platform=platform, device_kind="x", slice_index=n // 4) for n in range(8)]
    assert [d.id for d in ordered(chosen(devices, (1, 8, 1, 1)), (1, 8, 1, 1)).flat] == list(range(8))


def test_a_cpu_keeps_its_order():
    assert mesh.make_mesh(2, 2, 2).devices.ravel().tolist() == jax.devices()[:8]
    learner, engine = mesh.make_split(1, 2, 1, 2)
    assert [*learner.devices.flat, *engine.devices.flat] == jax.devices()[:4]


def test_a_mesh_in_two_hands_over_within_processes(monkeypatch):
    """Position by position, the engine's device lies in the process of the learner's, where 3 processes have no whole role."""
    devices = chips((2, 2, 3), "TPU v5")
    monkeypatch.setattr(jax, "devices", lambda: devices)
    monkeypatch.setattr(mesh, "_mesh", lambda devices, sizes: np.array(devices, object).reshape(sizes))
    learner, engine = mesh.make_split(1, 6, 1, 6)
    assert {d.id for d in (*learner.flat, *engine.flat)} == set(range(12))
    assert [d.process_index for d in learner.flat] == [d.process_index for d in engine.flat]
    assert [d.id for d in learner.flat] != sorted(d.id for d in learner.flat)  # not jax's order


def split_hosts(monkeypatch, slices, *sizes):
    """The hosts of a split over slices of v5e-16, with 4 chips each: those that learn, and those that generate."""
    devices = chips((4, 4, 1), "TPU v5 lite", slices=slices)
    monkeypatch.setattr(jax, "devices", lambda: devices)
    monkeypatch.setattr(mesh, "_mesh", lambda devices, sizes: np.array(devices, object).reshape(sizes))
    found = [{(d.slice_index, d.process_index) for d in part.flat} for part in mesh.make_split(*sizes)]
    hosts = [{d.process_index for d in devices if (d.slice_index, d.process_index) in part} for part in found]
    assert all(sum(d.process_index in part for d in devices) == 4 * len(part) for part in hosts)
    return found


def test_whole_hosts_learn_or_generate(monkeypatch):
    """In two slices both have the same hosts of each slice where data can be divided, else the first slice learns."""
    learn, generate = split_hosts(monkeypatch, 1, 1, 4, 1, 12)
    assert len(learn) == 1 and len(generate) == 3 and not learn & generate
    learn, generate = split_hosts(monkeypatch, 2, 2, 4, 1, 24)
    assert sorted(one for one, _ in learn) == [0, 1] and sorted(one for one, _ in generate) == [0, 0, 0, 1, 1, 1]
    assert not learn & generate
    learn, generate = split_hosts(monkeypatch, 2, 1, 16, 1, 16)
    assert {one for one, _ in learn} == {0} and {one for one, _ in generate} == {1}
    with pytest.raises(ValueError, match=r"20 devices would lie in 2 slices as 16 \+ 4, .* nearest valid number is 16"):
        split_hosts(monkeypatch, 2, 1, 20, 1, 12)
    with pytest.raises(
        ValueError, match="a replica of 8 devices would lie in several slices.*the nearest valid number is 6"
    ):
        split_hosts(monkeypatch, 2, 2, 4, 1, 24, 8)


def test_a_run_gets_the_ordered_mesh(monkeypatch):
    devices = chips((4, 4, 1), "TPU v5 lite", slices=2)
    monkeypatch.setattr(jax, "devices", lambda: devices)
    monkeypatch.setattr(mesh, "_mesh", lambda devices, sizes: np.array(devices, object).reshape(sizes))
    assert hops(mesh.make_mesh(2, 16, 1), 1, (0, 0, 0)) == 1.0
    with pytest.raises(ValueError, match="the nearest valid choice is data=2, fsdp=16, tensor=1"):
        mesh.make_mesh(1, 32, 1)
