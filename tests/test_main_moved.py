"""A run that is resumed on another mesh, and with another number of processes."""

import jax
import numpy as np
import pytest
from resumed_runs import PAIR, ended, final_state, here, pair, resume, whole  # noqa: F401
from test_main import go

from jaxrl_post.runs import metric_rows
from jaxrl_post.runs.checkpoint import arrays
from jaxrl_post.trainer.learner import Learner

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.mark.extended
def test_a_run_goes_on_on_another_mesh(here, ended, capsys, monkeypatch):  # noqa: F811
    """The learner begins with the bits that were saved, in other pieces."""
    before, restore, restored = final_state(ended), Learner.restore, []

    def watched(learner, read, step):
        restore(learner, read, step)
        restored.append({path: np.asarray(leaf) for path, leaf in arrays.named(learner.state).items()})
        assert any(not leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(learner.params))

    monkeypatch.setattr(Learner, "restore", watched)
    assert resume(here, ended, "--config.steps=6", "--config.mesh.fsdp=2", "--config.mesh.data=2") == 0
    said = capsys.readouterr().out
    assert (
        "resume: mesh.data was 1 and is 2 now: from here on bits may differ" in said and "goes on after step 5" in said
    )
    assert sorted(restored[0]) == sorted(before)
    assert all(leaf.tobytes() == before[name].tobytes() for name, leaf in restored[0].items())
    assert [row["step"] for row in metric_rows.read(ended / "metrics.jsonl")] == [0, 1, 2, 2, 3, 4, 4, 5, 6, 6]


@pytest.mark.extended  # four starts of a process, two at a time
def test_a_run_goes_on_with_another_number_of_processes(here, tmp_path, capsys):  # noqa: F811
    """Two processes, then one, then two again, on the same mesh."""
    target = tmp_path / "run"
    status, said = pair(here, target, tmp_path / "cache")
    assert status == [0, 0], said
    before = (target / "process_0" / "scheduler_log.jsonl").read_bytes()
    assert go(here, f"--run-dir={target}", "--resume", *PAIR, "--config.steps=4") == 0
    assert "processes was 2 and is 1 now" in capsys.readouterr().out
    between = (target / "scheduler_log.jsonl").read_bytes()
    assert between.startswith(before) and len(between) > len(before)
    status, said = pair(here, target, tmp_path / "cache", resumed=True, flags=["--config.steps=5"])
    assert status == [0, 0] and "processes was 1 and is 2 now" in said[0], said
    for process in ("process_0", "process_1"):
        after = (target / process / "scheduler_log.jsonl").read_bytes()
        assert after.startswith(between) and len(after) > len(between)
        assert [row["step"] for row in metric_rows.read(target / process / "metrics.jsonl")][-1] == 5
        assert len(list((target / process / "rollouts").glob("step_*.npz"))) == 5
