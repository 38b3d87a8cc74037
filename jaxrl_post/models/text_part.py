"""The text model of a checkpoint that has other parts beside it, such as a vision tower (models/families.py).

Layers that propose several tokens at once (mtp) are such a part, which a text model may have too.

Its config.json has the keys of the text model under text_config. Its files have the text model's tensors under longer names.
The other parts are known by name. They are not trained, and are written beside a trained text model as they were.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any, TypeVar

from jaxrl_post.models import config_keys as keys
from jaxrl_post.models.tensor_file import Entry as Stored

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
_DTYPES, _QUANTISED = ("dtype", "torch_dtype"), "quantization_config"
Entry = TypeVar("Entry")


@dataclasses.dataclass(frozen=True)
class OtherParts:
    """What a checkpoint has beside its text model. `config`: its config.json. `files`: of what reads pictures and sounds.

    `tensors`: by name. `prefixes`: of the text model's tensors, by those of a text model alone.
    """

    config: Mapping[str, Any]
    tensors: Mapping[str, Stored]
    files: tuple[Path, ...]
    prefixes: Mapping[str, str]

    def whole_name(self, name: str) -> str:
        """Returns the name in the whole checkpoint of a tensor of the text model."""
        own = next((one for one in self.prefixes if name.startswith(one)), "")
        return self.prefixes.get(own, "") + name.removeprefix(own)

    def whole_config(self, dtype: str) -> dict[str, Any]:
        """Returns config.json for a text model that is saved in `dtype`, unquantised."""

        def saved(value: Any) -> Any:
            if not isinstance(value, Mapping):
                return value
            kept = {key: one for key, one in value.items() if key != _QUANTISED}
            return {key: dtype if key in _DTYPES else one for key, one in kept.items()}

        return {key: saved(value) if key == "text_config" else value for key, value in saved(self.config).items()}


def others(directory: Path, given: Mapping, present: Mapping[str, Stored], unread: Container[str]) -> OtherParts | None:
    """Returns what a directory has beside its text model, or None.

    Args:
      given: its config.json. present: its tensors.
      unread: names of tensors of the text model that no layer reads.
    """
    architecture = whole(given)
    names = {name: _own_name(name, architecture) for name in present}
    tensors = {name: present[name] for name, own in names.items() if not own or own in unread}
    if not tensors:
        return None
    longer = [one for one in _LONGER if any(own and name.startswith(one) for name, own in names.items())]
    return OtherParts(
        config=given,
        tensors=tensors,
        files=tuple(sorted(directory.glob("*processor_config.json"))),
        prefixes={_LONGER[one]: one for one in longer} if architecture else {},
    )


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
    return {own: entry for name, entry in present.items() if (own := _own_name(name, whole))}


def _own_name(name: str, whole: str) -> str:
    """Returns the name of a tensor in a text model alone, or nothing where it is of another part."""
    if not whole:
        return "" if name.startswith(PROPOSING) else name
    if name.removeprefix("model.").startswith(_OTHERS):
        return ""
    longer = next((one for one in _LONGER if name.startswith(one)), "")
    return _LONGER.get(longer, "") + name.removeprefix(longer)
