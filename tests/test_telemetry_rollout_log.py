"""The rollout log gives back what it got, to the bit, and equal groups give equal bytes."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import time

import numpy as np
import pytest

from jaxrl_post.ring.ragged import Ragged
from jaxrl_post.ring.types import Finish, Group, Prompt, Rollout, RolloutId
from jaxrl_post.runs import journal as journal_file
from jaxrl_post.runs import rollout_log
from jaxrl_post.runs.journal import Journal
from jaxrl_post.runs.rollout_log import RolloutLog


def made(seed: int) -> tuple[Group, ...]:
    random = np.random.default_rng(seed)
    out = []
    for g, size in enumerate((3, 1, 2)):
        prompt = Prompt(
            id=f"p{g}/é",
            tokens=random.integers(0, 99, 1 + g),
            answer="4 ✓",
            source="s",
            messages=({"role": "user", "content": "2+2="},) if g else (),
            extra={"index": g, "level": [1.5, "x"]},
            weight=(1.0, 2.5, 0.3)[g],
        )
        rollouts = tuple(rollout(random, prompt, sample, length) for sample, length in enumerate((4, 0, 7)[:size]))
        components = {"acc": random.random(size)} | ({"form": [np.nan] * size} if g == 2 else {})
        out.append(
            Group(
                prompt=prompt,
                rollouts=rollouts,
                rewards=random.normal(size=size),
                scored=random.random(size) < 0.5,
                components=components,
            )
        )
    return tuple(out)


def rollout(random, prompt: Prompt, sample: int, length: int) -> Rollout:
    return Rollout(
        id=RolloutId(2**40, "train", 3, prompt.id, sample, 1),
        prompt=prompt,
        start_clock=5,
        finish_clock=2**40,
        tokens=random.integers(0, 99, length),
        sampled=random.random(length) < 0.5,
        logprobs=random.normal(size=length),
        entropies=random.random(length),
        versions=np.sort(random.integers(0, 9, length)),
        drafted=random.random(length) < 0.5,
        kept=Ragged.of_rows(random.integers(0, 99, (length, 3)) - 40) if sample else None,
        argmax_tokens=random.integers(0, 99, length),
        clocks=np.sort(random.integers(5, 2**40, length)),
        finish=list(Finish)[sample],
    )


def assert_equal(one, two) -> None:
    """Field by field, arrays with dtype and bits."""
    assert type(one) is type(two)
    if dataclasses.is_dataclass(one):
        for f in dataclasses.fields(one):
            assert_equal(getattr(one, f.name), getattr(two, f.name))
    elif isinstance(one, np.ndarray):
        assert one.dtype == two.dtype and one.shape == two.shape and one.tobytes() == two.tobytes()
    elif isinstance(one, dict):
        assert list(one) == list(two)
        for name in one:
            assert_equal(one[name], two[name])
    elif isinstance(one, tuple) and not isinstance(one, RolloutId):
        assert len(one) == len(two)
        for a, b in zip(one, two, strict=True):
            assert_equal(a, b)
    else:
        assert one == two


def test_every_field_comes_back(tmp_path):
    groups = made(0)
    RolloutLog(tmp_path).write(12, groups)
    again = rollout_log.read(tmp_path / "step_000012.npz")
    assert_equal(again, groups)
    for one in (
        rollout for group in again for rollout in group.rollouts
    ):  # else each would hold the records of the file
        assert one.records.ids.base is None or one.records.ids.base.size == one.records.ids.size
    with np.load(tmp_path / "step_000012.npz") as file:
        np.testing.assert_array_equal(file["seeds"][1], groups[0].rollouts[1].id.seed())
        assert file["offsets"].tolist() == [0, 4, 4, 11, 15, 19, 19]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["index.jsonl", "step_000012.npz"]


def test_an_empty_step_reads_back(tmp_path):
    RolloutLog(tmp_path).write(1, ())
    assert rollout_log.read(tmp_path / "step_000001.npz") == ()


def test_equal_groups_give_equal_bytes(tmp_path, monkeypatch):
    first = rollout_log.to_bytes(made(0))
    monkeypatch.setattr(time, "time", lambda: 2e9)
    monkeypatch.setattr(time, "localtime", lambda *given: time.gmtime(2e9))
    assert rollout_log.to_bytes(made(0)) == first != rollout_log.to_bytes(made(1))


def test_the_index_says_what_is_there(tmp_path):
    log = RolloutLog(tmp_path / "rollouts")
    for step in (1, 2):
        log.write(step, made(step))
    lines = [json.loads(line) for line in (tmp_path / "rollouts" / "index.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    data = (tmp_path / "rollouts" / lines[1]["file"]).read_bytes()
    assert lines[1] == {
        "step": 2,
        "file": "step_000002.npz",
        "num_groups": 3,
        "num_rollouts": 6,
        "num_tokens": 19,
        "bytes": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
    }


def test_a_damaged_file_is_named(tmp_path):
    file = tmp_path / "step.npz"
    data = rollout_log.to_bytes(made(0))
    for broken in (data[:-30], *(data[:at] + bytes(40) + data[at + 40 :] for at in range(0, len(data) - 40, 97))):
        file.write_bytes(broken)
        with pytest.raises(ValueError, match="step.npz is no rollout log, or is damaged"):
            rollout_log.read(file)
    np.savez(tmp_path / "other.npz", x=np.zeros(3))
    with pytest.raises(ValueError, match="is no rollout log"):
        rollout_log.read(tmp_path / "other.npz")


def record(prompt, reward=0.5, *, scored=True, digest="d"):
    return RolloutId(0, "train", 0, prompt, 0)._asdict() | {
        "digest": digest,
        "scored": scored,
        "reward": reward,
        "components": {},
        "counts": {"unscored": int(not scored)},
    }


def journal(path, *records):
    log = Journal(path)
    for one in records:
        log.write(one)
    log.close()
    return path.stat().st_size


def test_the_journal_leaves_out_a_cut_line(tmp_path):
    records = [record("a", 0.1), record("b", 1 / 3)]
    journal(tmp_path / "rewards.jsonl", *records)
    with open(tmp_path / "rewards.jsonl", "a") as file:
        file.write('{"sample": 2, "rew')
    assert journal_file.read_journal(tmp_path / "rewards.jsonl") == records


def served(path, *keys):
    """What was put aside, in the order in which it is taken; nothing else is there."""
    found = journal_file.read_aside(path)
    out = []
    for prompt, digest in keys:
        id = RolloutId(0, "train", 0, prompt, 0)
        first = found.find(id, digest)
        assert found.take(id, digest) == first
        out.append(first["reward"])
    assert len(found) == 0 and found.find(RolloutId(0, "train", 0, keys[0][0], 0), keys[0][1]) is None
    return out


def test_what_came_after_the_mark_is_set_apart_and_survives_a_second_and_third_kill(tmp_path):
    """Marks at 1 and 2 records; every score after the mark is there once, of equal keys the oldest first."""
    path = tmp_path / "rewards.jsonl"
    mark = journal(path, record("a", 1))
    whole = [record("b", 2), record("c", 3), record("b", 4), record("d", 5, digest="e")]
    journal(path, *whole)
    journal_file.set_apart(path, mark)
    journal_file.set_apart(path, mark)  # killed before the cut
    assert served(path, ("b", "d"), ("b", "d"), ("c", "d"), ("d", "e")) == [2, 4, 3, 5]
    os.truncate(path, mark)
    later = journal(path, whole[0])  # a checkpoint was written here
    journal(path, whole[1])
    journal_file.set_apart(path, later)  # killed again
    os.truncate(path, later)
    assert served(path, ("b", "d"), ("c", "d"), ("d", "e")) == [4, 3, 5]
    journal_file.set_apart(path, mark)  # that checkpoint is damaged: back to the one before
    os.truncate(path, mark)
    assert served(path, ("b", "d"), ("b", "d"), ("c", "d"), ("d", "e")) == [2, 4, 3, 5]
    journal_file.forget_aside(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["rewards.jsonl"]


def test_scores_are_for_the_tokens_they_were_given_for(tmp_path):
    journal(tmp_path / "rewards.jsonl", record("a"))
    journal_file.set_apart(tmp_path / "rewards.jsonl", 0)
    found = journal_file.read_aside(tmp_path / "rewards.jsonl")
    assert found.find(RolloutId(0, "train", 0, "a", 0), "other") is None
    assert found.find(RolloutId(0, "train", 0, "a", 0, 1), "d") is None
    assert len(found) == 1 and len(journal_file.read_aside(tmp_path / "none.jsonl")) == 0


def test_failures_are_kept_beside_scores_and_dropped_where_there_is_no_score(tmp_path):
    path = tmp_path / "rewards.jsonl"
    start = journal(path, record("a"))
    journal(path, record("b", scored=False), record("c", scored=False))
    journal_file.set_apart(path, 0)
    assert len(journal_file.read_aside(path)) == 3
    journal_file.forget_aside(tmp_path)
    journal_file.set_apart(path, start)
    assert not journal_file.aside(path).exists()


@pytest.mark.parametrize("line", ["nonsense", "[1]", '{"run_seed": 0}', json.dumps(record("a") | {"digest": []})[:-3]])
def test_a_line_that_is_no_record_is_refused(tmp_path, line):
    path = tmp_path / "rewards.jsonl"
    journal(path, record("a"))
    with open(path, "a") as file:
        file.write(line + "\n")
    with pytest.raises(ValueError, match="rewards.jsonl: record 2 of those to be read is no record of a score"):
        journal_file.set_apart(path, 0)
    assert not journal_file.aside(path).exists()


def test_ids_and_scores_are_those_of_the_groups(tmp_path):
    groups = made(7)
    RolloutLog(tmp_path).write(1, groups)
    file = tmp_path / "step_000001.npz"
    assert rollout_log.ids(file) == [rollout.id for group in groups for rollout in group.rollouts]
    for scores, group in zip(rollout_log.scores(file), groups, strict=True):
        assert scores.ids == [rollout.id for rollout in group.rollouts]
        assert (scores.prompt.id, scores.prompt.answer) == (group.prompt.id, group.prompt.answer)
        assert scores.prompt.tokens.tobytes() == group.prompt.tokens.tobytes()
        assert scores.rewards.tobytes() == group.rewards.tobytes() and scores.scored.tolist() == group.scored.tolist()
        assert scores.components.keys() == group.components.keys()
        assert scores.accuracies.tobytes() == group.accuracies.tobytes()
