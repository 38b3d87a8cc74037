"""The thread of the devices on its own, over an engine that ends every request at once: the order of its work."""

from __future__ import annotations

import threading

import numpy as np

from jaxrl_post.serve.refusal import Refusal
from jaxrl_post.serve.tinker.forms import Ask
from jaxrl_post.serve.tinker.sampler import Sampling
from jaxrl_post.serve.tinker.worker import Piece, Worker

ASK = Ask(prompt=np.ones(1, np.int32), n=1, law={}, max_tokens=1, seed=0, prompt_logprobs=False)


class Engine:
    """A sampler that notes what ran together."""

    def __init__(self, notes: list):
        self._notes, self._live = notes, []

    def begin(self, sampling):
        self._live.append(sampling)

    def step(self):
        done, self._live = self._live, []
        self._notes.append([one.path for one in done])
        return [(one, {}) for one in done]

    def clear(self):
        assert not self._live


class Work:
    """A worker whose pieces are queued before it begins."""

    def __init__(self):
        self.notes, self.told, self.ended = [], [], threading.Event()
        self.worker = Worker(Engine(self.notes), self.ended.set)

    def train(self, owner: str, name: str, run=None) -> None:
        def work():
            self.notes.append(name)
            return {}

        self.worker.submit(Piece(owner=owner, tell=self.told.append, run=run or work))

    def sample(self, owner: str, path: str) -> None:
        sampling = Sampling(path=path, ask=ASK, seed=0)
        self.worker.submit(Piece(owner=owner, tell=self.told.append, sampling=sampling))

    def done(self) -> list:
        """Runs everything, and returns the notes."""
        last = threading.Event()
        self.worker.submit(Piece(owner="", tell=lambda result: last.set(), run=dict))
        self.worker.start()
        assert last.wait(60) and self.worker.stop(60) and self.ended.is_set()
        return self.notes


def test_requests_of_the_same_weights_run_together_and_pass_none_of_their_own_work():
    work = Work()
    work.sample("a", "one")
    work.sample("b", "two")
    work.sample("b", "one")
    work.train("a", "a saves")
    work.sample("a", "one")
    work.sample("a", "two")
    assert work.done() == [["one", "one"], ["two"], "a saves", ["one"], ["two"]]


def test_a_refused_piece_is_told_whose_fault_it_is_and_the_next_one_runs():
    def raises(error):
        def run():
            raise error

        return run

    work = Work()
    for error in (Refusal(400, "theirs"), Refusal(500, "the disk is full"), ValueError("theirs too")):
        work.train("a", "", raises(error))
    work.train("a", "after")
    assert work.done() == ["after"]
    assert [(one.get("error"), one.get("category")) for one in work.told[:3]] == [
        ("theirs", "user"),
        ("the disk is full", "server"),
        ("theirs too", "user"),
    ]
