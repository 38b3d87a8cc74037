"""The server gives a request equal bits alone and among 64 clients, and costs the engine no step.

200 requests of the openai client and of curl, whole and streamed, completions and chat, are sent one after the other and then
by 64 clients at a time. Tokens, log-probs, texts and endings must be equal.

Then an engine of 16 slots whose dispatches take at least 20 ms serves 64 clients, and is driven directly with as many requests
at a time. Steps for each token and the wall time are compared, and every token. Clients are killed, and bad requests sent.

Hostile clients (scripts/hostile_clients.py) send bodies that take long to read, while /health is asked for, values that no
engine may meet, and connections that say nothing or read nothing. Places must be free within a dispatch of the last token.
At last mixed load runs for --minutes=10 with clients that are killed, while the memory of the server is watched.
"""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import statistics
import subprocess
import tempfile
import threading
import time
from pathlib import Path

import bad_requests
import hostile_clients
import http_clients

MINUTES = 14.0
SOURCES = ("scripts/slow_engine.py", "scripts/http_clients.py", "scripts/bad_requests.py", "scripts/hostile_clients.py")
SOURCES += ("configs/demo_policy/*",)
REQUESTS, CLIENTS = 200, 64
LOAD = 1500  # requests of the comparison with the engine alone
KILLS, DROPPED = 20, 6  # clients that are killed: one at a time, and in each batch of mixed load
SILENT, PLACES = 400, 272  # connections that say nothing; rollouts that run or wait at most
HEALTH_S = 1.0  # until /health responds
TOKEN = "of-the-show"
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
RAW = (b"", b"{", b"[1", b"\xff", b'{"prompt": "1"} x', b"null", b'{"prompt": NaN}')
GROWTH = 8 << 20  # bytes that a server of constant memory may gain: heaps of threads fill up


def show(record) -> None:
    minutes = float(record.options.get("minutes", 10))
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        _policies(record, here)
        _bits(record, here)
        _hostile(record, here)
        slow = ("scripts/slow_engine.py", "serve", str(here / "endless"), str(here / "events"))
        with http_clients.Served(record.root, *slow) as port:
            _against_the_engine(record, here, port)
            _kills(record, here, port)
            _bad(record, port)
            _unread(record, here, port)
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


def _chat(record, here: Path, *more: str) -> http_clients.Served:
    command = ("-m", "jaxrl_post", "serve", f"--model={here / 'chat'}", "--port=0", f"--token={TOKEN}", *more)
    return http_clients.Served(record.root, *command)


# ---- equal bits


def _bits(record, here: Path) -> None:
    import openai

    with _chat(record, here) as port:
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
    bodies, file = _load(LOAD), here / "load.json"
    file.write_text(json.dumps(bodies))
    caller = http_clients.Caller(port, TOKEN)
    http_clients.posted(port, TOKEN, CLIENTS, "/v1/completions", bodies[:CLIENTS])
    before, begun = caller.metrics(), time.monotonic()
    found = http_clients.posted(port, TOKEN, CLIENTS, "/v1/completions", bodies)
    seconds, after = time.monotonic() - begun, caller.metrics()
    caller.close()
    env = {"PYTHONPATH": str(record.root), "JAX_PLATFORMS": "cpu"}
    told = record.said("scripts/slow_engine.py", "direct", here / "endless", file, timeout_s=900, env=env)
    direct = json.loads(told.splitlines()[-1])
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
    lines = [line.split() for line in (here / "events").read_text().split("\n")[:-1]]
    return [float(at) for what, at in lines if what == kind]


def _bad(record, port: int) -> None:
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


# ---- hostile clients


def _hostile(record, here: Path) -> None:
    """Long bodies, wild values and silent connections, each kind beside a client that asks for /health."""
    with _chat(record, here, "--tool-calls=hermes") as port:
        caller = http_clients.Caller(port, TOKEN)
        slowest, wrong, bodies = 0.0, [], hostile_clients.bodies()
        for name, path, data in bodies:
            with hostile_clients.Health(port) as health:
                status, _ = caller.ask("POST", path, data)
            slowest = max(slowest, health.most_s)
            wrong += [] if status in (400, 413) else [f"{name}: {status}"]
            wrong += [] if health.most_s <= HEALTH_S else [f"{name}: /health took {health.most_s:.2f} s"]
        with hostile_clients.Health(port) as health:
            http_clients.together(8, [lambda one=one: _sent(port, *one[1:]) for one in bodies])
        record.figure("hostile.bodies", len(bodies), at_least=20)
        record.figure("hostile.bodies_not_refused_or_slow", wrong, equals=[])
        record.figure("hostile.slowest_health_s", slowest, at_most=HEALTH_S)
        record.figure("hostile.slowest_health_with_eight_at_once_s", health.most_s, at_most=HEALTH_S)
        values = hostile_clients.values()
        statuses = [caller.ask("POST", path, body)[0] for path, body in values]
        record.figure("hostile.values", len(values), at_least=60)
        record.figure("hostile.values_neither_refused_nor_sampled", len(set(statuses) - {200, 400}), equals=0)
        record.figure("hostile.values_refused", statuses.count(400), at_least=50)
        with hostile_clients.Health(port) as health, contextlib.ExitStack() as stack:
            silent = [stack.enter_context(hostile_clients.opened(port)) for _ in range(SILENT)]
            ended = [hostile_clients.closed_within(one, 40.0) for one in silent]
        record.figure("hostile.silent_connections", len(silent), at_least=400)
        record.figure("hostile.silent_connections_left_open", ended.count(False), equals=0)
        record.figure("hostile.slowest_health_beside_silence_s", health.most_s, at_most=HEALTH_S)
        record.figure("hostile.ended_threads", caller.metrics()["jaxrl_post_engine_restarts_total"], equals=0)
        caller.close()


def _sent(port: int, path: str, data: bytes) -> None:
    caller = http_clients.Caller(port, TOKEN)
    caller.ask("POST", path, data)
    caller.close()


def _unread(record, here: Path, port: int) -> None:
    """A stream of all places that nobody reads: its places are free once the engine is done, and its deadline cuts it."""
    caller, limit = http_clients.Caller(port, TOKEN), 30
    body = {"prompt": [1, 2, 3], "max_tokens": 120, "n": PLACES, "stream": True, "timeout": limit}
    data = json.dumps(body | {"logprobs": 0, "return_token_ids": True}).encode()
    begun = time.monotonic()
    with hostile_clients.opened(port, hostile_clients.request("/v1/completions", data, TOKEN), 4096) as one:
        filled = hostile_clients.waited(lambda: caller.metrics()["jaxrl_post_pending"] > PLACES // 2, 30.0)
        free = hostile_clients.waited(lambda: not caller.metrics()["jaxrl_post_pending"], limit)
        dispatches = len(_times(here, "dispatch"))
        status, _ = caller.ask("POST", "/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 1, "n": PLACES})
        record.figure("unread.places_were_taken_and_are_free", filled and free, equals=True)
        record.figure("unread.status_of_a_request_for_all_places", status, equals=200)
        record.figure("unread.dispatches_before_they_were_free", dispatches)
        hostile_clients.waited(lambda: time.monotonic() > begun + limit + 10, 60.0)  # it is not read before
        ended = hostile_clients.closed_within(one, 10.0)
    record.figure("unread.stream_is_cut_behind_its_deadline", ended, equals=True)
    caller.close()


# ---- memory


def _memory(record, port: int, minutes: float) -> None:
    """Runs mixed load, and compares the memory of the last fifth with that of the second fifth."""
    caller, sizes, served, dropped = http_clients.Caller(port, TOKEN), [], 0, 0
    end, dice = time.monotonic() + 60 * minutes, random.Random(4)
    begun = caller.metrics()["jaxrl_post_requests_total"]
    while time.monotonic() < end:
        bodies = _load(200)
        for body in bodies:
            body |= {"seed": dice.randrange(1 << 40), "n": dice.choice((1, 1, 2))}
            body |= dice.choice(({}, {"stream": True}, {"stop": "12"}, {"timeout": 0.2, "stream": True}))
        killed = [json.dumps(dice.choice(bodies) | {"max_tokens": 90, "n": 2}).encode() for _ in range(DROPPED)]
        sent = [hostile_clients.request("/v1/completions", one, TOKEN) for one in killed]
        goes = [threading.Thread(target=hostile_clients.dropped, args=(port, one, dice.random())) for one in sent]
        for one in goes:
            one.start()
        http_clients.posted(port, TOKEN, CLIENTS, "/v1/completions", bodies)
        for one in goes:
            one.join()
        dropped += DROPPED
        for _, (case, _) in zip(range(5), _some_bad(dice)):
            caller.ask("POST", *case)
        counts = caller.metrics()
        sizes.append(counts["process_resident_memory_bytes"])
    served = counts["jaxrl_post_requests_total"] - begun
    freed = hostile_clients.waited(lambda: not caller.metrics()["jaxrl_post_pending"], 10.0)
    caller.close()
    fifth = max(1, len(sizes) // 5)
    growth = statistics.mean(sizes[-fifth:]) - statistics.mean(sizes[fifth : 2 * fifth])
    record.figure("memory.minutes", minutes, at_least=10)
    record.figure("memory.requests", int(served), at_least=1000)
    record.figure("memory.resident_bytes", int(sizes[-1]))
    record.figure("memory.growth_bytes", int(growth), at_most=GROWTH)
    record.figure("memory.killed_clients", dropped, at_least=20)
    record.figure("memory.clients_seen_to_leave", int(counts["jaxrl_post_left_total"]), at_least=20)
    record.figure("memory.ended_threads", int(counts["jaxrl_post_engine_restarts_total"]), equals=0)
    record.figure("memory.places_free_at_the_end", freed, equals=True)


def _some_bad(dice: random.Random):
    while True:
        yield dice.choice(bad_requests.BAD)
