"""Hugging Face directories of plain Llama models: config.json and one model.safetensors, read and written.

Both spellings of config.json are read (transformers 4: rope_theta, rope_scaling, torch_dtype; 5: rope_parameters,
dtype); the older is written, which both read. Their matrices are [out, in] and rotate pairs (i, i + H/2) as the decoder
does, so a transpose is all that lies between. Invariant: a tensor is used or refused, never skipped. Refuses other
architectures, sharded or pickled weights (a pickle runs code), quantised ones, and a decoder variant that plain Llama
cannot express.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy

from jaxrl_post.models import decoder
from jaxrl_post.models.decoder import ModelConfig, RopeScaling

ARCHITECTURES = ("LlamaForCausalLM",)
DTYPES = ("float32", "bfloat16")
_FLOATS = {"F64", "F32", "F16", "BF16"}
_ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}
_PICKLED = (".bin", ".pt", ".pth", ".ckpt")
_OWN = ("config.json", "model.safetensors", "generation_config.json")
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "ffw_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


class _Tensor(NamedTuple):
    """Where a leaf of params lies in the file. `shape` is the file's, `ours` the leaf's."""

    path: tuple[str, ...]
    shape: tuple[int, ...]
    ours: tuple[int, ...]
    transposed: bool


def load(directory: str | Path, *, dtype: Any = np.float32) -> tuple[ModelConfig, dict]:
    """The shape and the params (host numpy) of a Hugging Face directory.

    Args:
      dtype: what every tensor is cast to; None keeps the file's.

    Raises:
      ValueError: no such directory or file, an architecture or format that is not read, or a tensor that is missing,
        left over or of another shape than config.json says; one sentence with its name, shape and expected shape.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise ValueError(f"model {directory}: no such directory")
    config = read_config(directory / "config.json")
    file = _weights_file(directory)
    try:
        with safetensors.safe_open(file, "numpy") as opened:
            return config, _read(file, opened, config, dtype)
    except safetensors.SafetensorError as error:
        raise ValueError(f"model {file}: not a whole safetensors file ({error})") from error


def read_config(file: str | Path) -> ModelConfig:
    """The shape that a config.json of a plain Llama describes, in either spelling. ValueError as in `load`."""
    file = Path(file)
    given = _json(file)
    named = given.get("architectures") or [given.get("model_type")]
    if not set(named) <= {*ARCHITECTURES, "llama"}:
        raise ValueError(f"model {file}: architecture {', '.join(map(str, named))} is not read; known is "
                         f"{', '.join(ARCHITECTURES)}")
    for key in ("attention_bias", "mlp_bias", "quantization_config"):
        if given.get(key):
            raise ValueError(f"model {file}: {key}={given[key]!r} is not supported; it must be absent or false")
    heads, embed = _number(file, given, "num_attention_heads"), _number(file, given, "hidden_size")
    activation = given.get("hidden_act", "silu")
    if activation not in _ACTIVATIONS:
        raise ValueError(f"model {file}: hidden_act={activation!r} is not one of {', '.join(_ACTIVATIONS)}")
    theta, scaling = _rope(file, given)
    return ModelConfig(
        vocab_size=_number(file, given, "vocab_size"),
        embed=embed,
        layers=_number(file, given, "num_hidden_layers"),
        heads=heads,
        kv_heads=_number(file, given, "num_key_value_heads", heads),
        head_dim=_number(file, given, "head_dim", embed // max(heads, 1)),
        ffw=_number(file, given, "intermediate_size"),
        max_length=_number(file, given, "max_position_embeddings", 2048),
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=float(_number(file, given, "rms_norm_eps", 1e-6)),
        activation=_ACTIVATIONS[activation],
        tied=bool(given.get("tie_word_embeddings", False)),
    )


def _json(file: Path) -> dict:
    try:
        given = json.loads(file.read_text())
    except FileNotFoundError:
        raise ValueError(f"model {file}: no such file") from None
    except ValueError as error:
        raise ValueError(f"model {file}: not JSON ({error})") from error
    if not isinstance(given, dict):
        raise ValueError(f"model {file}: expected a JSON object, got {type(given).__name__}")
    return given


def _number(file: Path, given: Mapping, key: str, default: float | None = None) -> Any:
    """given[key], or `default` where it is absent or null; ValueError where there is neither, or no number."""
    value = given.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"model {file}: {key} must be a number, got {value!r}")
    return value


def _rope(file: Path, given: Mapping) -> tuple[float, RopeScaling | None]:
    """Theta and scaling, from rope_parameters where there is one, else from rope_theta and rope_scaling."""
    about = given.get("rope_parameters") or given.get("rope_scaling") or {}
    theta = float(_number(file, {**given, **about}, "rope_theta", 10000.0))
    kind = about.get("rope_type", about.get("type", "default"))
    if _number(file, {**given, **about}, "partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"model {file}: partial_rotary_factor must be 1.0; partial rotation is not supported")
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, RopeScaling("linear", float(_number(file, about, "factor")))
    if kind == "llama3":
        return theta, RopeScaling("llama3", float(_number(file, about, "factor")),
                                  float(_number(file, about, "low_freq_factor")),
                                  float(_number(file, about, "high_freq_factor")),
                                  _number(file, about, "original_max_position_embeddings"))
    raise ValueError(f"model {file}: rope type {kind!r} is not one of default, linear, llama3")


def _weights_file(directory: Path) -> Path:
    file = directory / "model.safetensors"
    if file.is_file():
        return file
    if (directory / "model.safetensors.index.json").is_file():
        raise ValueError(f"model {directory}: weights in several files are not read; save them as one "
                         f"model.safetensors")
    pickled = sorted(path.name for path in directory.iterdir() if path.suffix in _PICKLED)
    if pickled:
        raise ValueError(f"model {directory}: {pickled[0]} is a pickle, which can run code, and is not read; save the "
                         f"weights as model.safetensors")
    raise ValueError(f"model {directory}: no model.safetensors in it")


def _tensors(config: ModelConfig) -> dict[str, _Tensor]:
    """Every tensor of the file by its name there, in the file's order of layers."""
    shapes = decoder.abstract(config)
    out = {"model.embed_tokens.weight": _tensor(shapes, ("embed",), transposed=False)}
    for index in range(config.layers):
        for name, theirs in _IN_LAYER.items():
            out[f"model.layers.{index}.{theirs}.weight"] = _tensor(shapes, ("layers", str(index), name))
    out["model.norm.weight"] = _tensor(shapes, ("final_norm",))
    if not config.tied:
        out["lm_head.weight"] = _tensor(shapes, ("head",))
    return out


def _tensor(shapes: dict, path: tuple[str, ...], *, transposed: bool = True) -> _Tensor:
    ours = _at(shapes, path).shape
    if len(ours) == 1 or not transposed:
        return _Tensor(path, ours, ours, False)
    inputs = ours[0] * ours[1] if path[-1] == "o" else ours[0]
    return _Tensor(path, (int(np.prod(ours)) // inputs, inputs), ours, True)


def _at(tree: Mapping, path: tuple[str, ...]) -> Any:
    for name in path:
        tree = tree[name]
    return tree


def _read(file: Path, opened: Any, config: ModelConfig, dtype: Any) -> dict:
    expected, present = _tensors(config), set(opened.keys())
    # Old exports carry the rotation's frequencies, tied ones sometimes the embedding twice: both say nothing new.
    present = {name for name in present if not name.endswith("rotary_emb.inv_freq")}
    if config.tied and "lm_head.weight" in present:
        if not np.array_equal(opened.get_tensor("lm_head.weight"), opened.get_tensor("model.embed_tokens.weight")):
            raise ValueError(f"model {file}: config.json says tie_word_embeddings, but lm_head.weight differs from "
                             f"model.embed_tokens.weight")
        present.remove("lm_head.weight")
    for name in sorted(present ^ set(expected)):
        what = "is missing; expected shape " + str(expected[name].shape) if name in expected else \
            f"of shape {tuple(opened.get_slice(name).get_shape())} is not part of this architecture"
        raise ValueError(f"model {file}: tensor {name} {what}")
    params: dict = {}
    for name, tensor in expected.items():
        about = opened.get_slice(name)
        if tuple(about.get_shape()) != tensor.shape:
            raise ValueError(f"model {file}: tensor {name} has shape {tuple(about.get_shape())}, expected "
                             f"{tensor.shape}")
        if about.get_dtype() not in _FLOATS:
            raise ValueError(f"model {file}: tensor {name} has type {about.get_dtype()}, expected one of "
                             f"{', '.join(sorted(_FLOATS))}")
        where = params
        for parent in tensor.path[:-1]:
            where = where.setdefault(parent, {})
        value = opened.get_tensor(name)
        value = value.T.reshape(tensor.ours) if tensor.transposed else value
        where[tensor.path[-1]] = np.ascontiguousarray(value, dtype=dtype)
    return params


def save(
    directory: str | Path,
    config: ModelConfig,
    params: Mapping,
    *,
    dtype: str = "float32",
    tokenizer_files: Iterable[str | Path] = (),
    eos_ids: tuple[int, ...] = (),
    bos_id: int | None = None,
) -> None:
    """Writes a directory that Hugging Face tools load: weights in `dtype`, config, and copies of `tokenizer_files`.

    The whole directory appears at once under its name, replacing an earlier export; float32 comes back to the bit.

    Raises:
      ValueError: a variant that plain Llama cannot express, params of another shape than config says, a tokenizer file
        that is missing, or a directory that exists and is no export.
    """
    directory = Path(directory)
    files = [Path(file) for file in tokenizer_files]
    _savable(directory, config, dtype, files)
    tensors = {name: _file_layout(name, tensor, params, dtype) for name, tensor in _tensors(config).items()}
    directory.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        safetensors.numpy.save_file(tensors, made / "model.safetensors", metadata={"format": "pt"})
        _write_json(made / "config.json", _config_json(config, dtype, eos_ids, bos_id))
        _write_json(made / "generation_config.json", _ids(eos_ids, bos_id))
        for file in files:
            shutil.copyfile(file, made / file.name)
        made.chmod(0o755)
        _swap_in(made, directory)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _savable(directory: Path, config: ModelConfig, dtype: str, files: list[Path]) -> None:
    plain = ModelConfig(vocab_size=1, embed=1, layers=1, heads=1, kv_heads=1, head_dim=2, ffw=1, max_length=1)
    for name in ("norm_offset", "attn_soft_cap", "final_soft_cap", "qk_norm", "qkv_bias", "query_scale"):
        if getattr(config, name) != getattr(plain, name):
            raise ValueError(f"model {directory}: {name}={getattr(config, name)!r} cannot be saved as LlamaForCausalLM,"
                             f" which has {getattr(plain, name)!r}")
    if any(window is not None for window in config.windows):
        raise ValueError(f"model {directory}: windows={config.windows} cannot be saved as LlamaForCausalLM, which has "
                         f"none")
    if dtype not in DTYPES:
        raise ValueError(f"model {directory}: dtype={dtype!r} is not one of {', '.join(DTYPES)}")
    for file in files:
        if not file.is_file():
            raise ValueError(f"model {directory}: tokenizer file {file} does not exist")
        if file.name in _OWN:
            raise ValueError(f"model {directory}: tokenizer file {file} has the name of a file that the export writes")
    if directory.exists() and not (directory / "config.json").is_file():
        raise ValueError(f"model {directory}: it exists and holds no config.json, so it is no export to be replaced; "
                         f"name a new directory")


def _file_layout(name: str, tensor: _Tensor, params: Mapping, dtype: str) -> np.ndarray:
    try:
        value = np.asarray(_at(params, tensor.path))
    except KeyError:
        raise ValueError(f"model: params have no {'.'.join(tensor.path)}, needed for {name} {tensor.shape}") from None
    if value.shape != tensor.ours:
        raise ValueError(f"model: params {'.'.join(tensor.path)} has shape {value.shape}, expected {tensor.ours}")
    value = value.reshape(tensor.shape[::-1]).T if tensor.transposed else value
    # The writer takes bytes as they lie in memory: a view would come out scrambled.
    return np.ascontiguousarray(value, dtype=jnp.dtype(dtype))


def _config_json(config: ModelConfig, dtype: str, eos_ids: tuple[int, ...], bos_id: int | None) -> dict:
    scaling = config.rope_scaling
    about = None if scaling is None else {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling is not None and scaling.kind == "llama3":
        about |= {"low_freq_factor": scaling.low_frequency_factor, "high_freq_factor": scaling.high_frequency_factor,
                  "original_max_position_embeddings": scaling.original_length}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.embed,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.ffw,
        "max_position_embeddings": config.max_length,
        "rope_theta": config.rope_theta,
        "rope_scaling": about,
        "rms_norm_eps": config.norm_eps,
        "hidden_act": {ours: theirs for theirs, ours in _ACTIVATIONS.items()}[config.activation],
        "tie_word_embeddings": config.tied,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": dtype,
        **_ids(eos_ids, bos_id),
    }


def _ids(eos_ids: tuple[int, ...], bos_id: int | None) -> dict:
    # Written even when empty: readers take an absent id for Llama's own 1 and 2.
    return {"bos_token_id": bos_id, "eos_token_id": list(eos_ids) if len(eos_ids) > 1 else next(iter(eos_ids), None)}


def _write_json(file: Path, value: Mapping) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n")


def _swap_in(made: Path, directory: Path) -> None:
    """Renames `made` to `directory`; an earlier export steps aside first and is then deleted."""
    if not directory.exists():
        os.rename(made, directory)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{directory.name}.old.", dir=directory.parent))
    os.rename(directory, old / directory.name)
    os.rename(made, directory)
    shutil.rmtree(old)
