"""A drafter that reads its drafts from scripts, so that a test decides which drafts are right.

For each prompt it has the texts of its rollouts (`truth`), by which it recognises a slot's text. It has the drafts at
each position (`said`, and `cloned` for clones). A slot whose text is not in `truth` gets no draft. It satisfies
engine/speculation/interface.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxrl_post.engine.host.wire import OFFSET, SIZE, UPLOAD
from jaxrl_post.engine.speculation.interface import Counts, Drafter, Drafts, tally
from jaxrl_post.engine.speculation.speculation import Drafting

BLANK = -1


class Tables(NamedTuple):
    """`truth`, `said` and `cloned` int32[N]: texts of `length` tokens, a prompt's end to end. rates f32[1]."""

    truth: object
    said: object
    cloned: object
    rates: object


class Script(NamedTuple):
    """Texts (prompt and rollout) of a prompt's rollouts, and the drafts in their place: int32[G, length] each."""

    epoch: int
    truth: np.ndarray
    said: np.ndarray
    cloned: np.ndarray

    @property
    def lengths(self) -> np.ndarray:
        """Returns lengths as history.Past does; the engine weighs drafts by them."""
        return np.arange(len(self.truth)) + 3


@dataclass(frozen=True, kw_only=True)
class Scripted(Drafter):
    """A drafter for `most` rollouts of a prompt, with texts of `length` positions, the engine's max_length.

    Branch b follows the b-th script that agrees with the slot's text, in turn."""

    length: int
    most: int
    watches: bool = True

    @property
    def priors(self):
        return np.full(2, 0.5, np.float32)

    def empty(self, slots):
        blank = jnp.full(self.entries, BLANK, jnp.int32)
        return Tables(blank, blank, blank, jnp.asarray(self.priors)), Counts(jnp.zeros((2, 2), jnp.int32))

    def index(self, past, prompt):
        return tuple(text.reshape(-1) for text in past[0][1:])

    def propose(self, tables, memory, context):
        tokens, known, place, branch = context
        _, T = tokens.shape
        number, spread = jnp.arange(self.most)[None, :, None], jnp.arange(T)
        at = jnp.clip(place[:, OFFSET, None, None] + number * self.length + spread, 0, self.entries - 1)
        there = number[..., 0] * self.length < place[:, SIZE, None]
        agree = there & jnp.all((tables.truth[at] == tokens[:, None]) | (spread >= known[:, None, None]), axis=2)
        count = jnp.sum(agree, axis=1)
        wanted = branch % jnp.maximum(count, 1)
        chosen = agree & (jnp.cumsum(agree, axis=1) - 1 == wanted[:, None])
        row = jnp.argmax(chosen, axis=1)
        ahead = known[:, None] + jnp.arange(self.width)
        where = jnp.clip(place[:, OFFSET, None] + row[:, None] * self.length + ahead, 0, self.entries - 1)
        real = (count > 0)[:, None] & (ahead < T)
        chain = jnp.where(real, jnp.where(branch[:, None] > 0, tables.cloned[where], tables.said[where]), BLANK)
        chain = jnp.where(jnp.cumsum(chain < 0, axis=1) > 0, BLANK, chain)
        value = jnp.where(chain >= 0, 0.95 ** (1.0 + jnp.arange(self.width)), 0.0)
        first = chain[:, :1]
        return Drafts(
            chain,
            jnp.sum(chain >= 0, axis=1, dtype=jnp.int32),
            value,
            first,
            jnp.zeros_like(first),
            jnp.minimum(first[:, 0], 0),
        )

    def observe(self, memory, drafts, step):
        return Counts(tally(memory.counts, drafts, step))


class Scripts:
    """Scripts of all prompts, from known rollouts; `Drafting` calls it as `past`.

    A method below must choose the drafts first. Behind the end of a rollout, and behind its limit, drafts are random.
    """

    def __init__(self, answers, *, length: int, vocab: int, eos: int):
        self._length, self._vocab, self._eos = length, vocab, eos
        self._truth: dict[str, list[np.ndarray]] = {}
        self._said = self._cloned = None
        noise = np.random.default_rng(0)
        for rollout in sorted(answers.values(), key=lambda rollout: rollout.id):
            text = np.concatenate([rollout.prompt.tokens, rollout.tokens, noise.integers(0, vocab, length)])
            self._truth.setdefault(rollout.prompt.id, []).append(text[:length].astype(np.int32))

    def __call__(self, prompt_id: str):
        if prompt_id not in self._truth:
            return ()
        truth = np.stack(self._truth[prompt_id])
        said = self._said(truth)
        cloned = said if self._cloned is None else self._cloned(truth)
        return (Script(0, truth, said.astype(np.int32), cloned.astype(np.int32)),)

    def perfect(self):
        self._cloned, self._said = None, lambda truth: truth

    def random(self):
        noise = np.random.default_rng(1)
        self._cloned, self._said = None, lambda truth: noise.integers(0, self._vocab, truth.shape)

    def adversarial(self):
        """Drafts right tokens, except at every third position."""
        wrong = np.arange(self._length) % 3 == 1
        self._cloned, self._said = None, lambda truth: np.where(wrong, (truth + 1) % self._vocab, truth)

    def early(self):
        """Drafts right tokens, except that every fourth one would end the rollout."""
        ends = np.arange(self._length) % 4 == 2
        self._cloned, self._said = None, lambda truth: np.where(ends, self._eos, truth)

    def better_clones(self):
        """Drafts wrong tokens, and right ones for clones."""
        self.random()
        self._cloned = lambda truth: truth

    def drafting(self, *, width: int, slots: int, replicas: int = 1, clones: bool = False) -> Drafting:
        most = max(map(len, self._truth.values()))
        room = -(-most * self._length // UPLOAD) * UPLOAD * slots
        return Drafting(
            Scripted(width=width, length=self._length, most=most, entries=room),
            replicas=replicas,
            slots=slots,
            past=self,
            clones=clones,
        )


KINDS = ("perfect", "random", "adversarial", "early", "better_clones")
