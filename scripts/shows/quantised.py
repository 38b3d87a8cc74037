"""Rollouts of 8 bits beside rollouts in full: bytes of a decode step, log-probs, final rewards, and the promise.

1. bytes: a decode step of Qwen2.5-7B with 16 and 64 rows of 4,096 tokens is compiled for v5e, v6e and sm_90. Bytes in int8 over
   those in bfloat16, and no matrix in memory that is wider than 8 bits (scripts/compile_tier/eight_bits.py).
2. gap: rollouts of the demo's policy and of stories260K (JAXRL_DATA) with matrices, keys and values, or both in 8 bits. The learner
   scores them in full. KL per token, and the share of tokens whose probability is off by more than a quarter.
3. rewards: configs/demo/eight_bits.py and the stories, five seeds each: in full, in int8 with importance weights, and without.
4. engines: the suites of the row engine with both formats, against an independent sampler too, which rounds as the engine does.
5. planted: scales of the wrong axis, and scales of the weights before a swap, are far outside.

`--arms=NAME,NAME` runs some of these, and `--tasks=demo` one of the two of rewards.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

import compilers
import engine_lab as lab
import jax
import log_ratios
import numpy as np
import trained

from jaxrl_post.algorithms import correction
from jaxrl_post.engine import eight_bit_weights
from jaxrl_post.models import decoder, hf, llama2c
from jaxrl_post.parallel import mesh

MINUTES = 90.0
PLATFORM = "cpu"
SOURCES = (
    "scripts/compile_tier",
    "scripts/compilers.py",
    "scripts/traffic.py",
    "scripts/kernel_costs.py",
    "scripts/compiled_text.py",
)
TARGETS, ROWS, FEWER = ("v5e", "v6e", "sm_90"), (16, 64), 0.56
WAYS = {
    "int8_weights": dict(weights="int8"),
    "int8_kv": dict(kv="int8"),
    "int8_both": dict(weights="int8", kv="int8"),
    "fp8_both": dict(weights="fp8", kv="fp8"),
}
SEEDS, BELOW = range(5), 0.02
IN_FULL = "engine.weights=auto engine.kv=auto algorithm.rollout_is=none"
RUNS = {"in_full": IN_FULL, "corrected": "", "uncorrected": "algorithm.rollout_is=none engine.uncorrected=true"}
_STORIES = "engine.weights=int8 engine.kv=int8 algorithm.rollout_is=token"
_ENDS = "eval.every=0 eval.at=() checkpoint.every=0"  # evaluates before the first step and behind the last one
TASKS = {"demo": ("configs/demo/eight_bits.py", ""), "stories": ("configs/models/stories.py", _STORIES)}
# Files, and which of their tests. Some others want a small change of weights to change tokens, which codes do not show, or look at
# plain weights. Some compare log-probs of layouts whose sums round otherwise, by less than the step of a code.
SUITES = {
    "test_engine_equality.py": "not verify_after_a_swap_gives",
    "test_engine_carry.py": "",
    "test_engine_checkpoint.py": "",
    "test_engine_drafting.py": "",
    "test_engine_elastic.py": "not follow_the_law and not pages_and_weights and not never_given_up and not of_the_same_kind",
    "test_engine_head_rows.py": "",
    "test_engine_prompt_program.py": "",
    "test_engine_speculation.py": "",
    "test_engine_tail_batching.py": "",
    "test_serve_slots.py": "",
}


def show(record) -> None:
    arms = {"bytes": _bytes, "gap": _gap, "rewards": _rewards, "engines": _engines, "planted": _planted}
    for name in record.options.get("arms", ",".join(arms)).split(","):
        arms[name](record)


def _bytes(record) -> None:
    python = compilers.python(record.root, "quantised")
    for target in TARGETS:
        for rows in ROWS:
            found = {form: _step(record, python, target, rows, form) for form in ("auto", "int8")}
            key = f"{target}_{rows}_rows"
            for form, figures in found.items():
                record.figure(f"{key}.{form}.moved_gb", round(figures["moved_gb"], 3))
                record.figure(f"{key}.{form}.moved_over_floor", round(figures["moved_over_floor"], 4))
            ratio = found["int8"]["moved_gb"] / found["auto"]["moved_gb"]
            record.figure(f"{key}.bytes_over_bfloat16", round(ratio, 4), at_most=FEWER)
            record.figure(f"{key}.widest_matrix_mib", found["int8"]["widened_mib"], equals=0.0)


def _step(record, python: Path, target: str, rows: int, form: str) -> dict:
    return compilers.told(record, python, "scripts/compile_tier/eight_bits.py", target, str(rows), form)


def _policies(record) -> dict:
    return {
        "demo": hf.load(record.root / "configs" / "demo_policy"),
        "stories260K": llama2c.load(record.data("tinystories-260k", "stories260K.bin")),
    }


def _gap(record) -> None:
    for policy, given in _policies(record).items():
        for way, formats in WAYS.items():
            pairs = log_ratios.pairs(*given, count=64, formats=formats)
            told = correction.mismatch_by_cause(pairs, [np.ones(len(one), bool) for one, _ in pairs])
            record.figure(f"{policy}.{way}.tokens", sum(len(one) for one, _ in pairs), at_least=1000)
            record.figure(f"{policy}.{way}.kl_per_token", told["rollout_corr/k3_kl_formats"])
            record.figure(f"{policy}.{way}.extreme_ratios", told["rollout_corr/extreme_formats"])
        rounded = log_ratios.pairs(*given, rounds="int8", formats={"weights": "int8"})
        worst = max(float(np.abs(mine - theirs).max()) for mine, theirs in rounded)
        record.figure(f"{policy}.trained_through_the_rounding.worst_gap", worst, at_most=1e-4)


def _rewards(record) -> None:
    record.data("tinystories-260k")
    tasks = record.options.get("tasks", ",".join(TASKS)).split(",")
    for task in tasks:
        ends = {
            way: [
                record.cached(f"{task}-{way}-{seed}", lambda: _final(record, *TASKS[task], options, seed))
                for seed in SEEDS
            ]
            for way, options in RUNS.items()
        }
        for way, found in ends.items():
            record.figure(f"{task}.{way}.median_final_reward", statistics.median(found))
            record.figure(f"{task}.{way}.lowest_final_reward", min(found))
        middle, full = statistics.median(ends["corrected"]), ends["in_full"]
        record.figure(f"{task}.corrected_over_lowest_in_full", middle - min(full), at_least=0.0)
        record.figure(f"{task}.corrected_below_median_in_full", statistics.median(full) - middle, at_most=BELOW)


def _final(record, file: str, first: str, options: str, seed: int) -> float:
    """Returns the accuracy of the last evaluation of a run."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "run"
        trained.run(record, file, place, f"seed={seed} {_ENDS} {first} {options}", timeout_s=1800)
        (name,) = {name for row in trained.rows(place) for name in row if name.startswith("val-core/")}
        return trained.rows(place, name)[-1][name]


def _engines(record) -> None:
    for file, selection in SUITES.items():
        name = file.removeprefix("test_").removesuffix(".py")
        passed = record.passed(f"tests/{file}", selection, timeout_s=3000, env={"LAB_BITS": "both"})
        record.figure(f"suites.{name}.tests_passed", passed, at_least=1)


def _planted(record) -> None:
    asked = lab.requests(8)

    def apart(engine) -> float:
        """Returns the worst gap of log-probs to an engine without a fault, up to the first other token."""
        out, worst = lab.run(engine, asked), 0.0
        for name, one in out.items():
            two = plain[name]
            size = min(len(one), len(two))
            worst = max(worst, float(np.abs(one.logprobs[:size] - two.logprobs[:size]).max()))
        return worst

    plain = lab.run(lab.engine(lab.weights(1), weights="int8"), asked)
    engine = lab.engine(lab.weights(0), weights="int8")
    stale = jax.tree.map(np.asarray, engine.device.params)
    homes = mesh.param_shardings(mesh.make_mesh(), decoder.axes(lab.TINY), "engine")
    engine.swap(mesh.put(lab.weights(1), homes), 1)
    record.figure("planted.none", apart(engine), at_most=1e-5)
    fresh = engine.device.params
    engine.device.params = _with_scales_of(fresh, stale)
    record.figure("planted.scales_of_before_a_swap", apart(engine), at_least=0.01)
    axes, eight_bit_weights.input_axes = eight_bit_weights.input_axes, lambda name: (0,)
    try:  # the output product of attention has two axes of inputs: one alone is the wrong group, and no shape fits
        lab.engine(lab.weights(1), weights="int8")
        refused = 0
    except (TypeError, ValueError):
        refused = 1
    finally:
        eight_bit_weights.input_axes = axes
    record.figure("planted.scales_of_another_axis_refused", refused, equals=1)


def _with_scales_of(params, other):
    return {
        name: _with_scales_of(leaf, other[name])
        if isinstance(leaf, dict)
        else jax.device_put(other[name], leaf.sharding)
        if name.endswith("_scale")
        else leaf
        for name, leaf in params.items()
    }
