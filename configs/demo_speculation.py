"""The demo with drafts: rollouts guess ahead from the past answers to their prompt, and every token stays what it was.

Recipe: that of configs/demo.py on 320 prompts, each seen 20 times, so that there is a past to draft from (RhymeRL, arXiv
2508.18588, section HistoSpec). The run ends in the very weights of the same run with --config.speculation=default.
Hardware: 2 CPU cores. There a row costs time: in seconds drafting does not pay yet (scripts/results/speculation.json).
Command: python -m jaxrl_post.main --config=configs/demo_speculation.py
Expected: spec/num_accepted of spec/num_drafted drafts in each step's metrics; over the first 12 steps the weights of the
run without drafts, bit for bit, by python scripts/show.py spec-equality. There clones took more engine steps than none.
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
