"""What strangers send to the servers: fields, values, bodies, connections, and names of what is another's.

Each kind is sent over loopback to servers of this process. Right values are statuses of HTTP, the bits of the same request
without the odd field, and what another client finds afterwards.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hostile_clients
from hostile_clients import CHAT, COMPLETIONS

import jaxrl_post
from jaxrl_post.launch.parts import saved_policy
from jaxrl_post.ring import json_text
from jaxrl_post.runs import metric_rows, run_folder
from jaxrl_post.serve import http_server
from jaxrl_post.serve.agents import app
from strangers import Members

ROOT = Path(__file__).resolve().parents[2]
POLICY, TOKEN = ROOT / "configs" / "demo_policy", "of-the-show"
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
ENGINE = {"engine__slots": 8, "engine__row_sizes": (32,), "engine__max_length": 64, "engine__steps_per_dispatch": 4}
ENGINE |= {"sampling__max_tokens": 24}


@contextlib.contextmanager
def running(made: Any) -> Iterator[int]:
    """Serves in a thread until the block ends, and yields the port."""
    listening = socket.create_server(("127.0.0.1", 0))
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 12)  # a client that reads nothing holds it up soon
    thread = threading.Thread(target=made.serve, args=(listening,))
    thread.start()
    try:
        yield listening.getsockname()[1]
    finally:
        made.stop()
        thread.join(60)
        listening.close()


@contextlib.contextmanager
def _served(**how: Any) -> Iterator[tuple[Any, int]]:
    """Serves the demo policy with a chat template."""
    from jaxrl_post.serve.server import Server

    given = dict(token=TOKEN, say=lambda line: None, name="demo", queue=24, timeout_s=60.0, parser="hermes") | how
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(POLICY, Path(folder) / "policy")
        (Path(folder) / "policy" / "chat_template.jinja").write_text(TEMPLATE)
        made = Server(jaxrl_post.load(f"{folder}/policy", **ENGINE), **given)
        with running(made) as port:
            yield made, port


def asking(port: int, root: str = "", **headers: str) -> Callable[..., tuple[int, Any]]:
    """Returns what sends a request and returns status and value."""

    def ask(method: str, path: str, body: Any = None) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        with contextlib.closing(connection):
            data = body if isinstance(body, bytes) or body is None else json.dumps(body)
            connection.request(method, f"{root}{path}", data, headers)
            response = connection.getresponse()
            told = response.read()
            return response.status, json.loads(told) if told[:1] == b"{" else told.decode()

    return ask


# ---- F27: fields that are null or ask for nothing

NULL = [
    "cache_salt",
    "kv_transfer_params",
    "documents",
    "mm_processor_kwargs",
    "guided_decoding_backend",
    "thinking",
    "vllm_xargs",
    "lora_request",
    "web_search_options",
    "verbosity",
    "extra_body",
    "sampling_seed",
    "regex",
    "ebnf",
    "stop",
    "seed",
    "n",
    "logit_bias",
    "stream_options",
    "user",
    "tools",
    "response_format",
    "max_completion_tokens",
]
NEUTRAL: dict[str, Any] = {
    **{"priority": 0, "detokenize": True, "min_p": 0.0, "ignore_eos": False, "repetition_penalty": 1.0, "stop": []},
    **{"presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "skip_special_tokens": True, "min_tokens": 0},
    **{"spaces_between_special_tokens": True, "best_of": 1, "logits_processors": [], "bad_words": [], "n": 1},
}


def neutral() -> Members:
    """A field that says nothing changes no bit."""
    wrong, tried = [], 0
    with _served() as (_, port):
        ask = asking(port, Authorization=f"Bearer {TOKEN}")
        own = {"seed": 3, "max_tokens": 6, "temperature": 0.7, "return_token_ids": True}
        bodies = {COMPLETIONS: {"prompt": "1+2="}, CHAT: {"messages": [{"role": "user", "content": "1+2="}]}}
        for path, body in bodies.items():
            plain = ask("POST", path, body | own)[1]["choices"]
            more = {"add_special_tokens": True} if path == COMPLETIONS else {"add_special_tokens": False}
            for name, value in [(name, None) for name in NULL if name not in own] + [*(NEUTRAL | more).items()]:
                status, told = ask("POST", path, body | own | {name: value})
                tried += 1
                if status != 200 or told["choices"] != plain:
                    wrong.append(f"{path}: {name}={value!r} gave {status} and other choices: {str(told)[:100]}")
    return Members(tried, tuple(wrong))


# ---- A01, A02: values, and names of what is another's


def values() -> Members:
    """No value of a client ends a thread."""
    wrong, tried = [], 0
    with _served() as (made, port):
        ask = asking(port, Authorization=f"Bearer {TOKEN}")
        for path, body in hostile_clients.values():
            status, told = ask("POST", path, body)
            tried += 1
            wrong += [] if status in (200, 400) else [f"serve: {body} gave {status}: {str(told)[:100]}"]
        wrong += ["serve: the engine has failed"] if _metric(ask, "jaxrl_post_engine_restarts_total") else []
    with tempfile.TemporaryDirectory() as folder, _tinker(Path(folder)) as (made, port):
        ask = asking(port, "/api/v1/", **{"X-API-Key": "tml-alice"})
        known, thread = victim(ask), made.service.thread._thread
        base = {"sampling_session_id": known["sampler"], "prompt": {"chunks": [{"tokens": [3, 8]}]}}
        for changes in hostile_clients.tinker_values():
            status, told = ask("POST", "asample", base | changes)
            tried += 1
            if status != 400 and (status != 200 or "error" in result(ask, told)):
                wrong.append(f"tinker: {changes} gave {status}: {str(told)[:100]}")
        wrong += [] if made.service.thread._thread is thread else ["tinker: the devices' thread has ended"]
    return Members(tried, tuple(wrong))


@contextlib.contextmanager
def _tinker(folder: Path) -> Iterator[tuple[Any, int]]:
    from jaxrl_post.serve.tinker.server import Server

    options = (
        "engine.slots=8",
        "engine.row_sizes=(32,)",
        "engine.max_length=64",
        "batch.rows=2",
        "sampling.max_tokens=24",
    )
    given = dict(say=lambda line: None, name="demo_policy", queue=200, idle_s=600.0)
    keys = {"tml-alice": "alice", "tml-bob": "bob"}
    made = Server(*saved_policy.files(str(POLICY), options), folder=folder, keys=keys, **given)
    with running(made) as port:
        yield made, port


def result(ask: Callable[..., tuple[int, Any]], told: dict[str, Any]) -> dict[str, Any]:
    while (found := ask("POST", "retrieve_future", {"request_id": told["request_id"]}))[0] == 408:
        pass
    return found[1]


def thief(ask: Callable[..., tuple[int, Any]]) -> dict[str, str]:
    session = ask("POST", "create_session", {})[1]["session_id"]
    body = {"session_id": session, "base_model": "demo_policy", "lora_config": {"rank": 4}}
    return {"own_session": session, "own_run": result(ask, ask("POST", "create_model", body)[1])["model_id"]}


def victim(ask: Callable[..., tuple[int, Any]]) -> dict[str, Any]:
    own, requests, paths = thief(ask), [], []
    for what, name in (("save_weights", "state"), ("save_weights_for_sampler", "kept")):
        told = ask("POST", what, {"model_id": own["own_run"], "path": name})[1]
        requests.append(told["request_id"])
        paths.append(result(ask, told)["path"])
    body = {"session_id": own["own_session"], "model_path": paths[1]}
    names = {"session": own["own_session"], "run": own["own_run"], "model": "demo_policy"}
    sampler = ask("POST", "create_sampling_session", body)[1]["sampling_session_id"]
    return names | {"sampler": sampler, "requests": requests, "paths": paths}


def knowing() -> Members:
    """A client that knows all names of another's reaches nothing, also after the server has begun anew."""
    wrong, tried, known = [], 0, {}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(2):
            with _tinker(Path(folder)) as (_, port):
                alice, bob = (asking(port, "/api/v1/", **{"X-API-Key": f"tml-{name}"}) for name in ("alice", "bob"))
                known = (known or victim(alice)) | thief(bob)
                for one in hostile_clients.knowing(known):
                    tried += 1
                    wrong += [f"{one} got something"] if hostile_clients.reached(bob, *one) else []
                if alice("POST", "weights_info", {"tinker_path": known["paths"][0]})[0] != 200:
                    wrong.append("the owner does not find what was saved")
    return Members(tried, tuple(wrong))


# ---- A03, A04, A11: places, long bodies, hosts


def unread() -> Members:
    """Streams that nobody reads hold no place once their rollouts have ended."""
    wrong, tried = [], 0
    with _served() as (made, port), contextlib.ExitStack() as stack:
        ask = asking(port, Authorization=f"Bearer {TOKEN}")
        for n in (1, 2, 5, 8, 9, 16, 31, 32) * 3:
            body = {"prompt": [1, 2, 3], "n": n, "stream": True, "logprobs": 0, "return_token_ids": True, "timeout": 60}
            sent = hostile_clients.request(COMPLETIONS, json.dumps(body | {"max_tokens": 4 + n % 3}).encode(), TOKEN)
            before = _metric(ask, "jaxrl_post_prompt_tokens_total")
            stack.enter_context(hostile_clients.opened(port, sent, 2048))
            hostile_clients.waited(lambda: _metric(ask, "jaxrl_post_prompt_tokens_total") > before, 30.0)
            free = hostile_clients.waited(lambda: made.service.pending == 0, 30.0)
            status, _ = ask("POST", COMPLETIONS, {"prompt": [1], "max_tokens": 1, "n": 32})
            tried += 1
            wrong += [] if free and status == 200 else [f"n={n}: free {free}, a request for all places gave {status}"]
    return Members(tried, tuple(wrong))


def _metric(ask: Callable[..., tuple[int, Any]], name: str) -> float:
    lines = ask("GET", "/metrics")[1].splitlines()
    return next(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name} "))


def bodies() -> Members:
    """Bodies that take long to read are refused, and /health responds meanwhile."""
    wrong, every = [], hostile_clients.bodies()
    with _served() as (_, port):
        ask = asking(port, Authorization=f"Bearer {TOKEN}")
        for name, path, data in every:
            with hostile_clients.Health(port) as health:
                status, told = ask("POST", path, data)
            if status not in (400, 413) or health.most_s > 1.0:
                wrong.append(f"{name}: {status}, /health took {health.most_s:.2f} s: {str(told)[:80]}")
    return Members(len(every), tuple(wrong))


HOSTS = [
    "x/evil?",
    "[",
    "]",
    "[::1",
    "a b",
    "x" * 5000,
    "x:y:z",
    "x?y#z",
    "//",
    "\\",
    "x\\y",
    "%00",
    "%zz",
    "é",
    "\x7f",
    "@",
    ":",
]
HOSTS += ["x/" * 50, "http://x", "x:99999999", "[[]]", "?", "#", "{}", "$(x)", "<script>"]


def hosts() -> Members:
    """A Host header is no label of a metric, and none gives status 500."""
    wrong = []
    with _served() as (_, port):
        for host in HOSTS:
            head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {TOKEN}\r\nContent-Length: 2\r\n\r\n{{}}"
            with hostile_clients.opened(port, head.encode("latin-1")) as one:
                line = one.recv(1 << 16).partition(b"\r\n")[0].decode()
            wrong += [] if " 400 " in line else [f"Host {host[:40]!r}: {line}"]
        lines = asking(port, Authorization=f"Bearer {TOKEN}")("GET", "/metrics")[1].splitlines()
    labels = {line.partition('endpoint="')[2].partition('"')[0] for line in lines if 'endpoint="' in line}
    wrong += [f"the label {label}" for label in labels - {COMPLETIONS}]
    return Members(len(HOSTS), tuple(wrong))


# ---- A10: connections

STARTS = [
    b"",
    b"\r\n",
    b"\r\n" * 50,
    b"G",
    b"GET",
    b"GET /health",
    b"GET /health HTTP/1.1",
    b"GET /health HTTP/1.1\r\n",
]
STARTS += [
    b"GET / HTTP/1.1\r\nHost: x\r\n",
    b"POST / HTTP/1.1\r\nContent-Length: 9\r\n",
    b"GET / HTTP/1.1\r\nX: " + b"a" * 9000,
]
STARTS += [start + b"x" for start in STARTS[3:]]


def connections() -> Members:
    """Connections without a whole head end after HEAD_S, heads without an end are refused, and /health responds meanwhile."""
    wrong, tried = [], 0
    with _served() as (_, port), contextlib.ExitStack() as stack, hostile_clients.Health(port) as health:
        opened = [(start, stack.enter_context(hostile_clients.opened(port, start))) for start in STARTS]
        for start, one in opened:
            tried += 1
            if not hostile_clients.closed_within(one, http_server.HEAD_S + 10):
                wrong.append(f"{start[:40]!r} is still open")
        for size in (1, 10, 100, 1000, 10_000, 60_000):
            with hostile_clients.opened(port, b"GET / HTTP/1.1\r\n") as one:
                with contextlib.suppress(OSError):
                    for number in range((1 << 21) // size):
                        one.sendall(f"X{number}: ".encode() + b"a" * size + b"\r\n")
                with contextlib.suppress(OSError):
                    one.settimeout(10)
                    tried += 1
                    wrong += (
                        [] if b" 431 " in one.recv(1 << 16)[:40] else [f"a head of headers of {size} bytes is read"]
                    )
    wrong += [] if health.most_s <= 1.0 else [f"/health took {health.most_s:.2f} s"]
    return Members(tried, tuple(wrong))


# ---- A13: odd files, and words for a log

GARBAGE = [b"\xff\xfe", b"{", b"[1]", b"null", b"NaN,", b"{'a': 1}", b"\x00\x00", b'{"a": 1}}', b'"text"', b"7"]
WORDS = [
    "\x1b[2J gone",
    "\x1b]0;title\x07",
    "a\rb",
    "a\x08\x08b",
    "\u202e txt",
    "\x9b31m red",
    "a\n\n\tb",
    "\x00",
    "a" * 5000,
]


def odd_files() -> Members:
    """Odd files get one sentence that names them, and what they lead to is left as it was."""
    with tempfile.TemporaryDirectory() as folder:
        found = [*_metrics(Path(folder)), *_locks(Path(folder)), *_settings(Path(folder)), *_words()]
    return Members(len(found), tuple(one for one in found if one))


def _sentence(call: Callable[[], Any], named: str) -> str:
    """Returns what is wrong, or an empty text: the call must raise a ValueError of one line that names something."""
    try:
        call()
    except ValueError as error:
        said = str(error)
        return "" if named in said and "\n" not in said and len(said) < 600 else f"{named}: {said[:100]}"
    return f"{named}: nothing was refused"


def _metrics(here: Path) -> Iterator[str]:
    file = here / "metrics.jsonl"
    for garbage in GARBAGE:
        file.write_bytes(b'{"step": 1}\n' + garbage + b"\n")
        yield _sentence(lambda: metric_rows.read(file), f"{file}, line 2")


LOCKS: tuple[Callable[[Path, Path], Any], ...] = (
    lambda lock, target: lock.symlink_to(target),
    lambda lock, target: lock.hardlink_to(target),
    lambda lock, target: lock.symlink_to(target.with_name("not there")),
    lambda lock, target: lock.symlink_to("/dev/null"),
    lambda lock, target: os.mkfifo(lock),
    lambda lock, target: lock.mkdir(),
)


def _locks(here: Path) -> Iterator[str]:
    precious = here / "precious"
    precious.write_text("all of it")
    for number, make in enumerate(LOCKS):
        run = here / f"run{number}"
        run.mkdir()
        make(run / run_folder.LOCK, precious)
        with contextlib.ExitStack() as stack:
            yield _sentence(lambda: run_folder.hold(run, stack), str(run / run_folder.LOCK))
    same = precious.read_text() == "all of it" and not (here / "not there").exists()
    yield "" if same else "the target of a link was changed"


def _settings(here: Path) -> Iterator[str]:
    os.mkfifo(here / "pipe")
    for number, target in enumerate((here / "pipe", "/dev/zero", "/dev/urandom", "/dev/full", here, "/dev/ptmx")):
        link = here / f"config-{number}.json"
        link.symlink_to(target)
        yield _sentence(lambda: json_text.read(link, str(link)), str(link))


def _words() -> Iterator[str]:
    for words in WORDS:
        said = app._plain_words(words)
        yield "" if said.isprintable() and len(said) <= 200 else f"{words!r} is told as {said!r}"


KINDS = {
    "F27": neutral,
    "A01": values,
    "A02": knowing,
    "A03": unread,
    "A04": bodies,
    "A10": connections,
    "A11": hosts,
    "A13": odd_files,
}
