"""Environments that answer, hang, raise, die and change their mind; every reply and score is known by hand."""

from __future__ import annotations

import os
import textwrap
import time
from types import SimpleNamespace

import numpy as np
import pytest
from test_rewards_pool import Log

from jaxrl_post.data import tokenizer
from jaxrl_post.data.chat import Chat
from jaxrl_post.data.turns import Wording
from jaxrl_post.rewards import environments
from jaxrl_post.rewards.environments import conversations as conversed
from jaxrl_post.rewards.environments.asking import Asking
from jaxrl_post.rewards.environments.conversations import Conversations, Turn, TurnScores, row
from jaxrl_post.rewards.environments.pool import EnvironmentPool
from jaxrl_post.ring.types import Finish, Group, Prompt, Rollout, RolloutId
from jaxrl_post.runs.journal import Journaled

OWN = """
import os, time

class Counting:
    '''Counts turns, obeys the row's word in the turn of this number, and logs every call.'''
    tools = ({"type": "function", "function": {"name": "f", "parameters": {}}},)

    def __init__(self, log=""):
        self.log = log

    def reset(self, row):
        self.row, self.turns = row, 0
        self._note("reset")
        return [{"role": "user", "content": row["prompt"]}]

    def step(self, messages):
        self.turns += 1
        self._note(f"step {self.turns}")
        word, _, at = self.row.get("word", "").partition(" ")
        if word and self.turns == int(at):
            if word == "hang": time.sleep(60)
            if word == "raise": raise RuntimeError("broken environment")
            if word == "die": os._exit(3)
            if word == "nan": return [], float("nan"), False, {}
            if word == "text": return "a text"
            if word == "moody": return [{"role": "tool", "content": str(os.getpid())}], 0.0, False, {}
        over = self.turns == 3
        return [{"role": "tool", "content": str(self.turns)}], 0.25, over, {"acc": float(over), "name": "x"}

    def _note(self, what):
        if self.log:
            with open(self.log, "a") as file:
                file.write(f"{os.getpid()} {self.row['id']} {what}\\n")

class Half:
    def reset(self, row): return []
"""


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    path = tmp_path_factory.mktemp("environments") / "own.py"
    path.write_text(textwrap.dedent(OWN))
    return str(path)


def started(own, *, timeout_s=20.0, workers=2, **arguments) -> EnvironmentPool:
    return EnvironmentPool(f"{own}:Counting", arguments, workers=workers, timeout_s=timeout_s)


def said(*texts: str) -> list[dict]:
    return [{"role": "assistant", "content": text} for text in texts]


def seen(*texts: str) -> list[list[dict]]:
    return [[{"role": "tool", "content": text}] for text in texts]


def asking(key, words, known=(), **columns) -> Asking:
    row = {"id": key, "prompt": "p"} | columns
    return Asking(key, row, said(*words), seen(*known), None)  # processes do not read tokens


def asked(pool, key, words, known=(), **columns):
    pool.ask(asking(key, words, known, **columns))
    return pool.take(key)


def test_turns_and_tools(own):
    with started(own) as pool:
        assert pool.tools[0]["function"]["name"] == "f"
        assert pool.reset({"id": "a", "prompt": "hello"}) == [{"role": "user", "content": "hello"}]
        for number in (1, 2, 3):
            begun = time.monotonic()
            reply, counts = asked(pool, "a", "xyz"[:number], map(str, range(1, number)))
            assert 0 <= reply["seconds"] <= time.monotonic() - begun
            assert reply == {
                "seconds": reply["seconds"],
                "messages": [{"role": "tool", "content": str(number)}],
                "reward": 0.25,
                "done": number == 3,
                "numbers": {"acc": float(number == 3)},
            }
            assert counts == {"retries": 0, "exceptions": 0}


def test_a_conversation_is_played_again_where_its_process_is_gone(own, tmp_path):
    log = tmp_path / "log"
    with started(own, log=str(log)) as pool:
        asked(pool, "a", "x")
        for process in pool._workers:
            os.kill(process.process.pid, 9)
            # A process that dies may still be sent a turn.
            os.waitid(os.P_PID, process.process.pid, os.WEXITED | os.WNOWAIT)
        reply, counts = asked(pool, "a", "xy", "1")
        assert reply["messages"][0]["content"] == "2" and counts["retries"] == 0  # nobody has taken the turn before
    lines = [line.split(" ", 1)[1] for line in log.read_text().splitlines()]
    assert lines == ["a reset", "a step 1", "a reset", "a step 1", "a step 2"]


def test_another_message_begins_again(own, tmp_path):
    log = tmp_path / "log"
    with started(own, workers=1, log=str(log)) as pool:
        asked(pool, "a", "xy", "1")
        asked(pool, "a", "zy", "1")
    assert log.read_text().count("reset") == 2


@pytest.mark.parametrize(
    "word, reason",
    [
        ("raise 1", "broken environment"),
        ("die 1", "status 3"),
        ("nan 1", "not finite"),
        ("text 1", "must return"),
        ("hang 1", "longer than 1 s"),
    ],
)
def test_a_failure_is_tried_once_more_and_then_told(own, word, reason):
    with started(own, workers=1, timeout_s=1.0) as pool:
        reply, counts = asked(pool, "a", "x", word=word)
        assert reason in reply["failed"] and counts["retries"] == 1
        assert len(pool.failures) == 1 and "environment" in pool.failures[0]
        assert asked(pool, "b", "x")[0]["reward"] == 0.25, "the next conversation is not hurt"


def test_a_conversation_beside_one_that_fails_goes_on(own):
    with started(own, workers=1, timeout_s=5.0) as pool:
        asked(pool, "a", "x")
        pool.ask(asking("b", "x", word="die 1"))
        assert asked(pool, "a", "xy", "1")[0]["messages"][0]["content"] == "2"
        assert "failed" in pool.take("b")[0]


def test_an_environment_that_changes_its_mind_is_refused(own):
    with started(own, workers=1) as pool:
        first = asked(pool, "a", "x", word="moody 1")[0]["messages"][0]["content"]
        os.kill(pool._workers[0].process.pid, 9)
        reply, _ = asked(pool, "a", "xy", [first], word="moody 1")
        assert "returned something else" in reply["failed"]


@pytest.mark.parametrize(
    "path, sentence",
    [
        ("nowhere:X", "there is no module"),
        ("{own}:Missing", "has no 'Missing'"),
        ("{own}:Half", "has no method 'step'"),
        ("{own}:os", "neither a class nor a function"),
    ],
)
def test_what_cannot_be_loaded_is_refused(own, path, sentence):
    with pytest.raises(ValueError, match=sentence):
        EnvironmentPool(path.format(own=own), {}, workers=1, timeout_s=5.0)


def test_names():
    assert environments.path_of("calculator").endswith("calculator:Calculator")
    assert environments.path_of("a.b:C") == "a.b:C"
    with pytest.raises(ValueError, match="nearest is 'calculator'"):
        environments.path_of("calculater")


# ---- conversations


WORDS = tokenizer.characters("abcdefghijklmnopqrstuvwxyz0123456789>?#=+*")
PLAIN = "{% for m in messages %}{{ m.content + (eos_token if m.role == 'assistant' else '>') }}{% endfor %}"


def conversations(pool, *, journaled=(), max_turns=8, max_s=0.0, share=None) -> tuple[Conversations, conversed.Log]:
    """Conversations that `pool` plays, and their log."""
    wording = Wording(Chat(template=PLAIN, tokens={"eos_token": "<eos>"}), WORDS)
    log = conversed.Log(Log(), Journaled(journaled))
    how = dict(parser="none", max_turns=max_turns, max_s=max_s)
    return Conversations(pool, wording, **how, logs={"train": log}, share=share), log


def made(own, *, pool=None, journaled=(), max_turns=8, max_s=0.0, **columns):
    prompt = Prompt(
        id="q", tokens=WORDS.encode("p>"), messages=({"role": "user", "content": "p"},), extra={"prompt": "p"} | columns
    )
    how = dict(journaled=journaled, max_turns=max_turns, max_s=max_s)
    return *conversations(pool or started(own, timeout_s=1.0), **how), prompt


def begun(prompt, text="ab", sample=0) -> Rollout:
    return Rollout.written(
        RolloutId(0, "train", 0, prompt.id, sample), prompt, np.array([*WORDS.encode(text), 0]), Finish.TURN
    )


def more(rollout: Rollout, observed, text: str) -> Rollout:
    return rollout.extended(observed, 0).extended([*WORDS.encode(text), 0], 0, sampled=True)


def played(talk: Conversations, rollout: Rollout, texts: str = "cde") -> tuple[Rollout, int]:
    """Plays until the end. Returns the rollout and how many turns it has."""
    for number, text in enumerate(texts, start=1):
        talk.start(rollout)
        observed = talk.join(rollout)
        if observed is None:
            return rollout, number
        assert WORDS.decode(observed) == f"{number}>"
        rollout = more(rollout, observed, text)
    raise AssertionError("the conversation never ended")


def test_a_conversation_and_its_score(own):
    talk, log, prompt = made(own)
    rollout, turns = played(talk, begun(prompt))
    assert turns == 3 and [record["reward"] for record in log.journal] == [0.25] * 3
    assert rollout.sampled.tolist() == [True] * 3 + [False] * 2 + [True] * 2 + [False] * 2 + [True] * 2
    scores = TurnScores(talk, "train")
    scores.start(rollout)
    group = scores.join(Group.unscored(prompt, [rollout]))
    assert group.rewards.tolist() == [0.75] and group.scored.all()
    assert {name: values.tolist() for name, values in group.components.items()} == {
        "acc": [1.0],
        "turns": [3.0],
        "turn_1": [0.25],
        "turn_2": [0.25],
        "turn_3": [0.25],
    }
    told = scores.metrics()
    assert told["environment/turns"] == 3 and told["environment/failed"] == 0 and told["reward/unscored"] == 0
    assert not talk.state_dict()["records"], "nothing is kept of a scored group"


def test_the_limit_of_turns_ends_a_conversation(own):
    talk, _, prompt = made(own, max_turns=2)
    rollout, turns = played(talk, begun(prompt))
    assert turns == 2 and talk.score(rollout)["reward"] == 0.5 and talk.score(rollout)["components"]["acc"] == 0
    assert talk.metrics("train")["environment/cut"] == 1


def test_a_turn_cut_at_the_limit_of_tokens_reaches_its_environment_or_is_masked(own):
    """The first turn is cut: without the environment's word it earned 0, so that rambling paid where turns cost."""
    talk, log, prompt = made(own)
    cut = Rollout.written(RolloutId(0, "train", 0, prompt.id, 0), prompt, np.array(WORDS.encode("ab")), Finish.LENGTH)
    assert not talk.score(cut)["scored"], "its environment never got it"
    talk.start(cut)
    assert talk.join(cut) is None and [record["reward"] for record in log.journal] == [0.25]
    assert talk.score(cut)["scored"] and talk.score(cut)["reward"] == 0.25
    assert talk.metrics("train")["environment/cut"] == 1
    second = more(begun(prompt, sample=1), WORDS.encode("1>"), "c")
    talk.start(begun(prompt, sample=1))
    talk.join(begun(prompt, sample=1))
    assert talk.score(second) | {"components": {}} == {"scored": False, "reward": 0.25, "components": {}}


class Slow:
    """A pool whose environment takes 0.75 seconds for each step, by what it says."""

    def __init__(self, pool):
        self._pool = pool

    def __getattr__(self, name):
        return getattr(self._pool, name)

    def take(self, key):
        reply, counts = self._pool.take(key)
        assert reply["seconds"] >= 0
        return dict(reply) | {"seconds": 0.75}, counts


def test_a_conversation_over_its_seconds_is_masked_and_a_resumed_run_reads_the_same(own):
    """Two steps are 1.5 s, above the limit of 1. What the journal says is used without an environment."""
    talk, log, prompt = made(own, max_s=1.0, pool=Slow(started(own)))
    rollout, turns = played(talk, begun(prompt))
    assert turns == 2 and [record["scored"] for record in log.journal] == [True, False]
    assert not [name for record in log.journal for name in record if name.startswith("second")], "bits must not differ"
    again, _, _ = made(own, max_s=1.0, journaled=log.journal, pool=Slow(None))
    same, number = played(again, begun(prompt))
    assert number == 2 and same.tokens.tolist() == rollout.tokens.tolist()
    for one in (talk, again):
        scores = TurnScores(one, "train")
        assert not scores.join(Group.unscored(prompt, [rollout])).scored.any()
        told = scores.metrics()
        assert told["environment/overtime"] == told["reward/unscored"] == 1 and told["environment/failed"] == 0
    free, *_ = made(own, max_s=2.5, pool=Slow(started(own)))
    assert played(free, begun(prompt))[1] == 3 and free.metrics("train")["environment/overtime"] == 0


@pytest.mark.parametrize("word", ["raise 2", "die 2", "hang 2"])
def test_a_failed_environment_masks_its_rollout_and_is_counted(own, word):
    talk, log, prompt = made(own, word=word)
    rollout, turns = played(talk, begun(prompt))
    assert turns == 2 and not log.journal[-1]["scored"]
    scores = TurnScores(talk, "train")
    group = scores.join(Group.unscored(prompt, [rollout]))
    assert not group.scored.any()
    told = scores.metrics()
    assert told["environment/failed"] == 1 and told["reward/unscored"] == 1 and told["environment/retries"] == 1


def test_what_the_tokenizer_cannot_say_masks_its_rollout(own):
    talk, _, prompt = made(own)
    talk._wording = Wording(Chat(template="{% for m in messages %}{{ m.content }}É{% endfor %}"), WORDS)
    rollout = begun(prompt)
    talk.start(rollout)
    assert talk.join(rollout) is None and not talk.score(rollout)["scored"]
    assert talk.metrics("train")["environment/failed"] == 1


def test_journaled_turns_need_no_environment(own):
    talk, log, prompt = made(own)
    rollout, _ = played(talk, begun(prompt))

    class Silent:
        def ask(self, *_):
            raise AssertionError("asked again")

        take = answered = drop = ask

    again, second, _ = made(own, journaled=list(log.journal), pool=Silent())
    assert played(again, begun(prompt))[0].tokens.tolist() == rollout.tokens.tolist()
    assert second.journal == log.journal


def test_a_resumed_conversation_goes_on_in_a_fresh_environment(own, tmp_path):
    notes = tmp_path / "log"
    with started(own, log=str(notes)) as first, started(own, log=str(notes)) as second:
        talk, _, prompt = made(own, pool=first)
        rollout = begun(prompt)
        talk.start(rollout)
        rollout = more(rollout, talk.join(rollout), "c")
        again, _, _ = made(own, pool=second)
        again.load_state_dict(talk.state_dict(), {})
        again.start(rollout)
        assert WORDS.decode(again.join(rollout)) == "2>"
    assert [line.split(" ", 2)[2] for line in notes.read_text().splitlines()] == [
        *("reset", "step 1", "reset", "step 1", "step 2")
    ]


def test_a_late_environment_is_waited_for_and_counted(own):
    class Late:
        def __init__(self, pool):
            self._pool, self.drop, self.ask = pool, pool.drop, pool.ask

        def answered(self, key):
            return False

        def take(self, key):
            time.sleep(0.05)
            return self._pool.take(key)

    with started(own) as pool:
        talk, _, prompt = made(own, pool=Late(pool))
        played(talk, begun(prompt))
    told = talk.metrics("train")
    assert told["perf/late_environments"] == 3 and told["timing_s/environment_wait"] > 0.15


def test_rows():
    prompt = Prompt(
        id="q", tokens=[1], answer="7", source="s", messages=({"role": "user", "content": "x"},), extra={"a": 1}
    )
    assert row(prompt) == {
        "prompt": [{"role": "user", "content": "x"}],
        "a": 1,
        "id": "q",
        "answer": "7",
        "source": "s",
    }


def test_a_message_of_the_assistant_that_a_turn_follows_is_its_beginning():
    def say(role, content):
        return {"role": role, "content": content}

    wording = Wording(Chat(template=PLAIN), WORDS)
    talk = Conversations(None, wording, parser="none", max_turns=3, max_s=0, logs={})
    rollout = SimpleNamespace(
        id=RolloutId(0, "train", 0, "p", 0), prompt=SimpleNamespace(messages=(say("user", "1"), say("assistant", "2")))
    )
    turns = [Turn(np.array(WORDS.encode(text, special=False)), text, np.array([1])) for text in ("3", "4")]
    talk._records[rollout.id] = {"3": {"messages": [say("user", "5"), say("assistant", "6")]}}
    begun = [say("user", "1"), say("assistant", "23"), say("user", "5"), say("assistant", "6")]
    assert talk._before(rollout, turns) == (begun, True)
    talk._records[rollout.id] = {"3": {"messages": []}}
    assert talk._before(rollout, turns) == (begun[:2], False)
