"""Recurrent layers under the row engine: the bits of a row, however slots, drafts, budgets and restarts divide the steps.

The twin computes each text by itself: the convolution and the rule by loops in numpy's float64. The loop in jnp and both
kernels, which are interpreted, are held to it.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post.engine import recurrent_rows
from jaxrl_post.engine.recurrent_rows import SlotRows
from jaxrl_post.kernels import recurrent, recurrent_tpu
from jaxrl_post.models.cache_kinds import RecurrentState
from jaxrl_post.models.gated_delta import Inputs

pytestmark = pytest.mark.usefixtures("quick_compilation")

S, R, C, T, H, K, V, W = 3, 5, 3, 24, 2, 4, 3, 4
PLATFORMS = ("cpu", *recurrent.KERNELS)
KIND = RecurrentState(key_heads=1, value_heads=H, key_dim=K, value_dim=V, width=W)
D = KIND.inputs
NOISE = np.random.default_rng(0)
WEIGHTS = NOISE.normal(size=(W, D)).astype(np.float32)
TEXTS = [  # of requests: inputs of the convolution, logarithms of decays, and rates
    (NOISE.normal(size=(T, D)), -NOISE.exponential(size=(T, H)) / 4, NOISE.uniform(size=(T, H))) for _ in range(5)
]
TEXTS = [tuple(x.astype(np.float32) for x in text) for text in TEXTS]


def parted(x) -> Inputs:
    return Inputs(*(part.reshape(len(x), -1, size) for part, size in zip(jnp.split(x, [K, 2 * K], axis=-1), (K, K, V))))


@functools.cache
def compiled(platform):
    """Returns `read` with the platform's kernel, interpreted. Of a CPU it is the loop in jnp."""

    def run(cache, rows, x, decays, slot):
        chosen = recurrent.walk
        if platform in recurrent.KERNELS:
            walk = functools.partial(recurrent.KERNELS[platform].walk, interpret=True)
            recurrent.walk = lambda state, pending, tokens, plan, *_: walk(state, pending, tokens, plan)
        try:
            return recurrent_rows.read(cache, rows, slot, parted(x), *decays, parted(WEIGHTS))
        finally:
            recurrent.walk = chosen

    return jax.jit(run)


def twin(text) -> np.ndarray:
    x, g, beta = (np.asarray(part, np.float64) for part in text)
    padded, out, state = np.concatenate([np.zeros((W - 1, D)), x]), np.zeros((T, H, V)), np.zeros((H, K, V))
    for t in range(T):
        mixed = (padded[t : t + W] * WEIGHTS).sum(0)
        mixed = mixed / (1 + np.exp(-mixed))
        q, k, v = mixed[:K], mixed[K : 2 * K], mixed[2 * K :].reshape(H, V)
        q, k = (part / np.sqrt((part**2).sum() + 1e-6) for part in (q, k))
        for head in range(H):
            before = np.exp(g[t, head]) * state[head]
            state[head] = before + beta[t, head] * np.outer(k, v[head] - before.T @ k)
            out[t, head] = state[head].T @ q / np.sqrt(K)
    return out


class Engine:
    """The host's side of a row engine: which rows each slot has in a step, and which drafts are right."""

    def __init__(self, platform: str, seed: int | None, most: int = C):
        self.run, self.dice = compiled(platform), None if seed is None else np.random.default_rng(seed)
        self.most = most
        self.cache = recurrent_rows.empty(S, C, KIND, jnp.float32)
        self.cache = jax.tree.map(lambda x: jnp.full_like(x, 7), self.cache)  # what another request left
        self.out = [np.zeros((T, H, V), np.float32) for _ in TEXTS]

    def step(self, running: dict[int, list[int]]) -> None:
        """running: slot -> [text, computed rows]. Known rows are settled; up to `most` behind them are drafts."""
        free, first = R, np.zeros((4, S), np.int32)
        x, g, beta = np.zeros((R, D), np.float32), np.zeros((R, H), np.float32), np.zeros((R, H), np.float32)
        slot, filled, right = np.zeros(R, np.int32), 0, {}
        order = list(running) if self.dice is None else self.dice.permutation(list(running)).tolist()
        for s, (text, done) in [(s, running[s]) for s in order]:  # the last ones may get no row
            known = 1 if self.dice is None else int(self.dice.integers(1, 5))
            settled = min(known, T - done, free)
            drafts = 0 if self.dice is None else int(self.dice.integers(0, self.most + 1))
            drafts = min(drafts, T - done - settled, free - settled)
            right[s] = settled + (int(self.dice.integers(0, drafts + 1)) if drafts else 0)
            count = settled + drafts
            first[:, s] = filled, done, count, settled
            for j in range(count):
                for own, theirs in zip((x, g, beta), TEXTS[text], strict=True):
                    wrong = j >= right[s]
                    own[filled + j] = self.dice.normal(size=theirs.shape[1]) if wrong else theirs[done + j]
                slot[filled + j] = s
            filled, free = filled + count, free - count
        out, self.cache = self.run(self.cache, SlotRows(*map(jnp.asarray, first)), x, (g, beta), slot)
        for s, (text, done) in list(running.items()):
            self.out[text][done : done + right[s]] = np.asarray(out)[first[0, s] : first[0, s] + right[s]]
            running[s][1] += right[s]

    def all(self, restarts: float = 0.0) -> list[np.ndarray]:
        """Runs all texts over the slots. restarts: how often a slot's request begins again, in another slot."""
        waiting, running = list(range(len(TEXTS))), {}
        while waiting or running:
            for s in range(S):
                if s not in running and waiting:
                    running[s] = [waiting.pop(0), 0]
            self.step(running)
            for s in list(running):
                text, done = running[s]
                if done == T:
                    del running[s]
                elif self.dice is not None and self.dice.uniform() < restarts:
                    del running[s]
                    waiting.append(text)
        return self.out


@functools.cache
def plain(platform):
    return Engine(platform, None).all()


@pytest.mark.parametrize("platform", PLATFORMS)
def test_the_rows_are_those_of_the_twin(platform):
    for own, text in zip(plain(platform), TEXTS, strict=True):
        exact = twin(text)
        assert np.abs(own - exact).max() < 2e-5 * np.abs(exact).max()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("platform", PLATFORMS)
def test_no_plan_of_the_steps_changes_a_bit(platform, seed):
    """Drafts are rejected at every place, budgets cut prompts, and requests move between slots."""
    found = Engine(platform, seed).all(restarts=0.08)
    assert all(np.array_equal(own, other) for own, other in zip(found, plain(platform), strict=True))


@pytest.mark.parametrize("counts", [(3, 0, 9, 1, 0), (0, 0, 0, 2, 2), (0, 0, 0, 0, 0)], ids=str)
def test_a_walk_on_tpu_fetches_each_state_once_and_no_pending_row_for_nothing(counts):
    """The pipeline fetches a block when its index differs from that of the visit before."""
    counts, again = np.array(counts), np.array([2, 5, 0, 1, 0])
    plan = recurrent.Plan(*(jnp.asarray(x, jnp.int32) for x in (counts, again * (counts > 0), counts, counts, counts)))
    walk, number = recurrent_tpu.visits(plan)
    assert number == max(1, np.sum(counts > 0))
    visits = np.arange(int(number))
    states, pending = (np.asarray(at(0, visits, *walk)[0]) for at in (recurrent_tpu.state_at, recurrent_tpu.pending_at))
    if counts.any():
        assert states.tolist() == np.flatnonzero(counts).tolist()
        fetched = [slot for slot, before in zip(pending, [-1, *pending[:-1]], strict=True) if slot != before]
        assert fetched == [slot for slot in states if again[slot]]


@pytest.mark.parametrize("drafted", [0, 2])
def test_each_replica_has_the_kernel_with_drafts_and_without(drafted):
    """Lowered for a TPU alone: Triton asks for a device, and the compile tier lowers for one."""
    kind = RecurrentState(key_heads=8, value_heads=8, key_dim=128, value_dim=128, width=W)
    one, wide = jnp.zeros(S, jnp.int32), jnp.zeros((R, 8, 128))
    rows, rates = SlotRows(one, one, one, one), jnp.zeros((R, 8))
    weights = Inputs(*(jnp.zeros((W, 8, 128)),) * 3)
    given = recurrent_rows.empty(S, drafted, kind, jnp.float32), rows, jnp.zeros(R, jnp.int32), Inputs(*(wide,) * 3)
    replicas = jax.tree.map(lambda x: x[None], (*given, rates, rates, weights))
    text = jax.jit(jax.vmap(recurrent_rows.read)).trace(*replicas).lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("@tpu_custom_call") == 1
