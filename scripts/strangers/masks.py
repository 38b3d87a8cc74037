"""Conversations in supervised training: masks and cuts for the templates that TRL ships are those of transformers and of TRL.

The other side is scripts/assistant_masks.py in the peers' environment. Completions begin where TRL begins them, also where a template
writes the head of a turn in another way when one follows.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mask_arms
import peers

from jaxrl_post.data import supervised, tokenizer
from jaxrl_post.data.chat import Chat
from jaxrl_post.data.columns import Columns
from strangers import Members
from strangers.conversations import PEER, ROOT

sys.path.append(str(ROOT / "tests"))
# Templates with marks of what is generated.
MARKED = ("qwen2_5", "qwen3", "qwen3_instruct_2507", "llama3", "phi3", "deepseekv3", "gptoss")
HEADS = (
    "deepseek_r1_distill",
    "glm4moe",
    "nemotron_3_nano",
    "qwen3_5_think",
    "qwen3_5_nothink",
    "qwen3",
    "llama3",
    "phi3",
)


def _wanted(place: Path, names: Sequence[str]) -> dict:
    """What transformers and TRL give for these files of TRL's."""
    python, out = peers.environment(ROOT, "trl", PEER), place / "out.json"
    subprocess.run([python, ROOT / "scripts" / "assistant_masks.py", place, out, *names], cwd=ROOT, check=True)
    return json.loads(out.read_text())


def _tried(which: str, names: Sequence[str]) -> Members:
    tried, wrong = 0, []
    with tempfile.TemporaryDirectory(prefix="jaxrl_masks_") as folder:
        wanted = _wanted(Path(folder), names)
        words = tokenizer.load(mask_arms.train(Path(folder)))
        for name, template in wanted["templates"].items():
            chat = Chat(template=template, tokens=mask_arms.TOKENS)
            found = {"masks": _masked, "cuts": _cut}[which](words, chat, wanted[which][name])
            wrong += [f"{name}, conversation {at}" for at, same in enumerate(found) if not same]
            tried += len(found)
            chat.close()
    return Members(tried, tuple(wrong))


def _masked(words: Any, chat: Any, wanted: list) -> list[bool]:
    """Whether tokens and mask of each conversation are those wanted."""
    return [
        supervised.masked(talk, words, chat, 9999) == (tokens, [bool(one) for one in mask])
        for talk, (tokens, mask) in zip(mask_arms.CONVERSATIONS, wanted, strict=True)
    ]


def _cut(words: Any, chat: Any, wanted: list) -> list[bool]:
    """Whether each answer begins where TRL begins it, with its tokens behind."""
    found = []
    for number, (talk, (ids, cut)) in enumerate(zip(mask_arms.answers(), wanted, strict=True)):
        row = supervised.row(f"row {number}", {"messages": talk}, Columns())
        (prompt,), taught = supervised.tokenised([row], words, chat=chat, limit=9999, most=9999, where="rows", left={})
        tokens = taught[prompt.id]
        ended = ids[cut:][: len(tokens)] == tokens or [*ids[cut:], words.eos_ids[0]] == tokens
        found.append(prompt.tokens.tolist() == ids[:cut] and ended)
    return found


KINDS = {
    "masks": functools.partial(_tried, "masks", [f"{name}_training.jinja" for name in MARKED]),
    "cuts": functools.partial(_tried, "cuts", [f"{name}.jinja" for name in HEADS]),
}
