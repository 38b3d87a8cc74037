"""A run that goes on in another layout: what is allowed, whose logs it takes, and where waiting requests go."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from jaxrl_post.engine.row_engine import RowEngine
from jaxrl_post.launch import resume
from jaxrl_post.ring.types import Layout
from jaxrl_post.runs.checkpoint import identity
from jaxrl_post.scheduler.placement.placement import LeastLoaded

CONFIG = {
    "scheduler": {"lend": 0, "placement": "least_loaded"},
    "engine": {"layouts": []},
    "speculation": {"drafter": "off"},
    "mesh": {"data": 1, "fsdp": 2},
    "seed": 0,
}


def told(processes=1, **mesh):
    return json.loads(json.dumps({"config": CONFIG | {"mesh": CONFIG["mesh"] | mesh}, "processes": processes}))


@pytest.mark.parametrize(
    "room, field, value", [("scheduler", "lend", 0.2), ("engine", "layouts", [2]), ("speculation", "drafter", "ours")]
)
def test_decisions_that_hold_a_layout_stay_in_it(room, field, value):
    assert resume.may_move(CONFIG)
    assert not resume.may_move(CONFIG | {room: CONFIG[room] | {field: value}})
    assert not resume.may_move(CONFIG | {"scheduler": {"lend": 0, "placement": "longest_first"}})


def test_another_mesh_is_refused_or_said_and_nothing_else_changes_with_it():
    then, now = told(), told(2, fsdp=1, data=2)
    identity.check_same(then, now, 3, may_move=True)
    with pytest.raises(ValueError, match=r"mesh.data 1 -> 2; mesh.fsdp 2 -> 1; processes 1 -> 2"):
        identity.check_same(then, now, 3)
    now["config"]["seed"] = 1
    with pytest.raises(ValueError, match="resume refused: seed 0 -> 1: step 3"):
        identity.check_same(then, now, 3, may_move=True)
    assert resume.layout_changes(then, then) == []
    assert resume.layout_changes(then, now) == [
        "mesh.data was 1 and is 2",
        "mesh.fsdp was 2 and is 1",
        "processes was 1 and is 2",
    ]


@pytest.mark.parametrize("before, after", [(1, "process_1"), (2, "."), (2, "process_2")])
def test_logs_of_process_0_are_those_of_the_run(tmp_path, before, after):
    there, mine = tmp_path / ("." if before == 1 else "process_0"), tmp_path / after
    for folder, word in ((there, "new"), (mine, "old")):
        (folder / "rollouts").mkdir(parents=True, exist_ok=True)
        (folder / "rollouts" / f"step_{word}.npz").write_text(word)
        (folder / "rollouts" / "index.jsonl").write_text(word)
        (folder / "metrics.jsonl").write_text(word)
    (mine / "rewards_aside.jsonl").write_text("old")
    resume.take_logs(tmp_path, mine, before)
    assert (mine / "metrics.jsonl").read_text() == "new" and not (mine / "rewards_aside.jsonl").exists()
    assert sorted(path.name for path in (mine / "rollouts").iterdir()) == ["index.jsonl", "step_new.npz"]


def test_scheduler_and_engine_agree_on_the_new_replicas():
    """Four groups of two samples, of which the last is not in the engine, from 2 replicas to 3."""

    def id(prompt, sample):
        return [0, "train", 0, str(prompt), sample, 0]

    engine = RowEngine.__new__(RowEngine)
    engine.device, engine.row_sizes = SimpleNamespace(layout=Layout(3, 1)), (16,)
    engine.cost = SimpleNamespace(digest="here")
    lives = [{"id": id(prompt, sample), "replica": prompt % 2} for prompt in range(3) for sample in range(2)]
    of = [[id(prompt, sample), prompt % 2] for prompt in range(4) for sample in range(2)]
    host = {
        "engines": [{"lives": lives, "row_sizes": [32], "cost": "there", "age": 7}],
        "scheduler": {"clock": 5, "scheduler": {"placement": {"replicas": 2, "of": of}, "counts": {}}},
        "history": {},
    }
    found = resume.resharded(host, [engine])
    state, placement = found["engines"][0], found["scheduler"]["scheduler"]["placement"]
    homes = {tuple(one["id"]): one["replica"] for one in state["lives"]}
    assert [homes[tuple(id(prompt, 0))] for prompt in range(3)] == [0, 1, 2]
    assert all(homes[tuple(id(prompt, 0))] == homes[tuple(id(prompt, 1))] for prompt in range(3))
    assert (state["row_sizes"], state["cost"], state["age"]) == ((16,), "here", 7)
    assert placement["replicas"] == 3
    assert all(homes.get(tuple(one), 1) == replica for one, replica in placement["of"])
    least = LeastLoaded(1)
    least.load_state_dict(placement)
    assert np.sum(least._load) == 8 and len(least._load) == 3
    assert found["history"] is host["history"] and host["engines"][0]["row_sizes"] == [32]
