"""A run that a harness plays: bit for bit the run of the built-in environment, and resumed in the middle of sessions."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from jaxrl_post import main
from jaxrl_post.rewards.environments.conversations import TurnScores
from jaxrl_post.runs import metric_rows

# test_rewards_sessions.py and test_serve_agents.py have the parts in the first tier
pytestmark = [pytest.mark.usefixtures("quick_compilation"), pytest.mark.extended]

ROOT = Path(__file__).resolve().parents[1]
SMALL = (
    "--config.steps=2",
    "--config.checkpoint.every=1",
    "--config.checkpoint.keep_last=4",
    "--config.scheduler.prompts=4",
    "--config.scheduler.group_size=4",
    "--config.engine.slots=8",
    "--config.engine.row_sizes=(16,)",
    "--config.batch.rows=4",
    "--config.eval.prompts=2",
    "--config.eval.samples=2",
    "--config.eval.show=0",
)
DEFERRING = (
    "--config.steps=3",
    "--config.scheduler.name=tail_batching",
    "--config.scheduler.over=1.5",
    "--config.scheduler.prefix_mode=verify",
)
TOKEN = "of-the-test"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        return one.getsockname()[1]


@pytest.fixture(scope="module")
def port() -> int:
    return free_port()


@pytest.fixture(autouse=True, scope="module")
def token():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXRL_POST_TOKEN", TOKEN)
        yield


@contextlib.contextmanager
def harness(port: int):
    """Plays until the run has ended. Yields the counts of what it has played, once the block is left."""
    counts: dict = {}
    process = subprocess.Popen(
        [sys.executable, "scripts/agents/harness.py", f"--url=http://127.0.0.1:{port}", "--patience=120"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "JAXRL_POST_TOKEN": TOKEN},
    )
    try:
        yield counts
        counts |= json.loads(process.communicate(timeout=120)[0].splitlines()[-1])
        assert process.returncode == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def command(folder: Path, config: str, *more: str) -> list[str]:
    return [f"--config={ROOT / 'configs' / config}", *SMALL, *more, f"--run-dir={folder}"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory, port):
    folder = tmp_path_factory.mktemp("agents") / "whole"
    with harness(port) as counts:
        assert main.main(command(folder, "demo/agents.py", f"--config.environment.arguments.port={port}")) == 0
    return folder, counts


@pytest.fixture(scope="module")
def built_in(tmp_path_factory):
    folder = tmp_path_factory.mktemp("agents") / "built_in"
    assert main.main(command(folder, "demo/calculator.py")) == 0
    return folder


def rows(run: Path) -> list[dict]:
    return [metric_rows.deterministic(row) for row in metric_rows.read(run / "metrics.jsonl")]


def differing(one: Path, two: Path, *more: str) -> list[str]:
    files = ["policy/model.safetensors", "scheduler_log.jsonl", *more]
    files += [
        file.relative_to(one).as_posix() for part in ("rollouts", "evaluations") for file in (one / part).glob("*")
    ]
    return [name for name in files if (one / name).read_bytes() != (two / name).read_bytes()]


def test_a_harness_trains_as_the_built_in_environment_does(whole, built_in):
    """Tokens, versions, rewards and weights: the files of rollouts and the policy are equal to the byte."""
    folder, counts = whole
    assert differing(built_in, folder) == [] and len(list((folder / "rollouts").glob("*.npz"))) == 2
    assert rows(built_in) == rows(folder)
    played = 32 + 2 * 6  # rollouts of two steps, and of two evaluations
    assert counts["sessions"] == played >= counts["rewards"] > 0 and counts["turns"] > played


def test_deferred_groups_are_played_again_as_by_the_built_in_environment(port, tmp_path):
    """A short round leaves groups behind, and a long one verifies them turn by turn under newer weights."""
    runs = [tmp_path / name for name in ("harness", "built_in")]
    with harness(port):
        own = (*DEFERRING, f"--config.environment.arguments.port={port}")
        assert main.main(command(runs[0], "demo/agents.py", *own)) == 0
    assert main.main(command(runs[1], "demo/calculator.py", *DEFERRING)) == 0
    assert differing(*runs) == [] and rows(runs[0]) == rows(runs[1])
    assert sum(row.get("sched/num_groups_deferred", 0) for row in rows(runs[0])) >= 2
    assert sum(row.get("sched/num_long_rounds", 0) for row in rows(runs[0])) >= 1


class Killed(BaseException):
    """Not an Exception: nothing of the run may catch it."""


def test_a_run_that_is_killed_resumes_to_the_bit(whole, port, tmp_path, monkeypatch):
    """It dies where the ring asks for the scores of the sixth group of training, evaluation having asked for four."""
    folder, _ = whole
    real, calls = TurnScores.join, []

    def dying(self, group):
        calls.append(group)
        if len(calls) == 10:
            raise Killed
        return real(self, group)

    asked = command(tmp_path / "again", "demo/agents.py", f"--config.environment.arguments.port={port}")
    with harness(port):
        monkeypatch.setattr(TurnScores, "join", dying)
        with pytest.raises(Killed):
            main.main(asked)
        monkeypatch.undo()
    with harness(port):
        assert main.main([*asked, "--resume"]) == 0
    assert differing(folder, tmp_path / "again", "rewards.jsonl", "eval_rewards.jsonl") == []
    assert rows(folder) == rows(tmp_path / "again")
