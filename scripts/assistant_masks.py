"""Tokens and assistant masks of conversations as transformers computes them, in an environment of its own.

    python scripts/assistant_masks.py FOLDER OUT [TRL_TEMPLATE ...]

FOLDER holds the tokenizer. Without names the templates are those of tests/mask_arms.py, and OUT is what
tests/goldens/assistant_masks.json holds (written by transformers 5.24.0). Else they are those files of trl's chat_templates. Cuts of
completions behind prompts are of mask_arms.HEADS, or of those files.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import sys
from pathlib import Path

import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
import mask_arms


def main(folder: str, out: str, *names: str) -> None:
    templates = {name: trl(name) for name in names} or mask_arms.TEMPLATES
    words = transformers.AutoTokenizer.from_pretrained(mask_arms.train(Path(folder)))
    versions = {name: importlib.metadata.version(name) for name in ("transformers", *(["trl"] if names else []))}
    found = {
        name: [masked(words, template, talk) for talk in mask_arms.CONVERSATIONS]
        for name, template in templates.items()
    }
    text = {"templates": templates} if names else {}
    text["cuts"] = {name: cuts(words, one) for name, one in (text.get("templates") or mask_arms.HEADS).items()}
    Path(out).write_text(json.dumps({"versions": versions, "masks": found, **text}) + "\n")


def masked(words, template: str, talk) -> list[list[int]]:
    """Returns token ids and the mask."""
    made = words.apply_chat_template(
        list(talk), chat_template=template, return_dict=True, return_assistant_tokens_mask=True
    )
    return [made["input_ids"], made["assistant_masks"]]


def cuts(words, template: str) -> list[list]:
    """Returns, for each answer of the conversations, all token ids and how many are of the prompt, by TRL's rule."""
    found = []
    for *prompt, answer in mask_arms.answers():
        told = dict(chat_template=template, return_dict=False)
        head = words.apply_chat_template(prompt, add_generation_prompt=True, **told)
        whole = words.apply_chat_template([*prompt, answer], **told)
        same = [one == other for one, other in zip(head, whole)]  # trl/data_utils.py, common_prefix_length
        found.append([whole, same.index(False) if False in same else len(same)])
    return found


def trl(name: str) -> str:
    """Returns a template that trl ships. Does not import trl."""
    place = Path(importlib.util.find_spec("trl").origin).parent
    return (place / "chat_templates" / name).read_text()


if __name__ == "__main__":
    main(*sys.argv[1:])
