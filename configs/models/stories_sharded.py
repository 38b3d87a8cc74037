"""configs/models/stories.py with every layer split over two devices: tensor parallelism in learner and engine.

Recipe: that of configs/models/stories.py. mesh.tensor divides heads, kv_heads, ffw and vocabulary. Each device holds half of
the pages' heads. Rollouts repeat bit for bit with the same split. Against one device they differ at near ties.
Hardware: any two devices. On a CPU they are forced, which shows that the split works, not that it is fast.
Command: XLA_FLAGS=--xla_force_host_platform_device_count=2 \
         python -m jaxrl_post.main --config=configs/models/stories_sharded.py
Expected: not measured yet. Figures of one device are in scripts/results/stories.json.
"""

from pathlib import Path

from jaxrl_post.config import load

CONFIGS = Path(__file__).resolve().parents[1]


def get_config():
    c = load(str(CONFIGS / "models/stories.py"))
    c.name = "stories_sharded"
    c.mesh.tensor = 2
    return c
