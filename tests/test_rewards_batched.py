"""Functions of TRL's signature in the pool: each call gets a whole group. Every score is known by hand."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from test_rewards_pool import Log, graders, group, joined, pool, rollout, scores  # noqa: F401  (a fixture too)

from jaxrl_post.rewards.printed import Printed
from jaxrl_post.runs.journal import Journaled

TEXTS_OF_GROUP = ["d", "b", "a", "c"]


@pytest.mark.parametrize("group_size", [None, 4, 3, 9])
def test_a_function_of_trls_signature_gets_the_whole_group_at_once(graders, tmp_path, group_size):  # noqa: F811
    """Lists of one length, each column's too; the group's size may be known, unknown or wrong. Each group is one call."""
    size = None if group_size is None else lambda rollout: group_size
    with pool(graders, "rank", "number", group_size=size, timeout_s=20.0, workers=2) as rewards:
        members = [rollout(text, i) for i, text in enumerate(TEXTS_OF_GROUP)]
        others = [rollout(f"{i}", i, prompt="q") for i in range(4)]
        for one in [member for pair in zip(members, others, strict=True) for member in pair]:
            rewards.start(one)
        if group_size == 4:  # no join is needed to begin
            deadline = time.monotonic() + 10
            while len((tmp_path / "calls").read_text().splitlines() if (tmp_path / "calls").exists() else ()) < 2:
                assert time.monotonic() < deadline
                rewards._workers.turn(0.01)
        out, second = rewards.join(group(*members)), rewards.join(group(*others))
        alone = joined(rewards, rollout("z", 0))
        counts = rewards.metrics()
    assert not out.scored.any()  # "d" is no number, for the other function
    assert out.components == {} and counts["reward/unscored"] == 5 and alone.scored.tolist() == [False]
    assert second.rewards.tolist() == [0, 2, 4, 6] and second.components["rank/score"].tolist() == [0, 1, 2, 3]
    calls = [line for line in (tmp_path / "calls").read_text().splitlines() if group_size != 3 or len(line) != 5]
    assert sorted(calls) == ["0 1 2 3", "d b a c", "z"]


def test_a_group_is_called_anew_when_one_of_its_rollouts_comes_again(graders, tmp_path):  # noqa: F811
    with pool(graders, "rank", group_size=lambda rollout: 2, timeout_s=20.0) as rewards:
        members = [rollout("b", 0), rollout("a", 1)]
        for one in members:
            rewards.start(one)
        rewards._workers.turn(0.2)
        members[1] = rollout("c", 1)
        rewards.start(members[1])
        assert rewards.join(group(*members)).rewards.tolist() == [0, 1]
    assert (tmp_path / "calls").read_text().splitlines()[-1] == "b c"


def test_a_failed_call_is_retried_once_for_the_group_and_then_all_of_it_is_unscored(graders, caplog):  # noqa: F811
    journal = Log()
    with pool(graders, "flaky", timeout_s=20.0, journal=journal) as rewards:
        assert scores(rewards, "a", "b", "c").rewards.tolist() == [1, 1, 1]
        counts = rewards.metrics()
    assert (counts["reward/retries"], counts["reward/unscored"], counts["reward/exceptions"]) == (1, 0, 1)
    assert [record["counts"]["retries"] for record in journal] == [1, 0, 0]
    with pool(graders, "wrong_count", "number", timeout_s=20.0) as rewards:
        assert not scores(rewards, "1", "2").scored.any()
        counts = rewards.metrics()
    assert (counts["reward/retries"], counts["reward/unscored"], counts["reward/exceptions"]) == (1, 2, 2)
    assert "it returned a list of 3 for a group of 2 completions" in caplog.text


def test_a_group_may_take_its_size_times_the_limit(graders):  # noqa: F811
    with pool(graders, "slow", timeout_s=0.5) as rewards:
        assert scores(rewards, *"abcd").scored.all()
    with pool(graders, "never", timeout_s=0.2) as rewards:
        assert not scores(rewards, *"abcd").scored.any()


def test_a_group_is_taken_from_the_journal_whole_or_not_at_all(graders, tmp_path):  # noqa: F811
    """Half of a group's records are of no use: the scores of the others depend on all of its texts."""
    members, journal = [rollout(text, i) for i, text in enumerate("ba")], Log()

    def life(records):
        with pool(graders, "rank", "applies", timeout_s=20.0, journal=journal, journaled=Journaled(records)) as rewards:
            return joined(rewards, *members).rewards.tolist()

    assert life([]) == [1, 0] and (tmp_path / "calls").read_text() == "b a\n"
    first = list(journal)
    changed = [record | {"reward": record["reward"] + 10} for record in first]
    assert life(changed) == [11, 10] and (tmp_path / "calls").read_text() == "b a\n"
    assert life(changed[:1]) == [1, 0] and (tmp_path / "calls").read_text() == "b a\n" * 2
    assert journal[-2:] == first


def test_async_functions_and_the_name_of_trls_documentation(graders):  # noqa: F811
    with pool(graders, "later", "later_verl", timeout_s=20.0) as rewards:
        assert scores(rewards, "abc", "de").rewards.tolist() == [4, 3]


def test_what_trl_functions_log(graders, tmp_path):  # noqa: F811
    printed = Printed(tmp_path / "rewards.log")
    with pool(graders, "logs", timeout_s=20.0, printed=printed) as rewards:
        out = scores(rewards, "abc", "none")
    assert {name: values[0] for name, values in out.components.items()} == {"acc": 1, "share": 0.25, "length": 3}
    assert out.scored.tolist() == [True, False]
    assert (tmp_path / "rewards.log").read_text() == "head: ['a', 'n']\n"
    with pool(graders, "state_if_any", timeout_s=20.0) as rewards:
        assert scores(rewards, "a").rewards.tolist() == [1]


def test_a_column_that_a_call_would_overwrite_is_refused(graders):  # noqa: F811
    good = rollout("1").prompt
    with pool(graders, "number", "trl") as rewards:
        rewards.check([replace(good, extra={"prompt": 1, "completion": 2})])
        for name in ("rollout", "completions", "log_extra"):
            bad = replace(good, where="f.jsonl, line 3", extra={name: 1})
            with pytest.raises(ValueError, match=f"data: f.jsonl, line 3: column '{name}' has the name of an argument"):
                rewards.check([good, bad])
