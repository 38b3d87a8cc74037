"""The counter of collectives: by hand, and on programs that do the same written out and in loops."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
import collectives

TEXT = """
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  ROOT %sum = f32[] add(%a, %a)
}

%inner (p: (s32[], bf16[4,8])) -> (s32[], bf16[4,8]) {
  %p = (s32[], bf16[4,8]{1,0}) parameter(0)
  %x = bf16[4,8]{1,0} get-tuple-element(%p), index=1
  %part = bf16[2,8]{1,0} reduce-scatter(%x), dimensions={0}, to_apply=%add
  ROOT %all = (s32[], bf16[4,8]{1,0}) tuple(%x)
}

%outer (p: (s32[], f32[16,22])) -> (s32[], f32[16,22]) {
  %w = (s32[], bf16[4,8]{1,0}) while(%p), condition=%c, body=%inner, backend_config={"known_trip_count":{"n":"3"}}
  ROOT %r = f32[16,22]{1,0} all-reduce(%y), replica_groups={}, to_apply=%add
}

ENTRY %main (p: f32[16,22]) -> f32[16,22] {
  %p = f32[16,22]{1,0} parameter(0)
  %g = (f32[8,22]{1,0}, f32[16,22]{1,0}) all-gather-start(%p), dimensions={0}
  %d = f32[16,22]{1,0} all-gather-done(%g)
  ROOT %w = f32[16,22]{1,0} while(%d), condition=%c, body=%outer, backend_config={"known_trip_count":{"n":"5"}}
}
"""


def test_a_text_by_hand():
    found, unknown = collectives.count(TEXT)
    assert [(one.kind, one.bytes, one.turns, one.loops) for one in found] == [
        ("all-gather", 16 * 22 * 4, 1, ()),
        ("reduce-scatter", 4 * 8 * 2, 15, ("outer", "inner")),
        ("all-reduce", 16 * 22 * 4, 5, ("outer",)),
    ]
    assert not unknown and found[2].has_size(22) and not found[1].has_size(22, 16)
    assert collectives.count(TEXT.replace('"known_trip_count":{"n":"5"}', ""))[1] == ["outer"]


def total(loop: bool, layers: int) -> int:
    """Bytes of the collectives of `layers` products with a split weight."""
    mesh = Mesh(np.array(jax.devices()[:4]), ("x",))
    split, whole = NamedSharding(mesh, P(None, "x")), NamedSharding(mesh, P())

    def layer(h, w):
        return jax.lax.with_sharding_constraint(jnp.tanh(h @ jax.lax.with_sharding_constraint(w, split)), whole), None

    def run(h, weights):
        if loop:
            return jax.lax.scan(layer, h, weights)[0]
        for index in range(layers):
            h, _ = layer(h, weights[index])
        return h

    shapes = [jax.ShapeDtypeStruct(s, jnp.float32, sharding=whole) for s in ((8, 16), (layers, 16, 16))]
    found, unknown = collectives.count(jax.jit(run).lower(*shapes).compile().as_text())
    assert not unknown
    return sum(one.bytes * one.turns for one in found)


@pytest.mark.parametrize("layers", [2, 4])
def test_a_loop_counts_as_its_turns(layers):
    assert total(True, layers) == total(False, layers) == layers * 8 * 16 * 4
