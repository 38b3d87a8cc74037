"""Tool calls of three families, from texts as their models write them."""

from __future__ import annotations

import pytest

from jaxrl_post.data import tool_calls

CASES = {
    "hermes, one": ("hermes", 'Let me see.\n<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>', ["f"]),
    "hermes, two": (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {}}</tool_call>\n<tool_call>{"name": "g", "arguments": {}}</tool_call>',
        ["f", "g"],
    ),
    "hermes, open": ("hermes", '<tool_call>\n{"name": "f", "arguments": {}}\n', ["f"]),
    "hermes, open before another": (
        "hermes",
        '<tool_call>{"name": "f"}\n<tool_call>{"name": "g", "arguments": {}}</tool_call>',
        ["f", "g"],
    ),
    "hermes, parameters": ("hermes", '<tool_call>{"name": "f", "parameters": {"x": 1}}</tool_call>', ["f"]),
    "hermes, a tag in a text": (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"x": "</tool_call>"}}</tool_call>',
        ["f"],
    ),
    "llama3, bare": ("llama3", '{"name": "f", "parameters": {"x": "1"}}', ["f"]),
    "llama3, tag": ("llama3", '<|python_tag|>{"name": "f", "parameters": {"x": "1"}}', ["f"]),
    "llama3, two": ("llama3", '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}', ["f", "g"]),
    "mistral, list": ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}}]', ["f"]),
    "mistral, two": (
        "mistral",
        '[TOOL_CALLS][{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]',
        ["f", "g"],
    ),
    "mistral, args": ("mistral", '[TOOL_CALLS]f[ARGS]{"x": 1}[TOOL_CALLS]g[ARGS]{}', ["f", "g"]),
}
NONE = {
    "hermes, broken": ("hermes", '<tool_call>{"name": "f", "arguments": {</tool_call>'),
    "hermes, nameless": ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
    "hermes, cut": ("hermes", '<tool_call>{"name": "f", "arguments": {"x": 1'),
    "hermes, other names": ("hermes", '<tool_call>{"name": "f", "args": {"x": 1}}</tool_call>'),
    "hermes, words behind": ("hermes", '<tool_call>{"name": "f", "arguments": {}} is what I would say'),
    "hermes, thinking": ("hermes", '<think><tool_call>{"name": "f", "arguments": {}}</tool_call></think>3'),
    "hermes, thinking without end": ("hermes", '<think><tool_call>{"name": "f", "arguments": {}}</tool_call>'),
    "hermes, thinking that the template opened": (
        "hermes",
        'x <tool_call>{"name": "f", "arguments": {}}</tool_call> y</think>3',
    ),
    "mistral, thinking": ("mistral", '[THINK][TOOL_CALLS]f[ARGS]{"x": 1}'),
    "hermes, not a number": ("hermes", '<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>'),
    "hermes, too large": ("hermes", '<tool_call>{"name": "f", "arguments": {"x": [1e999]}}</tool_call>'),
    "hermes, half a pair": ("hermes", '<tool_call>{"name": "f", "arguments": {"x": "\\ud800"}}</tool_call>'),
    "hermes, deep": ("hermes", f'<tool_call>{{"name": "f", "arguments": {{"x": {"[" * 70}{"]" * 70}}}}}</tool_call>'),
    "llama3, not a number": ("llama3", '{"name": "f", "parameters": {"x": -Infinity}}'),
    "mistral, not a number": ("mistral", '[TOOL_CALLS]f[ARGS]{"x": NaN}'),
    "llama3, prose": ("llama3", 'The object is {"name": "f", "parameters": {}}'),
    "llama3, trailing": ("llama3", '{"name": "f", "parameters": {}} and more'),
    "llama3, number": ("llama3", "12"),
    "mistral, broken": ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {]'),
    "mistral, empty": ("mistral", "[TOOL_CALLS]"),
    "mistral, text": ("mistral", 'f[ARGS]{"x": 1}'),
    "none": ("none", '<tool_call>{"name": "f", "arguments": {}}</tool_call>'),
}


@pytest.mark.parametrize("case", CASES)
def test_calls(case):
    parser, text, names = CASES[case]
    told = tool_calls.message(text, parser)
    calls = told["tool_calls"]
    assert [call["function"]["name"] for call in calls] == names
    assert all(isinstance(call["function"]["arguments"], dict) for call in calls)
    assert len({call["id"] for call in calls}) == len(calls) and all(len(c["id"]) == 9 for c in calls)
    assert told["content"] == ("Let me see." if case == "hermes, one" else "")
    assert told == tool_calls.message(text, parser), "ids follow from the text"


@pytest.mark.parametrize("case", NONE)
def test_what_is_no_call_stays_text(case):
    parser, text = NONE[case]
    assert tool_calls.message(text, parser) == {"role": "assistant", "content": text}


def test_arguments():
    text = '<tool_call>{"name": "f", "arguments": "{\\"x\\": [1, {\\"y\\": null}]}"}</tool_call>'
    call = tool_calls.hermes(text)[1][0]
    assert call == {"name": "f", "arguments": {"x": [1, {"y": None}]}}
    assert tool_calls.llama3('{"name": "f", "parameters": {"x": 2.5}}')[1] == [{"name": "f", "arguments": {"x": 2.5}}]


THOUGHT = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
SPOKEN = {
    "hermes": '<tool_call>{"name": "g", "parameters": {"x": 1}}</tool_call>',
    "llama3": '{"name": "g", "arguments": {"x": 1}}',
    "mistral": '[TOOL_CALLS][{"name": "g", "parameters": {"x": 1}}]',
}


@pytest.mark.parametrize("parser", SPOKEN)
@pytest.mark.parametrize("opening, closing", [("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("", "</think>")])
def test_calls_behind_thinking_are_read_and_those_in_it_are_not(parser, opening, closing):
    thinking = f"{opening}maybe {THOUGHT} or [TOOL_CALLS]{closing}"
    told = tool_calls.message(f"{thinking}\n{SPOKEN[parser]}", parser)
    assert [call["function"] for call in told["tool_calls"]] == [{"name": "g", "arguments": {"x": 1}}]
    assert told["content"] == thinking
