"""What a judge is asked, and what counts as its verdict. Texts and numbers are written by hand."""

import pytest

from jaxrl_post.rewards.question import Question


def test_places_are_filled_once():
    """A rollout that writes {truth} does not get it."""
    form = Question(text="T {task} A {answer} G {truth}")
    assert form.asked(task="{answer}", answer="{truth}", truth="7") == "T {answer} A {truth} G 7"
    assert (form.needs_task, form.needs_truth) == (True, True)
    plain = Question(text="{answer}?")
    assert plain.asked(task="t", answer="a", truth="g") == "a?" and not (plain.needs_task or plain.needs_truth)


@pytest.mark.parametrize(
    "reply, verdict",
    [
        ("VERDICT: 1", 1.0),
        (" so it is\n VERDICT: 0.5 \n", 0.5),
        ("VERDICT: 3\nVERDICT: 2", 2.0),
        ("VERDICT: 0", 0.0),
        ("VERDICT: 2.1", None),
        ("VERDICT: -1", None),
        ("VERDICT: 1 or so", None),
        ("VERDICT: 1\nno", None),
        ("VERDICT: nan", None),
        ("", None),
        ("\n", None),
    ],
)
def test_the_verdict_is_the_last_line_and_nothing_else(reply, verdict):
    assert Question(text="{answer}", high=2.0).verdict(reply) == verdict


def test_what_is_refused():
    with pytest.raises(ValueError, match=r"does not say where \{answer\} goes"):
        Question(text="Is it right?")
    with pytest.raises(ValueError, match="low=1.0 below high=1.0"):
        Question(text="{answer}", low=1.0)
