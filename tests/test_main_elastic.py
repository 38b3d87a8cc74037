"""A whole run whose engine changes its layout: what it logs, and that a killed one goes on to the same end."""

import json
import shutil

import numpy as np
import pytest
from test_main import here  # noqa: F401

from jaxrl_post import main as command
from jaxrl_post.engine import step_cost
from jaxrl_post.runs import metric_rows, rollout_log

pytestmark = pytest.mark.usefixtures("quick_compilation")

ELASTIC = [
    "--config.mesh.data=2",
    "--config.engine.layouts=[2]",
    "--config.engine.row_sizes=[64]",
    "--config.steps=6",
    "--config.scheduler.placement=longest_first",
    "--config.checkpoint.every=2",
    "--config.checkpoint.keep_last=4",
    "--config.engine.slots=4",
    "--config.eval.every=2",
]


def go(here, folder, *more):  # noqa: F811
    return command.main([f"--config={here / 'toy.py'}", *ELASTIC, f"--run-dir={folder}", *more])


@pytest.fixture(scope="module", autouse=True)
def weights_rule():
    """A cost like that of a large model: a step takes the reading of the weights, and two devices read half each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            step_cost,
            "decode",
            lambda kind, shape, *, tensor, per_collective_s: step_cost.DecodeCost(
                weights_s=1.0 / tensor, token_s=0.0, row_s=1e-3
            ),
        )
        yield


@pytest.fixture(scope="module")
def run(here):  # noqa: F811
    folder = here / "elastic"
    assert go(here, folder) == 0
    return folder


def rows(folder):
    return [metric_rows.deterministic(json.loads(line)) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.extended
def test_the_log_says_when_the_layout_changed(run):
    decisions = [json.loads(line) for line in (run / "scheduler_log.jsonl").read_text().splitlines()]
    layouts = [line["layout"] for line in decisions if line["event"] == "layout"]
    assert layouts == [[2, 1], [1, 2]]
    replicas = [{replica for _, replica, *_ in line["requests"]} for line in decisions if line["event"] == "admit"]
    assert {0, 1} in replicas[:2] and replicas[-1] == {0}
    steps = [row for row in rows(run) if "engine/tensor" in row and "training/global_step" in row]
    assert [row["engine/tensor"] for row in steps] == [1.0] + [2.0] * 5
    assert sum(row["engine/num_relayouts"] for row in steps) == 1


@pytest.mark.extended
def test_the_run_is_keyed_by_every_layout(run):
    derived = json.loads((run / "config.json").read_text())["derived"]
    assert sorted(derived["layouts"]) == ["1 x 2", "2 x 1"] and derived["layouts"]["1 x 2"]["row_sizes"] == [128]


@pytest.mark.extended
def test_a_resumed_run_ends_as_the_one_that_went_on(run, here):  # noqa: F811
    """Killed behind step 4, in the second layout."""
    again = here / "again"
    shutil.copytree(run, again)
    shutil.rmtree(again / "checkpoints" / "step_000006")
    (again / "summary.json").unlink()
    assert go(here, again, "--resume") == 0
    assert rows(again) == rows(run)
    assert (again / "scheduler_log.jsonl").read_bytes() == (run / "scheduler_log.jsonl").read_bytes()
    for one, two in zip(
        sorted((run / "rollouts").glob("*.npz")), sorted((again / "rollouts").glob("*.npz")), strict=True
    ):
        for mine, theirs in zip(rollout_log.read(one), rollout_log.read(two), strict=True):
            assert all(
                np.array_equal(a.tokens, b.tokens) and a.logprobs.tobytes() == b.logprobs.tobytes()
                for a, b in zip(mine.rollouts, theirs.rollouts, strict=True)
            )


@pytest.mark.parametrize(
    "flags, sentence",
    [
        (
            ["--config.engine.layouts=[3]"],
            "engine.layouts=(3,): 3 devices a replica must be a multiple of 1 above it "
            "that divides the 2 devices; the nearest valid engine.layouts is (2,)",
        ),
        (
            ["--config.mesh.data=1"],
            "2 devices a replica must be a multiple of 1 above it that divides the 1 devices; "
            "the nearest valid engine.layouts is ()",
        ),
        (["--config.engine.layouts=[2,2]"], "engine.layouts=(2, 2) names a layout twice"),
        (["--config.engine.cost_table=table.json"], "engine.cost_table='table.json' was measured in one layout"),
        (
            ["--config.scheduler.placement=rank_groups", "--config.history.epochs=0"],
            "history.epochs=0 must be at least 1",
        ),
        (
            ["--config.scheduler.placement=rank_groups", "--config.mesh.data=1", "--config.engine.layouts=[]"],
            "replicas to choose from, and there is one; the nearest valid scheduler.placement is 'least_loaded'",
        ),
        (
            ["--config.scheduler.placement=longest"],
            "is not one of least_loaded, divided, longest_first, rank_groups; nearest is 'longest_first'",
        ),
    ],
)
def test_mistakes_are_one_sentence(here, capsys, flags, sentence):  # noqa: F811
    assert go(here, here / "never", *flags) == 1
    said = capsys.readouterr().err
    assert sentence in said and said.count("\n") == 1


@pytest.mark.extended
def test_rank_groups_turn_the_ring(here):  # noqa: F811
    """And train on the same tokens as the least loaded replica: with learning rate 0 every round has the same weights."""
    folders = {own: here / own for own in ("least_loaded", "rank_groups")}
    for own, folder in folders.items():
        assert (
            go(
                here,
                folder,
                "--config.engine.layouts=[]",
                f"--config.scheduler.placement={own}",
                "--config.steps=3",
                "--config.optimizer.lr=0.0",
                "--config.eval=default",
                "--config.eval.prompts=0",
            )
            == 0
        )
    one, two = (
        [
            [r.tokens.tolist() for g in rollout_log.read(file) for r in g.rollouts]
            for file in sorted((folder / "rollouts").glob("*.npz"))
        ]
        for folder in folders.values()
    )
    assert one == two and len(one) == 3
