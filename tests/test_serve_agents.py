"""The endpoint of a run's sessions over real sockets: an unchanged OpenAI client, refusals, endings and restarts."""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import threading
import time

import openai
import pytest
from served import ROOT
from test_rewards_sessions import KEY, NAME, USER, WORDS, asking, rollout_of, said, tool

from jaxrl_post import config
from jaxrl_post.rewards.environments import harness
from jaxrl_post.rewards.environments.asking import Asking
from jaxrl_post.rewards.environments.sessions import Sessions
from jaxrl_post.serve.agents import app as apps
from jaxrl_post.serve.agents import endpoint

sys.path.insert(0, str(ROOT / "scripts"))

import http_clients

TOKEN = "a-token"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CHAT = f"/sessions/{NAME}/v1/chat/completions"


class Run:
    """Sessions that are served, without a run behind them."""

    def __init__(self, timeout_s: float = 30.0):
        self.sessions = Sessions(timeout_s=timeout_s, say=lambda line: None)
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        about = apps.About(model="demo", tokenizer=WORDS, tools=(TOOL,), max_turns=4, max_tokens=48)
        self.served = contextlib.ExitStack()
        application = apps.app(self.sessions, about, TOKEN)
        self.served.enter_context(endpoint.served(self.sessions, application, self._listening))

    def ask(self, method: str, path: str, body=None, token: str = TOKEN) -> tuple[int, dict]:
        caller = http_clients.Caller(self.port, token)
        status, data = caller.ask(method, path, body)
        caller.close()
        return status, json.loads(data)

    def post(self, path: str, **body) -> dict:
        status, told = self.ask("POST", path, body)
        assert status == 200, told
        return told

    def client(self, base_url: str) -> openai.OpenAI:
        return openai.OpenAI(base_url=base_url, api_key=TOKEN, max_retries=0)


@pytest.fixture
def run():
    one = Run()
    with one.served:
        yield one


def test_an_unchanged_client_plays_a_session_by_its_base_url(run):
    run.sessions.ask(asking("a"))
    (session,) = run.post("/v1/sessions", harness="one")["sessions"]
    assert session["base_url"] == f"http://127.0.0.1:{run.port}/sessions/{NAME}/v1"
    assert session["messages"] == [USER] and session["row"] == {"id": "q", "prompt": "p"}
    assert (session["purpose"], session["prompt_id"], session["sample"]) == ("train", "q", 3)
    assert (session["turn"], session["turns_left"], session["tools"]) == (1, 3, [TOOL])
    assert session["seed"] == rollout_of("a").id.seed().tolist()
    with run.client(session["base_url"]) as client:
        create = client.chat.completions.create
        first = create(
            model="demo",
            messages=[USER],
            tools=[TOOL],
            max_tokens=48,
            logprobs=True,
            extra_body={"return_token_ids": True},
        )
        choice = first.choices[0].model_dump()
        assert choice["message"]["content"] == "a" and choice["finish_reason"] == "stop"
        assert choice["token_ids"] == [*WORDS.encode("a"), 0] and choice["token_versions"] == [0, 0]
        assert choice["prompt_token_ids"] == WORDS.encode("p>")
        assert [one["token"] for one in choice["logprobs"]["content"]] == ["a", "<eos>"]
        assert first.model_dump()["session"] == {"id": NAME, "turn": 1, "turns_left": 3}
        following = threading.Timer(0.1, run.sessions.ask, (asking("ab", "1"),))
        following.start()
        second = create(model="demo", messages=[USER, first.choices[0].message, tool("1")])
        assert second.choices[0].message.content == "b", "the request waited for the next turn"
        following.join()
    assert run.post(f"/sessions/{NAME}/reward", reward=1, components={"acc": 1})["done"] is True
    assert run.sessions.take(KEY)[0]["reward"] == 1.0


def test_a_stream_tells_a_whole_turn(run):
    call = {"id": "abc", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    mine = {"role": "assistant", "content": "t", "tool_calls": [call]}
    run.sessions.ask(Asking(KEY, {}, [mine], [], rollout_of("a")))
    with run.client(f"http://127.0.0.1:{run.port}/sessions/{NAME}/v1") as client:
        create = client.chat.completions.create
        whole = create(model="demo", messages=[USER]).choices[0]
        chunks = list(create(model="demo", messages=[USER], stream=True, stream_options={"include_usage": True}))
    told = whole.message.tool_calls[0]
    assert (told.function.name, json.loads(told.function.arguments)) == ("f", {"x": 1})
    assert whole.finish_reason == chunks[1].choices[0].finish_reason == "tool_calls"
    delta = chunks[0].choices[0].delta
    assert delta.content == "t" and delta.tool_calls[0].function.arguments == told.function.arguments
    assert chunks[-1].usage.completion_tokens == 2


GOOD = {"messages": [USER]}
LONG = {"messages": [{"role": "user", "content": "x" * 100_000}]}


@pytest.mark.parametrize(
    "path, body, status, named",
    [
        (CHAT, {**GOOD, "temperature": 0.7}, 400, "temperature=0.7 is not served"),
        (CHAT, {**GOOD, "seed": 1}, 400, "seed=1 is not served"),
        (CHAT, {**GOOD, "stop": ["x"]}, 400, "stop="),
        (CHAT, {**GOOD, "n": 2}, 400, "n=2 must be 1"),
        (CHAT, {**GOOD, "max_tokens": 8}, 400, "max_tokens=8 must be left out"),
        (CHAT, {**GOOD, "model": "gpt"}, 404, "there is no model 'gpt'"),
        (CHAT, {**GOOD, "tools": [{**TOOL, "function": {"name": "g"}}]}, 400, "tools has 1 functions"),
        (CHAT, {**GOOD, "tool_choice": "none"}, 400, "tool_choice='none' is not served"),
        (CHAT, {}, 400, "messages is missing"),
        (CHAT, b"{", 400, "the body"),
        (CHAT, LONG, 400, "messages[0] differs"),
        (CHAT, {"messages": [USER, said("x")]}, 400, "messages[1] differs"),
        ("/sessions/nobody/v1/chat/completions", GOOD, 404, "there is no session 'nobody'"),
        (f"/sessions/{NAME}/reward", {}, 400, "reward is missing"),
        (f"/sessions/{NAME}/reward", {"reward": "1"}, 400, "reward='1' must be a number"),
        (f"/sessions/{NAME}/reward", b'{"reward": NaN}', 400, "reward=nan must be a finite number"),
        (f"/sessions/{NAME}/reward", {"reward": 1e31}, 400, "reward=1e+31 must be at most 1e+30"),
        (f"/sessions/{NAME}/reward", {"reward": 1, "components": {"a": "b"}}, 400, "components.a='b' must be"),
        (f"/sessions/{NAME}/reward", {"reward": 1, "components": {"a": 10**400}}, 400, "components.a=1000"),
        (f"/sessions/{NAME}/reward", b'{"reward": 1, "components": {"a": Infinity}}', 400, "components.a=inf must be"),
        (f"/sessions/{NAME}/reward", {"reward": 1, "score": 2}, 400, "there is no field 'score'"),
        (f"/sessions/{NAME}/failed", {}, 400, "why is missing"),
        (f"/sessions/{NAME}/failed", {"why": ""}, 400, "why='' must be a text that is not empty"),
        (f"/sessions/{NAME}/reward", {"reward": 1, "components": {"a" * 201: 1}}, 400, "1 to 200 printable characters"),
        (f"/sessions/{NAME}/reward", {"reward": 1, "components": {"\x1b[2J": 1}}, 400, "1 to 200 printable characters"),
        ("/v1/sessions", {"harness": "\x1b]0;x"}, 400, "a text of printable characters"),
        ("/v1/sessions", {}, 400, "harness is missing"),
        ("/v1/sessions", {"harness": "a", "most": 0}, 400, "most=0 must be"),
        ("/v1/sessions/release", {}, 400, "harness is missing"),
        ("/v1/chat/completions", GOOD, 404, "there is no path /v1/chat/completions"),
    ],
)
def test_a_bad_request_is_one_sentence_and_changes_nothing(run, path, body, status, named):
    run.sessions.ask(asking("a"))
    found, told = run.ask("POST", path, body)
    sentence = told["error"]["message"]
    assert found == status and named in sentence and len(sentence) < 400 and "\n" not in sentence
    assert not run.sessions.answered(KEY)


def test_only_the_token_opens_the_door(run):
    assert run.ask("POST", "/v1/sessions", {"harness": "a"}, token="other")[0] == 401
    assert run.ask("GET", "/health", token="")[0] == 200


def test_a_harness_that_begins_anew_gets_its_sessions_again(run):
    run.sessions.ask(asking("a"))
    assert len(run.post("/v1/sessions", harness="one", most=5)["sessions"]) == 1
    assert run.post("/v1/sessions", harness="one", wait=0.05)["sessions"] == []
    assert run.ask("GET", "/v1/sessions")[1] == {"waiting": 0, "played": 1}
    assert run.post("/v1/sessions/release", harness="one") == {"released": 1}
    assert len(run.post("/v1/sessions", harness="one", most=5)["sessions"]) == 1


def test_requests_that_wait_hear_the_end_of_a_session_and_of_the_run(run):
    run.sessions.ask(asking("a"))
    told: list = []
    given = {"messages": [USER, said("a"), tool("1")]}
    waiting = threading.Thread(target=lambda: told.append(run.ask("POST", CHAT, given)))
    waiting.start()
    run.sessions.take(KEY)
    run.sessions.drop(KEY)
    waiting.join()
    assert told[0][0] == 410 and "has ended" in told[0][1]["error"]["message"]
    waiting = threading.Thread(target=lambda: told.append(run.post("/v1/sessions", harness="one", wait=60)))
    waiting.start()
    while not run.sessions._wakes:
        pass
    run.served.close()
    waiting.join()
    assert told[1] == {"sessions": [], "ended": True}


def left_behind(run, path: str, body: dict, waits) -> None:
    """Sends a request, and closes the connection once it waits."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\nContent-Length: {len(data)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", run.port)) as gone:
        gone.sendall(head.encode() + data)
        until(waits)


def until(found) -> None:
    while not found():
        time.sleep(0.01)


def test_a_harness_that_was_killed_while_it_waited_takes_nothing(run):
    left_behind(run, "/v1/sessions", {"harness": "one", "wait": 60}, lambda: run.sessions._wakes)
    time.sleep(0.1)  # until the server sees the end of the connection
    run.sessions.ask(asking("a"))
    until(lambda: not run.sessions._wakes)
    (session,) = run.post("/v1/sessions", harness="one", wait=5)["sessions"]
    following = {"messages": [*session["messages"], said("a"), tool("1")]}
    left_behind(run, CHAT, following, lambda: run.sessions.answered(KEY))
    time.sleep(0.1)
    assert run.post("/v1/sessions/release", harness="one") == {"released": 1}
    run.sessions.ask(asking("ab", "1"))
    (again,) = run.post("/v1/sessions", harness="one", wait=5)["sessions"]
    assert again["messages"] == following["messages"] and again["turn"] == 2


def test_requests_that_found_nothing_in_time_leave_nothing(run):
    run.sessions.ask(asking("a"))
    run.post("/v1/sessions", harness="one")
    given = {"messages": [USER, said("a"), tool("1")], "timeout": 0.01}
    for _ in range(3):
        assert run.post("/v1/sessions", harness="one")["sessions"] == []
        assert run.ask("POST", CHAT, given)[0] == 408
    assert not run.sessions._wakes and not run.sessions._open[NAME].wakes


def test_a_turn_that_is_not_sampled_in_time_is_asked_for_again(run):
    run.sessions.ask(asking("a"))
    status, told = run.ask("POST", CHAT, {"messages": [USER, said("a"), tool("1")], "timeout": 0.05})
    assert status == 408 and "send the same request again" in told["error"]["message"]


def test_an_endpoint_says_where_it_is_and_ends_with_its_block(monkeypatch, capsys):
    monkeypatch.setenv("JAXRL_POST_TOKEN", "hidden")
    given = config.resolve(config.load(str(ROOT / "configs/demo/agents.py")), ["environment.arguments.port=0"])
    with endpoint.opened(given, WORDS) as sessions:
        line = capsys.readouterr().out
        assert "harness: sessions at http://127.0.0.1:" in line and "hidden" not in line
        port = int(line.partition("/v1/")[0].rpartition(":")[2])
        taken = config.resolve(
            config.load(str(ROOT / "configs/demo/agents.py")), [f"environment.arguments.port={port}"]
        )
        with pytest.raises(ValueError, match=rf"environment.arguments: 127.0.0.1:{port} cannot be listened at"):
            endpoint.opened(taken, WORDS).__enter__()
        sessions.ask(asking("a"))
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port)).close()


def test_the_config_of_the_demo_is_played_by_a_harness():
    given = config.resolve(config.load(str(ROOT / "configs/demo/agents.py")), [])
    assert given.environment.name == "harness" and harness.read(given.environment.arguments).port == 8100
