"""On-policy distillation from the demo's trained policy: the student's held-out reward is 90 % of its teacher's.

1. teacher: configs/demo.py from beginning to end.
2. student: configs/demo_distill.py with that teacher. It reads no reward.
3. planted: the same with a teacher that was never trained must miss the bound.

Both are evaluated on the same held-out prompts. Intervals are of 95 %, a bootstrap over prompts.

    python scripts/prefer_and_distil/distillation.py    runs this part alone
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

LIMIT_S = 3600.0  # of one command, on a busy machine
SHARE = 0.9


def show(record) -> None:
    sys.path[:0] = [str(record.root), str(record.root / "scripts")]
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        _run(record, place / "teacher", "demo")
        _run(record, place / "student", "demo_distill", f"--config.teacher.path={place / 'teacher' / 'policy'}")
        teacher, (before, after) = _rewards(place / "teacher")[-1], _rewards(place / "student")
        record.figure("distilled.prompts", len(teacher), at_least=256)
        record.figure("distilled.teacher", _mean(teacher), at_least=0.85)
        record.figure("distilled.student.before", _mean(before), at_most=0.5)
        record.figure("distilled.student.after", _mean(after))
        _ratio(record, "distilled.share_of_the_teacher", after, teacher, at_least=SHARE)
        _closer(record, place / "student")
        _planted(record, place, teacher)


def _run(record, place: Path, config: str, *flags: str) -> None:
    file = f"--config=configs/{config}.py"
    seconds = record.run("-m", "jaxrl_post.main", file, f"--run-dir={place}", *flags, timeout_s=LIMIT_S)
    record.figure(f"distilled.{place.name}.seconds", round(seconds, 1))


def _rewards(run: Path) -> list[dict[str, float]]:
    """Returns the mean reward of sampled rollouts by held-out prompt, before and after a run."""
    from jaxrl_post.telemetry import rollout_log

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
    import numpy as np

    ids = sorted(theirs)
    pairs = np.array([[ours[id], theirs[id]] for id in ids])
    random = np.random.default_rng(0)
    drawn = pairs[random.integers(0, len(ids), (4000, len(ids)))].mean(axis=1)
    low, high = np.percentile(drawn[:, 0] / drawn[:, 1], (2.5, 97.5))
    record.figure(key, _mean(ours) / _mean(theirs), **bound)
    record.figure(f"{key}.low", float(low), **bound)
    record.figure(f"{key}.high", float(high))
    return float(high)


def _closer(record, run: Path) -> None:
    """Writes the reverse KL over the first and the last steps, nats per token."""
    from jaxrl_post.telemetry import metrics

    rows = [row for row in metrics.read(run / "metrics.jsonl") if "actor/grad_norm" in row]
    found = [row["rollout/opd_reverse_kl"] for row in rows]
    first, last = (sum(some) / len(some) for some in (found[:5], found[-5:]))
    record.figure("distilled.reverse_kl.first_five_steps", first)
    record.figure("distilled.reverse_kl.last_five_steps", last, at_most=first / 2)


def _planted(record, place: Path, teacher: dict[str, float]) -> None:
    """A student whose teacher is the policy that the teacher began with."""
    told = json.loads((place / "teacher" / "config.json").read_text())["model"]["path"]
    _run(record, place / "planted", "demo_distill", f"--config.teacher.path={told}", "--config.eval.every=0")
    high = _ratio(record, "distilled.planted.share_of_the_teacher", _rewards(place / "planted")[-1], teacher)
    record.figure("distilled.planted.untrained_teacher_misses_the_bound", high < SHARE, equals=True)


def main() -> int:
    """Runs this part alone and prints its table. Exit code 1: a figure is out of its bound."""
    root = Path(__file__).resolve().parents[2]
    sys.path[:0] = [str(root / "scripts")]
    from record import Record

    record = Record("distillation", sys.argv)
    show(record)
    print(record.table())
    return 0 if record.ok else 1


if __name__ == "__main__":
    sys.exit(main())
