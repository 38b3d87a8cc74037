"""A drafter on hashed n-grams on the device. It looks up the last 6 to 1 tokens in up to three tables.

The tables: the live table of running rollouts, the table of the prompt's past rollouts, and the table over all prompts.
Among the entries found, the class with the best rate is chosen, and the look-up is repeated behind each draft.

The live table has a row for each prompt, which learns the settled tokens of its running rollouts, for all orders. An
entry that agrees gains confidence. An entry of this context with another token loses some. An entry without confidence,
or of another context, is overwritten. Invariant: rows depend on the texts and on the step that settled each token, not
on the order of slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxrl_post.engine.host.wire import ALL_OFFSET, ALL_SIZE, OFFSET, ROW, SIZE, Entry
from jaxrl_post.engine.speculation import corpus, ngrams
from jaxrl_post.engine.speculation.interface import Context, Drafter, Drafts, Step, best, nth_distinct, tally
from jaxrl_post.ring.history import Past
from jaxrl_post.ring.types import Prompt

ORDERS, LEVELS = ngrams.ORDERS, ngrams.LEVELS
CHUNK = 16  # tokens of a text that are learned at once when a sequence enters a slot
SALTS = {"live": ngrams.LIVE, "own": ngrams.OWN, "all": ngrams.ALL}
_PRIORS = {"live": 0.4, "own": 0.45, "all": 0.35}


class Tables(NamedTuple):
    """The tables of prompts and of all prompts, end to end: `entries` uint32[N]. `rates` f32[C]: acceptance rate of
    each class."""

    entries: Array
    rates: Array


class Memory(NamedTuple):
    """`live` uint32[rows * size]: the live table, a row for each prompt. `counts` int32[2, C]."""

    live: Array
    counts: Array


class _Look(NamedTuple):
    """What the tables have for one position, [S, K]: token or -1, class, and the rate to choose by."""

    token: Array
    kind: Array
    rate: Array


@dataclass(frozen=True, kw_only=True)
class Backoff(Drafter):
    """A Drafter with back-off from 6 tokens to 1.

    Column k of K = sources * orders is source k // 6 and order 6 - k % 6. Its classes are k * 4 + confidence; K * 4
    more classes count only chosen drafts. `entries`: length of the flat array for prompts and all prompts. `live`:
    entries of a row of the live table. `siblings`: rollouts of a prompt share a row; else each slot has its own row,
    and the column ROW is not read. `watches`: argmax tokens are learned, else the tokens themselves."""

    live: int
    sources: tuple[str, ...] = ("live", "own", "all")
    siblings: bool = True
    watches: bool = True

    def __post_init__(self):
        for name in ("width", "live"):
            if getattr(self, name) < 1:
                raise ValueError(f"drafter: {name} is {getattr(self, name)}, at least 1")
        if len(self.sources) > 1 and self.entries < 1:
            raise ValueError(f"drafter: {self.entries} entries for the tables of prompts, at least 1")

    @property
    def priors(self) -> Float[np.ndarray, " C"]:
        """Returns rates that are higher for a longer match and for more confidence."""
        order, level = np.arange(ORDERS, 0, -1)[:, None] / ORDERS, np.arange(LEVELS) / (LEVELS - 1)
        once = np.stack([_PRIORS[name] * (0.3 + 0.7 * order) * (0.4 + 1.2 * level) for name in self.sources]).reshape(
            -1
        )
        return np.concatenate([once, once]).astype(np.float32)

    def empty(self, slots: int) -> tuple[Tables, Memory]:
        tables = Tables(jnp.zeros(max(self.entries, 1), jnp.uint32), jnp.asarray(self.priors))
        return tables, Memory(jnp.zeros(slots * self.live, jnp.uint32), jnp.zeros((2, self.classes), jnp.int32))

    def enter(self, memory: Memory, entry: Entry) -> Memory:
        argmax_tokens = entry.argmax_tokens if self.watches else entry.tokens
        rows = memory.live.shape[0] // self.live
        row, fresh = (entry.row, entry.fresh > 0) if self.siblings else (entry.slot, entry.slot >= 0)
        row = jnp.where((entry.slot < rows) & (fresh | (entry.seen < entry.num_tokens)), row, rows)
        start = jnp.where(fresh, 0, entry.seen)
        stop = jnp.where(row < rows, entry.num_tokens, start)

        def more(carry):
            return jnp.any(carry[0] < stop)

        def learn(carry):
            start, live = carry
            anew = jnp.where(fresh & (start == 0), row, rows)  # inside the loop, which mostly runs for no text
            live = live.reshape(rows, self.live).at[anew].set(0, mode="drop").reshape(-1)
            return start + CHUNK, self._learn(live, row, entry.tokens, argmax_tokens, start, stop, CHUNK)

        return memory._replace(live=jax.lax.while_loop(more, learn, (start, memory.live))[1])

    def index(self, past: Sequence[Past], prompt: Prompt) -> tuple[np.ndarray, ...]:
        return (corpus.grams(past, prompt),) if "own" in self.sources else ()

    def propose(self, tables: Tables, memory: Memory, context: Context) -> Drafts:
        """Returns drafts. A slot that does not run gets drafts without use."""
        tokens, num_tokens, place, branch = context
        S, T = tokens.shape
        back = num_tokens[:, None] - 1 - jnp.arange(ORDERS)
        newest = jnp.take_along_axis(tokens, jnp.clip(back, 0, T - 1), axis=1)
        homes = self._homes(place, S)
        look = self._look(tables, memory, homes, newest, num_tokens)
        token, column = nth_distinct(look.token, look.rate, branch)
        token = jnp.where(num_tokens < T, token, -1)
        kind, worth = self._worth(tables, look, column)
        value = jnp.where(token >= 0, worth, 0)

        def further(carry, number):
            newest, token, value = carry
            newest = jnp.concatenate([jnp.maximum(token, 0)[:, None], newest[:, :-1]], axis=1)
            found = self._look(tables, memory, homes, newest, num_tokens + number)
            likeliest, column = best(found.token, found.rate)
            token = jnp.where((token >= 0) & (num_tokens + number < T), likeliest, -1)
            value = jnp.where(token >= 0, value * self._worth(tables, found, column)[1], 0)
            return (newest, token, value), (token, value)

        rest = jax.lax.scan(further, (newest, token, value), jnp.arange(1, self.width))[1]
        chain, values = (jnp.concatenate([a[:, None], b.T], axis=1) for a, b in zip((token, value), rest))
        return Drafts(
            chain,
            jnp.sum(chain >= 0, axis=1, dtype=jnp.int32),
            values,
            look.token,
            look.kind,
            jnp.where((token >= 0) & (branch == 0), kind, -1),
        )

    def _worth(self, tables: Tables, look: _Look, column: Array) -> tuple[Array, Array]:
        """Returns, [S] each, the class in a column and its rate where it is chosen."""
        kind = jnp.take_along_axis(look.kind, column[:, None], axis=1)[:, 0]
        return kind, tables.rates[kind + self.classes // 2]

    def observe(self, memory: Memory, drafts: Drafts, step: Step) -> Memory:
        argmax_tokens = step.argmax_tokens if self.watches else step.tokens
        row = step.place[:, ROW] if self.siblings else jnp.arange(step.tokens.shape[0])
        stop = jnp.where(step.running, step.after, step.before)
        learned = self._learn(memory.live, row, step.tokens, argmax_tokens, step.before, stop, self.width + 1)
        return Memory(learned, tally(memory.counts, drafts, step))

    def _homes(self, place: Array, S: int) -> tuple[Array, Array, Array]:
        """Returns rows of the live table [S], and offsets and sizes uint32[S, sources - 1, 1] in `entries`."""
        row = place[:, ROW] if self.siblings else jnp.arange(S)
        at = place.astype(jnp.uint32)
        homes = {"own": (OFFSET, SIZE), "all": (ALL_OFFSET, ALL_SIZE)}
        offsets, sizes = (at[:, [homes[name][i] for name in self.sources[1:]], None] for i in (0, 1))
        return row, offsets, sizes

    def _look(self, tables: Tables, memory: Memory, homes: tuple, newest: Array, length: Array) -> _Look:
        """Looks contexts up in all tables. newest [S, orders]: the latest token first. `length`: tokens in the text."""
        row, offsets, sizes = homes
        S, K = newest.shape[0], len(self.sources) * ORDERS
        hashed = ngrams.hashes(jnp, [newest[:, i].astype(jnp.uint32) for i in range(ORDERS)])
        hashed = jnp.stack(hashed[::-1], axis=-1)  # the longest first
        keys = jnp.stack([ngrams.key(jnp, hashed, SALTS[name]) for name in self.sources], axis=1)
        mine = row[:, None].astype(jnp.uint32) * jnp.uint32(self.live)
        entry = memory.live.at[ngrams.bucket(jnp, keys[:, 0], mine, jnp.uint32(self.live))].get(mode="clip")[:, None]
        if self.sources[1:]:
            at = ngrams.bucket(jnp, keys[:, 1:], offsets, sizes)
            read = jnp.where(sizes > 0, tables.entries.at[at].get(mode="clip"), jnp.uint32(0))
            entry = jnp.concatenate([entry, read], axis=1)
        mark, sure, token = ngrams.unpack(jnp, entry)
        found = (mark == ngrams.fingerprint(jnp, keys)) & (length[:, None] >= jnp.arange(ORDERS, 0, -1))[:, None]
        token = jnp.where(found, token.astype(jnp.int32), -1).reshape(S, K)
        kind = sure.astype(jnp.int32).reshape(S, K) + LEVELS * jnp.arange(K, dtype=jnp.int32)
        return _Look(token, kind, tables.rates[kind])

    def _learn(
        self, live: Array, row: Array, tokens: Array, argmax_tokens: Array, start: Array, stop: Array, chunk: int
    ) -> Array:
        """Returns the live table after it learned argmax_tokens[i, start[i]:stop[i]], each behind the tokens before it.

        At most `chunk` tokens of each text are learned. A row beyond the last is dropped. Of several entries for one
        bucket in one call, the largest stays, whatever their order."""
        T, total = tokens.shape[1], live.shape[0]
        at = start[:, None] - ORDERS + jnp.arange(chunk + ORDERS)
        inside = jnp.clip(at, 0, T - 1)
        text, learned = (jnp.take_along_axis(x, inside, axis=1).astype(jnp.uint32) for x in (tokens, argmax_tokens))
        hashed = ngrams.hashes(jnp, [text[:, i : i + chunk] for i in reversed(range(ORDERS))])
        keys = ngrams.key(jnp, jnp.stack(hashed, axis=-1), ngrams.LIVE)  # [I, chunk, orders]
        token, where = learned[:, ORDERS:, None], at[:, ORDERS:]
        real = (where < jnp.minimum(stop, T)[:, None])[..., None] & (where[..., None] >= jnp.arange(1, ORDERS + 1))
        real &= (row < total // self.live)[:, None, None]
        home = (row.astype(jnp.uint32) * jnp.uint32(self.live))[:, None, None]
        bucket = ngrams.bucket(jnp, keys, home, jnp.uint32(self.live))
        mark = ngrams.fingerprint(jnp, keys)
        owner, sure, held = ngrams.unpack(jnp, live.at[bucket].get(mode="clip"))
        agree = (owner == mark) & (held == token)
        doubted = (owner == mark) & ~agree & (sure > 0)
        token = jnp.where(doubted, held, token)
        sure = jnp.where(
            agree, jnp.minimum(sure + 1, jnp.uint32(LEVELS - 1)), jnp.where(doubted, sure - 1, jnp.uint32(0))
        )
        bucket = jnp.where(real, bucket, jnp.uint32(total))
        entry = ngrams.pack(jnp, mark, sure, token)
        return live.at[bucket].set(jnp.uint32(0), mode="drop").at[bucket].max(entry, mode="drop")
