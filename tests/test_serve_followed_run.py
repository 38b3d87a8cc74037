"""The newest weights of a run, while it goes on: those that `load` opens at that step, in the same server."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import threading
import time

import jax
import numpy as np
import pytest
from served import ROOT, served

import jaxrl_post
from jaxrl_post.commands import serve
from jaxrl_post.launch.parts import saved_policy
from jaxrl_post.launch.parts.policy import Policy
from jaxrl_post.runs.checkpoint import store
from jaxrl_post.serve import server as servers
from jaxrl_post.serve.followed_run import FollowedRun

pytestmark = pytest.mark.usefixtures("quick_compilation")


def looked(newest, load, looks=1, failures=0):
    """What a followed run swapped and said. `failures`: how many looks it must count as failed."""
    swapped, said, failed = [], [], []
    run = FollowedRun(
        version=3,
        newest=newest,
        load=load,
        swap=lambda params, step: swapped.append((params, step)),
        say=said.append,
        failed=lambda: failed.append(1),
        every_s=60.0,
    )
    for _ in range(looks):
        run.look()
    assert len(failed) == failures
    return swapped, said


def test_each_newer_step_is_taken_once():
    steps = iter([None, 5, None])
    assert looked(lambda above: next(steps), "of {}".format, looks=3) == ([("of 5", 5)], ["weights of step 5"])


def test_a_step_that_cannot_be_read_is_said_once_and_tried_again():
    tries = []

    def load(step):
        tries.append(step)
        if len(tries) < 3:
            raise OSError("it\nis gone")
        return "weights"

    swapped, said = looked(lambda above: 4 if above < 4 else None, load, looks=4, failures=2)
    assert swapped == [("weights", 4)] and tries == [4, 4, 4]
    assert said == ["step 4 of the run is not taken: it is gone", "weights of step 4"]


def raising(*errors):
    """Raises each of the errors that is one, and returns the others, in order."""
    left = iter(errors)

    def call(above):
        one = next(left)
        if isinstance(one, BaseException):
            raise one
        return one

    return call


def test_a_folder_that_cannot_be_read_is_said_once_each_time():
    """The disk goes away for two looks, comes back, and goes again before a step arrives."""
    gone, stale = OSError(5, "Input/output error"), ValueError("no\nlist")
    newest = raising(gone, stale, None, gone, 5)
    swapped, said = looked(newest, "of {}".format, looks=5, failures=3)
    line = "the run cannot be looked at: [Errno 5] Input/output error"
    assert swapped == [("of 5", 5)] and said == [line, line, "weights of step 5"]


@pytest.mark.parametrize("error", [KeyError("params"), RuntimeError("RESOURCE_EXHAUSTED"), FileNotFoundError("x")])
def test_every_fault_of_reading_is_counted_and_tried_again(error):
    swapped, said = looked(lambda above: 4 if above < 4 else None, raising(error, "weights"), looks=2, failures=1)
    assert swapped == [("weights", 4)] and said == [f"step 4 of the run is not taken: {error}", "weights of step 4"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_end_by_any_other_error_is_said():
    said, over = [], threading.Event()

    def say(line):
        said.append(line)
        over.set()

    run = FollowedRun(
        version=3,
        newest=raising(ZeroDivisionError()),
        load=str,
        swap=lambda params, step: None,
        say=say,
        failed=lambda: None,
        every_s=0.01,
    )
    run.start()
    assert over.wait(60)
    run.stop(60)
    assert not run.alive and said == ["the run is followed no more: version 3 stays; start the server again"]


SIZES = dict(engine__slots=8, engine__max_length=32, engine__row_sizes=(32,), sampling__max_tokens=12)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run that has saved two steps: the demo policy's weights, scaled."""
    folder = tmp_path_factory.mktemp("followed") / "run"
    own = jaxrl_post.load(ROOT / "configs/demo_policy", **SIZES)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(dataclasses.asdict(own.config)))
    weights = own.placed(own._files)
    steps = store.Checkpoints(folder / "checkpoints", keep_last=2, say=print)
    for step in (1, 2):
        scaled = jax.tree.map(lambda leaf, step=step: leaf * (1 + 0.25 * step), weights)
        steps.save(step, {"params": {"policy": scaled}}, {}, {"processes": 1})
    assert saved_policy.newest_step(folder, 0) == 2 and saved_policy.newest_step(folder, 2) is None
    return folder


def test_a_run_that_goes_on_is_followed(run, tmp_path):
    """First it has saved nothing, then step 1 arrives, then step 2."""
    live, hidden = tmp_path / "live", tmp_path / "hidden"
    shutil.copytree(run, live)
    os.rename(live / "checkpoints", hidden)
    (live / "checkpoints").mkdir()
    for file in hidden.iterdir():
        if file.is_file():
            shutil.copy(file, live / "checkpoints")
    config, start = saved_policy.started(live)
    own, lines = Policy(config, start), []
    following = servers.following(str(live), own, start, 0.1)
    body = dict(prompt=["3+1=", "5+1="], seed=2, n=2, return_token_ids=True, logprobs=0)
    with served(own, following=following, say=lines.append) as one:
        seen = {0: one.post("/v1/completions", **body)}
        for step in (1, 2):
            os.rename(hidden / f"step_{step:06d}", live / "checkpoints" / f"step_{step:06d}")
            end = time.monotonic() + 60
            while f"weights of step {step}" not in lines:
                assert time.monotonic() < end, lines
                time.sleep(0.05)
            seen[step] = one.post("/v1/completions", **body)
        assert json.loads(one.ask("GET", "/v1/models")[2])["data"][0]["weight_version"] == 2
        assert one.metric("jaxrl_post_run_followed") == 1 and one.metric("jaxrl_post_run_unread_total") == 0
        os.rename(live, tmp_path / "away")
        end = time.monotonic() + 60
        while not one.metric("jaxrl_post_run_unread_total"):
            assert time.monotonic() < end, lines
            time.sleep(0.05)
        os.rename(tmp_path / "away", live)
        assert one.metric("jaxrl_post_run_followed") == 1
        assert sum(line.startswith("the run cannot be looked at: there is no folder") for line in lines) == 1
    for step, found in seen.items():
        assert found["weight_versions"] == [step] and found["system_fingerprint"].endswith(f"_{step}")
        alone = jaxrl_post.load(f"{run}@{step}") if step else jaxrl_post.load(ROOT / "configs/demo_policy", **SIZES)
        scores = alone.logprobs(["3+1=", "3+1=", "5+1=", "5+1="], [c["token_ids"] for c in found["choices"]])
        for choice, told in zip(found["choices"], scores):
            assert np.allclose(choice["logprobs"]["token_logprobs"], told, atol=1e-5), step
    assert seen[0]["choices"] != seen[1]["choices"] != seen[2]["choices"]


def test_a_folder_that_is_gone_is_an_error_and_no_missing_step(run, tmp_path):
    assert saved_policy.newest_step(run, 2) is None
    with pytest.raises(OSError, match="there is no folder"):
        saved_policy.newest_step(tmp_path / "gone", 2)


def test_a_run_that_ended_without_a_step_is_one_sentence(run, tmp_path, capsys):
    shutil.copytree(ROOT / "configs/demo_policy", tmp_path / "policy")
    shutil.copy(run / "config.json", tmp_path)
    assert serve.main([f"--run={tmp_path}", "--port=0"]) == 1
    assert f"has ended and saved no step; write --model={tmp_path}" in capsys.readouterr().err


def test_what_is_no_run_is_one_sentence(tmp_path):
    with pytest.raises(ValueError, match="is no folder of a run"):
        saved_policy.started(tmp_path)
