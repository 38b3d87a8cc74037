"""The server gives a request equal bits alone and among 64 clients, and costs the engine no step.

200 requests of the openai client and of curl, whole and streamed, completions and chat, are sent one after the other and then
by 64 clients at a time. Tokens, log-probs, texts and endings must be equal.

Then an engine of 16 slots whose dispatches take at least 20 ms serves 64 clients, and is driven directly with as many requests
at a time. Steps for each token and the wall time are compared, and every token. Clients are killed, and bad requests sent.
At last mixed load runs for --minutes=10, while the memory of the server is watched.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MINUTES = 14.0
SOURCES = ("scripts/slow_engine.py", "scripts/http_clients.py", "scripts/bad_requests.py", "configs/demo_policy/*")
REQUESTS, CLIENTS = 200, 64
LOAD = 1500  # requests of the comparison with the engine alone
KILLS = 20
TOKEN = "of-the-show"
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
RAW = (b"", b"{", b"[1", b"\xff", b'{"prompt": "1"} x', b"null", b'{"prompt": NaN}')
GROWTH = 8 << 20  # bytes that a server of constant memory may gain: heaps of threads fill up


def show(record) -> None:
    sys.path[:0] = [str(record.root / "scripts")]
    minutes = float(record.options.get("minutes", 10))
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        _policies(record, here)
        _bits(record, here)
        with _slow(record, here) as port:
            _against_the_engine(record, here, port)
            _kills(record, here, port)
            _bad(record, port)
            _memory(record, port, minutes)


def _policies(record, here: Path) -> None:
    """Makes two policies of the demo's weights: one with a chat template, and one whose rollouts do not end by themselves."""
    for name in ("chat", "endless"):
        shutil.copytree(record.root / "configs" / "demo_policy", here / name)
    (here / "chat" / "chat_template.jinja").write_text(TEMPLATE)
    for name in ("config.json", "generation_config.json"):
        file = here / "endless" / name
        file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": 14}))
    file = here / "endless" / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token": "<unk>"}))


class _Process:
    """A process that serves until the block ends. `begins`: how the line that names the port begins."""

    def __init__(self, record, command: list[str], begins: str):
        env = {**os.environ, "PYTHONPATH": str(record.root), "JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1"}
        self._process = subprocess.Popen(
            [sys.executable, *command], cwd=record.root, env=env, stdout=subprocess.PIPE, text=True
        )
        self._begins = begins

    def __enter__(self) -> int:
        for line in self._process.stdout:
            if line.startswith(self._begins):
                return int(line.strip().removesuffix("/v1").rpartition(":")[2])
        raise RuntimeError(f"the server ended with exit code {self._process.wait()} before it served")

    def __exit__(self, *_) -> None:
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(60)
        finally:
            self._process.kill()
            self._process.stdout.close()


def _slow(record, here: Path) -> _Process:
    return _Process(record, ["scripts/slow_engine.py", "serve", str(here / "endless"), str(here / "events")], "serving")


# ---- equal bits


def _bits(record, here: Path) -> None:
    import http_clients
    import openai

    command = ["-m", "jaxrl_post", "serve", f"--model={here / 'chat'}", "--port=0", f"--token={TOKEN}"]
    with _Process(record, command, "serving") as port:
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=TOKEN, max_retries=0)
        work = [_call(client, port, kind, body) for kind, body in _mixed()]
        alone = [one() for one in work]
        order = list(range(len(work)))
        random.Random(1).shuffle(order)
        company = http_clients.together(CLIENTS, [work[place] for place in order])
        caller = http_clients.Caller(port, TOKEN)
        counts = caller.metrics()
        caller.close()
        client.close()
    together = dict(zip(order, company))
    differ = [place for place, one in enumerate(alone) if one != together[place]]
    kinds = [kind for kind, _ in _mixed()]
    for kind in sorted(set(kinds)):
        record.figure(f"bits.{kind}", kinds.count(kind), at_least=10)
    record.figure("bits.requests", len(alone), at_least=REQUESTS)
    record.figure("bits.clients_at_a_time", CLIENTS, at_least=64)
    record.figure("bits.requests_that_differ", differ, equals=[])
    record.figure("bits.rollouts", sum(len(one["choices"]) for one in alone), at_least=REQUESTS)
    distinct = {tuple(choice["tokens"]) for one in alone for choice in one["choices"]}
    record.figure("bits.distinct_rollouts", len(distinct), at_least=50)
    record.figure("bits.tokens", int(counts["jaxrl_post_tokens_total"]))


def _mixed() -> list[tuple[str, dict]]:
    """Returns kinds and bodies of requests."""
    dice, out = random.Random(0), []
    for index in range(REQUESTS):
        kind = ("completion", "completion_stream", "chat", "chat_stream", "curl")[index % 5]
        sums = [f"{dice.randrange(100)}+{dice.randrange(100)}=" for _ in range(dice.choice((1, 1, 2)))]
        body = {
            "model": "chat",
            "n": dice.choice((1, 1, 2, 4)),
            "seed": index // 3,
            "max_tokens": dice.randrange(1, 48),
            "temperature": dice.choice((0, 0.7, 1.0, 1.5)),
        }
        body |= dice.choice(({}, {"top_p": 0.8}, {"stop": ["#", "+1"]}))
        own = dice.choice(({}, {"top_k": 4}, {"stop_token_ids": [3]})) | {"return_token_ids": True}
        if kind.startswith("chat"):
            body |= {"messages": [{"role": "user", "content": sums[0]}], "logprobs": True}
        else:
            body |= {"prompt": sums if len(sums) > 1 else sums[0], "logprobs": 0}
        out.append((kind, {"body": body, "own": own}))
    return out


def _call(client, port: int, kind: str, asked: dict):
    """Returns what sends a request and returns what must be equal of its response."""
    body, own = asked["body"], asked["own"]

    def curl() -> dict:
        command = ["curl", "-sS", "--fail-with-body", f"http://127.0.0.1:{port}/v1/completions", "-d", "@-"]
        command += ["-H", f"Authorization: Bearer {TOKEN}", "-H", "Content-Type: application/json"]
        done = subprocess.run(command, input=json.dumps(body | own), capture_output=True, text=True, timeout=120)
        if done.returncode:
            raise ValueError(f"curl exited {done.returncode}: {done.stdout} {done.stderr}")
        return _whole([json.loads(done.stdout)])

    def openai() -> dict:
        create = client.chat.completions.create if kind.startswith("chat") else client.completions.create
        if not kind.endswith("stream"):
            return _whole([create(**body, extra_body=own).model_dump()])
        return _whole([chunk.model_dump() for chunk in create(**body, extra_body=own, stream=True)])

    return curl if kind == "curl" else openai


def _whole(chunks: list[dict]) -> dict:
    """Returns seed, versions and choices of a response, or of the chunks of a stream."""
    choices: dict[int, dict] = {}
    for one in (one for chunk in chunks for one in chunk["choices"]):
        into = choices.setdefault(one["index"], {"text": "", "tokens": [], "logprobs": []})
        said = one.get("message") or one.get("delta") or {}
        into["text"] += one.get("text") or said.get("content") or ""
        into["tokens"] += one.get("token_ids") or []
        into["logprobs"] += _scores(one.get("logprobs") or {})
        if one["finish_reason"]:
            into |= {name: one.get(name) for name in ("finish_reason", "stop_reason", "weight_versions")}
    return {"seed": chunks[-1]["seed"], "choices": [choices[index] for index in sorted(choices)]}


def _scores(logprobs: dict) -> list[float]:
    told = logprobs.get("content")
    return [one["logprob"] for one in told] if told is not None else logprobs.get("token_logprobs") or []


# ---- against the engine driven directly


def _against_the_engine(record, here: Path, port: int) -> None:
    import http_clients

    bodies, file = _load(LOAD), here / "load.json"
    file.write_text(json.dumps(bodies))
    caller = http_clients.Caller(port, TOKEN)
    http_clients.posted(port, TOKEN, CLIENTS, "/v1/completions", bodies[:CLIENTS])
    before, begun = caller.metrics(), time.monotonic()
    found = http_clients.posted(port, TOKEN, CLIENTS, "/v1/completions", bodies)
    seconds, after = time.monotonic() - begun, caller.metrics()
    caller.close()
    told = subprocess.run(
        [sys.executable, "scripts/slow_engine.py", "direct", str(here / "endless"), str(file)],
        cwd=record.root,
        env={**os.environ, "PYTHONPATH": str(record.root), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=900,
        check=True,
    )
    direct = json.loads(told.stdout.splitlines()[-1])
    choices = [json.loads(one)["choices"][0] for one in found]
    same = [[c["token_ids"], c["logprobs"]["token_logprobs"]] == r for c, r in zip(choices, direct["rollouts"])]
    tokens, spent = sum(len(c["token_ids"]) for c in choices), lambda name: after[name] - before[name]
    record.figure("engine.requests", len(choices), at_least=LOAD)
    record.figure("engine.rollouts_that_differ_from_the_engine_alone", same.count(False), equals=0)
    for name, value in (("served", spent("jaxrl_post_engine_steps_total")), ("direct", direct["steps"])):
        record.figure(f"engine.{name}.steps_per_token", value / tokens)
    ratio = spent("jaxrl_post_engine_steps_total") / direct["steps"]
    record.figure("engine.steps_per_token_over_direct", ratio, at_most=1.05)
    record.figure("engine.served.seconds", seconds)
    record.figure("engine.direct.seconds", direct["seconds"])
    record.figure("engine.wall_ratio_at_20_ms_a_dispatch", direct["seconds"] / seconds, at_least=0.9)
    cpu = spent("process_cpu_seconds_total")
    record.figure("engine.served.cpu_ms_per_request", 1e3 * cpu / len(choices))
    record.figure("engine.direct.cpu_ms_per_request", 1e3 * direct["cpu_s"] / len(choices))
    record.figure("server.cpu_ms_per_request", 1e3 * (cpu - direct["cpu_s"]) / len(choices))
    record.figure("server.cpu_ms_per_token", 1e3 * (cpu - direct["cpu_s"]) / tokens)


def _load(count: int) -> list[dict]:
    """Returns bodies with one prompt of token ids and one sample, of lengths as of real traffic."""
    dice, out = random.Random(2), []
    for index in range(count):
        prompt = [dice.randrange(1, 14) for _ in range(dice.randrange(4, 32))]
        body = {"prompt": prompt, "seed": index, "max_tokens": min(96, 16 + int(dice.expovariate(1 / 40)))}
        out.append(body | {"temperature": dice.choice((0.7, 1.0)), "return_token_ids": True, "logprobs": 0})
    return out


# ---- clients that are killed, and bad requests


def _kills(record, here: Path, port: int) -> None:
    """Kills curl in the middle of its response, and counts the dispatches that begin until its slots are free."""
    import http_clients

    caller, late, tries = http_clients.Caller(port, TOKEN), [], 0
    while len(late) < KILLS and tries < 3 * KILLS:
        tries += 1
        late += _killed(here, port, caller, random.Random(tries), stream=tries % 2 == 0)
    caller.close()
    record.figure("kills.clients", len(late), at_least=10)
    record.figure("kills.most_dispatches_begun_until_the_slots_are_free", max(late, default=99), at_most=1)


def _killed(here: Path, port: int, caller, dice: random.Random, *, stream: bool) -> list[int]:
    """Kills a client. Returns the dispatches that began until its slots were free, or nothing where it had ended before."""
    body = {"prompt": [1, 2, 3], "max_tokens": 120, "n": 4, "stream": stream}
    command = ["curl", "-sSN", f"http://127.0.0.1:{port}/v1/completions", "-d", json.dumps(body)]
    command += ["-H", f"Authorization: Bearer {TOKEN}"]
    parked = len(_times(here, "parked"))
    client = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while client.poll() is None and caller.metrics()["jaxrl_post_pending"] < body["n"]:
        time.sleep(0.002)
    time.sleep(0.15 * dice.random())
    client.kill()
    client.wait()
    killed = time.monotonic()
    while caller.metrics()["jaxrl_post_pending"]:
        if time.monotonic() > killed + 30:
            raise RuntimeError("the slots of a killed client did not get free within 30 s")
        time.sleep(0.01)
    free = _times(here, "parked")[parked:]
    return [sum(killed < at < free[0] for at in _times(here, "dispatch"))] if free else []


def _times(here: Path, kind: str) -> list[float]:
    """Returns when the engine of the server did something."""
    lines = [line.split() for line in (here / "events").read_text().split("\n")[:-1]]
    return [float(at) for what, at in lines if what == kind]


def _bad(record, port: int) -> None:
    import bad_requests
    import http_clients

    caller, wrong, count = http_clients.Caller(port, TOKEN), [], 0
    cases = [(path, body, named) for (path, body), named in bad_requests.BAD]
    cases += [("/v1/completions", data, "") for data in RAW] + [("/v1/embeddings", {}, "/v1/completions")]
    for path, body, named in cases:
        status, data = caller.ask("POST", path, body)
        told = json.loads(data).get("error", {}) if 400 <= status < 500 else {}
        sentence = told.get("message", "")
        good = sentence and named in sentence and "\n" not in sentence and len(sentence) < 400
        good = good and {"message", "type", "param", "code"} == told.keys() and "Traceback" not in sentence
        wrong += [] if good else [f"{status} {str(body)[:80]}: {data[:200]!r}"]
        count += 1
    caller.close()
    stranger = http_clients.Caller(port, "another")
    record.figure("bad.without_the_token", stranger.ask("GET", "/v1/models")[0], equals=401)
    stranger.close()
    record.figure("bad.requests", count, at_least=60)
    record.figure("bad.without_one_sentence_of_4xx", wrong, equals=[])


# ---- memory


def _memory(record, port: int, minutes: float) -> None:
    """Runs mixed load, and compares the memory of the last fifth with that of the second fifth."""
    import http_clients

    caller, sizes, served = http_clients.Caller(port, TOKEN), [], 0
    end, dice = time.monotonic() + 60 * minutes, random.Random(4)
    begun = caller.metrics()["jaxrl_post_requests_total"]
    while time.monotonic() < end:
        bodies = _load(200)
        for body in bodies:
            body |= {"seed": dice.randrange(1 << 40), "n": dice.choice((1, 1, 2))}
            body |= dice.choice(({}, {"stream": True}, {"stop": "12"}, {"timeout": 0.2, "stream": True}))
        http_clients.posted(port, TOKEN, CLIENTS, "/v1/completions", bodies)
        for _, (case, _) in zip(range(5), _some_bad(dice)):
            caller.ask("POST", *case)
        counts = caller.metrics()
        sizes.append(counts["process_resident_memory_bytes"])
    served = counts["jaxrl_post_requests_total"] - begun
    caller.close()
    fifth = max(1, len(sizes) // 5)
    growth = statistics.mean(sizes[-fifth:]) - statistics.mean(sizes[fifth : 2 * fifth])
    record.figure("memory.minutes", minutes, at_least=10)
    record.figure("memory.requests", int(served), at_least=1000)
    record.figure("memory.resident_bytes", int(sizes[-1]))
    record.figure("memory.growth_bytes", int(growth), at_most=GROWTH)
    record.figure("memory.pending_at_the_end", int(counts["jaxrl_post_pending"]), equals=0)


def _some_bad(dice: random.Random):
    import bad_requests

    while True:
        yield dice.choice(bad_requests.BAD)
