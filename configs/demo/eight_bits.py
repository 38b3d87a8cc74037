"""The demo's task and policy, with rollouts that are generated in 8 bits.

Recipe: GRPO as in configs/demo.py. At every publish one program makes int8 codes of the matrices, with a scale for each output.
Keys and values are int8 too. The learner computes the log-probs of its own weights, and weighs tokens by what that changes
(truncated importance sampling). FILE.py:uncorrected does not, for comparison.
Hardware: that of the demo. Command: python -m jaxrl_post.main --config=configs/demo/eight_bits.py
Expected: not measured yet. show.py quantised compares final rewards with those of full precision.
"""

from pathlib import Path

from jaxrl_post.config import chosen, load

CONFIGS = Path(__file__).resolve().parents[1]
HOW = {"corrected": {}, "uncorrected": {"engine.uncorrected": True, "algorithm.rollout_is": "none"}}


def get_config(how="corrected"):
    c = load(str(CONFIGS / "demo.py"))
    c.name = "eight_bits"
    c.engine.weights, c.engine.kv, c.algorithm.rollout_is = "int8", "int8", "token"
    return chosen(c, how, HOW)
