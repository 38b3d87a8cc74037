"""The demo with a long tail, in the mode that the simulator predicts to be fastest.

Recipe: that of configs/demo/long_tail.py. `scheduler.name=auto` simulates synchronous rounds, tail batching and a pipeline
before anything is compiled. It prints the seconds of an optimizer step that it predicts for each, and the choice. The
choice is kept in config.json and in every checkpoint, and a resumed run has it from there.
Lengths: configs/demo_auto/lengths.jsonl has those of the first four synchronous rounds at seed 1. Name the folder of an
earlier run of your own instead. Without any, lengths are RollPacker's fitted ones (arXiv 2509.21009), scaled.
Hardware: 2 CPU cores.
Command: python -m jaxrl_post.main --config=configs/demo/auto.py
Expected: the table of predicted seconds, then a run of the mode with the fewest (python scripts/show.py auto).
"""

from pathlib import Path

from jaxrl_post.config import load

CONFIGS = Path(__file__).resolve().parents[1]


def get_config():
    c = load(str(CONFIGS / "demo/long_tail.py"))
    c.name = "demo_auto"
    # The two options of tail batching are part of the choice.
    c.scheduler.name, c.scheduler.over, c.scheduler.lane = "auto", 1.0, 0.0
    c.scheduler.auto_history = str(CONFIGS / "demo_auto" / "lengths.jsonl")
    # Why 4: with an age of 4 steps, `keep` gives 1.05 times the KL of `recompute`, and 2.76 times with 8 (modes.json).
    c.scheduler.max_staleness = 4
    return c
