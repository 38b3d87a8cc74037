"""The text model of a checkpoint that has other parts beside it, such as a vision tower (models/families.py).

Layers that propose several tokens at once (mtp) are such a part, which a text model may have too.

Its config.json has the keys of the text model under text_config. Its files have the text model's tensors under longer names.
The other parts are known by name and left out. A policy is saved as its text model alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from jaxrl_post.models import config_keys as keys

TEXT_MODELS = {  # architecture of the whole -> architecture of its text model
    "Gemma3ForConditionalGeneration": "Gemma3ForCausalLM",
    "Gemma4ForConditionalGeneration": "Gemma4ForCausalLM",
    "Qwen3_5ForConditionalGeneration": "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForConditionalGeneration": "Qwen3_5MoeForCausalLM",
}
_ABSENT = {"Gemma3ForConditionalGeneration": {"num_attention_heads": 8, "vocab_size": 262208}}  # as in transformers
_LONGER = {"model.language_model.": "model.", "language_model.model.": "model.", "language_model.lm_head.": "lm_head."}
PROPOSING = "mtp."
_SEEING = ("vision_tower.", "multi_modal_projector.", "embed_vision.", "visual.")
_OTHERS = (*_SEEING, "audio_tower.", "embed_audio.", PROPOSING)
Entry = TypeVar("Entry")


def whole(given: Mapping) -> str:
    """Returns the architecture of a config.json that has more parts than a text model, or nothing."""
    named = given.get("architectures")
    return next((one for one in TEXT_MODELS if named == [one]), "")


def config(file: Path, given: Mapping) -> Mapping[str, Any]:
    """Returns the keys of the text model. A config.json of a text model alone stays as it is.

    Raises:
      ValueError: it has no text_config.
    """
    architecture = whole(given)
    if not architecture:
        return given
    own = keys.section(file, given, "text_config")
    if not own:
        raise ValueError(f"model {file}: {architecture} needs text_config, the keys of its text model")
    outer = {key: given[key] for key in ("tie_word_embeddings", "quantization_config") if key in given}
    return _ABSENT.get(architecture, {}) | outer | dict(own) | {"architectures": [TEXT_MODELS[architecture]]}


def entries(present: Mapping[str, Entry], whole: str) -> dict[str, Entry]:
    """Returns the tensors of the text model by their names in a text model alone, and all that is of no known part.

    Args:
      whole: the architecture with more parts, or nothing where the text model is alone.
    """
    if not whole:
        return {name: entry for name, entry in present.items() if not name.startswith(PROPOSING)}
    out = {}
    for name, entry in present.items():
        if not name.removeprefix("model.").startswith(_OTHERS):
            longer = next((one for one in _LONGER if name.startswith(one)), "")
            out[_LONGER.get(longer, "") + name.removeprefix(longer)] = entry
    return out
