"""Whole runs that draft: in the end the weights of the run that does not; killed and resumed, the run that was not, to the
bit, with all that it counted about its drafts."""

from __future__ import annotations

import engine_lab as lab
import pytest
from resumed_runs import FLAGS as RESUMED
from resumed_runs import final_state, here, kill, same_run, saved  # noqa: F401  `here` is a fixture
from test_main import go

from jaxrl_post.engine import row_engine
from jaxrl_post.runs import metric_rows, rollout_log
from jaxrl_post.runs.checkpoint import store

pytestmark = pytest.mark.usefixtures("quick_compilation")

FLAGS = (
    *RESUMED,
    "--config.steps=7",
    "--config.checkpoint.keep_last=9",
    "--config.eval.every=3",
    "--config.eval.prompts=3",
    "--config.engine.row_sizes=(64,)",
    "--config.history.epochs=2",
    "--config.sampling.max_tokens=16",
)
PAPERS = (
    "--config.speculation.drafter=histospec",
    "--config.speculation.width=4",
    "--config.speculation.prompt_entries=4096",
)
OURS = (
    *PAPERS,
    "--config.speculation.drafter=ours",
    "--config.speculation.shared_entries=3000",
    "--config.speculation.live_entries=256",
)


def run(here, folder, *more):  # noqa: F811
    assert go(here, f"--run-dir={folder}", "--resume", *FLAGS, *more) == 0
    return folder


@pytest.fixture(scope="module")
def drafting(here):  # noqa: F811
    return run(here, here / "drafting", *OURS)


def total(folder, name):
    return sum(row.get(name, 0.0) for row in metric_rows.read(folder / "metrics.jsonl"))


@pytest.fixture(scope="module")
def bare(here):  # noqa: F811
    return run(here, here / "bare")


def tokens_of(folder):
    """Everything about the rollouts but when their tokens came."""
    return [
        (r.id, r.tokens.tobytes(), r.logprobs.tobytes(), r.entropies.tobytes(), r.finish)
        for file in sorted((folder / "rollouts").glob("step_*.npz"))
        for group in rollout_log.read(file)
        for r in group.rollouts
    ]


def same_end(one, two):
    assert tokens_of(one) == tokens_of(two)
    first, second = final_state(one), final_state(two)
    assert first.keys() == second.keys()
    for name in first:
        assert first[name].tobytes() == second[name].tobytes(), name


def test_the_run_ends_in_the_weights_of_the_one_without_drafts(drafting, bare):
    assert total(drafting, "spec/num_accepted") > 100 and total(bare, "spec/num_drafted") == 0
    assert total(drafting, "rows/steps") < total(bare, "rows/steps")
    same_end(drafting, bare)


@pytest.mark.shown("variants")
def test_so_does_the_papers_drafter(here, bare):  # noqa: F811
    other = run(here, here / "paper", *PAPERS)
    assert total(other, "spec/num_accepted") > (4 if lab.MODEL == "hybrid" else 10)
    same_end(other, bare)


@pytest.mark.extended
def test_killed_and_resumed_it_drafts_on_as_if_nothing_had_happened(here, drafting, capsys):  # noqa: F811
    target = here / "killed"
    flags = (*FLAGS, *OURS)
    kill(here, target, store, "manifest", 2, flags=flags)  # in the save at step 4: on from step 2
    assert saved(target) == ["step_000002", "step_000004.part"]
    kill(here, target, row_engine.RowEngine, "step", 25, flags=flags)  # between two saves
    run(here, target, *OURS)
    assert capsys.readouterr().out.count("goes on after step") >= 2
    same_run(drafting, target)
    assert any("spec/expected_accepted" in row for row in metric_rows.read(target / "metrics.jsonl"))


@pytest.mark.shown("variants")
def test_two_replicas_draft_and_end_alike(here):  # noqa: F811
    ends = [
        run(here, here / f"two-{name}", "--config.mesh.data=2", "--config.steps=4", *drafts)
        for name, drafts in (("off", ()), ("ours", OURS))
    ]
    assert total(ends[1], "spec/num_accepted") > 50
    same_end(*ends)


@pytest.mark.shown("variants")
def test_with_a_wide_prompt_program_it_ends_alike_too_also_killed_and_resumed(here):  # noqa: F811
    wide = ("--config.engine.prompt_rows=128",)
    alone, drafted = (run(here, here / f"wide-{len(more)}", *wide, *more) for more in ((), OURS))
    assert total(alone, "rows/size_128") > 5 and total(drafted, "spec/num_accepted") > 50
    same_end(alone, drafted)
    kill(here, here / "wide-killed", row_engine.RowEngine, "step", 25, flags=(*FLAGS, *wide, *OURS))
    run(here, here / "wide-killed", *wide, *OURS)
    same_run(drafted, here / "wide-killed")
