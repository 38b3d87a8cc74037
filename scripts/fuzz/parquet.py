"""Parquet files of rows."""

from __future__ import annotations

from pathlib import Path

from fuzz import mutations
from fuzz.child import sentence

ROWS = [
    {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"{i}+1= é"}],
        "reward_model": {"style": "rule", "ground_truth": str(i + 1)},
        "extra_info": {"split": "train", "index": i, "level": i / 3},
    }
    for i in range(40)
]


class Cases:
    """Damages files of several compressions; half of the faults lie in the footer."""

    def __init__(self, folder: Path):
        import pyarrow
        from pyarrow import parquet

        from jaxrl_post.data import prompts

        self._file, self._read = folder / "rows.parquet", prompts.read
        self._data = []
        for settings in (
            {},
            {"compression": "zstd", "row_group_size": 7},
            {"compression": "none", "use_dictionary": False},
        ):
            parquet.write_table(pyarrow.Table.from_pylist(ROWS), self._file, **settings)
            self._data.append(self._file.read_bytes())

    def valid(self) -> None:
        for data in self._data:
            self._file.write_bytes(data)
            self._read(self._file)

    def own(self, error: BaseException) -> bool:
        return sentence(error, "rows.parquet")

    def case(self, index, random):
        data = random.choice(self._data)
        size = int.from_bytes(data[-8:-4], "little") + 8
        at = random.choice((0, len(data) - size))
        what, part = mutations.damaged(random, data[at:])
        self._file.write_bytes(data[:at] + part)
        return f"{'footer' if at else 'file'}: {what}", lambda: self._read(self._file)
