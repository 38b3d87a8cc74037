"""Model families of Hugging Face: config.json to ModelConfig and back, and the names of their tensors.

Reads the keys of transformers 4 (rope_theta, rope_scaling, rope_local_base_freq, torch_dtype) and of 5
(rope_parameters, dtype). An absent key means the same as in transformers. Writes the older keys, which both versions
read. Matrices in the files are [out, in] and rotate pairs (i, i + H/2) like the decoder, so a transpose converts them.

Refuses other architectures, and settings that change the scores and are not supported (biases of Llama,
quantisation but MXFP4, ...). Also refuses to write a variant that no family expresses.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl_post.models import config_keys as keys
from jaxrl_post.models import decoder, expert_files, gemma4, mxfp4, qwen35, rope, text_part
from jaxrl_post.models.model_config import ModelConfig
from jaxrl_post.models.tensor_file import Entry
from jaxrl_post.ring import json_text
from jaxrl_post.ring.json_text import said, shown

_ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}
_GEMMA = dict(norm_offset=1.0, post_norms=True)
LAYER_TYPES = ("full_attention", "sliding_attention")  # of the families without keys of their own
_OFF = dict(mlp_bias=False, use_bidirectional_attention=False)


class Family(NamedTuple):
    """One architecture: `kind` is its model_type, `fixed` the fields of ModelConfig that it decides.

    `absent`: the value of an absent key. None means: num_key_value_heads as heads, head_dim hidden_size / heads.
    `own`: the module with the keys that no other family has, as gemma4.py: OWN, LAYER_TYPES, plain, read, written and differs.
    """

    architecture: str
    kind: str
    fixed: dict[str, Any]
    absent: dict[str, Any]
    own: Any = None

    @property
    def scoring(self) -> str:
        """Returns the architecture with a scalar head in the place of the scores of tokens: a reward model."""
        own = self.architecture.removesuffix("ForCausalLM")
        return f"{own}{'Text' if self.kind.endswith('_text') else ''}ForSequenceClassification"


_PLAIN = {
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "num_key_value_heads": None,
    "head_dim": None,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}
_QWEN = _PLAIN | {
    "max_position_embeddings": 32768,
    "num_key_value_heads": 32,
    "sliding_window": 4096,
    "use_sliding_window": False,
    "max_window_layers": 28,
}
_SOFT = {
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
FAMILIES = (
    Family("LlamaForCausalLM", "llama", {}, _PLAIN | {"max_position_embeddings": 2048}),
    Family(
        "MistralForCausalLM",
        "mistral",
        {},
        _PLAIN | {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    ),
    Family("Qwen2ForCausalLM", "qwen2", dict(qkv_bias=True), _QWEN),
    Family("Qwen3ForCausalLM", "qwen3", dict(qk_norm=True), _QWEN | {"head_dim": 128}),
    Family("Qwen2MoeForCausalLM", "qwen2_moe", dict(qkv_bias=True), _QWEN | {"num_key_value_heads": 16}),
    Family("Qwen3MoeForCausalLM", "qwen3_moe", dict(qk_norm=True), _QWEN | {"num_key_value_heads": 4}),
    Family(
        "MixtralForCausalLM",
        "mixtral",
        {},
        _PLAIN
        | {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": None, "rope_theta": 1e6}
        | {"rms_norm_eps": 1e-5, "intermediate_size": 14336},
    ),
    Family(
        "GptOssForCausalLM",
        "gpt_oss",
        dict(qkv_bias=True, o_bias=True, sinks=True),
        _PLAIN
        | {"max_position_embeddings": 131072, "num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128}
        | {"rms_norm_eps": 1e-5, "rope_theta": 150000.0, "intermediate_size": 2880},
    ),
    Family(
        "Gemma2ForCausalLM",
        "gemma2",
        _GEMMA,
        _SOFT | {"max_position_embeddings": 8192, "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0},
    ),
    Family(
        "Gemma3ForCausalLM",
        "gemma3_text",
        _GEMMA | dict(qk_norm=True),
        _SOFT
        | {
            "max_position_embeddings": 131072,
            "rope_theta": 1e6,
            "rope_local_base_freq": 10000.0,
            "final_logit_softcapping": None,
            "attn_logit_softcapping": None,
            "sliding_window_pattern": 6,
        },
    ),
    Family("Gemma4ForCausalLM", gemma4.KIND, gemma4.FIXED, gemma4.ABSENT, gemma4),
    Family("Qwen3_5ForCausalLM", qwen35.KIND, qwen35.FIXED, qwen35.ABSENT, qwen35),
    Family("Qwen3_5MoeForCausalLM", qwen35.WITH_EXPERTS, qwen35.FIXED, qwen35.ABSENT_WITH_EXPERTS, qwen35),
    Family("Qwen3NextForCausalLM", qwen35.NEXT, qwen35.FIXED, qwen35.ABSENT_OF_NEXT, qwen35),
)
ARCHITECTURES = tuple(family.architecture for family in FAMILIES)


# ---- config.json to ModelConfig


def read(file: Path) -> ModelConfig:
    """Returns the shape and variant that a config.json describes, in either spelling."""
    given = text_part.config(file, json_text.read_object(file, f"model {file}"))
    family, scalar = _family(file, given)
    given = family.own.plain(given) if family.own else given
    for key, wanted in {**_OFF, "attention_bias": family.fixed.get("o_bias", False)}.items():
        if bool(given.get(key, wanted)) is not wanted:
            raise ValueError(
                f"model {file}: {key}={shown(given[key])} is not supported for {family.architecture}; it must be absent or "
                f"{str(wanted).lower()}"
            )
    mxfp4.check_method(file, family.kind, given)
    given = family.absent | given
    heads, embed = keys.count(file, given, "num_attention_heads"), keys.count(file, given, "hidden_size")
    layers = keys.count(file, given, "num_hidden_layers", keys.MOST_LAYERS)
    gemma = family.fixed.get("post_norms", False)
    if family.kind == "gemma3_text" and given["attn_logit_softcapping"] is not None:
        raise ValueError(
            f"model {file}: attn_logit_softcapping={shown(given['attn_logit_softcapping'])} is not supported for "
            f"{family.architecture}, where transformers ignores it; the nearest valid value is null"
        )
    if gemma:
        softened = dict(
            embed_scale=float(embed) ** 0.5,
            query_scale=keys.number(file, given, "query_pre_attn_scalar", 1.0, 1e9) ** -0.5,
            attn_soft_cap=_cap(file, given, "attn_logit_softcapping"),
            final_soft_cap=_cap(file, given, "final_logit_softcapping"),
        )
    kv_heads, head_dim = (given.get(key) for key in ("num_key_value_heads", "head_dim"))
    kv_heads = heads if kv_heads is None else keys.count(file, given, "num_key_value_heads")
    head_dim = embed // heads if head_dim is None else keys.count(file, given, "head_dim")
    windows = _windows(file, family, given, layers)
    own = family.own.read(file, given, windows, (kv_heads, head_dim)) if family.own else _rope(file, family, given)
    fields = dict(
        vocab_size=keys.count(file, given, "vocab_size"),
        embed=embed,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffw=keys.count(file, given, "intermediate_size"),
        max_length=keys.count(file, given, "max_position_embeddings", keys.LONGEST),
        **own,
        norm_eps=keys.number(file, given, "rms_norm_eps", 0.0, 1.0),
        activation=keys.choice(file, given, "hidden_activation" if gemma else "hidden_act", _ACTIVATIONS),
        tied=keys.flag(file, given, "tie_word_embeddings"),
        windows=windows,
        experts=expert_files.read(file, family.kind, given, layers),
        scalar=scalar,
        family=family.kind,
        **family.fixed,
        **(softened if gemma else {}),
    )
    return keys.named(file, lambda: ModelConfig(**fields))


def _family(file: Path, given: Mapping) -> tuple[Family, bool]:
    kind = given.get("model_type")
    named = keys.texts(file, given, "architectures") or [kind if isinstance(kind, str) else shown(kind)]
    for family in FAMILIES:
        if set(named) <= {family.architecture, family.kind}:
            return family, False
        if named == [family.scoring]:
            keys.one_label(file, given)
            return family, True
    if (
        "n_group" in given or given.get("scoring_func", "softmax") != "softmax"
    ):  # DeepSeek, GLM and those that follow them
        raise ValueError(
            f"model {file}: architecture {said(', '.join(named))} is not read: its router chooses experts by sigmoid scores or in "
            "groups, and routers here by a softmax over all experts; the nearest that is read is Qwen3MoeForCausalLM"
        )
    texts, wholes = (
        ", ".join(one.partition("For")[0] for one in names) for names in (ARCHITECTURES, text_part.TEXT_MODELS)
    )
    raise ValueError(
        f"model {file}: architecture {said(', '.join(named))} is not read; known are {texts} (each ForCausalLM), and {wholes} "
        "(each ForConditionalGeneration)"
    )


def _cap(file: Path, given: Mapping, key: str) -> float | None:
    return None if given[key] is None else keys.above(file, given, key, 0.0)


def _rope(file: Path, family: Family, given: Mapping) -> dict[str, Any]:
    """Returns theta and scaling, from rope_parameters if present, else from rope_theta and rope_scaling. Gemma 3 has
    two sets: nested in the newer spelling, rope_local_base_freq in the older.
    """
    about, local = keys.section(file, given, "rope_parameters") or keys.section(file, given, "rope_scaling"), None
    about = about or rope.ABSENT.get(family.kind, {})
    if "rope_local_base_freq" in family.absent:
        nested = keys.section(file, about, "sliding_attention")
        if nested.get("rope_type", "default") != "default":
            raise ValueError(
                f"model {file}: rope type {shown(nested['rope_type'])} of sliding_attention is not supported; "
                f"it must be default"
            )
        local = keys.above(file, {"rope_theta": given["rope_local_base_freq"], **nested}, "rope_theta", 0.0)
        about = keys.section(file, about, "full_attention") or ({} if nested else about)
        if about.get("rope_type", about.get("type")) == "yarn" and not about.get("truncate", True):
            raise ValueError(
                f"model {file}: truncate={shown(about['truncate'])} is not supported for {family.architecture}, where "
                f"transformers ignores it; the nearest valid value is true"
            )
        given = {**given, "original_max_position_embeddings": None}  # transformers reads none beside two sets
    if any(isinstance(value, Mapping) for value in about.values()):
        raise ValueError(f"model {file}: rope parameters by kind of layer are not supported for {family.architecture}")
    theta = keys.above(file, {**given, **about}, "rope_theta", 0.0)
    if {"partial_rotary_factor": 1.0, **given, **about}["partial_rotary_factor"] not in (1.0, None):
        raise ValueError(f"model {file}: partial_rotary_factor must be 1.0; partial rotation is not supported")
    return dict(rope_theta=theta, rope_scaling=rope.read(file, given, about), local_rope_theta=local)


def _windows(file: Path, family: Family, given: Mapping, layers: int) -> tuple[int | None, ...]:
    """Returns the window of each layer, by layer_types if present, else by the family's rule."""
    slides = _slides(file, family, given, layers)
    kinds = keys.texts(file, given, "layer_types")
    if kinds is not None:
        known = family.own.LAYER_TYPES if family.own else LAYER_TYPES
        if len(kinds) != layers or not set(kinds) <= set(known):
            raise ValueError(
                f"model {file}: layer_types={shown(kinds)} must name {' or '.join(known)} for each of {layers} layers"
            )
        named = [kind == "sliding_attention" for kind in kinds]
        if named != slides and family.kind in ("llama", "mistral", "mixtral", "qwen3_moe"):
            raise ValueError(
                f"model {file}: layer_types={shown(kinds)} is not supported for {family.architecture}, whose "
                f"layers are all alike"
            )
        slides = named
    return tuple(keys.count(file, given, "sliding_window", keys.LONGEST) if slide else None for slide in slides)


def _slides(file: Path, family: Family, given: Mapping, layers: int) -> list[bool]:
    window = given.get("sliding_window")
    if family.kind in ("mistral", "mixtral"):
        return [window is not None] * layers
    if family.kind in ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe"):
        if not keys.flag(file, given, "use_sliding_window") or window is None:
            return [False] * layers
        first = keys.number(file, given, "max_window_layers")
        if family.kind == "qwen2_moe":
            return [at < first and at % 2 == 0 for at in range(layers)]
        if family.kind == "qwen3_moe":
            return [True] * layers
        return [at >= first for at in range(layers)]
    if family.kind in ("gemma2", "gemma3_text", "gpt_oss", gemma4.KIND):
        patterned = "sliding_window_pattern" in family.absent
        every = keys.count(file, given, "sliding_window_pattern") if patterned else 2
        return [bool((at + 1) % every) for at in range(layers)]
    return [False] * layers


# ---- ModelConfig to config.json


def write(config: ModelConfig) -> dict[str, Any]:
    """Returns the config.json of a decoder: the keys that decide the computation.

    Raises:
      ValueError: no family computes the same. The sentence names the nearest family and the fields that differ.
    """
    family = _expressing(config)
    activation = {ours: theirs for theirs, ours in _ACTIVATIONS.items()}[config.activation]
    gemma = "query_pre_attn_scalar" in family.absent
    if family.own:
        own = family.own.written(config)
    else:
        own = {
            "rope_theta": config.rope_theta,
            "rope_scaling": rope.write(config.rope_scaling, family.kind),
            **_windows_json(family, config),
            **(_gemma_json(family, config) if gemma else {}),
        }
    return {
        "architectures": [family.scoring if config.scalar else family.architecture],
        "model_type": family.kind,
        **({"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}} if config.scalar else {}),
        "vocab_size": config.vocab_size,
        "hidden_size": config.embed,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.ffw,
        "max_position_embeddings": config.max_length,
        "rms_norm_eps": config.norm_eps,
        "hidden_activation" if gemma else "hidden_act": activation,
        "tie_word_embeddings": config.tied,
        "attention_bias": config.o_bias,
        "mlp_bias": False,
        **own,
        **expert_files.written(family.kind, config.experts),
    }


def _gemma_json(family: Family, config: ModelConfig) -> dict[str, Any]:
    out = {
        "query_pre_attn_scalar": round(config.scale_of(0) ** -2),
        "attn_logit_softcapping": config.attn_soft_cap,
        "final_logit_softcapping": config.final_soft_cap,
    }
    return out | ({"rope_local_base_freq": config.local_rope_theta} if "rope_local_base_freq" in family.absent else {})


def _windows_json(family: Family, config: ModelConfig) -> dict[str, Any]:
    slides = [window is not None for window in config.windows]
    out: dict[str, Any] = {"sliding_window": next(filter(None, config.windows), None)}
    if family.kind == "llama":
        return {}
    if family.kind in ("mistral", "mixtral"):
        return out
    if family.kind == "qwen3_moe":
        return out | {"use_sliding_window": any(slides)}
    if family.kind == "qwen2_moe":
        out |= {"use_sliding_window": any(slides)}
    if family.kind in ("qwen2", "qwen3"):
        out |= {
            "use_sliding_window": any(slides),
            "max_window_layers": slides.index(True) if any(slides) else config.layers,
        }
    if family.kind == "gemma3_text":
        out |= {"sliding_window_pattern": slides.index(False) + 1 if False in slides else config.layers + 1}
    return out | {"layer_types": ["sliding_attention" if slide else "full_attention" for slide in slides]}


def _expressing(config: ModelConfig) -> Family:
    """Returns a family that computes what `config` says: the one it was read as, else the first."""
    reasons = [_differs(family, config) for family in FAMILIES]
    for family, differs in zip(FAMILIES, reasons):
        if family.kind == config.family and not differs:
            return family
    least = min(range(len(FAMILIES)), key=lambda at: len(reasons[at]))
    if reasons[least]:
        raise ValueError(
            f"model: {', '.join(reasons[least])} cannot be saved as {FAMILIES[least].architecture}, which "
            f"is the nearest of {', '.join(ARCHITECTURES)}"
        )
    return FAMILIES[least]


_DECIDED = (
    "norm_offset",
    "post_norms",
    "qk_norm",
    "qkv_bias",
    "o_bias",
    "sinks",
    "v_norm",
    "layer_scalars",
    "attn_gate",
    *gemma4.OWN,
    *qwen35.OWN,
)


def _differs(family: Family, config: ModelConfig) -> list[str]:
    """Returns the fields of `config` that the family cannot have."""
    gemma = "query_pre_attn_scalar" in family.absent
    plain = {field.name: field.default for field in dataclasses.fields(ModelConfig)}
    free = family.own.OWN if family.own else ()
    expected = {name: family.fixed.get(name, plain[name]) for name in _DECIDED if name not in free}
    expected["embed_scale"] = float(config.embed) ** 0.5 if gemma else 1.0
    scalar = round(config.scale_of(0) ** -2) if gemma else config.head_dim
    if config.scale_of(0) != float(scalar) ** -0.5:
        expected["query_scale"] = float(scalar) ** -0.5
    if not gemma:
        expected |= dict(attn_soft_cap=None, final_soft_cap=None)
    if family.kind == "gemma3_text":
        expected |= dict(attn_soft_cap=None)
    out = [f"{name}={getattr(config, name)!r}" for name, value in expected.items() if getattr(config, name) != value]
    if not family.own and (config.local_rope_theta is not None) != ("rope_local_base_freq" in family.absent):
        out.append(f"local_rope_theta={config.local_rope_theta!r}")
    out += expert_files.differs(family.kind, config)
    out += family.own.differs(config) if family.own else []
    scaling = config.rope_scaling
    if family.kind == "gemma3_text" and scaling is not None and not scaling.truncate:
        out.append("rope_scaling.truncate=False")
    sizes = set(config.windows)
    alike, some = len(sizes) > 1, sizes != {None}
    of_kind = {"llama": some, "mistral": alike, "mixtral": alike, "qwen3_moe": alike}
    of_kind |= {qwen35.KIND: some, qwen35.WITH_EXPERTS: some, qwen35.NEXT: some}
    if of_kind.get(family.kind, len(sizes - {None}) > 1):
        out.append(f"windows={config.windows}")
    if family.kind in ("llama", "gemma2", "gemma3_text") and config.embed % config.heads:
        out.append(f"embed={config.embed} (no multiple of heads={config.heads})")
    return out


# ---- Names of tensors


class Leaf(NamedTuple):
    """A leaf of params as it lies in a tensor of the files: its own numbers have `shape` there, and `ours` in params.

    `transposed`: outputs come before inputs there. With `part`, the numbers are that entry of the leaf's first axis, and `ours`
    is the shape of one entry. With `stack`, the first axis of both shapes is that of experts.
    """

    path: tuple[str, ...]
    shape: tuple[int, ...]
    ours: tuple[int, ...]
    transposed: bool
    part: int | None = None
    stack: bool = False


class Tensor(NamedTuple):
    """A tensor of the files, and the leaves that it holds: one, or several that share an axis.

    The axis has `groups` equal stretches. In each of them every leaf has equally many neighbours, in the order of `leaves`.
    """

    leaves: tuple[Leaf, ...]
    axis: int = 0
    groups: int = 1

    @property
    def shape(self) -> tuple[int, ...]:
        """Returns the shape in the files."""
        sizes = list(self.leaves[0].shape)
        sizes[self.axis] = sum(leaf.shape[self.axis] for leaf in self.leaves)
        return tuple(sizes)


_IN_LAYER = {
    "attn_norm": "input_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "o": "self_attn.o_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "o_bias": "self_attn.o_proj.bias",
    "sinks": "self_attn.sinks",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "ffw_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
    **{f"linear_{name}": "linear_attn.in_proj_qkv.weight" for name in "qkv"},
    "linear_z": "linear_attn.in_proj_z.weight",
    "linear_rate": "linear_attn.in_proj_b.weight",
    "linear_decay": "linear_attn.in_proj_a.weight",
    **{f"conv_{name}": "linear_attn.conv1d.weight" for name in "qkv"},
    "dt_bias": "linear_attn.dt_bias",
    "a_log": "linear_attn.A_log",
    "linear_norm": "linear_attn.norm.weight",
    "linear_o": "linear_attn.out_proj.weight",
}
# Where outputs are normed too, the same name means another norm.
_POST_NORMED = _IN_LAYER | {
    "layer_scalar": "layer_scalar",
    "layer_gate": "per_layer_input_gate.weight",
    "layer_up": "per_layer_projection.weight",
    "layer_post_norm": "post_per_layer_input_norm.weight",
    "attn_post_norm": "post_attention_layernorm.weight",
    "ffw_norm": "pre_feedforward_layernorm.weight",
    "ffw_post_norm": "post_feedforward_layernorm.weight",
    "dense_post_norm": "post_feedforward_layernorm_1.weight",
    "moe_norm": "pre_feedforward_layernorm_2.weight",
    "moe_post_norm": "post_feedforward_layernorm_2.weight",
}
_OUTSIDE = {
    "embed": "model.embed_tokens.weight",
    "layer_embed": "model.embed_tokens_per_layer.weight",
    "layer_proj": "model.per_layer_model_projection.weight",
    "layer_proj_norm": "model.per_layer_projection_norm.weight",
    "final_norm": "model.norm.weight",
    "head": "lm_head.weight",
    "score": "score.weight",
}


def tensors(config: ModelConfig) -> dict[str, Tensor]:
    """Returns every tensor of the files by its name there: embedding, layers, last norm, head.

    Those of a layer are in the order of our names, in which they are written: equal weights make equal files."""
    shapes, (kind, names) = decoder.abstract(config), _names(config)
    out = {_OUTSIDE["embed"]: Tensor((_leaf(("embed",), shapes["embed"].shape),))}
    for index in range(config.layers):
        layer, experts = shapes["layers"][str(index)], config.experts_of(index)
        held: dict[str, tuple[str, ...]] = {}
        for name in (name for name in names if name in layer):
            held[names[name]] = (*held.get(names[name], ()), name)
        places = {theirs: expert_files.Place(own) for theirs, own in held.items()}
        if experts is not None:
            places |= dict(expert_files.names(kind, experts))
        for theirs, (own, part, transposed) in sorted(places.items(), key=lambda place: place[1].names[0]):
            sizes = {("layers", str(index), name): layer[name].shape for name in own}
            if transposed:
                # Whole stacks of matrices [outputs, inputs]. Of two of them the rows of one lie behind those of the other.
                leaves = tuple(Leaf(path, (E, F, D), (E, D, F), True, stack=True) for path, (E, D, F) in sizes.items())
                tensor = Tensor(leaves, 1)
            elif part is None and own[0].startswith("experts_"):
                # Whole stacks, as they are in the leaves. Of two of them columns take turns.
                leaves = tuple(Leaf(path, size, size, False, stack=True) for path, size in sizes.items())
                tensor = Tensor(leaves, len(leaves[0].shape) - 1, leaves[0].shape[-1])
            else:
                first = 0 if part is None else 1
                leaves = tuple(_leaf(path, size[first:], part) for path, size in sizes.items())
                by_head = config.linear and kind == qwen35.NEXT and theirs in qwen35.BY_KEY_HEAD.values()
                tensor = Tensor(leaves, groups=config.linear.key_heads if by_head else 1)
            out[f"model.layers.{index}.{theirs}"] = tensor
    for name in [name for name in _OUTSIDE if name in shapes and name != "embed"]:
        out[_OUTSIDE[name]] = Tensor((_leaf((name,), shapes[name].shape),))
    return out


def _names(config: ModelConfig) -> tuple[str, Mapping[str, str]]:
    """Returns the kind of a family with experts or recurrent states, and the name in the files of each leaf of a layer."""
    kind = _expressing(config).kind if config.linear or config.experts else ""
    return kind, _POST_NORMED if config.post_norms else _IN_LAYER | (qwen35.BY_KEY_HEAD if kind == qwen35.NEXT else {})


def modules(config: ModelConfig) -> set[str]:
    """Returns the last names of the modules of the layers, such as q_proj, but for those of experts."""
    held = {name for layer in decoder.abstract(config)["layers"].values() for name in layer}
    weights = [theirs for name, theirs in _names(config)[1].items() if name in held]
    return {theirs.removesuffix(".weight").rpartition(".")[2] for theirs in weights}


def unread(config: ModelConfig) -> set[str]:
    """Returns the names of tensors that a file may hold and no layer reads: keys and values of layers that have those of others."""
    reading = [index for index, one in enumerate(config.kept) if one.of is not None]
    return {f"model.layers.{index}.{_IN_LAYER[name]}" for index in reading for name in ("k", "v", "k_norm")}


def by_hub_names(config: ModelConfig, present: Mapping[str, Entry]) -> Mapping[str, Entry | mxfp4.Packed]:
    """Returns the tensors of files under the names of `tensors`. Stacks of experts become one tensor for each matrix."""
    if config.experts is None:
        return present
    return expert_files.apart(_expressing(config).kind, config, present)


def _leaf(path: tuple[str, ...], ours: tuple[int, ...], part: int | None = None) -> Leaf:
    name = path[-1]
    if name == "shared_router":
        return Leaf(path, (1, *ours), ours, False)
    if len(ours) == 1 or name in ("embed", "layer_embed"):
        return Leaf(path, ours, ours, False)
    if name.endswith("_bias"):
        return Leaf(path, (ours[0] * ours[1],), ours, False)
    last = name in ("o", "linear_o")  # its last axis alone is that of outputs
    inputs = ours[0] * ours[1] if last else ours[0]
    outputs = ours[-1] if last or len(ours) == 2 else ours[1] * ours[2]
    between = (1,) if name.startswith("conv_") else ()  # a channel of a convolution reads itself alone
    return Leaf(path, (outputs, *between, inputs), ours, True, part)
