"""The demo with separate devices: the learner trains on one while the engine generates on another. Neither waits.

Recipe: that of configs/demo/pipeline.py. An optimizer step begins on the first device as soon as its batch is
complete. The engine continues with the old weights meanwhile. It gets the new weights at the engine step at which the
learner should be done. That step is computed from the cost of a row and never from a clock. So every repetition swaps
at the same token.
Hardware: 2 devices. On a CPU they are made by XLA_FLAGS, as below.
Command: XLA_FLAGS=--xla_force_host_platform_device_count=2 python -m jaxrl_post.main --config=configs/demo/split.py
Expected: as configs/demo/pipeline.py. Measurements are in scripts/results/two-process-split.json.
"""

from pathlib import Path

from jaxrl_post.config import load

CONFIGS = Path(__file__).resolve().parents[1]


def get_config():
    c = load(str(CONFIGS / "demo/pipeline.py"))
    c.name = "demo_split"
    # Why 1: the least split. Of two devices one generates and one learns.
    c.mesh.engine = 1
    return c
