"""GRPO on a small pretrained policy. It learns to work out a sum instead of guessing it, and its rollouts get longer.

Task: sums such as "47+8+5=". Most have three terms, one in twenty has seven to nine. The reward is 1 for the exact
answer behind "#" and 0 for anything else. Format and length earn nothing.
Policy: configs/demo_policy, a Llama of 161,000 weights (0.65 MB) made by configs/demo/sft.py. It was trained on
careful solutions ("55+5=60#60") and about twice as many careless guesses ("#55"). So it always guesses greedily.
Recipe: GRPO (arXiv 2402.03300), 64 prompts x 8 rollouts a step, on-policy, one update a step. The loss is token-mean
(arXiv 2503.14476), without a KL term or gradient clipping.
Optimizer: Adam's epsilon is far above the gradient's size, which makes it gradient descent with momentum. So a step is
as large as the evidence for it. With the usual epsilon, noise moves the policy as fast as a signal does. Then shuffled
rewards drift along the one direction that matters, careful or careless.
Hardware: 2 CPU cores, 64 to 67 seconds from a cold compilation cache.
Command: make demo, or python -m jaxrl_post.main --config=configs/demo.py
Expected, on 256 held-out prompts at three seeds (scripts/results/demo.json, checked by python scripts/show.py demo):
- mean of 4 at temperature 1: from 0.34-0.37 to 0.93-0.94
- greedy: from 0.00-0.01 to 0.98-1.00
- mean length: from 8-9 to 17 tokens
- gain with learning rate 0 or shuffled rewards (configs/demo/shuffled.py): at most 0.005
"""

from pathlib import Path

from jaxrl_post.config import default

HERE = Path(__file__).resolve().parent


def get_config():
    c = default()
    c.name, c.steps = "demo", 100
    c.model.path = str(HERE / "demo_policy")

    c.engine.slots, c.engine.max_length, c.engine.page_size, c.engine.row_sizes = 64, 116, 16, (64, 128)
    c.engine.steps_per_dispatch, c.engine.refill_slots = 16, 8
    c.sampling.max_tokens = 96
    c.scheduler.prompts, c.scheduler.group_size = 64, 8

    c.optimizer.lr, c.optimizer.b1, c.optimizer.eps, c.optimizer.max_grad_norm = 2.5e-3, 0.9, 0.1, 0.0
    c.batch.rows, c.batch.tokens, c.batch.head_chunk = 16, 128, 2048

    c.data.train, c.data.size = "task:sums", 2560
    c.eval.prompts, c.eval.every = 256, 25
    c.checkpoint.every, c.checkpoint.keep_last = 25, 3
    c.history.epochs, c.history.max_bytes = 2, 64 << 20
    return c
