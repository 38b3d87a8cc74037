"""Requests that a server must refuse, each with the field that its sentence names: for tests, and for the show `serve`.

They fit a policy of 128 positions without a chat template, whose vocabulary has 15 tokens, such as configs/demo_policy.
"""

from __future__ import annotations

from typing import Any

_ONE = {"prompt": "1+2=", "max_tokens": 4}
_TALK = {"messages": [{"role": "user", "content": "1+2="}]}


def _completion(**changes: Any) -> tuple[str, Any]:
    return "/v1/completions", {**_ONE, **changes}


def _chat(**changes: Any) -> tuple[str, Any]:
    return "/v1/chat/completions", {**_TALK, **changes}


def _message(**changes: Any) -> tuple[str, Any]:
    return _chat(messages=[{"role": "user", "content": "1+2=", **changes}])


BAD: tuple[tuple[tuple[str, Any], str], ...] = (
    (("/v1/completions", {}), "prompt"),
    (("/v1/completions", []), "body"),
    (("/v1/completions", "1+2="), "body"),
    (_completion(prompt=""), "prompt"),
    (_completion(prompt=[]), "prompt"),
    (_completion(prompt=7), "prompt"),
    (_completion(prompt=[[]]), "prompt"),
    (_completion(prompt=["1+2=", 3]), "prompt[1]"),
    (_completion(prompt=[1, True]), "prompt"),
    (_completion(prompt=[1, 2, 99]), "prompt"),
    (_completion(prompt=[-1]), "prompt"),
    (_completion(prompt="hello"), "prompt"),
    (_completion(prompt="1" * 128), "prompt"),
    (_completion(prompt=["1"] * 2000), "prompt"),
    (_completion(model="gpt-4"), "model"),
    (_completion(model=3), "model"),
    (_completion(n=0), "n"),
    (_completion(n=1.5), "n"),
    (_completion(n=True), "n"),
    (_completion(n="2"), "n"),
    (_completion(n=1024), "n"),
    (_completion(max_tokens=0), "max_tokens"),
    (_completion(max_tokens=-4), "max_tokens"),
    (_completion(max_tokens=125), "max_tokens"),
    (_completion(max_tokens="all"), "max_tokens"),
    (_completion(seed=1.0), "seed"),
    (_completion(seed="one"), "seed"),
    (_completion(seed=1 << 63), "seed"),
    (_completion(temperature=-0.1), "temperature"),
    (_completion(temperature="hot"), "temperature"),
    (_completion(temperature=10**400), "temperature"),
    (_completion(temperature=float("inf")), "temperature"),
    (_completion(temperature=float("nan")), "temperature"),
    (_completion(temperature=1e-46), "temperature"),
    (_completion(temperature=1e-40), "temperature"),
    (_chat(temperature=1e-35), "temperature"),
    (_completion(temperature=-1e-46), "temperature"),
    (_completion(top_p=0), "top_p"),
    (_completion(top_p=1e-46), "top_p"),
    (_completion(top_p=1e-40), "top_p"),
    (_chat(top_p=float("nan")), "top_p"),
    (_completion(top_p=1.1), "top_p"),
    (_completion(top_k=-2), "top_k"),
    (_completion(top_k=1.5), "top_k"),
    (_completion(stop=""), "stop"),
    (_completion(stop=["#", ""]), "stop"),
    (_completion(stop=["#"] * 17), "stop"),
    (_completion(stop=3), "stop"),
    (_completion(stop_token_ids=13), "stop_token_ids"),
    (_completion(stop_token_ids=[15]), "stop_token_ids"),
    (_completion(stop_token_ids=list(range(1, 10))), "stop_token_ids"),
    (_completion(stream="yes"), "stream"),
    (_completion(stream_options={"usage": True}), "usage"),
    (_completion(logprobs=5), "logprobs"),
    (_completion(logprobs=True), "logprobs"),
    (_completion(echo=True), "echo"),
    (_completion(best_of=4), "best_of"),
    (_completion(suffix="#"), "suffix"),
    (_completion(presence_penalty=0.5), "presence_penalty"),
    (_completion(frequency_penalty=-1), "frequency_penalty"),
    (_completion(logit_bias={"3": 10}), "logit_bias"),
    (_completion(timeout=0), "timeout"),
    (_completion(temprature=0.5), "temprature"),
    (("/v1/chat/completions", {}), "messages"),
    (_chat(messages=[]), "messages"),
    (_chat(messages="1+2="), "messages"),
    (_chat(messages=["1+2="]), "messages[0]"),
    (_chat(), "messages"),  # there is no template
    (_message(role="robot"), "messages[0]"),
    (_message(role=None), "messages[0]"),
    (_message(content=None), "messages[0].content"),
    (_message(content=[{"type": "image_url", "image_url": {"url": "x"}}]), "messages[0].content[0]"),
    (_message(function_call={"name": "f"}), "messages[0].function_call"),
    (_message(tool_calls=[{"id": "1"}]), "messages[0].tool_calls[0]"),
    (_message(tool_calls=[{"function": {"name": "f", "arguments": "{"}}]), "messages[0].tool_calls[0]"),
    (_chat(tools=[{"name": "f"}]), "tools[0]"),
    (_chat(tools={}), "tools"),
    (_chat(tool_choice="required"), "tool_choice"),
    (_chat(response_format={"type": "json_object"}), "response_format"),
    (_chat(top_logprobs=3), "top_logprobs"),
    (_chat(max_tokens=3, max_completion_tokens=4), "max_tokens"),
    (_chat(parallel_tool_calls=False), "parallel_tool_calls"),
)
