"""Chat templates: rendered text known by hand, on verl's real folder and on the features that templates use."""

from __future__ import annotations

import datetime
import gc
import json
import signal
import time
from pathlib import Path

import pytest
from refusals import refused

from jaxrl_post.data import chat
from jaxrl_post.data.chat import Chat

USER = [{"role": "user", "content": "1,2:"}]
CHATML = """{%- for message in messages %}
    {%- if loop.first and message['role'] != 'system' %}
        {{- bos_token }}
    {%- endif %}
    {{- '<|im_start|>' + message['role'] + '\\n' }}
    {%- if message['role'] == 'assistant' %}
        {%- generation %}
        {{- message['content'] + '<|im_end|>' }}
        {%- endgeneration %}
    {%- else %}
        {{- message['content'] + '<|im_end|>' }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def test_verls_real_template(data_dir):
    template = chat.load(data_dir / "verl-tiny-llama")
    assert template.render(USER) == "1,2:"
    assert template.render([*USER, {"role": "assistant", "content": "3"}, *USER]) == "1,2:31,2:"
    refused("refuses the messages: System role not supported", template.render, [{"role": "system", "content": "x"}])
    refused("must alternate", template.render, USER + USER)


def test_chatml_with_generation_marks():
    template = Chat(template=CHATML, tokens={"bos_token": "<s>"})
    said = [*USER, {"role": "assistant", "content": "3"}]
    assert template.render(USER) == "<s><|im_start|>user\n1,2:<|im_end|>\n<|im_start|>assistant\n"
    assert template.render(said, generation=False) == (
        "<s><|im_start|>user\n1,2:<|im_end|>\n<|im_start|>assistant\n3<|im_end|>\n"
    )
    # prefix-preserving: what the engine saw is a prefix of the longer conversation
    assert template.render(said, generation=False).startswith(template.render(USER))


def test_the_environment_is_that_of_transformers():
    def render(text, messages=USER):
        return Chat(template=text, now=datetime.datetime(2024, 7, 26)).render(messages)

    # trim_blocks and lstrip_blocks
    assert render("{% for m in messages %}\n  {% if true %}\nx\n  {% endif %}\n{% endfor %}") == "x\n"
    assert render("{{ '<é & \"q\">' | tojson }}") == '"<é & \\"q\\">"'  # no HTML escapes
    assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert render("{{ strftime_now('%d %b %Y') }}") == "26 Jul 2024"
    assert render("{{ tools is none }}{{ messages[0].content }}") == "True1,2:"
    for text in ("{{ messages.append(1) }}", "{{ ''.__class__.__mro__ }}", "{{ messages[0].pop('role') }}"):
        refused("chat template refuses", render, text)
    refused("chat template refuses", render, "{% if %}")


def test_where_the_template_comes_from(tmp_path):
    def settings(**given):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(given))

    assert chat.load(tmp_path) is None
    settings(
        chat_template=[{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d{{ eos_token }}"}],
        eos_token={"content": "</s>"},
        bos_token=None,
    )
    assert chat.load(tmp_path).render(USER) == "d</s>"
    settings(chat_template=[{"name": "tool_use", "template": "t"}])
    refused("no 'default'", chat.load, tmp_path)
    (tmp_path / "chat_template.jinja").write_text("file")
    assert chat.load(tmp_path).render(USER) == "file"


@pytest.mark.parametrize(
    "text,words",
    [
        ("{{ 'a' * 10**10 }}", "more than 768 MiB of memory"),
        ("{{ 'a' * 9**8 }}", "writes more than 16777216 characters"),
        ("{{ 7 // 0 }}", "ZeroDivisionError: integer division"),
        ("{{ 1e999 | int }}", "NameError: name 'inf' is not defined"),
        ("{{" + "(" * 5000 + "1" + ")" * 5000 + "}}", "RecursionError"),
        ("{{ raise_exception('a\\nb') }}", "refuses the messages: a b"),
        ("{{ '\\ud800' }}", "surrogates not allowed"),
    ],
)
def test_a_template_that_needs_too_much_is_refused_and_the_next_one_renders(text, words):
    template = Chat(template="{% if messages[0].content == 'x' %}" + text + "{% else %}fine{% endif %}")
    if "{{((" in text:  # no part of it is compiled
        template = Chat(template=text)
    caught = refused(words, template.render, [{"role": "user", "content": "x"}])
    assert len(caught) < 500
    if "{{((" not in text:
        assert template.render(USER) == "fine"
    template.close()


@pytest.mark.extended
def test_a_template_without_end_is_stopped_by_its_cpu_time_and_replaced():
    forever = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    template = Chat(template="{% if messages[0].content == 'x' %}" + forever + "{% endif %}fine")
    assert template.render(USER) == "fine"
    first = template._process._child.pid
    begun = time.monotonic()
    refused("takes more than 4 s of CPU time|takes more than 9 s", template.render, [{"role": "user", "content": "x"}])
    assert time.monotonic() - begun < 10
    assert template.render(USER) == "fine" and template._process._child.pid != first
    template.close()


def test_a_template_sees_no_environment_and_its_process_ends_with_it(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    template = Chat(template="fine")
    assert template.render(USER) == "fine"
    child = template._process._child
    assert "secret" not in Path(f"/proc/{child.pid}/environ").read_text()
    del template
    gc.collect()
    assert child.returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    "settings,words",
    [
        ({"chat_template": 5}, "chat_template must be a text, got 5"),
        ({"chat_template": [5]}, "must list objects with name and template, got 5"),
        ({"chat_template": [{"name": "default"}]}, "must list objects with name and template"),
        ({"chat_template": "x", "eos_token": {"x": 1}}, "eos_token must be a text, or an object with the text"),
    ],
)
def test_settings_that_are_no_template_are_one_sentence(tmp_path, settings, words):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    refused(f"tokenizer_config.json: .*{words}", chat.load, tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    (tmp_path / "tokenizer_config.json").write_text("{}")
    refused("chat_template.jinja: is no UTF-8 text", chat.load, tmp_path)
