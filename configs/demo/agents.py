"""The demo of conversations with a calculator, played by a harness outside over HTTP instead of by an environment.

Recipe: that of configs/demo/calculator.py. A harness takes sessions, plays them by OpenAI's chat endpoint and posts their
rewards (docs/agents.md). Tokens, rewards and weights are those of configs/demo/calculator.py, bit for bit.
Hardware: 2 CPU cores, which the harness shares.
Commands: JAXRL_POST_TOKEN=a-token python -m jaxrl_post.main --config=configs/demo/agents.py
          JAXRL_POST_TOKEN=a-token python scripts/agents/harness.py --url=http://127.0.0.1:8100
Expected: scripts/results/agents.json, checked by python scripts/show.py agents.
"""

from pathlib import Path

from jaxrl_post.config import load

CONFIGS = Path(__file__).resolve().parents[1]


def get_config():
    c = load(str(CONFIGS / "demo/calculator.py"))
    c.name = "demo_agents"
    c.environment.name, c.environment.arguments, c.environment.workers = "harness", {"port": 8100}, 1
    # Why 300: a harness that is started again goes on with its sessions well before.
    c.environment.timeout_s, c.environment.max_s = 300.0, 0.0
    return c
