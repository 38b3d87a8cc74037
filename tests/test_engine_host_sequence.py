"""Tokens keep the clock at which they were settled, through parking, saving and cutting."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from jaxrl_post.engine.host.sequence import Settled, begin, from_state, to_state
from jaxrl_post.types import Finish, Prompt, Request, Rollout, RolloutId, Sampling

NAME = RolloutId(0, "train", 0, "p", 0)
PROMPT = Prompt(id="p", tokens=np.arange(3))
ASKED = Request(rollout_id=NAME, prompt=PROMPT, seed=NAME.seed(), max_tokens=9, sampling=Sampling())


def rollout(**more) -> Rollout:
    return Rollout(
        id=NAME,
        prompt=PROMPT,
        tokens=[5, 6, 7],
        sampled=[True] * 3,
        logprobs=[0.0] * 3,
        entropies=[0.0] * 3,
        versions=[0, 0, 1],
        drafted=[False] * 3,
        finish=Finish.PARKED,
        start_clock=2,
        finish_clock=9,
        **more,
    )


def test_without_clocks_all_tokens_came_at_the_end_and_clocks_never_decrease():
    assert rollout().clocks.tolist() == [9, 9, 9] and rollout(clocks=[3, 4, 4]).clocks.tolist() == [3, 4, 4]
    with pytest.raises(ValueError, match="clocks decrease"):
        rollout(clocks=[3, 5, 4])
    with pytest.raises(ValueError, match=r"clocks has shape \(2,\), tokens \(3,\)"):
        rollout(clocks=[3, 4])


@pytest.mark.parametrize("mode, clocks", [("recompute", [3, 4, 4]), ("verify", []), ("restart", [])])
def test_forced_tokens_keep_their_clocks_and_new_ones_get_their_own(mode, clocks):
    live = begin(dataclasses.replace(ASKED, prefix=rollout(clocks=[3, 4, 4]), prefix_mode=mode), age=1)
    assert live.clocks == clocks and live.candidates == ([5, 6, 7] if mode == "verify" else [])
    live = from_state(to_state(live), {"p": PROMPT})
    live.extend(Settled(0, [8, 9], [0.0] * 2, [0.0] * 2, [True, False], [11, 11], [8, 9]), version=1)
    live.cut(len(live.tokens) - 1)
    assert live.rollout(Finish.PARKED, 12).clocks.tolist() == [*clocks, 11]
