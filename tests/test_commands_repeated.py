"""Every rollout that a run logged is sampled again bit for bit, in every mode that decides otherwise."""

from __future__ import annotations

import numpy as np
import pytest
from resumed_runs import here  # noqa: F401  (a fixture)
from test_main import go
from test_main_lending import RUNS as LENT
from test_main_speculation import FLAGS as DRAFTED
from test_main_speculation import OURS
from test_main_tail_batching import PARTIAL, VERIFIED

from jaxrl_post.commands import repeated
from jaxrl_post.runs import run_logs

SMALL = ("--config.checkpoint.keep_last=99", "--config.eval.prompts=3", "--config.eval.every=2")
MODES = {
    "sync": (
        "--config.steps=5",
        "--config.checkpoint.every=2",
        "--config.engine.slots=4",
        "--config.engine.carry_over=keep",
    ),
    "partial": PARTIAL,
    "verified": VERIFIED,
    "drafted": (*DRAFTED, *OURS, "--config.checkpoint.every=2"),
    "sleeping": (
        "--config.engine.dtype=bfloat16",
        "--config.steps=4",
        "--config.checkpoint.every=2",
        "--config.engine.sleep=True",
    ),
    "shuffled": ("--config.steps=4", "--config.checkpoint.every=2", "--config.reward.shuffle=True"),
    "lending": LENT["shared"],
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode",
    [
        pytest.param(
            name, marks=pytest.mark.extended if name in ("drafted", "verified") else pytest.mark.shown("variants")
        )
        for name in MODES
    ],
)
def test_every_rollout_of_a_run_is_repeated(here, mode):  # noqa: F811
    folder = here / f"repeated_{mode}"
    assert go(here, f"--run-dir={folder}", *MODES[mode], *SMALL) == 0
    logs = run_logs.opened(folder)
    names = [
        run_logs.name_of(rollout.id, step)
        for step, group in run_logs.groups_of(logs, "train")
        for rollout in group.rollouts
    ]
    assert len(names) == len({*names}) >= 16
    found = repeated.repeated(logs, names)
    assert [str(one.name) for one in found if not one.equal] == []
    assert len({one.begun for one in found}) > 1
    several = [one for one in found if len(np.unique(one.found.versions)) > 1]
    assert bool(several) is (mode == "partial")
