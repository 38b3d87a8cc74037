"""Assistant masks and cuts: tokens and masks of conversations are those of transformers, for templates that TRL ships.

Completions begin where TRL begins them, also where a template writes the head of a turn in another way when one follows. The
other side is scripts/assistant_masks.py in an environment below .cache/peers/ (made once), and distance is the share of
conversations that differ.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path

from training_parity import plant

TEMPLATES = ("qwen2_5", "qwen3", "llama3", "phi3", "deepseekv3", "gptoss")
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
PEER = ("transformers==5.24.0 jinja2", "--no-deps trl==1.16.0")


def show(record) -> None:
    import mask_arms
    import peers

    from jaxrl_post.data import tokenizer

    python = peers.environment(record.root, "trl", PEER)
    with tempfile.TemporaryDirectory(prefix="jaxrl_masks_") as name:
        place = Path(name)
        names = [f"{one}_training.jinja" for one in TEMPLATES]
        command = [python, "scripts/assistant_masks.py", place]
        subprocess.run([*command, place / "out.json", *names], cwd=record.root, check=True)
        heads = [f"{one}.jinja" for one in HEADS]
        subprocess.run([*command, place / "heads.json", *heads], cwd=record.root, check=True)
        wanted, cuts = (json.loads((place / file).read_text()) for file in ("out.json", "heads.json"))
        words = tokenizer.load(mask_arms.train(place))
    record.figure("masks.versions", " ".join(f"{what} {version}" for what, version in wanted["versions"].items()))
    record.figure("masks.templates", len(wanted["templates"]), at_least=5)
    record.figure("masks.differ", _differ(words, wanted), at_most=0.0)
    found = _cut(words, cuts)
    record.figure("masks.heads_left_out", len({name for name, _, left in found if left}), at_least=2)
    record.figure("masks.cuts_differ", sum(not same for _, same, _ in found), equals=0)
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


def _cut(words, wanted: dict) -> list[tuple[str, bool, bool]]:
    """Returns, of each completion, its template, whether it begins where TRL begins it, and whether a head is left out."""
    import mask_arms

    from jaxrl_post.data import supervised
    from jaxrl_post.data.chat import Chat
    from jaxrl_post.data.columns import Columns

    found = []
    for name, template in wanted["templates"].items():
        chat, left = Chat(template=template, tokens=mask_arms.TOKENS), {}
        for number, (talk, (ids, cut)) in enumerate(zip(mask_arms.answers(), wanted["cuts"][name], strict=True)):
            row = supervised.row(f"row {number}", {"messages": talk}, Columns())
            fits = {"limit": 9999, "most": 9999, "where": "rows", "left": left}
            (prompt,), taught = supervised.tokenised([row], words, chat=chat, **fits)
            tokens = taught[prompt.id]
            ended = ids[cut:][: len(tokens)] == tokens or [*ids[cut:], words.eos_ids[0]] == tokens
            found.append((name, prompt.tokens.tolist() == ids[:cut] and ended, prompt.id in left))
        chat.close()
    return found


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
