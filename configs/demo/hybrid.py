"""The demo on a model with a recurrent state: three layers with a gated delta rule, then one with attention, as in Qwen3.5.

Policy: configs/hybrid_policy, of the family Qwen3.5, made by configs/demo/hybrid_sft.py.
Recipe: that of configs/demo/moe.py without experts. A state cannot be taken back, so drafted rows wait beside it.

Hardware: 2 CPU cores.
Command: python -m jaxrl_post.main --config=configs/demo/hybrid.py
With drafts: configs/demo/speculation.py with --config.model.path=configs/hybrid_policy.
Expected: no whole run is measured yet; python scripts/show.py demo-hybrid does it.
"""

from pathlib import Path

from jaxrl_post.config import load

CONFIGS = Path(__file__).resolve().parents[1]


def get_config():
    c = load(str(CONFIGS / "demo.py"))
    c.name, c.steps = "demo_hybrid", 40
    c.eval.every, c.checkpoint.every = 20, 20
    c.model.path = str(CONFIGS / "hybrid_policy")
    c.optimizer.lr = 5e-3
    return c
