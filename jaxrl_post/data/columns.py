"""The meaning of a data file's columns: the names of verl, TRL or slime, and a mapping that overrides them.

- A role (id, prompt, answer, source, extra) takes the first of its columns that a row has. A dot reads an
  object's key: "reward_model.ground_truth".
- Every column that fills no role goes to `extra` under its own name, so that a reward function can read it. On a clash,
  keys of the extra role's column win. A top-level answer column with another name than "answer" goes there too.
- Of an object of which `named` reads one key, the other keys go to `extra` under the object's name.
- `tools` and `chat_template_kwargs` are given to the chat template, too (messages.py).
- Refused: an unknown role, and a row without its prompt. A row without a ground truth says why in `lacks`: whether a run
  needs one is for its reward functions to say.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxrl_post.data import messages
from jaxrl_post.data.chat import text_of
from jaxrl_post.ring.json_text import shown
from jaxrl_post.ring.types import missing_value

PLACE = "{prompt}"  # every template contains it
_NONE = object()
_LISTED = 400  # characters of names in an error

# verl: docs/preparation/prepare_data.rst; the second names are this project's own. slime: --input-key, --label-key and
# --metadata-key at their defaults. TRL: `prompt` of its standard and conversational formats; other columns are free.
FORMATS: dict[str, dict[str, tuple[str, ...]]] = {
    "verl": {
        "id": ("id",),
        "prompt": ("prompt",),
        "answer": ("reward_model.ground_truth", "answer"),
        "source": ("data_source", "source"),
        "extra": ("extra_info", "extra"),
    },
    "trl": {"id": ("id",), "prompt": ("prompt",), "answer": (), "source": (), "extra": ()},
    "slime": {
        "id": ("id",),
        "prompt": ("prompt",),
        "answer": ("label",),
        "source": ("metadata.source_name",),
        "extra": ("metadata",),
    },
}
COMPLETION = "completion"  # the role that only supervised training reads (supervised.py)
ROLES = (*FORMATS["verl"], COMPLETION)


@dataclass(frozen=True, kw_only=True)
class Columns:
    """How a row is read.

    Args:
      format: a key of FORMATS.
      named: role -> column; overrides the format. An empty column means that rows have none.
      template: the text around a text prompt or a conversation's last user message. PLACE stands for the prompt.
        Empty: the prompt itself.
      source: the source of rows without one.
      chat: whether a text prompt becomes a user's message, to which the tokenizer's chat template applies.
      system: the text of a system message in front of a conversation without one.
    """

    format: str = "verl"
    named: Mapping[str, str] = field(default_factory=dict)
    template: str = ""
    source: str = ""
    chat: bool = False
    system: str = ""

    def __post_init__(self):
        _known("data.format", self.format, FORMATS)
        for role, column in self.named.items():
            _known("data.columns", role, ROLES)
            _need(isinstance(column, str), f"data.columns: {role} must name a column, got {column!r}")
        _need(self.named.get("prompt") != "", "data.columns: prompt must name a column, got ''")
        _need(
            not self.template or PLACE in self.template,
            f"data.template={self.template!r} must hold {PLACE}, which stands for the prompt",
        )

    def of(self, role: str) -> tuple[str, ...]:
        if role not in self.named:
            return (COMPLETION,) if role == COMPLETION else FORMATS[self.format][role]
        return (self.named[role],) if self.named[role] else ()

    def row(self, where: str, given: Any) -> dict:
        """Returns {id, prompt, answer, source, extra, where} of one object of a file, `arguments` of its chat template, and
        `value` where its answer is no text.

        The id is that of its column, else source/split/index where extra has an `index`, else a hash of the row before
        the template. `answer` of a value that is no text is its JSON. A missing, null or NaN answer is empty. The row then also
        has `lacks`, which says why.

        Args:
          where: the object's file and line, for error messages.
        """
        _need(isinstance(given, dict), f"data: {where}: must be an object, got a {type(given).__name__}")
        name, info = self.first(given, "extra")
        info = {} if info is _NONE or info is None else info
        _need(isinstance(info, dict), f"data: {where}, column {name!r}: must be an object, got {shown(info)}")
        _, source = self.first(given, "source")
        source = self.source if source in (_NONE, None) else source
        _need(
            isinstance(source, str),
            f"data: {where}, column {self._name('source')!r}: must be a text, got {shown(source)}",
        )
        prompt, (answer, lacks) = self._prompt(where, given), self._answer(given)
        row = {"prompt": prompt, "answer": answer, "source": source, "extra": self._others(given) | info}
        row = {"id": self._identity(given, info, row), **row, "where": where, "prompt": self._shaped(where, prompt)}
        told = messages.arguments(f"data: {where}", given)
        _need(
            not told or not isinstance(row["prompt"], str),
            f"data: {where}: the prompt is a text, and no chat template is given {_listed(told)} of the row; set data.chat=true, "
            "write the prompt as a list of messages, or leave the columns 'tools' and 'chat_template_kwargs' out",
        )
        _, value = self.first(given, "answer")
        row |= {} if lacks or isinstance(value, str) else {"value": value}
        return row | ({"arguments": told} if told else {}) | ({"lacks": lacks} if lacks else {})

    def first(self, given: Mapping, role: str) -> tuple[str, Any]:
        """Returns the first column of a role that the row has, and its value; an empty name where it has none."""
        return next(((name, value) for name in self.of(role) if (value := _at(given, name)) is not _NONE), ("", _NONE))

    def _name(self, role: str) -> str:
        return next(iter(self.of(role)), role)

    def _prompt(self, where: str, given: dict) -> str | list[dict]:
        name, prompt = self.first(given, "prompt")
        if prompt is _NONE and {"chosen", "rejected"} & given.keys():
            raise ValueError(f"data: {where}: is a row of preferences (chosen, rejected) and has no prompt of its own")
        _need(
            prompt is not _NONE,
            f"data: {where}: there is no column {self._name('prompt')!r}; its columns are {_listed(given)}",
        )
        place = f"data: {where}, column {name!r}"
        prompt = messages.read(place, prompt)
        if isinstance(prompt, str):
            _need(prompt != "", f"{place}: is empty")
            return prompt
        return messages.check(place, prompt)

    def _answer(self, given: dict) -> tuple[str, str]:
        name, answer = self.first(given, "answer")
        names = self.of("answer")
        if answer is _NONE and not names:
            return "", "no column is named as the answer (data.columns)"
        if answer is _NONE:
            others = f" (nor {', '.join(map(repr, names[1:]))})" if names[1:] else ""
            return "", (
                f"there is no column {names[0]!r}{others}; its columns are {_listed(given)}; data.columns names another"
            )
        if lacks := missing_value(answer):
            return "", f"column {name!r} {lacks}"
        return answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False), ""

    def _others(self, given: dict) -> dict:
        """Returns the columns that fill no role, and what is left of an object of which a role reads one key."""
        out = dict(given)
        for role in FORMATS["verl"]:
            name, _ = self.first(given, role)
            column, dot, key = ("", "", "") if not name else (name, "", "") if name in given else name.partition(".")
            if not column or (role == "answer" and not dot and name != "answer"):
                continue
            whole = out.pop(column, None)
            if dot and role in self.named and isinstance(whole, Mapping) and (rest := _without(whole, key)):
                out[column] = rest
        return out

    def _identity(self, given: dict, info: dict, row: dict) -> str:
        _, own = self.first(given, "id")
        if own is not _NONE and own is not None:
            return str(own)
        if info.get("index") is not None:
            parts = (row["source"], info.get("split"), info["index"])
            return "/".join(str(part) for part in parts if part not in (None, ""))
        content = json.dumps(row, sort_keys=True, ensure_ascii=True)
        return hashlib.blake2b(content.encode(), digest_size=8).hexdigest()

    def _shaped(self, where: str, prompt: str | list[dict]) -> str | list[dict]:
        """Returns the prompt in its template, as a message where `chat` is set, behind the system prompt."""
        if isinstance(prompt, str):
            text = self.template.replace(PLACE, prompt) if self.template else prompt
            _need(
                self.chat or not self.system,
                f"data: {where}: the prompt is a text, which data.system_prompt cannot begin; set data.chat=true, or write the "
                "prompt as a list of messages",
            )
            return messages.begun_by_system([{"role": "user", "content": text}], self.system) if self.chat else text
        last = prompt[-1]
        if self.template and last["role"] == "user":
            prompt = [*prompt[:-1], last | {"content": self.template.replace(PLACE, text_of(last.get("content")))}]
        return messages.begun_by_system(prompt, self.system)


def _at(given: Mapping, name: str) -> Any:
    if name in given:
        return given[name]
    for part in name.split("."):
        if not isinstance(given, Mapping) or part not in given:
            return _NONE
        given = given[part]
    return given


def _without(whole: Mapping, name: str) -> dict:
    """Returns an object without one key, which may lie inside of others."""
    key, _, below = name.partition(".")
    inner = whole.get(key)
    rest = _without(inner, below) if below and isinstance(inner, Mapping) else {}
    return {own: value for own, value in whole.items() if own != key} | ({key: rest} if rest else {})


def _listed(given: Mapping) -> str:
    """Returns the names of columns, for an error; not those of thousands."""
    text = ", ".join(given) or "none"
    return text if len(text) <= _LISTED else f"{text[:_LISTED]}..."


def _known(what: str, name: str, choices: Collection[str]) -> None:
    if name not in choices:
        near = difflib.get_close_matches(str(name), choices, n=1, cutoff=0.0)
        raise ValueError(f"{what}: {name!r} is not one of {', '.join(choices)}; nearest is {near[0]!r}")


def _need(condition: bool, sentence: str) -> None:
    if not condition:
        raise ValueError(sentence)
