"""An engine whose dispatches take at least DISPATCH_S, as on an accelerator: behind the server, or driven directly.

    python scripts/slow_engine.py serve FOLDER EVENTS
    python scripts/slow_engine.py direct FOLDER LOAD

`serve` prints its port, and writes what its engine does to EVENTS. `direct` samples the bodies in LOAD, CLIENTS at a time,
and prints figures.
A line of EVENTS is a kind, "dispatch" or "parked", and time.monotonic(), which all processes of a machine share.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import socket
import sys
import time
from collections import deque
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jaxrl_post
from jaxrl_post.ring.types import Prompt, Request, RolloutId

DISPATCH_S = 0.02
SLOTS, CLIENTS = 16, 64
TOKEN = "of-the-show"


def opened(folder: str):
    """Returns a policy on an engine of SLOTS slots."""
    return jaxrl_post.load(folder, engine__slots=SLOTS, engine__row_sizes=(32,), engine__max_length=128)


def serve(folder: str, events: str) -> int:
    from jaxrl_post.serve.server import Server

    server = Server(
        opened(folder), token=TOKEN, say=print, name="slow", queue=4 * CLIENTS, timeout_s=120.0, parser="none"
    )
    park, tell = server.engine.park, server.engine.meanwhile
    with open(events, "w", buffering=1) as told, socket.create_server(("127.0.0.1", 0)) as listening:

        def dispatched() -> None:
            told.write(f"dispatch {time.monotonic()}\n")
            tell()
            time.sleep(DISPATCH_S)

        def parked(ids):
            if ids:
                told.write(f"parked {time.monotonic()}\n")
            return park(ids)

        server.engine.meanwhile, server.engine.park = dispatched, parked
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)  # unread streams stand still soon
        print(listening.getsockname()[1], flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            return server.serve(listening)
        return 0


def direct(folder: str, load: str) -> int:
    """Samples the requests of a load. Each body has one prompt of token ids and one sample."""
    policy = opened(folder)
    engine, bodies = policy.engine(), json.loads(Path(load).read_text())
    requests = [_request(policy, serial, body) for serial, body in enumerate(bodies)]
    _sampled(engine, requests[:CLIENTS])  # what is first used costs time
    engine.meanwhile = lambda: time.sleep(DISPATCH_S)
    engine.metrics()
    begun, cpu = time.monotonic(), time.process_time()
    found = _sampled(engine, requests)
    seconds, cpu = time.monotonic() - begun, time.process_time() - cpu
    counts = engine.metrics()
    print(
        json.dumps(
            {
                "seconds": seconds,
                "cpu_s": cpu,
                "steps": counts["eval/rows/steps"],
                "dispatches": counts["eval/rows/dispatches"],
                "rollouts": [found[request.rollout_id] for request in requests],
            }
        )
    )
    return 0


def _request(policy, serial: int, body: dict) -> Request:
    """Returns the request of a body, whose noise is named by the bytes of its prompt, as the server has it."""
    (prompt,) = policy.prompts([body["prompt"]])
    named = hashlib.blake2b(prompt.tokens.tobytes(), digest_size=16).hexdigest()
    law = {name: body[name] for name in ("temperature", "top_p", "top_k") if name in body}
    return Request(
        rollout_id=RolloutId(serial, "eval", 0, named, 0),
        prompt=Prompt(id=named, tokens=prompt.tokens),
        seed=RolloutId(body["seed"], "eval", 0, named, 0).seed(),
        max_tokens=body["max_tokens"],
        sampling=policy.sampling_with(law),
    )


def _sampled(engine, requests: list[Request]) -> dict:
    """Returns tokens and log-probs by id. CLIENTS requests are in the engine as long as there are so many."""
    engine.reset()
    waiting, found = deque(requests), {}
    while waiting or engine.pending:
        engine.submit([waiting.popleft() for _ in range(min(CLIENTS - engine.pending, len(waiting)))])
        for rollout in engine.step():
            found[rollout.id] = rollout.tokens.tolist(), rollout.logprobs.tolist()
    return found


if __name__ == "__main__":
    sys.exit({"serve": serve, "direct": direct}[sys.argv[1]](*sys.argv[2:]))
