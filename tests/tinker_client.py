"""A server of the Tinker API on a thread of this process, and plain HTTP to it: what the SDK sends, without the SDK."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from jaxrl_post.launch.parts import saved_policy
from jaxrl_post.serve.tinker.server import Server

ROOT = Path(__file__).resolve().parents[1]
KEY = "tml-of-the-tests"
SMALL = ("engine.slots=8", "engine.row_sizes=(32,)", "engine.max_length=64", "engine.steps_per_dispatch=4")
SMALL += ("batch.rows=2", "sampling.max_tokens=24")


@dataclass
class Client:
    """A session, with its numbers. `server`: that runs; `port`: where."""

    server: Server
    port: int
    session: str = ""
    numbers: dict = field(default_factory=dict)
    key: str = KEY

    def ask(self, method: str, path: str, body=None, *, key: str | None = None):
        """Returns status and value of a response. `body`: bytes, or what becomes JSON."""
        data = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        with contextlib.closing(connection):
            connection.request(method, f"/api/v1/{path}", data, {"X-API-Key": self.key if key is None else key})
            response = connection.getresponse()
            return response.status, json.loads(response.read())

    def post(self, what: str, **body) -> dict:
        """Returns the object that a good request gets."""
        status, value = self.ask("POST", what, body)
        assert status == 200, value
        return value

    def begun(self, key: str = "") -> Client:
        """Returns another client, with a session of its own."""
        one = Client(self.server, self.port, key=key or self.key)
        one.session = one.post("create_session", tags=[], user_metadata={}, sdk_version="0", type="create_session")[
            "session_id"
        ]
        return one

    def result(self, told: dict) -> dict:
        """Waits for the result of a request."""
        while True:
            status, value = self.ask("POST", "retrieve_future", {"request_id": told["request_id"]})
            if status != 408:
                assert status == 200, value
                return value

    def model(self, rank: int = 4, **more) -> str:
        """Begins a training run and returns its name."""
        body = dict(session_id=self.session, model_seq_id=self._number("models"), base_model="demo")
        made = self.result(self.post("create_model", **body, lora_config={"rank": rank, **more}))
        return made["model_id"]

    def train(self, what: str, model: str, **body) -> dict:
        """Returns the result of a request of a training run."""
        return self.result(self.post(what, model_id=model, seq_id=self._number(model), **body))

    def passed(self, model: str, data, loss: str, config=None, *, backward=True) -> dict:
        """Returns the result of forward_backward, or of forward."""
        name = "forward_backward" if backward else "forward"
        given = {"data": data, "loss_fn": loss, "loss_fn_config": config}
        return self.train(name, model, **{f"{name}_input": given})

    def sampler(self, path: str | None = None) -> str:
        """Begins a sampler of saved weights, or of the base."""
        body = {"model_path": path} if path else {"base_model": "demo"}
        number = self._number("samplers")
        return self.post("create_sampling_session", session_id=self.session, sampling_session_seq_id=number, **body)[
            "sampling_session_id"
        ]

    def sample(self, sampler: str, prompt, n: int = 1, *, logprobs=False, **params) -> dict:
        """Returns the request to sample, sent."""
        return self.post(
            "asample",
            sampling_session_id=sampler,
            seq_id=self._number(sampler),
            num_samples=n,
            prompt=text(prompt),
            sampling_params=params,
            prompt_logprobs=logprobs,
        )

    def _number(self, what: str) -> int:
        self.numbers[what] = self.numbers.get(what, -1) + 1
        return self.numbers[what]


def text(ids) -> dict:
    """Returns a model_input."""
    return {"chunks": [{"type": "encoded_text", "tokens": list(map(int, ids))}]}


def datum(ids, targets, **floats) -> dict:
    """Returns a datum."""
    tensors = {
        name: {"data": list(map(float, one)), "dtype": "float32", "shape": [len(one)]} for name, one in floats.items()
    }
    tensors["target_tokens"] = {"data": list(map(int, targets)), "dtype": "int64", "shape": [len(targets)]}
    return {"model_input": text(ids), "loss_fn_inputs": tensors}


@contextlib.contextmanager
def served(folder: Path, key: str = KEY, **how) -> Iterator[Client]:
    """Serves the demo policy until the block ends."""
    given = dict(keys={KEY: ""}, say=lambda line: None, name="demo", queue=200, idle_s=600.0) | how
    made = Server(*saved_policy.files(os.path.relpath(ROOT / "configs/demo_policy"), SMALL), folder=folder, **given)
    listening = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=made.serve, args=(listening,))
    with listening:
        thread.start()
        try:
            yield Client(made, listening.getsockname()[1], key=key).begun()
        finally:
            made.stop()
            thread.join(60)
            assert not thread.is_alive()
