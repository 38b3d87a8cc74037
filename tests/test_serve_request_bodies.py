"""Bodies of requests: what good ones ask for, and one sentence for each bad one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from jaxrl_post.serve import request_bodies
from jaxrl_post.serve.schema import Refusal

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

import bad_requests

HI = {"role": "user", "content": "a"}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def test_a_completion_with_all_its_fields():
    found = request_bodies.completion(
        {
            "model": "m",
            "prompt": ["a", [1, 2]],
            "n": 3,
            "seed": -4,
            "max_tokens": 7,
            "temperature": 0,
            "top_p": 0.5,
            "top_k": -1,
            "stop": "#",
            "stop_token_ids": [3],
            "stream": True,
            "stream_options": {"include_usage": True},
            "logprobs": 0,
            "return_token_ids": True,
            "timeout": 2,
            "presence_penalty": 0,
            "logit_bias": {},
            "echo": False,
            "user": "me",
            "suffix": None,
        }
    )
    sampling_changes = {"temperature": 0.0, "top_p": 0.5, "top_k": 0, "stop_strings": ("#",), "stop_ids": (3,)}
    assert found == request_bodies.SamplingRequest(
        model="m",
        prompts=("a", (1, 2)),
        n=3,
        seed=-4,
        max_tokens=7,
        sampling_changes=sampling_changes,
        stream=True,
        usage=True,
        logprobs=True,
        token_ids=True,
        timeout_s=2.0,
    )


def test_a_conversation_as_a_template_takes_it():
    found = request_bodies.chat(
        {
            "messages": [
                {"role": "developer", "content": [{"type": "text", "text": "be "}, {"type": "text", "text": "brief"}]},
                {"role": "user", "content": "1+1", "name": "me"},
                {"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None, "annotations": []},
                {"role": "tool", "content": "2", "tool_call_id": "c1"},
            ],
            "tools": [TOOL],
            "max_completion_tokens": 5,
            "logprobs": True,
        }
    )
    call = CALL | {"function": {"name": "add", "arguments": {"a": 1}}}
    assert found.messages == (
        {"role": "system", "content": [{"type": "text", "text": "be "}, {"type": "text", "text": "brief"}]},
        {"role": "user", "content": "1+1", "name": "me"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "c1"},
    )
    assert found.tools == (TOOL,) and found.max_tokens == 5 and found.logprobs and found.chat
    assert (
        request_bodies.chat(
            {"messages": [{"role": "user", "content": "x"}], "tools": [TOOL], "tool_choice": "none"}
        ).tools
        == ()
    )


TALK = {"messages": [{"role": "user", "content": "a"}]}
AT_THE_ENGINE = {"model", "stop_token_ids", "prompt", "max_tokens", "n", "messages"}  # where some are found only there


NEUTRAL = {
    "ignore_eos": False,
    "min_tokens": 0,
    "repetition_penalty": 1.0,
    "min_p": 0.0,
    "skip_special_tokens": True,
    "use_beam_search": False,
    "length_penalty": 1.0,
    "prompt_logprobs": None,
    "guided_json": None,
    "logprobs": False,
    "response_format": {"type": "text"},
    "store": True,
}  # what clients of vLLM send by themselves


def test_fields_of_other_servers_may_ask_for_nothing():
    plain = request_bodies.completion({"prompt": "a", "n": 4})
    assert request_bodies.completion({"prompt": "a", "n": 4, "best_of": 4} | NEUTRAL) == plain and not plain.logprobs
    messages = [{"role": "user", "content": "a"}]
    more = {"modalities": ["text"], "functions": [], "prediction": None, "chat_template_kwargs": {}}
    assert request_bodies.chat({"messages": messages} | NEUTRAL | more) == request_bodies.chat({"messages": messages})
    begun = [*messages, {"role": "assistant", "content": "b"}]
    cases = [({}, True), ({"continue_final_message": True, "add_generation_prompt": False}, True)]
    cases += [({"continue_final_message": False}, False), ({"add_generation_prompt": True}, False)]
    assert [request_bodies.chat({"messages": begun, **fields}).continues for fields, _ in cases] == [
        one for _, one in cases
    ]
    assert request_bodies.completion({"prompt": "a", "max_completion_tokens": 5}).max_tokens == 5


NULLS = ("cache_salt", "priority", "user", "no_such_field", "stop", "n", "seed", "logit_bias", "stream_options", "kv_x")


@pytest.mark.parametrize(
    "read, body", [(request_bodies.completion, {"prompt": "a"}), (request_bodies.chat, {"messages": [HI]})]
)
def test_null_is_left_out_for_every_name(read, body):
    assert read(body | dict.fromkeys(NULLS)) == read(body)
    assert read(body | {"stream_options": {"include_usage": None, "other": None}}) == read(body)
    assert read(body | {"priority": 0, "detokenize": True, "logits_processors": []}) == read(body)


@pytest.mark.parametrize(
    "changes",
    [
        {"top_k": 1 << 31},
        {"top_k": -2},
        {"seed": -(1 << 63) - 1},
        {"stop_token_ids": [1 << 64]},
        {"stop": ["a" * 1025]},
        {"priority": False},
        {"detokenize": 1},
    ],
)
def test_numbers_beyond_the_engine_s_are_refused_at_the_door(changes):
    (name,) = changes
    with pytest.raises(Refusal) as refused:
        request_bodies.completion({"prompt": "a"} | changes)
    assert refused.value.status == 400 and name in refused.value.sentence and len(refused.value.sentence) < 400


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({**TALK, "continue_final_message": True}, "continue_final_message=true: the last message is of 'user'"),
        ({**TALK, "add_generation_prompt": False}, "add_generation_prompt=false is not served behind a message of"),
        ({**TALK, "chat_template_kwargs": {"tools": []}}, "'tools' is no argument of a chat template"),
        ({**TALK, "chat_template_kwargs": []}, "chat_template_kwargs=[] must be an object"),
        ({"ignore_eos": True}, "ignore_eos=True is not served: tokens follow temperature, top_p and top_k alone; leave it out"),
        ({"repetition_penalty": 1.1}, "repetition_penalty=1.1 is not served: tokens follow"),
        ({"guided_json": {}}, "guided_json={} is not served: tokens follow"),
        ({"prompt": ["a"] * 1025}, "prompt has 1025 prompts; at most 1024 are served in one request"),
        ({"prompt_logprobs": 0}, "prompt_logprobs=0 is not served: no log-prob of a prompt is computed; leave it out"),
        ({"logprobs": 1}, "those of other tokens are not; the valid value is 0"),
        ({"n": 2, "best_of": 3}, "best_of=3 above n=2 is not served"),
        ({"temprature": 1}, "there is no field 'temprature'; the nearest is 'temperature'"),
        ({"kv_transfer_params": {}}, "there is no field 'kv_transfer_params'; the documentation lists"),
        ({"stream_options": {"continuous": True}}, "there is no field 'continuous'; valid are include_usage"),
    ],
)  # fmt: skip
def test_a_refusal_says_why_and_suggests_what_is_near(body, sentence):
    with pytest.raises(Refusal) as refused:
        request_bodies.chat(body) if "messages" in body else request_bodies.completion({"prompt": "a"} | body)
    assert sentence in refused.value.sentence


@pytest.mark.parametrize(
    "case, named", bad_requests.BAD, ids=[f"{i}-{named}" for i, (_, named) in enumerate(bad_requests.BAD)]
)
def test_a_bad_request_is_one_sentence(case, named):
    path, body = case
    read = request_bodies.chat if "chat" in path else request_bodies.completion
    if not isinstance(body, dict):
        return  # tests/test_serve_app.py sends them
    try:
        read(body)
    except Refusal as refusal:
        assert refusal.status == 400 and refusal.param == named
        assert named in refusal.sentence and "\n" not in refusal.sentence and len(refusal.sentence) < 400
    else:
        assert named in AT_THE_ENGINE
