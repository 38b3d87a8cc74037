"""The promises of the Tinker API: whose they are, what they hold, and for how long."""

from __future__ import annotations

from jaxrl_post.serve.schema import Refusal
from jaxrl_post.serve.tinker import promises


def test_a_refused_call_tells_whose_fault_it_is():
    def result(error):
        def call():
            raise error

        found = promises.answered(call)
        return found["error"], found["category"]

    assert result(Refusal("theirs")) == ("theirs", "user")
    assert result(Refusal("the disk is full", status=500)) == ("the disk is full", "server")
    assert result(ValueError("theirs too")) == ("theirs too", "user")
    assert promises.answered(lambda: {"path": "x"}) == {"path": "x"}


def test_fetched_results_are_forgotten_before_they_fill_the_memory(monkeypatch):
    """Eight results of 40 numbers each. The first is never fetched; of the others, two fit into 100 numbers."""
    monkeypatch.setattr(promises, "KEPT_NUMBERS", 100)
    every, made = promises.Promises(), []
    for number in range(8):
        made.append(every.make("a", ("run", number)))
        made[-1].settle({"rows": [{"data": [0.5] * 30}], "metrics": {"x": 1.0}, "more": [None] + [1.0] * 9})
        if number:
            assert made[-1].take() is made[-1].result

    def kept():
        every.make("b")
        return [every.find(one.name) is one and every.earlier(("run", at)) is one for at, one in enumerate(made)]

    assert kept() == [True] + [False] * 5 + [True] * 2
    every.end({"error": "the session has ended"}, "a")
    assert kept() == [False] * 6 + [True] * 2


def test_a_promise_is_its_owner_s_and_its_name_is_no_number():
    every = promises.Promises()
    one, other = every.make("a", None, "alice"), every.make("b", None, "bob")
    assert every.find(one.name, "alice") is one and every.find(one.name, "bob") is None is every.find(one.name)
    assert len(one.name) == 32 and one.name != other.name and not one.name.isdecimal()


def test_the_oldest_settled_results_are_forgotten(monkeypatch):
    monkeypatch.setattr(promises, "KEPT", 3)
    every = promises.Promises()
    made = [every.make("a", ("run", number)) for number in range(5)]
    for one in made[1:]:
        one.settle({})
    every.make("a")
    assert [every.find(one.name) is one for one in made] == [True, False, False, True, True]
    assert every.earlier(("run", 1)) is None and every.earlier(("run", 0)) is made[0]
