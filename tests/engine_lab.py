"""Engines, requests and comparisons for the equality suites."""

from __future__ import annotations

import dataclasses
import functools
import os

import numpy as np
import numpy_cached
import plain_rollouts
import sampler
import shared_programs

from jaxrl_post.engine import step_cost
from jaxrl_post.engine.row_engine import EngineSettings, RowEngine
from jaxrl_post.engine.speculation.registry import DRAFTERS
from jaxrl_post.engine.speculation.speculation import Drafting
from jaxrl_post.models import decoder
from jaxrl_post.models.model_config import Experts, LinearAttention
from jaxrl_post.parallel import mesh as meshes
from jaxrl_post.ring.history import History
from jaxrl_post.ring.types import Finish, Group, Prompt, Request, Rollout, RolloutId, Sampling

EOS, RECORDED = 3, 16
# The shows moe-equality and hybrid-equality run the suites once more, on a model with experts or with a recurrent state.
MODEL = os.environ.get("LAB_MODEL", "")
EXPERTS = Experts(8, 2, 24, renormalised=False, shared_ffw=16) if MODEL == "experts" else None
LINEAR = LinearAttention(2, 4, 8, 8, 4, layers=(0,)) if MODEL == "hybrid" else None
TINY = decoder.ModelConfig(
    vocab_size=40,
    embed=32,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=8,
    ffw=64,
    max_length=256,
    tied=True,
    experts=EXPERTS,
    linear=LINEAR,
)
BASE = dict(
    slots=16, max_length=96, page_size=16, pages=96, row_sizes=(64,), head_rows=64, steps_per_dispatch=8, refill_slots=2
)
BASE |= {name: "int8" for name in ("weights", "kv") if sampler.numpy_llama.ROUNDS in (name, "both")}


FREE_ROWS = step_cost.StepCost((64, 1024), (1.0, 1.0), "rows are free")
DRAFTED = dict(width=6, entries=1 << 18, live=1 << 10)


@functools.cache
def weights(seed: int, config: decoder.ModelConfig = TINY) -> dict:
    """Returns random weights whose logits have a standard deviation of about 1.5, so that a rollout depends on its
    text."""
    params = decoder.init(config, seed)
    params["embed"] = params["embed"] * 1.5
    return params


def engine(params=None, config: decoder.ModelConfig = TINY, mesh=None, **changes) -> RowEngine:
    """Returns an engine of BASE with changes, on weights placed on its mesh."""
    mesh = mesh or meshes.make_mesh()
    placed = meshes.put(params or weights(0, config), meshes.param_shardings(mesh, decoder.axes(config), "engine"))
    return made(config, placed, mesh, **changes)


def made(config: decoder.ModelConfig, params, mesh, **changes) -> RowEngine:
    """Returns an engine of BASE with changes. `changes`: fields of EngineSettings, and arguments of RowEngine."""
    given = {**BASE, **changes}
    settings = {
        field.name: given.pop(field.name) for field in dataclasses.fields(EngineSettings) if field.name in given
    }
    with shared_programs.on_demand():
        return RowEngine(config, params, mesh, EngineSettings(**settings), **given)


def requests(
    count: int,
    *,
    samples: int = 4,
    longest_prompt: int = 40,
    longest: int = 48,
    temperatures=(1.0, 0.7, 0.0),
    seed: int = 0,
    vocab: int = TINY.vocab_size,
    replicas: int = 1,
    exact: int = 0,
    cuts=((0, 1.0),),
) -> list[Request]:
    """Returns `count` requests, `samples` of each prompt, with random prompts, limits and temperatures.

    `exact`: every rollout has exactly this many tokens. `cuts`: (top_k, top_p) pairs, used in turn like the
    temperatures."""
    noise, out = np.random.default_rng(seed), []
    while len(out) < count:
        index = len(out) // samples
        prompt = Prompt(id=str(index), tokens=noise.integers(0, vocab, noise.integers(1, longest_prompt + 1)))
        for sample in range(min(samples, count - len(out))):
            name = RolloutId(seed, "train", 0, prompt.id, sample)
            top_k, top_p = cuts[len(out) % len(cuts)]
            out.append(
                Request(
                    rollout_id=name,
                    prompt=prompt,
                    seed=name.seed(),
                    max_tokens=exact or int(noise.integers(1, longest + 1)),
                    replica=index % replicas,
                    sampling=Sampling(
                        temperature=temperatures[sample % len(temperatures)],
                        top_k=top_k,
                        top_p=top_p,
                        eos_ids=() if exact else (EOS,),
                    ),
                )
            )
    return out


def groups_of(
    asked: list[Request], out: dict[RolloutId, Rollout], epoch: int = 0, vary: float = 0.0, vocab: int = TINY.vocab_size
) -> list[Group]:
    """Returns the rollouts as groups of an epoch, prompt by prompt. A share `vary` of the tokens is changed."""
    noise, by_prompt = np.random.default_rng(epoch), {}
    for request in asked:
        rollout = out[request.rollout_id]
        text = np.where(noise.random(len(rollout)) < vary, noise.integers(0, vocab, len(rollout)), rollout.tokens)
        name = rollout.id._replace(epoch=epoch)
        by_prompt.setdefault(request.prompt.id, []).append(
            dataclasses.replace(rollout, id=name, tokens=text, argmax_tokens=text)
        )
    return [
        Group(
            prompt=mine[0].prompt,
            rollouts=tuple(mine),
            rewards=noise.random(len(mine)),
            scored=np.ones(len(mine), bool),
        )
        for mine in by_prompt.values()
    ]


def drafting(
    name: str,
    groups: list[Group],
    *,
    vocab: int = TINY.vocab_size,
    clones: bool = False,
    replicas: int = 1,
    slots: int = BASE["slots"],
    shared: int = 3 << 12,
) -> Drafting:
    """Returns the host side of a drafter by name, after these groups were recorded in order."""
    history = History(epochs=2, max_bytes=1 << 26)
    made = Drafting(
        DRAFTERS[name](vocab=vocab, **DRAFTED),
        replicas=replicas,
        slots=slots,
        past=history.of,
        clones=clones,
        shared=shared if name == "ours" else 0,
    )
    for group in groups:
        history.record(group)
        made.record(group)
    return made


def run(engine: RowEngine, asked: list[Request], *, submit_at: list[int] | None = None) -> dict[RolloutId, Rollout]:
    """Returns every rollout. `submit_at`: the turn at which each request is submitted (default: all at once)."""
    submit_at = submit_at or [0] * len(asked)
    out: dict[RolloutId, Rollout] = {}
    for turn in range(100000):
        now = [r for r, at in zip(asked, submit_at) if at == turn]
        engine.submit(now)
        for rollout in engine.step():
            assert rollout.id not in out, "returned twice"
            out[rollout.id] = rollout
        if not engine.pending and turn >= max(submit_at):
            return out
    raise AssertionError("the engine never came to an end")


def same_bits(a: dict[RolloutId, Rollout], b: dict[RolloutId, Rollout]) -> bool:
    """Returns whether two runs have the same rollouts, tokens, log-probs, entropies, records and endings, bit for bit."""
    return a.keys() == b.keys() and all(
        a[k].tokens.tobytes() == b[k].tokens.tobytes()
        and a[k].logprobs.tobytes() == b[k].logprobs.tobytes()
        and a[k].entropies.tobytes() == b[k].entropies.tobytes()
        and a[k].records.tobytes() == b[k].records.tobytes()
        and a[k].finish == b[k].finish
        for k in a
    )


def reference(request: Request, params, config=TINY) -> list[sampler.Draw]:
    """Returns the independent sampler's rollout."""
    law = request.sampling
    return sampler.generate(
        params,
        config,
        request.prompt.tokens,
        request.seed,
        request.max_tokens,
        law.temperature,
        law.eos_ids,
        law.top_k,
        law.top_p,
    )


def against_sampler(
    out: dict[RolloutId, Rollout],
    asked: list[Request],
    params,
    config=TINY,
    close: float = sampler.CLOSE,
    kept: bool = False,
) -> list[str]:
    """Returns the objections of the independent sampler. `kept`: the engine recorded up to RECORDED ids a token."""
    objections = []
    for request in asked:
        got = out[request.rollout_id]
        records = [sorted(row[row >= 0].tolist()) for row in got.records.rows(RECORDED)] if kept else None
        objection = sampler.disagreement(
            reference(request, params, config), got.tokens, got.logprobs, got.entropies, close=close, records=records
        )
        if objection:
            objections.append(f"{request.rollout_id}: {objection}")
    return objections


def with_guesses(request: Request, guesses) -> Request:
    """Returns the request with candidates for its tokens, right or wrong."""
    prefix = plain_rollouts.rollout(request.rollout_id, request.prompt, guesses, finish=Finish.PARKED)
    return dataclasses.replace(request, prefix=prefix, prefix_mode="verify")


def park_and_resume(
    engine: RowEngine, asked: list[Request], *, mode: str, seed: int = 0, chance: float = 0.15
) -> tuple[dict[RolloutId, Rollout], int]:
    """Runs as `run` does, parks requests at random after dispatches, and submits them again with `mode`.

    Returns: the rollouts, and the number of parks."""
    noise, by_id = np.random.default_rng(seed), {r.rollout_id: r for r in asked}
    engine.submit(asked)
    out: dict[RolloutId, Rollout] = {}
    away: list[Request] = []
    parks = 0
    while engine.pending or away:
        engine.submit(away)
        out.update((r.id, r) for r in engine.step())
        chosen = [name for name in by_id if name not in out and noise.random() < chance and parks < 4 * len(asked)]
        parked = engine.park(chosen)
        parks += sum(len(p) > 0 for p in parked)
        away = [dataclasses.replace(by_id[p.id], prefix=p, prefix_mode=mode) for p in parked]
    return out, parks


def first_differences(
    a: dict[RolloutId, Rollout], b: dict[RolloutId, Rollout], asked: list[Request], params, config=TINY
) -> tuple[list[float], float]:
    """Returns the score gap at the first token where two runs differ, for each rollout that differs, by the independent
    sampler.

    Also returns the largest log-prob difference before those tokens."""
    gaps, worst = [], 0.0
    for request in asked:
        one, two = a[request.rollout_id], b[request.rollout_id]
        size = min(len(one), len(two))
        apart = np.flatnonzero(one.tokens[:size] != two.tokens[:size])
        until = int(apart[0]) if apart.size else size
        if until:
            worst = max(worst, float(np.abs(one.logprobs[:until] - two.logprobs[:until]).max()))
        if apart.size:
            text = np.concatenate([request.prompt.tokens, one.tokens[:until]])
            scores = sampler.numpy_llama.forward(params, config, text)[-1]
            gaps.append(sampler.draw(scores, request.seed, text.size, request.sampling.temperature).gap)
        elif len(one) != len(two):
            gaps.append(float("inf"))
    return gaps, worst


def kept_across_swaps(rollout: Rollout, request: Request, by_version: dict, config=TINY) -> str:
    """Returns the objections of a cached one-sequence reference that switches weights where the rollout's versions do.

    The row that samples a token runs with that token's version. Other rows of the prompt run with the first token's
    version."""
    text = [*request.prompt.tokens.tolist(), *rollout.tokens.tolist()]
    versions = [int(rollout.versions[0])] * (request.prompt.tokens.size - 1) + rollout.versions.tolist()
    cached, draws = numpy_cached.Cached(config), []
    for position, version in enumerate(versions):
        scores = cached.feed(by_version[version], text[position])
        if position >= request.prompt.tokens.size - 1:
            draws.append(sampler.draw(scores, request.seed, position + 1, request.sampling.temperature))
    return sampler.disagreement(draws, rollout.tokens, rollout.logprobs, rollout.entropies)


def swap_in_mid_generation(
    engine: RowEngine, asked: list[Request], new, *, steps: int, mode: str
) -> dict[RolloutId, Rollout]:
    """Returns every rollout of a run whose weights become `new` after `steps` dispatches.

    Running rollouts continue by `mode`: keep; or parked and submitted again as recompute or verify. In verify, finished
    rollouts are verified too."""
    engine.submit(asked)
    out = {r.id: r for _ in range(steps) for r in engine.step()}
    if mode == "keep":
        engine.swap(new, engine.version + 1)
        again = []
    else:
        old = {p.id: p for p in engine.park([r.rollout_id for r in asked])}
        old |= out if mode == "verify" else {}
        out = {} if mode == "verify" else out
        engine.swap(new, engine.version + 1)
        again = [
            dataclasses.replace(r, prefix=old[r.rollout_id], prefix_mode=mode) for r in asked if r.rollout_id in old
        ]
    engine.submit(again)
    while engine.pending:
        out.update((r.id, r) for r in engine.step())
    return out


def recomputed_after_swap(rollout: Rollout, request: Request, new, version: int, config=TINY) -> str:
    """Returns the objections of a full-forward reference to the tokens of `version`.

    The reference computes the whole text so far with the new weights."""
    first = int(np.argmax(rollout.versions == version))
    draws = []
    for i in range(first, len(rollout)):
        text = np.concatenate([request.prompt.tokens, rollout.tokens[:i]])
        draws.append(
            sampler.draw(
                sampler.numpy_llama.forward(new, config, text)[-1],
                request.seed,
                text.size,
                request.sampling.temperature,
            )
        )
    return sampler.disagreement(draws, rollout.tokens[first:], rollout.logprobs[first:], rollout.entropies[first:])
