"""The engine's weights of a policy with a frozen base: its additions are merged into the engine's buffers at a swap.

- Leaves without additions are placed once. They are the learner's own buffers where layout and dtype agree.
- A matrix with additions is a buffer of the engine. At a swap one program writes W + scale A B into it.
- W comes from the learner's buffers where the layout agrees. Else the engine keeps a copy in its own layout.

So a swap moves A and B alone between layouts, and the engine's programs see plain weights.

In 8 bits a sum exists in the learner's layout only, for a group of matrices at a time. Its codes move, and the engine keeps no
copy of W.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import traverse_util

from jaxrl_post.engine.eight_bit_weights import EightBitLayout, Path
from jaxrl_post.kernels import eight_bits
from jaxrl_post.models import decoder, lora
from jaxrl_post.models.layer import EIGHT_BITS, low_rank, with_additions
from jaxrl_post.models.model_config import ModelConfig
from jaxrl_post.parallel import mesh as meshes
from jaxrl_post.parallel.weight_sync import WeightLayout, torn_if_it_fails


def layout(
    model: ModelConfig, params: Any, mesh: jax.sharding.Mesh, dtype: Any, weights: str = eight_bits.AUTO
) -> WeightLayout | MergedLayout:
    """Returns what places such params on the engine's mesh: plain ones, or a lora.Adapted.

    Args:
      model: without additions.
      weights: the format of the engine's matrices (kernels/eight_bits.py). AUTO: the dtype.
    """
    if isinstance(params, lora.Adapted):
        if weights != eight_bits.AUTO:
            return MergedEightBitLayout(model, params, mesh, dtype, weights)
        return MergedLayout(model, params, mesh, dtype)
    if weights != eight_bits.AUTO:
        return EightBitLayout(model, params, mesh, dtype, weights)
    return WeightLayout(meshes.param_shardings(mesh, decoder.axes(model), "engine"), dtype)


class Additions:
    """The place of A and B in the engine's layout, and what a swap asks of a policy.

    Args:
      policy: whose base stays the same at every swap.
    """

    def __init__(self, model: ModelConfig, policy: lora.Adapted, mesh: jax.sharding.Mesh):
        places = lora.axes(lora.adapting(model, policy.lora)).adapter
        self.layout = WeightLayout(meshes.param_shardings(mesh, places, "engine"), jnp.float32)
        self._base, self._shapes = policy.base, jax.eval_shape(lambda: policy.adapter)

    def check(self, policy: Any, finite: Any) -> None:
        """Checks a policy before a swap.

        Args:
          finite: of the additions, as in WeightLayout.check.

        Raises:
          ValueError: it has another base, or additions of another form.
          NotFinite: a value is not finite.
        """
        if not isinstance(policy, lora.Adapted) or policy.base is not self._base:
            raise ValueError("swap: the new weights have another base than the one in use, which is frozen")
        self.layout.check(self._shapes, policy.adapter, finite)

    def free(self, held: Any) -> None:
        """Frees what the engine holds and the base does not."""
        theirs = {id(leaf) for leaf in jax.tree.leaves(self._base)}
        for leaf in jax.tree.leaves(held):
            if id(leaf) not in theirs:
                leaf.delete()


class MergedLayout:
    """Does for a lora.Adapted what WeightLayout does for plain weights.

    Args:
      policy: whose base stays the same at every swap.
    """

    def __init__(self, model: ModelConfig, policy: lora.Adapted, mesh: jax.sharding.Mesh, dtype: Any):
        self._lora = policy.lora
        homes = meshes.param_shardings(mesh, decoder.axes(model), "engine")
        matrices, others = lora.matrices(homes, policy.lora)
        own, _ = lora.matrices(policy.base, policy.lora)
        self._additions = Additions(model, policy, mesh)
        self._matrices = WeightLayout(matrices, jax.tree.leaves(own)[0].dtype)
        self._others = WeightLayout(others, dtype)
        self._here: Any = None  # the matrices of the base, where they are merged

        def merged(base: Any, adapter: Any) -> Any:
            return lora.merged(base, adapter, policy.lora, dtype)

        self._first = jax.jit(merged, out_shardings=matrices)
        self._into = jax.jit(
            lambda old, base, adapter: merged(base, adapter), out_shardings=matrices, donate_argnums=0, keep_unused=True
        )

    def case(self, policy: lora.Adapted) -> str:
        """Returns "merge", or "relayout and merge" where A and B travel to another layout first."""
        cases = {
            self._additions.layout.case(policy.adapter),
            self._matrices.case(lora.matrices(policy.base, self._lora)[0]),
        }
        return "relayout and merge" if "relayout" in cases else "merge"

    def links(self, policy: lora.Adapted) -> Mapping[str, int]:
        """Returns how many bytes a swap moves, by link: those of A and B, or nothing where they are in place."""
        return self._additions.layout.links(policy.adapter)

    def check(self, old: Any, policy: Any, finite: Any = None) -> None:
        """As Additions.check."""
        self._additions.check(policy, finite)

    def place(self, policy: lora.Adapted) -> Any:
        """Returns the first weights, or those after `free`."""
        matrices, others = lora.matrices(policy.base, self._lora)
        if self._here is None:
            self._here = self._matrices.place(matrices)
        merged = self._first(self._here, self._additions.layout.place(policy.adapter))
        return lora.joined(merged, self._others.place(others))

    def replace(self, old: Any, policy: lora.Adapted, owned: bool = True) -> Any:
        """Returns the next weights. The merged matrices of `old` are used up.

        Raises:
          Torn: the device or its runtime failed.
        """
        matrices, others = lora.matrices(old, self._lora)
        with torn_if_it_fails():
            merged = self._into(matrices, self._here, self._additions.layout.place(policy.adapter))
        return lora.joined(merged, others)

    def free(self, held: Any, owned: bool) -> None:
        """Frees merged matrices, and other leaves that are not the learner's. The base in this layout stays."""
        self._additions.free(held)


class MergedEightBitLayout(EightBitLayout):
    """Does for a lora.Adapted what EightBitLayout does for plain weights. A swap makes codes of matrices with additions alone."""

    def __init__(self, model: ModelConfig, policy: lora.Adapted, mesh: jax.sharding.Mesh, dtype: Any, name: str):
        super().__init__(model, policy.base, mesh, dtype, name)
        self._additions, self._merged = Additions(model, policy, mesh), with_additions(policy.lora)
        flat = traverse_util.flatten_dict(meshes.param_shardings(mesh, decoder.axes(model), "engine"))
        others = {path: home for path, home in flat.items() if not self._made_here(path)}
        self._others = WeightLayout(traverse_util.unflatten_dict(others), dtype)

    def case(self, policy: lora.Adapted) -> str:
        """Returns "merge and code", or "merge, code and relayout" where codes travel to another layout."""
        return "merge, code and relayout" if self._plain.case(policy.base) == "relayout" else "merge and code"

    def links(self, policy: lora.Adapted) -> Mapping[str, int]:
        """Returns how many bytes a swap moves, by link: codes and scales of merged matrices, or nothing where they are in place."""
        if self.case(policy) == "merge and code":
            return self.nothing_moves()
        leaves = self._with_additions(policy)
        made = jax.eval_shape(lambda: self._codes_of(policy, list(leaves), list(leaves.values())))
        return self._links_of({(*path[:-1], name): x for path, parts in zip(leaves, made) for name, x in parts.items()})

    def check(self, old: Any, policy: Any, finite: Any = None) -> None:
        """As Additions.check."""
        self._additions.check(policy, finite)

    def place(self, policy: lora.Adapted) -> Any:
        """Returns the first weights, or those after `free`."""
        flat = traverse_util.flatten_dict(policy.base)
        others = {path: leaf for path, leaf in flat.items() if not self._made_here(path)}
        codes = self._made_codes(policy, {path: leaf for path, leaf in flat.items() if path not in others}, {})
        return lora.joined(
            traverse_util.unflatten_dict(codes), self._others.place(traverse_util.unflatten_dict(others))
        )

    def _replaced(self, old: Any, new: lora.Adapted, owned: bool) -> Any:
        held = traverse_util.flatten_dict(old)
        return traverse_util.unflatten_dict(held | self._made_codes(new, self._with_additions(new), held))

    def free(self, held: Any, owned: bool) -> None:
        """Frees codes, and other leaves that are not the learner's."""
        self._additions.free(held)

    def _made_here(self, path: Path) -> bool:
        """Returns whether a leaf has additions or codes, so that the engine's differs from the base's."""
        return path[-1] in EIGHT_BITS or path[-1] in self._merged

    def _with_additions(self, policy: lora.Adapted) -> dict[Path, jax.Array]:
        return traverse_util.flatten_dict(lora.matrices(policy.base, policy.lora)[0])

    def _made_codes(
        self, policy: lora.Adapted, leaves: Mapping[Path, jax.Array], held: Mapping[Path, jax.Array]
    ) -> dict:
        return self._by_groups(leaves, lambda paths, some: self._codes_of(policy, paths, some), held)

    def _codes_of(self, policy: lora.Adapted, paths: Sequence[Path], leaves: Sequence[jax.Array]) -> list[dict]:
        """Returns codes and scales of these matrices, each with its additions where it has some."""
        flat = traverse_util.flatten_dict(policy.adapter)
        parts = [
            tuple(flat[*path[:-1], name] for name in low_rank(path[-1], policy.lora))
            if path[-1] in self._merged
            else ()
            for path in paths
        ]
        return self._coded_sums(policy.lora, tuple(path[-1] for path in paths), leaves, parts)

    @functools.cached_property
    def _coded_sums(self) -> Any:
        """Returns the program of `_codes_of`, for leaves of these names and their A and B."""

        def run(given: Any, names: tuple[str, ...], leaves: Sequence, parts: Sequence) -> list[dict]:
            sums = [
                lora.sum_of(leaf, *own, name, given) if own else leaf
                for name, leaf, own in zip(names, leaves, parts, strict=True)
            ]
            return [self._make({name: leaf}) for name, leaf in zip(names, sums, strict=True)]

        return jax.jit(run, static_argnums=(0, 1))
