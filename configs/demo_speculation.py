"""The demo with speculative decoding: drafts come from past rollouts of the prompt, and no token changes.

Recipe: that of configs/demo.py on 320 prompts. Each prompt is sampled 20 times, so there is a history to draft from
(RhymeRL, arXiv 2508.18588, section HistoSpec). The run ends in the same weights as with --config.speculation=default.
Hardware: 2 CPU cores. A row costs time there, so drafting does not pay in seconds (scripts/results/speculation.json).
Command: python -m jaxrl_post.main --config=configs/demo_speculation.py
Expected: each step's metrics have spec/num_accepted and spec/num_drafted. Over the first 12 steps the weights equal
those of the run without drafts, bit for bit (python scripts/show.py spec-equality). Clones took more engine steps
there than none.
"""

from pathlib import Path

from jaxrl_post.config import load

HERE = Path(__file__).resolve().parent


def get_config():
    c = load(str(HERE / "demo.py"))
    c.name, c.data.size = "demo_speculation", 320
    c.speculation.drafter, c.speculation.width, c.speculation.clones = "ours", 5, False
    c.speculation.prompt_entries, c.speculation.shared_entries, c.speculation.live_entries = 1 << 16, 3 << 12, 1 << 10
    return c
