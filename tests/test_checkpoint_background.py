"""Saves in the background: of the moment at which they began, and their failures at the next one."""

import shutil
import threading

import jax
import pytest
from saved_steps import ABOUT, host, names, same, saves, tree

from jaxrl_post.runs.checkpoint import store
from jaxrl_post.runs.checkpoint.background import Background
from jaxrl_post.runs.checkpoint.store import Checkpoints


def test_a_save_in_the_background_is_of_the_moment_at_which_it_began(tmp_path, monkeypatch):
    """While the thread waits, the arrays are donated and the host's state goes on."""
    begun, on = threading.Event(), threading.Event()
    real = store.write_state

    def waiting(*args):
        begun.set()
        assert on.wait(60)
        real(*args)

    monkeypatch.setattr(store, "write_state", waiting)
    ours, state, there, ended = saves(tmp_path), tree(3), host(3), []
    with Background(ours, lambda: ended.append(threading.current_thread().name)) as saver:
        saver.save(3, state, there, ABOUT)
        assert begun.wait(60) and ours.steps() == []
        state = jax.tree.map(jax.jit(lambda x: x + 1, donate_argnums=0), state)
        there["values"][:] = 9
        there["clock"] = 9
        on.set()
        saver.join()
        assert ours.steps() == [3] and ended == ["checkpoint_0"]
        saver.save(4, state, host(4), ABOUT)
    assert saves(tmp_path).newest().step == 4  # the end of the context waited for it
    shutil.rmtree(tmp_path / "checkpoints" / "step_000004")
    same(saves(tmp_path).newest(), 3)


def test_a_save_that_failed_in_the_background_ends_the_run_at_the_next_one(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store, "write_state", full)
    said = []
    ours = Checkpoints(tmp_path / "checkpoints", keep_last=2, say=said.append, max_failures=2)
    with Background(ours) as saver:
        saver.save(1, tree(1), host(1), ABOUT)
        saver.save(2, tree(2), host(2), ABOUT)
        with pytest.raises(store.SaveFailed, match="2 saves in a row failed"):
            saver.save(3, tree(3), host(3), ABOUT)
        saver.join()
    assert len(said) == 1 and "step 1 was not saved" in said[0] and names(tmp_path) == []
