"""Distillation from the demo's trained policy: the student's held-out reward is 90 % of its teacher's.

1. teacher: configs/demo.py from beginning to end.
2. start: a student of random weights learns from rows that the teacher wrote, by configs/demo/distill_start.py.
3. student: the demo's policy before RL learns from its own rollouts, by configs/demo/distill.py.
4. planted: the step 2. with a teacher that was never trained, and with its rows, must miss the bound.

No student reads a reward. The teacher writes rows to prompts of a split that neither RL nor evaluation uses. All are
evaluated on the same held-out prompts at temperature 1. Intervals are of 95 %, a bootstrap over prompts.

    python scripts/show.py prefer-and-distil --arms=distilled    runs this part alone
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import intervals

from jaxrl_post.data import prompts
from jaxrl_post.runs import metric_rows, rollout_log

LIMIT_S = 3600.0  # of one command, on a busy machine
SHARE = 0.9
PROMPTS = 8192
MIX = {"more": 0.5, "tail": 0.12}  # as in configs/demo/sft.py: long problems are more frequent than in the demo


def show(record) -> None:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        _run(record, place / "teacher", "demo")
        teacher = _rewards(place / "teacher")[-1]
        record.figure("distilled.prompts", len(teacher), at_least=256)
        record.figure("distilled.teacher", _mean(teacher), at_least=0.85)
        _write_prompts(place)
        _started(record, place, "start", place / "teacher" / "policy")
        _learnt(record, place / "start", teacher, at_most=0.05)
        _apart(record, place)
        _run(record, place / "student", "demo/distill", *_taught_by(place / "teacher" / "policy"))
        _learnt(record, place / "student", teacher, at_most=0.5)
        _closer(record, place / "student")
        _planted(record, place, teacher)


def _run(record, place: Path, config: str, *flags: str) -> None:
    file = f"--config=configs/{config}.py"
    seconds = record.run("-m", "jaxrl_post.main", file, f"--run-dir={place}", *flags, timeout_s=LIMIT_S)
    record.figure(f"distilled.{place.name}.seconds", round(seconds, 1))


def _taught_by(policy: Path) -> tuple[str, ...]:
    return (f"--config.teacher.path={policy}",)


def _write_prompts(place: Path) -> None:
    rows = prompts.rows("task:sums", seed=0, split="sft", size=PROMPTS, arguments=MIX)
    lines = [json.dumps({"id": row["id"], "prompt": row["prompt"]}) for row in rows]
    (place / "prompts.jsonl").write_text("\n".join(lines) + "\n")


def _started(record, place: Path, name: str, policy: Path, *flags: str) -> None:
    """Lets a teacher write rows, and trains a student of random weights on them."""
    rows = place / f"{name}.jsonl"
    given = ("--data", place / "prompts.jsonl", "--max-tokens", 95, "--json", rows)
    seconds = record.run("-m", "jaxrl_post", "generate", "--policy", policy, *given, timeout_s=LIMIT_S)
    record.figure(f"distilled.{name}.rows.seconds", round(seconds, 1))
    _run(record, place / name, "demo/distill_start", f"--config.data.train={rows}", *_taught_by(policy), *flags)


def _learnt(record, run: Path, teacher: dict[str, float], *, at_most: float) -> None:
    """Writes a student's reward before and after, and its share of the teacher's. `at_most`: bound of the one before."""
    before, after = _rewards(run)
    record.figure(f"distilled.{run.name}.before", _mean(before), at_most=at_most)
    record.figure(f"distilled.{run.name}.after", _mean(after))
    _ratio(record, f"distilled.{run.name}.share_of_the_teacher", after, teacher, at_least=SHARE)


def _apart(record, place: Path) -> None:
    """No row that the teacher wrote is of a held-out prompt, or of one that it was trained on."""
    written = {json.loads(line)["prompt_id"] for line in (place / "start.jsonl").read_text().splitlines()}
    record.figure("distilled.rows", len(written), equals=PROMPTS)
    for what, folder in (("held_out", "evaluations"), ("trained_by_rl", "rollouts")):
        files = (place / "teacher" / folder).glob("step_*.npz")
        ids = {group.prompt.id for file in files for group in rollout_log.scores(file)}
        record.figure(f"distilled.rows.{what}", len(written & ids) if ids else None, equals=0)


def _rewards(run: Path) -> list[dict[str, float]]:
    """Returns the mean reward of sampled rollouts by held-out prompt, before and after a run."""
    files = sorted((run / "evaluations").glob("step_*.npz"))
    out = []
    for file in (files[0], files[-1]):
        groups = rollout_log.scores(file)
        out.append({one.prompt.id: float(one.accuracies.mean()) for one in groups[: len(groups) // 2]})
    return out


def _mean(rewards: dict[str, float]) -> float:
    return sum(rewards.values()) / len(rewards)


def _ratio(record, key: str, ours: dict[str, float], theirs: dict[str, float], **bound: float) -> float:
    """Writes the ratio of two means over the same prompts, and its interval. Returns its upper end."""
    ids = sorted(theirs)
    ratio, low, high = intervals.ratio_of_paired_means([ours[id] for id in ids], [theirs[id] for id in ids])
    record.figure(key, ratio, **bound)
    record.figure(f"{key}.low", low, **bound)
    record.figure(f"{key}.high", high)
    return high


def _closer(record, run: Path) -> None:
    """Writes the reverse KL over the first and the last steps, nats per token."""
    rows = [row for row in metric_rows.read(run / "metrics.jsonl") if "actor/grad_norm" in row]
    found = [row["rollout/opd_reverse_kl"] for row in rows]
    first, last = (sum(some) / len(some) for some in (found[:5], found[-5:]))
    record.figure("distilled.reverse_kl.first_five_steps", first)
    record.figure("distilled.reverse_kl.last_five_steps", last, at_most=first / 2)


def _planted(record, place: Path, teacher: dict[str, float]) -> None:
    """A student whose teacher is the policy that the teacher began with."""
    untrained = Path(json.loads((place / "teacher" / "config.json").read_text())["model"]["path"])
    _started(record, place, "planted", untrained, "--config.eval.every=0")
    high = _ratio(record, "distilled.planted.share_of_the_teacher", _rewards(place / "planted")[-1], teacher)
    record.figure("distilled.planted.untrained_teacher_misses_the_bound", high < SHARE, equals=True)
