"""python scripts/first_gradient.py FILE --config=... : a run of main that also saves the gradient of its first commit.

FILE.npz gets one array per weight, named by its path: the divided gradient, before clipping. Process 0 writes it.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def run(file: str, arguments: list[str]) -> int:
    sys.path.insert(0, str(ROOT))
    import jax
    import numpy as np

    from jaxrl_post import main
    from jaxrl_post.parallel import processes
    from jaxrl_post.trainer.learner import Learner

    commit = Learner.commit

    def saving(learner: Learner):
        if learner.step == 0:
            gradient = processes.whole(learner.gradient())
            if jax.process_index() == 0:
                leaves = {
                    jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(gradient)
                }
                np.savez(file, **leaves)
        return commit(learner)

    Learner.commit = saving
    return main.main(arguments)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1], sys.argv[2:]))
