"""The engine's weights in 8 bits: at a publish one program makes codes and scales of the learner's weights.

Where the layouts agree, it writes into the buffers of the old codes. Else codes are made in the learner's layout, a group of
leaves at a time, and they move as other weights do. No device holds a second copy of the weights in more bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import traverse_util

from jaxrl_post.kernels import eight_bits
from jaxrl_post.models import decoder
from jaxrl_post.models.layer import EIGHT_BITS, input_axes
from jaxrl_post.models.model_config import EightBits, ModelConfig
from jaxrl_post.parallel import mesh as meshes
from jaxrl_post.parallel import relayout, weight_sync

Path = tuple[str, ...]  # of a leaf


def stored(model: ModelConfig, name: str) -> ModelConfig:
    """Returns the model whose layers hold codes of this format. AUTO: the model itself."""
    return replace(model, eight_bits=None if name == eight_bits.AUTO else EightBits(name, stored=True))


def held_bytes(model: ModelConfig, name: str, dtype: Any) -> int:
    """Returns the bytes of an engine's weights, undivided."""
    leaves = jax.tree.leaves(decoder.abstract(stored(model, name), jnp.dtype(dtype)))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


def coded(params: Mapping, name: str, dtype: Any) -> dict:
    """Returns a tree of plain params as `stored` has it. Other leaves get the dtype.

    Codes are made of the weights in this dtype, as the learner's products do (models/layer.py).
    """
    out: dict[str, Any] = {}
    for key, leaf in params.items():
        if isinstance(leaf, Mapping):
            out[key] = coded(leaf, name, dtype)
        elif key in EIGHT_BITS:
            out[key], scale = eight_bits.codes(leaf.astype(dtype), input_axes(key), name)
            out[f"{key}_scale"] = scale.astype(jnp.float32)
        else:
            out[key] = leaf.astype(dtype)
    return out


class EightBitLayout(weight_sync.WeightLayout):
    """Does with codes and scales what WeightLayout does with plain weights. Codes in this layout are taken as they are.

    Args:
      params: the learner's, or others in the same places: plain weights, or codes that another engine made.
    """

    def __init__(self, model: ModelConfig, params: Any, mesh: jax.sharding.Mesh, dtype: Any, name: str):
        axes = decoder.axes(stored(model, name))
        homes = meshes.param_shardings(mesh, axes, "engine")
        super().__init__(homes, None)
        self._shapes = decoder.abstract(model)
        self._plain = weight_sync.WeightLayout(meshes.param_shardings(mesh, decoder.axes(model), "engine"), dtype)
        there = jax.tree.leaves(params)[0].sharding.mesh
        self._there = traverse_util.flatten_dict(meshes.param_shardings(there, axes, "learner"))
        self._make = functools.partial(coded, name=name, dtype=dtype)
        self._first = jax.jit(self._make, out_shardings=homes)
        self._into = jax.jit(lambda old, new: self._make(new), out_shardings=homes, donate_argnums=0, keep_unused=True)

    def case(self, params: Any) -> str:
        """Returns "code", or "code and relayout" where codes travel to another layout. Of codes what WeightLayout returns."""
        if self._are_codes(params):
            return super().case(params)
        return "code and relayout" if self._plain.case(params) == "relayout" else "code"

    def _are_codes(self, params: Any) -> bool:
        return jax.tree.structure(params) == jax.tree.structure(self.shardings)

    def links(self, params: Any) -> Mapping[str, int]:
        """Returns how many bytes a swap moves, by link: those of codes and scales, or nothing where they are in place."""
        if self._are_codes(params) or self.case(params) == "code":
            return self.nothing_moves()
        return self._links_of(traverse_util.flatten_dict(jax.eval_shape(self._make, params)))

    def _links_of(self, made: Mapping[Path, Any]) -> dict[str, int]:
        """Returns how many bytes move by link where codes and scales of these shapes leave the learner's layout."""
        homes = traverse_util.flatten_dict(self.shardings)
        placed = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._there[path]) for path, x in made.items()]
        return self.moved_by_link(placed, [homes[path] for path in made])

    def check(self, old: Any, params: Any, finite: Any = None) -> None:
        """Checks new weights before a swap, as WeightLayout does."""
        self._plain.check(self._shapes, params, finite)

    def place(self, params: Any) -> Any:
        """Returns the first weights."""
        if self._are_codes(params):
            return super().place(params)
        return self._first(params) if self.case(params) == "code" else self._coded_and_moved(params)

    def _replaced(self, old: Any, new: Any, owned: bool) -> Any:
        if self.case(new) == "code":
            return self._into(old, new) if owned else self._first(new)
        return self._coded_and_moved(new, old if owned else None)

    def _coded_and_moved(self, params: Any, old: Any = None) -> Any:
        """Returns codes and scales in this layout. Frees the old ones of each group, if given, before new ones arrive."""
        held = traverse_util.flatten_dict(old) if old is not None else {}

        def made(paths: Sequence[Path], leaves: Sequence[jax.Array]) -> list[dict]:
            return self._coded(tuple(path[-1] for path in paths), leaves)

        return traverse_util.unflatten_dict(self._by_groups(traverse_util.flatten_dict(params), made, held))

    def _by_groups(
        self,
        leaves: Mapping[Path, jax.Array],
        made: Callable[[Sequence[Path], Sequence[jax.Array]], list[dict]],
        held: Mapping[Path, jax.Array],
    ) -> dict[Path, jax.Array]:
        """Returns what is `made` of leaves, in this layout, by path.

        Args:
          leaves: the learner's.
          made: makes codes and scales of a group in the learner's layout, a dict by name for each leaf.
          held: old codes and scales, which are freed before those of their group arrive.
        """
        paths, homes = list(leaves), traverse_util.flatten_dict(self.shardings)
        plain, out = traverse_util.flatten_dict(self._plain.shardings), {}
        for group in relayout.groups([leaves[path] for path in paths], [plain[path] for path in paths]):
            some = [paths[at] for at in group]
            own = {
                (*path[:-1], name): leaf
                for path, parts in zip(some, made(some, [leaves[path] for path in some]), strict=True)
                for name, leaf in parts.items()
            }
            own = {path: jax.device_put(leaf, self._there[path]) for path, leaf in own.items()}
            for path in own:
                if path in held:
                    held[path].delete()
            out |= zip(own, self._sent(list(own.values()), [homes[path] for path in own]), strict=True)
        return out

    @functools.cached_property
    def _coded(self) -> Any:
        """Returns the program that makes codes of leaves of these names, each as a tree of one leaf."""
        return jax.jit(
            lambda names, leaves: [self._make({name: leaf}) for name, leaf in zip(names, leaves, strict=True)],
            static_argnums=0,
        )
