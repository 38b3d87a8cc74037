"""An H100 that is not there: kernels in Pallas-Triton ask what they are lowered for."""

from __future__ import annotations

import contextlib

import jax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh

H100 = AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=1, platform="cuda")


def mesh_of(mesh: Mesh) -> AbstractMesh:
    """Returns a mesh of H100s with the axes of `mesh`."""
    own = mesh.abstract_mesh
    return AbstractMesh(own.axis_sizes, own.axis_names, axis_types=own.axis_types, abstract_device=H100)


ONE = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=H100)


def hopper(mesh: AbstractMesh = ONE) -> contextlib.AbstractContextManager:
    """Returns a context in which programs are traced and lowered for H100s."""
    return jax.sharding.use_abstract_mesh(mesh)
