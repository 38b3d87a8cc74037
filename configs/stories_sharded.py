"""configs/stories.py with every layer split over two devices: tensor parallelism in learner and engine.

Recipe: that of configs/stories.py. mesh.tensor divides heads, kv_heads, ffw and vocabulary. Each device holds half of
the heads of each page. With the same split, rollouts repeat bit for bit. Against one device they differ at near ties.
Hardware: any two devices. On a CPU they are forced, which proves that it works, not that it is fast.
Command: XLA_FLAGS=--xla_force_host_platform_device_count=2 python -m jaxrl_post.main
--config=configs/stories_sharded.py
Expected: scripts/results/ has no figures of this config yet. Those of one device are in scripts/results/stories.json.
"""

from pathlib import Path

from jaxrl_post.config import load

HERE = Path(__file__).resolve().parent


def get_config():
    c = load(str(HERE / "stories.py"))
    c.name = "stories_sharded"
    c.mesh.tensor = 2
    return c
