"""The split layout over whole processes: two learn and two generate. All decide alike, and a killed job ends as another."""

import shutil
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from resumed_runs import here  # noqa: F401  (a fixture)
from test_main_pipeline import FLAGS

from jaxrl_post.runs import attempts, metric_rows, rollout_log

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

import joined_jobs  # noqa: E402
import killed  # noqa: E402
import processes  # noqa: E402

STEPS = 3
OPTIONS = (
    *FLAGS,
    f"--config.steps={STEPS}",
    "--config.mesh.fsdp=2",
    "--config.mesh.engine=2",
    "--config.eval.prompts=2",
    "--config.eval.samples=1",
    "--config.speculation.drafter=ours",
)


def run(folder: Path, place: Path, most_restarts: int = 0, *more: str) -> int:
    options = [f"--config={folder / 'toy.py'}", *OPTIONS, *more]
    job = joined_jobs.started(ROOT, "explicit", 4, place, options, place.parent / "cache")
    return joined_jobs.run(job, most_restarts)


@pytest.fixture(scope="module")
def whole(here):  # noqa: F811
    """The job that nothing happens to."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")  # the programs of all jobs are the same
        assert run(here, here / "hosts") == 0, joined_jobs.said(here / "hosts")
        yield here / "hosts"


@pytest.mark.extended
@pytest.mark.slow  # five starts of a process
def test_processes_of_either_role_decide_alike(here, whole):  # noqa: F811
    """They agree in everything, and with one process of four devices in the decisions, tokens and log-probs of step 1."""
    mine, alone = [whole / f"process_{index}" for index in range(4)], here / "one_process"
    rows = [[metric_rows.deterministic(row) for row in metric_rows.read(of / "metrics.jsonl")] for of in mine]
    assert len(rows[0]) == STEPS + 2 and all(other == rows[0] for other in rows)
    assert max(row["off_policy/max"] for row in rows[0] if "off_policy/max" in row) > 0, (
        "all weights came between rounds"
    )
    for other in mine[1:]:
        assert (other / "scheduler_log.jsonl").read_bytes() == (mine[0] / "scheduler_log.jsonl").read_bytes()
        assert processes.same_files(mine[0] / "rollouts", other / "rollouts")
        assert processes.same_files(mine[0] / "evaluations", other / "evaluations")
    command = ["-m", "jaxrl_post.main", f"--config={here / 'toy.py'}", *OPTIONS, f"--run-dir={alone}"]
    processes.run(ROOT, command, processes=1, devices=4)
    assert processes.first_round(mine[0] / "scheduler_log.jsonl") == processes.first_round(
        alone / "scheduler_log.jsonl"
    )
    first = [rollout_log.read(sorted((of / "rollouts").glob("*.npz"))[0]) for of in (mine[0], alone)]
    for one, two in zip(*([r for group in groups for r in group.rollouts] for groups in first), strict=True):
        assert one.id == two.id and np.array_equal(one.tokens, two.tokens)
        assert np.array_equal(one.logprobs, two.logprobs)


@pytest.mark.slow  # eight starts of a process
@pytest.mark.parametrize(
    "lost",
    [pytest.param(1, marks=pytest.mark.shown("variants")), pytest.param(3, marks=pytest.mark.extended)],
    ids=["learns", "generates"],
)
def test_a_killed_process_of_either_role_changes_no_bit(here, whole, lost):  # noqa: F811
    again, left = here / f"hosts_without_{lost}", []
    threading.Thread(target=joined_jobs.kill, args=(again, [(lost, 1)], left), daemon=True).start()
    assert run(here, again, 1) == 0, joined_jobs.said(again)
    before, after = attempts.status(again).attempts
    assert [one.code for one in before.processes] == [None if one.index == lost else 42 for one in before.processes]
    assert [one.code for one in after.processes] == [0] * 4 and len(left) == 1
    assert killed.differences(whole, again, STEPS) == []


@pytest.mark.shown("variants")
@pytest.mark.slow  # four starts of a process
def test_one_process_that_learns_saves_what_both_resume_from(here, whole):  # noqa: F811
    """Two processes of two devices. Orbax takes weights of one process alone from host memory."""
    first, again = here / "pair", here / "pair_resumed"
    command = ["-m", "jaxrl_post.main", f"--config={here / 'toy.py'}", *OPTIONS, "--resume"]
    processes.run(ROOT, [*command, f"--run-dir={first}"], processes=2, devices=2)
    shutil.copytree(first, again)
    for gone in (again / "checkpoints" / f"step_{STEPS:06d}", again / "policy"):
        shutil.rmtree(gone)
    (again / "summary.json").unlink()
    processes.run(ROOT, [*command, f"--run-dir={again}"], processes=2, devices=2)
    assert killed.differences(first, again, STEPS) == []
    assert processes.same_files(first / "process_0" / "rollouts", first / "process_1" / "rollouts")
    logs = [run / "scheduler_log.jsonl" for run in (first / "process_1", whole / "process_0")]
    assert processes.first_round(logs[0]) == processes.first_round(logs[1])
