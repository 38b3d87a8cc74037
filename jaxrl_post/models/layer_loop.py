"""How a decoder runs its layers: each written out in the program, or stacked and scanned. And what backward keeps of them.

Scanned, the program holds one of the layers with equal shapes that follow one another. The weights are stacked inside the
program, so the tree of params stays as it is.
Layers may differ in window and rotation: arrays with an entry for each layer say which of the few kinds it has.

Invariant: both forms compute the same, and so does every policy. They differ in memory, in time and in rounding.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array

from jaxrl_post.models.cache_kinds import Kind, Pages

Turn = tuple[Array, Array]  # cosines and sines of a layer
Layers, Turns = Sequence[nnx.Module], Sequence[Turn]

# What a policy may keep of a layer, by the name that the layer gives it.
STREAM, ATTENDED, PROJECTED = "stream", "attended", "projected"

_KEEP = jax.checkpoint_policies
POLICIES: dict[str, Callable | None] = {
    "full": None,  # the stream alone
    "attention": _KEEP.save_only_these_names(ATTENDED),
    "projections": _KEEP.save_only_these_names(ATTENDED, PROJECTED),
    "offload": _KEEP.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=[STREAM],
        offload_src="device",
        offload_dst="pinned_host",
    ),
}


@dataclass(frozen=True, kw_only=True)
class LayerLoop:
    """The form of the loop.

    - scan: layers are stacked and scanned.
    - row_major: scanned, the layer is the slowest axis of the stacked weights in memory, and of their gradients. Else
      the compiler chooses. XLA:GPU then turns the axes of each layer's weights in a kernel of its own.
    - paired: scanned, keys and values are one product, and gate and up too. XLA:TPU searches tiles for each product, and
      moves less for a pair. XLA:GPU gains nothing, and keeps more with the policy "projections".
    - placed: scanned, the program reads at which index of the stack it writes a layer's weights. XLA:TPU then makes code for
      one write, and not for one of each layer. XLA:GPU copies the whole stack for some of the writes.
    - policy: a name of POLICIES, by which a layer is computed again in the backward pass. None: nothing is.
    """

    scan: bool = False
    row_major: bool = False
    paired: bool = False
    placed: bool = False
    policy: str | None = None


ALL_WRITTEN = LayerLoop()


class Callbacks(NamedTuple):
    """What a layer calls for what it does not have: other rows, and where experts lie. Each is pure, and changes the cache alone.

    - attend: of layers with attention (decoder.hidden)
    - routing: of the experts (models/experts.py), with `choose` pure like `attend`
    - recur: of layers with a recurrent state (decoder.hidden)
    """

    attend: Callable
    routing: Any = None
    recur: Callable | None = None


def named(x: Array, name: str) -> Array:
    """Returns `x` under a name that a policy can ask for. Without a policy it changes nothing."""
    return checkpoint_name(x, name)


def run(
    layers: Layers,
    h: Array,
    turns: Turns,
    kept: Sequence[Kind],
    calls: Callbacks,
    cache: Any,
    how: LayerLoop,
    given: Array | None = None,
) -> tuple[Array, Any]:
    """Returns the stream [..., D] after all layers, and the cache.

    Args:
      layers: each called as layer(h, turn, calls, cache, given) -> (h, cache). Paired, `layer.paired()` runs in their place. Its
        `pairs` says which weights become one.
      turns: of each layer. Layers with equal rotation share the same tuple.
      kept: by each layer.
      given: the embeddings of each layer [L, ..., P], of which a layer gets its own; None: there are none.
    """
    lenders = lending_layers(kept)
    if lenders:
        calls = lending(calls, lenders)
        cache = cache, {one: _unwritten(kept[one], h) for one in lenders} if how.scan else {}
    if how.scan:
        flat = [nnx.to_flat_state(nnx.split(layer)[1]) for layer in layers]
        shapes = [tuple((path, leaf.get_value().shape) for path, leaf in one) for one in flat]
        for part, period in stretches(shapes):
            own = None if given is None else given[part]
            parts, numbers = alike(shapes[part][:period]), range(part.start, part.stop)
            several = layers[part], parts, h, turns[part], kept[part]
            h, cache = _scanned(*several, calls, cache, how, own, numbers, lenders)
        return h, cache[0] if lenders else cache
    for which in range(len(layers)):
        with jax.named_scope(f"layer_{which}"):
            graph, state = nnx.split(layers[which])
            own = None if given is None else given[which]
            if how.policy is None:
                h, cache = layers[which](h, turns[which], calls, cache, own)
                continue
            once = functools.partial(_called, graph, calls)
            h, cache = _again(once, how, in_loop=False)(nnx.to_pure_dict(state), own, h, turns[which], cache)
    return h, cache[0] if lenders else cache


def stretches(shapes: Sequence) -> Iterator[tuple[slice, int]]:
    """Yields layers that follow one another, and after how many of them their shapes repeat. shapes: names and shapes of each layer.

    From each layer on, the period is taken that covers most layers, and of several the shortest. A period of more than one layer
    repeats at least once.
    """
    at, end = 0, len(shapes)
    while at < end:
        period, covered = 0, 1
        for size in range(1, max(1, (end - at) // 2) + 1):
            equal = 0
            while at + equal + size < end and shapes[at + equal] == shapes[at + equal + size]:
                equal += 1
            whole = (equal + size) // size * size
            if (size == 1 or whole > size) and (not period or whole > covered):
                period, covered = size, whole
        yield slice(at, at + covered), period
        at += covered


def alike(shapes: Sequence) -> list[slice]:
    """Returns the layers of a period that have equal shapes and follow one another."""
    ends = [at for at in range(1, len(shapes)) if shapes[at] != shapes[at - 1]]
    return [slice(*one) for one in itertools.pairwise((0, *ends, len(shapes)))]


def groups(shapes: Sequence) -> list[tuple[int, ...]]:
    """Returns the numbers of the layers of each scanned stack."""
    found = []
    for part, period in stretches(shapes):
        places = np.arange(part.start, part.stop).reshape(-1, period)
        found += [tuple(map(int, places[:, one].ravel())) for one in alike(shapes[part][:period])]
    return found


def lending_layers(kept: Sequence[Kind]) -> set[int]:
    """Returns the layers whose keys and values later layers read."""
    return {one.of for one in kept if one.of is not None}


def lending(calls: Callbacks, lenders: Collection[int]) -> Callbacks:
    """Returns them such that the second part of the cache holds the keys and values of these layers, by number.

    A later layer that names one in `of` gets them for its own. In a scan the number of a layer is traced. So `lends` says which of
    the scanned layers lend, and the cache holds arrays for them from the start.
    """

    def attend(layer, q, k, v, cache, *, of=None, lends=(), **how):
        cache, lent = cache
        if of is not None:
            k, v = lent[of]
        elif isinstance(layer, int):
            lent = lent | ({layer: (k, v)} if layer in lenders else {})
        for one in lends:
            lent = lent | {one: jax.tree.map(functools.partial(jnp.where, layer == one), (k, v), lent[one])}
        out, cache = calls.attend(layer, q, k, v, cache, **how)
        return out, (cache, lent)

    return beside(calls)._replace(attend=attend)


def _unwritten(kept: Pages, h: Array) -> tuple[Array, Array]:
    """Returns zeros in the place of a layer's keys and values, [..., K, H] each."""
    empty = jnp.zeros((*h.shape[:-1], kept.kv_heads, kept.head_dim), h.dtype)
    return empty, empty


def beside(calls: Callbacks) -> Callbacks:
    """Returns them such that their cache is the first part of another one, whose second part they leave as it is."""

    def inside(call: Callable) -> Callable:
        def called(*given, **how):
            *given, (inner, rest) = given
            out, inner = call(*given, inner, **how)
            return out, (inner, rest)

        return called

    routing = calls.routing and calls.routing._replace(choose=inside(calls.routing.choose))
    return Callbacks(inside(calls.attend), routing, calls.recur and inside(calls.recur))


def _called(
    graph: Any, calls: Callbacks, weights: dict, given: Array | None, h: Array, turn: Turn, cache: Any
) -> tuple[Array, Any]:
    return nnx.merge(graph, weights)(h, turn, calls, cache, given)


def _again(run: Callable, how: LayerLoop, *, in_loop: bool) -> Callable:
    """Returns `run` such that the backward pass computes it again. A loop already keeps XLA from merging both passes."""
    if how.policy is None:
        return run
    return jax.checkpoint(run, policy=POLICIES[how.policy], prevent_cse=not in_loop)


def _scanned(
    layers: Layers,
    parts: Sequence[slice],
    h: Array,
    turns: Turns,
    kept: Sequence[Kind],
    calls: Callbacks,
    cache: Any,
    how: LayerLoop,
    given: Array | None,
    numbers: Sequence[int],
    lenders: Collection[int],
) -> tuple[Array, Any]:
    """Returns what `run` does, of layers whose names and shapes of weights repeat. numbers: of these layers. lenders: all
    layers whose keys and values others read.

    The body has the layers of one period, one after another. parts: which of them are `alike`. These are a loop of their own:
    XLA:TPU keeps temporaries for each layer that is written out."""
    period, bodies, stacks = parts[-1].stop, [], []
    places = np.arange(len(layers), dtype=np.int32).reshape(-1, period)
    for part in parts:
        own = places[:, part]
        which = own.ravel()
        own_numbers = np.asarray(numbers, np.int32)[which]
        lends = [int(one) for one in own_numbers if one in lenders]
        body, weights, *kinds = _body(
            *([each[at] for at in which] for each in (layers, turns, kept)), lends, h.dtype, calls, how
        )
        rows = given
        if given is not None:
            rows = given.reshape(-1, period, *given.shape[1:])[:, part].reshape(-1, *given.shape[1:])
        body, stack = _again(body, how, in_loop=True), (weights, rows, jnp.asarray(own_numbers), *kinds)
        if own.shape[1] > 1:
            body = functools.partial(_in_order, body)
            stack = jax.tree.map(lambda x, by=own.shape: x.reshape(*by, *x.shape[1:]), stack)
        bodies.append(body)
        stacks.append(stack)

    def of_period(*given):
        *which, h, cache = given
        for body, one in zip(bodies, which, strict=True):
            h, cache = body(*one, h, cache)
        return h, cache

    with jax.named_scope("layers"):
        return _in_order(of_period, *stacks, h, cache)


def _in_order(body: Callable, *given: Any) -> tuple[Array, Any]:
    """Returns what `body` returns after all entries of stacks, the last two of `given` being stream and cache."""
    *stack, h, cache = given
    return jax.lax.scan(lambda carry, one: (body(*one, *carry), None), (h, cache), tuple(stack))[0]


def _body(
    layers: Layers,
    turns: Turns,
    kept: Sequence[Kind],
    lends: Sequence[int],
    dtype: Any,
    calls: Callbacks,
    how: LayerLoop,
) -> tuple[Callable, dict[str, Array], Array, Array]:
    """Returns body(weights, given, number, turning, seeing, h, cache) -> (h, cache) of alike layers.

    And of each layer the weights, the kind of its rotation, and the kind of what it sees. lends: numbers of those that lend."""
    first = layers[0].paired() if how.paired else layers[0]
    graph, _ = nnx.split(first)
    own = [nnx.to_pure_dict(nnx.split(layer)[1]) for layer in layers]
    with jax.named_scope("stack_layers"):
        weights = _weights(own, first.pairs, dtype, _placed if how.placed else _stack)
        if how.row_major:
            weights = jax.tree.map(lambda x: with_layout_constraint(x, Layout(tuple(range(x.ndim)))), weights)
    turning, rotations = _kinds([id(turn[0]) for turn in turns])
    # Behind a barrier, or XLA:TPU computes them again in every turn of the loop.
    tables = [jax.lax.optimization_barrier(turns[index]) for index in rotations]
    seeing, whose = _kinds(kept)
    choices = [one for one in map(kept.__getitem__, whose) if isinstance(one, Pages)]

    def one(weights, given, index, turning, seeing, h, cache):
        def attend_here(_, q, k, v, cache, *, window, **more):
            more |= {"lends": lends} if lends else {}
            own = [{"window": one.window} | ({} if one.of is None else {"of": one.of}) for one in choices]
            ways = [functools.partial(calls.attend, index, **more | one) for one in own]
            return jax.lax.switch(seeing, ways, q, k, v, cache) if len(ways) > 1 else ways[0](q, k, v, cache)

        def numbered(call: Callable) -> Callable:
            return lambda _, *rest: call(index, *rest)

        routing = calls.routing and calls.routing._replace(choose=numbered(calls.routing.choose))
        here = Callbacks(attend_here, routing, calls.recur and numbered(calls.recur))
        return _called(graph, here, weights, given, h, _chosen(tables, turning), cache)

    return one, weights, jnp.asarray(turning), jnp.asarray(seeing)


def stacked(layers: Mapping[str, Any], together: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Returns trees of one layer, whose leaves hold all layers of a group: [L, ...]. Each is keyed by its first layer's number.

    layers: keyed "0", "1", and so on. One without leaves may be absent."""
    kept = [own for own in together if str(own[0]) in layers]
    return {
        str(own[0]): jax.tree.map(lambda *leaves: jnp.stack(leaves), *(layers[str(at)] for at in own)) for own in kept
    }


def unstacked(stacks: Mapping[str, Any], together: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Returns the trees of all layers by number, from what `stacked` returned."""
    places = {at: (str(own[0]), place) for own in together for place, at in enumerate(own) if str(own[0]) in stacks}
    return {str(at): jax.tree.map(operator.itemgetter(places[at][1]), stacks[places[at][0]]) for at in sorted(places)}


def _weights(own: Sequence[Mapping], pairs: Mapping[str, tuple], dtype: Any, stack: Callable) -> dict[str, Array]:
    """Returns the weights of all layers by name. Those of one axis stay as they are, others get the dtype of their use.

    A pair [L, 2, ...] is made of two weights of each layer.
    """
    halves = {half for pair in pairs.values() for half in pair}
    sources = {name: (name,) for name in own[0] if name not in halves} | dict(pairs)
    return {
        name: stack(
            tuple(tuple(layer[part] for part in parts) for layer in own),
            jnp.dtype(own[0][parts[0]].dtype if own[0][parts[0]].ndim == 1 else dtype),
        )
        for name, parts in sources.items()
    }


def _stack(layers: tuple[tuple[Array, ...], ...], dtype: Any) -> Array:
    """Returns the parts of all layers as one array.

    The cast comes last. That is one operation for all layers, and the compilers need fewer seconds.
    """
    return jnp.stack([jnp.stack(parts) if len(parts) > 1 else parts[0] for parts in layers]).astype(dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _placed(layers: tuple[tuple[Array, ...], ...], dtype: Any) -> Array:
    """Does the same as `_stack`. Each layer is written at an index that is no constant of the program."""
    places = jax.lax.optimization_barrier(jnp.arange(len(layers), dtype=jnp.int32))
    several, shape = (len(layers[0]),) if len(layers[0]) > 1 else (), layers[0][0].shape
    whole = jax.lax.empty((len(layers), *several, *shape), dtype)
    for place, parts in zip(places, layers, strict=True):
        for index, part in enumerate(parts):
            piece = part.astype(dtype).reshape((1,) * (1 + len(several)) + shape)
            rest = *(index for _ in several), *(0 for _ in shape)
            whole = jax.lax.dynamic_update_slice(whole, piece, (place, *map(np.int32, rest)))
    return whole


def _placed_forward(layers: tuple, dtype: Any) -> tuple[Array, tuple]:
    # Empty arrays carry number and dtype of the parts: residuals are arrays.
    return _placed(layers, dtype), tuple(jnp.empty((0,), part.dtype) for part in layers[0])


def _placed_backward(dtype: Any, kept: tuple, slope: Array) -> tuple[tuple[tuple[Array, ...], ...]]:
    """Takes constant slices of each part, which the sums stack again: XLA cancels both.

    A barrier keeps the parts apart. Else XLA takes a slice of each layer from the pair, and does not cancel it.
    """
    slope = slope.astype(kept[0].dtype)
    parts = [slope]
    if len(kept) > 1:
        parts = jax.lax.optimization_barrier([slope[:, part] for part in range(len(kept))])
    return (tuple(tuple(part[layer] for part in parts) for layer in range(slope.shape[0])),)


_placed.defvjp(_placed_forward, _placed_backward)


def _kinds(values: Sequence) -> tuple[np.ndarray, list[int]]:
    """Returns int32[L], the kind of each layer, and the first layer of each kind."""
    order = list(dict.fromkeys(values))
    return np.array([order.index(value) for value in values], np.int32), [list(values).index(one) for one in order]


def _chosen(tables: Sequence[Turn], kind: Array) -> Turn:
    """Returns the rotation of one kind of layer."""
    if len(tables) == 1:
        return tables[0]
    return tuple(jnp.stack(parts)[kind] for parts in zip(*tables, strict=True))
