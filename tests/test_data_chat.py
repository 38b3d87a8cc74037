"""Chat templates: rendered text known by hand, on verl's real folder and on the features that templates use."""

from __future__ import annotations

import datetime
import json

import pytest

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
    with pytest.raises(ValueError, match="refuses the messages: System role not supported"):
        template.render([{"role": "system", "content": "x"}])
    with pytest.raises(ValueError, match="must alternate"):
        template.render(USER + USER)


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
        with pytest.raises(ValueError, match="chat template refuses"):
            render(text)
    with pytest.raises(ValueError, match="chat template refuses"):
        render("{% if %}")


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
    with pytest.raises(ValueError, match="no 'default'"):
        chat.load(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("file")
    assert chat.load(tmp_path).render(USER) == "file"
