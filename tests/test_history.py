"""The record of past answers against a plain list of what was recorded; its bound against what Python really holds."""

import gc
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_post.ring.history import OVERHEAD, History
from jaxrl_post.ring.types import Finish, Group, Prompt, Rollout, RolloutId
from jaxrl_post.runs.checkpoint import host_state


def group(prompt, epoch, *, answers=2, seed=0, longest=6):
    """Answers of random lengths, 0 among them, of several versions; the last token of each was observed."""
    noise = np.random.default_rng((seed, epoch, hash_of(prompt)))
    about = Prompt(id=prompt, tokens=[1], source="s")
    rollouts = []
    for sample in range(answers):
        n = int(noise.integers(0, longest + 1))
        zeros = np.zeros(n)
        rollouts.append(
            Rollout(
                id=RolloutId(0, "train", epoch, prompt, sample),
                prompt=about,
                tokens=noise.integers(0, 99, n),
                argmax_tokens=noise.integers(0, 99, n),
                sampled=np.arange(n) < max(n - 1, 0),
                logprobs=zeros,
                entropies=zeros,
                drafted=zeros,
                start_clock=0,
                versions=np.sort(noise.integers(0, 5, n)),
                finish=Finish.EOS,
                finish_clock=0,
            )
        )
    return Group(
        prompt=about, rollouts=tuple(rollouts), rewards=noise.random(answers), scored=noise.random(answers) < 0.8
    )


def hash_of(text):
    return sum(ord(c) * 31**i for i, c in enumerate(text))


def told(history, prompt):
    """Everything of() says, as plain values."""
    return [
        (
            past.epoch,
            [past.rollout_tokens(i).tolist() for i in range(len(past.rewards))],
            past.lengths.tolist(),
            [text.tolist() for text in past.texts_to_learn],
            past.rewards.tolist(),
            past.scored.tolist(),
            past.versions.tolist(),
        )
        for past in history.of(prompt)
    ]


def expected(group):
    versions = [int(r.versions[r.sampled][-1]) if r.sampled.any() else -1 for r in group.rollouts]
    return (
        group.rollouts[0].id.epoch,
        [r.tokens.tolist() for r in group.rollouts],
        [len(r) for r in group.rollouts],
        [r.argmax_tokens.tolist() for r in group.rollouts],
        group.rewards.tolist(),
        group.scored.tolist(),
        versions,
    )


def test_the_last_epochs_of_every_prompt_newest_first():
    history = History(epochs=2, max_bytes=1 << 20)
    recorded = [group(prompt, epoch) for epoch in range(4) for prompt in "abc" if (prompt, epoch) != ("b", 3)]
    for one in recorded:
        history.record(one)
    assert told(history, "a") == [expected(group("a", 3)), expected(group("a", 2))]
    assert told(history, "b") == [expected(group("b", 2)), expected(group("b", 1))]
    assert told(history, "z") == [] and len(history) == 6
    assert history.metrics() == {"history/num_groups": 6.0, "history/bytes": float(history.nbytes)}
    again = group("a", 3, seed=1)
    history.record(again)
    assert told(history, "a") == [expected(again), expected(group("a", 2))] and len(history) == 6
    with pytest.raises(ValueError, match="read-only"):
        history.of("a")[0].tokens[0] = 1


def test_zero_epochs_remember_nothing():
    history = History(epochs=0, max_bytes=1 << 20)
    history.record(group("a", 0))
    assert len(history) == 0 == history.nbytes and history.of("a") == ()


@settings(max_examples=40)
@given(
    visits=st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 3), st.integers(1, 3)), max_size=14),
    room=st.integers(0, 4),
    cut=st.integers(0, 14),
)
def test_oldest_first_out_and_a_restored_history_goes_on_alike(visits, room, cut, tmp_path_factory):
    """Against a list with the same two rules, looked at after every record; saved and restored in the middle."""
    limit = room * (OVERHEAD + 80)
    history, kept = History(epochs=2, max_bytes=limit), []
    for place, (prompt, epoch, answers) in enumerate(visits):
        if place == cut:
            folder = tmp_path_factory.mktemp("history") / "state"
            host_state.write_state(folder, history.state_dict())
            history = History(epochs=2, max_bytes=limit)
            history.load_state_dict(host_state.read_state(folder))
        new = group(prompt, epoch, answers=answers)
        history.record(new)
        kept = [g for g in kept if (g.prompt.id, g.rollouts[0].id.epoch) != (prompt, epoch)] + [new]
        newest = max(g.rollouts[0].id.epoch for g in kept if g.prompt.id == prompt)
        kept = [g for g in kept if g.prompt.id != prompt or g.rollouts[0].id.epoch > newest - 2]
        while sum(map(size, kept)) > limit:
            kept.pop(0)
        assert history.nbytes == sum(map(size, kept)) <= limit
        for name in "abcd":
            assert told(history, name) == [expected(g) for g in reversed(kept) if g.prompt.id == name]


def size(group):
    answers = len(group.rollouts)
    return sum(8 * len(r) for r in group.rollouts) + 8 * (answers + 1) + 9 * answers + len(group.prompt.id) + OVERHEAD


def test_every_group_of_a_restored_history_is_as_it_was():
    """Groups of other sizes lie end to end in the state."""
    history, other = History(epochs=2, max_bytes=1 << 20), History(epochs=2, max_bytes=1 << 20)
    for prompt, epoch, answers in (("a", 0, 2), ("b", 0, 3), ("a", 1, 1), ("c", 0, 4)):
        history.record(group(prompt, epoch, answers=answers))
    other.load_state_dict(history.state_dict())
    assert [told(other, name) for name in "abc"] == [told(history, name) for name in "abc"]
    assert (other.nbytes, len(other)) == (history.nbytes, 4)


def test_a_smaller_bound_on_loading_drops_the_oldest():
    history, small = History(epochs=3, max_bytes=1 << 20), History(epochs=3, max_bytes=2 * (OVERHEAD + 128))
    for epoch in range(3):
        history.record(group("a", epoch))
    small.load_state_dict(history.state_dict())
    assert [past.epoch for past in small.of("a")] == [2, 1]


def test_the_bound_holds_for_what_python_holds():
    """200 groups of 8 answers of up to 40 tokens into 256 KiB."""
    gc.collect()
    tracemalloc.start()
    history = History(epochs=2, max_bytes=1 << 18)
    for n in range(200):
        history.record(group(f"prompt-{n}", 0, answers=8, longest=40))
    gc.collect()
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert 0.9 * (1 << 18) < history.nbytes <= 1 << 18
    assert 0.5 * history.nbytes < held < 1.05 * history.nbytes
