"""Chat templates: messages to text, as Hugging Face tokenizers do it, without their library.

A template comes from a downloaded file, so it runs in jinja2's immutable sandbox. The settings are those of
transformers: trim_blocks, lstrip_blocks, loop controls, `tojson` without HTML escapes, `raise_exception`,
`strftime_now`, and {% generation %} blocks, which are rendered like any text. A template that asks for the date gives
another text tomorrow; hand `now` over to fix it.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import jinja2
import jinja2.ext
import jinja2.sandbox

_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class _Generation(jinja2.ext.Extension):
    """{% generation %}...{% endgeneration %} marks what an assistant said; here the mark is dropped."""

    tags: ClassVar[set[str]] = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


@dataclass(frozen=True, kw_only=True)
class Chat:
    """A template and the special tokens it may name. `now`: what `strftime_now` says; None: the clock."""

    template: str
    tokens: Mapping[str, str] = field(default_factory=dict)
    now: datetime.datetime | None = None

    def render(self, messages: Sequence[Mapping], generation: bool = True) -> str:
        """The text of `messages`, with the head of the assistant's turn when `generation`.

        Raises:
          ValueError: the template has a mistake or refuses these messages.
        """
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: (self.now or datetime.datetime.now()).strftime(form)
        try:
            return environment.from_string(self.template).render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=generation,
                tools=None,
                documents=None,
                **self.tokens,
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise ValueError(f"the chat template refuses the messages: {error}") from error


def load(folder: str | Path) -> Chat | None:
    """The template of a folder: chat_template.jinja, else `chat_template` in tokenizer_config.json (the one named
    "default" where there are several); None when it has none."""
    folder = Path(folder)
    file, settings = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    config = json.loads(settings.read_text(encoding="utf-8")) if settings.is_file() else {}
    template = file.read_text(encoding="utf-8") if file.is_file() else config.get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        if "default" not in named:
            raise ValueError(f"{settings}: chat_template has {sorted(named)} but no 'default'")
        template = named["default"]
    if template is None:
        return None
    tokens = {name: config[name] for name in _SPECIAL if config.get(name)}
    return Chat(
        template=template,
        tokens={name: token["content"] if isinstance(token, dict) else token for name, token in tokens.items()},
    )


def _raise(message: str):
    raise jinja2.TemplateError(message)


def _tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
