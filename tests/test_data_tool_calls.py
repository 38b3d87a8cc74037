"""Tool calls of five families, from texts as their models write them."""

from __future__ import annotations

import json
import random

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
    "qwen3_coder, two": (
        "qwen3_coder",
        "<tool_call>\n<function=f>\n</function>\n</tool_call>\n<tool_call>\n<function=g>\n</function>\n</tool_call>",
        ["f", "g"],
    ),
    "qwen3_coder, open": ("qwen3_coder", "<tool_call>\n<function=f>\n</function>\n", ["f"]),
    "gemma4, two": (
        "gemma4",
        "<|tool_call>call:f{}<tool_call|><|tool_call>call:a.g-2{x:1}<tool_call|>",
        ["f", "a.g-2"],
    ),
    "gemma4, open": ("gemma4", "<|tool_call>call:f{x:1}", ["f"]),
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
    "qwen3_coder, JSON": ("qwen3_coder", '<tool_call>{"name": "f", "arguments": {}}</tool_call>'),
    "qwen3_coder, words": (
        "qwen3_coder",
        "<tool_call><function=f>so <parameter=x>1</parameter></function></tool_call>",
    ),
    "qwen3_coder, no end": ("qwen3_coder", "<tool_call><function=f><parameter=x>1</parameter></tool_call>"),
    "qwen3_coder, cut": ("qwen3_coder", "<tool_call><function=f><parameter=x>1"),
    "qwen3_coder, thinking": ("qwen3_coder", "<think><tool_call><function=f></function></tool_call></think>3"),
    "gemma4, bare words": ("gemma4", "<|tool_call>call:f{x:left}<tool_call|>"),
    "gemma4, no braces": ("gemma4", "<|tool_call>call:f<tool_call|>"),
    "gemma4, two values": ("gemma4", "<|tool_call>call:f{x:1 2}<tool_call|>"),
    "gemma4, other bracket": ("gemma4", "<|tool_call>call:f{x:[1}<tool_call|>"),
    "gemma4, cut": ("gemma4", '<|tool_call>call:f{x:<|"|>a'),
    "gemma4, words behind": ("gemma4", "<|tool_call>call:f{} or so<tool_call|>"),
    "gemma4, too large": ("gemma4", "<|tool_call>call:f{x:1e999}<tool_call|>"),
    "gemma4, deep": ("gemma4", f"<|tool_call>call:f{{x:{'[' * 70}{']' * 70}}}<tool_call|>"),
    "gemma4, thinking": ("gemma4", "<|channel>thought\n<|tool_call>call:f{}<tool_call|><channel|>3"),
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
    call = tool_calls.PARSERS["hermes"](text, ())[1][0]
    assert call == {"name": "f", "arguments": {"x": [1, {"y": None}]}}
    assert tool_calls.llama3('{"name": "f", "parameters": {"x": 2.5}}', ())[1] == [
        {"name": "f", "arguments": {"x": 2.5}}
    ]


THOUGHT = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
SPOKEN = {
    "hermes": '<tool_call>{"name": "g", "parameters": {"x": 1}}</tool_call>',
    "llama3": '{"name": "g", "arguments": {"x": 1}}',
    "mistral": '[TOOL_CALLS][{"name": "g", "parameters": {"x": 1}}]',
    "qwen3_coder": "<tool_call>\n<function=g>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>",
    "gemma4": "<|tool_call>call:g{x:1}<tool_call|>",
}
SCHEMA = {"type": "function", "function": {"name": "g", "parameters": {"properties": {"x": {"type": "integer"}}}}}


@pytest.mark.parametrize("parser", SPOKEN)
@pytest.mark.parametrize(
    "opening, closing",
    [("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<|channel>", "<channel|>"), ("", "</think>")],
)
def test_calls_behind_thinking_are_read_and_those_in_it_are_not(parser, opening, closing):
    thinking = f"{opening}maybe {THOUGHT} or [TOOL_CALLS]{closing}"
    told = tool_calls.message(f"{thinking}\n{SPOKEN[parser]}", parser, [SCHEMA])
    assert [call["function"] for call in told["tool_calls"]] == [{"name": "g", "arguments": {"x": 1}}]
    assert told["content"] == thinking


def coded(name: str, arguments: dict) -> str:
    """A call as the template of Qwen3.5 writes it: lists and objects as JSON, all else as Python's text."""
    lines = [f"<tool_call>\n<function={name}>\n"]
    for key, value in arguments.items():
        told = json.dumps(value) if isinstance(value, list | dict) else str(value)
        lines.append(f"<parameter={key}>\n{told}\n</parameter>\n")
    return "".join([*lines, "</function>\n</tool_call>"])


def braced(value) -> str:
    """A value as the template of Gemma 4 writes it."""
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{braced(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(braced, value)) + "]"
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else str(value)


WORDS = [
    "",
    "a",
    "12",
    "true",
    "None",
    "{x}",
    "[1",
    "a\n\nb ",
    "\n",
    '"',
    "</parameter>",
    "<parameter=",
    "call:f{}",
    "ü, :",
]
TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}


def drawn(rng: random.Random, levels: int = 3):
    kind = rng.choice(["text", "number", "flag", "none", "list", "object"][: 6 if levels else 4])
    if kind == "list":
        return [drawn(rng, levels - 1) for _ in range(rng.randrange(3))]
    if kind == "object":
        return {key: drawn(rng, levels - 1) for key in rng.sample(["a", "b_2", "c-d"], rng.randrange(4))}
    plain = {"text": rng.choice(WORDS), "number": rng.choice([0, -7, 2.5, 1e-9, 10**20]), "flag": rng.random() < 0.5}
    return plain.get(kind)


def test_calls_that_a_template_wrote_are_read_as_they_were():
    rng = random.Random(7)
    for _ in range(300):
        given = {key: drawn(rng) for key in ("x", "y", "z")[: rng.randrange(4)]}
        types = {key: {"type": TYPES.get(type(one), "null")} for key, one in given.items()}
        tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": types}}}]
        for parser, text in (
            ("qwen3_coder", coded("f", given)),
            ("gemma4", f"<|tool_call>call:f{braced(given)}<tool_call|>"),
        ):
            told = tool_calls.message(f"So. {text}", parser, tools)
            assert told["content"] == "So." and len(told["tool_calls"]) == 1, text
            assert told["tool_calls"][0]["function"] == {"name": "f", "arguments": given}, text


@pytest.mark.parametrize(
    "schema, text, value",
    [
        (None, "12", "12"),
        ({}, "12", "12"),
        ({"type": "string"}, "12", "12"),
        ({"type": "integer"}, "12", 12),
        ({"type": "integer"}, "True", "True"),
        ({"type": "integer"}, "twelve", "twelve"),
        ({"type": ["integer", "null"]}, "None", None),
        ({"type": ["string", "null"]}, "null", None),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "12", "12"),
        ({"anyOf": [{"type": "array"}, {"type": "null"}]}, "[12]", [12]),
        ({"type": "boolean"}, "true", True),
        ({"type": "boolean"}, "False", False),
        ({"type": "number"}, "2", 2),
        ({"type": [{"a": 1}, "integer"], "anyOf": 3}, "12", 12),
        ({"type": 3, "oneOf": [7, {"type": "array"}]}, "[12]", [12]),
        ({"type": "number"}, "NaN", "<tool_call><function=f><parameter=x>NaN</parameter></function></tool_call>"),
    ],
)
def test_a_value_has_the_type_that_the_schema_names(schema, text, value):
    function = {"name": "f", "parameters": {"properties": {"x": schema}}}
    whole = f"<tool_call><function=f><parameter=x>{text}</parameter></function></tool_call>"
    told = tool_calls.message(
        whole, "qwen3_coder", [] if schema is None else [{"type": "function", "function": function}]
    )
    if value == whole:
        assert told["content"] == whole and "tool_calls" not in told
    else:
        assert told["tool_calls"][0]["function"]["arguments"] == {"x": value}
