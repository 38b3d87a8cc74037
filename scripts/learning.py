"""Accuracy on held-out prompts before and after a whole run, as the demos' shows bound it, with runs that must not learn."""

from __future__ import annotations

import functools
import json
import operator
import resource
import tempfile
from collections.abc import Callable
from pathlib import Path

import trained

from jaxrl_post import config
from jaxrl_post.data import prompts
from jaxrl_post.runs import rollout_log

_DRAFTED = ("--config.steps=15", "--config.eval.prompts=0", "--config.eval.every=0", "--config.checkpoint.every=0")
_EPOCH = 5  # steps of 64 prompts until each of the 320 has been seen
RECIPE = ("model.path", "steps", "optimizer.lr", "eval.every", "checkpoint.every")
CONTROLS = {"learning_rate_0": ("--config.optimizer.lr=0.0",), "shuffled_rewards": ("--config.reward.shuffle=true",)}


def run(record, file: str, sft: str, *overrides: str, timeout_s: float, largest: tuple[str, ...] = ()) -> dict:
    """Runs one whole command from a cold compilation cache. Returns its figures and what its held-out prompts met.

    Args:
      file: the config. sft: that of the supervised training that made its policy.
      largest: metrics whose largest value over the steps is returned, too.
    """
    with tempfile.TemporaryDirectory() as folder:
        place, cache = Path(folder) / "run", Path(folder) / "cache"
        cold, before = {"JAX_COMPILATION_CACHE_DIR": str(cache)}, resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds = trained.run(record, file, place, "", *overrides, timeout_s=timeout_s, env=cold)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        evaluations = (place / "evaluations" / "index.jsonl").read_text().splitlines()
        return {
            **trained.summary(place)["eval"],
            "seconds": seconds,
            "cpu_seconds": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
            "evaluations": len(evaluations),
            "seen": _seen(record, place, sft),
            "largest": {name: max(row[name] for row in trained.rows(place, name)) for name in largest},
        }


def _seen(record, place: Path, sft: str) -> int:
    """Returns the held-out prompts that the training rollouts, or the rows of the supervised training, contain."""

    def ids(folder: str) -> set[str]:
        return {group.prompt.id for file in sorted((place / folder).glob("*.npz")) for group in rollout_log.read(file)}

    c = config.resolve(config.load(str(record.root / sft)))
    rows = prompts.rows(c.data.train, seed=c.seed, split="sft", size=c.data.size, arguments=c.data.task)
    return len(ids("evaluations") & (ids("rollouts") | {row["id"] for row in rows}))


def learns(record, name: str, found: dict, *, after: float) -> None:
    """Writes the figures of a run that must learn, to at least this accuracy."""
    record.figure(f"{name}.prompts", found["after"]["n"], at_least=256)
    record.figure(f"{name}.prompts_seen_in_training", found["seen"], equals=0)
    record.figure(f"{name}.evaluations", found["evaluations"], at_least=3)
    record.figure(f"{name}.mean_at_4.before", found["before"]["mean_at_4"], at_most=0.5)
    record.figure(f"{name}.mean_at_4.after", found["after"]["mean_at_4"], at_least=after)
    record.figure(f"{name}.greedy.before", found["before"]["greedy"])
    record.figure(f"{name}.greedy.gain", found["after"]["greedy"] - found["before"]["greedy"], at_least=0.2)
    for when in ("before", "after"):
        record.figure(f"{name}.length_mean.{when}", found[when]["length_mean"])


def controls_learn_nothing(record, learnt: Callable[..., dict], *flags: str) -> None:
    """Runs each control and writes its figures. learnt(*flags): what `run` returns for the demo's config with these flags."""
    for name, control in CONTROLS.items():
        more = (*control, "--config.eval.prompts=1024", *flags)
        learns_nothing(record, name, record.cached(name, functools.partial(learnt, *more)))


def learns_nothing(record, name: str, found: dict) -> None:
    """Writes the figures of a control."""
    record.figure(f"{name}.prompts", found["after"]["n"], equals=1024)
    record.figure(f"{name}.prompts_seen_in_training", found["seen"], equals=0)
    record.figure(f"{name}.mean_at_4.before", found["before"]["mean_at_4"])
    for kind in ("mean_at_4", "greedy"):
        record.figure(f"{name}.{kind}.gain", found["after"][kind] - found["before"][kind], at_most=0.0299)


def recipe(record, file: str, *more: str) -> list[str]:
    """Returns the flags that make another file's run one of this demo's config. `more`: options beside RECIPE."""
    found = config.load(str(record.root / file))
    return [f"--config.{name}={operator.attrgetter(name)(found)}" for name in (*RECIPE, *more)]


def drafts(record, *same: str, timeout_s: float) -> dict:
    """Trains with drafts and without on 320 prompts, and compares all rollouts, the exported weights and the engine's steps.

    Rows are free in the cost table, as where memory is the bound. `same`: what makes the run one of a demo.
    """
    texts, weights, rows = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder) / "free.json"
        table.write_text(json.dumps({"figures": {"step_s": {"64": 1.0, "128": 1.0}}}))
        flags = (*same, *_DRAFTED, f"--config.engine.cost_table={table}")
        for number, more in enumerate(((), ("--config.speculation=default",))):
            place = Path(folder) / str(number)
            trained.run(record, "configs/demo/speculation.py", place, "", *flags, *more, timeout_s=timeout_s)
            groups = [one for file in sorted((place / "rollouts").glob("*.npz")) for one in rollout_log.read(file)]
            texts.append({rollout.id: rollout for group in groups for rollout in group.rollouts})
            weights.append((place / "policy" / "model.safetensors").read_bytes())
            rows.append(trained.rows(place, "rows/steps"))
    parts = operator.attrgetter("tokens", "logprobs", "entropies", "versions", "kept.ids")
    bits = [{name: [part.tobytes() for part in parts(one)] for name, one in some.items()} for some in texts]
    on, off = ([row["rows/steps"] for row in some] for some in rows)
    return {
        "tokens": sum(map(len, texts[0].values())),
        "recorded_words": sum(one.kept.ids.size for one in texts[0].values()),
        "rollouts_with_other_bits": sum(bits[0].get(name) != bits[1].get(name) for name in bits[0] | bits[1]),
        "other_weights": weights[0] != weights[1],
        "accepted": sum(row["spec/num_accepted"] for row in rows[0]),
        "engine_steps_off_over_on": sum(off) / sum(on),
        "engine_steps_off_over_on_after_an_epoch": sum(off[_EPOCH:]) / sum(on[_EPOCH:]),
    }


def drafts_save_steps(record, found: dict, *, times: float) -> None:
    """Writes the figures of `drafts`. times: engine steps without drafts over those with them, at least."""
    record.figure("drafts.tokens", found["tokens"], at_least=50_000)
    record.figure("drafts.accepted", found["accepted"], at_least=1)
    record.figure("drafts.rollouts_with_other_bits", found["rollouts_with_other_bits"], equals=0)
    record.figure("drafts.other_weights", found["other_weights"], equals=False)
    record.figure("drafts.engine_steps_off_over_on", found["engine_steps_off_over_on"], at_least=times)
    after = "engine_steps_off_over_on_after_an_epoch"
    record.figure(f"drafts.{after}", found[after])
