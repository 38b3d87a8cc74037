"""Sessions of a harness: which messages get which turn, what is refused, who plays them, and how they end."""

from __future__ import annotations

import threading
from collections import Counter

import numpy as np
import pytest
from test_rewards_environments import WORDS, conversations

from jaxrl_post.rewards import environments
from jaxrl_post.rewards.environments import harness
from jaxrl_post.rewards.environments.asking import Asking, spans
from jaxrl_post.rewards.environments.conversations import TurnScores
from jaxrl_post.rewards.environments.session import AGAIN, OVER, UNKNOWN, UNLIKE, NotPlayed
from jaxrl_post.rewards.environments.sessions import Sessions, name_of
from jaxrl_post.ring.types import Finish, Group, Prompt, Rollout, RolloutId

USER = {"role": "user", "content": "p"}
PROMPT = Prompt(id="q", tokens=WORDS.encode("p>"), messages=(USER,), extra={"prompt": "p"})
ID = RolloutId(0, "train", 0, "q", 3)
KEY = "\x1f".join(map(str, ID))
NAME = name_of(KEY)


class Clock:
    """Seconds that pass only by hand."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def said(text: str) -> dict:
    return {"role": "assistant", "content": text}


def tool(text: str) -> dict:
    return {"role": "tool", "content": text}


def rollout_of(turns: str, observed: str = "") -> Rollout:
    """Turns of one letter and an end, with an observed letter and ">" between two."""
    rollout = Rollout.written(ID, PROMPT, np.array([*WORDS.encode(turns[0]), 0]), Finish.TURN)
    for turn, seen in zip(turns[1:], observed, strict=True):
        rollout = rollout.extended(WORDS.encode(f"{seen}>"), 0).extended([*WORDS.encode(turn), 0], 0, sampled=True)
    return rollout


def asking(turns: str, observed: str = "", key: str = KEY) -> Asking:
    said_, seen = [said(one) for one in turns], [[tool(one)] for one in observed]
    return Asking(key, {"id": "q", "prompt": "p"}, said_, seen, rollout_of(turns, observed))


def nothing() -> None:
    pass


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def sessions(clock):
    return Sessions(timeout_s=10.0, say=lambda line: None, clock=clock)


def refused(call, *arguments) -> NotPlayed:
    with pytest.raises(NotPlayed) as caught:
        call(*arguments)
    assert "\n" not in caught.value.sentence and len(caught.value.sentence) < 400
    return caught.value


def hear(sessions, *messages):
    return sessions.heard(NAME, messages, nothing)


def test_spans_are_runs_of_sampled_tokens():
    assert spans(np.array([True, True, False, True, False, False])) == [(0, 2), (3, 4)]
    assert spans(np.zeros(3, bool)) == [] and spans(np.ones(2, bool)) == [(0, 2)]


def test_messages_that_begin_the_stored_ones_get_the_turn_behind_them(sessions):
    sessions.ask(asking("ab", "1"))
    first, second = hear(sessions, USER), hear(sessions, USER, said("a"), tool("1"))
    assert (first.number, first.message, first.tokens.tolist()) == (1, said("a"), [*WORDS.encode("a"), 0])
    assert first.before.tolist() == WORDS.encode("p>")
    assert (second.number, second.message, second.tokens.tolist()) == (2, said("b"), [*WORDS.encode("b"), 0])
    assert second.before.tolist() == [*WORDS.encode("p>a"), 0, *WORDS.encode("1>")], "ids as they are stored"
    assert not sessions.answered(KEY)


@pytest.mark.parametrize(
    "messages, named",
    [
        ([{"role": "user", "content": "other"}], "messages[0] differs"),
        ([USER, said("x"), tool("1")], "messages[1] differs"),
        ([USER, said("a"), tool("2")], "messages[2] differs"),
        ([USER, said("a"), {"role": "user", "content": "1"}], "messages[2] differs"),
        ([USER, said("a")], "the nearest valid number is 3"),
        ([USER, said("a"), tool("1"), said("b")], "the policy's own turn"),
        ([USER, said("a"), tool("1"), said("b"), said("c")], "messages[4] is of the assistant"),
    ],
)
def test_other_messages_are_refused_by_the_first_that_differs(sessions, messages, named):
    sessions.ask(asking("ab", "1"))
    wrong = refused(hear, sessions, *messages)
    assert wrong.kind == UNLIKE and named in wrong.sentence
    assert not sessions.answered(KEY), "nothing of it is used"


def test_forms_of_a_message_that_say_the_same_are_equal(sessions):
    call = {"id": "abc", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    mine = {"role": "assistant", "content": "", "tool_calls": [call]}
    theirs = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{**call, "index": 0, "function": {"name": "f", "arguments": '{"x":  1}'}}],
    }
    sessions.ask(Asking(KEY, {}, [mine], [], rollout_of("a")))
    assert hear(sessions, USER, theirs, tool("1")) is None and sessions.answered(KEY)
    sessions.ask(Asking(KEY, {}, [mine], [], rollout_of("b")))
    other = {**theirs, "tool_calls": [{**call, "function": {"name": "f", "arguments": '{"x": 2}'}}]}
    assert "messages[1] differs" in refused(hear, sessions, USER, other, tool("1")).sentence


def test_what_follows_a_turn_is_taken_once_and_the_next_turn_is_waited_for(sessions):
    woken = Counter()
    sessions.ask(asking("a"))
    given = [USER, said("a"), tool("1")]
    assert sessions.heard(NAME, given, lambda: woken.update("x")) is None
    assert sessions.heard(NAME, given, lambda: woken.update("x")) is None, "sent twice, it waits twice"
    assert "comes too late" in refused(hear, sessions, *given, tool("2")).sentence
    reply, counts = sessions.take(KEY)
    assert reply == {"messages": [tool("1")], "reward": 0.0, "done": False, "numbers": {}, "seconds": 0.0}
    assert counts == {"retries": 0, "exceptions": 0} and not woken
    sessions.ask(asking("ab", "1"))
    assert woken["x"] == 2 and hear(sessions, *given).message == said("b")


def test_a_reward_ends_it_and_may_be_posted_twice_but_not_changed(sessions):
    sessions.ask(asking("a"))
    sessions.rewarded(NAME, 0.25, {"acc": 1.0}, False)  # of a turn after which it goes on
    hear(sessions, USER, said("a"), tool("1"))
    assert sessions.take(KEY)[0]["reward"] == 0.25 and sessions.take(KEY)[0]["numbers"] == {"acc": 1.0}
    early = refused(sessions.rewarded, NAME, 1.0, {}, True)
    assert early.kind == AGAIN and "still being sampled" in early.sentence
    sessions.ask(asking("ab", "1"))
    for _ in range(2):
        sessions.rewarded(NAME, 1.0, {}, True)
    changed = refused(sessions.rewarded, NAME, 0.5, {}, True)
    assert changed.kind == AGAIN and "has ended with the reward 1" in changed.sentence
    assert refused(sessions.failed, NAME, "no").kind == AGAIN
    reply, _ = sessions.take(KEY)
    assert (reply["messages"], reply["reward"], reply["done"]) == ([], 1.0, True)
    assert refused(hear, sessions, USER, said("a"), tool("1"), said("b"), tool("2")).kind == OVER
    assert hear(sessions, USER).message == said("a"), "an earlier turn is still told"


def test_a_session_that_has_ended_is_told_from_one_that_never_was(sessions):
    woken = Counter()
    sessions.ask(asking("a"))
    sessions.heard(NAME, [USER, said("a"), tool("1")], lambda: woken.update("x"))
    sessions.drop(KEY)
    assert woken["x"] == 1 and refused(hear, sessions, USER).kind == OVER
    assert refused(sessions.heard, "nobody", [USER], nothing).kind == UNKNOWN
    sessions.ask(asking("a"))
    assert hear(sessions, USER).message == said("a"), "evaluated again, it is open again"


def test_a_conversation_that_begins_in_another_way_is_offered_anew(sessions):
    """As after a restart under new weights. One that is asked for again as it was keeps what followed."""
    sessions.ask(asking("a"))
    (mine,) = sessions.claim("one", 9, nothing)
    hear(sessions, USER, said("a"), tool("1"))
    sessions.ask(asking("a"))
    assert sessions.answered(KEY) and not sessions.claim("two", 9, nothing)
    sessions.ask(asking("c"))
    (again,) = sessions.claim("two", 9, nothing)
    assert again is not mine and not sessions.answered(KEY)
    assert "messages[1] differs" in refused(hear, sessions, USER, said("a"), tool("1")).sentence


def test_sessions_are_taken_in_order_and_released_by_name(sessions):
    keys = [f"{n}" for n in range(4)]
    woken = Counter()
    assert sessions.claim("one", 2, lambda: woken.update("x")) == []
    for key in keys:
        sessions.ask(asking("a", key=key))
    assert woken["x"] == 1 and sessions.count() == (4, 0)
    assert [one.name for one in sessions.claim("one", 3, nothing)] == [name_of(key) for key in keys[:3]]
    assert [one.name for one in sessions.claim("two", 3, nothing)] == [name_of("3")] and sessions.count() == (0, 4)
    sessions.rewarded(name_of("1"), 1.0, {}, True)
    assert sessions.release("one") == 2 and sessions.release("three") == 0
    assert [one.name for one in sessions.claim("one", 9, nothing)] == [name_of("0"), name_of("2")]


def test_a_session_between_two_turns_is_released_too_and_offered_with_its_next_turn(sessions):
    sessions.ask(asking("a"))
    sessions.claim("one", 1, nothing)
    hear(sessions, USER, said("a"), tool("1"))
    assert sessions.release("one") == 1 and not sessions.claim("one", 1, nothing)
    sessions.ask(asking("ab", "1"))
    (offered,) = sessions.claim("one", 1, nothing)
    assert offered.begun() == [USER, said("a"), tool("1")]


def test_a_late_session_is_offered_once_more_and_then_fails(sessions, clock):
    sessions.ask(asking("a"))
    clock.now = 1000.0
    assert not sessions.answered(KEY), "one that nobody plays is not late"
    sessions.claim("one", 1, nothing)
    clock.now += 10.0
    assert not sessions.answered(KEY) and not sessions.claim("two", 1, nothing)
    clock.now += 0.1
    (again,) = sessions.claim("two", 1, nothing)
    assert again.counts == {"retries": 1, "exceptions": 0}
    clock.now += 10.1
    reply, counts = sessions.take(KEY)
    assert "longer than 10 s" in reply["failed"] and counts["retries"] == 1


def test_the_ring_waits_until_a_harness_in_another_thread_follows(sessions, clock):
    sessions.ask(asking("a"))
    sessions.claim("one", 1, nothing)
    clock.now = 2.5
    timer = threading.Timer(0.05, hear, (sessions, USER, said("a"), tool("1")))
    timer.start()
    assert sessions.take(KEY)[0]["seconds"] == 2.5
    timer.join()


def test_the_end_of_the_run_is_told_to_all_and_a_broken_server_ends_the_run(sessions):
    woken = Counter()
    sessions.ask(asking("a"))
    sessions.claim("one", 1, nothing)
    sessions.heard(NAME, [USER, said("a"), tool("1")], lambda: woken.update("h"))
    sessions.claim("one", 1, lambda: woken.update("c"))
    sessions.ask(asking("ab", "1"))
    sessions.stop("the run has ended")
    assert woken == {"h": 1, "c": 1} and refused(sessions.claim, "one", 1, nothing).kind == OVER
    assert "the run has ended" in refused(hear, sessions, USER).sentence
    with pytest.raises(RuntimeError, match="no harness can be heard: the run has ended"):
        sessions.take(KEY)


# ---- with conversations


def test_a_played_conversation_is_token_exact_journaled_and_scored(sessions):
    talk, log = conversations(sessions)
    rollout = rollout_of("a")
    talk.start(rollout)
    hear(sessions, USER, said("a"), tool("1"))
    observed = talk.join(rollout)
    assert observed == WORDS.encode("1>")
    rollout = rollout.extended(observed, 0).extended([*WORDS.encode("b"), 0], 0, sampled=True)
    talk.start(rollout)
    assert hear(sessions, USER, said("a"), tool("1")).tokens.tolist() == [*WORDS.encode("b"), 0]
    sessions.rewarded(NAME, 1.0, {"acc": 1.0}, True)
    assert talk.join(rollout) is None
    scores = TurnScores(talk, "train")
    scores.start(rollout)
    group = scores.join(Group.unscored(PROMPT, [rollout]))
    assert group.rewards.tolist() == [1.0] and group.components["acc"].tolist() == [1.0]
    assert [record["messages"] for record in log.journal] == [[tool("1")], []]
    assert refused(hear, sessions, USER).kind == OVER


def test_a_resumed_run_offers_an_open_session_again_with_what_was_said(sessions, clock):
    """The first turn and what followed are journaled; the second turn was never followed."""
    talk, log = conversations(sessions)
    rollout = rollout_of("a")
    talk.start(rollout)
    hear(sessions, USER, said("a"), tool("1"))
    talk.join(rollout)
    fresh = Sessions(timeout_s=10.0, say=lambda line: None, clock=clock)
    again, _ = conversations(fresh, journaled=log.journal)
    again.start(rollout)
    assert fresh.count() == (0, 0) and again.join(rollout) == WORDS.encode("1>")
    again.start(rollout_of("ab", "1"))
    (offered,) = fresh.claim("one", 1, nothing)
    assert offered.name == NAME and offered.begun() == [USER, said("a"), tool("1")]
    assert fresh.heard(NAME, [USER], nothing).message == said("a")
    assert fresh.heard(NAME, offered.begun(), nothing).message == said("b")


def test_limits_end_a_session_and_what_a_harness_masks_is_counted(sessions, clock):
    talk, _ = conversations(sessions, max_turns=1)
    rollout = rollout_of("a")
    talk.start(rollout)
    hear(sessions, USER, said("a"), tool("1"))
    assert talk.join(rollout) is None and talk.metrics("train")["environment/cut"] == 1
    talk, _ = conversations(sessions)
    TurnScores(talk, "train").start(rollout)
    assert refused(hear, sessions, USER, said("a"), tool("1")).kind == OVER
    talk.start(rollout)
    for _ in range(2):
        sessions.failed(NAME, "the disk is full")
    assert "masked: the disk is full" in refused(sessions.rewarded, NAME, 1.0, {}, True).sentence
    assert talk.join(rollout) is None
    group = TurnScores(talk, "train").join(Group.unscored(PROMPT, [rollout]))
    assert not group.scored.any() and talk.metrics("train")["environment/failed"] == 1


@pytest.mark.parametrize("share", [None, lambda sent: sent], ids=["alone", "first_of_a_job"])
def test_a_conversation_that_was_parked_ends_with_its_group(sessions, share):
    """A round may end without it; its harness must not wait for ever, and nothing asks for it any more."""
    talk, _ = conversations(sessions, share=share)
    talk.start(rollout_of("a"))
    tokens = np.array([*WORDS.encode("a"), 0])
    other = Rollout.written(ID._replace(sample=1), PROMPT, tokens, Finish.TURN)
    TurnScores(talk, "train").join(Group.unscored(PROMPT, [other]))
    assert refused(hear, sessions, USER).kind == OVER
    late = Rollout.written(ID._replace(sample=2, epoch=1), PROMPT, tokens, Finish.TURN)
    talk.start(late)
    (session,) = sessions.claim("one", 9, nothing)
    sessions.rewarded(session.name, 1.0, {}, True)
    assert talk.join(late) is None and talk.score(late)["reward"] == 1.0


def test_a_turn_that_was_shared_before_it_is_joined_is_taken_once(sessions, clock):
    """The ring joins in order: the third turn is ready with the first, and the second needs a message of its own."""
    talk, _ = conversations(sessions, max_s=3.0, share=lambda sent: sent)
    tokens = np.array([*WORDS.encode("a"), 0])
    rollouts = [Rollout.written(ID._replace(sample=n), PROMPT, tokens, Finish.TURN) for n in range(3)]
    for one in rollouts:
        talk.start(one)
    names = [session.name for session in sessions.claim("one", 9, nothing)]
    clock.now = 2.0
    sessions.rewarded(names[0], 1.0, {}, True)
    sessions.rewarded(names[2], 1.0, {}, True)
    assert talk.join(rollouts[0]) is None
    sessions.rewarded(names[1], 1.0, {}, True)
    assert talk.join(rollouts[1]) is talk.join(rollouts[2]) is None
    assert [talk.score(one)["scored"] for one in rollouts] == [True] * 3, "2 of 3 seconds each"


# ---- options


def test_options_of_a_harness():
    assert harness.read({}) == ("127.0.0.1", 8100, ())
    schema = {"type": "function", "function": {"name": "f"}}
    assert harness.read({"port": 0, "tools": [schema]}) == ("127.0.0.1", 0, (schema,))
    assert harness.reset({"prompt": "p"}) == [USER] and harness.reset({"prompt": [USER]}) == [USER]
    with pytest.raises(ValueError, match="nearest is 'harness'"):
        environments.path_of("harnes")


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        ({"prot": 1}, "environment.arguments has no 'prot' for a harness; the nearest is 'port'"),
        ({"port": 70000}, "environment.arguments.port=70000 must be a whole number from 0"),
        ({"port": True}, "environment.arguments.port=True must be"),
        ({"host": ""}, "environment.arguments.host='' must be an address"),
        ({"tools": "f"}, "environment.arguments.tools='f' must be a list"),
        ({"tools": [{"name": "f"}]}, r"environment.arguments.tools\[0\]="),
    ],
)
def test_wrong_options_are_one_sentence(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        harness.read(arguments)
