"""Texts of rollouts laid out such that a shared beginning stands once: a prompt, or the turns that conversations share.

A layout is a walk through a tree. A shared stretch stands before all that continues it. Every continuation begins with
its own copy of the last shared token. So each sampled token stands one place behind the token before it in its text, as
in any packed row: there its log-prob is read. A token's `until` is the place behind everything that continues it. Exactly
the tokens before that place see it (kernels/branches.py).

Invariant: a token that is trained on belongs to one rollout. Two rollouts share a token where at most one of them
sampled it, so rollouts of a group stand apart even where they are equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from jaxrl_post.ring.types import Group, Rollout


@dataclass(frozen=True)
class Layout:
    """Texts of some rollouts of a prompt in one stretch of n tokens.

    - tokens, positions, int32[n]: positions are those in the token's own text
    - until, int32[n]: the place in the stretch behind the last token that sees this one
    - owners, int32[n]: whose token it is, as a place among the rollouts
    - columns: for each rollout, int32 places of its tokens
    """

    rollouts: tuple[Rollout, ...]
    tokens: np.ndarray
    positions: np.ndarray
    until: np.ndarray
    owners: np.ndarray
    columns: tuple[Int[np.ndarray, " T"], ...]

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def flat(self) -> int:
        """How many tokens the texts have one after another."""
        return sum(one.prompt.tokens.size + len(one) for one in self.rollouts)


def alone(rollout: Rollout) -> Layout:
    """Returns a rollout's text, prompt and answer."""
    prompt, size = rollout.prompt.tokens.size, rollout.prompt.tokens.size + len(rollout)
    return Layout(
        rollouts=(rollout,),
        tokens=np.concatenate([rollout.prompt.tokens, rollout.tokens]),
        positions=np.arange(size),
        until=np.full(size, size),
        owners=np.zeros(size, np.int32),
        columns=(np.arange(prompt, size),),
    )


def together(rollouts: Sequence[Rollout]) -> Layout:
    """Returns the texts of rollouts of one prompt with each shared beginning once."""
    if len(rollouts) == 1:
        return alone(rollouts[0])
    prompt = rollouts[0].prompt.tokens
    sizes = [prompt.size + len(one) for one in rollouts]
    texts, sampled = np.full((len(rollouts), max(sizes)), -1, np.int32), np.zeros((len(rollouts), max(sizes)), bool)
    for own, trained, one, size in zip(texts, sampled, rollouts, sizes, strict=True):
        own[: prompt.size], own[prompt.size : size], trained[prompt.size : size] = prompt, one.tokens, one.sampled
    pieces: list[tuple[int, int, int, int, list[int]]] = []  # place, until, first and last position, of whom
    columns = [np.zeros(size, np.int32) for size in sizes]

    def walk(members: list[int], begin: int, place: int) -> int:
        """Lays out what `members` have from position `begin` on. They are equal before and there. Returns the end."""
        upto = _shared(texts[members], sampled[members], begin)
        if len(members) == 1:
            first, last, rest = begin, sizes[members[0]], []
        else:
            first, last, rest = begin, upto - 1, _continued(texts, sampled, members, upto)
        for member in members:
            columns[member][first:last] = place + np.arange(last - first)
        at, end = len(pieces), place + last - first
        pieces.append((place, end, first, last, members))
        for some in rest:
            end = walk(some, upto - 1, end)
        pieces[at] = (place, end, first, last, members)
        return end

    made = np.zeros((4, walk(list(range(len(rollouts))), 0, 0)), np.int32)
    for place, until, first, last, members in pieces:
        own, span = sampled[members, first:last], slice(place, place + last - first)
        owners = np.array(members)[np.argmax(own, axis=0)]  # the first member's where none of them sampled it
        for row, values in zip(
            made, (texts[members[0], first:last], np.arange(first, last), until, owners), strict=True
        ):
            row[span] = values
    return Layout(tuple(rollouts), *made, tuple(places[prompt.size :] for places in columns))


def _shared(texts: np.ndarray, sampled: np.ndarray, begin: int) -> int:
    """Returns the position from which on texts, equal up to `begin`, are no longer the same tokens, shared by all."""
    same = (texts == texts[0]).all(axis=0) & (texts[0] >= 0) & (sampled.sum(axis=0) <= 1)
    same[: begin + 1] = True
    return len(same) if same.all() else int(np.argmin(same))


def _continued(texts: np.ndarray, sampled: np.ndarray, members: list[int], upto: int) -> list[list[int]]:
    """Returns `members` by how they go on at position `upto`. Two that sampled their token there go on apart.

    The first ones are those whose copy of the token before is trained on, if any.
    """
    out: list[list[int]] = []
    for member in members:
        token, own = (int(texts[member, upto]), bool(sampled[member, upto])) if upto < texts.shape[1] else (-1, False)
        for some in out:
            there = texts[some[0], upto] if upto < texts.shape[1] else -1
            if token >= 0 and there == token and not (own and sampled[some, upto].any()):
                some.append(member)
                break
        else:
            out.append([member])
    # One of them may have sampled the last shared token. Its copy must stand right behind the token before.
    return sorted(out, key=lambda some: not sampled[some, upto - 1].any())


def layouts(groups: Sequence[Group], tokens: int) -> list[Layout]:
    """Returns every rollout's text once, in the order of groups and rollouts.

    Rollouts of a group are together as far as their texts take at most `tokens`. A longer text stands alone.
    """
    return [together(some) for group in groups for some in _parts(group.rollouts, tokens)]


def _parts(rollouts: Sequence[Rollout], tokens: int) -> list[list[Rollout]]:
    out: list[list[Rollout]] = []
    room = 0
    for rollout in rollouts:
        prompt, more = rollout.prompt.tokens.size, 1 + len(rollout)  # its answer, and the last token of the prompt
        if not out or more > room:
            out, room = [*out, []], tokens - (prompt - 1)
        out[-1].append(rollout)
        room -= more
    return out
