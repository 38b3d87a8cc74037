"""configs/stories.py on eight devices whose engine changes its layout between rounds.

Recipe: that of configs/stories.py. The engine begins as 8 replicas of one device each and can lie as 4 of two or 2 of four;
a planner replays each round's lengths in every layout, by the analytic cost and the KV of a replica, and takes the best for
the next (RollPacker's elastic parallelism, arXiv 2509.21009, section 4.2). There are two answers for each slot: the longest
expected are started first, by a probe of each prompt or its past answers (Seer, arXiv 2511.14617).
Hardware: any eight devices; on a CPU they are forced, which shows that it works, not that it is fast: by its analytic cost,
nearly all of it fixed, the planner has no reason to leave the first layout there.
Command: XLA_FLAGS=--xla_force_host_platform_device_count=8 python -m jaxrl_post.main --config=configs/stories_elastic.py
Expected: nothing measured stands in scripts/results/ yet; those of one device are in scripts/results/stories.json.
"""

from pathlib import Path

from jaxrl_post.config import load

HERE = Path(__file__).resolve().parent


def get_config():
    c = load(str(HERE / "stories.py"))
    c.name = "stories_elastic"
    c.mesh.data = 8
    c.engine.layouts = (2, 4)
    c.engine.slots, c.engine.row_sizes, c.scheduler.placement = 4, (64,), "longest_first"
    return c
