"""Twins of the drafters in plain Python: dictionaries of contexts, lists of suffixes, and hashed tables of Python
integers.

They share no code with the drafters, only the names of classes (column and confidence).
"""

from __future__ import annotations

from collections import Counter

ORDERS = 6
WORD = 1 << 32


def contexts(answer, context):
    """Yields (context, token) for every token of a rollout, for each order with enough tokens before it."""
    text = [int(t) for t in context] + [int(t) for t in answer]
    for at in range(len(context), len(text)):
        for order in range(1, ORDERS + 1):
            if at >= order:
                yield tuple(text[at - order : at]), text[at]


def confidence(times, seen):
    share = times / (seen + 1)
    return 0 if share < 0.4 - 1e-12 else 1 if share < 0.6 - 1e-12 else 2 if share < 0.8 - 1e-12 else 3


def winners(answers, context):
    """Returns context -> (token, confidence, times seen) of one epoch."""
    after = {}
    for answer in answers:
        for seen, token in contexts(answer, context):
            after.setdefault(seen, []).append(token)
    return {seen: most_frequent(tokens) for seen, tokens in after.items()}


def most_frequent(tokens):
    """Returns (token, confidence, times seen) from the tokens that followed a context."""
    token, times = min(Counter(tokens).items(), key=lambda item: (-item[1], item[0]))
    return token, confidence(times, len(tokens)), len(tokens)


def history(epochs, context):
    """Returns context -> (token, confidence, times seen), newer epochs over older ones, without contexts that back-off
    replaces."""
    every = {}
    for answers in epochs:
        every.update(winners(answers, context))
    return {
        seen: found
        for seen, found in every.items()
        if len(seen) == 1 or every[seen[1:]][0] != found[0] or every[seen[1:]][1] < found[1]
    }


def voted(old, token):
    """Returns (token, confidence) of a context after one more sighting. `old`: the same before, or None."""
    if old and old[0] == token:
        return token, min(old[1] + 1, 3)
    return (old[0], old[1] - 1) if old and old[1] else (token, 0)


class Live(dict):
    """Context -> (token, confidence) of running rollouts. Tokens settled in one step are learned at once."""

    def learn(self, news):
        new = {}
        for seen, token in news:
            told, sure = voted(self.get(seen), token)
            new[seen] = max(new.get(seen, (-1, -1)), (sure, told))
        self.update({seen: (token, sure) for seen, (sure, token) in new.items()})


def candidates(text, sources, rates):
    """Returns (rate, -column, token, class) of every entry that the sources (context -> (token, confidence, ..)) have,
    best first."""
    out = []
    for number, source in enumerate(sources):
        for order in range(ORDERS, 0, -1):
            found = source.get(tuple(text[-order:])) if len(text) >= order else None
            if found:
                column = number * ORDERS + ORDERS - order
                out.append((float(rates[column * 4 + found[1]]), -column, int(found[0]), column * 4 + found[1]))
    return sorted(out, reverse=True)


def draft(text, sources, rates, width, length, branch=0):
    """Returns the chain of at most `width` tokens behind a text, its values, and the candidates for the first token."""
    text, chain, values = [int(t) for t in text], [], []
    first = found = candidates(text, sources, rates)
    value = 1.0
    while len(chain) < width and len(text) < length:
        distinct = list(dict.fromkeys(token for _, _, token, _ in found))
        place = 0 if chain else branch
        if place >= len(distinct):
            break
        kind = next(kind for _, _, token, kind in found if token == distinct[place])
        value *= float(rates[len(rates) // 2 + kind])
        chain.append(distinct[place])
        values.append(value)
        text.append(distinct[place])
        found = candidates(text, sources, rates)
    return chain, values, first


def suffix_draft(text, answers, context, weights, window, length, branch=0):
    """Returns the paper's draft, and the first token of each match length: {match length: token}."""
    pool = []
    weight = []
    for answer, w in zip(answers, weights):
        part = [int(t) for t in context][-7:] + [int(t) for t in answer] + [-1]
        pool, weight = pool + part, weight + [w] * len(part)
    order = sorted(range(len(pool)), key=lambda i: (pool[i : i + 32], i))
    chains = {}
    for size in range(7, 2, -1):
        mine = [i for i in order if size <= len(text) and pool[i : i + size] == [int(t) for t in text[-size:]]]
        total, run = sum(weight[i] for i in mine), 0
        for i in mine:
            run += weight[i]
            if 2 * run >= total:
                ahead = pool[i + size :]
                chains[size] = ahead[: ahead.index(-1)]
                break
    chains = {size: chain for size, chain in chains.items() if chain and len(text) < length}
    distinct = list(dict.fromkeys(chain[0] for chain in chains.values()))
    if branch >= len(distinct):
        return [], {size: chain[0] for size, chain in chains.items()}
    chain = next(chain for chain in chains.values() if chain[0] == distinct[branch])
    return chain[: min(window, length - len(text))], {size: chain[0] for size, chain in chains.items()}


def stir(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D % WORD
    x = (x ^ (x >> 15)) * 0x846CA68B % WORD
    return x ^ (x >> 16)


def hashed(context, salt):
    """Returns (key, fingerprint) of a context, in Python integers."""
    state = 0x9E3779B9
    for order, token in enumerate(reversed(context), 1):
        state = stir(state ^ (token << 3 | order))
    key = stir(state ^ salt)
    return key, max((key * 0x9E3779B1 % WORD) >> 20, 1)


class Hashed:
    """A table of `size` entries as a list of integers, read like a dict of contexts."""

    def __init__(self, size, salt, entries=None):
        self.size, self.salt = size, salt
        self.entries = [0] * size if entries is None else [int(e) for e in entries]

    def get(self, context):
        key, mark = hashed(context, self.salt)
        entry = self.entries[key % self.size] if self.size else 0
        return (entry % (1 << 18), entry >> 18 & 3) if entry >> 20 == mark else None

    def learn(self, news):
        new = {}
        for seen, token in news:
            key, mark = hashed(seen, self.salt)
            told, sure = voted(self.get(seen), token)
            new.setdefault(key % self.size, []).append(mark << 20 | sure << 18 | told)
        for bucket, entries in new.items():
            self.entries[bucket] = max(entries)
