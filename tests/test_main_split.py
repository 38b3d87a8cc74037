"""The command with devices of its own for the engine, to which weights are sent while rollouts run.

A run that is killed and resumed ends as the undisturbed run. Rounds stay one step behind. At learning rate 0 a run trains
on what it trains on with shared devices.
"""

import json

import pytest
from resumed_runs import here, kill, resume, same_run, saved, whole_run  # noqa: F401  (a fixture, and its kin)
from test_main import go
from test_main_pipeline import FLAGS
from test_main_tail_batching import steps_of

from jaxrl_post import config
from jaxrl_post.engine import row_engine
from jaxrl_post.engine.step_cost import StepCost, TableCost
from jaxrl_post.launch.parts import build
from jaxrl_post.ring.events import TimedRing
from jaxrl_post.ring.types import Layout
from jaxrl_post.runs import rollout_log
from jaxrl_post.runs.checkpoint import store
from jaxrl_post.scheduler.forecast import ReplicaCapacity
from jaxrl_post.trainer import learner

pytestmark = pytest.mark.usefixtures("quick_compilation")

TABLE = "--config.engine.cost_table={here}/cost.json"
COSTS = '{"figures": {"step_s": {"16": 0.001, "32": 0.002}}}'  # a trained token takes 3 / 16 of a step's time
SPLIT = (*FLAGS, "--config.mesh.fsdp=2", "--config.mesh.engine=2")
ROUNDS = (
    "--config.mesh.engine=1",
    "--config.steps=7",
    "--config.checkpoint.every=1",
    "--config.scheduler.prompts=2",
    "--config.scheduler.group_size=2",
    "--config.sampling.max_tokens=24",
    "--config.engine.steps_per_dispatch=2",
)


@pytest.mark.parametrize(
    "name, flags",
    [
        pytest.param("pipeline", SPLIT, marks=pytest.mark.extended),
        pytest.param("rounds", ROUNDS, marks=pytest.mark.shown("variants")),
    ],
)
def test_killed_while_the_learner_is_at_work(here, name, flags, capsys):  # noqa: F811
    (here / "cost.json").write_text(COSTS)
    flags = (*flags, TABLE.format(here=here))
    whole, target = whole_run(here, f"split_{name}_whole", *flags), here / f"split_{name}_killed"
    rows = steps_of(whole)
    assert len(rows) == 7 and sum(row["sched/num_groups_trained"] for row in rows) == 14
    assert 0 < max(row["off_policy/max"] for row in rows) <= (3 if name == "pipeline" else 1)
    taken = [json.loads(line) for line in (whole / "scheduler_log.jsonl").read_text().splitlines() if '"take"' in line]
    begins, ends = ([line["clock"] for line in taken if line["commit"] is kind] for kind in (False, True))
    assert len(begins) == 6 and len(ends) == 7  # the last step begins as it ends
    assert sum(row.get("timing_s/overlapped", 0.0) > 0 for row in rows) >= 4
    assert all(a <= b for a, b in zip(begins, ends)) and any(a < b for a, b in zip(begins, ends))
    kill(here, target, store, "manifest", 3, flags=flags)
    assert saved(target)
    kill(here, target, rollout_log.RolloutLog, "_index", 3, flags=flags)
    assert resume(here, target, *flags) == 0
    assert capsys.readouterr().out.count("goes on after step") >= 2
    same_run(whole, target)


WHERE = ["at once", "never under a dispatch"]


def done(where, monkeypatch):
    """Deferred calls are made elsewhere than under a dispatch, from now on."""
    if where == "at once":
        monkeypatch.setattr(TimedRing, "later", TimedRing.call)
    else:
        monkeypatch.setattr(row_engine.RowEngine, "meanwhile", property(lambda self: None, lambda self, value: None))


@pytest.mark.extended
@pytest.mark.parametrize("where", WHERE)
def test_when_deferred_calls_are_made_changes_nothing(here, where, monkeypatch, capsys):  # noqa: F811
    """Graders started, groups packed and logs written at the place in the ring that asks for it, or only when somebody needs
    it: answers, weights, decisions and every count are those of a run that does all that under its dispatches."""
    (here / "cost.json").write_text(COSTS)
    flags = (*SPLIT, TABLE.format(here=here))
    whole, other = whole_run(here, "split_pipeline_whole", *flags), here / f"split_chores_{where.replace(' ', '_')}"
    monkeypatch.setattr(learner.Learner, "at_work", property(lambda self: self.step > 0))
    done(where, monkeypatch)
    assert resume(here, other, *flags) == 0
    same_run(whole, other)
    rows = steps_of(other)
    worked, lasted = (sum(row.get(f"timing_s/{phase}", 0.0) for row in rows) for phase in ("train", "step"))
    assert 0 < worked < lasted and "learner's devices at work" in capsys.readouterr().out
    assert not any("timing_s/overlapped" in row for row in rows)


@pytest.mark.extended
def test_at_learning_rate_zero_a_split_run_trains_on_what_a_shared_one_does(here):  # noqa: F811
    found = {}
    for name, more in (("shared", FLAGS), ("split", (*FLAGS, "--config.mesh.engine=1"))):
        folder = here / f"frozen_{name}"
        assert (
            go(
                here,
                f"--run-dir={folder}",
                *more,
                "--config.optimizer.lr=0.0",
                "--config.eval=default",
                "--config.eval.prompts=0",
                "--config.checkpoint.every=0",
            )
            == 0
        )
        groups = [group for file in sorted((folder / "rollouts").glob("*.npz")) for group in rollout_log.read(file)]
        found[name] = sorted(
            (group.prompt.id, r.id.seed().tobytes(), r.tokens.tobytes()) for group in groups for r in group.rollouts
        )
    assert found["split"] == found["shared"] and len(found["split"]) == 28


def test_how_long_a_step_is_foreseen_to_take():
    """By hand: a row of the largest size takes 2 ms / 32, so a trained token on 4 learning devices 3 / 4 of that of an engine
    over 2: 2 * 3 / 4 / 16 ms."""
    given = config.resolve(config.default(), ["model.preset=tiny", "mesh.fsdp=2", "mesh.tensor=2", "mesh.engine=4"])
    replica = ReplicaCapacity(slots=8, kv_tokens=99, cost=TableCost(table=StepCost((16, 32), (1e-3, 2e-3), "by hand")))
    assert given.replicas == 2 and given.devices == 8 and build.layouts(given)[0] == Layout(2, 2)
    assert build.pace(given, lambda: replica, None)._token_s == pytest.approx(2 * 3 / 4 * 2e-3 / 32)
    measured = StepCost((64,), (0.01,), "hand", training=0.5, updating=0.25)
    found = build.pace(given, lambda: replica, measured)
    assert (found._token_s, found._step_s) == (0.5, 0.25)
    assert build.pace(config.resolve(config.default(), ["model.preset=tiny"]), lambda: replica, measured) is None


@pytest.mark.extended
def test_a_replica_of_two_devices_samples_the_same_beside_any_learner(here):  # noqa: F811
    """Weights divided over fsdp or over tensor are the same to an engine of one replica of two devices."""
    found = {}
    frozen = ["optimizer.lr=0.0", "steps=3", "eval=default", "eval.prompts=0"]
    for name, mesh in (("alike", ["mesh.tensor=2"]), ("own", ["mesh.fsdp=2", "mesh.engine_tensor=2"])):
        folder = here / f"replica_{name}"
        assert go(here, f"--run-dir={folder}", *(f"--config.{one}" for one in (*mesh, *frozen))) == 0
        files = sorted((folder / "rollouts").glob("*.npz"))
        found[name] = [
            (r.id.seed().tobytes(), r.tokens.tobytes(), r.logprobs.tobytes())
            for file in files
            for group in rollout_log.read(file)
            for r in group.rollouts
        ]
    assert found["own"] == found["alike"] and len(found["own"]) > 20
