"""Drafting from history: rollouts of a recorded run generated again with each drafter, in steps and in seconds.

Two runs of several epochs come first: RL on stories260K (mean entropy above a nat) and on the demo policy (well below
0.3). Then every drafter generates requests of the first round (cold: nothing remembered) and of the round after the log
(steady), over 64 slots. `full_batch` is while requests wait for a slot, `tail` from then on. The demo runs four such
rounds, one after the other. All arms must give the same bits.

Steps: rows are free up to 192 (a flat cost table), as on an accelerator below its balance point. So a step ratio says
what a device bound by memory would gain.

Seconds: those of this CPU, where each row costs. The step-cost table is measured first, and every arm chooses its row
sizes from it. The arms take turns dispatch by dispatch, since the machine's speed drifts.

The oracle drafts the model's own most likely token, computed from the rollouts. Below an entropy of 0.3 nats ratios are
reported, not claimed.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
from pathlib import Path

import numpy as np
import replay
import trained

from jaxrl_post.engine.step_cost import StepCost
from jaxrl_post.launch import compile_guard

MINUTES = 30.0
PLATFORM = "cpu"
SLOTS, STEPS, PROMPTS = 64, 16, 16
WIDTH = {"stories": 7, "demo": 11}  # longest chain of a draft; the demo's texts are more predictable
PAIRS = {"stories": 15, "demo": 15}
MORE = {"stories": 6, "demo": 30}  # only of off and ours, whose ratio has a bound
ROUNDS = {"stories": 1, "demo": 4}  # the demo's last rollouts drain in a few steps
SIZES = (64, 128, 192)
ENTRIES = {"prompts": 1 << 20, "shared": 3 << 18, "live": 1 << 14}
ARMS = ("off", "ngram", "histospec", "ours")
PHASES = ("full_batch", "tail")
SPECULATION = (
    "speculation.drafter=ours",
    "speculation.live_entries=16384",
    "speculation.prompt_entries=262144",
    "speculation.shared_entries=786432",
    "eval.prompts=0",
    "eval.every=0",
    "eval.at=()",
    "checkpoint.every=0",
    "history.epochs=8",
)
WORKLOADS = {
    "stories": (
        "configs/models/stories.py",
        (
            "steps=20",
            "data.size=32",
            "sampling.max_tokens=192",
            "engine.max_length=256",
            "batch.tokens=256",
            "optimizer.lr=5e-5",
        ),
    ),
    "demo": ("configs/demo/speculation.py", ("steps=25",)),
}
CLAIM_FROM = 0.3  # nats of mean entropy


def show(record) -> None:
    record.data("tinystories-260k")
    compile_guard.use_cache(
        {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(record.root / ".cache" / "speculation" / "jax")}
    )
    table = {}
    for workload, (file, changes) in WORKLOADS.items():
        folder = record.root / ".cache" / "speculation" / workload
        overrides = [*SPECULATION, *changes]
        _log(record, folder, file, [*overrides, f"engine.cost_table={_flat(record)}"])
        table[workload] = {
            kind: _cells(record, f"{workload}.{kind}", folder, file, overrides, steady=kind == "steady")
            for kind in ("cold", "steady")
        }
    record.figure("workloads", table)
    record.figure(
        "settings",
        {
            "slots": SLOTS,
            "width": WIDTH,
            "steps_per_dispatch": STEPS,
            "row_sizes": SIZES,
            "pairs": PAIRS,
            "requests_a_round": PROMPTS * 8,
            "rounds": ROUNDS,
        },
    )


def _flat(record) -> Path:
    """Writes a cost table in which rows and drafting are free, as where memory is the bound.

    The recorded runs draft by it.
    """
    file = record.root / ".cache" / "speculation" / "flat.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"figures": {"step_s": {str(size): 1.0 for size in SIZES}}}))
    return file


def _log(record, folder: Path, file: str, overrides: list[str]) -> None:
    """Records the run that is replayed, anew for every show."""
    shutil.rmtree(folder, ignore_errors=True)
    trained.run(record, file, folder, "", *overrides, timeout_s=900)


def _cells(record, name: str, folder: Path, file: str, overrides: list[str], *, steady: bool) -> dict:
    """Writes both phases of one workload and stage, arm by arm, with their bounds."""
    where = replay.stage(
        record.root,
        folder,
        file,
        overrides,
        steady=steady,
        prompts=PROMPTS,
        rounds=ROUNDS[name.split(".")[0]],
        width=WIDTH[name.split(".")[0]],
    )
    flat = StepCost(SIZES, (1.0,) * len(SIZES), "flat")
    free = {arm: _arm(where, arm, flat) for arm in ARMS}
    for arm in free.values():
        arm.run()  # counts what drafts prove to be worth
    counted = {name: arm.run() for name, arm in free.items()}
    record.figure(
        f"{name}.arms_with_other_bits", sum(run.bits != counted["off"].bits for run in counted.values()), equals=0
    )
    free["ours"].engine.drafting.forced = True  # so that it computes the argmax token at every step
    watched = free["ours"].run()
    del free
    best = replay.oracle(watched, where.rounds, rows=max(SIZES), slots=SLOTS, width=where.width)
    rollouts = list(watched.rollouts.values())
    about = {
        "mean_length": float(np.mean([len(r) for r in rollouts])),
        "epoch": where.epoch,
        "entropy": float(np.mean(np.concatenate([r.entropies for r in rollouts]))),
        "ceiling_mean_max_p": float(np.mean(np.concatenate([r.tokens == r.argmax_tokens for r in rollouts]))),
    }
    times = _times(record, name, where)
    cells = {
        phase: {"about": about}
        | {arm: _cell(counted, times, arm, phase) for arm in ARMS}
        | {"oracle": {"accepted_per_step": best[phase][0] / best[phase][1]}}
        for phase in PHASES
    }
    _bound(record, name, cells, counted, times, about["entropy"], steady)
    return cells


def _arm(where, name: str, cost, sizes=SIZES):
    return replay.Arm(
        where, name, row_sizes=sizes, cost=cost, clones=name == "ours", entries=ENTRIES, slots=SLOTS, steps=STEPS
    )


def _cell(counted: dict, times: dict, arm: str, phase: str) -> dict:
    run, off = counted[arm].phases[phase], counted["off"].phases[phase]
    ratios = [a / b for a, b in zip(times["off"][phase], times[arm][phase])]
    low, high = _interval(ratios)
    return {
        "step_ratio": (run.tokens / run.steps) / (off.tokens / off.steps),
        "accepted_per_step": run.accepted / run.slot_steps,
        "drafted_per_step": run.drafted / run.slot_steps,
        "time_ratio": statistics.median(ratios),
        "time_ratio_95": [low, high],
        "row_steps": run.row_steps,
    }


def _times(record, name: str, where) -> dict[str, dict[str, list[float]]]:
    """Returns seconds a token of each arm and phase, in runs that take turns dispatch by dispatch.

    Row sizes come from a table measured here.
    """
    cost = _measured(where)
    record.figure(
        f"{name}.cost_table",
        {
            "step_s": dict(zip(map(str, cost.rows), cost.seconds)),
            "drafting_s": cost.drafting,
            "opening_s": cost.opening,
        },
    )
    arms = {arm: _arm(where, arm, cost) for arm in ARMS}
    for arm in arms.values():
        arm.run()
    out = {arm: {phase: [] for phase in (*PHASES, "all", "row_steps")} for arm in ARMS}
    pairs, more = (given[name.split(".")[0]] for given in (PAIRS, MORE))
    for turn in range(pairs + more):
        taking = (
            ARMS[turn % len(ARMS) :] + ARMS[: turn % len(ARMS)] if turn < pairs else ("off", "ours")[:: (-1) ** turn]
        )
        for arm, run in zip(taking, replay.side_by_side([arms[name] for name in taking])):
            phases = run.phases
            for phase in PHASES:
                out[arm][phase].append(phases[phase].seconds / phases[phase].tokens)
            out[arm]["all"].append(sum(p.seconds for p in phases.values()))
            out[arm]["row_steps"].append(phases["full_batch"].row_steps / phases["full_batch"].tokens)
    return out


def _measured(where):
    """Measures the step-cost table on the stage's own requests."""
    from benches import cost

    engine = _arm(where, "ours", StepCost(SIZES, (1.0,) * len(SIZES), "flat")).engine
    steps, drafting, opening = cost.measure(engine, where.rounds[0], turns=3)
    return StepCost(SIZES, tuple(steps.values()), "measured here", drafting, opening)


def _interval(values: list[float]) -> tuple[float, float]:
    """Returns a 95 % bootstrap interval of the median."""
    drawn = np.random.default_rng(0).choice(values, (4000, len(values)))
    low, high = np.percentile(np.median(drawn, axis=1), (2.5, 97.5))
    return float(low), float(high)


def _bound(record, name: str, cells: dict, counted: dict, times: dict, entropy: float, steady: bool) -> None:
    for phase in PHASES:
        ours, key = cells[phase]["ours"], f"{name}.{phase}"
        record.figure(
            f"{key}.accepted_per_step",
            ours["accepted_per_step"],
            at_least=max(cells[phase][other]["accepted_per_step"] for other in ("ngram", "histospec")),
        )
        record.figure(
            f"{key}.of_oracle",
            ours["accepted_per_step"] / cells[phase]["oracle"]["accepted_per_step"],
            **({"at_least": 0.7} if steady else {}),
        )
        slower = [b / a for a, b in zip(times["off"][phase], times["ours"][phase])]
        record.figure(f"{key}.time_over_off_upper_95", _interval(slower)[1], at_most=1.05)
        share = ours["accepted_per_step"] / ours["drafted_per_step"] if ours["drafted_per_step"] else 0.0
        record.figure(f"{key}.share_of_drafts_accepted", share)
        record.figure(f"{key}.step_ratio", ours["step_ratio"], **({"at_least": 1.86} if share >= 0.65 else {}))
    steps = {arm: sum(run.phases[phase].steps for phase in PHASES) for arm, run in counted.items()}
    ratio = [a / b for a, b in zip(times["off"]["all"], times["ours"]["all"])]
    claimed = {"at_least": 1.39 if steady else 1.20} if entropy >= CLAIM_FROM else {}
    record.figure(f"{name}.entropy", entropy)
    record.figure(f"{name}.generation_step_ratio", steps["off"] / steps["ours"], **claimed)
    record.figure(f"{name}.generation_time_ratio", statistics.median(ratio))
    record.figure(f"{name}.generation_time_ratio_95", list(_interval(ratio)))
    record.figure(
        f"{name}.full_batch.row_steps_over_off",
        statistics.median(b / a for a, b in zip(times["off"]["row_steps"], times["ours"]["row_steps"])),
    )
