"""config.json of every model family, from the file to placed weights and back to a config.json."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from fuzz import mutations
from fuzz.child import sentence

GOLDENS = Path(__file__).resolve().parents[2] / "tests" / "goldens"
FAMILIES = ("gemma2", "gemma3", "llama2", "llama3", "mistral", "qwen2", "qwen3")


class Cases:
    """Changes one or two keys of the config.json beside valid weights."""

    def __init__(self, folder: Path):
        from jaxrl_post.models import hf

        self._hf, self._folder = hf, folder
        self._given = {name: json.loads((GOLDENS / name / "config.json").read_text()) for name in FAMILIES}
        for name in FAMILIES:
            shutil.copytree(GOLDENS / name, folder / name)

    def valid(self) -> None:
        for name in FAMILIES:
            self._load(name)

    def own(self, error: BaseException) -> bool:
        return sentence(error, str(self._folder)) or sentence(error, "cannot be saved")

    def case(self, index, random):
        name = random.choice(FAMILIES)
        what, data = mutations.damaged_json(random, self._given[name])
        (self._folder / name / "config.json").write_bytes(data)
        return f"{name}: {what}", lambda: self._load(name)

    def _load(self, name: str) -> None:
        config = self._hf.read_config(self._folder / name / "config.json")
        self._hf.check_savable(config)
        self._hf.load(self._folder / name)
