"""Requests to a policy behind JetStream's orchestrator: python jetstream_requests.py POLICY OUT.json

Runs where this project and google-jetstream can be imported. It drives the row engine directly, starts
`python -m jaxrl_post jetstream` with the same options, and sends requests over gRPC: some one by one, then all at once.
OUT.json holds the tokens of each, which requests were refused, and whether the server lived on.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import itertools
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HEROES = ("a little girl named Lily", "a big dog", "a boy", "Tom", "two cats", "a bird named Sue", "Mom", "a frog")
OPENINGS = ("Once upon a time, there was {}", "One day, {}", "{} went to the park", "{} liked to play.")
ENDS = ("", " and")
ALONE = 8  # requests that are sent one by one too
ENGINE = ("engine.slots=16", "engine.max_length=320", "engine.steps_per_dispatch=4")
LIMITS = (24, 57, 100, 180)  # tokens of a request, in turn
START_S, REQUEST_S = 600.0, 600.0
VERSIONS = ("google-jetstream", "jax", "flax", "numpy", "grpcio", "protobuf")


def texts() -> list[str]:
    """Returns the prompts, 64 of them."""
    return [opening.format(hero) + end for opening, hero, end in itertools.product(OPENINGS, HEROES, ENDS)]


def main(policy: str, out: str) -> None:
    found = {"python": sys.version.split()[0], "versions": _versions(), "requests": _directly(policy)}
    with _server(policy) as channel:
        found |= _sent(channel, found["requests"])
    Path(out).write_text(json.dumps(found))


def _versions() -> dict[str, str]:
    known = {one.metadata["Name"] for one in importlib.metadata.distributions()}
    return {name: importlib.metadata.version(name) for name in VERSIONS if name in known}


def _directly(name: str) -> list[dict[str, Any]]:
    """Returns the requests with the greedy tokens of the engine driven directly."""
    from jaxrl_post.launch.parts import saved_policy

    policy = saved_policy.load(name, ENGINE)
    words, given = policy.tokenizer, texts()
    limits = list(itertools.islice(itertools.cycle(LIMITS), len(given)))
    prompts = [words.encode(text) for text in given]
    rollouts = policy.generate(prompts, sampling={"temperature": 0.0}, max_tokens=max(LIMITS))
    return [
        {"text": text, "prompt": prompt, "limit": limit, "direct": ids, "direct_text": words.decode(ids)}
        for text, prompt, limit, (one,) in zip(given, prompts, limits, rollouts)
        for ids in [_without_end(one.tokens[:limit].tolist(), words.eos_ids)]
    ]


def _without_end(ids: list[int], ends: Sequence[int]) -> list[int]:
    """Returns the tokens that JetStream sends: it keeps the one that ends a request to itself."""
    return ids[:-1] if ids[-1] in ends else ids


@contextlib.contextmanager
def _server(policy: str) -> Iterator[Any]:
    """Starts the server, yields a channel to it, and ends it."""
    import grpc

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = ["-m", "jaxrl_post", "jetstream", f"--policy={policy}", f"--port={port}", "--temperature=0"]
    process = subprocess.Popen([sys.executable, *command, *(f"--config.{option}" for option in ENGINE)])
    try:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            _await(grpc.channel_ready_future(channel), process)
            yield channel
        assert process.poll() is None, f"the server ended by itself, with exit code {process.poll()}"
    finally:
        process.terminate()
        process.wait(timeout=60)


def _await(ready: Any, process: subprocess.Popen) -> None:
    """Waits for the server, which compiles first."""
    import grpc

    deadline = time.monotonic() + START_S
    while True:
        try:
            return ready.result(timeout=1)
        except grpc.FutureTimeoutError:
            assert process.poll() is None, f"the server ended with exit code {process.poll()}"
            assert time.monotonic() < deadline, f"the server did not start within {START_S:g} s"


def _sent(channel: Any, requests: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Sends the requests, adds what came back to each, and returns what is known of all."""
    from jetstream.core.proto import jetstream_pb2, jetstream_pb2_grpc

    stub, kinds = jetstream_pb2_grpc.OrchestratorStub(channel), jetstream_pb2
    for one in requests[:ALONE]:
        one["alone"] = _by_ids(stub, kinds, one)
    begun = time.monotonic()
    with ThreadPoolExecutor(len(requests)) as pool:
        work = [pool.submit(_by_text if place % 2 else _by_ids, stub, kinds, one) for place, one in enumerate(requests)]
        for one, result in zip(requests, work):
            one["loaded"] = result.result()
    seconds = time.monotonic() - begun
    refused = _refusals(stub, kinds)
    cancelled = _cancelled(stub, kinds, requests[0])
    again = _by_ids(stub, kinds, requests[0])
    live = stub.HealthCheck(kinds.HealthCheckRequest(), timeout=REQUEST_S).is_live
    return {"seconds": seconds, "refused": refused, "cancelled_after": cancelled, "again": again, "live": live}


def _by_ids(stub: Any, kinds: Any, one: dict[str, Any]) -> list[int]:
    """Returns the tokens of a request that names ids. JetStream puts the begin token before them."""
    content = kinds.DecodeRequest.TokenContent(token_ids=one["prompt"][1:])
    return _ids(_decode(stub, kinds, one["limit"], token_content=content))


def _by_text(stub: Any, kinds: Any, one: dict[str, Any]) -> list[int]:
    """Returns the tokens of a request that names a text, and keeps the text that came back."""
    content = kinds.DecodeRequest.TextContent(text=one["text"])
    parts = list(_decode(stub, kinds, one["limit"], text_content=content))
    one["served_text"] = "".join(sample.text for part in parts for sample in part.stream_content.samples)
    return _ids(parts)


def _decode(stub: Any, kinds: Any, limit: int, **content: Any) -> Iterator[Any]:
    return stub.Decode(kinds.DecodeRequest(max_tokens=limit, **content), timeout=REQUEST_S)


def _ids(parts: Any) -> list[int]:
    return [token for part in parts for sample in part.stream_content.samples for token in sample.token_ids]


def _refusals(stub: Any, kinds: Any) -> dict[str, str]:
    """Returns status and sentence of requests that cannot be served."""
    import grpc

    ids = kinds.DecodeRequest.TokenContent
    wrong = {
        "too_long": (8, {"token_content": ids(token_ids=[300] * 320)}),
        "too_long_text": (8, {"text_content": kinds.DecodeRequest.TextContent(text="Lily ran. " * 200)}),
        "unknown_token": (8, {"token_content": ids(token_ids=[300, 512])}),
        "negative_token": (8, {"token_content": ids(token_ids=[-1, 300])}),
        "no_content": (8, {}),
        "session": (8, {"token_content": ids(token_ids=[300]), "session_cache": "one"}),
        "no_tokens": (0, {"token_content": ids(token_ids=[300])}),
    }
    out = {}
    for name, (limit, content) in wrong.items():
        try:
            out[name] = f"OK: {len(_ids(_decode(stub, kinds, limit, **content)))} tokens"
        except grpc.RpcError as error:
            out[name] = f"{error.code().name}: {error.details()}"
    return out


def _cancelled(stub: Any, kinds: Any, one: dict[str, Any]) -> int:
    """Begins a request, leaves it after three responses, and returns the tokens that had come."""
    content = kinds.DecodeRequest.TokenContent(token_ids=one["prompt"][1:])
    stream = _decode(stub, kinds, max(LIMITS), token_content=content)
    parts = list(itertools.islice(stream, 3))
    stream.cancel()
    return len(_ids(parts))


if __name__ == "__main__":
    main(*sys.argv[1:])
