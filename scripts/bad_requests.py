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


COMPLETION: dict[str, tuple] = {  # a field, which the sentence names -> its values
    "prompt": ("", [], 7, [[]], [1, True], [1, 2, 99], [-1], "hello", "1" * 128, ["1"] * 2000),
    **{"model": ("gpt-4", 3), "n": (0, 1.5, True, "2", 1024), "max_tokens": (0, -4, 125, "all")},
    "seed": (1.0, "one", 1 << 63),
    "temperature": (-0.1, "hot", 10**400, float("inf"), float("nan"), 1e-46, 1e-40, -1e-46),
    **{"top_p": (0, 1e-46, 1e-40, 1.1), "top_k": (-2, 1.5), "stop": ("", ["#", ""], ["#"] * 17, 3)},
    "stop_token_ids": (13, [15], list(range(1, 10))),
    **{"stream": ("yes",), "logprobs": (5, True), "echo": (True,), "best_of": (4,), "suffix": ("#",)},
    **{"presence_penalty": (0.5,), "frequency_penalty": (-1,), "logit_bias": ({"3": 10},), "timeout": (0,)},
    "temprature": (0.5,),
}
CHAT: dict[str, tuple] = {
    **{"temperature": (1e-35,), "top_p": (float("nan"),), "messages": ([], "1+2="), "tools": ({},)},
    **{"tool_choice": ("required",), "response_format": ({"type": "json_object"},), "top_logprobs": (3,)},
    "parallel_tool_calls": (False,),
}
BAD: tuple[tuple[tuple[str, Any], str], ...] = (
    (("/v1/completions", {}), "prompt"),
    (("/v1/completions", []), "body"),
    (("/v1/completions", "1+2="), "body"),
    *((_completion(**{name: value}), name) for name, values in COMPLETION.items() for value in values),
    (_completion(prompt=["1+2=", 3]), "prompt[1]"),
    (_completion(stream_options={"usage": True}), "usage"),
    (("/v1/chat/completions", {}), "messages"),
    *((_chat(**{name: value}), name) for name, values in CHAT.items() for value in values),
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
    (_chat(max_tokens=3, max_completion_tokens=4), "max_tokens"),
)
