"""Runs training jobs one after another in one process: a JSON object a line in, a JSON object a line out.

A job is {"config", "overrides", "table"}, where `table` is the object of an engine.cost_table file or null. It returns
{"rewards", "scored", "steps", "oldest", "stale"}. The first three are by optimizer step: `steps` are those of
scripts/priced.py, and the others those of `scores`. One process compiles less than a process a job would.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
QUIET = ("eval=default", "eval.prompts=0", "checkpoint.every=0", "trace_rounds=0")


class Worker:
    """A process that runs jobs. It has two devices, so that a learner may have one of its own."""

    def __init__(self):
        env = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            cwd=ROOT,
            env={**os.environ, **env},
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def run(self, job: dict) -> dict:
        """Returns what a job has found.

        Raises:
          RuntimeError: the process ended, with what it said on its standard error.
        """
        print(json.dumps(job), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the run of {job} ended with exit code {self._process.wait()}; its error stands above")
        return json.loads(line)

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


def run(job: dict) -> dict:
    """Runs one job in this process.

    Raises:
      RuntimeError: the run failed.
    """
    import priced

    from jaxrl_post import main
    from jaxrl_post.runs import metric_rows

    with tempfile.TemporaryDirectory() as folder:
        table, place = Path(folder) / "table.json", Path(folder) / "run"
        table.write_text(json.dumps(job["table"]))
        given = [*QUIET, *job["overrides"], *([f"engine.cost_table={table}"] if job["table"] else [])]
        arguments = [f"--config={job['config']}", f"--run-dir={place}", *(f"--config.{one}" for one in given)]
        with contextlib.redirect_stdout(sys.stderr):
            if main.main(arguments):
                raise RuntimeError(f"the run failed: {arguments}")
        rows = [row for row in metric_rows.read(place / "metrics.jsonl") if "training/global_step" in row]
        steps = [dataclasses.astuple(step) for step in priced.steps_of(place)]
        rewards, scored = scores(place, rows)
    return {
        "rewards": rewards,
        "scored": scored,
        "steps": steps,
        "oldest": max(row["off_policy/max"] for row in rows),
        "stale": sum(row["off_policy/mean"] for row in rows) / len(rows),
    }


def scores(folder: Path, rows: Sequence[Mapping]) -> tuple[list[float], list[int]]:
    """Returns the mean reward and the number of the rollouts that were scored for each optimizer step.

    A step has as many groups, in the order of their scores, as it trained on, filtered or refused. The mean is over all
    of them, because the accuracies of a group that a filter keeps always differ. Where several batches were ready at one
    clock, the row of the first counts all their groups. So each step gets a batch, and the first also what was filtered.

    Raises:
      ValueError: the steps did not train on a batch each, or fewer rollouts were scored than they have.
    """
    scheduler = json.loads((folder / "config.json").read_text())["scheduler"]
    batch, size = scheduler["prompts"], scheduler["group_size"]
    found = [json.loads(line)["reward"] for line in (folder / "rewards.jsonl").read_text().splitlines()]
    trained = sum(int(row["sched/num_groups_trained"]) for row in rows)
    counts = [size * (batch + _left_out(row)) for row in rows]
    if trained != batch * len(rows) or sum(counts) > len(found):
        raise ValueError(
            f"{folder}: {len(rows)} steps of {batch} groups trained on {trained}; {len(found)} rollouts were scored, its "
            f"steps have {sum(counts)}"
        )
    ends = itertools.accumulate(counts)
    return [statistics.mean(found[end - count : end]) for count, end in zip(counts, ends, strict=True)], counts


def _left_out(row: Mapping) -> int:
    """Returns how many groups were filtered or refused. Only rounds refuse groups."""
    return int(row["sched/num_groups_filtered"] + row.get("sched/num_groups_refused", 0.0))


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]
    answers = sys.stdout
    for text in sys.stdin:
        print(json.dumps(run(json.loads(text))), file=answers, flush=True)
