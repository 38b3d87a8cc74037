"""The low-rank additions of a run: what a config makes of a model, and what the learner starts from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_post.config import Config, LoraConfig
from jaxrl_post.models import decoder, lora, peft
from jaxrl_post.parallel import mesh as meshes
from jaxrl_post.runs.checkpoint.arrays import Saved


def adapting(given: LoraConfig, model: decoder.ModelConfig) -> decoder.ModelConfig:
    """Returns the model that the learner trains: with additions where the config asks for them."""
    if not given.rank:
        return model
    return lora.adapting(model, lora.Lora(given.rank, given.alpha, lora.targets(given.targets, model), given.rslora))


def check(config: Config, model: decoder.ModelConfig) -> None:
    """Refuses additions that PEFT's files do not express, and a directory to start from whose additions are others.

    Raises:
      ValueError: one sentence about the matrices or the directory.
    """
    if config.lora.rank:
        peft.tensors(adapting(config.lora, model))
    if config.lora.adapter:
        peft.matched(config.lora.adapter, adapting(config.lora, model))


def base(given: LoraConfig, params: Any) -> Any:
    """Returns the frozen weights in the form of `params`: shapes, or a function from shardings to arrays."""
    dtype = jnp.dtype(given.base_dtype)
    if callable(params):
        return lambda shardings: params(shardings, dtype)
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), params)


def first(config: Config, model: decoder.ModelConfig, directory: str) -> Callable[[Any], Any]:
    """Returns a function from shardings to the additions that a run begins with.

    Args:
      model: with additions.
      directory: of an adapter to start from; empty: they are drawn.
    """

    def placed(shardings: Any) -> Any:
        return meshes.put(peft.load(directory, model) if directory else lora.init(model, config.seed), shardings)

    return placed


def weights(config: Config, model: decoder.ModelConfig, params: Any, directory: str = "") -> dict[str, Any]:
    """Returns the arguments of the learner's weights. `model`: with additions or without. `params`: as build.learner."""
    referred = config.algorithm.needs_reference
    if model.lora is None:
        return {"params": params, "reference": params if referred else None}
    adapter = first(config, model, directory) if callable(params) else lora.abstract(model).adapter
    return {"params": base(config.lora, params), "adapter": adapter, "reference": adapter if referred else None}


# ---- of a saved step, or of a directory


def merged(load_params: Callable[..., Any], given: LoraConfig, model: decoder.ModelConfig, read: Callable) -> Callable:
    """Returns what reads a policy without additions, float32: merged of a base and additions.

    Args:
      load_params: of the base, as in inputs.Inputs.
      model: with additions.
      read: from a lora.Adapted of the base and of the additions' shardings to the additions.
    """

    def placed(shardings: Any) -> Any:
        frozen = load_params(shardings, jnp.dtype(given.base_dtype))
        mesh = jax.tree.leaves(shardings)[0].mesh
        homes = meshes.param_shardings(mesh, lora.axes(model).adapter, "engine")
        return lora.merge(lora.Adapted(frozen, read(frozen, homes), model.lora))

    return placed


def of_step(found: Saved, model: decoder.ModelConfig) -> Callable[[Any, Any], Any]:
    """Returns what reads the additions of a saved step, for `merged`. It refuses another base than the step's."""

    def read(frozen: Any, homes: Any) -> Any:
        one = meshes.replicated(jax.tree.leaves(homes)[0].mesh)
        shape = jax.ShapeDtypeStruct((2,), np.uint32, sharding=one)
        which = found.part({"base": shape}, "params", others=True)["base"]
        lora.check_base(jax.jit(lora.digest)(frozen), which, f"policy: step {found.step} of {found.path.parent}")
        return of_saved(found, model, homes)

    return read


def of_saved(found: Saved, model: decoder.ModelConfig, homes: Any) -> Any:
    """Returns the additions of a saved step, sharded by `homes`."""
    shapes = lora.abstract(model).adapter
    like = jax.tree.map(lambda leaf, home: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=home), shapes, homes)
    return found.part(like, "params.policy")


def of_directory(directory: str, model: decoder.ModelConfig) -> Callable[[Any, Any], Any]:
    """Returns what reads the additions of a directory of PEFT, for `merged`."""
    return lambda frozen, homes: meshes.put(peft.load(directory, model), homes)


def export(directory: Path, config: Config, model: decoder.ModelConfig, policy: Any) -> None:
    """Writes the additions of a policy in PEFT's format, where it has some. Every process calls it.

    Args:
      model: without additions.
    """
    if isinstance(policy, lora.Adapted):
        peft.save(directory, lora.adapting(model, policy.lora), policy.adapter, base=base_name(config))


def base_name(config: Config) -> str:
    """Returns how an adapter names its base: the path of a directory, as PEFT opens it, or else what the config says."""
    path = config.model.path
    return str(Path(path).absolute()) if path and Path(path).exists() else path or f"preset:{config.model.preset}"
