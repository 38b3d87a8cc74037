"""Folders of tokenizers: tokenizer.json, and the files beside it that name end tokens."""

from __future__ import annotations

import json
from pathlib import Path

from fuzz import mutations
from fuzz.child import sentence

TEXT = "1+1= a bé\n\t  \U0001f600 {x} <s>"
BESIDE = {
    "tokenizer_config": {
        "bos_token": {"content": "<s>"},
        "eos_token": "</s>",
        "chat_template": [{"name": "default", "template": "{{ messages[0].content }}{{ eos_token }}"}],
    },
    "generation_config": {"eos_token_id": [1, 0], "bos_token_id": 0},
    "config": {"eos_token_id": 1, "bos_token_id": 0},
}
_REGEXES = (
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


class Cases:
    """Two vocabularies: one of bytes with merges, one of single characters."""

    def __init__(self, folder: Path):
        import tokenizers
        from tokenizers import decoders, models, pre_tokenizers, trainers

        from jaxrl_post.data import chat, tokenizer

        self._load, self._chat, self._folder = tokenizer.load, chat.load, folder
        model = tokenizers.Tokenizer(models.BPE())
        model.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(tokenizers.Regex(r"\p{N}{1,3}|\s+"), "isolated"),
                pre_tokenizers.ByteLevel(use_regex=True),
            ]
        )
        model.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        model.train_from_iterator(
            ["a bad cab", "1+1=2 10"],
            trainers.BpeTrainer(
                vocab_size=280, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
            ),
        )
        tokenizer.characters("".join(dict.fromkeys(TEXT + "/"))).save(folder)
        self._given = [json.loads(model.to_str()), json.loads((folder / "tokenizer.json").read_text())]
        self._small = [self._shortened(one) for one in self._given]

    def _shortened(self, given: dict) -> dict:
        """Leaves a few words of the vocabulary, so that most changes fall elsewhere."""
        vocabulary = dict(list(given["model"]["vocab"].items())[:6])
        return given | {
            "model": given["model"] | {"vocab": vocabulary} | ({"merges": []} if "merges" in given["model"] else {})
        }

    def valid(self) -> None:
        for given in self._given:
            self._write({"tokenizer": json.dumps(given).encode()})
            self._encode()

    def own(self, error: BaseException) -> bool:
        return (
            sentence(error, str(self._folder))
            or sentence(error, "the tokenizer ")
            or sentence(error, "the chat template ")
        )

    def case(self, index, random):
        name = random.choice(("tokenizer", "tokenizer", "tokenizer", *BESIDE))
        given = random.choice((*self._given, *self._small)) if name == "tokenizer" else BESIDE[name]
        what, data = mutations.damaged_json(random, given)
        if name == "tokenizer" and random.random() < 0.1:
            split = {
                "type": "Split",
                "pattern": {"Regex": random.choice(_REGEXES)},
                "behavior": "Isolated",
                "invert": False,
            }
            what, data = repr(split["pattern"]), json.dumps(given | {"pre_tokenizer": split}).encode()
        self._write({"tokenizer": json.dumps(random.choice(self._given)).encode(), name: data})
        return f"{name}.json: {what}", self._encode

    def _write(self, files: dict[str, bytes]) -> None:
        for name, value in ({n: json.dumps(v).encode() for n, v in BESIDE.items()} | files).items():
            (self._folder / f"{name}.json").write_bytes(value)

    def _encode(self) -> None:
        words, template = self._load(self._folder), self._chat(self._folder)
        text = template.render([{"role": "user", "content": TEXT}]) if template else TEXT
        for one in (text, "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaab" * 50):
            assert isinstance(words.decode(words.encode(one)), str)
