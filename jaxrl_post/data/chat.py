"""Chat templates: messages to text, as Hugging Face tokenizers do it, without their library.

A template comes from a downloaded file. It runs in a process with limits (data/rendering.py), which renders conversation
after conversation. A template that takes too long, too much memory or too much room is refused, and the process is
replaced. A template that asks for the date gives another text tomorrow; hand `now` over to fix it.

Every caller renders by `Chat.render` or `Chat.marked`: prompts, supervised rows, preferences, environments, judges and servers.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

import numpy as np

from jaxrl_post.data import rendering
from jaxrl_post.ring import json_text
from jaxrl_post.ring.json_text import said, shown

START_S = 60.0  # until a process is ready; importing is slow on a busy machine
WALL_S = 9.0  # for one conversation; its bound of CPU time is reached long before, unless the machine is busy
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_MARK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_KEPT = ("PATH", "LD_LIBRARY_PATH", "TZ")  # of the environment: a template must not see keys and names of machines


class _Process:
    """The process of one template. It starts with the first conversation and ends with this object."""

    def __init__(self, given: Mapping[str, Any]):
        self._given, self._end = given, None
        self._socket: socket.socket | None = None
        self._child: subprocess.Popen | None = None
        self._words: IO[bytes] | None = None

    def ask(self, question: Mapping[str, Any]) -> str:
        try:
            body = json.dumps(question, default=_plain).encode()
        except (TypeError, RecursionError) as error:
            raise ValueError(f"the messages, tools or template arguments are no JSON: {said(error)}") from error
        if len(body) > rendering.LONGEST:
            raise ValueError(f"the messages have {len(body)} bytes as JSON; at most {rendering.LONGEST} are rendered")
        if self._socket is None:
            self._start()
        try:
            kind, text = self._answer(body, WALL_S)
        except (OSError, EOFError, UnicodeDecodeError, ValueError) as error:
            raise ValueError(f"the chat template refuses the messages: {self._reason(error)}") from error
        if kind != rendering.TEXT:
            raise ValueError(f"the chat template refuses the messages: {text}")
        return text

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        words = tempfile.TemporaryFile()
        root = str(Path(__file__).resolve().parents[2])
        code = f"import sys; sys.path[:] = {[*sys.path, root]!r}; from jaxrl_post.data.rendering import main; main()"
        with theirs:
            child = subprocess.Popen(
                [sys.executable, "-I", "-c", code],
                stdin=theirs,
                stdout=subprocess.DEVNULL,
                stderr=words,
                env={name: os.environ[name] for name in _KEPT if name in os.environ},
                start_new_session=True,
            )
        self._socket, self._child, self._words = ours, child, words
        self._end = weakref.finalize(self, _ended, ours, child, words)
        try:
            self._answer(json.dumps(self._given).encode(), START_S)
        except (OSError, EOFError, ValueError) as error:
            raise ValueError(f"the process of the chat template does not start: {self._reason(error)}") from error

    def _answer(self, body: bytes, seconds: float) -> tuple[bytes, str]:
        end = time.monotonic() + seconds
        self._socket.settimeout(seconds)
        self._socket.sendall(rendering.LENGTH.pack(len(body)) + body)
        kind, size = rendering.REPLY.unpack(self._exactly(rendering.REPLY.size, end))
        if kind not in (rendering.TEXT, rendering.ERROR) or size > 4 * rendering.LONGEST:
            raise ValueError("its process sent no answer")
        return kind, self._exactly(size, end).decode("utf-8")

    def _exactly(self, size: int, end: float) -> bytes:
        data = bytearray()
        while len(data) < size:
            self._socket.settimeout(max(end - time.monotonic(), 1e-3))
            part = self._socket.recv(min(size - len(data), 1 << 20))
            if not part:
                raise EOFError
            data += part
        return bytes(data)

    def _reason(self, error: Exception) -> str:
        """Ends the process and returns why it gave no text."""
        late, words = isinstance(error, TimeoutError), self._words
        if not isinstance(error, (EOFError, ConnectionError)):
            self._child.kill()  # else it has ended by itself, and its exit code says why
        code = self._child.wait()
        words.seek(0)
        last = words.read().decode("utf-8", errors="replace").strip().splitlines()[-1:]
        self.close()
        if late:
            return f"it takes more than {WALL_S:g} s"
        if code == -signal.SIGPROF:
            return f"it takes more than {rendering.SECONDS:g} s of CPU time"
        return f"its process ended with exit code {code}: {said(' '.join(last))}"

    def close(self) -> None:
        """Ends the process, if there is one."""
        if self._end is not None:
            self._end()
        self._socket = self._child = self._words = self._end = None


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{shown(value)} is a {type(value).__name__}")


def _asked(messages: Sequence[Mapping], arguments: Mapping, **how: bool) -> dict[str, Any]:
    check_contents(messages)
    bare = [{name: value for name, value in message.items() if value is not None} for message in messages]
    return {"messages": bare, "arguments": dict(arguments), **how}


def check_contents(messages: Sequence[Mapping], where: str = "") -> None:
    """Refuses contents that are neither a text nor a list of text parts. `where`: begins the error."""
    for place, message in enumerate(messages):
        content = message.get("content")
        if content is not None and not isinstance(content, (str, list)):
            raise ValueError(
                f"{where}messages[{place}].content must be a text or a list of text parts, got {shown(content)}"
            )
        for number, part in enumerate(content if isinstance(content, list) else ()):
            kind = part.get("type") if isinstance(part, Mapping) else None
            if kind != "text" or not isinstance(part.get("text"), str):
                raise ValueError(
                    f'{where}messages[{place}].content[{number}]={shown(part)} is no text part, which is {{"type": "text", "text": '
                    "...}; a model of texts reads no others"
                )


def text_of(content: Any) -> str:
    """Returns the content of a message as one text; empty where it has none."""
    return "".join(part["text"] for part in content) if isinstance(content, list) else content or ""


def _ended(ours: socket.socket, child: subprocess.Popen, words: IO[bytes]) -> None:
    child.kill()
    child.wait()
    ours.close()
    words.close()


@dataclass(frozen=True, kw_only=True)
class Chat:
    """A template and the special tokens it may name.

    `tool_template`: stands for it where tools are given; empty: there is none. `now`: what `strftime_now` says; None: the
    clock. `arguments`: what the template may read beside messages, by name; `tools` are JSON schemas of functions. `file`:
    where it stands, for errors.
    """

    template: str
    tool_template: str = ""
    tokens: Mapping[str, str] = field(default_factory=dict)
    now: datetime.datetime | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    file: str = field(default="", compare=False)
    _process: _Process = field(init=False, repr=False, compare=False)

    def __post_init__(self):
        now = None if self.now is None else self.now.isoformat()
        given = dict(template=self.template, tool_template=self.tool_template, now=now)
        given |= dict(tokens=dict(self.tokens), arguments=dict(self.arguments))
        object.__setattr__(self, "_process", _Process(given))

    @property
    def dated(self) -> bool:
        return "strftime_now" in self.template + self.tool_template

    def render(
        self,
        messages: Sequence[Mapping],
        generation: bool = True,
        arguments: Mapping[str, Any] = MappingProxyType({}),
        continues: bool = True,
    ) -> str:
        """Returns the text of `messages`, with the head of the assistant's turn when `generation`.

        Args:
          arguments: for this conversation; those of the template count where they do not name a value.
          continues: whether a last message of the assistant is the beginning of its turn. Else another turn begins behind it.

        Raises:
          ValueError: a content that is no text, or the template has a mistake, refuses these messages, or needs more than the
            limits allow.
        """
        begun = generation and continues and bool(messages) and messages[-1].get("role") == "assistant"
        return self._process.ask(_asked(messages, arguments, generation=generation, continues=begun, marks=False))

    def marked(
        self, messages: Sequence[Mapping], arguments: Mapping[str, Any] = MappingProxyType({})
    ) -> tuple[str, list[tuple[int, int]]]:
        """Returns the text of a whole conversation, and start and end of each of its generation blocks, in characters."""
        if not _MARK.search(self.template):
            raise ValueError(
                "the chat template has no {% generation %} marks, which say what an assistant wrote; put one with marks "
                "beside the tokenizer as chat_template.jinja (TRL ships some, named *_training.jinja)"
            )
        asked = _asked(messages, arguments, generation=False, continues=False, marks=True)
        text, places = json.loads(self._process.ask(asked))
        return text, [(start, end) for start, end in places]

    def close(self) -> None:
        """Ends the process that renders. A further conversation starts another one."""
        self._process.close()


def load(folder: str | Path, *, now: str = "", arguments: Mapping[str, Any] = MappingProxyType({})) -> Chat | None:
    """Returns the template of a folder: chat_template.jinja, else `chat_template` in tokenizer_config.json (the one named
    "default" where there are several); None when it has none. One named "tool_use" stands for it where tools are given.

    Args:
      now: the date and time that the template is told, in ISO form; empty: the clock's.
      arguments: of Chat.
    """
    folder = Path(folder)
    file, settings = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    config = json_text.read_object(settings, str(settings)) if settings.is_file() else {}
    template, tool_template = config.get("chat_template"), ""
    if file.is_file():
        with_tools = folder / "additional_chat_templates" / "tool_use.jinja"
        template = json_text.text_of(file, str(file))
        tool_template = json_text.text_of(with_tools, str(with_tools)) if with_tools.is_file() else ""
    elif isinstance(template, list):
        template, tool_template = _named(settings, template)
    if template is None:
        return None
    for one in (template, tool_template):
        if not isinstance(one, str):
            raise ValueError(f"{settings}: chat_template must be a text, got {shown(one)}")
    tokens = {name: _token(settings, name, config[name]) for name in _SPECIAL if config.get(name)}
    when = datetime.datetime.fromisoformat(now) if now else None
    where = str(file if file.is_file() else settings)
    return Chat(
        template=template, tool_template=tool_template, tokens=tokens, now=when, arguments=arguments, file=where
    )


def _named(settings: Path, templates: list) -> tuple[Any, Any]:
    """Returns the template with the name "default", and that with the name "tool_use" or an empty text."""
    for entry in templates:
        if not (isinstance(entry, dict) and isinstance(entry.get("name"), str) and "template" in entry):
            raise ValueError(f"{settings}: chat_template must list objects with name and template, got {shown(entry)}")
    named = {entry["name"]: entry["template"] for entry in templates}
    if "default" not in named:
        raise ValueError(f"{settings}: chat_template has {shown(sorted(named))} but no 'default'")
    return named["default"], named.get("tool_use", "")


def _token(settings: Path, name: str, token: Any) -> str:
    content = token.get("content") if isinstance(token, dict) else token
    if not isinstance(content, str):
        raise ValueError(f"{settings}: {name} must be a text, or an object with the text 'content', got {shown(token)}")
    return content
