"""Rows of JSONL files, from the file to token ids."""

from __future__ import annotations

import json
from pathlib import Path

from fuzz import mutations
from fuzz.child import sentence

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
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m['content'] }}{% endfor %}"
LARGE = (10_000_000, 100_000_000)  # characters of a row


class Cases:
    """A file has three rows, of which the second is damaged, or it is damaged as a whole."""

    def __init__(self, folder: Path):
        from jaxrl_post.data import chat, prompts, tokenizer
        from jaxrl_post.data.columns import Columns

        self._file, self._prompts, self._columns = folder / "rows.jsonl", prompts, Columns
        self._words = tokenizer.characters("".join(map(chr, range(10, 127))))
        self._chat = chat.Chat(template=TEMPLATE)

    def valid(self) -> None:
        for form, row in SHAPES:
            self._read(form, json.dumps(row).encode())()

    def own(self, error: BaseException) -> bool:
        return sentence(error, "rows.jsonl") or sentence(error, "no prompts")

    def case(self, index, random):
        if index < 2 * len(LARGE):
            prompt = "1" * LARGE[index // 2]
            row = {"prompt": [{"role": "user", "content": prompt}] if index % 2 else prompt, "answer": "1"}
            return f"a row of {len(prompt)} characters", self._read("verl", json.dumps(row).encode())
        form, row = random.choice(SHAPES)
        lines = [json.dumps(row | {"id": "a"}).encode(), b"", json.dumps(row | {"id": "c"}).encode()]
        if random.random() < 0.2:
            what, data = mutations.damaged(random, lines[0] + b"\n" + lines[2])
            return what, self._read(form, data)
        what, lines[1] = mutations.damaged_json(random, row | {"id": "b"})
        return what, self._read(form, b"\n".join(lines))

    def _read(self, form: str, data: bytes):
        self._file.write_bytes(data)
        return lambda: self._tokens(form)

    def _tokens(self, form: str) -> None:
        columns = self._columns(format=form)
        rows = self._prompts.rows(str(self._file), seed=0, split="train", size=1, columns=columns)
        self._prompts.Prompts(self._prompts.tokenised(rows, self._words, chat=self._chat, limit=2048), 0)
