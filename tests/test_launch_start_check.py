"""What process 0 says of processes that start otherwise, with a store that is a dict."""

from __future__ import annotations

import threading

import jax
import pytest

from jaxrl_post.launch import start_check
from jaxrl_post.parallel import exchange
from jaxrl_post.runs import agreement


class Store(dict):
    """A key-value store of one process, for several threads."""

    def __init__(self):
        super().__init__()
        self.changed = threading.Condition()

    def put(self, key: str, text: str) -> None:
        with self.changed:
            self[key] = text
            self.changed.notify_all()

    def read(self, key: str, limit_s: float) -> str:
        with self.changed:
            if not self.changed.wait_for(lambda: key in self, limit_s):
                raise TimeoutError(key)
            return self[key]


@pytest.fixture
def said(monkeypatch):
    """Returns what each of three processes says; None where it goes on. A process without values never comes."""
    store, here = Store(), threading.local()
    monkeypatch.setattr(exchange, "put", store.put)
    monkeypatch.setattr(exchange, "get", store.read)
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    monkeypatch.setattr(jax, "process_index", lambda: here.index)
    monkeypatch.setattr(agreement, "_USES", iter([7] * 3))
    monkeypatch.setattr(start_check, "code", lambda: {"jaxrl_post/ring/loop.py": here.code})

    def run(*values) -> list[str | None]:
        out: list[str | None] = [None] * len(values)

        def one(index: int) -> None:
            here.index, here.code = index, values[index].get("code", "aa")
            try:
                start_check.check(lambda: {"config": {"seed": values[index].get("seed", 0)}}, limit_s=1.0)
            except ValueError as error:
                out[index] = str(error)

        threads = [threading.Thread(target=one, args=(index,)) for index in range(3) if values[index] is not None]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return out

    return run


def test_equal_processes_go_on(said):
    assert said({}, {}, {}) == [None] * 3


def test_the_process_and_the_first_difference_are_named_to_all(said):
    sentence, *others = said({}, {}, {"seed": 4, "code": "bb"})
    assert others == [sentence] * 2
    assert sentence == (
        "process 2 does not start as process 0: code.jaxrl_post/ring/loop.py is 'bb' there and 'aa' on process 0, and 1 more "
        "differ; start all processes with the same code, config, data and versions"
    )


def test_a_process_that_never_comes_is_named(said):
    assert said({}, None, {})[0] == "process 1 has not read its config and data within 1 s, and process 0 has"


def test_the_code_is_hashed_by_file():
    found = start_check.code()
    assert {"jaxrl_post/ring/loop.py", "kernels/verify.py"} <= found.keys() and len(set(found.values())) > 100
