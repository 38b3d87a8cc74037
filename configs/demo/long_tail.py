"""The demo with a long tail: one prompt in seventeen needs a rollout ten times as long as the others.

Recipe: that of configs/demo.py with other prompts. They are sums of three terms, and 6 % have ten terms
(data/tasks.py, `gap`). A step has 48 prompts x 2 rollouts. Every rollout weighs the same in the loss (arXiv
2402.03300), so that a round of long rollouts counts as much as any other.
Scheduling: synchronous rounds leave most slots empty while the last long rollouts finish. Tail batching defers late
groups to a long round, and sends groups there at once whose prompt had long rollouts before. Nothing that was sampled
is dropped (RollPacker, arXiv 2509.21009, without its bias).
Hardware: 2 CPU cores.
Commands: python -m jaxrl_post.main --config=configs/demo/long_tail.py
          python -m jaxrl_post.main --config=configs/demo/long_tail.py --config.scheduler.name=sync \
              --config.scheduler.over=1 --config.scheduler.lane=0
          python scripts/plot_rounds.py RUN_FOLDER --rounds=2:8 --out=rounds.svg
Expected: python scripts/show.py real-rounds compares engine steps, seconds and learning curves over several seeds.
"""

from pathlib import Path

from jaxrl_post.config import load

CONFIGS = Path(__file__).resolve().parents[1]


def get_config():
    c = load(str(CONFIGS / "demo.py"))
    c.name, c.steps, c.trace_rounds = "demo_long_tail", 80, 12

    c.engine.max_length, c.engine.row_sizes = 124, (64,)
    c.sampling.max_tokens = 103
    c.scheduler.prompts, c.scheduler.group_size = 48, 2
    c.scheduler.name = "tail_batching"
    # Why 1.125: the fewest seconds a group among 1.125 and 1.25 (real-rounds.json). 6 % of the prompts are long.
    c.scheduler.over = 1.125
    # Why 1: on a CPU rows cost time, and the same prompts are long in every epoch, so none of them need race.
    c.scheduler.lane = 1.0

    c.algorithm.loss_agg_mode = "seq-mean-token-mean"
    c.optimizer.lr = 7.5e-3
    c.batch.rows, c.batch.head_chunk = 8, 1024

    c.data.size, c.data.task = 512, {"usual": 3, "gap": 6, "longest": 10, "tail": 0.06}
    c.eval.task, c.eval.every = c.data.task, 10
    return c
