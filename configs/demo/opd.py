"""The demo with a teacher beside rewards: GRPO, where each token also gains what a teacher thinks of it.

Recipe: the advantage of a token is that of its rollout's reward plus 0.5 (log teacher - log pi), as slime's --use-opd. The
teacher is what configs/demo.py ends with.
Hardware: 2 CPU cores.
Commands: python -m jaxrl_post.main --config=configs/demo.py --run-dir=runs/demo_teacher
          python -m jaxrl_post.main --config=configs/demo/opd.py
Expected: not measured yet. The teacher's own figures are in scripts/results/demo.json.
"""

from pathlib import Path

from jaxrl_post.config import load

CONFIGS = Path(__file__).resolve().parents[1]


def get_config():
    c = load(str(CONFIGS / "demo.py"))
    c.name = "demo_opd"
    c.teacher.path = "runs/demo_teacher/policy"
    c.algorithm.opd_kl_coef = 0.5
    return c
