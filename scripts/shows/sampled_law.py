"""A policy that is drawn with top-k and top-p is trained by the law that it is drawn from, ids that were kept alone.

1. laws: an engine draws rollouts under 75 cut laws and records the ids that they leave. transformers, in float64 and an
   environment below .cache/peers/ (made once: some minutes and 1.3 GB), finds the same ids by sorting. Log-probs, entropies, KL to
   a reference and the gradient by every weight of its laws over these ids are compared with the learner's, in float64 too.
2. equal: at equal weights and top_p 0.8, how many ratios of learner and engine lie outside [0.9, 1.1], with the record and
   without. stale: the same in pipelined runs with tokens up to four steps old.
3. killed: a pipelined run of a cut law is killed and resumed, and ends as the undisturbed one. Rollouts of it are sampled again
   from its logs, and by its export, with equal bits.
4. planted: the whole vocabulary in one of four places is found: old, reference and current log-probs, and the entropy.

`--arms=NAME,NAME` runs some of laws, equal, stale, killed and planted.
"""

from __future__ import annotations

import dataclasses
import json
import random
import statistics
import subprocess
import tempfile
from pathlib import Path

import engine_lab as lab
import engine_ratios
import jax
import jax.numpy as jnp
import made_groups
import numpy as np
import peers
from killed import Runs, steps

from jaxrl_post import config
from jaxrl_post.algorithms import kl_estimators
from jaxrl_post.commands.repeated import repeated
from jaxrl_post.launch.parts import saved_policy
from jaxrl_post.models import decoder, hf, tensor_file
from jaxrl_post.parallel import mesh as meshes
from jaxrl_post.ring.types import Group, Rollout
from jaxrl_post.runs import rollout_log, run_logs
from jaxrl_post.trainer import learner as learners
from jaxrl_post.trainer import packing, programs

MINUTES = 12.0
PLATFORM = "cpu"
LIMIT_S = 3600.0
MODEL = decoder.ModelConfig(
    vocab_size=300, embed=64, layers=2, heads=4, kv_heads=2, head_dim=16, ffw=96, max_length=256, tied=True
)
TOP_KS, TOP_PS, HEATS = (1, 2, 5, 20, 50), (0.99, 0.9, 0.8, 0.65, 0.5), (1.0, 0.7, 1.3)
MOST, TOKENS = max(TOP_KS) + 8, 64
BAND = (0.9, 1.1)
SEEDS, REPLAYED = (0, 1, 2), 20
CUT = ("sampling.top_k=12", "sampling.top_p=0.8")
STALE = (
    *CUT,
    *("scheduler.prompts=8", "scheduler.group_size=4", "scheduler.ahead=8", "scheduler.max_staleness=4"),
    *("engine.steps_per_dispatch=4", "engine.refill_slots=2", "engine.carry_over=keep", "engine.carry_share=1.0"),
    *("eval.prompts=0", "eval.every=0", "checkpoint.every=0", "steps=60"),
)
KILLED = [
    "--config=configs/demo/pipeline.py",
    *(f"--config.{option}" for option in CUT),
    "--config.steps=12",
    "--config.checkpoint.every=3",
    "--config.checkpoint.keep_last=9",
    "--config.scheduler.prompts=16",
    "--config.scheduler.group_size=4",
    "--config.scheduler.max_unscored=32",
    "--config.engine.steps_per_dispatch=4",
    "--config.eval.prompts=16",
    "--config.eval.every=6",
]


def show(record) -> None:
    arms = {"laws": _laws, "equal": _equal, "stale": _stale, "killed": _killed, "planted": _planted}
    for name in record.options.get("arms", ",".join(arms)).split(","):
        arms[name](record)


# ---- laws: against transformers in float64


def _drawn(params, heats=HEATS) -> dict[float, list[Group]]:
    """Returns groups of two rollouts of every law, by temperature."""
    cuts = [(top_k, top_p) for top_k in TOP_KS for top_p in TOP_PS for _ in range(2)]
    out = {}
    for number, heat in enumerate(heats):
        asked = lab.requests(
            len(cuts),
            samples=2,
            longest_prompt=12,
            longest=24,
            temperatures=(heat,),
            cuts=cuts,
            seed=number,
            vocab=MODEL.vocab_size,
        )
        found = lab.run(lab.engine(params, MODEL, restricted=True, kept_ids=MOST), asked)
        out[heat] = [
            Group(
                prompt=asked[i].prompt,
                rollouts=tuple(found[request.rollout_id] for request in asked[i : i + 2]),
                rewards=np.zeros(2),
                scored=np.ones(2, bool),
            )
            for i in range(0, len(asked), 2)
        ]
    return out


def _text(rollout: Rollout, heat: float, law: tuple[int, float]) -> dict:
    """Returns what the script that runs transformers reads of a rollout. Weights of the sum are any numbers."""
    places = np.arange(len(rollout)) + rollout.prompt.tokens.size
    return {
        "prompt": rollout.prompt.tokens.tolist(),
        "answer": rollout.tokens.tolist(),
        "kept": [row[row >= 0].tolist() for row in rollout.records.rows(MOST)],
        "temperature": heat,
        "top_k": law[0],
        "top_p": law[1],
        "of_logprob": np.cos(places).tolist(),
        "of_entropy": np.sin(3 * places).tolist(),
    }


def _laws(record) -> None:
    params = lab.weights(0, MODEL)
    reference = made_groups.moved(params, 2)
    groups, cuts = _drawn(params), [(top_k, top_p) for top_k in TOP_KS for top_p in TOP_PS]
    rows = [
        (heat, law, rollout)
        for heat in HEATS
        for law, group in zip(cuts, groups[heat], strict=True)
        for rollout in group.rollouts
    ]
    texts = [_text(rollout, heat, law) for heat, law, rollout in rows]
    with tempfile.TemporaryDirectory() as folder:
        theirs, gradient = _transformers(record, Path(folder), params, reference, texts)
        found = _learner(groups, params, reference)
        grads = _named(Path(folder) / "gradient", found.pop("gradient"))
    record.figure("laws.laws", len(HEATS) * len(cuts), at_least=75)
    record.figure("laws.transformers", theirs["transformers"])
    record.figure("laws.tokens", sum(len(rollout) for *_, rollout in rows), at_least=1000)
    other, near = 0, 0
    for text, told in zip(texts, theirs["texts"], strict=True):
        for mine, kept, edge in zip(text["kept"], told["kept"], told["edges"], strict=True):
            near += edge < 1e-4
            other += edge >= 1e-4 and sorted(mine) != kept
    record.figure("laws.tokens_with_another_set", other, equals=0)
    record.figure("laws.tokens_too_near_an_edge_to_tell", near)
    wanted = {
        name: [np.array(text[name]) for text in theirs["texts"]] for name in ("logprobs", "entropies", "reference")
    }
    gaps = {name: _largest(found[name], [wanted[name]]) for name in wanted}
    gaps["engine_logprobs"] = _largest([rollout.logprobs for *_, rollout in rows], [wanted["logprobs"]])
    gaps["engine_entropies"] = _largest([rollout.entropies for *_, rollout in rows], [wanted["entropies"]])
    for kind in ("k1", "k2", "k3"):
        estimate = kl_estimators.KL_ESTIMATORS[kind]
        mine, its = (
            [np.asarray(estimate(*(jnp.asarray(x)[None] for x in pair)))[0] for pair in zip(*both, strict=True)]
            for both in ((found["logprobs"], found["reference"]), (wanted["logprobs"], wanted["reference"]))
        )
        gaps[f"kl_{kind}"] = _largest(mine, [its])
    for name, gap in gaps.items():
        record.figure(f"laws.{name}_gap", gap, at_most=1e-4 if name.startswith("engine") else 1e-5)
    worst = max(
        float(np.abs(grads[name] - value).max() / max(np.abs(value).max(), 1e-12)) for name, value in gradient.items()
    )
    record.figure("laws.gradient_leaves", len(gradient), at_least=10)
    record.figure("laws.gradient_gap_over_largest_of_leaf", worst, at_most=1e-5)


def _largest(found: list, wanted: list[list]) -> float:
    return max(float(np.abs(mine - its).max()) for mine, its in zip(found, *wanted, strict=True))


def _transformers(record, place: Path, params, reference, texts: list[dict]) -> tuple[dict, dict[str, np.ndarray]]:
    python = peers.environment(record.root, "peft", peers.PEFT)
    for name, tree in (("policy", params), ("reference", reference)):
        hf.save(place / name, MODEL, tree)
    (place / "texts.json").write_text(json.dumps(texts))
    command = [python, "scripts/cut_law_scores.py", *(place / name for name in ("policy", "reference"))]
    command += [place / "texts.json", place / "out"]
    subprocess.run(list(map(str, command)), cwd=record.root, check=True, timeout=LIMIT_S)
    return json.loads((place / "out" / "scores.json").read_text()), _tensors(place / "out" / "gradient.safetensors")


def _tensors(file: Path) -> dict[str, np.ndarray]:
    return {name: np.array(tensor_file.read(one)) for name, one in tensor_file.entries(file).items()}


def _named(folder: Path, gradient) -> dict[str, np.ndarray]:
    """Returns a gradient by the names that transformers has for the weights."""
    hf.save(folder, MODEL, jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), gradient))
    return _tensors(folder / "model.safetensors")


def _learner(groups: dict[float, list[Group]], params, reference) -> dict:
    """Returns log-probs, entropies and the reference's log-probs by rollout, and the gradient of the weighted sum."""
    out, total = {"logprobs": [], "entropies": [], "reference": []}, None
    with jax.enable_x64(True):
        own, other = (jax.tree.map(lambda x: np.asarray(x, np.float64), tree) for tree in (params, reference))
        for heat, some in groups.items():
            recipe = _recipe(heat)
            batches, places = packing.pack(some, None, rows=8, tokens=TOKENS, dtype=np.float64, kept_ids=MOST)
            weights = [_weights(batch, [p for p in places if p.batch == i]) for i, batch in enumerate(batches)]

            def value(tree, batch, weight, recipe=recipe):
                found = programs.score(tree, batch, recipe)
                return sum(jnp.sum(w * x) for w, x in zip(weight, found, strict=True)), found

            slope = jax.jit(jax.grad(value, has_aux=True))
            score = jax.jit(lambda tree, batch, recipe=recipe: programs.score(tree, batch, recipe)[0])
            found = [slope(own, batch, weight) for batch, weight in zip(batches, weights, strict=True)]
            for grads, _ in found:
                total = grads if total is None else jax.tree.map(jnp.add, total, grads)
            arrays = {
                "logprobs": [np.asarray(told[0]) for _, told in found],
                "entropies": [np.asarray(told[1]) for _, told in found],
                "reference": [np.asarray(score(other, batch)) for batch in batches],
            }
            for name, found in arrays.items():
                by_rollout = packing.per_rollout(found, places)
                out[name] += [by_rollout[rollout.id] for group in some for rollout in group.rollouts]
        return out | {"gradient": jax.device_get(total)}


def _weights(batch: packing.Batch, places: list[packing.RolloutSpan]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the weights of `_text`, [B, T] each, 0 where there is no sampled token."""
    out = np.zeros((2, *batch.tokens.shape))
    for place in places:
        tail = slice(place.start, place.start + place.length)
        at = batch.positions[place.row, tail]
        out[:, place.row, tail] = np.cos(at), np.sin(3 * at)
    return out[0], out[1]


def _recipe(heat: float) -> programs.Recipe:
    return programs.recipe(
        MODEL,
        config.AlgorithmConfig(),
        config.OptimizerConfig(),
        config.BatchConfig(rows=8, tokens=TOKENS),
        meshes.make_mesh(),
        temperature=heat,
        remat=None,
        scan_layers="no",
        dtype="float64",
        attention=None,
    )


# ---- equal and stale: ratios outside of a band


def _outside(logratios: np.ndarray) -> float:
    ratios = np.exp(logratios)
    return float(np.mean((ratios < BAND[0]) | (ratios > BAND[1])))


def _equal(record) -> None:
    params = lab.weights(0, MODEL)
    asked = lab.requests(
        64, longest_prompt=12, longest=40, temperatures=(1.0,), cuts=((50, 0.8),), vocab=MODEL.vocab_size
    )
    out = lab.run(lab.engine(params, MODEL, restricted=True, kept_ids=MOST), asked)
    groups = [
        Group.unscored(asked[i].prompt, [out[request.rollout_id] for request in asked[i : i + 4]])
        for i in range(0, len(asked), 4)
    ]
    for name, kept_ids in (("without", 0), ("with", MOST)):
        settings = learners.LearnerSettings(
            algorithm=config.AlgorithmConfig(),
            optimizer=config.OptimizerConfig(),
            batch=config.BatchConfig(rows=8, tokens=TOKENS),
            temperature=1.0,
            steps=1,
            max_tokens=40,
            kept_ids=kept_ids,
        )
        scored = learners.Learner(MODEL, params, meshes.make_mesh(), settings).logprobs(groups)
        ratios = np.concatenate([scored[rollout.id] - rollout.logprobs for rollout in out.values()])
        bounds = {"equals": 0.0} if kept_ids else {"at_least": 0.05}
        record.figure(f"equal.{name}.share_outside", _outside(ratios), **bounds)
        record.figure(f"equal.{name}.mean_ratio", float(np.exp(ratios).mean()))
        record.figure(f"equal.{name}.tokens", ratios.size, at_least=1000)


def _stale(record) -> None:
    shares = {
        keep: [record.cached(f"stale-{keep}-{seed}", lambda: _pairs(keep, seed)) for seed in SEEDS]
        for keep in (False, True)
    }
    for keep, found in shares.items():
        name = "with" if keep else "without"
        record.figure(f"stale.{name}.share_outside", [one["share"] for one in found])
        record.figure(f"stale.{name}.tokens", [one["tokens"] for one in found])
        record.figure(f"stale.{name}.most_steps_old", max(one["oldest"] for one in found), at_least=3, at_most=4)
    medians = {keep: statistics.median(one["share"] for one in found) for keep, found in shares.items()}
    record.figure("stale.share_with_over_without", medians[True] / medians[False], at_most=0.5)


def _pairs(keep: bool, seed: int) -> dict:
    """Runs a pipelined demo and returns how many ratios of the learner's to the engine's probabilities lie outside."""
    options = (*STALE, f"seed={seed}", f"sampling.keep_mask={keep}")
    ratios, oldest = engine_ratios.log_ratios("configs/demo/pipeline.py", options)
    return {"share": _outside(ratios), "tokens": ratios.size, "oldest": oldest}


# ---- killed: resume, replay, export


def _killed(record) -> None:
    with tempfile.TemporaryDirectory() as folder:
        runs = Runs(record, Path(folder), KILLED, 12)
        whole, _ = runs.killed_at((0, 1, 2, 3, 4), 1)
        files = sorted((whole / "rollouts").glob("step_*.npz"))
        rollouts = [rollout for file in files for group in rollout_log.read(file) for rollout in group.rollouts]
        counts = np.concatenate([rollout.records.counts for rollout in rollouts])
        record.figure("killed.recorded_tokens", int((counts > 0).sum()), at_least=1000)
        record.figure("killed.mean_ids_of_a_record", float(counts.mean()), at_least=1.01)
        record.figure("killed.tokens_without_a_record", int((counts == 0).sum()), equals=0)
        told = record.said("-m", "jaxrl_post", "rollouts", whole, "--json", timeout_s=LIMIT_S).splitlines()
        names = random.Random(0).sample([json.loads(line)["rollout"] for line in told], REPLAYED)
        again = repeated(run_logs.opened(whole), [run_logs.parsed_name(name) for name in names])
        record.figure("killed.replayed", len(again), at_least=REPLAYED)
        record.figure("killed.replayed_with_equal_bits", sum(one.equal for one in again), equals=len(again))
        _sampled_by_a_saved_step(record, whole, rollouts)


def _sampled_by_a_saved_step(record, run: Path, rollouts: list[Rollout]) -> None:
    """Samples rollouts again that one saved version drew whole, as `serve` would under the law of the run."""
    law, seen, equal = {"temperature": 1.0, "top_k": 12, "top_p": 0.8}, 0, 0
    for step in sorted(steps(run)):
        some = [one for one in rollouts if set(one.versions.tolist()) == {step}]
        if not some:
            continue
        policy = saved_policy.load(f"{run}@{step}")
        keys = np.stack([one.id.seed() for one in some])[:, None]
        given = [dataclasses.replace(one.prompt, id=str(place)) for place, one in enumerate(some)]
        most = json.loads((run / "config.json").read_text())["sampling"]["max_tokens"]
        for one, (mine,) in zip(some, policy.sampled(given, 1, law, keys, most), strict=True):
            seen += 1
            equal += one.tokens.tobytes() == mine.tokens.tobytes() and one.logprobs.tobytes() == mine.logprobs.tobytes()
    record.figure("killed.sampled_by_saved_steps", seen, at_least=20)
    record.figure("killed.sampled_with_equal_bits", equal, equals=seen)


def _planted(record) -> None:
    record.planted("tests/test_trainer_kept_ids.py", 4)
