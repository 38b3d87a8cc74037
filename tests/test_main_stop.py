"""A run that is told to end exits with 42 in time, wherever it is, and resumed it ends in the same bits."""

import signal
import threading

import pytest
from resumed_runs import here, resume, same_run, saved, whole

from jaxrl_post.launch.parts import evaluation
from jaxrl_post.models import hf
from jaxrl_post.rewards.pool import Pool
from jaxrl_post.trainer.learner import Learner

__all__ = ["here", "whole"]  # fixtures

pytestmark = pytest.mark.usefixtures("quick_compilation")


def signalled(here, folder, number, owner, name, count, *flags):
    """Resumes, and sends the signal to this thread when `owner.name` is called for the `count`-th time."""
    real, calls = getattr(owner, name), []

    def telling(*args, **kwargs):
        calls.append(1)
        if len(calls) == count:
            signal.pthread_kill(threading.get_ident(), number)  # to this thread, so that it is handled here
        return real(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, telling)
        return resume(here, folder, *flags)


@pytest.mark.extended
def test_a_stopped_run_saves_where_it_may_and_ends_in_the_same_bits(here, whole, capsys):
    """At steps that the config would not save."""
    target = here / "stopped"
    assert signalled(here, target, signal.SIGTERM, Learner, "commit", 1) == 42
    assert "stopped after step 1, which is saved" in capsys.readouterr().out
    assert saved(target) == ["step_000001"]
    assert resume(here, target) == 0
    assert "goes on after step 1" in capsys.readouterr().out
    same_run(whole, target)


DRAFTED = (
    "--config.speculation.drafter=ours",
    "--config.speculation.width=4",
    "--config.speculation.prompt_entries=4096",
    "--config.speculation.shared_entries=3000",
    "--config.speculation.live_entries=256",
    "--config.history.epochs=2",
    "--config.sampling.max_tokens=16",
)


@pytest.mark.extended
def test_with_a_drafter_too(here, capsys):
    one, two = here / "drafted", here / "drafted_stopped"
    assert resume(here, one, *DRAFTED) == 0
    assert signalled(here, two, signal.SIGTERM, Learner, "commit", 3, *DRAFTED) == 42
    assert resume(here, two, *DRAFTED) == 0
    same_run(one, two)


def test_a_start_that_is_stopped_leaves_no_folder(here, capsys):
    before = {*here.iterdir(), here / "__pycache__"}  # Python's, of the reward file
    assert signalled(here, here / "never", signal.SIGTERM, Pool, "check", 1) == 42
    assert "SIGTERM: stopped outside of a step" in capsys.readouterr().out
    assert set(here.iterdir()) <= before


@pytest.mark.extended
def test_the_evaluation_before_and_the_end_are_left_at_once(here, whole):
    target = here / "outside"
    assert signalled(here, target, signal.SIGINT, evaluation, "evaluate", 1) == 42
    assert saved(target) == []
    assert signalled(here, target, signal.SIGTERM, hf, "save", 1) == 42
    assert saved(target) == ["step_000004", "step_000005"]
    assert resume(here, target) == 0
    same_run(whole, target)
