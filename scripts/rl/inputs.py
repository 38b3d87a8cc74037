"""What the runs of scripts/rl_check.py begin with: random weights with a tokenizer of letters, and prompts of GSM8K's lengths.

    python scripts/rl/inputs.py FOLDER PRESET    writes FOLDER/policy and FOLDER/prompts.jsonl

With real weights, prompts and rewards are GSM8K's own, and nothing is made here.
"""

from __future__ import annotations

import dataclasses
import json
import string
import sys
from pathlib import Path

import numpy as np
from gpu import rl_policy

from jaxrl_post.models.presets import PRESETS

# Qwen3-1.7B is as deep as 0.6B and wider: config.json of the checkpoint.
MODELS = PRESETS | {"qwen3_1_7b": dataclasses.replace(PRESETS["qwen3_0_6b"], embed=2048, ffw=6144)}
# 254 letters, so that with the end and the unknown token there are 256.
LETTERS = string.digits + string.ascii_letters + "".join(chr(0x100 + number) for number in range(192))
PROMPTS = 32
MEDIAN, SPREAD = (
    85,
    0.36,
)  # of GSM8K's questions: 217 characters and a template, at four characters a token; of the logarithm
SHORTEST, LONGEST = 40, 250  # tokens


def prompts(count: int = PROMPTS, median: int = MEDIAN, longest: int = LONGEST) -> list[dict[str, str]]:
    """Returns questions of random letters, one token each, of lognormal lengths, and an answer that no reward reads."""
    noise = np.random.default_rng(0)
    lengths = np.clip(median * np.exp(SPREAD * noise.standard_normal(count)), min(SHORTEST, median), longest).astype(
        int
    )
    letters = np.array(list(LETTERS))
    return [{"question": "".join(noise.choice(letters, length)), "answer": "#### 1"} for length in lengths]


def write(folder: Path, preset: str, *made: int) -> None:
    """Writes both, unless an earlier call has. made: count, median and longest of the prompts."""
    if not (folder / "prompts.jsonl").is_file():
        rl_policy.write(folder / "policy", MODELS[preset], LETTERS, "bfloat16")
        lines = [json.dumps(row) + "\n" for row in prompts(*made)]
        (folder / "prompts.jsonl").write_text("".join(lines))


if __name__ == "__main__":
    write(Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:]))
