"""What a small template writes, by plain string operations, and the uses of a template that show it."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from jaxrl_post.data import preferences, supervised
from jaxrl_post.data.chat import Chat
from jaxrl_post.data.columns import Columns
from jaxrl_post.data.turns import Wording
from strangers import Members

TEMPLATE = (
    "{% if tools %}[{% for tool in tools %}{{ tool.function.name }}:{{ tool | tojson }};{% endfor %}]{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}{% for call in m.tool_calls or [] %}@{{ call.function.name }}"
    "{{ call.function.arguments | tojson }}{% endfor %}|{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    "{{ '{' + mood + '}' if mood is defined else '' }}"
)
TEXTS = ("2+3?", "How many wrens?", "é 数字 🦉", " spaced ", "a|b", "line\nline", "<think>", "{{ x }}", '"q"', "0")


def tool(name: str, *properties: str) -> dict:
    """Returns the JSON schema of a function."""
    about = {"type": "object", "properties": {one: {"type": "string"} for one in properties}}
    return {"type": "function", "function": {"name": name, "parameters": about}}


def say(role: str, content: Any, **more: Any) -> dict:
    return {"role": role, "content": content, **more}


def written(messages: list[dict], tools: list | None = None, mood: str = "", head: bool = True) -> str:
    """Returns what TEMPLATE writes, without a template. A last message of the assistant is left open where `head`."""
    text = "".join(f"{one['function']['name']}:{json.dumps(one, ensure_ascii=False)};" for one in tools or ())
    text = f"[{text}]" if tools else ""
    for message in messages:
        calls = message.get("tool_calls") or ()
        said = (message.get("content") or "") + "".join(
            f"@{call['function']['name']}{json.dumps(call['function']['arguments'], ensure_ascii=False)}"
            for call in calls
        )
        text += f"<{message['role']}>{said}|"
    begun = head and messages[-1]["role"] == "assistant"
    return text[:-1] if begun else text + ("<assistant>" if head else "") + (f"{{{mood}}}" if mood else "")


class Tried:
    def __init__(self) -> None:
        self.count, self.wrong = 0, []

    def same(self, what: str, found: Callable[[], Any], wanted: Any) -> None:
        """Takes a member that must give a value."""
        self.count += 1
        try:
            got = found()
        except ValueError as error:
            got = error
        if got != wanted:
            self.wrong.append(f"{what}: wanted {str(wanted)[:150]!r}, found {str(got)[:150]!r}")

    def refused(self, what: str, found: Callable[[], Any], *words: str) -> None:
        """Takes a member that must be refused by one sentence with these words."""
        self.count += 1
        try:
            got: Any = found()
        except ValueError as error:
            if all(word in str(error) for word in words) and "\n" not in str(error):
                return
            got = error
        self.wrong.append(f"{what}: wanted a refusal with {words}, found {str(got)[:200]!r}")

    def members(self) -> Members:
        return Members(self.count, tuple(self.wrong))


class Bytes:
    """A tokenizer whose tokens are the bytes of a text, 1 to 256. Id 0 ends."""

    eos_ids, longest, vocab_size, bos_id = (0,), 1, 257, None

    def encode(self, text: str, special: bool = True) -> list[int]:
        return [byte + 1 for byte in text.encode()]

    def decode(self, ids: Iterable[int], skip_special: bool = True, before: Iterable[int] = ()) -> str:
        return bytes(one - 1 for one in ids if one).decode()


WORDS = Bytes()


def template(text: str = TEMPLATE, **more: Any) -> Any:
    return Chat(template=text, **more)


def prompts_of(rows: list[dict], chat: Any, /, **columns: Any) -> list[str]:
    """Returns the texts of rows as prompts of reinforcement learning."""
    from jaxrl_post.data import prompts

    read = [Columns(format="trl", **columns).row(f"row {at}", row) for at, row in enumerate(rows)]
    return [WORDS.decode(one.tokens) for one in prompts.tokenised(read, WORDS, chat=chat, limit=1 << 14)]


def taught(row: dict, chat: Any, /, **columns: Any) -> tuple[str, str]:
    """Returns prompt and answer of a supervised row."""
    one = supervised.row("row 1", row, Columns(format="trl", **columns))
    found, answers = supervised.tokenised([one], WORDS, chat=chat, limit=1 << 14, most=1 << 14, where="rows")
    return WORDS.decode(found[0].tokens), WORDS.decode(answers[found[0].id])


def paired(row: dict, chat: Any, /, **columns: Any) -> tuple[str, str, str]:
    """Returns prompt, chosen and rejected."""
    one = preferences.row("row 1", row, Columns(format="trl", **columns))
    found, pairs = preferences.tokenised([one], WORDS, chat=chat, limit=1 << 14, most=1 << 14, where="rows")
    chosen, rejected = pairs[found[0].id]
    return WORDS.decode(found[0].tokens), WORDS.decode(chosen), WORDS.decode(rejected)


def requested(body: dict, chat: Any) -> str:
    """Returns the text of a request."""
    from jaxrl_post.serve import prompts, request_bodies

    return WORDS.decode(prompts.Reading(WORDS, chat, 1 << 14, tools=True).tokens(request_bodies.chat(body)))


def followed(before: list[dict], after: list[dict], chat: Any, arguments: dict, begun: bool = False) -> str:
    """Returns what an environment's messages add behind a turn."""
    return WORDS.decode(Wording(chat, WORDS).observed(before, after, 0, begun=begun, arguments=arguments))


def read(name: str, data: bytes) -> list[dict]:
    """Returns the rows of a file with this content, without their places and ids."""
    from jaxrl_post.data import prompts

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / name).write_bytes(data)
        found = prompts.read(Path(folder) / name)
    return [{"prompt": row["prompt"], "answer": row["answer"]} for row in found]
