"""Conversations in the chat templates of families: tokens of rows in JSONL, Parquet and Python, and of requests, are transformers'.

The other side is scripts/strangers/_transformers.py in the peers' environment. Where transformers refuses a conversation, all
forms of it must be refused here.
"""

from __future__ import annotations

import functools
import json
import random
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peers
import pyarrow
import pyarrow.parquet
import tokenizers

from jaxrl_post.data import chat, files, tokenizer
from jaxrl_post.data.columns import Columns
from jaxrl_post.serve.schema import Refusal
from strangers import Members
from strangers._templates import TABLE

ROOT = Path(__file__).resolve().parents[2]
PEER = ("torch==2.13.0", "trl==1.16.0 transformers")
EACH, LEAST = 200, 150  # conversations of a template, and how many of them transformers must render
WHEN = "2026-07-31T12:00"
WORDS = (
    "owl",
    "wren",
    "2 + 3",
    "é",
    "数字",
    "🦉",
    "x < y & z",
    '"so"',
    "  spaced  ",
    "line\nline",
    "<think>",
    "</think>",
    "a\tb",
    "%",
)
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "tells the weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "where", "enum": ["Ulm", "Köln"]},
                "count": {"type": "integer", "description": "days", "enum": None},
            },
            "required": ["city"],
        },
    },
}
CALL = {
    "type": "function",
    "id": "abcdefgh1",
    "function": {"name": "weather", "arguments": {"city": "Ulm", "count": 2, "note": "é"}},
}
FULL = {
    "role": "user",
    "content": "x",
    "name": "n",
    "reasoning_content": "r",
    "tool_calls": [CALL],
    "tool_call_id": "abcdefgh1",
}


def _text(noise: random.Random) -> str:
    return " ".join(noise.choice(WORDS) for _ in range(noise.randint(1, 6)))


def _message(noise: random.Random, role: str, **more: Any) -> dict:
    """Returns a message whose keys stand in the order of FULL; some of the absent ones are null."""
    given = {"role": role, "content": _text(noise), **more}
    absent = {name: None for name in FULL if name not in given and noise.random() < 0.2}
    return {name: (given | absent)[name] for name in FULL if name in given or name in absent}


def _case(noise: random.Random, about: dict) -> dict:
    tools = about["tools"] and noise.random() < 0.6
    talk = [_message(noise, "system")] if about["system"] and noise.random() < 0.5 else []
    for turn in range(noise.randint(1, 3)):
        talk += [_message(noise, "assistant")] if turn else []
        talk.append(_message(noise, "user"))
        if tools and noise.random() < 0.6:
            told = {name: value for name, value in CALL["function"]["arguments"].items() if noise.random() < 0.7}
            told = told if noise.random() < 0.7 else told | {"note": None}
            call = CALL | {
                "function": {
                    "name": "weather",
                    "arguments": {name: told[name] for name in ("city", "count", "note") if name in told},
                }
            }
            talk.append(_message(noise, "assistant", content=None, tool_calls=[call]))
            talk.append(_message(noise, "tool", name="weather", tool_call_id="abcdefgh1"))
            talk += [_message(noise, "assistant"), _message(noise, "user")]
    if noise.random() < 0.25:
        talk.append(_message(noise, "assistant"))  # begun
    if "thinking" in about and noise.random() < 0.3 and len(talk) > 2:
        talk = [
            one | {"reasoning_content": _text(noise)} if one["role"] == "assistant" and one["content"] else one
            for one in talk
        ]
        talk = [{name: one[name] for name in FULL if name in one} for one in talk]
    if noise.random() < 0.2:
        talk = [_in_parts(noise, message) for message in talk]
    out: dict[str, Any] = {"messages": talk}
    out |= {"tools": [TOOL]} if tools else {"tools": None} if noise.random() < 0.2 else {}
    return out | ({"chat_template_kwargs": {"enable_thinking": about["thinking"]}} if "thinking" in about else {})


def _in_parts(noise: random.Random, message: dict) -> dict:
    if message["content"] is None:
        return message
    text, cut = message["content"], noise.randint(0, len(message["content"]))
    return message | {"content": [{"type": "text", "text": piece} for piece in (text[:cut], text[cut:]) if piece]}


@functools.cache
def _tried() -> dict[str, Members]:
    """Returns what was tried and what was wrong, by the name of a template."""
    python = peers.environment(ROOT, "trl", PEER)
    with tempfile.TemporaryDirectory(prefix="jaxrl_conversations_") as name:
        place = Path(name)
        cases = {one: [_case(random.Random(f"{one}{at}"), about) for at in range(EACH)] for one, about in TABLE.items()}
        _tokenizer(place, [message for case in cases["chatml"] for message in case["messages"]])
        (place / "cases.json").write_text(json.dumps(cases))
        subprocess.run(
            [python, ROOT / "scripts/strangers/_transformers.py", place], cwd=ROOT, check=True, capture_output=True
        )
        wanted = json.loads((place / "wanted.json").read_text())["tokens"]
        templates = json.loads((place / "templates.json").read_text())
        return {one: _compared(place, one, templates[one], cases[one], wanted[one]) for one in TABLE}


def _compared(place: Path, name: str, template: str, cases: list[dict], wanted: list) -> Members:
    (place / "chat_template.jinja").write_text(template)
    words, made = tokenizer.load(place), chat.load(place, now=WHEN)
    forms = {form: rows(place, cases) for form, rows in _FORMS.items()}
    wrong = []
    for at, want in enumerate(wanted):
        got = {form: _shown(rows[at], words, made) for form, rows in forms.items() if rows[at] is not None}
        got["request"] = _asked(cases[at], words, made)
        for form, found in got.items():
            if found != want:
                wrong.append(f"{name} {at}, {form}: {_first(words, want, found)}")
    made.close()
    rendered = sum(one is not None for one in wanted)
    if rendered < LEAST:
        wrong.append(f"{name}: transformers rendered {rendered} of {len(wanted)} alone")
    return Members(len(cases), tuple(wrong))


def _first(words: Any, want: Any, found: Any) -> str:
    if want is None or found is None:
        return f"wanted {'a refusal' if want is None else 'tokens'}, found {'a refusal' if found is None else 'tokens'}"
    one, two = (words.decode(ids, False) for ids in (want, found))
    at = next((at for at, (a, b) in enumerate(zip(one, two)) if a != b), min(len(one), len(two)))
    return f"wanted {one[max(at - 20, 0) : at + 40]!r}, found {two[max(at - 20, 0) : at + 40]!r}"


def _shown(row: dict, words: Any, made: Any) -> list[int] | None:
    """Returns the tokens of a row's prompt in reinforcement learning; None where it is refused."""
    from jaxrl_post.data import prompts

    try:
        read = Columns(format="trl").row("row", row)
        return prompts.tokenised([read], words, chat=made, limit=1 << 16)[0].tokens.tolist()
    except ValueError:
        return None


def _asked(case: dict, words: Any, made: Any) -> list[int] | None:
    """Returns the tokens of a request of /v1/chat/completions, whose arguments of calls are a text of JSON."""
    from jaxrl_post.serve import prompts, request_bodies

    talk = []
    for message in case["messages"]:
        calls = [
            call
            | {
                "function": {
                    "name": call["function"]["name"],
                    "arguments": json.dumps(_bare(call["function"]["arguments"])),
                }
            }
            for call in message.get("tool_calls") or ()
        ]
        talk.append(message | ({"tool_calls": calls} if calls else {}))
    body = {
        "messages": talk,
        "tools": _bare(case.get("tools")),
        "chat_template_kwargs": case.get("chat_template_kwargs"),
    }
    try:
        return prompts.Reading(words, made, 1 << 16, tools=True).tokens(request_bodies.chat(body))
    except Refusal:
        return None


def _bare(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _bare(one) for name, one in value.items() if one is not None}
    return [_bare(one) for one in value] if isinstance(value, list) else value


def _rows(cases: list[dict]) -> list[dict]:
    return [
        {"prompt": case["messages"], **{name: value for name, value in case.items() if name != "messages"}}
        for case in cases
    ]


def _jsonl(place: Path, cases: list[dict]) -> list[dict]:
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in _rows(cases)))
    return [row for _, row in files.objects(place / "rows.jsonl")]


def _parquet(place: Path, cases: list[dict]) -> list[dict | None]:
    """Returns the rows by way of two files, as a column holds either texts or lists.

    The first row of a file has every key, so that the keys stand in the order of the conversations."""
    out: list[dict | None] = [None] * len(cases)
    rows = _rows(cases)
    for parts in (False, True):
        mine = [
            at for at, row in enumerate(rows) if any(isinstance(one["content"], list) for one in row["prompt"]) == parts
        ]
        first = FULL | ({"content": [{"type": "text", "text": "x"}]} if parts else {})
        full = {"prompt": [first], "tools": [TOOL], "chat_template_kwargs": {"enable_thinking": True}}
        table = pyarrow.Table.from_pylist([full, *(rows[at] for at in mine)])
        pyarrow.parquet.write_table(table, place / "rows.parquet")
        for at, (_, row) in zip(mine, list(files.objects(place / "rows.parquet"))[1:], strict=True):
            out[at] = row
    return out


_FORMS: dict[str, Callable] = {"JSONL": _jsonl, "Parquet": _parquet, "Python": lambda place, cases: _rows(cases)}


def _tokenizer(place: Path, messages: list[dict]) -> None:
    """Writes a byte-level tokenizer of 500 tokens."""
    special = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    special += ["[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "<start_of_turn>", "<end_of_turn>"]
    special += ["<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>"]
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=500, special_tokens=special, show_progress=False, initial_alphabet=alphabet
    )
    model.train_from_iterator([json.dumps(message, ensure_ascii=False) for message in messages], trainer)
    model.save(str(place / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (place / "tokenizer_config.json").write_text(json.dumps(config | {"clean_up_tokenization_spaces": False}))


KINDS = {name: functools.partial(lambda one: _tried()[one], name) for name in TABLE}
