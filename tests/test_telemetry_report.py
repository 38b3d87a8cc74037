"""Where device time went, against shares reckoned by hand."""

import pytest

from jaxrl_post.telemetry import report

STEP = {
    "timing_s/step": 10.0,
    "timing_s/gen": 6.0,
    "timing_s/update_actor": 1.5,
    "timing_s/old_log_prob": 0.5,
    "timing_s/update_weights": 0.25,
    "timing_s/reward": 0.5,
    "timing_s/testing": 0.25,
    "rows/prefill": 20.0,
    "rows/decode": 50.0,
    "rows/idle": 30.0,
    "rows/draft_accepted": 10.0,
    "rows/draft_rejected": 8.0,
    "rows/clone": 2.0,
    "swap/rows": 5.0,
    "sched/paused_slot_steps": 12.0,
}


def test_shares_by_hand():
    """120 rows in 6 s are 0.05 s each: 75 useful ones, 5 again, 10 for nothing, 12 held empty and 18 empty."""
    found = report.device_time([{"eval/mean": 0.5}, STEP])
    assert found == pytest.approx(
        {
            "generating": 0.375,
            "training": 0.2,
            "else": 0.1,
            "idle rows": 0.09,
            "rows held empty by the bound": 0.06,
            "rewards": 0.05,
            "drafts that failed": 0.05,
            "rows computed again": 0.025,
            "swaps": 0.025,
            "evaluation": 0.025,
        }
    )
    assert sum(found.values()) == pytest.approx(1.0) and list(found.values()) == sorted(found.values(), reverse=True)
    assert report.text(found).startswith("device time: 57.5% useful; generating 37.5%, training 20.0%, else 10.0%")


def test_a_learner_apart_is_told_beside_the_shares():
    found = report.device_time([{**STEP, "timing_s/train": 4.0}])
    assert found.pop(report.LEARNER) == pytest.approx(0.4) and found == report.device_time([STEP])
    said = report.text(report.device_time([{**STEP, "timing_s/train": 4.0}]))
    assert said == report.text(found) + "; learner's devices at work 40.0%"


def test_a_swap_is_told_by_link():
    links = {"in place": 8, "between devices of a process": 1_234_567, "between processes": 0}
    assert report.swap({"case": "relayout", "links": links}) == (
        "weights reach the engine: relayout; a publish writes 8 bytes in place, 1,234,567 bytes between devices of a "
        "process, and none through the host"
    )
    assert "shared; a publish writes nothing, and none" in report.swap({"case": "shared", "links": {"in place": 0}})
    assert report.swap({"case": "relayout and merge", "links": {"between processes": 40}}) == (
        "weights reach the engine: relayout and merge; a publish writes merged matrices in place, 40 bytes between "
        "processes, and none through the host"
    )


def test_steps_add_up_by_their_seconds():
    plain = {"timing_s/step": 30.0, "timing_s/gen": 30.0}  # an engine that counts no rows
    assert report.device_time([STEP, plain])["generating"] == pytest.approx((3.75 + 30) / 40)
    assert report.device_time([]) == {} and report.device_time([{"eval/mean": 1.0}]) == {}


def test_rows_of_a_step_that_was_not_published_belong_to_the_seconds_of_the_next():
    uses = {name: STEP[name] for name in STEP if not name.startswith("timing_s/")}
    seconds = {name: STEP[name] for name in STEP if name.startswith("timing_s/")}
    assert report.device_time([uses, seconds]) == pytest.approx(report.device_time([STEP]))
    assert report.device_time([uses, seconds, STEP]) == pytest.approx(report.device_time([STEP, STEP]))


def test_no_more_rows_are_blamed_than_there_were():
    found = report.device_time([{**STEP, "swap/rows": 500.0, "sched/paused_slot_steps": 999.0}])
    assert "idle rows" not in found and found["rows held empty by the bound"] == pytest.approx(0.15)
    assert found["rows computed again"] == pytest.approx(0.1) and sum(found.values()) == pytest.approx(1.0)


def test_a_text_is_one_line_of_the_screen():
    assert report.line("1+1=\n2") == "'1+1=\\n2'"
    assert report.line("a" * 100) == f"'{'a' * 100}'"
    assert report.line("b" * 12_345) == f"'{'b' * 100}'... (12,345 characters)"
