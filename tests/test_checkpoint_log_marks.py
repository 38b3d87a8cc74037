"""Logs go back to the length that they had, or nothing is cut."""

import json
import os

import pytest

from jaxrl_post.runs.checkpoint import log_marks
from jaxrl_post.runs.checkpoint.log_marks import rewind


def logs(folder, rows):
    """A run's logs after `rows` rows of each."""
    for sub in ("rollouts", "evaluations", "completions"):
        (folder / sub).mkdir(parents=True, exist_ok=True)
        for n in range(rows):
            (folder / sub / f"step_{n:06d}.npz").write_bytes(b"x")
    for name in log_marks.LOGS:
        (folder / name).write_text("".join(json.dumps({"file": f"step_{n:06d}.npz"}) + "\n" for n in range(rows)))


def listed(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_logs_go_back_to_where_they_were(tmp_path):
    logs(tmp_path, 3)
    before, to = listed(tmp_path), log_marks.marks(tmp_path)
    logs(tmp_path, 5)
    (tmp_path / "rollouts" / "step_000005.npz").write_bytes(b"written, and not yet in the index")
    (tmp_path / "rollouts" / "step_000006.npz.part").write_bytes(b"half")
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 5, "half a li')
    rewind(tmp_path, to)
    assert listed(tmp_path) == before
    rewind(tmp_path, {})
    assert listed(tmp_path) == {}
    rewind(tmp_path, {})


def test_a_log_that_lost_lines_is_refused_and_nothing_is_cut(tmp_path):
    logs(tmp_path, 3)
    to = log_marks.marks(tmp_path)
    logs(tmp_path, 5)
    os.truncate(tmp_path / "rewards.jsonl", 10)
    before = listed(tmp_path)
    with pytest.raises(ValueError, match="rewards.jsonl has 10 bytes, the checkpoint knows of 84"):
        rewind(tmp_path, to)
    assert listed(tmp_path) == before
