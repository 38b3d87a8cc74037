"""What the modes of a run gained and cost, and its predicted seconds beside the measured ones. Said at its end.

Modes are the scheduler, drafts, split and lent devices, and layouts. Gains and costs are counted. Where seconds stand
beside a count, they are the measured seconds of generation, divided by the counted rows or steps.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxrl_post.config import Config

_USES = ("prefill", "decode", "draft_accepted", "draft_rejected", "idle", "clone")
_STEP, _GEN = "timing_s/step", "timing_s/gen"


def supervised(config: Config) -> bool:
    """Returns whether a run's loss reads no reward: written completions or a teacher say what is learned."""
    return config.engine.name != "rows" or config.algorithm.adv_estimator == "distill"


def figures(
    config: Config, rows: Sequence[Mapping[str, float]], auto: Mapping[str, Any] | None, cost: Callable | None
) -> dict[str, Any]:
    """Returns the figures of a run's modes; empty before its first step.

    Args:
      rows: of metrics.jsonl.
      auto: how scheduler.name=auto chose, or None.
      cost: seconds of an engine step by its rows, or None without an engine of rows.

    Keys:
      step_s, gen_s: median seconds of an optimizer step, and of its generation, if any. The first step compiles and is left out.
      predicted_step_s: by auto. predicted_sync_s: of synchronous rounds, by auto.
      predicted_gen_s, counted_gen_s: generation of all steps, by the step-cost table and as measured.
      modes: {mode: {"gained": text, "cost": text}}.
    """
    steps = [row for row in rows if "training/global_step" in row]
    timed = [row for row in steps if _STEP in row]
    if not timed:
        return {}
    report: dict[str, Any] = {"scheduler": config.scheduler.name, "steps": len(steps)}
    warm = timed[1:] or timed
    report["step_s"] = statistics.median(row[_STEP] for row in warm)
    if config.engine.name == "rows":
        report["gen_s"] = statistics.median(row.get(_GEN, 0.0) for row in warm)
    if auto:
        report["predicted_step_s"] = next(one["seconds"] for one in auto["modes"] if one["options"] == auto["chosen"])
        report["predicted_sync_s"] = next(
            (one["seconds"] for one in auto["modes"] if one["options"] == {"name": "sync"}), None
        )
    sums = _summed(steps)
    if cost is not None and sums["rows/steps"]:
        own = [row for row in warm if _GEN in row and row.get("rows/steps")]
        report["predicted_gen_s"] = sum(_by_table(row, cost) for row in own)
        report["counted_gen_s"] = sum(row[_GEN] for row in own)
    report["modes"] = {name: found for name, found in _modes(config, sums, steps).items() if found}
    return report


def _summed(rows: Sequence[Mapping[str, float]]) -> Counter[str]:
    sums: Counter[str] = Counter()
    for row in rows:
        sums.update({name: value for name, value in row.items() if not name.endswith(("/mean", "/max", "/min"))})
    return sums


def _by_table(row: Mapping[str, float], cost: Callable[[int], float]) -> float:
    """Returns the seconds that a table gives for the dispatches of a step, by their sizes."""
    sizes = {int(name.rpartition("_")[2]): count for name, count in row.items() if name.startswith("rows/size_")}
    return sum(count * cost(size) for size, count in sizes.items())


def _modes(config: Config, sums: Counter[str], rows: Sequence[Mapping[str, float]]) -> dict[str, dict[str, str]]:
    s, used = config.scheduler, sum(sums[f"rows/{use}"] for use in _USES)
    out = {s.name: _SCHEDULERS[s.name](sums, rows, used)}
    if config.speculation.drafter != "off":
        out[f"speculation {config.speculation.drafter}"] = _drafts(sums, used)
    if config.mesh.engine:
        out["split devices"] = {
            "gained": f"the learner worked {sums['timing_s/train']:.1f} s of {sums[_STEP]:.1f} s beside generation",
            "cost": _age(rows),
        }
    if s.lend:
        lent = f"{sums['sched/num_lendings']:,.0f} loans, {sums['sched/lent_steps']:,.0f} engine steps of lent replicas"
        out["lending"] = {"gained": lent, "cost": f"{sums['timing_s/relayout']:.2f} s of moving rollouts"}
    if config.engine.layouts:
        moved = sums["engine/num_moved_rollouts"]
        cost = f"{moved:,.0f} rollouts moved in {sums['timing_s/relayout']:.2f} s"
        out["layouts"] = {"gained": f"{sums['engine/num_relayouts']:,.0f} changes of the layout", "cost": cost}
    return out


def _idle(sums: Counter[str], used: float) -> str:
    return f"{_share(sums['rows/idle'], used)} of the engine's rows had no rollout"


def _age(rows: Sequence[Mapping[str, float]]) -> str:
    known = [row for row in rows if "off_policy/mean" in row]
    if not known:
        return "no trained token had an age"
    mean = statistics.fmean(row["off_policy/mean"] for row in known)
    return f"trained tokens were {mean:.2f} steps old on average, {max(row['off_policy/max'] for row in known):.0f} at most"


def _sync(sums: Counter[str], rows: Sequence[Mapping[str, float]], used: float) -> dict[str, str]:
    return {"gained": _age(rows), "cost": _idle(sums, used)} if used else {}


def _races(sums: Counter[str], rows: Sequence[Mapping[str, float]], used: float) -> dict[str, str]:
    deferred = sums["sched/num_groups_deferred"] + sums["sched/num_groups_sent_long"]
    gained = f"{deferred:,.0f} of {sums['sched/num_groups_admitted']:,.0f} groups were deferred to long rounds; {_idle(sums, used)}"
    lost = f"{sums['sched/num_tokens_discarded']:,.0f} tokens were discarded and {sums['swap/rows']:,.0f} rows computed again"
    return {"gained": gained, "cost": f"{lost}; {_age(rows)}"}


def _piped(sums: Counter[str], rows: Sequence[Mapping[str, float]], used: float) -> dict[str, str]:
    paused = f"{sums['sched/paused_slot_steps']:,.0f} steps of slots were held empty by the bound"
    again = f"{sums['swap/rows']:,.0f} rows computed again"
    return {"gained": _idle(sums, used), "cost": f"{_age(rows)}; {again}; {paused}"}


_SCHEDULERS = {"sync": _sync, "tail_batching": _races, "rollpacker": _races, "pipeline": _piped}


def _drafts(sums: Counter[str], used: float) -> dict[str, str]:
    """Accepted drafts save engine steps. Those that fail take rows, which are seconds by their share of all rows."""
    drafted, right = sums["spec/num_drafted"], sums["spec/num_accepted"]
    steps, decoded, seconds = sums["rows/steps"], sums["rows/decode"], sums[_GEN]
    saved = right * steps / decoded if decoded else 0.0
    wrong = sums["rows/draft_rejected"] + sums["rows/clone"]
    each = seconds / steps if steps else 0.0
    return {
        "gained": f"{right:,.0f} of {drafted:,.0f} drafts were right ({_share(right, drafted)}), which saved about "
        f"{saved:,.0f} of {steps + saved:,.0f} engine steps, {saved * each:.2f} s",
        "cost": f"{wrong:,.0f} rows of drafts that failed, {_share(wrong, used)} of all rows, about "
        f"{(wrong / used if used else 0.0) * seconds:.2f} s; {sums['spec/drafting_steps']:,.0f} steps drafted",
    }


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "0 %"


def lines(report: Mapping[str, Any]) -> list[str]:
    """Returns the figures as lines of the screen."""
    if not report:
        return []
    generation = f", its generation {report['gen_s']:.3g} s" if "gen_s" in report else ""
    out = [f"a step took {report['step_s']:.3g} s (median of {report['steps']}){generation}"]
    if (step := report.get("predicted_step_s")) is not None:
        sync = report.get("predicted_sync_s")
        beside = f", and {sync:.3g} s for synchronous rounds" if sync is not None else ""
        out.append(
            f"  auto predicted {step:.3g} s a step{beside}: measured is {report['step_s'] / step:.2f} times its prediction"
        )
    if predicted := report.get("predicted_gen_s"):
        took = report["counted_gen_s"]
        out.append(
            f"  the step-cost table predicted {predicted:.3g} s for the dispatches, and they took {took:.3g} s: "
            f"{took / predicted:.2f} times as long"
        )
    for name, one in report["modes"].items():
        out += [f"  {name}: gained: {one['gained']}", f"  {' ' * len(name)}  cost: {one['cost']}"]
    return out
