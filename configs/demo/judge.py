"""The demo, rewarded by a judge on the engine's own devices. The exact result is only measured.

The judge is a policy of its own, configs/judge_policy, made by configs/demo/judge_sft.py. It is asked about every rollout, in
slots that the policy leaves free, and sees the sum and the response. Its verdict is 2 for a worked solution, 1 for a guess
and 0 for a response that breaks off. It reads the form alone.
Hardware: 2 CPU cores.
Command: python -m jaxrl_post.main --config=configs/demo/judge.py
         with --config.judge.asleep=true its weights wait in host memory between batches of questions
Expected: critic/score/mean rises, and held-out accuracy rises, because the judge prefers worked solutions. scripts/results/judge.json
has the figures of a short run.
"""

from pathlib import Path

from jaxrl_post.config import load

CONFIGS = Path(__file__).resolve().parents[1]


def get_config():
    c = load(str(CONFIGS / "demo.py"))
    c.name = "demo_judge"
    c.judge.model, c.judge.question = str(CONFIGS / "judge_policy"), "{task} {answer}"
    c.judge.high, c.judge.weight = 2.0, 0.5
    c.judge.max_length, c.judge.max_tokens = 128, 16
    c.reward.weights = (0.0,)  # of the exact result, which evaluation still reads as the accuracy
    return c
