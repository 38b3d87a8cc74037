"""The child side of chat templates: renders one conversation after another with jinja2, in a process with limits.

A template comes from a downloaded file. It runs in jinja2's immutable sandbox, in a process without environment that may
not write files, and whose address space, CPU time per conversation and output are bounded. The settings of jinja2 are
those of transformers: trim_blocks, lstrip_blocks, loop controls, `tojson` without HTML escapes, `raise_exception`,
`strftime_now`, and {% generation %} blocks, which are rendered like any text and whose places are known.

Messages reach a template as transformers gives them (utils/chat_template_utils.py): reasoning under each of its names, and a
last message that is continued ends the text. A list of text parts stays one where the template reads parts of that role. Else
the template gets their joined text.

Protocol, over the socket that is descriptor 0: a message is 4 bytes of length, then JSON. The first message is {template,
tool_template, tokens, now, arguments}, each further one {messages, arguments, generation, continues, marks}. Every message is
answered with a kind, 4 bytes of length and UTF-8. With `marks` this is JSON of the text and of the places of its generation
blocks.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import resource
import signal
import struct
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jinja2
import jinja2.ext
import jinja2.sandbox

TEXT, ERROR = b"T", b"E"
REPLY = struct.Struct("!cI")
LENGTH = struct.Struct("!I")
BYTES = 3 << 28  # address space of the process
SECONDS = 4.0  # of CPU time for one conversation
LONGEST = 1 << 24  # characters of a rendered conversation, and bytes of a conversation in JSON
_WRITTEN = 1 << 16  # bytes of a file; only the last words of a crash are written
_SAID = 300  # characters of an error
# What a template can make jinja2 and Python raise. Anything else ends the process, and its last words are the error.
_MISTAKES = (
    *(jinja2.TemplateError, ArithmeticError, AssertionError, AttributeError, LookupError, NameError),
    *(OSError, RuntimeError, SyntaxError, TypeError, ValueError),
)
_REASONING = (
    "reasoning_content",
    "thinking",
    "reasoning",
)  # names of a message's reasoning; templates read the first two
_END = "CONTINUE_FINAL_MESSAGE_TAG "
_PART = "\ue000part\ue001"  # repr escapes it, JSON does not
_WRITTEN_OUT = re.compile(r"[\"']text[\"']\s*:\s*[\"']$")


class _Generation(jinja2.ext.Extension):
    """{% generation %}...{% endgeneration %} marks what an assistant said.

    `written`: characters of the pieces before. `blocks`: start and text of each block so far. As AssistantTracker of
    transformers.
    """

    tags: ClassVar[set[str]] = {"generation"}

    def __init__(self, environment):
        super().__init__(environment)
        self.begin()

    def begin(self) -> None:
        self.written, self.blocks = 0, []

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_said"), [], [], body).set_lineno(line)

    def _said(self, caller) -> str:
        text = caller()
        self.blocks.append((self.written, text))
        return text


def main() -> None:
    """Serves the socket until its other end is closed."""
    _limit()
    given = _received()
    _reply(TEXT, "")
    renderer = Renderer(given)
    while (asked := _received()) is not None:
        signal.setitimer(signal.ITIMER_PROF, SECONDS)  # its signal ends the process, also inside of a C function
        try:
            kind, text = TEXT, renderer.answer(asked)
            text.encode()
        except MemoryError:
            kind, text = ERROR, f"it needs more than {BYTES >> 20} MiB of memory"
        except _MISTAKES as error:
            name = "" if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: "
            kind, text = ERROR, " ".join(f"{name}{error}".split())[:_SAID]
        signal.setitimer(signal.ITIMER_PROF, 0)
        _reply(kind, text)


class Renderer:
    """The templates of a tokenizer, each compiled when it is first used. `given`: the first message of the protocol."""

    def __init__(self, given: Mapping[str, Any]):
        self._given = given
        self._compiled: dict[str, jinja2.Template] = {}
        self._parts: dict[tuple[str, str], bool] = {}

    def answer(self, asked: Mapping[str, Any]) -> str:
        names = {**self._given["tokens"], **self._given["arguments"], **asked["arguments"]}
        names["tools"] = names.get("tools") or None
        source = (names["tools"] and self._given["tool_template"]) or self._given["template"]
        if source not in self._compiled:
            self._compiled[source] = compiled(source, self._given["now"])
        template = self._compiled[source]
        messages = [self._shaped(source, message) for message in asked["messages"]]
        if asked["continues"]:
            return continued(template, messages, names)
        text = rendered(template, messages, asked["generation"], names)
        return json.dumps([text, marks(template, text)]) if asked["marks"] else text

    def _shaped(self, source: str, message: dict) -> dict:
        """Returns a message with its reasoning under each name, and with parts or their text."""
        reasoning = next((message[name] for name in _REASONING if message.get(name) is not None), None)
        if reasoning is not None:
            message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
        if isinstance(message.get("content"), list) and not self._takes_parts(source, message["role"]):
            message = message | {"content": "".join(part["text"] for part in message["content"])}
        return message

    def _takes_parts(self, source: str, role: str) -> bool:
        if (source, role) not in self._parts:
            probe: list[dict] = [{"role": role, "content": [{"type": "text", "text": _PART}]}]
            if role in ("assistant", "tool"):
                call = {"type": "function", "id": "call00000", "function": {"name": "f", "arguments": {}}}
                calls = [{"role": "assistant", "content": "", "tool_calls": [call]}] if role == "tool" else []
                probe = [{"role": "user", "content": "x"}, *calls, *probe]
            elif role != "user":
                probe.append({"role": "user", "content": "x"})
            try:
                text = rendered(self._compiled[source], probe, False, self._given["tokens"] | {"tools": None})
            except _MISTAKES:
                text = ""
            before, mark, _ = text.partition(_PART)
            self._parts[source, role] = bool(mark) and not _WRITTEN_OUT.search(before)
        return self._parts[source, role]


def compiled(template: str, now: str | None) -> jinja2.Template:
    """Returns the template in the environment of transformers. `now`: the time that it is told, or None for the clock."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    when: Callable[[], Any] = datetime.datetime.now
    if now is not None:
        fixed = datetime.datetime.fromisoformat(now)
        when = lambda: fixed  # noqa: E731
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: when().strftime(form)
    return environment.from_string(template)


def rendered(template: jinja2.Template, messages: list[dict], generation: bool, names: Mapping[str, Any]) -> str:
    """Returns the text of a conversation. `names`: what else the template may read."""
    pieces, said = [], template.environment.extensions[_Generation.identifier]
    said.begin()
    given = {"documents": None, **names, "messages": messages, "add_generation_prompt": generation}
    for piece in template.generate(given):
        pieces.append(piece)
        said.written += len(piece)
        if said.written > LONGEST:
            raise ValueError(f"it writes more than {LONGEST} characters")
    return "".join(pieces)


def continued(template: jinja2.Template, messages: list[dict], names: Mapping[str, Any]) -> str:
    """Returns the text up to the end of the last message, as transformers' continue_final_message does."""
    content = messages[-1].get("content")
    if content is None or content == []:
        raise ValueError("the last message is of the assistant and has no content that could be continued")
    if isinstance(content, list):
        end = content[-1]["text"]
        marked: Any = [*content[:-1], content[-1] | {"text": end + _END}]
    else:
        end, marked = content, content + _END
    text = rendered(template, [*messages[:-1], messages[-1] | {"content": marked}], False, names)
    if end.strip() not in text or _END.strip() not in text:
        raise ValueError("the last message is of the assistant, and the template leaves out or changes a part of it")
    place = text.rindex(_END.strip())
    whole = text[place : place + len(_END)] == _END  # else the template has stripped the message
    return text[:place] if whole else text[:place].rstrip()


def marks(template: jinja2.Template, text: str) -> list[tuple[int, int]]:
    """Returns start and end of each generation block in the text that was rendered last."""
    out = []
    for start, said in template.environment.extensions[_Generation.identifier].blocks:
        if text[start : start + len(said)] != said:
            raise ValueError("a generation block lies inside of a macro or a set block, so that its place is unknown")
        out.append((start, start + len(said)))
    return out


def _raise(message: str):
    raise jinja2.TemplateError(message)


def _tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _limit() -> None:
    for kind, most in ((resource.RLIMIT_AS, BYTES), (resource.RLIMIT_FSIZE, _WRITTEN), (resource.RLIMIT_CORE, 0)):
        hard = resource.getrlimit(kind)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)


def _received() -> dict | None:
    head = _exactly(LENGTH.size)
    return json.loads(_exactly(*LENGTH.unpack(head))) if head else None


def _exactly(size: int) -> bytes:
    """Returns `size` bytes, or none where the other end is closed."""
    data = bytearray()
    while len(data) < size:
        part = os.read(0, min(size - len(data), 1 << 20))
        if not part:
            return b""
        data += part
    return bytes(data)


def _reply(kind: bytes, text: str) -> None:
    body = text.encode("utf-8", errors="replace")
    view = memoryview(REPLY.pack(kind, len(body)) + body)
    while view:
        view = view[os.write(0, view) :]
