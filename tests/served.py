"""Servers of the tests: one on a thread of this process, and plain HTTP to it."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import shutil
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import jaxrl_post
from jaxrl_post.serve.server import Server

ROOT = Path(__file__).resolve().parents[1]
TOKEN = "a-token"
SMALL = dict(
    engine__slots=8,
    engine__row_sizes=(32,),
    engine__max_length=64,
    engine__steps_per_dispatch=4,
    sampling__max_tokens=24,
)


def policy(path=ROOT / "configs/demo_policy", **changes):
    """Returns a policy on a small engine."""
    return jaxrl_post.load(path, **{**SMALL, **changes})


@contextlib.contextmanager
def talking(folder: Path, template: str) -> Iterator[Served]:
    """Serves the demo policy with a chat template that writes what its alphabet has, until the block ends."""
    shutil.copytree(ROOT / "configs/demo_policy", folder)
    (folder / "chat_template.jinja").write_text(template)
    with served(policy(folder), parser="hermes") as one:
        yield one


@dataclass(frozen=True)
class Served:
    """A server that runs, and its port."""

    server: Server
    port: int

    def ask(self, method: str, path: str, body=None, *, token: str = TOKEN):
        """Returns status, headers and body of a response. `body`: bytes, or what becomes JSON."""
        data = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        with contextlib.closing(connection):
            connection.request(method, path, data, {"Authorization": f"Bearer {token}"} if token else {})
            response = connection.getresponse()
            return response.status, response.headers, response.read()

    def post(self, path: str, **body) -> dict:
        """Returns the object that a good request gets."""
        status, _, data = self.ask("POST", path, body)
        assert status == 200, data
        return json.loads(data)

    def events(self, path: str, **body) -> list[dict]:
        """Returns the objects of a stream, without its end mark."""
        status, headers, data = self.ask("POST", path, {**body, "stream": True})
        assert status == 200 and headers["content-type"].startswith("text/event-stream"), data
        lines = [line.removeprefix("data: ") for line in data.decode().split("\n\n") if line]
        assert lines[-1] == "[DONE]"
        return [json.loads(line) for line in lines[:-1]]

    def metric(self, name: str) -> float:
        """Returns a figure of /metrics."""
        text = self.ask("GET", "/metrics")[2].decode()
        return sum(
            float(line.rpartition(" ")[2]) for line in text.splitlines() if line.split("{")[0].split(" ")[0] == name
        )


@contextlib.contextmanager
def served(own, **how) -> Iterator[Served]:
    """Serves a policy until the block ends."""
    given = dict(token=TOKEN, say=lambda line: None, name="demo", queue=200, timeout_s=60.0, parser="none") | how
    made, listening = Server(own, **given), socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=made.serve, args=(listening,))
    with listening:
        thread.start()
        try:
            yield Served(made, listening.getsockname()[1])
        finally:
            made.stop()
            thread.join(60)
            assert not thread.is_alive()


def mixed(count):
    """Requests of every kind, each with a seed."""
    dice, out = random.Random(0), []
    for index in range(count):
        sums = [f"{dice.randrange(100)}+{dice.randrange(100)}=" for _ in range(dice.choice((1, 1, 2)))]
        body = {
            "prompt": sums[0] if len(sums) == 1 else sums,
            "n": dice.choice((1, 1, 2, 3)),
            "seed": index // 2,  # so that seeds repeat over prompts
            "max_tokens": dice.randrange(1, 24),
            "temperature": dice.choice((0, 0.7, 1.0, 1.5)),
            "return_token_ids": True,
            "logprobs": 0,
        }
        body |= dice.choice(({}, {"top_p": 0.8}, {"top_k": 3}, {"stop": "#"}, {"stop_token_ids": [3, 4]}))
        out.append(body)
    return out


def bits(found):
    """What must be equal of a response."""
    return [
        (one["index"], one["text"], one["token_ids"], one["logprobs"], one["finish_reason"], one["stop_reason"])
        for one in found["choices"]
    ]
