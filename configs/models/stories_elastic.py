"""configs/models/stories.py on eight devices, with an engine that changes its layout between rounds.

Recipe: that of configs/models/stories.py. The engine begins as 8 replicas of one device each. It can also be 4 replicas of
two devices or 2 of four. A planner replays each round's lengths in every layout, by the analytic cost and the KV cache
of a replica. The best layout is used in the next round (RollPacker's elastic parallelism, arXiv 2509.21009, section
4.2). There are two rollouts for each slot. The longest expected ones start first, by a probe of each prompt or its
past rollouts (Seer, arXiv 2511.14617).
Hardware: any eight devices. On a CPU they are forced, which shows that the layouts work, not that they are fast. There
nearly all of the analytic cost is fixed, so the planner has no reason to leave the first layout.
Command: XLA_FLAGS=--xla_force_host_platform_device_count=8 \
         python -m jaxrl_post.main --config=configs/models/stories_elastic.py
Expected: not measured yet. Figures of one device are in scripts/results/stories.json.
"""

from pathlib import Path

from jaxrl_post.config import load

CONFIGS = Path(__file__).resolve().parents[1]


def get_config():
    c = load(str(CONFIGS / "models/stories.py"))
    c.name = "stories_elastic"
    c.mesh.data = 8
    c.engine.layouts = (2, 4)
    c.engine.slots, c.engine.row_sizes, c.scheduler.placement = 4, (64,), "longest_first"
    return c
