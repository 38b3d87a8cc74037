"""Chat templates: hostile ones, and damaged copies of real ones."""

from __future__ import annotations

from pathlib import Path

from fuzz import mutations
from fuzz.child import sentence

HOSTILE = (
    *(
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 'a' * 10**10 }}",
        "{{ 10**10**8 }}",
    ),
    *("{{ 'a' * 10**9 }}{{ 'a' * 10**9 }}", "{% set x = ['a' * 9999999] %}{{ x * 9999 }}", "{{ range(10**9) | list }}"),
    *(
        "{% for i in range(99999) %}{% for j in range(999) %}aaaaaaaaaaaaaaaaaaaa{% endfor %}{% endfor %}",
        "{{ 7 // 0 }}",
    ),
    *(
        "{% macro m(x) %}{{ m(x) }}{% endmacro %}{{ m(1) }}",
        "{% include 'x' %}",
        "{% import 'os' as os %}",
        "{{ ''.__class__ }}",
    ),
    *(
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ self }}",
        "{{ 1.0 / 0 }}",
    ),
    *(
        "{{ lipsum(99999) }}",
        "{{ '%999999999d' % 1 }}",
        "{{ '{:>999999999}'.format(1) }}",
        "{{ 'a'.ljust(10**10) }}",
        "{{ x.y.z }}",
    ),
    *(
        "{{ messages[0]['none'].x }}",
        "{{ messages[9] }}",
        "{{ messages | tojson(indent=9999999) }}",
        "{{ messages['a'] }}",
    ),
    *(
        "{{ raise_exception(1) }}",
        "{{ raise_exception('a\nb') }}",
        "{{ strftime_now('%' * 9999) }}",
        "{{ strftime_now(1) }}",
    ),
    *(
        "{{ namespace(1) }}",
        "{{ dict(a=1, **2) }}",
        "{{ [1] | map('x') | list }}",
        "{{ 'a' | int(base=99) }}",
        "{{ {[]: 1} }}",
    ),
    *(
        "{% set n = namespace(s='a') %}{% for i in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}{{ n.s | length }}",
        "\ud800",
    ),
    *(
        "{" * 9999,
        "{{" + "(" * 5000 + "1" + ")" * 5000 + "}}",
        "{% if 1 %}" * 3000,
        "{{ 'a' ~ " * 3000,
        "{{ -" * 3000,
        "{{ '\\ud800' }}",
    ),
    *(
        "{{ ('a' * 30 + 'b') | replace('a', 'a' * 9999999) | length }}",
        "{{ 'a' | center(10**10) }}",
        "{{ 9 | round(10**9) }}",
    ),
    *(
        "{% call raise_exception('x') %}{% endcall %}",
        "{{ messages | sum }}",
        "{{ messages | sort }}",
        "{{ messages | groupby(1) }}",
    ),
    *(
        "{{ messages[0].content.encode('x') }}",
        "{{ '\x00' }}",
        "{{ [].__len__() }}",
        "{{ 'a'.format_map }}",
        "{{ 'a' | urlize }}",
    ),
    *(
        "{{ '' | join(messages) }}",
        "{{ (1).bit_length() }}",
        "{{ 'x'.translate(1) }}",
        "{{ 'a'.split('') }}",
        "{{ 1 | batch(0) | list }}",
    ),
    *(
        "{{ 5 | slice(0) | list }}",
        "{{ 'a' | indent('x') }}",
        "{{ 2 ** -1 ** 0.5 }}",
        "{{ (-1) ** 0.5 | round }}",
        "{{ 'a'.index('b') }}",
    ),
    *(
        "{{ messages | tojson | tojson | length }}",
        "{{ loop }}",
        "{% for m in messages recursive %}{{ loop([m]) }}{% endfor %}",
    ),
    *(
        "{{ 9**9**9 }}",
        "{{ 'a' | wordwrap(0) }}",
        "{{ 'aaa' | truncate(-1) }}",
        "{% extends x %}",
        "{{ 1e999 | int }}",
        "{{ 0.1 | filesizeformat }}",
    ),
)
REAL = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}{% for message in "
    "messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('must alternate') }}{% endif %}"
    "{% set role = message['role'] %}{{ message['content'] | trim }}{% endfor %}{{ strftime_now('%d %b %Y') }}",
    "{{- bos_token }}{%- set ns = namespace(first=true, text='') %}{%- for message in messages %}{%- if message.content is string %}"
    "{%- set ns.text = message.content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}{{ ns.text | tojson }}{%- endfor %}",
)
MESSAGES = [{"role": "user", "content": "1,2:"}, {"role": "assistant", "content": "3"}]


class Cases:
    """First the hostile templates, then damaged ones, then valid ones over damaged messages."""

    def __init__(self, folder: Path):
        from jaxrl_post.data import chat

        self._load, self._folder, self._file = chat.load, folder, folder / "chat_template.jinja"
        (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')

    def valid(self) -> None:
        for text in REAL:
            self._file.write_text(text)
            self._render(MESSAGES)

    def own(self, error: BaseException) -> bool:
        return sentence(error, "chat template") or sentence(error, str(self._folder))

    def case(self, index, random):
        if index < len(HOSTILE):
            what, text = HOSTILE[index][:80], HOSTILE[index].encode("utf-8", errors="surrogatepass")
            messages = MESSAGES
        elif index % 2:
            what, text = mutations.damaged(random, random.choice(REAL).encode())
            messages = MESSAGES
        else:
            text = random.choice(REAL).encode()
            what, messages = mutations.changed(random, MESSAGES)
            messages = [
                one for one in (messages if isinstance(messages, list) else [messages]) if isinstance(one, dict)
            ]
        self._file.write_bytes(text)
        return what, lambda: self._render(messages)

    def _render(self, messages) -> None:
        assert isinstance(self._load(self._folder).render(messages), str)
