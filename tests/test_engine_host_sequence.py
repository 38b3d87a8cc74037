"""Tokens keep the clock at which they were settled, through parking, saving and cutting; and how a rollout ends."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from models.twin import Known, RowTwin

from jaxrl_post.engine.host.row_host import RowHost
from jaxrl_post.engine.host.sequence import Settled, begin, from_state, to_state
from jaxrl_post.engine.host.wire import EngineSettings
from jaxrl_post.engine.speculation.interface import Drafter
from jaxrl_post.engine.speculation.speculation import Drafting
from jaxrl_post.engine.step_cost import StepCost
from jaxrl_post.ring.types import Finish, Prompt, Request, Rollout, RolloutId, Sampling

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
    assert live.column("clocks").tolist() == clocks and live.candidates == ([5, 6, 7] if mode == "verify" else [])
    live = from_state(to_state(live), {"p": PROMPT})
    live.extend(Settled(0, [8, 9], [0.0] * 2, [0.0] * 2, [True, False], [11, 11], [8, 9]), version=1)
    live.cut(len(live.tokens) - 1)
    assert live.rollout(Finish.PARKED, 12).clocks.tolist() == [*clocks, 11]


LETTERS = "abcdefgh"


def stopped_by_h(max_tokens: int, steps: int, text: str, **law):
    """The answer `text`, of which "gh" ends it, from an engine whose device knows it."""
    asked = dataclasses.replace(ASKED, max_tokens=max_tokens, sampling=Sampling(stop_strings=("gh",), **law))
    sizes = EngineSettings(
        slots=2, max_length=32, page_size=8, pages=8, row_sizes=(4,), head_rows=2, steps_per_dispatch=steps
    )
    device = RowTwin(lambda request, version: Known(np.array([LETTERS.index(c) for c in text], np.int32)), sizes)
    drafting = Drafting(Drafter(), replicas=1, slots=2, past=lambda id: ())
    engine = RowHost(
        device,
        sizes,
        cost=StepCost((4,), (1.0,), "one size"),
        vocab_size=8,
        drafting=drafting,
        decode=lambda tokens, before=(): "".join(LETTERS[t] for t in tokens),
    )
    engine.submit([asked])
    while engine.pending:
        out = engine.step()
    return out[0]


@pytest.mark.parametrize("steps", [1, 8])
def test_a_stop_string_that_the_last_allowed_token_completes_ends_the_answer_as_a_stop_id_does(steps):
    assert stopped_by_h(4, steps, "abgh").finish is Finish.STOP
    assert stopped_by_h(4, steps, "abga").finish is Finish.LENGTH
    assert stopped_by_h(4, steps, "abgh", eos_ids=(7,)).finish is Finish.EOS  # the id says more than the string
    early = stopped_by_h(9, steps, "aghabcdef")
    assert (early.finish, len(early)) == (Finish.STOP, 3)
