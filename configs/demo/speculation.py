"""The demo with speculative decoding: drafts come from past rollouts of the prompt, and every token stays the same.

Recipe: that of configs/demo.py on 320 prompts. Each is seen 20 times, so that there are past rollouts to draft from
(RhymeRL, arXiv 2508.18588, section HistoSpec). The final weights equal those of the same run with
--config.speculation=default.
Hardware: 2 CPU cores. There a row costs time, so drafting saves no seconds yet (scripts/results/speculation.json).
Command: python -m jaxrl_post.main --config=configs/demo/speculation.py
Expected: each step's metrics have spec/num_drafted and spec/num_accepted. After the first 12 steps the weights equal,
bit for bit, those of the run without drafts (python scripts/show.py suite --arms=drafts). There clones took more
engine steps than no clones.
"""

from pathlib import Path

from jaxrl_post.config import load

CONFIGS = Path(__file__).resolve().parents[1]


def get_config():
    c = load(str(CONFIGS / "demo.py"))
    c.name, c.data.size = "demo_speculation", 320
    # Why no clones: they took more engine steps than none.
    c.speculation.drafter, c.speculation.clones = "ours", False
    # Why 5: rollouts have 8 to 17 tokens, so longer drafts would be cut by the end token.
    c.speculation.width = 5
    # Why these: 320 prompts x 8 rollouts x 2 epochs x 12 tokens of history just fit into 1 << 16. A step's 512 rollouts of
    # 24 tokens fill 3 << 12, and a prompt's 8 running rollouts of at most 96 tokens fit into 1 << 10.
    c.speculation.prompt_entries, c.speculation.shared_entries, c.speculation.live_entries = 1 << 16, 3 << 12, 1 << 10
    return c
