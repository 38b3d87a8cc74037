"""The demo on eight devices: data 2 x fsdp 4, bfloat16 compute over float32 weights, rematerialised layers.

Recipe: that of configs/demo.py. Eight engine replicas of 16 slots are spread over data x fsdp. Each keeps its weights
in bfloat16, so a weight sync includes a cast. `pages` holds 12 of the 16 slots at full length. When pages are short,
the youngest rollout is preempted.
The demo's 15 tokens cannot be split over `tensor`. configs/models/stories_sharded.py does that.
Hardware: any eight devices. On a CPU they are forced, which shows that the layout works, not that it is fast.
Command: XLA_FLAGS=--xla_force_host_platform_device_count=8 python -m jaxrl_post.main --config=configs/demo/sharded.py
Expected: learns as the demo does. In bfloat16 engine and learner differ more (training/rollout_logprobs_abs_diff_*).
"""

from pathlib import Path

from jaxrl_post.config import load

CONFIGS = Path(__file__).resolve().parents[1]


def get_config():
    c = load(str(CONFIGS / "demo.py"))
    c.name = "demo_sharded"
    c.mesh.data, c.mesh.fsdp = 2, 4
    c.model.compute_dtype, c.model.remat = "bfloat16", True

    c.engine.dtype, c.engine.slots, c.engine.row_sizes, c.engine.head_rows = "bfloat16", 16, (64,), 32
    c.engine.pages = 12 * -(-c.engine.max_length // c.engine.page_size)
    return c
