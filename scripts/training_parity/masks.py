"""Assistant masks: tokens and masks of conversations are those of transformers, for templates that TRL ships.

The other side is scripts/assistant_masks.py in an environment below .cache/peers/ (made once), and distance is the share of
conversations that differ.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path

from training_parity import plant

TEMPLATES = ("qwen2_5", "qwen3", "llama3", "phi3", "deepseekv3", "gptoss")
PEER = ("transformers==5.24.0 jinja2", "--no-deps trl==1.16.0")


def show(record) -> None:
    import mask_arms
    import peers

    from jaxrl_post.data import tokenizer

    python = peers.environment(record.root, "trl", PEER)
    with tempfile.TemporaryDirectory(prefix="jaxrl_masks_") as name:
        place = Path(name)
        names = [f"{one}_training.jinja" for one in TEMPLATES]
        subprocess.run(
            [python, "scripts/assistant_masks.py", place, place / "out.json", *names], cwd=record.root, check=True
        )
        wanted = json.loads((place / "out.json").read_text())
        words = tokenizer.load(mask_arms.train(place))
    record.figure("masks.versions", " ".join(f"{what} {version}" for what, version in wanted["versions"].items()))
    record.figure("masks.templates", len(wanted["templates"]), at_least=5)
    record.figure("masks.differ", _differ(words, wanted), at_most=0.0)
    plant(record, "masks", FAULTS, lambda: _differ(words, wanted))


def _differ(words, wanted: dict) -> float:
    """Returns the share of conversations whose tokens or mask are not those wanted."""
    import mask_arms

    from jaxrl_post.data import conversations
    from jaxrl_post.data.chat import Chat

    found = []
    for name, template in wanted["templates"].items():
        chat = Chat(template=template, tokens=mask_arms.TOKENS)
        for talk, (tokens, mask) in zip(mask_arms.CONVERSATIONS, wanted["masks"][name], strict=True):
            found.append(conversations.masked(talk, words, chat, 9999) == (tokens, [bool(one) for one in mask]))
        chat.close()
    return 1 - sum(found) / len(found)


def _blocks(patch, change) -> None:
    from jaxrl_post.data.chat import Chat

    true = Chat.marked

    def marked(chat, messages, *arguments):
        text, blocks = true(chat, messages, *arguments)
        return text, [change(begin, end) for begin, end in blocks]

    patch.setattr(Chat, "marked", marked)


def _ends_are_left_out(patch) -> None:
    _blocks(patch, lambda begin, end: (begin, end - 1))


def _the_head_is_trained(patch) -> None:
    _blocks(patch, lambda begin, end: (begin - 1, end))


def _the_last_turn_alone(patch) -> None:
    from jaxrl_post.data.chat import Chat

    true = Chat.marked
    patch.setattr(Chat, "marked", lambda chat, *given: (lambda text, blocks: (text, blocks[-1:]))(*true(chat, *given)))


FAULTS = {
    "ends_are_left_out": _ends_are_left_out,
    "the_head_is_trained": _the_head_is_trained,
    "the_last_turn_alone": _the_last_turn_alone,
}
