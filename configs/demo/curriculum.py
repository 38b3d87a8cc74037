"""The demo with a curriculum: prompts that the policy solves about half of the time are drawn more often.

Recipe: that of configs/demo.py on 640 prompts, which are 10 steps. The first pass draws two fifths of them evenly.
Each later pass draws two fifths of those that are not skipped, in proportion to p(1-p) of their last two success rates.
A prompt that was solved or failed in all rollouts of both is skipped for one epoch.
The loss of a prompt is multiplied by its importance weight, so that the gradient stays that of the prompts not skipped.
Hardware: 2 CPU cores.
Command: python -m jaxrl_post.main --config=configs/demo/curriculum.py
Expected in metrics.jsonl: curriculum/num_prompts_solved rises as the policy learns. Not measured yet.
"""

from pathlib import Path

from jaxrl_post.config import load

CONFIGS = Path(__file__).resolve().parents[1]


def get_config():
    c = load(str(CONFIGS / "demo.py"))
    c.name, c.data.size, c.history.epochs = "demo_curriculum", 640, 4
    c.curriculum.interest, c.curriculum.share, c.curriculum.uniform = "variance", 0.4, 0.2
    c.curriculum.groups, c.curriculum.weighted = 2, True
    c.curriculum.skip_epochs, c.curriculum.solved, c.curriculum.hopeless = 1, 0.99, 0.01
    return c
