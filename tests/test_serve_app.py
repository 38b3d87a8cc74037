"""The server over real sockets: equal bits alone, in company, streamed and from the engine itself; limits and endings."""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import hashlib
import http.client
import json
import random
import socket
import sys
import threading
import time

import jax
import numpy as np
import openai
import pytest
from served import ROOT, TOKEN, bits, mixed, policy, served

from jaxrl_post.ring.types import LEAST_OF_LAW, Finish, Request, Rollout, RolloutId
from jaxrl_post.serve import http_server, request_bodies
from jaxrl_post.serve.schema import Refusal

sys.path.insert(0, str(ROOT / "scripts"))

import bad_requests

pytestmark = pytest.mark.usefixtures("quick_compilation")

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.fixture(scope="module")
def own():
    return policy()


@pytest.fixture(scope="module")
def server(own):
    with served(own) as one:
        yield one


def whole(chunks):
    """The choices of a stream, joined."""
    out = {}
    for chunk in chunks:
        for one in chunk["choices"]:
            into = out.setdefault(
                one["index"], {"index": one["index"], "text": "", "token_ids": [], "stop_reason": None}
            )
            into["text"] += one["text"]
            into["token_ids"] += one["token_ids"]
            scores = into.setdefault("logprobs", {"tokens": [], "token_logprobs": [], "top_logprobs": None})
            for name in ("tokens", "token_logprobs"):
                scores[name] += one["logprobs"][name]
            into["finish_reason"] = one["finish_reason"]
            into["stop_reason"] = one.get("stop_reason")
    return {"choices": [out[index] for index in sorted(out)]}


def test_equal_bits_alone_in_company_and_streamed(server):
    request_bodies = mixed(24)
    alone = [bits(server.post(COMPLETIONS, **body)) for body in request_bodies]
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        order = list(range(len(request_bodies)))
        random.Random(1).shuffle(order)
        together = dict(zip(order, pool.map(lambda i: bits(server.post(COMPLETIONS, **request_bodies[i])), order)))
        streamed = list(pool.map(lambda body: bits(whole(server.events(COMPLETIONS, **body))), request_bodies))
    assert [together[i] for i in range(len(request_bodies))] == alone == streamed
    assert {one[4] for response in alone for one in response} == {"stop", "length"}
    assert len({tuple(one[2]) for response in alone for one in response}) > 20


@pytest.mark.parametrize("law", [{"temperature": LEAST_OF_LAW}, {"top_p": LEAST_OF_LAW}], ids=str)
def test_the_least_law_samples_the_likeliest_token_with_a_log_prob_of_0(server, law):
    """A float32 that is too small would give a log-prob that is no number, and no response."""
    body = {"prompt": "3+1=", "seed": 3, "n": 4, "logprobs": 0, "return_token_ids": True}
    greedy = server.post(COMPLETIONS, **body | {"temperature": 0})
    found = server.post(COMPLETIONS, **body | law)
    assert [one["token_ids"] for one in found["choices"]] == [one["token_ids"] for one in greedy["choices"]]
    assert {score for one in found["choices"] for score in one["logprobs"]["token_logprobs"]} == {0.0}


def test_the_bits_are_those_of_the_engine_without_a_server(server):
    """Another engine of the same program, each rollout alone in it; its text and its end are read here by hand."""
    other, request_bodies = policy(), mixed(12)
    for body in request_bodies:
        response = server.post(COMPLETIONS, **body)
        sums = [body["prompt"]] if isinstance(body["prompt"], str) else body["prompt"]
        law = other.sampling_with(
            {name: body[name] for name in ("temperature", "top_p", "top_k") if name in body}
            | ({"stop_strings": (body["stop"],)} if "stop" in body else {})
            | ({"stop_ids": tuple(body["stop_token_ids"])} if "stop_token_ids" in body else {})
        )
        for one in response["choices"]:
            prompt = other.prompts([sums[one["index"] // body["n"]]])[0]
            sample, tokens = one["index"] % body["n"], prompt.tokens.tobytes()
            named = hashlib.blake2b(tokens, digest_size=16).hexdigest()
            request = Request(
                rollout_id=RolloutId(0, "eval", 0, prompt.id, 0),
                prompt=prompt,
                seed=RolloutId(body["seed"], "eval", 0, named, sample).seed(),
                max_tokens=body["max_tokens"],
                sampling=law,
            )
            engine = other.engine()
            engine.reset()
            engine.submit([request])
            (rollout,) = [rollout for _ in range(40) if engine.pending for rollout in engine.step()]
            assert one["token_ids"] == rollout.tokens.tolist() and one["prompt_token_ids"] == prompt.tokens.tolist()
            assert np.array_equal(np.float32(one["logprobs"]["token_logprobs"]), rollout.logprobs)
            text = other.tokenizer.decode(rollout.tokens)
            if "stop" in body:
                text = text.partition("#")[0]
            elif one["stop_reason"] is not None:
                text = other.tokenizer.decode(rollout.tokens[:-1])
                assert one["stop_reason"] == rollout.tokens[-1] in body["stop_token_ids"]
            assert one["text"] == text
            assert one["finish_reason"] == ("length" if rollout.finish.value == "length" else "stop")
            assert one["weight_versions"] == [0] and set(one["token_versions"]) == {0}
        assert response["sampling_law"] == {"temperature": law.temperature, "top_k": law.top_k, "top_p": law.top_p}


def test_a_drawn_seed_is_told_and_repeats_the_response(server):
    body = dict(prompt="12+34=", max_tokens=12, temperature=2.0, n=4, return_token_ids=True, logprobs=0)
    first, other = server.post(COMPLETIONS, **body), server.post(COMPLETIONS, **body)
    assert bits(first) != bits(other) and first["seed"] != other["seed"]
    again = server.post(COMPLETIONS, **body, seed=first["seed"])
    assert bits(again) == bits(first) and again["system_fingerprint"] == first["system_fingerprint"]


def test_openai_s_client(server):
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key=TOKEN, max_retries=0)
    with client:
        assert [one.id for one in client.models.list()] == ["demo"] and client.models.retrieve("demo").id == "demo"
        given = dict(model="demo", prompt="1+2=", max_tokens=9, seed=5, n=2)
        found = client.completions.create(**given)
        assert found.usage.completion_tokens == sum(
            len(one.text) + (one.finish_reason == "stop") for one in found.choices
        )
        stream = client.completions.create(**given, stream=True, stream_options={"include_usage": True})
        texts, counts = ["", ""], None
        for chunk in stream:
            counts = chunk.usage or counts
            for one in chunk.choices:
                texts[one.index] += one.text
        assert texts == [one.text for one in found.choices] and counts == found.usage
        with pytest.raises(openai.BadRequestError, match="temperature=-1"):
            client.completions.create(**given, temperature=-1)
        with pytest.raises(openai.NotFoundError, match="the only one is 'demo'"):
            client.completions.create(**given | {"model": "other"})


@pytest.mark.parametrize(
    "case, named", bad_requests.BAD, ids=[f"{i}-{named}" for i, (_, named) in enumerate(bad_requests.BAD)]
)
def test_a_bad_request_gets_one_sentence(server, case, named):
    status, _, data = server.ask("POST", *case)
    told = json.loads(data)["error"]
    assert status in (400, 404) and named in told["message"] and "\n" not in told["message"], told
    assert len(told["message"]) < 400 and told["code"] == status


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[1", b'{"prompt": "\xff"}', b'{"prompt": ' + b"[" * 100 + b"]" * 100 + b"}"]
)
def test_a_body_that_is_no_json_gets_one_sentence(server, data):
    status, _, body = server.ask("POST", COMPLETIONS, data)
    assert status == 400 and json.loads(body)["error"]["message"].startswith("the body")


def test_doors_and_paths(server):
    for token in ("", "wrong"):
        status, headers, data = server.ask("POST", COMPLETIONS, {"prompt": "1+2="}, token=token)
        assert status == 401 and headers["www-authenticate"] == "Bearer"
        assert "Authorization: Bearer" in json.loads(data)["error"]["message"]
    assert server.ask("GET", "/health", token="")[0] == 200
    assert server.ask("GET", "/metrics", token="")[0] == 401
    status, _, data = server.ask("GET", "/v1/embeddings")
    assert status == 404 and "/v1/completions" in json.loads(data)["error"]["message"]
    status, _, data = server.ask("GET", COMPLETIONS)
    assert status == 405 and "POST" in json.loads(data)["error"]["message"]
    assert server.ask("GET", "/v1/models/other")[0] == 404


def test_metrics_count(server):
    before = {
        name: server.metric(f"jaxrl_post_{name}_total") for name in ("tokens", "engine_steps", "engine_dispatches")
    }
    found = server.post(COMPLETIONS, prompt="1+2=", max_tokens=8, n=3)
    after = {name: server.metric(f"jaxrl_post_{name}_total") for name in before}
    assert after["tokens"] - before["tokens"] == found["usage"]["completion_tokens"]
    assert after["engine_steps"] > before["engine_steps"] and after["engine_dispatches"] > before["engine_dispatches"]
    assert server.metric("jaxrl_post_pending") == 0 and server.metric("process_resident_memory_bytes") > 1e6


def waited(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came to be"
        time.sleep(0.01)


LONG = {"max_tokens": 55, "prompt": [1, 11, 2, 12], "seed": 1}


def endless():
    """A policy whose rollouts have as many tokens as they may."""
    made = policy()
    made.sampling = dataclasses.replace(made.sampling, eos_ids=())
    return made


@pytest.fixture(scope="module")
def other():
    return endless()


@pytest.fixture
def slow(other):
    """A server whose dispatches take at least 50 ms, and what happened in its engine: (dispatches, ids parked)."""
    with served(other, queue=4) as one:
        engine, parked, count = one.server.engine, [], {"dispatches": 0}
        real, tell = engine.park, engine.meanwhile

        def dispatched():
            count["dispatches"] += 1
            tell()
            time.sleep(0.05)

        def park(ids):
            parked.append((count["dispatches"], list(ids)))
            return real(parked[-1][1])

        engine.meanwhile, engine.park = dispatched, park
        yield one, count, parked
        engine.meanwhile = tell
        del engine.park


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_frees_its_slot_within_a_dispatch(slow, stream):
    one, count, parked = slow
    connection = http.client.HTTPConnection("127.0.0.1", one.port, timeout=60)
    body = json.dumps(LONG | {"n": 3, "stream": stream})
    connection.request("POST", COMPLETIONS, body, {"Authorization": f"Bearer {TOKEN}"})
    waited(lambda: sum(one.server.engine.capacity.slots) == 5)
    connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # as of a killed process
    left = count["dispatches"]
    connection.sock.close()
    connection.close()
    waited(lambda: parked)
    assert parked[0][0] <= left + 1 and len(parked[0][1]) == 3
    waited(lambda: sum(one.server.engine.capacity.slots) == 8)
    waited(lambda: one.metric("jaxrl_post_left_total") == 1)
    assert one.metric("jaxrl_post_pending") == 0


def test_a_full_queue_is_refused_and_a_deadline_ends_a_request(slow):
    one, _, parked = slow
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        late = pool.submit(one.ask, "POST", COMPLETIONS, LONG | {"n": 12, "timeout": 0.4})
        waited(lambda: one.server.service.pending == 12)
        status, headers, data = one.ask("POST", COMPLETIONS, LONG)
        assert status == 429 and headers["retry-after"] == "1" and "at most 12" in json.loads(data)["error"]["message"]
        status, _, data = late.result()
    assert status == 408 and "deadline" in json.loads(data)["error"]["message"] and len(parked[0][1]) == 12
    events = one.ask("POST", COMPLETIONS, LONG | {"timeout": 0.3, "stream": True})[2].decode().strip().split("\n\n")
    assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == 408
    status, _, data = one.ask("POST", COMPLETIONS, LONG | {"n": 13})
    assert status == 400 and "at most 12" in json.loads(data)["error"]["message"]
    assert one.post(COMPLETIONS, **LONG | {"max_tokens": 2})["usage"]["completion_tokens"] == 2


def test_a_rollout_that_has_ended_frees_its_place_whether_it_is_read_or_not(other):
    """Two requests of all places, neither of them read; then one that needs them."""
    with served(other, queue=4) as one:
        service, body = one.server.service, LONG | {"n": 12, "stream": True, "max_tokens": 9}
        waited(lambda: service._loop is not None)  # the server's thread may have just begun
        tickets = []
        for _ in range(2):
            opened = asyncio.run_coroutine_threadsafe(service.open(request_bodies.completion(body)), service._loop)
            tickets.append(opened.result(60))
            assert service.pending == 12
            waited(lambda: service.pending == 0)
        assert len(one.post(COMPLETIONS, **body | {"stream": False})["choices"]) == 12
        for ticket in tickets:
            service._loop.call_soon_threadsafe(service.close, ticket)
        waited(lambda: not service._open)
    assert service.pending == 0


def test_a_server_that_stops_ends_its_streams_with_an_event(other, monkeypatch):
    monkeypatch.setattr(http_server, "LAST_WORD_S", 0.2)
    with served(other) as one, concurrent.futures.ThreadPoolExecutor(2) as pool:
        engine, tell = one.server.engine, one.server.engine.meanwhile
        engine.meanwhile = lambda: (tell(), time.sleep(0.3))
        request_bodies = [
            pool.submit(one.ask, "POST", COMPLETIONS, LONG | {"stream": stream}) for stream in (True, False)
        ]
        waited(lambda: one.server.service.pending == 2)
        one.server.stop()
        stream, whole_one = (one.result() for one in request_bodies)
        engine.meanwhile = tell
    last = json.loads(stream[2].decode().strip().split("\n\n")[-1].removeprefix("data: "))
    assert last["error"]["code"] == 503 == whole_one[0] and "the server is stopping" in last["error"]["message"]


@pytest.mark.parametrize("host", ["x/evil?", "[", "a b", "]:x", "\xff"])
def test_a_host_is_no_label_and_no_traceback(server, host):
    head = (
        f"POST {COMPLETIONS} HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {TOKEN}\r\nContent-Length: 2\r\n\r\n{{}}"
    )
    with socket.create_connection(("127.0.0.1", server.port)) as one:
        one.sendall(head.encode("latin-1"))
        assert one.recv(1 << 16).startswith(b"HTTP/1.1 400")
    lines = server.ask("GET", "/metrics")[2].decode().splitlines()
    endpoints = {line.partition('endpoint="')[2].partition('"')[0] for line in lines if "endpoint=" in line}
    assert endpoints <= {COMPLETIONS, CHAT}


def test_new_weights_sample_from_the_next_dispatch_on(slow):
    """Tokens of the old version are those of a run without a swap. Those of the new version are sampled again, bit for
    bit, by an engine of the new weights that is given the text before them."""
    one, count, _ = slow
    fresh, body = endless(), LONG | {"return_token_ids": True, "logprobs": 0}
    new = scaled(fresh)
    untouched = one.post(COMPLETIONS, **body)["choices"][0]
    begun = count["dispatches"]
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        running = pool.submit(one.post, COMPLETIONS, **body)
        waited(lambda: count["dispatches"] >= begun + 4)
        one.server.service.thread.swap(new, 7)
        found = running.result()
    (choice,) = found["choices"]
    tokens, versions = choice["token_ids"], choice["token_versions"]
    assert choice["weight_versions"] == [0, 7] == found["weight_versions"] and versions == sorted(versions)
    assert found["system_fingerprint"].endswith("_0-7") and found["seed"] == body["seed"]
    first = versions.index(7)
    assert first > 0 and tokens[:first] == untouched["token_ids"][:first] and tokens != untouched["token_ids"]
    again = repeated(fresh, choice, first, body["seed"])
    assert again.tokens.tolist() == tokens
    assert again.logprobs.tolist() == choice["logprobs"]["token_logprobs"]
    assert one.post(COMPLETIONS, **body)["system_fingerprint"].endswith("_7")


def scaled(fresh):
    """Weights of another version."""
    return jax.block_until_ready(jax.tree.map(lambda leaf: leaf * 1.25, fresh.placed(fresh._files)))


def repeated(fresh, choice, first, seed):
    """The rollout of a choice whose first tokens are forced, on an engine of the new weights."""
    engine = fresh.engine()
    engine.swap(scaled(fresh), 7)
    prompt = fresh.prompts([choice["prompt_token_ids"]])[0]
    name, zeros = RolloutId(0, "eval", 0, prompt.id, 0), np.zeros(first)
    named = hashlib.blake2b(prompt.tokens.tobytes(), digest_size=16).hexdigest()
    before = Rollout(
        id=name,
        prompt=prompt,
        tokens=choice["token_ids"][:first],
        sampled=zeros == 0,
        logprobs=choice["logprobs"]["token_logprobs"][:first],
        entropies=zeros,
        versions=zeros,
        drafted=zeros,
        finish=Finish.PARKED,
        start_clock=0,
        finish_clock=0,
    )
    request = Request(
        rollout_id=name,
        prompt=prompt,
        seed=RolloutId(seed, "eval", 0, named, 0).seed(),
        max_tokens=LONG["max_tokens"],
        sampling=fresh.sampling,
        prefix=before,
    )
    engine.reset()
    engine.submit([request])
    (rollout,) = [rollout for _ in range(40) if engine.pending for rollout in engine.step()]
    return rollout


def test_an_engine_that_fails_tells_all_and_begins_anew(monkeypatch):
    """A failure in the middle of a dispatch, with a stream and a whole response open; then the same bits as before."""
    broken, seen = RuntimeError("a planted failure"), []
    monkeypatch.setattr(threading, "excepthook", lambda told: seen.append(told.exc_value))
    with served(endless()) as one:
        before = bits(one.post(COMPLETIONS, **LONG, logprobs=0, return_token_ids=True))
        real = one.server.engine.meanwhile

        def fail():
            real()
            if sum(one.server.engine.capacity.slots) == 6:
                one.server.engine.meanwhile = real
                raise broken

        one.server.engine.meanwhile = fail
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            request_bodies = [
                pool.submit(one.ask, "POST", COMPLETIONS, LONG | {"stream": stream}) for stream in (True, False)
            ]
            stream, whole_one = (one.result() for one in request_bodies)
        assert whole_one[0] == 500 and "begins anew" in json.loads(whole_one[2])["error"]["message"]
        last = stream[2].decode().strip().split("\n\n")[-1] if stream[0] == 200 else stream[2].decode()
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == 500
        assert seen == [broken] and one.ask("GET", "/health")[0] == 200
        assert bits(one.post(COMPLETIONS, **LONG, logprobs=0, return_token_ids=True)) == before
        assert one.metric("jaxrl_post_engine_restarts_total") == 1 and one.server.service.pending == 0


def test_an_engine_that_cannot_begin_anew_ends_the_server(monkeypatch):
    seen = []
    monkeypatch.setattr(threading, "excepthook", lambda told: seen.append(told.exc_value))
    with served(endless()) as one:
        engine, both = one.server.engine, [RuntimeError("a dispatch"), RuntimeError("a restart")]
        engine.meanwhile = lambda: (_ for _ in ()).throw(both[0])
        engine.restart = lambda: (_ for _ in ()).throw(both[1])
        assert one.ask("POST", COMPLETIONS, LONG)[0] == 500
        waited(lambda: one.server.service.failed.is_set())
        with pytest.raises(Refusal, match="the engine has stopped"):
            one.server.service._admit(1, 1)
    assert seen == both and one.server.service.broken
