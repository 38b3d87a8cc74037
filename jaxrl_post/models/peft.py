"""Reads and writes LoRA additions in PEFT's format: adapter_config.json and adapter_model.safetensors.

PEFT's lora_A.weight is [r, inputs] and its lora_B.weight [outputs, r], so a transpose converts them. Every expert has
tensors of its own, under the names that it has as a module of transformers 4.

Invariants:
- Every tensor is used or refused, never skipped.
- A directory appears whole or not at all.

Refuses what changes the computation and is not supported: DoRA, biases, ranks that differ by module, and whole modules
saved beside the additions. Dropout is a matter of training and is not read: here there is none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import traverse_util

from jaxrl_post.models import config_keys as keys
from jaxrl_post.models import expert_files, families, hf, lora, tensor_file
from jaxrl_post.models.families import Leaf, Tensor
from jaxrl_post.models.layer import PRODUCTS, leading, low_rank, product, with_additions
from jaxrl_post.models.model_config import Lora, ModelConfig
from jaxrl_post.ring import json_text
from jaxrl_post.ring.json_text import said, shown

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_OFF = ("use_dora", "lora_bias", "fan_in_fan_out", "modules_to_save", "rank_pattern", "alpha_pattern")
_OFF += ("layers_to_transform", "target_parameters", "trainable_token_indices", "exclude_modules", "use_qalora")
_TARGETS = lora.MODULES | {theirs: name for name, theirs in expert_files.MIXTRAL.items()}


def read(directory: str | Path) -> tuple[Lora, str]:
    """Returns the additions that a directory describes, and the base that it names."""
    file = Path(directory) / CONFIG
    if not file.is_file():
        raise ValueError(f"adapter {directory}: no {CONFIG} in it, so it is no adapter of PEFT")
    given = {"use_rslora": False, "bias": "none"} | json_text.read_object(file, f"model {file}")
    keys.choice(file, given, "peft_type", {"LORA": ""})
    keys.choice(file, given, "bias", {"none": ""})
    for key in _OFF:
        if given.get(key):
            raise ValueError(f"model {file}: {key}={shown(given[key])} is not supported; it must be absent or empty")
    base = given.get("base_model_name_or_path")
    if not isinstance(base, str):
        raise ValueError(f"model {file}: base_model_name_or_path must be a text, got {shown(base)}")
    rank, alpha = keys.count(file, given, "r"), keys.above(file, given, "lora_alpha", 0.0)
    # The tensors tell which matrices have additions: target_modules may be a pattern.
    found = {_TARGETS.get(_module(name)) for name in _entries(Path(directory))}
    targets = tuple(name for name in lora.MODULES.values() if name in found)
    return Lora(rank, alpha, targets, keys.flag(file, given, "use_rslora")), base


def _module(tensor: str) -> str:
    """Returns the last name of the module of a tensor such as MODULE.lora_A.weight, or nothing where it has none."""
    return tensor.split(".")[-3] if tensor.count(".") > 2 else ""


def _entries(directory: Path) -> dict[str, tensor_file.Entry]:
    if not (directory / TENSORS).is_file():
        raise ValueError(f"adapter {directory}: no {TENSORS} in it; other files of weights are not read")
    return tensor_file.entries(directory / TENSORS)


def load(directory: str | Path, model: ModelConfig) -> dict:
    """Returns the additions of a directory as float32 in host memory: the adapter of a lora.Adapted."""
    present, every = matched(directory, model), tensors(model)
    leaves: dict[tuple[str, ...], Any] = {}
    for name, tensor in every.items():
        for one in tensor.leaves:
            value = hf.read_leaf(present[name], name, tensor, one, np.float32)
            if one.part is None:
                leaves[one.path] = value
            else:
                leaves.setdefault(one.path, []).append(value)
    return traverse_util.unflatten_dict({path: np.asarray(value) for path, value in leaves.items()})


def matched(directory: str | Path, model: ModelConfig) -> dict[str, tensor_file.Entry]:
    """Returns the tensors of a directory by name. They are those that `model` describes, of its rank, scale and targets."""
    directory = Path(directory)
    there, _ = read(directory)
    modules = {name: module for module, name in lora.MODULES.items()}
    named = [{**one._asdict(), "targets": tuple(modules[name] for name in one.targets)} for one in (there, model.lora)]
    for key in Lora._fields:
        if named[0][key] != named[1][key]:
            raise ValueError(
                f"lora.adapter={directory}: it has {key}={named[0][key]!r}, and lora.{key} means {named[1][key]!r}; the "
                f"nearest valid lora.{key} is {named[0][key]!r}"
            )
    expected, present = tensors(model), _entries(directory)
    for name in sorted(expected.keys() ^ present.keys()):
        what = f"is missing; expected shape {expected[name].shape}" if name in expected else "is not part of this model"
        raise ValueError(f"adapter {directory}: tensor {said(name)} {what}")
    for name, tensor in expected.items():
        if present[name].shape != tensor.shape or present[name].type not in tensor_file.FLOATS:
            raise ValueError(
                f"adapter {directory}: tensor {name} is {present[name].type}{shown(present[name].shape)}, expected "
                f"numbers of shape {tensor.shape}"
            )
    return present


def tensors(model: ModelConfig) -> dict[str, Tensor]:
    """Returns every tensor of the files by its name there.

    Raises:
      ValueError: an addition is to a stack of experts, which is no module of its own (gpt-oss, Gemma 4).
    """
    shapes, names, out = lora.abstract(model).adapter, with_additions(model.lora), {}
    for name, tensor in families.tensors(lora.plain(model)).items():
        *parents, matrix = tensor.leaves[0].path
        if not parents or matrix not in names:
            continue
        if tensor.leaves[0].stack:
            raise ValueError(
                f"lora.targets: {product(matrix)} of the experts is part of the tensor {said(name)}, to which PEFT's files hold "
                f"no addition of its own; the nearest valid choice is q_proj, k_proj, v_proj and o_proj"
            )
        own = shapes["layers"][parents[1]]
        pairs = [low_rank(leaf.path[-1], model.lora) for leaf in tensor.leaves]
        parts = {"A": tensor._replace(leaves=tensor.leaves[:1], groups=1), "B": tensor}
        for at, (part, whole) in enumerate(parts.items()):
            leaves = []
            for leaf, pair in zip(whole.leaves, pairs):
                ours = own[pair[at]].shape[leading(leaf.path[-1]) :]
                inputs = len(PRODUCTS[product(leaf.path[-1])][0]) if part == "A" else 1
                shape = int(np.prod(ours[inputs:])), int(np.prod(ours[:inputs]))
                leaves.append(Leaf((*parents, pair[at]), shape, ours, True, leaf.part))
            stem = f"base_model.model.{name.removesuffix('.weight')}"
            out[f"{stem}.lora_{part}.weight"] = whole._replace(leaves=tuple(leaves))
    return out


def save(directory: str | Path, model: ModelConfig, adapter: Mapping, *, base: str) -> None:
    """Writes a directory that PEFT loads, float32. It replaces an earlier adapter.

    Every process calls this with its part of the arrays, and process 0 writes.

    `base`: of the frozen weights, a directory or a name.
    """
    directory, all_of_them = Path(directory), tensors(model)
    if directory.exists() and not (directory / CONFIG).is_file():
        raise ValueError(
            f"adapter {directory}: it exists and holds no {CONFIG}, so it is no adapter to be replaced; name a new "
            "directory"
        )
    values = list(hf.as_in_files(all_of_them, adapter, np.dtype(np.float32)))
    if jax.process_index() != 0:
        return
    shapes = {name: tensor.shape for name, tensor in all_of_them.items()}
    with hf.replacing(directory) as made:
        tensor_file.write(made / TENSORS, shapes, np.dtype(np.float32), values)
        found = {_module(name) for name in all_of_them}
        about = _config(model.lora, [name for name in _TARGETS if name in found], base)
        (made / CONFIG).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")


def _config(given: Lora, modules: list[str], base: str) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": given.rank,
        "lora_alpha": given.alpha,
        "use_rslora": given.rslora,
        "lora_dropout": 0.0,
        "target_modules": modules,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
    }
