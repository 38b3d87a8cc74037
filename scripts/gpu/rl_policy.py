"""Writes random weights as a Hugging Face directory, with a tokenizer of 66 tokens: `python rl_policy.py FOLDER PRESET`.

The other ids of the vocabulary are never drawn, as a run knows which ids its tokenizer has. The head is as wide as ever.
"""

from __future__ import annotations

import string
import sys
import tempfile
from pathlib import Path

from jaxrl_post.data import tokenizer
from jaxrl_post.data.tasks import ALPHABET
from jaxrl_post.models import decoder, hf
from jaxrl_post.models.presets import PRESETS

LETTERS = ALPHABET + string.ascii_letters[: 64 - len(ALPHABET)]


def write(place: Path, model: decoder.ModelConfig, letters: str = LETTERS, dtype: str = "float32") -> None:
    """Writes weights, and a tokenizer of the letters. By float32 a run's policy is written with every bit that was trained."""
    words = tokenizer.characters(letters)
    with tempfile.TemporaryDirectory() as folder:
        words.save(Path(folder) / "words")
        files = sorted((Path(folder) / "words").iterdir())
        how = dict(dtype=dtype, tokenizer_files=files, eos_ids=words.eos_ids, bos_id=words.bos_id)
        hf.save(place, model, decoder.init(model, 0), **how)


if __name__ == "__main__":
    write(Path(sys.argv[1]), PRESETS[sys.argv[2]])
