"""/tokenize, /detokenize and /version: the ids are those that a completion and a chat sample behind."""

from __future__ import annotations

import concurrent.futures
import importlib.metadata
import itertools
import json
import threading
import time

import pytest
import tokenizers
from served import ROOT, talking

from jaxrl_post.data import tokenizer

pytestmark = pytest.mark.usefixtures("quick_compilation")

TEMPLATE = (
    "{%- for tool in tools or [] %}{{ tool.function.name }}+{% endfor %}"
    "{%- for message in messages %}{{ message.content }}{% endfor %}#"
)
TALK = [{"role": "user", "content": "1+2="}, {"role": "assistant", "content": "3"}]
TOOL = {"type": "function", "function": {"name": "7", "parameters": {"type": "object"}}}
BIG_TOOL = {"type": "function", "function": {"name": "7", "description": "1" * 5_000_000}}
ONE = {"max_tokens": 1, "return_token_ids": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with talking(tmp_path_factory.mktemp("words") / "policy", TEMPLATE) as one:
        yield one


@pytest.mark.parametrize("text", ["1+2=", "47+8+5=", "#"])
def test_the_ids_of_a_text_are_those_of_a_completion_and_of_the_library(server, text):
    told = server.post("/tokenize", prompt=text, model="demo", add_special_tokens=True)
    completion = server.post("/v1/completions", prompt=text, **ONE)
    library = tokenizers.Tokenizer.from_file(str(ROOT / "configs/demo_policy/tokenizer.json"))
    assert told["tokens"] == completion["choices"][0]["prompt_token_ids"]
    assert told["tokens"] == library.encode(text).ids
    assert told["count"] == len(text) and told["max_model_len"] == 64 and told["token_strs"] is None
    assert server.post("/detokenize", tokens=told["tokens"]) == {"prompt": text}


@pytest.mark.parametrize("tools", [{}, {"tools": [TOOL]}])
def test_the_ids_of_messages_are_those_of_a_chat(server, tools):
    told = server.post(
        "/tokenize",
        messages=TALK,
        return_token_strs=True,
        add_generation_prompt=True,
        add_special_tokens=False,
        **tools,
    )
    chat = server.post("/v1/chat/completions", messages=TALK, add_generation_prompt=True, **ONE, **tools)
    assert told["tokens"] == chat["choices"][0]["prompt_token_ids"]
    assert "".join(told["token_strs"]) == ("7+" if tools else "") + "1+2=3#"
    begun = server.post("/tokenize", messages=TALK, chat_template_kwargs={"enable_thinking": False}, **tools)
    assert begun["tokens"] == told["tokens"][:-1]  # a last message of the assistant is continued


def test_a_text_that_fits_no_slot_is_counted(server):
    told = server.post("/tokenize", prompt="1" * 500)
    assert told["count"] == len(told["tokens"]) == 500 > told["max_model_len"]
    assert server.post("/tokenize", prompt="")["tokens"] == []


def test_a_long_text_holds_nobody_up(server, monkeypatch):
    """While one text is encoded, completions are served and other texts wait."""
    words, waits, goes_on = server.server.service.tokenizer, threading.Event(), threading.Event()
    real = type(words).encode

    def slow(self, text, special=True):
        if text == "1" * 99:
            waits.set()
            assert goes_on.wait(60)
        return real(self, text, special)

    monkeypatch.setattr(type(words), "encode", slow)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        long = pool.submit(server.post, "/tokenize", prompt="1" * 99)
        assert waits.wait(60)
        assert server.ask("GET", "/health")[0] == 200
        assert server.post("/v1/completions", prompt="1+2=", **ONE)["choices"] and not long.done()
        goes_on.set()
        assert long.result()["count"] == 99


@pytest.mark.parametrize(
    "body",
    [{"messages": [{"role": "user", "content": "1" * 10_000_000}]}, {"messages": TALK, "tools": [BIG_TOOL]}],
    ids=["text", "tool"],
)
def test_a_chat_of_10_mb_is_refused_before_it_is_rendered(server, monkeypatch, body):
    monkeypatch.setattr(type(server.server.service.reading._chat), "render", None)
    for path in ("/v1/chat/completions", "/tokenize"):
        status, _, data = server.ask("POST", path, body)
        assert status == 400 and "at most 4096 are read" in json.loads(data)["error"]["message"]


def test_a_text_is_encoded_beside_other_threads():
    """The library's encode would hold every thread for as long as it takes."""
    words, beats, over = tokenizer.load(ROOT / "configs/demo_policy"), [time.monotonic()], threading.Event()

    def beat():
        while not over.wait(0.002):
            beats.append(time.monotonic())

    thread = threading.Thread(target=beat)
    thread.start()
    begun = time.monotonic()
    assert len(words.encode("1" * 500_000)) == 500_000
    took = time.monotonic() - begun
    over.set()
    thread.join()
    assert max(after - before for before, after in itertools.pairwise(beats)) < took / 2


def test_special_tokens_are_a_part_of_the_text_of_ids(server):
    end = server.server.service.tokenizer.eos_ids[0]
    assert server.post("/detokenize", tokens=[end]) == {"prompt": "<eos>"}
    assert server.post("/detokenize", tokens=[]) == {"prompt": ""}


def test_the_version_is_that_of_the_package(server):
    status, _, data = server.ask("GET", "/version")
    assert status == 200 and json.loads(data) == {"version": importlib.metadata.version("jaxrl_post")}


@pytest.mark.parametrize(
    "path, body, status, sentence",
    [
        ("/tokenize", {}, 400, "give either prompt, a text, or messages"),
        ("/tokenize", {"prompt": "1", "messages": TALK}, 400, "there is no field 'messages'"),
        ("/tokenize", {"prompt": ["1"]}, 400, "prompt=['1'] must be a text"),
        ("/tokenize", {"prompt": "hello"}, 400, "prompt: "),
        ("/tokenize", {"prompt": "1", "add_special_tokens": False}, 400, "add_special_tokens=False is not served"),
        ("/tokenize", {"messages": TALK, "add_special_tokens": True}, 400, "add_special_tokens=True is not served"),
        ("/tokenize", {"messages": TALK, "chat_template": "x"}, 400, "chat_template='x' is not served"),
        ("/tokenize", {"prompt": "1", "tools": [TOOL]}, 400, "there is no field 'tools'"),
        ("/tokenize", {"prompt": "1" * 4097}, 400, "prompt has 4097 characters; at most 4096 are read"),
        ("/v1/completions", {"prompt": "1" * 4097}, 400, "prompt has 4097 characters; at most 4096 are read"),
        ("/detokenize", {"tokens": [1] * 4097}, 400, "tokens has 4097 ids; at most 4096 are read"),
        ("/tokenize", {"prompt": "1", "model": "gpt-4"}, 404, "there is no model 'gpt-4'; the only one is 'demo'"),
        ("/v1/completions", {"prompt": "1", "stop": "<eos>\n"}, 400, "holds the special token '<eos>'"),
        ("/v1/chat/completions", {"messages": TALK, "stop": ["1", "\ufffd"]}, 400, "without U+FFFD"),
        ("/tokenize", {"promt": "1"}, 400, "the nearest is 'prompt'"),
        ("/detokenize", {}, 400, "tokens is missing"),
        ("/detokenize", {"tokens": "1"}, 400, "tokens='1' must be a list"),
        ("/detokenize", {"tokens": [3, 99]}, 400, "the nearest valid value is 14"),
        ("/detokenize", {"tokens": [-1]}, 400, "the nearest valid value is 0"),
        ("/detokenize", {"tokens": [1], "model": "gpt-4"}, 404, "there is no model 'gpt-4'"),
    ],
)
def test_a_wrong_request_gets_one_sentence(server, path, body, status, sentence):
    found, _, data = server.ask("POST", path, body)
    told = json.loads(data)["error"]["message"]
    assert found == status and sentence in told and "\n" not in told, told


def test_the_paths_need_the_token_and_their_method(server):
    for method, path in (("POST", "/tokenize"), ("POST", "/detokenize"), ("GET", "/version")):
        assert server.ask(method, path, {"prompt": "1"}, token="")[0] == 401
    assert server.ask("GET", "/tokenize")[0] == 405
