"""Text in pieces: however tokens arrive, the pieces are the text of the whole rollout, and nothing is taken back."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import pytest

from jaxrl_post.ring.types import Finish, Sampling
from jaxrl_post.serve.forms import RunningText

EOS = 256


def decode(ids, skip_special=True, before=()):
    """Bytes as tokens. Id 256 ends a text and is skipped."""
    return bytes(i for i in ids if i != EOS).decode("utf-8", errors="replace")


def first_stop(text, strings):
    """The text before the stop string that begins first, by trying every place."""
    return next((text[:i] for i in range(len(text)) for one in strings if text.startswith(one, i)), None)


@hypothesis.given(
    st.text(alphabet="ab#é漢🙂", max_size=12),
    st.lists(st.text(alphabet="ab#é", min_size=1, max_size=3), max_size=3),
    st.lists(st.integers(1, 4), max_size=30),
)
def test_pieces_are_the_whole(text, strings, sizes):
    law = Sampling(stop_strings=tuple(strings), eos_ids=(EOS,))
    tokens = list(text.encode())
    # the engine ends a rollout at the first token that completes a stop string
    ends = next((n for n in range(1, len(tokens) + 1) if any(s in decode(tokens[:n]) for s in strings)), None)
    tokens = tokens[:ends] if ends else [*tokens, EOS]
    expected = first_stop(decode(tokens), strings) if ends else text
    running, pieces, place = RunningText(decode, law), [], 0
    for size in sizes:
        place += size
        if place >= len(tokens):
            break
        pieces.append(running.more(tokens[:place]))
        assert expected.startswith("".join(pieces)), "a piece was told that the text does not have"
    last, reason = running.rest(tokens, Finish.STOP if ends else Finish.EOS)
    assert "".join([*pieces, last]) == expected
    assert (reason in strings) if ends else reason is None


@pytest.mark.parametrize(
    "tokens, finish, text, reason",
    [
        ([97, 98], Finish.LENGTH, "ab", None),
        ([97, 98], Finish.STOP, "a", 98),  # by a stop id
        ([97, EOS], Finish.EOS, "a", None),
        ([0xE6, 0xBC], Finish.LENGTH, "\ufffd", None),  # a character that never became whole
    ],
)
def test_how_a_rollout_ends(tokens, finish, text, reason):
    assert RunningText(decode, Sampling(stop_ids=(98,), eos_ids=(EOS,))).rest(tokens, finish) == (text, reason)


def test_the_beginning_of_a_stop_string_is_held_back():
    running = RunningText(decode, Sampling(stop_strings=("##!",)))
    assert [running.more(list(text.encode())) for text in ("a#", "a##", "a##b", "a##b#")] == ["a", "", "##b", ""]
