"""The demo with devices of its own for each side: one learns while the other generates, and neither waits for the other.

Recipe: that of configs/demo_pipeline.py. An optimizer step begins on the first device as soon as its batch is whole; the
engine goes on with the weights before, and gets the new ones at the engine step at which the learner should be through with
them, reckoned from the cost of a row and never from a clock, so that every repetition swaps at the same token.
Hardware: 2 devices; on a CPU those are made by XLA_FLAGS, as below.
Command: XLA_FLAGS=--xla_force_host_platform_device_count=2 python -m jaxrl_post.main --config=configs/demo_split.py
Expected: as configs/demo_pipeline.py; what was measured on it is in scripts/results/two-process-split.json.
"""

from pathlib import Path

from jaxrl_post.config import load

HERE = Path(__file__).resolve().parent


def get_config():
    c = load(str(HERE / "demo_pipeline.py"))
    c.name = "demo_split"
    c.mesh.engine = 1
    return c
