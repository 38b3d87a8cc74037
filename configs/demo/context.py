"""The demo's task and policy, with packed rows that two devices share.

Recipe: GRPO as in configs/demo.py. Four devices learn. Each pair of neighbours along fsdp has halves of the same rows, and
gathers keys and values of whole ones. So a row may be twice as long as what one device holds. Attention is even: the first
of a pair has both ends of a row, the second its middle.
Hardware: 4 devices. On a CPU, XLA_FLAGS=--xla_force_host_platform_device_count=4 makes them.
Command: python -m jaxrl_post.main --config=configs/demo/context.py
Expected: not measured yet. show.py context compares gradients and kills such runs.
"""

from pathlib import Path

from jaxrl_post.config import load

CONFIGS = Path(__file__).resolve().parents[1]


def get_config():
    c = load(str(CONFIGS / "demo.py"))
    c.name = "demo_context"
    c.mesh.fsdp, c.mesh.context = 4, 2
    c.engine.slots, c.engine.row_sizes = 16, (64,)
    c.batch.rows, c.batch.tokens = 8, 256
    return c
