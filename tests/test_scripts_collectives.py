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
import traffic

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


# As XLA:TPU writes one all-gather that begins in a fusion, runs beside a product, and ends in a third fusion. Then others
# of the same channel run alone, in this loop and in another, and one without a channel.
PLACES = "output_to_operand_aliasing={{1}: (0, {}), {2}: (1, {}), {3}: (1, {}), {4}: (2, {})}, "
MADE = "(f32[16,2]{1,0}, bf16[1,8]{1,0:S(1)}, bf16[4,8]{1,0}, bf16[4,8]{1,0}, u32[]{:S(2)})"
BESIDE = """
%start (s: bf16[1,8]) -> (bf16[1,8], bf16[4,8], u32[]) {
  %s = bf16[1,8]{1,0:S(1)} parameter(0)
  %ag.0 = bf16[4,8]{1,0} all-gather(%s), channel_id=7, dimensions={0}
  ROOT %c.0 = (bf16[1,8]{1,0:S(1)}, bf16[4,8]{1,0}, u32[]{:S(2)}) custom-call(%ag.0), custom_call_target="AsyncCollectiveStart"
}

%beside (s: bf16[1,8], w: bf16[4,8], f: u32[], x: bf16[16,4], y: bf16[4,2]) -> (f32[16,2], bf16[1,8], bf16[4,8], bf16[4,8], u32[]) {
  %s = bf16[1,8]{1,0:S(1)} parameter(0)
  %w = bf16[4,8]{1,0} parameter(1)
  %f = u32[]{:S(2)} parameter(2)
  %x = bf16[16,4]{1,0} parameter(3)
  %y = bf16[4,2]{1,0} parameter(4)
  %ag.1 = bf16[4,8]{1,0} all-gather(%s), channel_id=7, dimensions={0}
  %xy = f32[16,2]{1,0} dot(%x, %y), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %t = @MADE@ tuple(%xy, %s, %w, %ag.1, %f)
}

%done (s: bf16[1,8], w: bf16[4,8], f: u32[]) -> bf16[4,8] {
  %s = bf16[1,8]{1,0:S(1)} parameter(0)
  %w = bf16[4,8]{1,0} parameter(1)
  %f = u32[]{:S(2)} parameter(2)
  %ag.2 = bf16[4,8]{1,0} all-gather(%s), channel_id=7, dimensions={0}
  ROOT %c.1 = bf16[4,8]{1,0} custom-call(%s, %w, %ag.2, %f), custom_call_target="AsyncCollectiveDone"
}

%body (p: (s32[], bf16[1,8], bf16[16,4], bf16[4,2])) -> (s32[]) {
  %p = (s32[], bf16[1,8]{1,0:S(1)}, bf16[16,4]{1,0}, bf16[4,2]{1,0}) parameter(0)
  %n = s32[] get-tuple-element(%p), index=0
  %s = bf16[1,8]{1,0:S(1)} get-tuple-element(%p), index=1
  %x = bf16[16,4]{1,0} get-tuple-element(%p), index=2
  %y = bf16[4,2]{1,0} get-tuple-element(%p), index=3
  %b = (bf16[1,8]{1,0:S(1)}, bf16[4,8]{1,0}, u32[]{:S(2)}) fusion(%s), kind=kCustom, output_to_operand_aliasing={{0}: (0, {})}, calls=%start
  %b.0 = bf16[1,8]{1,0:S(1)} get-tuple-element(%b), index=0
  %b.1 = bf16[4,8]{1,0} get-tuple-element(%b), index=1
  %b.2 = u32[]{:S(2)} get-tuple-element(%b), index=2
  %m = @MADE@ fusion(%b.0, %b.1, %b.2, %x, %y), kind=kOutput, @PLACES@calls=%beside
  %m.0 = f32[16,2]{1,0} get-tuple-element(%m), index=0
  %m.1 = bf16[1,8]{1,0:S(1)} get-tuple-element(%m), index=1
  %m.3 = bf16[4,8]{1,0} get-tuple-element(%m), index=3
  %m.4 = u32[]{:S(2)} get-tuple-element(%m), index=4
  %e = bf16[4,8]{1,0} fusion(%m.1, %m.3, %m.4), kind=kCustom, output_to_operand_aliasing={{}: (1, {})}, calls=%done
  %later = bf16[2,8]{1,0} all-gather(%s), channel_id=7, dimensions={0}
  %sum = bf16[2,8]{1,0} all-reduce(%later), to_apply=%add
  ROOT %t = (s32[], bf16[4,8]{1,0}, f32[16,2]{1,0}) tuple(%n, %e, %m.0)
}

%other (p: (s32[], f32[2])) -> (s32[], f32[2]) {
  %p = (s32[], f32[2]{0}) parameter(0)
  %v = f32[2]{0} get-tuple-element(%p), index=1
  %least = f32[2]{0} all-reduce(%v), channel_id=7, to_apply=%min
  %most = f32[2]{0} all-reduce(%least), channel_id=7, to_apply=%max
  ROOT %t = (s32[], f32[2]{0}) tuple(%v, %most)
}

ENTRY %main (p: (s32[])) -> (s32[]) {
  %p = (s32[]) parameter(0)
  %w.0 = (s32[]) while(%p), condition=%c, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  ROOT %w.1 = (s32[]) while(%w.0), condition=%c, body=%other, backend_config={"known_trip_count":{"n":"5"}}
}
""".replace("@PLACES@", PLACES).replace("@MADE@", MADE)


def test_what_runs_through_several_fusions_counts_once():
    found, unknown = collectives.count(BESIDE)
    assert [(one.kind, one.bytes, one.turns) for one in found] == [
        ("all-gather", 4 * 8 * 2, 3),
        ("all-gather", 2 * 8 * 2, 3),
        ("all-reduce", 2 * 8 * 2, 3),
        ("all-reduce", 2 * 4, 5),
        ("all-reduce", 2 * 4, 5),
    ]
    assert not unknown


def test_what_cannot_be_known_again_is_said():
    with pytest.raises(AssertionError, match="begins and has no channel"):
        collectives.count(BESIDE.replace("channel_id=7, ", ""))
    with pytest.raises(AssertionError, match="aliases that are not read"):
        traffic.count(BESIDE.replace("{1}: (0, {})", "{1}: (0)"))


def test_what_runs_through_several_fusions_is_written_once():
    """The product reads x and y and writes f32[16,2]; the all-gather's own part lies in the chip's memory."""
    counted = traffic.count(BESIDE)
    fusions = [one.bytes for one in counted.costs if one.operation == "fusion"]
    assert fusions == [3 * 4 * 8 * 2, 3 * (16 * 4 * 2 + 4 * 2 * 2 + 16 * 2 * 4)]
    assert counted.flops() == 3 * 2 * 16 * 4 * 2
    # Without the compiler's word that a result takes an argument's place, the argument is copied.
    copied = BESIDE.replace(PLACES, "")
    assert traffic.count(copied).bytes() > counted.bytes()


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
