"""The child side of chat templates: renders one conversation after another with jinja2, in a process with limits.

A template comes from a downloaded file. It runs in jinja2's immutable sandbox, in a process without environment that may
not write files, and whose address space, CPU time per conversation and output are bounded. The settings of jinja2 are
those of transformers: trim_blocks, lstrip_blocks, loop controls, `tojson` without HTML escapes, `raise_exception`,
`strftime_now`, and {% generation %} blocks, which are rendered like any text and whose places are known.

Protocol, over the socket that is descriptor 0: a message is 4 bytes of length, then JSON. The first message is {template,
tokens, now, tools}, each further one {messages, generation, marks} and, where it has its own, tools. Every message is
answered with a kind, 4 bytes of length and UTF-8. With `marks` this is JSON of the text and of the places of its generation
blocks.
"""

from __future__ import annotations

import datetime
import json
import os
import resource
import signal
import struct
from collections.abc import Callable, Mapping, Sequence
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
        """Forgets the blocks of the conversation before."""
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
    render, tokens, tools = None, given["tokens"], given["tools"]
    while (asked := _received()) is not None:
        signal.setitimer(signal.ITIMER_PROF, SECONDS)  # its signal ends the process, also inside of a C function
        try:
            render = render or compiled(given["template"], given["now"])
            kind, text = (
                TEXT,
                rendered(render, asked["messages"], asked["generation"], tokens, asked.get("tools", tools)),
            )
            text = json.dumps([text, marks(render, text)]) if asked["marks"] else text
            text.encode()
        except MemoryError:
            kind, text = ERROR, f"it needs more than {BYTES >> 20} MiB of memory"
        except _MISTAKES as error:
            kind, text = ERROR, " ".join(f"{_name(error)}{error}".split())[:_SAID]
        signal.setitimer(signal.ITIMER_PROF, 0)
        _reply(kind, text)


def _name(error: Exception) -> str:
    return "" if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: "


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


def rendered(
    template: jinja2.Template,
    messages: list[dict],
    generation: bool,
    tokens: dict[str, str],
    tools: Sequence[Mapping] = (),
) -> str:
    """Returns the text of a conversation. `tools`: JSON schemas of functions.

    Raises:
      ValueError: the text has more than LONGEST characters.
    """
    pieces, said = [], template.environment.extensions[_Generation.identifier]
    said.begin()
    for piece in template.generate(
        messages=messages, add_generation_prompt=generation, tools=tools or None, documents=None, **tokens
    ):
        pieces.append(piece)
        said.written += len(piece)
        if said.written > LONGEST:
            raise ValueError(f"it writes more than {LONGEST} characters")
    return "".join(pieces)


def marks(template: jinja2.Template, text: str) -> list[tuple[int, int]]:
    """Returns start and end of each generation block in the text that was rendered last.

    Raises:
      ValueError: a block is not where it was written, as one inside of a macro.
    """
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
