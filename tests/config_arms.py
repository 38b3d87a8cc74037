"""Configs of the tests: the default with a model, and the sentence that a mistake in one gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import ml_collections
import pytest

from jaxrl_post import config

PIPE = ("scheduler.name=pipeline", "scheduler.max_staleness=2")
TAIL = ("scheduler.name=tail_batching", "scheduler.over=1.25")
SUPERVISED = ("engine.name=demonstrations", "algorithm.loss_mode=sft", "algorithm.adv_estimator=ones")
DISTILL = ("algorithm.adv_estimator=distill", "teacher.path=teacher")
GKD = (*DISTILL, "algorithm.loss_mode=gkd")

PAIRS = (
    *("engine.name=preferences", "algorithm.loss_mode=dpo", "algorithm.adv_estimator=pairs"),
    *("algorithm.loss_agg_mode=seq-mean-token-sum", "scheduler.group_size=2"),
)
REWARD_MODEL = (*PAIRS, "algorithm.loss_mode=bradley_terry", "eval.prompts=0")


def given(**changes) -> ml_collections.ConfigDict:
    """The default with a preset, and dotted names (a__b) changed."""
    out = config.default()
    out.model.preset = "tiny"
    for name, value in changes.items():
        out.update_from_flattened_dict({name.replace("__", "."): value})
    return out


def error(*overrides: str, **changes) -> str:
    """The sentence that resolving gives: exactly one line, no trailing full stop noise."""
    with pytest.raises(ValueError) as caught:
        config.resolve(given(**changes), overrides)
    sentence = str(caught.value)
    assert "\n" not in sentence and len(sentence) < 400
    return sentence


def unlike(refused: Mapping[str, str], say: Callable[..., str] = error) -> dict[str, str]:
    """The rows of a table that do not hold, with what was said: from overrides, divided by spaces, to a part of the sentence."""
    found = {overrides: _said(say, overrides.split()) for overrides in refused}
    return {overrides: said for overrides, said in found.items() if refused[overrides] not in said}


def _said(say: Callable[..., str], overrides: list[str]) -> str:
    try:
        return say(*overrides)
    except pytest.fail.Exception:
        return "nothing was refused"
