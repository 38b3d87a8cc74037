"""A prompt trained once for its group has the gradient of flat rows, at a fraction of the work.

1. equal: gradients per leaf against flat rows, in float64 and float32. Groups have unequal rollouts, share rows with other
   groups, and hold conversations that branch. Models have windows, sinks and experts. Losses have the terms of TERMS.
2. work: for prompts of 2,048 and 4,096 tokens with 8 rollouts of 512, the update of a 1.5B model is compiled for TPU v6e
   and sm_90. FLOPs and bytes are counted in the compiled text.
3. seconds: the same gradient of a small model on this machine, in one run, by turns.
4. planted: faults of the mask, the positions and the packing, each of which must be far outside.

`--arms=NAME,NAME` runs some of these.
"""

from __future__ import annotations

import os
import statistics
import time

import compilers
import gradient_arms as arms
import jax
import made_groups
import numpy as np
import pytest
import shared_arms
import test_trainer_shared_prompts as tests

from jaxrl_post import config
from jaxrl_post.models import decoder
from jaxrl_post.ring.types import Group, Prompt
from jaxrl_post.trainer import packing

MINUTES = 20.0
PLATFORM = "cpu"
SOURCES = (
    "scripts/compile_tier",
    "scripts/compilers.py",
    "scripts/traffic.py",
    "scripts/kernel_costs.py",
    "scripts/compiled_text.py",
)
EXACT, SINGLE, SEEN = 1e-12, 5e-6, 1e-3
FEWER = {2048: 2.5, 4096: 3.3}  # FLOPs of the update, at least
TOKENS = {2048: 25_600, 4096: 33_792}  # of a row of four groups, in multiples of 1,024
FASTER, TURNS = 2.0, 3  # CPU seconds at 4,096, at least

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")


def show(record) -> None:
    every = {"equal": _equal, "work": _work, "seconds": _seconds, "planted": _planted}
    for name in record.options.get("arms", ",".join(every)).split(","):
        every[name](record)


SETS = {
    "groups": lambda: made_groups.groups(),
    "conversations": lambda: shared_arms.conversations(4),
    "both": lambda: [*made_groups.groups(3), *shared_arms.conversations(2)],
}
WAYS = {
    "one_device": dict(),
    "long_rows": dict(rows=1, tokens=160),
    "3_accumulates": dict(parts=3),
    "8_devices": dict(sizes=(2, 2, 2), scan_layers="yes", remat=True),
}


TERMS = {mode: dict(loss_mode=mode) for mode in arms.LOSSES} | {
    "kl_in_reward": dict(use_kl_in_reward=True, kl_loss_coef=0.0),
    "importance_weights": dict(rollout_is="token", rollout_is_threshold=(2.0,)),
    "optimal_token_baseline": dict(adv_estimator="optimal_token_baseline"),
    "kl_cov": dict(loss_mode="kl_cov", kl_cov_ratio=0.3, ppo_kl_coef=0.7),
    "top_entropy": dict(top_entropy_quantile=0.4),
    "positive_nll": dict(positive_nll_coef=0.3),
    "opsm": dict(opsm_delta=1e-4),
}


def _equal(record) -> None:
    for name, found in SETS.items():
        groups = found()
        flat, shared = (packing.count(groups, 1, 48, own) for own in (False, True))
        record.figure(f"rows_of_{name}", shared, at_most=flat)
        for mode in ("token-mean", "seq-mean-token-mean"):
            for kind, dtype, bound in (("x64", np.float64, EXACT), ("f32", np.float32, SINGLE)):
                plain = arms.plain_gradient(groups, dtype, mode=mode)
                for way, how in WAYS.items():
                    made = arms.gradient(groups, dtype, mode=mode, **shared_arms.SHARED, **how)
                    key = f"{kind}_{name}_{way}_{mode.replace('-', '_')}"
                    record.figure(key, arms.worst(made, plain), at_most=bound)
    groups = SETS["both"]()
    for name, model in shared_arms.MODELS.items():
        for kind, dtype, bound in (("x64", np.float64, EXACT), ("f32", np.float32, SINGLE)):
            flat, shared = (
                arms.gradient(groups, dtype, mode="seq-mean-token-mean", model=model, **how)
                for how in ({}, shared_arms.SHARED)
            )
            record.figure(f"{kind}_model_with_{name}", arms.worst(shared, flat), at_most=bound)
    for name, terms in TERMS.items():
        given = arms.algorithm("seq-mean-token-mean", **terms)
        flat, shared = (arms.gradient(groups, np.float64, given=given, **how) for how in ({}, shared_arms.SHARED))
        record.figure(f"x64_terms_of_{name}", arms.worst(shared, flat), at_most=EXACT)


def _work(record) -> None:
    python = compilers.python(record.root, "shared-prompts")
    for prompt, fewer in FEWER.items():
        for where in ("v6e-16", "8xh100"):
            words = (where, str(prompt), "512", str(TOKENS[prompt]))
            found = compilers.told(record, python, "scripts/compile_tier/shared_prompts.py", *words)
            for name, value in found.items():
                bound = {"at_least": fewer} if name == "fewer_flop" else {}
                record.figure(f"{where}_{prompt}_{name}", round(value, 4), **bound)


def _long_group() -> Group:
    """A prompt of 4,096 tokens and 8 rollouts of 512."""
    rng = np.random.default_rng(0)
    prompt = Prompt(id="long", tokens=rng.integers(0, 512, 4096))
    rollouts = tuple(made_groups.rollout(prompt, i, rng.integers(0, 512, 512)) for i in range(8))
    return Group(prompt=prompt, rollouts=rollouts, rewards=np.arange(8) / 7, scored=np.ones(8, bool))


def _seconds(record) -> None:
    """Each layout has rows without waste: a rollout each, and the whole group."""
    model = decoder.ModelConfig(
        vocab_size=512, embed=128, layers=1, heads=4, kv_heads=2, head_dim=32, ffw=384, max_length=8192, tied=True
    )
    groups, given = [_long_group()], config.AlgorithmConfig()
    how = dict(model=model, given=given, reference=False, kind=arms.Uncommitted, head_chunk=1024, rows=1)
    both = {"flat": arms.learner(tokens=4608, **how), "shared": arms.learner(tokens=8256, **how, **shared_arms.SHARED)}
    spent: dict[str, list[float]] = {name: [] for name in both}
    grads = {}
    for turn in range(TURNS + 1):
        for name, one in both.items():
            one.compile()
            one._begin_round()
            one.prepare(groups)
            begun = time.process_time()
            one.accumulate(groups)
            jax.block_until_ready(one._sums)
            if turn:  # the first one starts the programs
                spent[name].append(time.process_time() - begun)
            else:
                grads[name] = jax.device_get(one.gradient())
    record.figure("cpu_gradient_difference", arms.worst(grads["shared"], grads["flat"]), at_most=SINGLE)
    for name, values in spent.items():
        record.figure(f"cpu_s_4096_{name}", round(statistics.median(values), 2))
    pairs = [a / b for a, b in zip(spent["flat"], spent["shared"], strict=True)]
    record.figure("cpu_s_flat_over_shared", round(statistics.median(pairs), 3), at_least=FASTER)


def _planted(record) -> None:
    plain = arms.plain_gradient(tests.GROUPS, np.float64, mode="seq-mean-token-mean")
    for fault in tests.FAULTS:
        with pytest.MonkeyPatch.context() as patch:
            fault(patch)
            found = arms.gradient(tests.GROUPS, np.float64, mode="seq-mean-token-mean", **shared_arms.SHARED)
            record.figure(f"planted_{fault.__name__}", arms.worst(found, plain), at_least=SEEN)
