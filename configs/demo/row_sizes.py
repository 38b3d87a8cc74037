"""The demo's task and policy, with products whose bits do not depend on the number of rows, and five row sizes.

Recipe: GRPO as in configs/demo.py. The engine's products have one shape for every number of rows, so the start drops none of
the five sizes. A batch that drains takes smaller steps, down to 16 rows. FILE.py:library has XLA's own products, which lose
small sizes on a CPU.
Hardware: that of the demo. Command: python -m jaxrl_post.main --config=configs/demo/row_sizes.py
Expected: the demo's rewards, which no other seeds or rows change. Not measured beside them.
"""

from pathlib import Path

from jaxrl_post.config import chosen, load

CONFIGS = Path(__file__).resolve().parents[1]
HOW = {"fixed": {}, "library": {"engine.products": "library"}}


def get_config(how="fixed"):
    c = load(str(CONFIGS / "demo.py"))
    c.name = "row_sizes"
    c.engine.products, c.engine.row_sizes = "fixed", (16, 32, 64, 128, 256)
    return chosen(c, how, HOW)
