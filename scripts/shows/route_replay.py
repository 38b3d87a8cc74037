"""The learner repeats the experts that the engine chose: what differs without, and what with (R3, arXiv 2510.11370).

1. equal: at equal weights a float32 learner that repeats the recorded routes has the log-probs of a float32 engine.
2. halves: a bfloat16 engine beside a float32 learner. How many sets of a token and a layer differ, without replay and with.
3. ties: a router with pairs of almost equal columns parts float32 from float32 too.
4. wrong: a record with one other expert is found by the comparison of log-probs.
5. stale: pipelined runs with tokens up to four steps old. The share of ratios outside [0.8, 1.25], without replay and with.

`--arms=NAME,NAME` runs some of these.
"""

from __future__ import annotations

import dataclasses
import statistics

import engine_lab as lab
import engine_ratios
import jax.numpy as jnp
import numpy as np

from jaxrl_post import config
from jaxrl_post.models import decoder, experts
from jaxrl_post.models.model_config import Experts
from jaxrl_post.parallel import mesh as meshes
from jaxrl_post.ring.ragged import Ragged
from jaxrl_post.ring.types import Group
from jaxrl_post.trainer.learner import Learner, LearnerSettings

MINUTES = 12.0
PLATFORM = "cpu"
MODEL = decoder.ModelConfig(
    vocab_size=40,
    embed=64,
    layers=4,
    heads=4,
    kv_heads=2,
    head_dim=16,
    ffw=96,
    max_length=256,
    tied=True,
    qk_norm=True,
    experts=Experts(16, 4, 32),
)
PAIRED = dataclasses.replace(MODEL, experts=Experts(16, 3, 32))  # of two equal columns the third expert is one
CLOSE, BAND, LEAST_OTHER = 1e-5, (0.8, 1.25), 50
SEEDS = (0, 1, 2, 3, 4)
STALE = (
    *("scheduler.prompts=8", "scheduler.group_size=4", "scheduler.ahead=8", "scheduler.max_staleness=4"),
    *("engine.steps_per_dispatch=4", "engine.refill_slots=2", "engine.carry_over=keep", "engine.carry_share=1.0"),
    *("eval.prompts=0", "eval.every=0", "checkpoint.every=0", "steps=60", "model.path=configs/moe_policy"),
)


def show(record) -> None:
    arms = {"equal": _equal, "halves": _halves, "ties": _ties, "wrong": _wrong, "stale": _stale}
    for name in record.options.get("arms", ",".join(arms)).split(","):
        arms[name](record)


def _drawn(params, dtype=np.float32, model=MODEL) -> list[Group]:
    """Returns 16 groups of four rollouts each, which an engine with activations of this dtype draws and records."""
    asked = lab.requests(64, longest_prompt=16, longest=40, temperatures=(1.0,))
    placed = meshes.put(params, meshes.param_shardings(meshes.make_mesh(), decoder.axes(model), "engine"))
    cast = _cast(placed, dtype)
    out = lab.run(
        lab.made(model, cast, meshes.make_mesh(), route_words=experts.route_words(model), dtype=jnp.dtype(dtype)), asked
    )
    return lab.groups_of(asked, out)


def _cast(tree, dtype):
    return {name: _cast(one, dtype) if isinstance(one, dict) else one.astype(dtype) for name, one in tree.items()}


def _learner(params, replay: bool, model=MODEL) -> Learner:
    settings = LearnerSettings(
        algorithm=config.AlgorithmConfig(prox_logp_method="rollout", router_replay=replay),
        optimizer=config.OptimizerConfig(),
        batch=config.BatchConfig(rows=4, tokens=64, head_chunk=64),
        temperature=1.0,
        steps=10,
        max_tokens=40,
        route_words=experts.route_words(model),
    )
    return Learner(model, params, meshes.make_mesh(), settings)


def _gap(one: Learner, groups) -> float:
    """Returns the largest difference of a log-prob from the engine's."""
    found = one.logprobs(groups)
    return max(float(np.abs(found[r.id] - r.logprobs).max()) for group in groups for r in group.rollouts)


def _sets(one: Learner, groups, model) -> tuple[int, int]:
    """Returns how many sets of a token and a layer are others than the recorded ones, and how many are recorded."""
    one.prepare(groups)
    one.accumulate(groups)
    metrics = {name: float(value) for name, value in one.commit().items()}
    tokens = sum(len(rollout) for group in groups for rollout in group.rollouts)
    all_of_them = tokens * model.layers
    shares = (metrics[f"training/{name}"] for name in ("router_mismatch", "recorded_routes"))
    return tuple(round(share * all_of_them) for share in shares)


def _compared(record, arm: str, params, groups, model=MODEL) -> None:
    for replay in (False, True):
        one = _learner(params, replay, model)
        name = f"{arm}.{'with' if replay else 'without'}"
        record.figure(f"{name}.largest_gap", _gap(one, groups))
        other, recorded = _sets(one, groups, model)
        record.figure(f"{name}.recorded_sets", recorded, at_least=1000)
        record.figure(f"{name}.other_sets", other, **(dict(equals=0) if replay else dict(at_least=LEAST_OTHER)))


def _equal(record) -> None:
    params = lab.weights(0, MODEL)
    groups = _drawn(params)
    record.figure("equal.tokens", sum(len(r) for group in groups for r in group.rollouts), at_least=1000)
    record.figure("equal.largest_gap", _gap(_learner(params, True), groups), at_most=CLOSE)


def _halves(record) -> None:
    params = lab.weights(0, MODEL)
    rounded = _cast(params, jnp.bfloat16)
    params = _cast(rounded, np.float32)  # the same numbers in both, so that only activations are rounded
    _compared(record, "halves", params, _drawn(params, jnp.bfloat16))


def _ties(record) -> None:
    """Every second column of each router is almost its neighbour: far closer than the rounding of a score."""
    params = lab.weights(0, PAIRED)
    layers = {}
    for index, layer in params["layers"].items():
        router = np.array(layer["router"])
        router[:, 1::2] = router[:, ::2] * (
            1 + 1e-7 * np.random.default_rng(int(index)).standard_normal(router[:, ::2].shape)
        )
        layers[index] = layer | {"router": router.astype(np.float32)}
    params = params | {"layers": layers}
    _compared(record, "ties", params, _drawn(params, model=PAIRED), PAIRED)


def _wrong(record) -> None:
    """One recorded expert of one token is another: the log-prob of that token or of a later one shows it."""
    params = lab.weights(0, MODEL)
    groups, width = _drawn(params), experts.route_words(MODEL)
    noise, found = np.random.default_rng(0), 0
    one = _learner(params, True)
    for _ in range(10):
        at = int(noise.integers(len(groups)))
        first, *others = groups[at].rollouts
        token = int(noise.integers(len(first)))
        _, words = first.records.split(width)
        taken = np.frombuffer(words[token].tobytes(), np.uint8).copy()
        layer = slice(0, MODEL.experts.per_token)
        taken[0] = next(expert for expert in range(MODEL.experts.count) if expert not in taken[layer])
        words[token] = np.frombuffer(taken.tobytes(), np.int32)
        spoiled = dataclasses.replace(first, kept=Ragged.of_rows(words, width))
        found += _gap(one, [dataclasses.replace(groups[at], rollouts=(spoiled, *others))]) > 10 * CLOSE
    record.figure("wrong.records_found", found, equals=10)


def _stale(record) -> None:
    medians = {}
    for replay, name in ((False, "without"), (True, "with")):
        found = [record.cached(f"stale_{name}_{seed}", lambda: _share(seed, replay)) for seed in SEEDS]
        record.figure(f"stale.{name}.share_outside", [one["share"] for one in found])
        record.figure(f"stale.{name}.tokens", [one["tokens"] for one in found])
        record.figure(f"stale.{name}.most_steps_old", max(one["oldest"] for one in found), at_least=3, at_most=4)
        medians[name] = statistics.median(one["share"] for one in found)
    without, with_it = medians["without"], medians["with"]
    record.figure("stale.without", without)
    record.figure("stale.with", with_it, at_most=without)


def _share(seed: int, replay: bool) -> dict:
    """Returns the share of trained tokens whose ratio lies outside the band in one pipelined run, and its oldest token."""
    options = (*STALE, f"seed={seed}", f"algorithm.router_replay={replay}")
    ratios, oldest = engine_ratios.log_ratios("configs/demo/pipeline.py", options)
    low, high = np.log(BAND)
    return {"share": float(np.mean((ratios < low) | (ratios > high))), "tokens": ratios.size, "oldest": oldest}
