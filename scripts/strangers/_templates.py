"""Templates of the kinds that no wheel ships, and what the templates of the show can write."""

from __future__ import annotations

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + (message['content'] or '') + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# As Mistral's: tools stand before the last message of the user. Calls and results of tools have marks of their own.
MISTRAL = """{%- if messages[0].role == 'system' %}
    {%- set system_message = messages[0].content %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set users = loop_messages | selectattr('role', 'equalto', 'user') | list %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message.role == 'user' %}
        {%- if tools is not none and message == users[-1] %}
            {{- '[AVAILABLE_TOOLS] [' }}
            {%- for tool in tools %}
                {{- '{"type": "function", "function": ' + tool.function | tojson + '}' }}
                {%- if not loop.last %}{{- ', ' }}{%- endif %}
            {%- endfor %}
            {{- '][/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}
            {{- '[INST] ' + system_message + '\n\n' + message.content + '[/INST]' }}
        {%- else %}
            {{- '[INST] ' + message.content + '[/INST]' }}
        {%- endif %}
    {%- elif message.tool_calls is defined and message.tool_calls %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in message.tool_calls %}
            {{- call.function | tojson }}
            {%- if not loop.last %}{{- ', ' }}{%- endif %}
        {%- endfor %}
        {{- ']' + eos_token }}
    {%- elif message.role == 'assistant' %}
        {{- ' ' + message.content | trim + eos_token }}
    {%- elif message.role == 'tool' %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content | string + '}[/TOOL_RESULTS]' }}
    {%- else %}
        {{- raise_exception('Only user, assistant, tool and a first system message are supported!') }}
    {%- endif %}
{%- endfor %}
"""
# As vision models': every content is a list of parts.
PARTS = """{%- for message in messages %}
    {{- '<|' + message.role + '|>\n' }}
    {%- if message.content is string %}{{- message.content }}
    {%- elif message.content is defined %}
        {%- for part in message.content %}
            {%- if part.type == 'text' %}{{- part.text | trim + ' ' }}{%- else %}{{- '<|image|>' }}{%- endif %}
        {%- endfor %}
    {%- endif %}
    {{- '<|end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\n' }}{%- endif %}
"""
# name -> text here, or the name of a file that TRL ships; what transformers is given; and what a conversation of it may have.
# `parts`: whether the template reads lists of parts, as its text says.
TABLE: dict[str, dict] = {
    "llama3_2": {"file": "llama3_2.jinja", "tools": True, "parts": False, "system": True},
    "qwen3_thinking": {"file": "qwen3.jinja", "tools": True, "parts": False, "system": True, "thinking": True},
    "qwen3_not_thinking": {"file": "qwen3.jinja", "tools": True, "parts": False, "system": True, "thinking": False},
    "mistral": {"text": MISTRAL, "tools": True, "parts": False, "system": True},
    "gemma3": {"file": "gemma3.jinja", "tools": False, "parts": True, "system": True},
    "parts": {"text": PARTS, "tools": False, "parts": True, "system": True},
    "qwen2_5_vl": {"file": "qwen2_5_vl.jinja", "tools": False, "parts": True, "system": True},
    "no_system": {"file": "gemma.jinja", "tools": False, "parts": False, "system": False},
    "opens_thinking": {"file": "deepseek_r1_distill.jinja", "tools": False, "parts": False, "system": True},
    "chatml": {"text": CHATML, "tools": False, "parts": False, "system": True},
}
