"""Moments in bfloat16 are saved and restored bit for bit, and a state of the other format is refused."""

import gradient_arms as arms
import jax
import made_groups
import numpy as np
import pytest

from jaxrl_post.config import OptimizerConfig
from jaxrl_post.runs.checkpoint.store import Checkpoints

pytestmark = [pytest.mark.usefixtures("quick_compilation"), pytest.mark.extended]


def test_moments_in_bfloat16_come_back_bit_for_bit(tmp_path):
    groups, given = made_groups.groups(), arms.algorithm(kl_loss_coef=0.0)
    narrow = OptimizerConfig(moments_dtype="bfloat16", sums_dtype="bfloat16")
    one, two, wide = (
        arms.learner(given=given, reference=False, optimizer=o) for o in (narrow, narrow, OptimizerConfig())
    )
    one.prepare(groups)
    one.accumulate(groups)
    one.commit()
    steps = Checkpoints(tmp_path, keep_last=2, say=print)
    steps.save(1, one.state, {}, {})
    saved = steps.newest()
    two.restore(saved.arrays, 1)
    before, after = (jax.tree.leaves(jax.device_get(x.state)) for x in (one, two))
    assert "bfloat16" in {np.asarray(leaf).dtype.name for leaf in after}
    assert all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in zip(before, after, strict=True))
    with pytest.raises(ValueError, match="belongs to another model or optimizer"):
        wide.restore(saved.arrays, 1)
