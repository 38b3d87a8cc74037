"""Chat: messages and tools through the template, token-exact, and calls in a turn, whole and streamed."""

from __future__ import annotations

import json

import openai
import pytest
import tokenizers
from served import TOKEN, talking

from jaxrl_post.data.tokenizer import characters
from jaxrl_post.ring.types import Finish, Prompt, Sampling
from jaxrl_post.serve.device_thread import TokenChunk
from jaxrl_post.serve.forms import Chat, Choice
from jaxrl_post.serve.request_bodies import SamplingRequest

pytestmark = pytest.mark.usefixtures("quick_compilation")

TEMPLATE = (
    "{%- for tool in tools or [] %}{{ tool.function.name }}+{% endfor %}"
    "{%- for message in messages %}{{ message.content }}"
    "{%- for call in message.tool_calls or [] %}{{ call.function.arguments.a }}={% endfor %}{% endfor %}#"
)
TOOL = {"type": "function", "function": {"name": "7", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with talking(tmp_path_factory.mktemp("chat") / "policy", TEMPLATE) as one:
        yield one


def test_a_conversation_is_the_completion_of_its_text(server):
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key=TOKEN, max_retries=0)
    call = {"id": "c", "type": "function", "function": {"name": "7", "arguments": '{"a": 3}'}}
    messages = [
        {"role": "system", "content": "1+"},
        {"role": "user", "content": [{"type": "text", "text": "2"}, {"type": "text", "text": "="}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "3", "tool_call_id": "c"},
    ]
    given = dict(model="demo", messages=messages, seed=4, max_completion_tokens=10, n=2, logprobs=True)
    extra = {"return_token_ids": True}
    with client:
        for tools, text in (({}, "1+2=3=3#"), ({"tools": [TOOL]}, "7+1+2=3=3#")):
            found = client.chat.completions.create(**given, **tools, extra_body=extra)
            plain = server.post("/v1/completions", prompt=text, seed=4, max_tokens=10, n=2, logprobs=0, **extra)
            for one, other in zip(found.choices, plain["choices"], strict=True):
                assert one.message.content == other["text"] and one.finish_reason == other["finish_reason"]
                assert one.token_ids == other["token_ids"] and one.prompt_token_ids == other["prompt_token_ids"]
                assert [t.logprob for t in one.logprobs.content] == other["logprobs"]["token_logprobs"]
                assert "".join(t.token for t in one.logprobs.content).removesuffix("<eos>") == other["text"]
            told, reasons = ["", ""], [None, None]
            for chunk in client.chat.completions.create(**given, **tools, stream=True):
                (one,) = chunk.choices
                told[one.index] += one.delta.content or ""
                reasons[one.index] = one.finish_reason
            assert told == [one["text"] for one in plain["choices"]]
            assert reasons == [one["finish_reason"] for one in plain["choices"]]


def test_a_template_that_refuses_is_one_sentence(server):
    body = {"messages": [{"role": "user", "content": "a letter"}]}
    status, _, data = server.ask("POST", "/v1/chat/completions", body)
    assert status == 400 and "no token for 'a'" in json.loads(data)["error"]["message"]


TURN = 'So: <tool_call>{"name": "add", "arguments": {"a": 1, "b": [2]}}</tool_call>'
WORDS = characters("".join(sorted(set(TURN + "no call"))))


def answered(text, tools, pieces):
    """The form of a turn, and its choice after each piece."""
    asked = SamplingRequest(messages=({"role": "user", "content": "x"},), tools=tools, stream=True)
    form = Chat(asked, model="m", key="k", seed=1, law={}, tokenizer=WORDS, parser="hermes")
    one = Choice(0, Prompt(id="p", tokens=[1]), Sampling(eos_ids=(0,)), WORDS)
    ids, chunks = [*WORDS.encode(text), 0], list(form.begun([one]))
    size = -(-len(ids) // pieces)
    for begin in range(0, len(ids), size):
        part, last = ids[begin : begin + size], begin + size >= len(ids)
        news = one.add(TokenChunk(0, part, [-0.5] * len(part), [3] * len(part), Finish.EOS if last else None))
        chunks += form.chunks(one, news)
    return form, one, chunks


def test_calls_in_a_turn():
    form, one, chunks = answered(TURN, (TOOL,), 5)
    choice = form.whole([one])["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == "So:"
    assert call["function"]["name"] == "add" and json.loads(call["function"]["arguments"]) == {"a": 1, "b": [2]}
    assert call["type"] == "function" and call["id"]
    assert [chunk["choices"][0]["delta"] for chunk in chunks[:1]] == [{"role": "assistant", "content": ""}]
    last = chunks[-1]["choices"][0]
    assert last["delta"] == {"content": "So:", "tool_calls": [{"index": 0} | call]}
    assert last["finish_reason"] == "tool_calls" and len(chunks) == 2, "a turn with tools is told once it is whole"


def test_a_turn_without_calls_or_without_tools():
    form, one, chunks = answered("no call", (TOOL,), 3)
    assert form.whole([one])["choices"][0]["message"] == {"role": "assistant", "content": "no call"}
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    form, one, chunks = answered(TURN, (), 4)
    assert form.whole([one])["choices"][0]["message"] == {"role": "assistant", "content": TURN}
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == TURN
    assert form.whole([one])["usage"] == {
        "prompt_tokens": 1,
        "completion_tokens": len(TURN) + 1,
        "total_tokens": len(TURN) + 2,
    }


def test_calls_between_special_tokens_are_read():
    text = "So: <|tool_call>call:add{a:1}<tool_call|>"
    words = characters("".join(sorted(set(text))))
    special = ("<|tool_call>", "<tool_call|>")
    words.model.add_special_tokens([tokenizers.AddedToken(one, special=True) for one in special])
    asked = SamplingRequest(messages=({"role": "user", "content": "x"},), tools=(TOOL,))
    form = Chat(asked, model="m", key="k", seed=1, law={}, tokenizer=words, parser="gemma4")
    for calls, content, count in ((True, "So:", 1), (False, "So: call:add{a:1}", 0)):
        one = Choice(0, Prompt(id="p", tokens=[1]), Sampling(eos_ids=(0,)), words, calls=calls)
        ids = [*words.encode(text), 0]
        one.add(TokenChunk(0, ids, [-0.5] * len(ids), [3] * len(ids), Finish.EOS))
        message = form.whole([one])["choices"][0]["message"]
        assert message["content"] == content and len(message.get("tool_calls", ())) == count
