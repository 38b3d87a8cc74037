"""Steps of checkpoints for tests: small trees, and what a saved one must be."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_post.runs.checkpoint import store
from jaxrl_post.runs.checkpoint.store import Checkpoints

ABOUT = {"config": {"a": 1}, "data": {}, "processes": 1}


def tree(seed=0):
    noise = np.random.default_rng(seed)
    weights = {"w": jnp.asarray(noise.normal(size=(40, 30)), jnp.float32), "b": jnp.asarray([seed], jnp.bfloat16)}
    moments = (jnp.asarray(noise.normal(size=5), jnp.float32), None, {})
    return {"params": weights, "moments": moments, "step": jnp.int32(seed)}


def host(seed=0):
    return {"clock": seed, "values": np.arange(seed + 3, dtype=np.uint32)}


def saves(folder, keep_last=2, said=None):
    return Checkpoints(folder / "checkpoints", keep_last=keep_last, say=(said if said is not None else []).append)


def saved(folder, *steps, keep_last=3):
    out = saves(folder, keep_last)
    for step in steps:
        out.save(step, tree(step), host(step), ABOUT)
    return out


def same(found, step):
    assert found.step == step and found.host["clock"] == step
    assert found.host["values"].dtype == np.uint32 and found.host["values"].size == step + 3
    for a, b in zip(jax.tree.leaves(found.arrays(tree())), jax.tree.leaves(tree(step)), strict=True):
        assert a.dtype == b.dtype and np.asarray(a).tobytes() == np.asarray(b).tobytes()


def names(folder):
    return sorted(path.name for path in (folder / "checkpoints").iterdir() if path.name != store.KEY)
