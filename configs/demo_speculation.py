"""The demo with drafts: rollouts guess ahead from the past answers to their prompt, and every token stays what it was.

Recipe: that of configs/demo.py on 320 prompts, each seen 20 times, so that there is a past to draft from (RhymeRL, arXiv
2508.18588, section HistoSpec). The run ends in the very weights of the same run with --config.speculation.drafter=off.
Hardware: 2 CPU cores. There a row costs time, so that drafts are made mostly while a batch drains.
Command: python -m jaxrl_post.main --config=configs/demo_speculation.py
Expected: learns as the demo does; spec/num_accepted of spec/num_drafted drafts in each step's metrics. That weights are equal
is checked by python scripts/show.py spec-equality.
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
