"""What hostile clients send to a server on this machine: for the shows `serve`, `tinker` and `strangers`, and for tests.

Bodies fit configs/demo_policy with a chat template: 15 tokens, at most 128 positions.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BIG = (
    1 << 31,
    (1 << 31) - 1,
    1 << 32,
    1 << 63,
    -(1 << 63),
    (1 << 64) + 1,
    10**30,
    -1,
    15,
    999,
)  # no ids of the vocabulary


class Health:
    """Asks for a path again and again while the block runs. `most_s`: the longest time until a 200; inf: another status."""

    def __init__(self, port: int, path: str = "/health"):
        self._port, self._path, self._over = port, path, threading.Event()
        self._thread = threading.Thread(target=self._ask)
        self.most_s, self.count = 0.0, 0

    def __enter__(self) -> Health:
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._over.set()
        self._thread.join()

    def _ask(self) -> None:
        while not self._over.wait(0.02):
            begun = time.monotonic()
            connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
            with contextlib.closing(connection):
                connection.request("GET", self._path)
                good = connection.getresponse().status == 200
            took = time.monotonic() - begun if good else float("inf")
            self.most_s, self.count = max(self.most_s, took), self.count + 1


# ---- bodies that take long to read (A04, A11)


def _listed(name: str, member: str, count: int) -> str:
    return f'{{"{name}": [{",".join([member] * count)}]}}'


def bodies() -> list[tuple[str, str, bytes]]:
    """Returns names, paths and bodies. Each is refused with 400 or 413."""
    talk, many = '{"messages": [{"role": "user", "content": %s}]}', 16 << 20
    long = {
        "chat of 10 MB": (CHAT, talk % json.dumps("1+2=" * 2_500_000)),
        "chat of 15 MB of one letter": (CHAT, talk % json.dumps("1" * 15_000_000)),
        "chat of 10 MB in parts": (
            CHAT,
            talk % json.dumps([{"type": "text", "text": "12" * 5000} for _ in range(1000)]),
        ),
        "chat of 100,000 messages": (CHAT, json.dumps({"messages": [{"role": "user", "content": "1" * 20}] * 100_000})),
        "chat of a tool of 10 MB": (
            CHAT,
            json.dumps(
                {
                    "messages": [{"role": "user", "content": "1"}],
                    "tools": [{"type": "function", "function": {"name": "f", "description": "1" * 10_000_000}}],
                }
            ),
        ),
        "text of 15 MB": (COMPLETIONS, json.dumps({"prompt": "1" * 15_000_000})),
        "15,000 texts": (COMPLETIONS, json.dumps({"prompt": ["1" * 1000] * 15_000})),
        "tokenize a text of 15 MB": ("/tokenize", json.dumps({"prompt": "1" * 15_000_000})),
        "tokenize a chat of 15 MB": ("/tokenize", talk % json.dumps("1" * 15_000_000)),
        "detokenize 5 million ids": ("/detokenize", _listed("tokens", "1", 5_000_000)),
        "detokenize a million ids": ("/detokenize", _listed("tokens", "1", 1_000_000)),
        "8 million small numbers": (COMPLETIONS, _listed("prompt", "1", 8_000_000)),
        "a million small numbers": (COMPLETIONS, _listed("prompt", "1", 1_000_000)),
        "a million lists": (COMPLETIONS, _listed("prompt", "[]", 1_000_000)),
        "4 million objects": (COMPLETIONS, _listed("prompt", "{}", 4_000_000)),
        "half a million unknown names": (COMPLETIONS, json.dumps({f"a{i}": 1 for i in range(500_000)})),
        "half a million nulls": (COMPLETIONS, json.dumps({"prompt": 1} | {f"a{i}": None for i in range(500_000)})),
        "a million brackets": (COMPLETIONS, "[" * 1_000_000),
        "a number of 15 million digits": (COMPLETIONS, '{"n": %s}' % ("1" * 15_000_000)),
        "3,000 numbers of 4,300 digits": (COMPLETIONS, _listed("prompt", "1" * 4300, 3000)),
        "a name of 15 MB": (COMPLETIONS, '{"%s": 1}' % ("a" * 15_000_000)),
        "16 MiB and one byte": (COMPLETIONS, " " * (many + 1)),
        "15 MB of spaces": (COMPLETIONS, " " * 15_000_000),
        "15 MB of escapes": (COMPLETIONS, '{"prompt": "%s"}' % ("\\u0031" * 2_500_000)),
        "half pairs": (COMPLETIONS, '{"prompt": "%s"}' % ("\\ud800" * 2_500_000)),
    }
    return [(name, path, text.encode()) for name, (path, text) in long.items()]


# ---- values that no engine may meet (A01)


def values() -> list[tuple[str, dict[str, Any]]]:
    """Returns paths and bodies of `serve`. Each is refused with 400, or samples."""
    out: list[dict[str, Any]] = [{"top_k": value} for value in BIG] + [{"stop_token_ids": [value]} for value in BIG]
    out += [{"prompt": [value]} for value in BIG] + [{name: 10**400} for name in ("top_k", "seed", "max_tokens", "n")]
    out += [{"seed": value} for value in BIG] + [{"max_tokens": value} for value in BIG] + [{"n": v} for v in BIG]
    out += [{"temperature": value} for value in (1e-46, 1e-31, 1e308, -1e-300, 101)]
    out += [{"top_p": value} for value in (0, 1e-46, 1 + 1e-9, -1)]
    out += [{"stop_token_ids": list(range(count))} for count in (8, 15, 1000)] + [{"stop": ["1" * 2000]}]
    out += [{"stop": ["#"] * 17}, {"timeout": 1e300}, {"timeout": 1e-300}, {"stop_token_ids": [[1]]}]
    return [(COMPLETIONS, {"prompt": "1+2=", "max_tokens": 2} | one) for one in out]


def tinker_values() -> list[dict[str, Any]]:
    """Returns changes of a body of `asample`. Each is refused with 400, or samples."""
    params: list[dict[str, Any]] = [{"top_k": value} for value in BIG] + [{"stop": [value]} for value in BIG]
    params += [{"seed": value} for value in BIG] + [{"max_tokens": value} for value in BIG]
    params += [{"temperature": value} for value in (1e-46, 1e-31, 1e308, -1, 101)]
    params += [{"top_p": value} for value in (0, 1e-46, 1.01, -1)] + [{"stop": list(range(n))} for n in (8, 15, 1000)]
    params += [{"stop": ["1" * 2000]}, {"stop": ["#"] * 17}, {"top_k": 1.5}, {"max_tokens": True}]
    out: list[dict[str, Any]] = [{"sampling_params": {"max_tokens": 2} | one} for one in params]
    out += [{"num_samples": value} for value in BIG] + [{"seq_id": value} for value in (-1, 1 << 63, 1.5)]
    return out + [{"prompt": {"chunks": [{"type": "encoded_text", "tokens": [value]}]}} for value in BIG]


# ---- connections (A10)


def request(path: str, body: bytes, token: str, *more: str) -> bytes:
    """Returns the bytes of a POST."""
    head = [f"POST {path} HTTP/1.1", "Host: x", f"Authorization: Bearer {token}", f"Content-Length: {len(body)}", *more]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


@contextlib.contextmanager
def opened(port: int, sent: bytes = b"", receive: int = 0) -> Iterator[socket.socket]:
    """Yields a connection over which something was sent. `receive`: bytes that its client's system keeps unread."""
    with socket.socket() as one:
        if receive:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive)
        one.connect(("127.0.0.1", port))
        one.settimeout(60)
        one.sendall(sent)
        yield one


def closed_within(one: socket.socket, seconds: float) -> bool:
    """Returns whether the server ends a connection within the seconds."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        one.settimeout(max(end - time.monotonic(), 0.01))
        try:
            if not one.recv(1 << 16):
                return True
        except TimeoutError:
            return False
        except OSError:
            return True
    return False


def dropped(port: int, sent: bytes, seconds: float) -> None:
    """Sends a request, and goes away after some seconds as a killed process does."""
    with opened(port, sent) as one:
        time.sleep(seconds)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")


def waited(found: Callable[[], bool], seconds: float) -> bool:
    """Waits until something is so. Returns whether it was so within the seconds."""
    end = time.monotonic() + seconds
    while not found():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


# ---- a client that knows everything of another but its key (A02)


def knowing(known: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    """Returns methods, paths and bodies by which a client would read or change what is another's.

    `known`: session, run, sampler, request, requests and paths of the other, and an own session and run.
    """
    one = {"chunks": [{"type": "encoded_text", "tokens": [3, 8]}]}
    datum = {"model_input": one, "loss_fn_inputs": {"target_tokens": {"data": [8, 11], "dtype": "int64", "shape": [2]}}}
    passed = {"data": [datum], "loss_fn": "cross_entropy"}
    run, own, out = {"model_id": known["run"]}, {"model_id": known["own_run"]}, []
    out += [
        ("load_weights", own | {"path": path, "optimizer": more}) for path in known["paths"] for more in (True, False)
    ]
    for number in (0, 1, 2, 1000, None):
        at = {"seq_id": number}
        out += [
            ("forward", run | at | {"forward_input": passed}),
            ("forward_backward", run | at | {"forward_backward_input": passed}),
            ("optim_step", run | at | {"adam_params": {"learning_rate": 1.0}}),
            ("save_weights", run | at | {"path": f"stolen-{number}", "overwrite": True}),
            ("save_weights_for_sampler", run | at | {"path": "stolen"}),
            ("save_weights_for_sampler", run | at),
            ("asample", at | {"sampling_session_id": known["sampler"], "prompt": one}),
        ]
        out += [("load_weights", run | at | {"path": path, "optimizer": True}) for path in known["paths"]]
    for path in known["paths"]:
        out += [("weights_info", {"tinker_path": path}), ("weights_info", {"tinker_path": path.replace("//", "//./")})]
        out += [("create_sampling_session", {"session_id": known["own_session"], "model_path": path})]
        out += [("save_weights", run | {"path": path.rpartition("/")[2], "overwrite": True})]
    out += [("retrieve_future", {"request_id": name}) for name in known["requests"]]
    out += [("retrieve_future", {"request_id": str(number)}) for number in range(20)]
    out += [("get_info", run), ("unload_model", run), ("session_heartbeat", {"session_id": known["session"]})]
    out += [("create_sampling_session", {"session_id": known["session"], "base_model": known["model"]})]
    out += [("create_model", {"session_id": known["session"], "base_model": known["model"]})]
    return [("POST", path, body) for path, body in out] + [("GET", f"samplers/{known['sampler']}", {})]


def reached(ask: Callable[..., tuple[int, Any]], method: str, path: str, body: dict[str, Any]) -> bool:
    """Returns whether a try got anything: a response that is no refusal, and where it is a promise, a result without error.

    `ask`: method, path, body -> status, value."""
    status, told = ask(method, path, body if method == "POST" else None)
    if status != 200 or "request_id" not in told:
        return status == 200
    while True:
        status, told = ask("POST", "retrieve_future", {"request_id": told["request_id"]})
        if status != 408:
            return status == 200 and "error" not in told
