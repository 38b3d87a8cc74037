"""What a twin is fed of a run's logs: lengths and ends, life by life; and whole runs that the twin repeats to the byte."""

from __future__ import annotations

import numpy as np
import plain_rollouts
import pytest
from models.twin import LoggedRewards, LoggedTexts, lives, stand_ins
from resumed_runs import here  # noqa: F401  `here` is a fixture
from test_main import go
from twin_run import Run

from jaxrl_post.ring.types import Finish, Group, Prompt, Request, Rollout, RolloutId, Sampling

pytestmark = pytest.mark.usefixtures("quick_compilation")

PROMPT = Prompt(id="p", tokens=np.arange(3))
LAW = Sampling(eos_ids=(0, 2), stop_ids=(4,))


def name(sample: int, purpose: str = "train") -> RolloutId:
    return RolloutId(7, purpose, 0, "p", sample)


def asked(sample: int, purpose: str = "train") -> Request:
    return Request(
        rollout_id=name(sample, purpose), prompt=PROMPT, seed=name(sample).seed(), max_tokens=9, sampling=LAW
    )


def rollout(sample: int, drafted, finish: Finish, clocks, purpose: str = "train") -> Rollout:
    size = len(drafted)
    return plain_rollouts.rollout(
        name(sample, purpose),
        PROMPT,
        np.full(size, 30),
        finish=finish,
        clock=(0, clocks[-1]),
        drafted=drafted,
        clocks=clocks,
    )


def group(*rollouts: Rollout) -> Group:
    return Group(
        prompt=PROMPT, rollouts=rollouts, rewards=np.arange(len(rollouts)), scored=np.ones(len(rollouts), bool)
    )


def complete(sample: int, tokens: int, finish: str) -> dict:
    return {"event": "complete", "id": list(name(sample)), "tokens": tokens, "finish": finish}


TAKE = {"event": "take", "commit": True, "publish": True}
DECISIONS = [
    complete(0, 4, "eos"),
    {"event": "parked", "ids": [[list(name(1)), 5]]},
    complete(2, 3, "stop"),
    TAKE | {"publish": False},
    TAKE,
    {"event": "parked", "ids": [[list(name(1)), 6]]},
    complete(1, 7, "length"),
    complete(2, 5, "eos"),
    {"event": "due", "groups": []},
]


def test_a_life_ends_when_it_is_parked_or_finishes_under_the_version_of_then():
    """Version 2 follows two commits, of which the second publishes; a rollout that is moved within a version has one life."""
    assert lives(DECISIONS) == {
        name(0): {0: (4, Finish.EOS)},
        name(1): {0: None, 2: (7, Finish.LENGTH)},
        name(2): {0: (3, Finish.STOP), 2: (5, Finish.EOS)},
    }


def made(**how) -> LoggedTexts:
    train = [
        group(
            rollout(0, [0, 0, 1, 0], Finish.EOS, [1, 2, 4, 4]),
            rollout(1, [1, 1, 1, 0, 0, 0, 0], Finish.LENGTH, [5, 5, 5, 6, 7, 7, 8]),
            rollout(2, [1, 1, 1, 1, 0], Finish.EOS, [5, 5, 5, 5, 5]),
        )
    ]
    evaluation = [group(rollout(0, [0] * 3, Finish.STOP, [1, 2, 3], "eval"))]
    return LoggedTexts(train, lives(DECISIONS), {0: evaluation}, **{"drafted": False, "prefix_mode": "verify"} | how)


def test_answers_have_the_lengths_of_their_lives_and_their_ends():
    """Tokens 1 and 3 end nothing. A stopped life is known to be longer than it came.

    The last life of answer 1 kept three of its candidates. All candidates of answer 2 were right.
    """
    answers = made()
    kept = [1, 1, 1, 3, 1, 1, 1]
    for sample, version, tokens in (
        (0, 0, [1, 1, 1, 0]),
        (1, 0, [1] * 9),
        (1, 1, kept),
        (1, 2, kept),
        (2, 0, [1, 1, 4]),
        (2, 2, [1, 1, 1, 1, 0]),
    ):
        known = answers(asked(sample), version)
        assert known.tokens.tolist() == tokens and known.ends is None
    assert answers(asked(0, "eval"), 0).tokens.tolist() == [1, 1, 4]
    assert made(prefix_mode="restart")(asked(1), 2).tokens.tolist() == [1] * 7
    drafted = made(drafted=True, prefix_mode="recompute")
    for sample, version, ends in ((0, 0, [1, 2, 4]), (1, 0, [3, 4, 6, 7]), (1, 2, [3, 4, 6, 7])):
        known = drafted(asked(sample), version)
        assert known.ends.tolist() == ends and known.tokens[1:-1].tolist() == [1] * (ends[-1] - 2)


def test_what_was_never_done_is_refused():
    answers = made()
    for request, version in ((asked(5), 0), (asked(0), 1), (asked(0, "eval"), 3)):
        with pytest.raises(ValueError, match=f"has no end in the logs under version {version} or a later one"):
            answers(request, version)
    ended = lives(DECISIONS) | {name(0): {0: (5, Finish.EOS)}}
    other = LoggedTexts(
        [group(rollout(0, [0] * 4, Finish.EOS, [1, 2, 3, 4]))], ended, {}, drafted=False, prefix_mode="verify"
    )
    with pytest.raises(ValueError, match="5 tokens by the log of decisions, with 4 by that of rollouts"):
        other(asked(0), 0)
    for sample, answers in (
        (1, made(drafted=True)),
        (0, LoggedTexts([], ended, {}, drafted=True, prefix_mode="verify")),
    ):
        with pytest.raises(ValueError, match="or was not trained: no log has the steps that its drafts took then"):
            answers(asked(sample), 0)
    with pytest.raises(ValueError, match="ended by 'stop' and the law names no token that does so"):
        stand_ins(3, Finish.STOP, Sampling(eos_ids=(0,)))


def test_scores_are_those_of_the_log():
    logged = group(rollout(0, [0], Finish.EOS, [1]), rollout(1, [0], Finish.EOS, [1]))
    fresh = Group(prompt=PROMPT, rollouts=logged.rollouts, rewards=[0, 0], scored=[False, False])
    line = {
        "event": "scored",
        "group": [0, "p"],
        "rewards": [0.5, 1.5],
        "scored": [True, False],
        "accuracies": [1.0, 0.0],
    }
    found = LoggedRewards([TAKE, line]).join(fresh)
    assert (found.rewards.tolist(), found.scored.tolist(), found.accuracies.tolist()) == (
        [0.5, 1.5],
        [True, False],
        [1.0, 0.0],
    )
    with pytest.raises(ValueError, match="and 1 rollouts was never scored"):
        LoggedRewards([line]).join(Group(prompt=PROMPT, rollouts=logged.rollouts[:1], rewards=[0], scored=[False]))


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(
            (
                "--config.engine.pages=9",
                "--config.scheduler.filter_groups=True",
                "--config.scheduler.prompts=2",
                "--config.optimizer.lr=1e-5",
            ),
            marks=pytest.mark.extended,
        ),
        pytest.param(
            ("--config.scheduler.name=tail_batching", "--config.scheduler.over=1.5", "--config.optimizer.lr=1.0"),
            marks=pytest.mark.extended,
        ),
        (
            "--config.scheduler.name=tail_batching",
            "--config.scheduler.over=1.5",
            "--config.scheduler.prefix_mode=restart",
        ),
        pytest.param(
            (
                "--config.scheduler.name=tail_batching",
                "--config.scheduler.over=1.5",
                "--config.scheduler.prefix_mode=recompute",
                "--config.speculation.drafter=ours",
                "--config.speculation.width=4",
                "--config.speculation.prompt_entries=4096",
                "--config.speculation.shared_entries=3000",
                "--config.speculation.live_entries=256",
                "--config.history.epochs=2",
            ),
            marks=pytest.mark.extended,
        ),
    ],
    ids=["few pages, filters", "verify", "restart", "drafts"],
)
def test_the_twin_of_a_whole_run_writes_its_logs(here, tmp_path, flags):  # noqa: F811
    flags = (
        "--config.steps=6",
        "--config.eval.every=4",
        "--config.eval.prompts=3",
        "--config.checkpoint.every=3",
        "--config.sampling.max_tokens=16",
        *flags,
    )
    assert go(here, f"--run-dir={tmp_path / 'run'}", *flags) == 0
    run = Run(here / "toy.py", [flag.removeprefix("--config.") for flag in flags], tmp_path / "run")
    decisions, dispatched = run.played()
    assert decisions == run.lines("scheduler_log") and dispatched == run.lines("dispatches")
    assert any('"event":"parked"' in line for line in decisions) == ("tail_batching" in flags[5])
