"""The demo's task and policy, trained with each prompt once for all rollouts of its group.

Recipe: GRPO as in configs/demo.py. A packed row holds a group's prompt once and all its responses behind it. Each response
sees the prompt and itself, so the gradient is that of flat rows, to rounding. The step's log names the tokens that were
saved (`training/shared_tokens`). Long prompts gain most: the demo's have a few tokens.
Hardware: that of the demo. Command: python -m jaxrl_post.main --config=configs/demo/shared_prompts.py
Expected: see scripts/results/shared-prompts.json, written by show.py shared-prompts.
"""

from pathlib import Path

from jaxrl_post.config import load

CONFIGS = Path(__file__).resolve().parents[1]


def get_config():
    c = load(str(CONFIGS / "demo.py"))
    c.name = "shared_prompts"
    c.batch.shared_prompts = True
    return c
