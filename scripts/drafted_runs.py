"""Whole synchronous runs of tiny models, with a drafter and without, at many numbers of slots: what each leaves, to the bit.

    python scripts/drafted_runs.py FOLDER PART OF       every OF-th case from PART on; writes FOLDER/PART.json
    python scripts/drafted_runs.py FOLDER planted       one case with tiles that follow from the head rows, as a fault
    python scripts/drafted_runs.py FOLDER asked         one case with engine.head_rows given

A case is (slots, row sizes, vocabulary, tied or untied head); every case is run with each of DRAFTERS. A digest is taken of the
tokens, of the log-probs and of the policy that the run ended with. In scripts/shows/held_out_faults.py they are compared.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import json
import os
import sys
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")
ROOT = Path(__file__).resolve().parents[1]
DRAFTERS = ("off", "ours", "histospec")
WIDTHS = {16: 32, 1531: 42, 4096: 128}  # vocabulary -> width of the model


class Case(NamedTuple):
    slots: int
    row_sizes: tuple[int, ...]
    vocab: int
    tied: bool

    @property
    def name(self) -> str:
        rows = "+".join(map(str, self.row_sizes))
        return f"{self.slots}_slots_{rows}_rows_{self.vocab}_{'tied' if self.tied else 'untied'}"


SHAPES = [(slots, (64, 128)) for slots in (3, 16, 33, 64, 100)] + [(slots, (slots,)) for slots in (3, 16)]
CASES = [Case(*shape, vocab, tied) for tied, vocab, shape in itertools.product((False, True), WIDTHS, SHAPES)]
ONE = Case(16, (64, 128), 1531, False)

CONFIG = """
from jaxrl_post.config import default


def get_config():
    c = default()
    c.name, c.steps = "drafted", 2
    c.engine.max_length, c.engine.page_size, c.engine.steps_per_dispatch = 24, 8, 4
    c.engine.cost_table = "{folder}/cost.json"
    c.sampling.max_tokens = 12
    c.scheduler.prompts, c.scheduler.group_size = 6, 4
    c.batch.rows, c.batch.tokens, c.batch.head_chunk = 2, 96, 192
    c.optimizer.lr = 1e-2
    c.algorithm.rollout_is = "token"
    c.data.train, c.reward.functions = "{folder}/train.jsonl", ("{folder}/reward.py:even",)
    c.eval.prompts, c.history.epochs, c.checkpoint.every = 0, 2, 0
    return c
"""
SPECULATION = ("--config.speculation.width=4", "--config.speculation.prompt_entries=4096")
OURS = "--config.speculation.shared_entries=3000", "--config.speculation.live_entries=256"
REWARD = """
def even(data_source, solution_str, ground_truth, extra_info):
    return sum(map(ord, solution_str)) % 7 / 7
"""


def prepare(folder: Path) -> None:
    """Config, reward, data and cost table: rows are free, so that every dispatch drafts."""
    (folder / "drafted.py").write_text(CONFIG.format(folder=folder))
    (folder / "reward.py").write_text(REWARD)
    rows = [
        {"id": str(n), "prompt": "abcdef"[n % 6] * 3 + "abc"[: n % 3], "reward_model": {"ground_truth": ""}}
        for n in range(6)
    ]
    (folder / "train.jsonl").write_text("".join(json.dumps({"data_source": "x", **row}) + "\n" for row in rows))
    (folder / "cost.json").write_text(json.dumps({"figures": {"step_s": {"1": 1.0, "128": 1.0}, "drafting_s": 0.0}}))


def model(folder: Path, case: Case) -> Path:
    """A Hugging Face directory of random weights; a likely token follows from the one before, so that drafts prove right."""
    from jaxrl_post.data import tokenizer
    from jaxrl_post.models import decoder, hf

    place, width = folder / f"model_{case.vocab}_{case.tied}", WIDTHS[case.vocab]
    if place.is_dir():
        return place
    shape = decoder.ModelConfig(
        vocab_size=case.vocab,
        embed=width,
        layers=1,
        heads=width // 14 if width % 14 == 0 else width // 16,
        kv_heads=1,
        head_dim=14 if width % 14 == 0 else 16,
        ffw=2 * width,
        max_length=64,
        tied=case.tied,
    )
    params = decoder.init(shape, 0)
    for name in ("embed", "head"):
        if name in params:
            params[name] = params[name] * 4
    words = tokenizer.characters("".join(chr(97 + n) for n in range(case.vocab - 2)))
    words.save(folder / "words")
    files = list((folder / "words").iterdir())
    hf.save(place, shape, params, tokenizer_files=files, eos_ids=words.eos_ids, bos_id=words.bos_id)
    return place


def run(folder: Path, case: Case, drafter: str, *more: str) -> dict:
    """Digests of what the run left, and what it drafted; {"refused": why} where there was none."""
    from jaxrl_post import main
    from jaxrl_post.telemetry import metrics, rollout_log

    place = folder / "runs" / f"{case.name}_{drafter}_{len(list((folder / 'runs').iterdir()))}"
    flags = (
        f"--config={folder}/drafted.py",
        f"--run-dir={place}",
        f"--config.model.path={model(folder, case)}",
        f"--config.engine.slots={case.slots}",
        f"--config.engine.row_sizes={list(case.row_sizes)}",
        f"--config.speculation.drafter={drafter}",
        *(SPECULATION if drafter != "off" else ()),
        *(OURS if drafter == "ours" else ()),
        *more,
    )
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = main.main(flags)
    if code:
        return {"refused": said.getvalue().splitlines()[-1]}
    rollouts = [
        rollout
        for file in sorted((place / "rollouts").glob("step_*.npz"))
        for group in rollout_log.read(file)
        for rollout in group.rollouts
    ]
    rows = metrics.read(place / "metrics.jsonl")
    return {
        "tokens": _digest(r.tokens.tobytes() for r in rollouts),
        "logprobs": _digest(r.logprobs.tobytes() for r in rollouts),
        "policy": _digest([(place / "policy" / "model.safetensors").read_bytes()]),
        "num_tokens": sum(map(len, rollouts)),
        "drafted": sum(row.get("spec/num_drafted", 0.0) for row in rows),
        "accepted": sum(row.get("spec/num_accepted", 0.0) for row in rows),
    }


def _digest(parts) -> str:
    out = hashlib.sha256()
    for part in parts:
        out.update(part)
    return out.hexdigest()[:16]


def plant() -> None:
    """The fault: as many rows in the head's matrix product as may sample."""
    from jaxrl_post.engine.host import wire

    wire.Sizes.head_tile = lambda sizes, rows: min(sizes.heads, rows)


def main(folder: Path, what: str, of: int = 1) -> None:
    here = folder / what
    (here / "runs").mkdir(parents=True, exist_ok=True)
    prepare(here)
    if what == "planted":
        plant()
        asked = [(drafter, ONE, drafter) for drafter in DRAFTERS]
    elif what == "asked":
        heads = [f"--config.engine.head_rows={heads}" for heads in (16, 24, 128)]
        asked = [(f"{drafter} {flag}", ONE, drafter, flag) for drafter in DRAFTERS[:2] for flag in heads]
    else:
        asked = [(f"{case.name} {drafter}", case, drafter) for case in CASES[int(what) :: of] for drafter in DRAFTERS]
    found = {}
    for name, *how in asked:
        found[name] = run(here, *how)
        (folder / f"{what}.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main(Path(sys.argv[1]).resolve(), sys.argv[2], *map(int, sys.argv[3:4]))
