"""Engines in bfloat16, on two devices of tensor parallelism, and both: equal bits whatever comes in between, and numpy's numbers.

Equal bits are those of one engine: another order, fewer slots, few pages, parks, sleep, drafts, other dispatch lengths, and
swaps. Numbers are held against a full forward pass in float64 over the same tokens, with the weights as the engine has them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

import engine_lab as lab
import jax
import jax.numpy as jnp
import numpy as np
import numpy_llama
import sampler

from jaxrl_post.engine.elastic import Elastic
from jaxrl_post.engine.row_engine import RowEngine
from jaxrl_post.models import decoder
from jaxrl_post.parallel import mesh as meshes
from jaxrl_post.ring.types import Layout, Request, Rollout, RolloutId

Rollouts = dict[RolloutId, Rollout]
# The engine's dtype, tensor parallelism, and how far log-probs may lie from float64: bfloat16 keeps 8 bits of each activation.
ENGINES = {
    "bfloat16": (jnp.bfloat16, 1, 0.15),
    "tensor2": (jnp.float32, 2, 1e-4),
    "bfloat16_tensor2": (jnp.bfloat16, 2, 0.15),
}
COUNT = 48
HOW = dict(samples=4, longest_prompt=30, longest=48, temperatures=(1.0, 0.7, 0.0), seed=21, cuts=((0, 1.0), (5, 0.9)))
BY_TOKEN = ("tokens", "sampled", "logprobs", "entropies", "versions", "drafted", "argmax_tokens", "kept")
WIDE, NARROW = Layout(2, 1), Layout(1, 2)
FAMILY = dict(layers=2, heads=4, kv_heads=2, head_dim=8, ffw=48, max_length=256, qkv_bias=True, tied=False)
MODEL = decoder.ModelConfig(vocab_size=48, embed=32, **FAMILY)


def show(record) -> None:
    for name, (dtype, tensor, close) in ENGINES.items():
        _engine(record, name, dtype, tensor, close)
    _elastic(record)


def _weights(seed: int) -> dict:
    return lab.weights(seed, MODEL)


def _maker(dtype, tensor: int) -> tuple[Callable[..., RowEngine], Callable[[dict], dict]]:
    """Returns what makes an engine of given weights with changes, and what places weights for it."""
    mesh = meshes.make_mesh(1, 1, tensor)
    shardings = meshes.param_shardings(mesh, decoder.axes(MODEL), "engine")

    def place(weights: dict) -> dict:
        return meshes.put(jax.tree.map(lambda leaf: np.asarray(leaf, dtype), weights), shardings)

    def make(seed: int = 0, **changes) -> RowEngine:
        given = dict(restricted=True, dtype=jnp.dtype(dtype).name) | changes
        return lab.made(MODEL, place(_weights(seed)), mesh, **given)

    return make, place


def _engine(record, name: str, dtype, tensor: int, close: float) -> None:
    make, place = _maker(dtype, tensor)
    asked = lab.requests(COUNT, vocab=MODEL.vocab_size, **HOW)
    engine = make()
    plain = lab.run(engine, asked)
    record.figure(f"{name}.tokens", sum(map(len, plain.values())), at_least=500)
    for what, found in _unchanged(make, engine, place, asked, plain):
        record.figure(f"{name}.differing.{what}", _differing(plain, found), equals=0)
    for what, differing in _swapped(make, place, asked):
        record.figure(f"{name}.differing.{what}", differing, equals=0)
    apart = np.concatenate([_apart(plain[one.rollout_id], one, dtype) for one in asked])
    record.figure(f"{name}.mean_distance_of_logprobs", float(apart.mean()), at_most=close / 5)
    record.figure(f"{name}.largest_distance_of_logprobs", float(apart.max()), at_most=close)


def _unchanged(make, engine: RowEngine, place, asked, plain) -> Iterable[tuple[str, Rollouts]]:
    """Yields the same requests, computed in other ways."""
    order = [asked[i] for i in np.random.default_rng(1).permutation(len(asked))]
    engine.reset()
    yield "order", lab.run(engine, order, submit_at=np.random.default_rng(2).integers(0, 30, len(asked)).tolist())
    for mode in ("recompute", "verify", "restart"):
        engine.reset()
        yield f"parks_{mode}", lab.park_and_resume(engine, asked, mode=mode)[0]
    engine.reset()
    yield "sleep", _asleep(engine, place, asked)
    yield "fewer_slots", lab.run(make(slots=6, refill_slots=1), asked)
    yield "few_pages", lab.run(make(pages=14), asked)
    yield "one_step_a_dispatch", lab.run(make(steps_per_dispatch=1), asked)
    groups = lab.groups_of(asked, plain, vary=0.2, vocab=MODEL.vocab_size)
    drafting = lab.drafting("ours", groups, vocab=MODEL.vocab_size)
    yield "drafts", lab.run(make(drafting=drafting, cost=lab.FREE_ROWS), asked)


def _asleep(engine: RowEngine, place, asked: list[Request]) -> Rollouts:
    """The engine sleeps after every third dispatch, and wakes by a swap to the same weights."""
    engine.submit(asked)
    out, turn = {}, 0
    while engine.pending:
        out |= {one.id: one for one in engine.step()}
        turn += 1
        if turn % 3 == 0:
            engine.sleep()
            engine.swap(place(_weights(0)), engine.version + 1)
    return out


def _swapped(make, place, asked: list[Request]) -> Iterable[tuple[str, int]]:
    """Yields what a swap in the midst changes that it may not.

    `verify`: rollouts are those of the new weights. `recompute`: tokens before the swap stay, those after it are those of the
    new weights behind them. `keep`: tokens before the swap stay."""
    near = {**_weights(0), "final_norm": _weights(0)["final_norm"] * 1.01}
    fresh = make()
    fresh.swap(place(near), 1)
    want = lab.run(fresh, asked)
    before = lab.run(make(), asked)
    for mode in ("verify", "recompute", "keep"):
        found = lab.swap_in_mid_generation(make(), asked, place(near), steps=3, mode=mode)
        if mode == "verify":
            yield "swap_verify", _differing(want, found)
            continue
        mixed = [one for one in found.values() if set(one.versions.tolist()) == {0, 1}]
        assert len(mixed) >= 5, f"only {len(mixed)} rollouts have tokens of both versions"
        yield f"swap_{mode}_before", sum(not _same(one, before[one.id], slice(_newer(one))) for one in mixed)
        if mode == "recompute":
            forced = [_continued(one, request) for request in asked for one in mixed if one.id == request.rollout_id]
            fresh.reset()
            redone = lab.run(fresh, forced)
            yield "swap_recompute_after", sum(not _same(one, redone[one.id], slice(_newer(one), None)) for one in mixed)


def _continued(rollout: Rollout, request: Request) -> Request:
    """The request with the tokens of the older version as its forced beginning."""
    first = _newer(rollout)
    cut = {name: getattr(rollout, name)[:first] for name in BY_TOKEN}
    times = dict(start_clock=0, finish_clock=0, clocks=None)  # the other engine's time begins anew
    begun = dataclasses.replace(rollout, **cut, **times, finish=lab.Finish.PARKED)
    return dataclasses.replace(request, prefix=begun, prefix_mode="recompute")


def _same(one: Rollout, other: Rollout, part: slice) -> bool:
    """Whether a part of two rollouts has the same bits."""
    names = ("tokens", "logprobs", "entropies")
    return all(getattr(one, name)[part].tobytes() == getattr(other, name)[part].tobytes() for name in names)


def _newer(rollout: Rollout) -> int:
    return int(np.argmax(rollout.versions == 1))


def _differing(one: Rollouts, other: Rollouts) -> int:
    """How many rollouts are not in both with the same tokens, log-probs, entropies and ending, bit for bit."""
    return sum(
        name not in one or name not in other or not lab.same_bits({name: one[name]}, {name: other[name]})
        for name in one.keys() | other.keys()
    )


def _apart(rollout: Rollout, request: Request, dtype) -> np.ndarray:
    """How far each log-prob lies from that of a full forward pass in float64 over the same tokens.

    Tokens of a cut law are left out where the float64 law would not allow them: the cut itself was near."""
    weights = jax.tree.map(lambda leaf: np.asarray(leaf, dtype).astype(np.float64), _weights(0))
    text = np.concatenate([request.prompt.tokens, rollout.tokens])
    scores = numpy_llama.forward(weights, MODEL, text[:-1], dtype=np.float64)[len(request.prompt.tokens) - 1 :]
    law, out = request.sampling, []
    for row, token, logprob in zip(scores, rollout.tokens, rollout.logprobs, strict=True):
        if law.temperature and (law.top_k or law.top_p < 1):
            continue
        want = numpy_llama.log_softmax(row / (law.temperature or 1.0))[token]
        out.append(abs(float(logprob) - want))
    return np.array(out)


def _elastic(record) -> None:
    """Rollouts that move between two layouts against the independent sampler, and against moves at other moments."""
    mesh = meshes.make_mesh(2)
    params = meshes.put(_weights(0), meshes.param_shardings(mesh, decoder.axes(MODEL), "learner"))
    sizes = {WIDE: dict(slots=8), NARROW: dict(slots=16)}

    def builder(layout):
        own = meshes.make_mesh(layout.replicas, 1, layout.tensor)
        return lambda: lab.made(MODEL, params, own, **sizes[layout])

    engine = Elastic({layout: builder(layout) for layout in (WIDE, NARROW)}, params)
    how = {**HOW, "cuts": ((0, 1.0),)}
    asked = lab.requests(24, vocab=MODEL.vocab_size, replicas=2, **how)
    engine.submit(asked)
    out, turn = {}, 0
    while engine.pending:
        out |= {one.id: one for one in engine.step()}
        turn += 1
        engine.relayout(NARROW if turn % 4 >= 2 else WIDE)
    record.figure("elastic.rollouts", len(out), equals=24)
    objections = [
        text
        for one in asked
        if (
            text := sampler.disagreement(
                lab.reference(one, _weights(0), MODEL),
                *(getattr(out[one.rollout_id], name) for name in ("tokens", "logprobs", "entropies")),
            )
        )
    ]
    record.figure("elastic.objections_of_the_independent_sampler", len(objections), equals=0)
