"""GRPO on a small pretrained policy. The policy learns to work out a sum instead of guessing, and its rollouts get
longer.

Task: sums such as "47+8+5=". Most have three terms, one in twenty has seven to nine. The reward is 1 for the exact
result behind "#" and 0 otherwise. No reward is given for format or length.
Policy: configs/demo_policy, a Llama with 161,000 weights (0.65 MB) made by configs/demo_sft.py. It was trained on
careful solutions ("55+5=60#60") and on about twice as many careless guesses ("#55"). Greedy decoding always guesses.
Recipe: GRPO (arXiv 2402.03300), 64 prompts x 8 rollouts a step, on-policy, one update a step, token-mean loss
(arXiv 2503.14476), no KL term, no clipping of the gradient. Adam's epsilon is far above the gradient's size. This
makes it plain gradient descent with momentum, so that a step is as large as the evidence for it. With the usual
epsilon, noise moves the policy as fast as a signal does. Shuffled rewards then drift along the direction from careless
to careful.
Hardware: 2 CPU cores, 64 to 67 seconds from a cold compilation cache.
Command: make demo, or python -m jaxrl_post.main --config=configs/demo.py
Expected, on 256 held-out prompts at three seeds:
- mean of 4 at temperature 1: from 0.34-0.37 to 0.93-0.94
- greedy: from 0.00-0.01 to 0.98-1.00
- mean length: from 8-9 to 17 tokens
- learning rate 0 and shuffled rewards (configs/demo_shuffled.py): gains of at most 0.005

These figures are in scripts/results/demo.json. `python scripts/show.py demo` checks them.
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
