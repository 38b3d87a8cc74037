"""Experts in the files of Hugging Face: the keys of config.json that describe them, and the names of their tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl_post.models import config_keys as keys
from jaxrl_post.models import experts, gemma4, mxfp4, tensor_file
from jaxrl_post.models.model_config import Experts, ModelConfig
from jaxrl_post.models.tensor_file import Entry
from jaxrl_post.ring.json_text import shown

MOST = 1 << 16  # experts of a layer
_SPARSE = {"decoder_sparse_step": 1, "mlp_only_layers": None, "num_experts_per_tok": 4, "norm_topk_prob": False}
_SHARING = ("qwen2_moe", "qwen3_5_moe_text", "qwen3_next")  # kinds with an expert that every token uses
# What an absent key means, by model_type. The families of these kinds have experts. Gemma 4 may have some, and no other has.
ABSENT: dict[str, dict[str, Any]] = {
    "qwen2_moe": _SPARSE | {"num_experts": 60, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632},
    "qwen3_moe": _SPARSE | {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
    "qwen3_5_moe_text": _SPARSE
    | {"num_experts": 256, "num_experts_per_tok": 8, "norm_topk_prob": True}
    | {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512},
    "qwen3_next": _SPARSE
    | {"num_experts": 512, "num_experts_per_tok": 10, "norm_topk_prob": True}
    | {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512},
    "mixtral": {"num_experts": 8, "num_experts_per_tok": 2},
    "gpt_oss": {"num_experts": 128, "num_experts_per_tok": 4, "swiglu_alpha": experts.ALPHA, "swiglu_limit": 7.0},
}


def read(file: Path, kind: str, given: Mapping, layers: int) -> Experts | None:
    """Returns the experts that a config.json describes, or None for a family without. An absent key means as in transformers.

    Raises:
      ValueError: a value is out of its bounds. Or every layer has one feed-forward, so the model has no experts.
    """
    optional = kind == gemma4.KIND
    if kind not in ABSENT and not (optional and keys.flag(file, given, "enable_moe_block")):
        return None
    given = ABSENT.get(kind, {}) | given
    count = keys.count(file, given, "num_local_experts" if "num_local_experts" in given else "num_experts", MOST)
    per_token = "top_k_experts" if optional else "num_experts_per_tok"
    used = keys.count(file, given, per_token)
    if used > count:
        raise ValueError(
            f"model {file}: {per_token}={used} is more than the {count} experts; the nearest valid value is {count}"
        )
    if optional:
        return Experts(count, used, keys.count(file, given, "moe_intermediate_size"), beside=True)
    if kind == "mixtral":
        return Experts(count, used, keys.count(file, given, "intermediate_size"))
    if kind == "gpt_oss":
        if given["swiglu_alpha"] != experts.ALPHA:
            raise ValueError(
                f"model {file}: swiglu_alpha={shown(given['swiglu_alpha'])} is not supported; it must be {experts.ALPHA}"
            )
        limit = keys.above(file, given, "swiglu_limit", 0.0)
        return Experts(count, used, keys.count(file, given, "intermediate_size"), biased=True, limit=limit)
    if kind == "qwen3_5_moe_text":  # transformers has experts in every layer, and renormalises, whatever these say
        for key, wanted in (("norm_topk_prob", True), ("decoder_sparse_step", 1), ("mlp_only_layers", [])):
            if given[key] not in (wanted, None):
                raise ValueError(
                    f"model {file}: {key}={shown(given[key])} is not supported; the nearest valid value is {shown(wanted)}"
                )
    named, step = given["mlp_only_layers"] or [], keys.count(file, given, "decoder_sparse_step", keys.MOST_LAYERS)
    if not isinstance(named, list) or not all(type(one) is int and 0 <= one < layers for one in named):
        raise ValueError(
            f"model {file}: mlp_only_layers={shown(named)} must be a list of layers from 0 to {layers - 1}, or absent"
        )
    # One feed-forward have the layers that are named, and all but every decoder_sparse_step-th.
    dense = tuple(index for index in range(layers) if index in named or (index + 1) % step)
    if len(dense) == layers:
        instead = f"; a model without experts is a {kind.removesuffix('_moe')}" if kind.endswith("_moe") else ""
        raise ValueError(
            f"model {file}: mlp_only_layers={shown(given['mlp_only_layers'])} and decoder_sparse_step="
            f"{shown(given['decoder_sparse_step'])} leave none of {layers} layers with experts{instead}"
        )
    shared = keys.count(file, given, "shared_expert_intermediate_size") if kind in _SHARING else 0
    width, renormalised = keys.count(file, given, "moe_intermediate_size"), keys.flag(file, given, "norm_topk_prob")
    return Experts(count, used, width, renormalised, shared, dense)


def written(kind: str, e: Experts | None) -> dict[str, Any]:
    """Returns the keys of config.json that `read` reads for a family."""
    if kind == gemma4.KIND:
        own = dict(num_experts=e.count, top_k_experts=e.per_token, moe_intermediate_size=e.ffw) if e else {}
        return {"enable_moe_block": e is not None, **own}
    if e is None:
        return {}
    counts = {"num_experts_per_tok": e.per_token}
    if kind in ("mixtral", "gpt_oss"):
        clipped = {"swiglu_limit": e.limit} if kind == "gpt_oss" else {}
        return counts | {"num_local_experts": e.count, "intermediate_size": e.ffw, **clipped}
    shared = {"shared_expert_intermediate_size": e.shared_ffw} if kind in _SHARING else {}
    return counts | {
        "num_experts": e.count,
        "moe_intermediate_size": e.ffw,
        "norm_topk_prob": e.renormalised,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(e.dense_layers),
        **shared,
    }


def differs(kind: str, config: ModelConfig) -> list[str]:
    """Returns what of the experts a family cannot have."""
    e, optional = config.experts, kind == gemma4.KIND
    if not optional and (e is None) is (kind in ABSENT):
        return [f"experts={e}"]
    if e is None:
        return []
    own = dict(biased=kind == "gpt_oss", limit=(e.limit or 7.0) if kind == "gpt_oss" else None, beside=optional)
    if optional or kind in ("mixtral", "gpt_oss"):
        own |= dict(renormalised=True, dense_layers=(), shared_ffw=0)
    elif kind == "qwen3_5_moe_text":
        own |= dict(renormalised=True, dense_layers=())
    elif kind == "qwen3_moe":
        own |= dict(shared_ffw=0)
    out = [f"experts.{name}={getattr(e, name)}" for name, value in own.items() if getattr(e, name) != value]
    return out + (["experts.shared_ffw=0"] if kind in _SHARING and not e.shared_ffw else [])


class Place(NamedTuple):
    """The leaves of a layer that a tensor holds, and which of their stacks of matrices; None: they are whole leaves.

    `transposed`: each matrix of a whole stack is [outputs, inputs].
    """

    names: tuple[str, ...]
    expert: int | None = None
    transposed: bool = False


MIXTRAL = {"gate": "w1", "down": "w2", "up": "w3"}  # the hub's names of its matrices


def _spelling(kind: str) -> tuple[str, dict[str, str]]:
    """Returns the hub's names of what stands in the place of the feed-forward, and of its matrices."""
    if kind == "mixtral":
        return "block_sparse_moe", MIXTRAL
    return "mlp", {name: f"{name}_proj" for name in ("gate", "up", "down")}


_IN_STACKS = {
    # Stacks [E, inputs, outputs] in the file too, gate and up in one of them: column 2f is gate's f, and 2f + 1 is up's.
    "gpt_oss": {
        "mlp.router.weight": Place(("router",)),
        "mlp.router.bias": Place(("router_bias",)),
        "mlp.experts.gate_up_proj": Place(("experts_gate", "experts_up")),
        "mlp.experts.gate_up_proj_bias": Place(("experts_gate_bias", "experts_up_bias")),
        "mlp.experts.down_proj": Place(("experts_down",)),
        "mlp.experts.down_proj_bias": Place(("experts_down_bias",)),
    },
    # Stacks [E, outputs, inputs], gate's rows before up's.
    gemma4.KIND: {
        "router.proj.weight": Place(("router",)),
        "router.scale": Place(("router_scale",)),
        "router.per_expert_scale": Place(("expert_scale",)),
        "experts.gate_up_proj": Place(("experts_gate", "experts_up"), transposed=True),
        "experts.down_proj": Place(("experts_down",), transposed=True),
    },
}


def names(kind: str, e: Experts) -> Iterator[tuple[str, Place]]:
    """Returns the names of a layer's tensors behind `model.layers.N.`, one for each matrix of each expert, and their places."""
    if kind in _IN_STACKS:
        yield from _IN_STACKS[kind].items()
        return
    block, sides = _spelling(kind)
    yield f"{block}.gate.weight", Place(("router",))
    for expert in range(e.count):
        for name, theirs in sides.items():
            yield f"{block}.experts.{expert}.{theirs}.weight", Place((f"experts_{name}",), expert)
    if e.shared_ffw:
        for name, theirs in sides.items():
            yield f"{block}.shared_expert.{theirs}.weight", Place((f"shared_{name}",))
        yield f"{block}.shared_expert_gate.weight", Place(("shared_router",))


def apart(kind: str, config: ModelConfig, present: Mapping[str, Entry]) -> dict[str, Entry | mxfp4.Packed]:
    """Returns the tensors of files under the hub's names, where a stack of experts is one tensor for each matrix.

    Of gpt-oss and Gemma 4 a stack is one tensor. It may be packed as MXFP4.

    Stacks are those of transformers 5 in memory (modeling_qwen3_moe.py): gate_up_proj [E, 2F, D], gate before up, and
    down_proj [E, D, F]. So each matrix is a stretch of neighbouring bytes, and nothing is read here.

    Raises:
      ValueError: a stack has another shape than `config` says, or a type that is not read.
    """
    out: dict[str, Entry | mxfp4.Packed] = dict(present)
    if kind in _IN_STACKS:
        for name in [name.removesuffix("_blocks") for name in present if name.endswith("_blocks")]:
            if f"{name}_scales" in out:
                out[name] = mxfp4.packed(name, out.pop(f"{name}_blocks"), out.pop(f"{name}_scales"))
        return out
    block, sides = _spelling(kind)
    for index in range(config.layers):
        e = config.experts_of(index)
        if e is None:
            continue
        theirs, ours = f"model.layers.{index}.mlp", f"model.layers.{index}.{block}"
        if f"{ours}.gate.weight" not in out and f"{theirs}.gate.weight" in out:
            out[f"{ours}.gate.weight"] = out.pop(f"{theirs}.gate.weight")
        stacks = {"gate_up": (("gate", "up"), (e.ffw, config.embed)), "down": (("down",), (config.embed, e.ffw))}
        for stack, (matrices, (rows, columns)) in stacks.items():
            whole = f"{theirs}.experts.{stack}_proj"
            parts = [f"{ours}.experts.{expert}.{sides[name]}.weight" for expert in range(e.count) for name in matrices]
            # A stack beside one of its own parts stays under its name, which no family has.
            if whole in out and out.keys().isdisjoint(parts):
                entry = out.pop(whole)
                tensor_file.refuse_other(entry, whole, (e.count, len(matrices) * rows, columns))
                size = entry.bytes // len(parts)
                for at, name in enumerate(parts):
                    out[name] = entry._replace(shape=(rows, columns), start=entry.start + at * size, bytes=size)
    return out
