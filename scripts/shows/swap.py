"""A swap reads the weights once, in one program: the commit that wrote them has said whether they are finite.

1. compiled: a swap of Qwen2.5-7B on one H100, from float32 to bfloat16 in one layout. Its kernels, and the bytes that they read. What
   the commit moves on an H100 and on v5e-16, over a commit that says nothing of its weights (scripts/compile_tier/swaps.py).
2. run: programs that a real swap of a small engine launches, with what the commit said and without.
3. planted: a commit that reads its weights once more for what it says is found. Weights with a NaN are refused by what their commit
   said, and the old ones still serve.

What a live swap costs in seconds is in `swap-live`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import compilers
import engine_lab as lab
import gradient_arms as arms
import jax
import jax.numpy as jnp
import made_groups

from jaxrl_post.config import AlgorithmConfig, OptimizerConfig
from jaxrl_post.parallel import weight_sync

MINUTES = 4.0
LIMIT_MINUTES = 30.0
PLATFORM = "cpu"
SOURCES = ("scripts/compile_tier",)
SWAPPED, COMMITTED = "h100", ("h100", "v5e-16")
EXTRA_KERNELS, READ, MOVED, APART = 10, 1.01, 1.02, 1.05


def show(record) -> None:
    begun = time.monotonic()
    with_flag, without_flag = _run(record)
    python = compilers.python(record.root, "swap")
    file = "scripts/compile_tier/swaps.py"
    found = compilers.told(record, python, file, "swap", SWAPPED)
    more = {
        name: found["cast." + name] + (with_flag - 1) * found["check." + name]
        for name in ("kernels", "read_over_weights")
    }
    record.figure("swap.kernels", more["kernels"], at_most=found["leaves"] + EXTRA_KERNELS)
    record.figure("swap.read_over_weights", more["read_over_weights"], at_most=READ)
    twice = found["cast.kernels"] + (without_flag - 1) * found["check.kernels"]
    record.figure("swap.kernels_without_flag", twice, at_least=found["leaves"] + EXTRA_KERNELS + 1)
    for name, value in found.items():
        record.figure(f"swap.{name}", round(value, 4))
    for where in COMMITTED:
        bounds = {"moved_over_without": {"at_most": MOVED}, "planted_apart_over_without": {"at_least": APART}}
        for name, value in compilers.told(record, python, file, "commit", where).items():
            record.figure(f"commit.{where}.{name}", round(value, 6), **bounds.get(name, {}))
    record.figure("minutes", (time.monotonic() - begun) / 60, at_most=LIMIT_MINUTES)


def _run(record) -> tuple[int, int]:
    """Returns the programs that a real swap launches, with what the commit said and without."""
    learner = arms.learner(reference=False, given=AlgorithmConfig(), optimizer=OptimizerConfig(lr=1e-2))
    engine = lab.made(learner._recipe.model, learner.params, learner._mesh, dtype=jnp.bfloat16, max_length=64, pages=64)
    record.figure("run.case", engine.device.case, equals="cast")
    arms.turn(learner, made_groups.groups())
    counts = []
    for version, finite in enumerate((learner.finite, None), 1):
        with launched() as programs:
            engine.swap(learner.params, version, finite)
        counts.append(len(programs))
        same = [(held == new.astype(jnp.bfloat16)).all() for held, new in _pairs(engine, learner)]
        record.figure(f"run.leaves_that_differ_{version}", sum(not one for one in same), equals=0)
    record.figure("run.programs", counts[0], equals=1)
    record.figure("run.programs_without_flag", counts[1], equals=2)

    asked = lab.requests(8, vocab=learner._recipe.model.vocab_size, longest_prompt=20, longest=24)
    before = lab.run(engine, asked)
    learner._state.params["policy"]["embed"] = learner.params["embed"].at[0, 0].set(jnp.nan)
    arms.turn(learner, made_groups.groups())  # skipped: its gradient is not finite, and the NaN stays
    record.figure("planted.said_finite", bool(learner.finite), equals=False)
    try:
        engine.swap(learner.params, 3, learner.finite)
        refused = False
    except weight_sync.NotFinite:
        refused = True
    record.figure("planted.refused", refused, equals=True)
    engine.reset()
    served = engine.version == 2 and lab.same_bits(before, lab.run(engine, asked))
    record.figure("planted.old_weights_serve", served, equals=True)
    return counts[0], counts[1]


def _pairs(engine, learner) -> Iterator[tuple]:
    yield from zip(jax.tree.leaves(engine.device.params), jax.tree.leaves(learner.params), strict=True)


@contextlib.contextmanager
def launched() -> Iterator[list[str]]:
    """Yields the names of programs that jax launches meanwhile.

    Each launch must go through Python for that. So what jax has compiled is forgotten, and its short way is closed.
    """
    from jax._src import pjit
    from jax._src.interpreters import pxla

    names: list[str] = []
    run, short = pxla.ExecuteReplicated.__call__, pjit._get_fastpath_data

    def watched(self, *args):
        names.append(self.name)
        return run(self, *args)

    jax.clear_caches()
    pxla.ExecuteReplicated.__call__, pjit._get_fastpath_data = watched, lambda *args: None
    try:
        yield names
    finally:
        pxla.ExecuteReplicated.__call__, pjit._get_fastpath_data = run, short
        jax.clear_caches()
