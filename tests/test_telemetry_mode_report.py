"""What the last lines of a run say of its modes: counts and seconds by hand."""

import pytest

from jaxrl_post.config import default, resolve
from jaxrl_post.telemetry import mode_report

ROW = {
    "training/global_step": 1.0,
    "timing_s/step": 3.0,
    "timing_s/gen": 2.0,
    "rows/prefill": 0.0,
    "rows/decode": 100.0,
    "rows/draft_accepted": 25.0,
    "rows/draft_rejected": 75.0,
    "rows/clone": 0.0,
    "rows/idle": 50.0,
    "rows/steps": 50.0,
    "rows/size_5": 50.0,
    "spec/num_drafted": 100.0,
    "spec/num_accepted": 25.0,
    "spec/drafting_steps": 40.0,
    "off_policy/mean": 0.5,
    "off_policy/max": 2.0,
    "sched/num_groups_admitted": 8.0,
    "sched/num_groups_deferred": 3.0,
    "sched/num_tokens_discarded": 17.0,
    "sched/paused_slot_steps": 9.0,
    "swap/rows": 11.0,
}
EVALUATED = {"step": 0, "val-core/x/acc/mean@2": 1.0}


def told(*flags, auto=None, rows=(EVALUATED, ROW)):
    return mode_report.figures(resolve(default(), ("model.preset=tiny", *flags)), rows, auto, lambda size: 0.002 * size)


def test_drafts_gain_steps_and_cost_rows():
    """25 right drafts over two decode rows a step save 12.5 steps of 0.04 s; 75 of 250 rows are 0.6 of 2 s."""
    one = told("speculation.drafter=ngram")["modes"]["speculation ngram"]
    assert one["gained"] == "25 of 100 drafts were right (25.0%), which saved about 12 of 62 engine steps, 0.50 s"
    assert one["cost"] == "75 rows of drafts that failed, 30.0% of all rows, about 0.60 s; 40 steps drafted"


@pytest.mark.parametrize(
    ("flags", "gained", "cost"),
    [
        (["scheduler.name=sync"], "0.50 steps old on average, 2 at most", "20.0% of the engine's rows had no rollout"),
        (
            ["scheduler.name=tail_batching", "scheduler.over=1.25"],
            "3 of 8 groups were deferred",
            "17 tokens were discarded",
        ),
        (["scheduler.name=rollpacker", "scheduler.over=1.25"], "3 of 8 groups", "11 rows computed again"),
        (["scheduler.name=pipeline"], "20.0% of the engine's rows", "9 steps of slots were held empty by the bound"),
    ],
)
def test_every_scheduler_says_what_it_gained_and_cost(flags, gained, cost):
    found = told(*flags)
    (one,) = found["modes"].values()
    assert gained in one["gained"] and cost in one["cost"]
    lines = mode_report.lines(found)
    assert lines[0] == "a step took 3 s (median of 1), its generation 2 s"
    assert "predicted 0.5 s for the dispatches, and they took 2 s: 4.00 times as long" in lines[1]
    assert [f"  {name}: gained: {one['gained']}" in lines for name in found["modes"]] == [True]


def test_a_prediction_stands_beside_the_measured_seconds():
    modes = [{"options": {"name": "sync"}, "seconds": 4.0}, {"options": {"name": "pipeline"}, "seconds": 1.5}]
    found = told("scheduler.name=pipeline", auto={"chosen": {"name": "pipeline"}, "modes": modes})
    assert (found["predicted_step_s"], found["predicted_sync_s"], found["step_s"]) == (1.5, 4.0, 3.0)
    line = "  auto predicted 1.5 s a step, and 4 s for synchronous rounds: measured is 2.00 times its prediction"
    assert line in mode_report.lines(found)


def test_before_the_first_step_there_is_nothing_to_say():
    assert told(rows=[EVALUATED]) == {} and mode_report.lines({}) == []
