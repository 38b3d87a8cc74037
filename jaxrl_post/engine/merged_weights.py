"""The engine's weights of a policy with a frozen base: its additions are merged into the engine's buffers at a swap.

- Leaves without additions are placed once. They are the learner's own buffers where layout and dtype agree.
- A matrix with additions is a buffer of the engine. At a swap one program writes W + scale A B into it.
- W comes from the learner's buffers where the layout agrees. Else the engine keeps a copy in its own layout.

So a swap moves A and B alone between layouts, and the engine's programs see plain weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_post.engine.eight_bit_weights import EightBitLayout
from jaxrl_post.kernels import eight_bits
from jaxrl_post.models import decoder, lora
from jaxrl_post.models.model_config import ModelConfig
from jaxrl_post.parallel import mesh as meshes
from jaxrl_post.parallel.weight_sync import WeightLayout, torn_if_it_fails


def layout(
    model: ModelConfig, params: Any, mesh: jax.sharding.Mesh, dtype: Any, weights: str = eight_bits.AUTO
) -> WeightLayout | MergedLayout | EightBitLayout:
    """Returns what places such params on the engine's mesh: plain ones, or a lora.Adapted.

    Args:
      model: without additions.
      weights: the format of the engine's matrices (kernels/eight_bits.py). AUTO: the dtype.
    """
    if isinstance(params, lora.Adapted):
        assert weights == eight_bits.AUTO, "merged matrices have no codes"
        return MergedLayout(model, params, mesh, dtype)
    if weights != eight_bits.AUTO:
        return EightBitLayout(model, params, mesh, dtype, weights)
    return WeightLayout(meshes.param_shardings(mesh, decoder.axes(model), "engine"), dtype)


class MergedLayout:
    """Does for a lora.Adapted what WeightLayout does for plain weights.

    Args:
      policy: whose base stays the same at every swap.
    """

    def __init__(self, model: ModelConfig, policy: lora.Adapted, mesh: jax.sharding.Mesh, dtype: Any):
        self._lora, self._base = policy.lora, policy.base
        self._shapes = jax.eval_shape(lambda: policy.adapter)
        homes = meshes.param_shardings(mesh, decoder.axes(model), "engine")
        places = lora.axes(lora.adapting(model, policy.lora)).adapter
        matrices, others = lora.matrices(homes, policy.lora)
        own, _ = lora.matrices(policy.base, policy.lora)
        self._adapter = WeightLayout(meshes.param_shardings(mesh, places, "engine"), jnp.float32)
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
        cases = {self._adapter.case(policy.adapter), self._matrices.case(lora.matrices(policy.base, self._lora)[0])}
        return "relayout and merge" if "relayout" in cases else "merge"

    def links(self, policy: lora.Adapted) -> Mapping[str, int]:
        """Returns how many bytes a swap moves, by link: those of A and B, or nothing where they are in place."""
        return self._adapter.links(policy.adapter)

    def check(self, old: Any, policy: Any) -> None:
        """Checks a policy before a swap.

        Raises:
          ValueError: it has another base, or additions of another form.
          NotFinite: a value is not finite.
        """
        if not isinstance(policy, lora.Adapted) or policy.base is not self._base:
            raise ValueError("swap: the new weights have another base than the one in use, which is frozen")
        self._adapter.check(self._shapes, policy.adapter)

    def place(self, policy: lora.Adapted) -> Any:
        """Returns the first weights, or those after `free`."""
        matrices, others = lora.matrices(policy.base, self._lora)
        if self._here is None:
            self._here = self._matrices.place(matrices)
        merged = self._first(self._here, self._adapter.place(policy.adapter))
        return lora.joined(merged, self._others.place(others))

    def replace(self, old: Any, policy: lora.Adapted, owned: bool = True) -> Any:
        """Returns the next weights. The merged matrices of `old` are used up.

        Raises:
          Torn: the device or its runtime failed.
        """
        matrices, others = lora.matrices(old, self._lora)
        with torn_if_it_fails():
            merged = self._into(matrices, self._here, self._adapter.place(policy.adapter))
        return lora.joined(merged, others)

    def free(self, held: Any, owned: bool) -> None:
        """Frees merged matrices, and other leaves that are not the learner's. The base in this layout stays."""
        theirs = {id(leaf) for leaf in jax.tree.leaves(self._base)}
        for leaf in jax.tree.leaves(held):
            if id(leaf) not in theirs:
                leaf.delete()
