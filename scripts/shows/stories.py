"""stories260K: its documented greedy story to the character, and RL that shows on its held-out openings.

The story comes out of the row engine. RL is configs/models/stories.py at 3 seeds. Its figure is accuracy on 64 held-out
openings x 4 rollouts at temperature 1: the mean over the evaluations at steps 90-99 minus that over the first ten
steps. It is given in standard errors of the difference, over openings. At learning rate 0 every evaluation draws the
same rollouts, so the difference must be zero.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np
import trained

from jaxrl_post.data import tokenizer
from jaxrl_post.engine.row_engine import EngineSettings, RowEngine
from jaxrl_post.models import decoder, llama2c
from jaxrl_post.parallel import mesh as meshes
from jaxrl_post.ring.types import Prompt, Request, RolloutId, Sampling
from jaxrl_post.runs import rollout_log

MINUTES = 20.0
PLATFORM = "cpu"
SEEDS = (0, 1, 2)


def show(record) -> None:
    folder = record.data("tinystories-260k")
    story, golden = _greedy(folder), _golden(folder / "stories260K.md")
    record.figure("golden_story_characters", len(golden), at_least=500)
    record.figure("golden_story_to_the_character", story[: len(golden)] == golden, equals=True)
    for seed in SEEDS:
        _record_gain(record, f"seed_{seed}", record.cached(f"seed_{seed}", lambda: _run(record, seed)), at_least=4.0)
    control = record.cached("lr_0", lambda: _run(record, 0, "optimizer.lr=0.0"))
    record.figure("lr_0_before", control["early"])
    record.figure("lr_0_gain", control["late"] - control["early"], equals=0.0)


def _record_gain(record, name: str, found: dict, at_least: float) -> None:
    record.figure(f"{name}_steps_0_to_9", found["early"])
    record.figure(f"{name}_steps_90_to_99", found["late"])
    record.figure(f"{name}_gain_in_standard_errors", found["gain_in_standard_errors"], at_least=at_least)
    record.figure(f"{name}_seconds", found["seconds"])


def _golden(file: Path) -> str:
    """Returns the text between the fences of the greedy sample, without its command line."""
    block = file.read_text().split("-t 0.0\n", 1)[1]
    return block.split("\n```", 1)[0]


def _greedy(folder: Path) -> str:
    """Returns the engine's greedy rollout of the begin token alone."""
    model, params = llama2c.load(folder / "stories260K.bin")
    words = tokenizer.load(folder / "tok512.bin")
    mesh = meshes.make_mesh()
    placed = meshes.put(params, meshes.param_shardings(mesh, decoder.axes(model), "engine"))
    engine = RowEngine(
        model,
        placed,
        mesh,
        EngineSettings(
            slots=4,
            max_length=512,
            page_size=64,
            pages=32,
            row_sizes=(64,),
            head_rows=64,
            steps_per_dispatch=16,
            refill_slots=1,
        ),
    )
    prompt = Prompt(id="begin", tokens=[words.bos_id])
    name = RolloutId(0, "eval", 0, prompt.id, 0)
    engine.submit(
        [
            Request(
                rollout_id=name,
                prompt=prompt,
                seed=name.seed(),
                max_tokens=256,
                sampling=Sampling(temperature=0.0, eos_ids=words.eos_ids),
            )
        ]
    )
    out = []
    while engine.pending:
        out += engine.step()
    return words.decode([words.bos_id, *out[0].tokens.tolist()]).strip()


def _run(record, seed: int, *overrides: str) -> dict:
    """Runs once. Returns mean accuracy early and late, and how many standard errors they are apart."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "run"
        seconds = trained.run(record, "configs/models/stories.py", place, f"seed={seed}", *overrides, timeout_s=1800)
        evaluations = [
            (json.loads(line)["step"], json.loads(line)["file"])
            for line in (place / "evaluations" / "index.jsonl").read_text().splitlines()
        ]
        openings = {
            step: [
                float(np.mean(group.accuracies))
                for group in rollout_log.read(place / "evaluations" / file)
                if len(group.rollouts) == 4
            ]
            for step, file in evaluations
        }
    early, late = (np.mean([openings[step] for step in steps], axis=0) for steps in (range(10), range(90, 100)))
    gain = late - early
    error = float(gain.std(ddof=1) / np.sqrt(gain.size))
    return {
        "early": float(early.mean()),
        "late": float(late.mean()),
        "seconds": seconds,
        "gain_in_standard_errors": float(gain.mean()) / error if error else 0.0,
    }
