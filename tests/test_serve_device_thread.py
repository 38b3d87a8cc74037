"""The thread of the devices: when it reports what a dispatch settled, and in which order it takes work."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
import threading
import time

import numpy as np
import pytest

from jaxrl_post.ring.types import Finish, Prompt, Request, Rollout, RolloutId, Sampling
from jaxrl_post.serve.device_thread import DeviceThread, EngineRequest
from jaxrl_post.serve.http_server import HttpServer
from jaxrl_post.serve.schema import Refusal


@dataclasses.dataclass
class Dispatches:
    """An engine that finishes the request that waits longest in every dispatch. `log`: what happened, in order."""

    log: list
    fails: bool = False

    def __post_init__(self):
        self.waiting, self.meanwhile, self.dispatches = [], None, 0

    @property
    def pending(self):
        return len(self.waiting)

    def submit(self, requests):
        self.waiting += requests

    def park(self, ids):
        self.waiting = [request for request in self.waiting if request.rollout_id not in ids]

    def swap(self, params, version):
        self.log.append(("swap", version))

    def metrics(self):
        return {}

    def step(self):
        self.log.append(("launch", self.dispatches))
        self.meanwhile()
        self.log.append(("collect", self.dispatches))
        self.dispatches += 1
        if self.fails and self.dispatches == 2:
            raise ArithmeticError("a planted failure")
        return [rollout(self.waiting.pop(0))]


def rollout(request):
    """A rollout of one token."""
    one, zero = np.ones(1, np.int32), np.zeros(1, np.float32)
    return Rollout(
        id=request.rollout_id,
        prompt=request.prompt,
        tokens=one,
        sampled=one > 0,
        logprobs=zero,
        entropies=zero,
        versions=one,
        drafted=one < 0,
        finish=Finish.STOP,
        start_clock=0,
        finish_clock=1,
    )


def work(log, name, count, deadline_s=60.0, **more):
    """A request of `count` samples, which notes what is reported of it."""
    requests = [
        Request(
            rollout_id=RolloutId(0, "eval", 0, name, place),
            prompt=Prompt.of_tokens(np.ones(2, np.int32)),
            seed=np.zeros(2, np.uint32),
            max_tokens=1,
            sampling=Sampling(),
        )
        for place in range(count)
    ]

    def receive(update):
        log.append((name, update.sentence if isinstance(update, Refusal) else update.place))

    return EngineRequest(requests=requests, deadline=time.monotonic() + deadline_s, receive=receive, **more)


def of(engine, ended):
    """The thread of an engine, which has not begun."""
    return DeviceThread(
        engine,
        post=lambda updates: [one.receive(update) for one, update in updates],
        counted=lambda _: None,
        say=engine.log.append,
        ended=ended.set,
    )


def run(engine, *works, swaps=()):
    """Does the works. `swaps`: versions of new weights that are ordered while the first dispatch runs. Returns the log."""
    ended = threading.Event()
    thread = of(engine, ended)
    report = engine.meanwhile

    def dispatched():
        if not engine.dispatches:
            for version in swaps:
                thread.swap(None, version)
        report()

    engine.meanwhile = dispatched
    for one in works:
        thread.submit(one)
    thread.start()
    end = time.monotonic() + 30
    while (not engine.dispatches or engine.pending or thread.pending) and not ended.is_set() and time.monotonic() < end:
        time.sleep(0.001)
    assert thread.stop(30) and ended.is_set()
    return engine.log


def test_what_a_dispatch_settled_is_told_while_the_next_one_runs():
    engine = Dispatches([])
    assert run(engine, work(engine.log, "a", 3)) == [
        ("launch", 0),
        ("collect", 0),
        ("launch", 1),
        ("a", 0),
        ("collect", 1),
        ("launch", 2),
        ("a", 1),
        ("collect", 2),
        ("a", 2),
    ]


def test_new_weights_do_not_hold_up_what_is_settled():
    engine = Dispatches([])
    log = run(engine, work(engine.log, "a", 2), swaps=[7])
    assert log == [("launch", 0), ("collect", 0), ("a", 0), ("swap", 7), ("launch", 1), ("collect", 1), ("a", 1)]


def test_an_engine_that_fails_has_told_what_it_settled_before(monkeypatch):
    seen, engine = [], Dispatches([], fails=True)
    monkeypatch.setattr(threading, "excepthook", lambda told: seen.append(told.exc_type))
    log = run(engine, work(engine.log, "a", 3))
    assert seen == [ArithmeticError]
    assert log == [("launch", 0), ("collect", 0), ("launch", 1), ("a", 0), ("collect", 1)]


def test_a_late_request_is_told_so_where_no_dispatch_follows():
    engine = Dispatches([])
    log = run(engine, work(engine.log, "a", 3, deadline_s=-1.0))
    assert log[:3] == [("launch", 0), ("collect", 0), ("a", 0)]
    assert len(log) == 4 and "deadline" in log[3][1]


class Whole(Dispatches):
    """An engine that finishes every request in one dispatch, and notes what ran together."""

    def step(self):
        done, self.waiting = self.waiting, []
        self.log.append([one.rollout_id.prompt_id.split()[0] for one in done])
        return [rollout(one) for one in done]


def test_requests_for_the_same_weights_run_together_and_pass_no_call_of_their_owner():
    engine, ended, last = Whole([]), threading.Event(), threading.Event()
    thread = of(engine, ended)
    for number, (owner, weights) in enumerate(map(str.split, ("a one", "b two", "b one", "a call", "a one", "a two"))):
        if weights == "call":
            thread.call(lambda: engine.log.append("a saves"), owner=owner)
        else:
            thread.submit(work([], f"{weights} {number}", 1, weights=weights, owner=owner))
    thread.call(last.set)
    thread.start()
    assert last.wait(60) and thread.stop(60) and ended.is_set()
    assert engine.log == [["one", "one"], ["two"], "a saves", ["one"], ["two"]]


def test_the_server_runs_on_uvloop_and_httptools_where_they_are():
    uvloop, httptools_impl = pytest.importorskip("uvloop"), pytest.importorskip("uvicorn.protocols.http.httptools_impl")
    loops = []

    async def application(scope, receive, send):
        assert scope["type"] == "lifespan"
        loops.append(asyncio.get_running_loop())
        await receive()
        raise InterruptedError("no more is needed")

    server = HttpServer(application)
    failed = asyncio.Event()
    failed.set()
    with socket.create_server(("127.0.0.1", 0)) as heard:
        server.run(heard, failed)
    assert isinstance(loops[0], uvloop.Loop)
    assert issubclass(server._http.config.http_protocol_class, httptools_impl.HttpToolsProtocol)
