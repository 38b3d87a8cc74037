"""A group that was written and revived is the same in every field."""

import dataclasses

import made_groups
import numpy as np
from toy_ring import ToyPrompts

from jaxrl_post.ring.types import PER_TOKEN, Finish, Group
from jaxrl_post.scheduler.ledger import PendingGroup, group_state, restored

PROMPTS = ToyPrompts(5)


def opened():
    """No field has its default."""
    epoch, prompt = PROMPTS.at(7)
    done = {sample: made_groups.rollout(prompt, sample, [4, 5, sample], version=sample) for sample in (2, 0)}
    part = made_groups.rollout(prompt, 1, [9], sampled=[False], finish=Finish.PARKED)
    one = PendingGroup(
        position=7,
        epoch=epoch,
        prompt=prompt,
        size=2,
        launched=4,
        attempt=3,
        rank=5,
        rollouts=done,
        prefixes={1: part},
        since=11,
        until=13,
        asked=True,
    )
    both = one.unscored().rollouts
    one.group = Group(prompt=prompt, rollouts=both, rewards=[1, 2], scored=[1, 0], components={"acc": [0.5, np.nan]})
    return one


def plain(value):
    """With arrays as bytes, so that == compares them, NaN too."""
    if dataclasses.is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: plain(value[key]) for key in sorted(value)}
    if isinstance(value, tuple):
        return [plain(member) for member in value]
    return (value.dtype.str, value.tobytes()) if isinstance(value, np.ndarray) else value


def test_every_field_comes_back():
    one = opened()
    defaults = {field.name: field.default for field in dataclasses.fields(PendingGroup)}
    assert all(getattr(one, name) != default for name, default in defaults.items() if name != "group")
    state = group_state(one)
    again = restored(state, PROMPTS)
    assert plain(again) == plain(one)
    assert again.ids(9, [1]) == one.ids(9, [1]) and again.ids(9, [1])[0].attempt == 3
    names = set(PER_TOKEN) - {"argmax_tokens"} | {"favourites"}  # what older runs call the argmax tokens
    assert names <= set(state["rollouts"][0])


def test_what_is_missing_was_launched_and_is_not_there():
    one = opened()
    assert one.missing == [1, 3] and one.whole
    del one.rollouts[0]
    assert one.missing == [0, 1, 3] and not one.whole
