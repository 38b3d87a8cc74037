"""Tokens of conversations as transformers gives them, in the peers' environment.

    python scripts/strangers/_transformers.py FOLDER

FOLDER has a tokenizer, and cases.json: by the name of a template the conversations. It gets wanted.json: by the name the token
ids of each, null where transformers refuses, and templates.json: the texts of the templates.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import importlib.util
import json
import sys
from pathlib import Path

import jinja2
import transformers
from _templates import TABLE
from transformers.utils import chat_template_utils

WHEN = (2026, 7, 31, 12, 0)


class Fixed(datetime.datetime):
    """A clock that stands still."""

    @classmethod
    def now(cls, tz=None):
        return cls(*WHEN)


def bare(value):
    """Returns a value without nulls of its objects: a message of transformers has no key for what is absent."""
    if isinstance(value, dict):
        return {name: bare(one) for name, one in value.items() if one is not None}
    return [bare(one) for one in value] if isinstance(value, list) else value


def joined(message: dict) -> dict:
    content = message.get("content")
    return message | {"content": "".join(part["text"] for part in content)} if isinstance(content, list) else message


def ids(words, template: str, case: dict, parts: bool) -> list[int] | None:
    talk = bare(case["messages"])
    talk = talk if parts else [joined(message) for message in talk]
    begun = talk[-1]["role"] == "assistant"
    told = {"tools": bare(case.get("tools")) or None, **bare(case.get("chat_template_kwargs") or {})}
    try:
        return words.apply_chat_template(
            talk,
            chat_template=template,
            add_generation_prompt=not begun,
            continue_final_message=begun,
            return_dict=False,
            **told,
        )
    except (jinja2.TemplateError, LookupError, TypeError, ValueError) as error:
        print(f"refused: {type(error).__name__}: {str(error)[:100]}", file=sys.stderr)
        return None


def main(folder: Path) -> None:
    chat_template_utils.datetime = Fixed
    shipped = Path(importlib.util.find_spec("trl").origin).parent / "chat_templates"
    words = transformers.AutoTokenizer.from_pretrained(folder)
    cases = json.loads((folder / "cases.json").read_text())
    texts = {name: about.get("text") or (shipped / about["file"]).read_text() for name, about in TABLE.items()}
    wanted = {name: [ids(words, texts[name], case, TABLE[name]["parts"]) for case in cases[name]] for name in TABLE}
    versions = {name: importlib.metadata.version(name) for name in ("transformers", "trl")}
    (folder / "templates.json").write_text(json.dumps(texts))
    (folder / "wanted.json").write_text(json.dumps({"versions": versions, "tokens": wanted}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
