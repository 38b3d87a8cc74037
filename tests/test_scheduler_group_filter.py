"""Which groups a filter leaves out, by the metric that it reads: values by hand."""

import dataclasses

import numpy as np
import pytest

from jaxrl_post.config import Config, default, resolve
from jaxrl_post.ring.types import Finish, Group, Prompt, Rollout, RolloutId, Sampling
from jaxrl_post.scheduler.group_filter import NoGroups, Solved, differs, ended, solved
from jaxrl_post.scheduler.registry import made
from jaxrl_post.telemetry.metrics import describe

PROMPT = Prompt(id="p", tokens=[1])


def group(rewards, scored=None, **components):
    ids = [RolloutId(0, "train", 0, "p", sample) for sample in range(len(rewards))]
    return Group(
        prompt=PROMPT,
        rollouts=tuple(Rollout.written(id, PROMPT, np.array([2]), Finish.EOS) for id in ids),
        rewards=rewards,
        scored=[True] * len(rewards) if scored is None else scored,
        components={name.replace("__", "/"): values for name, values in components.items()},
    )


def test_the_summed_reward_tells_rollouts_apart_where_the_first_function_does_not():
    """Functions [zero, length]: the accuracy is 0 throughout, and the sum is not. Its std is 0.0320 within the group."""
    given = group([0.10, 0.18, 0.13, 0.17], acc=[0] * 4, zero__score=[0] * 4, length__score=[0.10, 0.18, 0.13, 0.17])
    found = {name: differs(given, name) for name in ("seq_reward", "score", "acc", "zero", "length", "length/score")}
    assert found == {
        "seq_reward": True,
        "score": True,
        "acc": False,
        "zero": False,
        "length": True,
        "length/score": True,
    }
    row = describe([given], 0)
    assert row["frac_reward_zero_std"] == 0.0 and row["reward_std"] == pytest.approx(0.0320, abs=1e-4)
    equal = group([0.5, 0.5], acc=[1, 0])
    assert describe([equal], 0)["frac_reward_zero_std"] == 1.0 and not differs(equal) and differs(equal, "acc")


def test_what_has_no_score_or_no_such_number_tells_nothing_apart():
    assert not differs(group([1, 0, 0], scored=[False, True, True])) and not differs(
        group([1, 0], scored=[False] * 2), "x"
    )
    assert not differs(group([1, 0], style=[np.nan, 0.5]), "style") and differs(group([1, 1], style=[0, 0.5]), "style")
    with pytest.raises(
        NoGroups, match="filter_metric='stile' is no component of the rewards; they have seq_reward, acc, style"
    ):
        differs(group([1, 0], style=[1, 0]), "stile")


def test_a_solved_group_has_every_rollout_scored_and_right():
    assert solved(group([1, 1])) and solved(group([0, 0], acc=[1, 0.6])) and not solved(group([1, 0.5]))
    assert not solved(group([1, 1], scored=[True, False]))


@pytest.mark.parametrize(("begun", "unsolved", "kind"), [(True, 0, Solved), (True, 1, NoGroups), (False, 0, NoGroups)])
def test_only_a_run_that_has_trained_can_have_solved_its_prompts(begun, unsolved, kind):
    end = ended("acc", begun, "kept 1 of the 4 groups of round 2", 9, unsolved, "scheduler.max_waves=3 waves")
    assert type(end) is kind and "kept 1 of the 4 groups of round 2" in str(end)
    assert "9 groups" in str(end) and "scheduler.max_waves=3 waves" in str(end)


def test_the_name_of_the_only_function_is_the_reward():
    config: Config = resolve(
        default(), ("model.preset=tiny", "scheduler.filter_groups=true", "scheduler.filter_metric=exact")
    )
    assert config.only_grader == "exact"
    scheduler = made(config, None, Sampling(), lambda name: (), lambda: None, only_grader=config.only_grader)
    assert scheduler._options.filter_metric == "seq_reward"
    several = dataclasses.replace(config.reward, functions=("a.b:exact", "c.py:form"))
    assert dataclasses.replace(config, reward=several).only_grader == ""
    with pytest.raises(ValueError, match="seq_final_reward"):
        resolve(
            default(), ("model.preset=tiny", "scheduler.filter_groups=true", "scheduler.filter_metric=seq_final_reward")
        )
