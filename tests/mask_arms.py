"""Conversations, a small tokenizer and five chat templates with generation marks, in the families' own wire formats.

Imports no part of the project and no jax, so that an environment with transformers reads it too.
"""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers

GOLDENS = Path(__file__).parent / "goldens" / "assistant_masks.json"
SPECIAL = (
    *("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("[INST]", "[/INST]", "<start_of_turn>", "<end_of_turn>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"),
)
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}

CHATML = """{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\n' }}
    {%- if m.role == 'assistant' %}
        {%- generation %}{{- m.content + '<|im_end|>' }}{%- endgeneration %}
        {{- '\n' }}
    {%- else %}{{- m.content + '<|im_end|>\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""
HEADERS = """{{- bos_token }}
{%- for m in messages %}
    {{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}
    {%- set said = m.content | trim + '<|eot_id|>' %}
    {%- if m.role == 'assistant' %}{% generation %}{{ said }}{% endgeneration %}{% else %}{{ said }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}
"""
INST = """{{- bos_token }}
{%- for m in messages if m.role != 'system' %}
    {%- if m.role == 'user' %}{{- '[INST] ' + m.content + ' [/INST]' }}
    {%- else %}{%- generation %}{{- ' ' + m.content + eos_token }}{%- endgeneration %}{%- endif %}
{%- endfor %}
"""
TURNS = """{{- bos_token }}
{%- for m in messages if m.role != 'system' %}
    {{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}
    {%- if m.role == 'assistant' %}
        {%- generation -%}
        {{- m.content | trim + '<end_of_turn>\n' }}
        {%- endgeneration -%}
    {%- else %}{{- m.content | trim + '<end_of_turn>\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\n' }}{%- endif %}
"""
BARS = """{%- for m in messages %}
    {%- if m.role == 'assistant' %}{{- '<|assistant|>\n' }}{%- generation %}{{- m.content }}{%- endgeneration %}{{- '<|end|>\n' }}
    {%- else %}{{- '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\n' }}{%- else %}{{- eos_token }}{%- endif %}
"""
# As Qwen, Llama 3, Mistral, Gemma and Phi-3 write a conversation. The last one leaves the end of a turn unmarked.
TEMPLATES = {"chatml": CHATML, "headers": HEADERS, "inst": INST, "turns": TURNS, "bars": BARS}
# The head of an assistant's turn is not how an answer begins: as in DeepSeek-R1's thinking template, in one whose head ends
# within a token of the answer (as Qwen3.5's thinking head), and in Gemma 4's. The last two write both alike.
_OPENS = """{{- bos_token }}{%- for m in messages %}
    {%- if m.role == 'assistant' %}{{- '<|assistant|>' + m.content.split('</think>')[-1] + '</s>' }}
    {%- else %}{{- '<|' + m.role + '|>' + m.content }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|><think>\n' }}{%- endif %}
"""
_CHATML_HEAD = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
_NUMBERS = CHATML.replace("m.content + '<|im_end|>' }}", "'numbers ' + m.content + '<|im_end|>' }}")
HEADS = {
    "opens": _OPENS,
    "merges": _NUMBERS.replace(_CHATML_HEAD, _CHATML_HEAD.replace("assistant\n'", "assistant\nnum'")),
    "empties": CHATML.replace(
        _CHATML_HEAD, _CHATML_HEAD.replace("assistant\n'", "assistant\n<think>\n\n</think>\n\n'")
    ),
    "same": CHATML,
    "ends": BARS,
}


def say(role: str, content: str) -> dict:
    return {"role": role, "content": content}


CONVERSATIONS = (
    (say("user", "What is 2 plus 2?"), say("assistant", "It is 4.")),
    (
        say("system", "You add numbers."),
        say("user", "1 and 5"),
        say("assistant", "  The sum is 6. \n"),  # space at a border: a token may hold it and a part of the turn
        say("user", "and é to that? 数"),
        say("assistant", "é and 数 are no numbers."),
        say("user", "thanks"),
    ),
    (say("user", "a"), say("assistant", "b"), say("user", "c"), say("assistant", "d [INST] e")),
)


def answers() -> list[list[dict]]:
    """Returns the conversations up to each turn of an assistant."""
    return [
        list(talk[: place + 1])
        for talk in CONVERSATIONS
        for place, message in enumerate(talk)
        if message["role"] == "assistant"
    ]


def train(folder: Path) -> Path:
    """Returns the folder of a byte-level tokenizer of 400 tokens, trained on the conversations."""
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(SPECIAL),
        show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    model.train_from_iterator([m["content"] for talk in CONVERSATIONS for m in talk] * 3, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    model.save(str(folder / "tokenizer.json"))
    config = {**TOKENS, "tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
