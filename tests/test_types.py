"""The values that flow around the ring: what they refuse, what nobody can change, what a seed hangs on."""

import dataclasses
import hashlib

import made_groups
import numpy as np
import pytest

from jaxrl_post.ring.ragged import Ragged
from jaxrl_post.ring.types import Group, Part, Prompt, Request, Rollout, RolloutId, Sampling

PROMPT = Prompt(id="p", tokens=[1, 2])
ID = RolloutId(7, "train", 1, "p", 3, 2)


def test_a_seed_hangs_on_every_field_and_on_nothing_else():
    """8 bytes of BLAKE2b over the fields' text."""
    text = b"7\x1ftrain\x1f1\x1fp\x1f3\x1f2"
    want = hashlib.blake2b(text, digest_size=8).digest()
    assert ID.seed().tobytes() == want and ID.seed().dtype == np.uint32
    others = [
        ID._replace(**{name: "q" if isinstance(value, str) else value + 1}) for name, value in ID._asdict().items()
    ]
    assert len({other.seed().tobytes() for other in [ID, *others]}) == 7


def test_nobody_writes_to_what_flows():
    """Not to its arrays, nor, through the caller's own array, to what it was built from."""
    tokens, rewards = np.array([4, 5], np.int32), np.array([1, 0], np.float32)
    rollouts = tuple(made_groups.rollout(PROMPT, sample, tokens) for sample in range(2))
    group = Group(prompt=PROMPT, rollouts=rollouts, rewards=rewards, scored=[1, 1], components={"acc": rewards})
    for array in (PROMPT.tokens, rollouts[0].tokens, rollouts[0].versions, group.rewards, group.components["acc"]):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 9
    tokens[0], rewards[0] = 9, 9
    assert rollouts[0].tokens.tolist() == [4, 5] and group.rewards.tolist() == [1, 0] == group.accuracies.tolist()
    with pytest.raises(dataclasses.FrozenInstanceError):
        PROMPT.id = "q"


def changed(**more) -> Rollout:
    return dataclasses.replace(made_groups.rollout(PROMPT, 0, [4, 5, 6]), **more)


def request(**more) -> Request:
    given = dict(rollout_id=ID, prompt=PROMPT, seed=ID.seed(), max_tokens=3, sampling=Sampling())
    return Request(**(given | more))


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: changed(versions=[1, 0, 1]), "versions decrease"),
        (lambda: changed(logprobs=np.zeros(2)), r"logprobs has shape \(2,\), tokens \(3,\)"),
        (lambda: Prompt(id="p", tokens=[]), "non-empty vector"),
        (lambda: Group(prompt=PROMPT, rollouts=(changed(),), rewards=[1, 2], scored=[1]), "rewards has shape"),
        (
            lambda: Group(prompt=Prompt(id="q", tokens=[1]), rollouts=(changed(),), rewards=[1], scored=[1]),
            "another prompt",
        ),
        (lambda: Sampling(temperature=-0.1), "temperature must be 0 or from 1e-30"),
        (lambda: Sampling(temperature=1e-40), "temperature must be 0 or from 1e-30"),
        (lambda: Sampling(temperature=float("nan")), "temperature must be 0 or from 1e-30"),
        (lambda: Sampling(temperature=float("inf")), r"temperature must be 0 or from 1e-30 to 1e\+30, got inf"),
        (lambda: Sampling(top_p=0.0), "top_p must be at least 1e-30"),
        (lambda: Sampling(top_p=1e-40), "top_p must be at least 1e-30"),
        (lambda: Sampling(top_k=-1), "top_k must be >= 0"),
        (lambda: request(max_tokens=0), "max_tokens must be >= 1"),
        (lambda: request(seed=[1]), r"seed must be uint32\[2\]"),
        (lambda: request(prefix_mode="again"), "prefix_mode must be one of"),
    ],
)
def test_what_cannot_be_built(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_versions_of_observed_tokens_may_fall():
    assert changed(versions=[2, 0, 2], sampled=[1, 0, 1]).versions.tolist() == [2, 0, 2]


def test_accuracy_is_a_component_of_its_own():
    given = dict(prompt=PROMPT, rollouts=(changed(), changed()), rewards=[0.5, -1], scored=[1, 1])
    assert Group(**given).accuracies.tolist() == [0.5, -1]
    assert Group(**given, components={"acc": [1, 0]}).accuracies.tolist() == [1, 0]


def test_parts_of_one_commit_join_in_order():
    groups = [Group(prompt=PROMPT, rollouts=(changed(),), rewards=[n], scored=[1]) for n in range(4)]
    one = Part(fresh=tuple(groups[:2]), groups=tuple(groups[:1]), commit=False, publish=False)
    two = Part(fresh=(groups[2],), groups=tuple(groups[1:]), commit=True, publish=True)
    joined = Part.joined([one, two])
    assert [g.rewards[0] for g in joined.fresh] == [0, 1, 2] and [g.rewards[0] for g in joined.groups] == [0, 1, 2, 3]
    assert joined.commit and joined.publish and not Part.joined([one]).commit


def test_vectors_of_ids_by_hand():
    """Three tokens with ids [7, 5], none and [9]; their slice, their join, and where two differ."""
    one = Ragged.of_rows(np.array([[7, 5], [-1, -1], [9, -1]], np.int32))
    assert one.ids.tolist() == [7, 5, 9] and one.ends.tolist() == [2, 2, 3] and one.counts.tolist() == [2, 0, 1]
    assert one.rows(3).tolist() == [[7, 5, -1], [-1, -1, -1], [9, -1, -1]]
    assert one[1:].ids.tolist() == [9] and one[1:].ends.tolist() == [0, 1] and one[3:].size == one[2:1].size == 0
    assert Ragged.joined([one[:1], Ragged.empty(1), one[2:]]).tobytes() == one.tobytes()
    assert one.different(Ragged.of_rows(np.array([[7, 5], [4, -1], [8, -1]], np.int32))) == 2
    assert one.different(one[:1]) == 2 and one.different(one) == 0
    assert Ragged.restored(one.state("kept"), "kept").tobytes() == one.tobytes()
    assert Ragged.empty(4).state("kept") == {} and Ragged.restored({}, "kept") is None
    with pytest.raises(ValueError, match="a token has 2 ids, more than 1"):
        one.rows(1)
    with pytest.raises(ValueError, match="must rise from 0 to the 3 ids"):
        Ragged(one.ids, np.array([2, 1, 3]))
