"""Bodies of the Tinker API, read and checked: what becomes datums, an optimizer step, or a request to sample.

Invariant: a field that is not served is refused, unless its value asks for nothing. So no result differs from what its
body says.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxrl_post.json_text import shown
from jaxrl_post.models.model_config import Lora
from jaxrl_post.serve import fields
from jaxrl_post.serve.refusal import Refusal, wrong
from jaxrl_post.serve.tinker.datums import Datum
from jaxrl_post.serve.tinker.losses import LOSSES
from jaxrl_post.serve.tinker.programs import Adam

ALPHA = 32.0  # of the additions' scale, as the API has it for every rank
MOST_SAMPLES, MOST_STOPS, MOST_DATUMS, LARGEST_RANK = 1024, 16, 4096, 1024
_WHOLE = (1 << 63) - 1
_DTYPES = {"int64": "iu", "float32": "iuf"}  # of a tensor -> kinds of numpy that its numbers may have
_GROUPS = {"train_attn": ("q", "k", "v", "o"), "train_mlp": ("gate", "up", "down")}


@dataclass(frozen=True, kw_only=True)
class Pass:
    """A pass over datums. `bounds`: loss_fn_config with its defaults."""

    datums: tuple[Datum, ...]
    loss: str
    bounds: Mapping[str, np.float32]


@dataclass(frozen=True, kw_only=True)
class Ask:
    """A request to sample. `law`: changes of the policy's sampling law. `max_tokens`: 0: what fits. `seed`: None: drawn."""

    prompt: np.ndarray
    n: int
    law: Mapping[str, Any]
    max_tokens: int
    seed: int | None
    prompt_logprobs: bool


@dataclass(frozen=True, kw_only=True)
class Limits:
    """`vocab`: ids that exist. `positions`: of a datum, and of a prompt and its rollout together."""

    vocab: int
    positions: int


def body(given: Any, readers: Mapping[str, fields.Reader], *needed: str) -> dict[str, Any]:
    """Returns the fields of a body, or of an object in it.

    Raises:
      Refusal: an unknown field, a wrong value, or one of `needed` is missing.
    """
    if not isinstance(given, dict):
        raise Refusal(400, f"the body must be a JSON object, got {shown(given)}")
    read = fields.read(given, readers)
    for name in needed:
        if name not in read:
            raise Refusal(400, f"{name} is missing", name)
    return read


def _inside(readers: Mapping[str, fields.Reader], *needed: str) -> fields.Reader:
    """Returns a reader of an object."""

    def reader(name: str, value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise wrong(name, value, "an object")
        return body(value, readers, *needed)

    return reader


# ---- tensors and datums


def tokens(name: str, value: Any) -> np.ndarray:
    """Reads a model_input: chunks of token ids, joined as int64[N]. `check_ids` says whether they are tokens."""
    chunks = body(value, {"chunks": fields.anything}, "chunks")["chunks"]
    if not isinstance(chunks, list):
        raise wrong(f"{name}.chunks", chunks, "a list")
    out: list[int] = []
    for chunk in chunks:
        kind = chunk.get("type", "encoded_text") if isinstance(chunk, dict) else chunk
        if kind != "encoded_text":
            raise Refusal(
                400, f"{name} has a chunk {shown(kind)}; only encoded_text is served: texts without images", name
            )
        out += fields.ids(
            f"{name}.tokens", body(chunk, {"type": fields.anything, "tokens": fields.anything}, "tokens")["tokens"]
        )
    if not out:
        raise Refusal(400, f"{name} is empty; at least one token is needed", name)
    if not -_WHOLE <= min(out) <= max(out) <= _WHOLE:
        raise Refusal(400, f"{name} has an id of more than 64 bits, which is no token", name)
    return np.array(out, np.int64)


_TENSOR = dict.fromkeys(("data", "dtype", "shape"), fields.anything) | dict.fromkeys(
    ("sparse_crow_indices", "sparse_col_indices"), fields.only(None, "only dense tensors are")
)


def _tensor(name: str, value: Any, length: int) -> np.ndarray:
    """Reads a tensor of one axis and `length` finite numbers."""
    given = body(value, _TENSOR, "data", "dtype")
    kinds = _DTYPES.get(given["dtype"]) if isinstance(given["dtype"], str) else None
    if kinds is None:
        raise wrong(f"{name}.dtype", given["dtype"], f"one of {', '.join(_DTYPES)}")
    if not isinstance(given["data"], list) or any(isinstance(one, (list, str, bool, dict)) for one in given["data"]):
        raise wrong(f"{name}.data", given["data"], "a list of numbers")
    found = np.array(given["data"], np.float64 if not given["data"] else None)
    if found.size and found.dtype.kind not in kinds:
        raise wrong(f"{name}.data", given["data"], f"a list of numbers of {given['dtype']}")
    if found.size != length or given.get("shape") not in (None, [length]):
        shape = given.get("shape") or [found.size]
        raise Refusal(400, f"{name} has the shape {shown(shape)}, and its model_input has {length} tokens", name)
    if not (abs(found.astype(np.float64)) <= np.finfo(np.float32).max).all():
        raise Refusal(400, f"{name} has a number that is not finite in float32", name)
    return found


def _datum(where: str, value: Any, loss: str, limits: Limits) -> Datum:
    given = body(value, {"model_input": tokens, "loss_fn_inputs": fields.anything}, "model_input", "loss_fn_inputs")
    inputs, tensors, about = given["model_input"], given["loss_fn_inputs"], LOSSES[loss]
    count, wanted = len(inputs), ("target_tokens", *about.needs, *about.optional)
    if count > limits.positions:
        most = f"at most {limits.positions} are trained on here (engine.max_length)"
        raise Refusal(400, f"{where} has {count} tokens; {most}", "model_input")
    if not isinstance(tensors, dict):
        raise wrong(f"{where}.loss_fn_inputs", tensors, "an object")
    for name in tensors:
        if name not in wanted:
            near = difflib.get_close_matches(name[:100], wanted, n=1, cutoff=0.0)[0]
            raise Refusal(
                400, f"{where}: the loss {loss} reads no {shown(name)}; the nearest is {near!r}", "loss_fn_inputs"
            )
    for name in ("target_tokens", *about.needs):
        if name not in tensors:
            raise Refusal(400, f"{where}: the loss {loss} needs {name} in loss_fn_inputs", "loss_fn_inputs")
    found = {name: _tensor(f"{where}.{name}", one, count) for name, one in tensors.items()}
    targets = found.pop("target_tokens")
    for name, ids in ((f"{where}.model_input", inputs), (f"{where}.target_tokens", targets)):
        check_ids(name, ids, limits.vocab)
    floats = {name: np.zeros(count, np.float32) for name in ("weights", "advantages", "logprobs")}
    floats |= {name: np.ones(count, np.float32) for name in about.optional}
    floats |= {name: one.astype(np.float32) for name, one in found.items()}
    return Datum(tokens=inputs.astype(np.int32), targets=targets.astype(np.int32), **floats)


def check_ids(name: str, ids: np.ndarray, vocab: int) -> None:
    """Refuses ids that are no tokens.

    Raises:
      Refusal: with the first of them.
    """
    beyond = ids[(ids < 0) | (ids >= vocab) | (ids != np.floor(ids))]
    if beyond.size:
        raise Refusal(400, f"{name} has {beyond[0]}, which is no token; ids are from 0 to {vocab - 1}", name)


def passed(name: str, value: Any, limits: Limits) -> Pass:
    """Reads a forward_backward_input."""
    readers = dict.fromkeys(("data", "loss_fn", "loss_fn_config"), fields.anything)
    given = body(value, readers, "data", "loss_fn")
    loss, data = given["loss_fn"], given["data"]
    if not isinstance(loss, str) or loss not in LOSSES:
        near = difflib.get_close_matches(str(loss)[:100], LOSSES, n=1, cutoff=0.0)[0]
        raise Refusal(400, f"loss_fn={shown(loss)} is none of {', '.join(LOSSES)}; the nearest is {near!r}", "loss_fn")
    if not isinstance(data, list) or not 1 <= len(data) <= MOST_DATUMS:
        raise Refusal(400, f"{name}.data must be a list of 1 to {MOST_DATUMS} datums", "data")
    datums = tuple(_datum(f"data[{place}]", one, loss, limits) for place, one in enumerate(data))
    return Pass(datums=datums, loss=loss, bounds=_bounds(loss, given.get("loss_fn_config", {})))


def _bounds(loss: str, given: Any) -> dict[str, np.float32]:
    """Reads loss_fn_config. A bound below 0, or a lower one above the upper one, is refused."""
    defaults = LOSSES[loss].bounds
    if not isinstance(given, dict):
        raise wrong("loss_fn_config", given, "an object")
    for name in given:
        if name not in defaults:
            valid = f"valid are {', '.join(defaults)}" if defaults else "it has none"
            raise Refusal(400, f"loss_fn_config of {loss} has no {shown(name)}; {valid}", "loss_fn_config")
    merged = {**defaults, **given}
    for name, value in merged.items():
        if value is None:
            raise Refusal(400, f"loss_fn_config of {loss} must give {name}, as it has no default", "loss_fn_config")
        merged[name] = fields.number(0.0, 1e30)(f"loss_fn_config.{name}", value)
    low, high = merged.get("clip_low_threshold", 0.0), merged.get("clip_high_threshold", 0.0)
    if low > high:
        raise wrong("loss_fn_config.clip_low_threshold", low, "at most clip_high_threshold", f"{high:g}")
    return {name: np.float32(value) for name, value in merged.items()}


# ---- an optimizer step, additions, and sampling


_ADAM: dict[str, fields.Reader] = {
    "learning_rate": fields.number(0.0, 1e6),
    "beta1": fields.number(0.0, 1.0),
    "beta2": fields.number(0.0, 1.0),
    "eps": fields.number(1e-30, 1.0),  # 0 in float32 would divide 0 by 0 where there was no gradient
    "weight_decay": fields.number(0.0, 1e6),
    "grad_clip_norm": fields.number(0.0, 1e30),
}


def adam(name: str, value: Any) -> Adam:
    """Reads adam_params."""
    given = body(value, _ADAM)
    for beta in ("beta1", "beta2"):
        if given.get(beta) == 1.0:
            raise wrong(f"{name}.{beta}", 1.0, "below 1", "0.999999")
    return Adam(
        rate=given.get("learning_rate", 1e-4),
        beta1=given.get("beta1", 0.9),
        beta2=given.get("beta2", 0.95),
        eps=given.get("eps", 1e-12),
        decay=given.get("weight_decay", 0.0),
        clip=given.get("grad_clip_norm", 0.0),
    )


_LORA: dict[str, fields.Reader] = {
    "rank": fields.whole(0, LARGEST_RANK),
    "seed": fields.whole(0, _WHOLE),
    **dict.fromkeys(("train_unembed", *_GROUPS), fields.truth),
}


def lora(name: str, value: Any) -> tuple[Lora | None, int]:
    """Reads a lora_config: the additions, or None for rank 0, which trains all weights; and the seed of their first values.

    The unembedding has no additions, whatever train_unembed says; the session's first response says so.
    """
    given = body(value, _LORA, "rank")
    names = tuple(one for group, members in _GROUPS.items() if given.get(group, True) for one in members)
    if given["rank"] and not names:
        raise Refusal(400, "train_attn and train_mlp are both false: additions to the unembedding are not served", name)
    return (Lora(given["rank"], ALPHA, names) if given["rank"] else None), given.get("seed", 0)


def _stop(name: str, value: Any) -> dict[str, tuple]:
    """Reads stop: a text, texts, or token ids."""
    if isinstance(value, list) and value and all(isinstance(one, int) for one in value):
        return {"stop_ids": fields.ids(name, value)}
    return {"stop_strings": fields.texts(MOST_STOPS)(name, value)} if value else {}


_LAW: dict[str, fields.Reader] = {
    "max_tokens": fields.whole(1, 1 << 24),
    "seed": fields.whole(-_WHOLE, _WHOLE),
    "temperature": fields.number(0.0, 1e6),
    "top_p": fields.number(0.0, 1.0, above=True),
    "top_k": fields.whole(-1, _WHOLE),
    "stop": _stop,
}
_NO_OTHERS = "log-probs of other tokens than the sampled ones are not kept"
SAMPLE: dict[str, fields.Reader] = {
    "prompt": tokens,
    "num_samples": fields.whole(1, MOST_SAMPLES),
    "sampling_params": _inside(_LAW),
    "prompt_logprobs": fields.truth,
    **dict.fromkeys(
        ("topk_prompt_logprobs", "topk_sample_logprobs", "prompt_alt_tokens_k"), fields.only(0, _NO_OTHERS)
    ),
    **dict.fromkeys(("base_model", "model_path"), fields.only(None, "sampling_session_id says which weights")),
    "sampling_session_id": fields.text,
    "seq_id": fields.whole(0, _WHOLE),
    "type": fields.anything,
}


def ask(given: Mapping[str, Any], limits: Limits) -> Ask:
    """Returns the request to sample that the fields of SAMPLE make."""
    prompt, params = given["prompt"], given.get("sampling_params", {})
    check_ids("prompt", prompt, limits.vocab)
    room, most = limits.positions - len(prompt), params.get("max_tokens", 0)
    if room < max(most, 1):
        raise Refusal(
            400,
            f"max_tokens={max(most, 1)} behind a prompt of {len(prompt)} tokens is beyond the {limits.positions} positions "
            f"served (engine.max_length); the largest valid value is {max(room, 0)}",
            "sampling_params",
        )
    law = {"temperature": params.get("temperature", 1.0), "top_p": params.get("top_p", 1.0)}
    law |= {"top_k": max(params.get("top_k", 0), 0), **params.get("stop", {})}
    return Ask(
        prompt=prompt.astype(np.int32),
        n=given.get("num_samples", 1),
        law=law,
        max_tokens=most,
        seed=params.get("seed"),
        prompt_logprobs=given.get("prompt_logprobs", False),
    )
