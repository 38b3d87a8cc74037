"""Bodies of requests: what good ones ask for, and one sentence for each bad one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from jaxrl_post.serve import asked
from jaxrl_post.serve.refusal import Refusal

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

import bad_requests

CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def test_a_completion_with_all_its_fields():
    found = asked.completion(
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
    law = {"temperature": 0.0, "top_p": 0.5, "top_k": 0, "stop_strings": ("#",), "stop_ids": (3,)}
    assert found == asked.Asked(
        model="m",
        prompts=("a", (1, 2)),
        n=3,
        seed=-4,
        max_tokens=7,
        law=law,
        stream=True,
        usage=True,
        logprobs=True,
        token_ids=True,
        timeout_s=2.0,
    )


def test_a_conversation_as_a_template_takes_it():
    found = asked.chat(
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
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "1+1", "name": "me"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "c1"},
    )
    assert found.tools == (TOOL,) and found.max_tokens == 5 and found.logprobs and found.chat
    assert (
        asked.chat({"messages": [{"role": "user", "content": "x"}], "tools": [TOOL], "tool_choice": "none"}).tools == ()
    )


AT_THE_ENGINE = {"model", "stop_token_ids", "prompt", "max_tokens", "n", "messages"}  # where some are found only there


@pytest.mark.parametrize(
    "case, named", bad_requests.BAD, ids=[f"{i}-{named}" for i, (_, named) in enumerate(bad_requests.BAD)]
)
def test_a_bad_request_is_one_sentence(case, named):
    path, body = case
    read = asked.chat if "chat" in path else asked.completion
    if not isinstance(body, dict):
        return  # tests/test_serve_app.py sends them
    try:
        read(body)
    except Refusal as refusal:
        assert refusal.status == 400 and refusal.param == named
        assert named in refusal.sentence and "\n" not in refusal.sentence and len(refusal.sentence) < 400
    else:
        assert named in AT_THE_ENGINE
