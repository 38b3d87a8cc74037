"""Bodies of the Tinker API, read and checked: what becomes datums, an optimizer step, or a request to sample.

Invariant: a field that is not served is refused, unless its value asks for nothing. So no result differs from what its
body says.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
import pydantic
from pydantic import BeforeValidator, FailFast, Field, ValidationInfo

from jaxrl_post.models.model_config import Lora
from jaxrl_post.ring.json_text import shown
from jaxrl_post.serve import schema
from jaxrl_post.serve.request_bodies import SamplingRequest
from jaxrl_post.serve.schema import Refusal, wrong
from jaxrl_post.serve.tinker.losses import LOSSES
from jaxrl_post.serve.tinker.programs import Datum

ALPHA = 32.0  # of the additions' scale, as the API has it for every rank
MOST_DATUMS, MOST_CHUNKS, LARGEST_RANK = 4096, 4096, 1024
_DTYPES = {"int64": "iu", "float32": "iuf"}  # of a tensor -> kinds of numpy that its numbers may have
_GROUPS = {"train_attn": ("q", "k", "v", "o"), "train_mlp": ("gate", "up", "down")}


@dataclass(frozen=True, kw_only=True)
class Pass:
    """A pass over datums. `bounds`: loss_fn_config with its defaults."""

    datums: tuple[Datum, ...]
    loss: str
    bounds: Mapping[str, np.float32]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """`vocab`: ids that exist. `positions`: of a datum, and of a prompt and its rollout together. `stops`: most stop ids."""

    vocab: int
    positions: int
    stops: int


# ---- tensors and datums


def _texts_alone(value: Any, info: ValidationInfo) -> Any:
    """Refuses chunks that are no text, such as images."""
    for chunk in value if isinstance(value, list) else ():
        kind = chunk.get("type") or "encoded_text" if isinstance(chunk, dict) else chunk
        if kind != "encoded_text":
            raise Refusal(
                f"model_input has a chunk {shown(kind)}; only encoded_text is served: texts without images", "chunks"
            )
    return value


class _Chunk(schema.Body):
    type: Any = None
    tokens: schema.Ids


class ModelInput(schema.Body):
    """A text as token ids."""

    chunks: Annotated[list[_Chunk], FailFast(), Field(max_length=MOST_CHUNKS), BeforeValidator(_texts_alone)]

    def tokens(self, name: str, vocab: int) -> np.ndarray:
        """Returns the ids of all chunks, joined, int64[N]. Refused: none, or one that is no token."""
        ids = np.array([token for chunk in self.chunks for token in chunk.tokens], np.int64)
        if not ids.size:
            raise Refusal(f"{name} is empty; at least one token is needed", name)
        check_ids(name, ids, vocab)
        return ids


_DENSE = schema.only(None, "only dense tensors are")


class _Tensor(schema.Body):
    data: list[Any]
    dtype: Literal[tuple(_DTYPES)]
    shape: list[Any] | None = None
    sparse_crow_indices: _DENSE = None
    sparse_col_indices: _DENSE = None

    def numbers(self, name: str, length: int) -> np.ndarray:
        """Returns the `length` finite numbers of one axis."""
        if any(isinstance(one, (list, str, bool, dict)) for one in self.data):
            raise wrong(f"{name}.data", self.data, "a list of numbers")
        found = np.array(self.data, np.float64 if not self.data else None)
        if found.size and found.dtype.kind not in _DTYPES[self.dtype]:
            raise wrong(f"{name}.data", self.data, f"a list of numbers of {self.dtype}")
        if found.size != length or self.shape not in (None, [length]):
            shape = self.shape or [found.size]
            raise Refusal(f"{name} has the shape {shown(shape)}, and its model_input has {length} tokens", name)
        if not (abs(found.astype(np.float64)) <= np.finfo(np.float32).max).all():
            raise Refusal(f"{name} has a number that is not finite in float32", name)
        return found


class _Datum(schema.Body):
    model_input: ModelInput
    loss_fn_inputs: dict[str, Any]

    def read(self, where: str, loss: str, limits: Limits) -> Datum:
        """Returns what the loss reads."""
        inputs = self.model_input.tokens(f"{where}.model_input", limits.vocab)
        tensors, about = self.loss_fn_inputs, LOSSES[loss]
        count, wanted = len(inputs), ("target_tokens", *about.needs, *about.optional)
        if count > limits.positions:
            most = f"at most {limits.positions} are trained on here (engine.max_length)"
            raise Refusal(f"{where} has {count} tokens; {most}", "model_input")
        for name in tensors:
            if name not in wanted:
                near = difflib.get_close_matches(name[:100], wanted, n=1, cutoff=0.0)[0]
                raise Refusal(
                    f"{where}: the loss {loss} reads no {shown(name)}; the nearest is {near!r}", "loss_fn_inputs"
                )
        for name in ("target_tokens", *about.needs):
            if tensors.get(name) is None:
                raise Refusal(f"{where}: the loss {loss} needs {name} in loss_fn_inputs", "loss_fn_inputs")
        read = {name: schema.read(_Tensor, one, f"{where}.{name}") for name, one in tensors.items() if one is not None}
        found = {name: one.numbers(f"{where}.{name}", count) for name, one in read.items()}
        targets = found.pop("target_tokens")
        check_ids(f"{where}.target_tokens", targets, limits.vocab)
        floats = {name: np.zeros(count, np.float32) for name in ("weights", "advantages", "logprobs")}
        floats |= {name: np.ones(count, np.float32) for name in about.optional}
        floats |= {name: one.astype(np.float32) for name, one in found.items()}
        return Datum(tokens=inputs.astype(np.int32), targets=targets.astype(np.int32), **floats)


def check_ids(name: str, ids: np.ndarray, vocab: int) -> None:
    """Refuses ids that are no tokens, with the first of them."""
    beyond = ids[(ids < 0) | (ids >= vocab) | (ids != np.floor(ids))]
    if beyond.size:
        raise Refusal(f"{name} has {beyond[0]}, which is no token; ids are from 0 to {vocab - 1}", name)


class PassInput(schema.Body):
    """A forward_input or a forward_backward_input."""

    data: Annotated[list[_Datum], FailFast(), Field(min_length=1, max_length=MOST_DATUMS)]
    loss_fn: str
    loss_fn_config: dict[str, Any] = Field(default_factory=dict)

    def read(self, limits: Limits) -> Pass:
        """Returns the pass. Refused: an unknown loss, or a datum or a bound that is not for it."""
        if self.loss_fn not in LOSSES:
            near = difflib.get_close_matches(self.loss_fn[:100], LOSSES, n=1, cutoff=0.0)[0]
            says = f"loss_fn={shown(self.loss_fn)} is none of {', '.join(LOSSES)}; the nearest is {near!r}"
            raise Refusal(says, "loss_fn")
        bounds = _bounds(self.loss_fn, self.loss_fn_config)
        datums = tuple(one.read(f"data[{place}]", self.loss_fn, limits) for place, one in enumerate(self.data))
        return Pass(datums=datums, loss=self.loss_fn, bounds=bounds)


_CONFIGS = {
    loss: pydantic.create_model(
        loss,
        __base__=schema.Body,
        **{name: (schema.number(0.0, 1e30), ... if value is None else value) for name, value in about.bounds.items()},
    )
    for loss, about in LOSSES.items()
}


def _bounds(loss: str, given: Mapping[str, Any]) -> dict[str, np.float32]:
    """Reads loss_fn_config. A lower bound above the upper one is refused."""
    merged = schema.read(_CONFIGS[loss], given, "loss_fn_config").model_dump()
    low, high = merged.get("clip_low_threshold", 0.0), merged.get("clip_high_threshold", 0.0)
    if low > high:
        raise wrong("loss_fn_config.clip_low_threshold", low, "at most clip_high_threshold", f"{high:g}")
    return {name: np.float32(value) for name, value in merged.items()}


# ---- an optimizer step, additions, and sampling


_Beta = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]


class AdamParams(schema.Body):
    """The numbers of an optimizer step."""

    learning_rate: schema.number(0.0, 1e6) = 1e-4
    beta1: _Beta = 0.9
    beta2: _Beta = 0.95
    eps: schema.number(1e-30, 1.0) = 1e-12  # 0 in float32 would divide 0 by 0 where there was no gradient
    weight_decay: schema.number(0.0, 1e6) = 0.0
    grad_clip_norm: schema.number(0.0, 1e30) = 0.0


class LoraConfig(schema.Body):
    """Which additions are trained."""

    rank: schema.whole(0, LARGEST_RANK)
    seed: schema.Number = 0
    train_unembed: bool = True
    train_attn: bool = True
    train_mlp: bool = True

    def read(self) -> tuple[Lora | None, int]:
        """Returns the additions, or None for rank 0, which trains all weights; and the seed of their first values.

        The unembedding has no additions, whatever train_unembed says; the session's first response says so.
        """
        names = tuple(one for group, members in _GROUPS.items() if getattr(self, group) for one in members)
        if self.rank and not names:
            says = "train_attn and train_mlp are both false: additions to the unembedding are not served"
            raise Refusal(says, "lora_config")
        return (Lora(self.rank, ALPHA, names) if self.rank else None), self.seed


def _stop(name: str, value: Any) -> Any:
    """Takes token ids as they are; they are checked with the vocabulary. Nothing stands for no stop."""
    if isinstance(value, list) and value and all(type(one) is int for one in value):
        return value
    return schema.texts(name, value) if value else ()


class _SamplingParams(schema.Law):
    stop: schema.by(_stop) = ()


_NO_OTHERS = schema.only(0, "log-probs of other tokens than the sampled ones are not kept")
_NO_WEIGHTS = schema.only(None, "sampling_session_id says which weights")


class SampleBody(schema.Body):
    """The body of asample."""

    prompt: ModelInput
    num_samples: schema.whole(1, schema.MOST_SAMPLES) = 1
    sampling_params: _SamplingParams = _SamplingParams()
    prompt_logprobs: bool = False
    topk_prompt_logprobs: _NO_OTHERS = 0
    topk_sample_logprobs: _NO_OTHERS = 0
    prompt_alt_tokens_k: _NO_OTHERS = 0
    base_model: _NO_WEIGHTS = None
    model_path: _NO_WEIGHTS = None
    sampling_session_id: schema.Name
    seq_id: schema.Number | None = None
    type: Any = None

    def read(self, limits: Limits) -> SamplingRequest:
        """Returns the request to sample. Refused: an id that is no token, or no room for the rollout."""
        prompt, params = self.prompt.tokens("prompt", limits.vocab), self.sampling_params
        room, most = limits.positions - len(prompt), params.max_tokens or 0
        if room < max(most, 1):
            raise Refusal(
                f"max_tokens={max(most, 1)} behind a prompt of {len(prompt)} tokens is beyond the {limits.positions} "
                f"positions served (engine.max_length); the largest valid value is {max(room, 0)}",
                "sampling_params",
            )
        sampling_changes = {"temperature": 1.0, "top_p": 1.0, "top_k": 0} | params.changes()
        if isinstance(params.stop, list):
            schema.check_stops("stop", params.stop, limits.vocab, limits.stops)
        if params.stop:
            sampling_changes["stop_ids" if isinstance(params.stop, list) else "stop_strings"] = tuple(params.stop)
        return SamplingRequest(
            prompts=(prompt.astype(np.int32),),
            n=self.num_samples,
            sampling_changes=sampling_changes,
            max_tokens=most,
            seed=params.seed,
            prompt_logprobs=self.prompt_logprobs,
        )


# ---- every body, by the name of its path


_ANY = (Any, None)  # read by nobody
_NAME, _OPTIONAL_NAME = (schema.Name, ...), (schema.Name | None, None)
_NUMBER = (schema.Number | None, None)
_OF_SESSION = {"type": _ANY, "session_id": _NAME}
_OF_RUN = {"type": _ANY, "model_id": _NAME}
_NUMBERED = _OF_RUN | {"seq_id": _NUMBER}
_SAVED = _NUMBERED | {
    "path": _OPTIONAL_NAME,
    "sampling_session_seq_id": _NUMBER,
    "ttl_seconds": (schema.only(None, "saved weights stay until their files are removed"), None),
    "overwrite": (bool, False),
}
_FIELDS: dict[str, dict[str, Any]] = {
    "create_session": dict.fromkeys(("type", "tags", "user_metadata", "sdk_version", "project_id"), _ANY),
    "session_heartbeat": _OF_SESSION,
    "create_sampling_session": _OF_SESSION
    | {"base_model": _OPTIONAL_NAME, "model_path": _OPTIONAL_NAME, "sampling_session_seq_id": _NUMBER},
    "create_model": _OF_SESSION
    | {
        "base_model": _NAME,
        "model_seq_id": _NUMBER,
        "lora_config": (LoraConfig, LoraConfig(rank=0)),
        "user_metadata": _ANY,
    },
    "get_info": _OF_RUN,
    "unload_model": _OF_RUN,
    "forward": _NUMBERED | {"forward_input": (PassInput, ...)},
    "forward_backward": _NUMBERED | {"forward_backward_input": (PassInput, ...)},
    "optim_step": _NUMBERED | {"adam_params": (AdamParams, ...)},
    "save_weights": _SAVED | {"path": _NAME},
    "save_weights_for_sampler": _SAVED,
    "load_weights": _NUMBERED | {"path": _NAME, "optimizer": (bool, False)},
    "weights_info": {"tinker_path": _NAME},
    "retrieve_future": {"request_id": _NAME, "allow_metadata_only": _ANY},
}
BODIES: dict[str, type[schema.Body]] = {
    name: pydantic.create_model(name, __base__=schema.Body, **fields) for name, fields in _FIELDS.items()
} | {"asample": SampleBody}


def read(name: str, value: Any, limits: Limits) -> tuple[Any, ...]:
    """Returns the body of a path, and what is made of it where it holds datums or a prompt."""
    given = schema.read(BODIES[name], value)
    if name in ("forward", "forward_backward"):
        return given, getattr(given, f"{name}_input").read(limits)
    return (given, given.read(limits)) if name == "asample" else (given,)
