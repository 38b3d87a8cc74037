"""Tail batching that drops nothing, over synchronous rounds, on RollPacker's fitted workloads; and what each part adds.

The workloads are configs/sim/ours_8k.py, ours_16k.py and ours_32k.py. Their tokens drift by 0.001 from one version to
the next. Seconds are of rollout, as in RollPacker's figure 11 (arXiv 2509.21009), whose own speed-ups are 1.7, 3.1 and
4.0 for all its parts. Tail batching alone must reach 1.8, 2.3 and 2.9 with recompute and with verify.

verify generates the long rollouts anew from their first difference on, so its long rounds last as long as synchronous
rounds. They take two batches at once (scheduler.long_batches), of which the second is trained on one step later. The
figure `staleness` says how old tokens are. The long lane needs prompts that were seen before: three epochs of the 16k
workload.
"""

from __future__ import annotations

import dataclasses

from jaxrl_post import config
from jaxrl_post.simulate import settings, simulation

MINUTES = 8.0
BOUNDS = {
    "8k": (1.8, 1.7),
    "16k": (2.3, 3.1),
    "32k": (2.9, 4.0),
}  # of tail batching alone; of RollPacker, for all its parts
MODES = {"recompute": 1, "verify": 2}  # batches of a long round
ROUNDS = {"8k": (45, 48), "16k": (44, 44), "32k": (63, 42)}  # whole periods of either mode
LANES = (0.0, 0.25, 0.5)
LANE_ROUNDS = 33


def show(record) -> None:
    for cap, (alone, rollpacker) in BOUNDS.items():
        for mode in MODES:
            found = record.cached(f"{cap}.{mode}", lambda: _report(record, cap, mode))
            _figures(record, f"{cap}.{mode}", found, {"tail batching": alone, "drafts in the tail": rollpacker})
        record.figure(f"{cap}.rollpacker_published", rollpacker)
    for lane in LANES:
        found = record.cached(f"lane{lane:g}", lambda: _laned(record, lane))
        record.figure(
            f"16k.three_epochs.lane_{lane:g}",
            {
                name: round(found[name], 3)
                for name in ("rollout_s", "short_rollout_s", "long_rollout_s", "short_longest", "period")
            },
        )


def _given(record, cap: str, *overrides: str):
    return settings.resolve(config.load(str(record.root / "configs" / "sim" / f"ours_{cap}.py")), overrides)


def _report(record, cap: str, mode: str) -> dict:
    given = _given(record, cap, f"rounds={ROUNDS[cap][list(MODES).index(mode)]}")
    tail = f"prefix_mode={mode} scheduler.long_batches={MODES[mode]}"
    return simulation.report(
        dataclasses.replace(given, parts=tuple(part.replace("prefix_mode=recompute", tail) for part in given.parts))
    )


def _figures(record, name: str, report: dict, bounds: dict) -> None:
    stages = report["stages"]
    sync = stages["sync"]["rollout_s"]
    for part, stage in stages.items():
        if part != "sync":
            record.figure(
                f"{name}.{part.replace(' ', '_')}.speedup",
                sync / stage["rollout_s"],
                **({"at_least": bounds[part]} if part in bounds else {}),
            )
    record.figure(f"{name}.part_shares", {part: round(share, 3) for part, share in report["part_shares"].items()})
    last = list(stages.values())[-1]
    record.figure(
        f"{name}.seconds",
        {"sync": round(sync, 1), **{kind: round(last[f"{kind}_rollout_s"], 1) for kind in ("short", "long")}},
    )
    record.figure(
        f"{name}.length_bias",
        round(report["length_bias"], 4),
        **(dict(at_least=-0.05, at_most=0.05) if name.endswith("recompute") else {}),
    )
    record.figure(f"{name}.tokens_wasted", round(report["tokens_wasted"], 4))
    record.figure(f"{name}.staleness", round(last["staleness"], 3))


def _laned(record, lane: float) -> dict:
    given = _given(
        record,
        "16k",
        f"rounds={LANE_ROUNDS}",
        f"workload.prompts={LANE_ROUNDS * 128 // 3}",
        "scheduler.name=tail_batching",
        "scheduler.over=1.375",
        "scheduler.prefix_mode=recompute",
        f"scheduler.lane={lane}",
    )
    return simulation.run(given)
