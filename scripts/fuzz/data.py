"""Rows in JSONL and Parquet, chat templates, and folders of tokenizers."""

from __future__ import annotations

import json
from pathlib import Path

from fuzz.kind import Kind
from fuzz.mutations import changed, damaged, damaged_json

VERL = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "1+1="}],
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"split": "train", "index": 7},
}
SHAPES = (
    ("verl", VERL),
    ("verl", {"id": "x", "prompt": "2+2=", "answer": 4, "source": "own", "extra": {"level": 1}}),
    ("trl", {"prompt": [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}], "answer": "3"}),
    ("slime", {"prompt": "3=", "label": "3", "metadata": {"source_name": "s"}}),
)
LARGE = (10_000_000, 100_000_000)  # characters of a row
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m['content'] }}{% endfor %}"
HOSTILE = (
    *Path(__file__).with_name("templates.txt").read_text(encoding="utf-8").splitlines(),
    "{{ raise_exception('a\nb') }}",
    "\ud800",
    "{" * 9999,
    "{{" + "(" * 5000 + "1" + ")" * 5000 + "}}",
    "{% if 1 %}" * 3000,
    "{{ 'a' ~ " * 3000,
    "{{ -" * 3000,
    "{{ '\x00' }}",
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
TEXT = "1+1= a bé\n\t  \U0001f600 {x} <s>"
BESIDE = {  # files beside a tokenizer.json
    "tokenizer_config": {
        "bos_token": {"content": "<s>"},
        "eos_token": "</s>",
        "chat_template": [{"name": "default", "template": "{{ messages[0].content }}{{ eos_token }}"}],
    },
    "generation_config": {"eos_token_id": [1, 0], "bos_token_id": 0},
    "config": {"eos_token_id": 1, "bos_token_id": 0},
}
REGEXES = (
    "(a+)+$",
    "(?:(?:(?:a{1000}){1000}){1000}",
    "((((",
    "[\\s\\S]",
    "",
    "(?=a)*",
    "\\p{N}{1,3}",
    "(x?){100000}",
    "a||||",
)


def rows(folder: Path) -> Kind:
    """A file has three rows, of which the second is damaged, or it is damaged as a whole. Read to token ids."""
    from jaxrl_post.data import chat, prompts, tokenizer
    from jaxrl_post.data.columns import Columns

    file, made = folder / "rows.jsonl", chat.Chat(template=TEMPLATE)
    words = tokenizer.characters("".join(map(chr, range(10, 127))))

    def read(form: str, data: bytes):
        file.write_bytes(data)
        return lambda: tokens(Columns(format=form))

    def tokens(columns: Columns) -> None:
        found = prompts.rows(str(file), seed=0, split="train", size=1, columns=columns)
        prompts.Prompts(prompts.tokenised(found, words, chat=made, limit=2048), 0)

    def case(index, random):
        if index < 2 * len(LARGE):
            prompt = "1" * LARGE[index // 2]
            row = {"prompt": [{"role": "user", "content": prompt}] if index % 2 else prompt, "answer": "1"}
            return f"a row of {len(prompt)} characters", read("verl", json.dumps(row).encode())
        form, row = random.choice(SHAPES)
        lines = [json.dumps(row | {"id": "a"}).encode(), b"", json.dumps(row | {"id": "c"}).encode()]
        if random.random() < 0.2:
            what, data = damaged(random, lines[0] + b"\n" + lines[2])
            return what, read(form, data)
        what, lines[1] = damaged_json(random, row | {"id": "b"})
        return what, read(form, b"\n".join(lines))

    valid = lambda: [read(form, json.dumps(row).encode())() for form, row in SHAPES]  # noqa: E731
    return Kind(valid=valid, case=case, names=(file.name, "no prompts"))


def parquet(folder: Path) -> Kind:
    """Damages files of several compressions; half of the faults lie in the footer."""
    import pyarrow
    from pyarrow import parquet as written

    from jaxrl_post.data import prompts

    file, whole = folder / "rows.parquet", []
    given = [VERL | {"extra_info": {"split": "train", "index": i, "level": i / 3}} for i in range(40)]
    zstd, none = {"compression": "zstd", "row_group_size": 7}, {"compression": "none", "use_dictionary": False}
    for settings in ({}, zstd, none):
        written.write_table(pyarrow.Table.from_pylist(given), file, **settings)
        whole.append(file.read_bytes())

    def valid() -> None:
        for data in whole:
            file.write_bytes(data)
            prompts.read(file)

    def case(index, random):
        data = random.choice(whole)
        size = int.from_bytes(data[-8:-4], "little") + 8
        at = random.choice((0, len(data) - size))
        what, part = damaged(random, data[at:])
        file.write_bytes(data[:at] + part)
        return f"{'footer' if at else 'file'}: {what}", lambda: prompts.read(file)

    return Kind(valid=valid, case=case, names=(file.name,))


def chat_template(folder: Path) -> Kind:
    """First the hostile templates, then damaged ones, then valid ones over damaged messages."""
    from jaxrl_post.data import chat

    file = folder / "chat_template.jinja"
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')

    def render(text: bytes, messages: list) -> None:
        file.write_bytes(text)
        assert isinstance(chat.load(folder).render(messages), str)

    def case(index, random):
        what, text, messages = "", random.choice(REAL).encode(), MESSAGES
        if index < len(HOSTILE):
            what, text = HOSTILE[index][:80], HOSTILE[index].encode("utf-8", errors="surrogatepass")
        elif index % 2:
            what, text = damaged(random, text)
        else:
            what, given = changed(random, MESSAGES)
            messages = [one for one in (given if isinstance(given, list) else [given]) if isinstance(one, dict)]
        return what, lambda: render(text, messages)

    valid = lambda: [render(text.encode(), MESSAGES) for text in REAL]  # noqa: E731
    return Kind(valid=valid, case=case, names=("chat template", str(folder)))


def tokenizer(folder: Path) -> Kind:
    """Two vocabularies, one of bytes with merges and one of single characters, and the files beside that name ends."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    from jaxrl_post.data import chat
    from jaxrl_post.data import tokenizer as reader

    model = tokenizers.Tokenizer(models.BPE())
    split = pre_tokenizers.Split(tokenizers.Regex(r"\p{N}{1,3}|\s+"), "isolated")
    model.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(use_regex=True)])
    model.decoder, alphabet = decoders.ByteLevel(), pre_tokenizers.ByteLevel.alphabet()
    how = dict(special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False)
    model.train_from_iterator(["a bad cab", "1+1=2 10"], trainers.BpeTrainer(vocab_size=280, **how))
    reader.characters("".join(dict.fromkeys(TEXT + "/"))).save(folder)
    given = [json.loads(model.to_str()), json.loads((folder / "tokenizer.json").read_text())]

    def shortened(one: dict) -> dict:
        """Leaves a few words of the vocabulary, so that most changes fall elsewhere."""
        fewer = {"vocab": dict(list(one["model"]["vocab"].items())[:6])}
        return one | {"model": one["model"] | fewer | ({"merges": []} if "merges" in one["model"] else {})}

    def write(files: dict[str, bytes]) -> None:
        for name, value in ({n: json.dumps(v).encode() for n, v in BESIDE.items()} | files).items():
            (folder / f"{name}.json").write_bytes(value)

    def encode() -> None:
        words, template = reader.load(folder), chat.load(folder)
        text = template.render([{"role": "user", "content": TEXT}]) if template else TEXT
        for one in (text, "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaab" * 50):
            assert isinstance(words.decode(words.encode(one)), str)

    def valid() -> None:
        for one in given:
            write({"tokenizer": json.dumps(one).encode()})
            encode()

    def case(index, random):
        name = random.choice(("tokenizer", "tokenizer", "tokenizer", *BESIDE))
        one = random.choice((*given, *map(shortened, given))) if name == "tokenizer" else BESIDE[name]
        what, data = damaged_json(random, one)
        if name == "tokenizer" and random.random() < 0.1:
            pattern = {"Regex": random.choice(REGEXES)}
            split = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
            what, data = repr(pattern), json.dumps(one | {"pre_tokenizer": split}).encode()
        write({"tokenizer": json.dumps(random.choice(given)).encode(), name: data})
        return f"{name}.json: {what}", encode

    return Kind(valid=valid, case=case, names=(str(folder), "the tokenizer ", "the chat template "))


KINDS = {"rows": rows, "parquet": parquet, "chat_template": chat_template, "tokenizer": tokenizer}
