"""GRPO as DeepSeek-V3.2 has it, on the demo's task and policy: corrections of a cut law and of what has grown old within a round.

Recipe (arXiv 2512.02556, section 3.1):
- A rollout of negative advantage leaves the policy loss once the policy has moved away from it (OPSM).
- The KL to the reference is multiplied by the ratio, which makes its gradient unbiased.
- The old policy is the engine's. A round has four mini-batches.
- Rollouts are drawn with top-p, and the ids that it leaves are recorded (Keep Sampling Mask). All log-probs are of these ids.

The paper does not say its bound, its coefficient and its top-p. These are ours, and so is top-k, which bounds the record.
Hardware: 2 CPU cores. Command: python -m jaxrl_post.main --config=configs/recipes/deepseek_v3_2.py
Expected: not measured yet. The demo's own figures are in scripts/results/demo.json.
"""

from pathlib import Path

from jaxrl_post.config import load

CONFIGS = Path(__file__).resolve().parents[1]


def get_config():
    c = load(str(CONFIGS / "demo.py"))
    c.name = "deepseek_v3_2"
    c.algorithm.prox_logp_method, c.algorithm.opsm_delta = "rollout", 0.01
    c.algorithm.kl_loss_coef, c.algorithm.use_bias_correction_kl = 1e-3, True
    c.sampling.top_k, c.sampling.top_p = 12, 0.95
    c.scheduler.mini_batches, c.scheduler.ppo_epochs = 4, 1
    c.eval.every = 20
    return c
