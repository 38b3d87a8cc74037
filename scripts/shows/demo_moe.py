"""A mixture of experts visibly learns: configs/demo/moe.py at three seeds, each from a cold compilation cache; two controls do not.

- arms: seed 0 without repeated routes, and pipelined (configs/demo/pipeline.py) with them and without.
- controls: learning rate 0 and shuffled rewards, each on 1,024 held-out prompts.
- seeds: synchronous, with routes that the learner repeats. Each takes at most three minutes, which needs two free cores.
- drafts: the same recipe on 320 prompts, with drafts (configs/demo/speculation.py) and without. All steps have to train on
  the same tokens, log-probs and routes. Rows are free in the cost table, as where memory is the bound. The ratio of engine
  steps is what such a device would gain.
"""

from __future__ import annotations

import json
import operator
import tempfile
from pathlib import Path

import learning
import trained

from jaxrl_post import config
from jaxrl_post.runs import rollout_log

MINUTES = 20.0
PLATFORM = "cpu"

SEEDS, AFTER = (0, 1, 2), 0.6
MOE, SFT = "configs/demo/moe.py", "configs/demo/moe_sft.py"
LIMIT_S = 1200.0  # of one run
METRICS = ("training/router_mismatch", "training/router_drift", "off_policy/max")
RECIPE = (  # what makes another file's run one of configs/demo/moe.py
    *("model.path", "steps", "optimizer.lr", "eval.every", "checkpoint.every"),
    *("algorithm.router_replay", "algorithm.router_aux_loss_coef", "algorithm.router_z_loss_coef"),
)
WITHOUT = "--config.algorithm.router_replay=False"
DRAFTED = ("--config.steps=15", "--config.eval.prompts=0", "--config.eval.every=0", "--config.checkpoint.every=0")
EPOCH = 5  # steps of 64 prompts until each of the 320 has been seen
BOUNDS = {
    "tokens": {"at_least": 50_000},
    "recorded_words": {"at_least": 50_000},
    "rollouts_with_other_bits": {"equals": 0},
    "other_weights": {"equals": False},
    "engine_steps_off_over_on": {"at_least": 1.5},
}


def show(record) -> None:
    recipe = config.load(str(record.root / MOE))
    same = [f"--config.{name}={operator.attrgetter(name)(recipe)}" for name in RECIPE]
    arms = {
        "pipelined": ("configs/demo/pipeline.py", *same),
        "pipelined_without_replay": ("configs/demo/pipeline.py", *same, WITHOUT),
        "sync_without_replay": (MOE, WITHOUT),
    }
    for name, (file, *flags) in arms.items():
        found = record.cached(name, lambda: _learnt(record, file, *flags))
        learning.learns(record, name, found, after=AFTER)
        for metric, value in found["largest"].items():
            replayed = metric == "training/router_mismatch" and WITHOUT not in flags
            record.figure(f"{name}.{metric.replace('/', '.')}", value, **(dict(equals=0) if replayed else {}))
    learning.controls_learn_nothing(record, lambda *flags: _learnt(record, MOE, *flags), "--config.eval.every=0")
    for seed in SEEDS:
        found = record.cached(f"seed-{seed}", lambda: _learnt(record, MOE, f"--config.seed={seed}"))
        learning.learns(record, f"seed_{seed}", found, after=AFTER)
        record.figure(f"seed_{seed}.router_mismatch", found["largest"]["training/router_mismatch"], equals=0)
        record.figure(f"seed_{seed}.cpu_seconds", found["cpu_seconds"])
        record.figure(f"seed_{seed}.seconds", found["seconds"], at_most=180.0)
    for name, value in record.cached("drafts", lambda: drafts(record, same)).items():
        record.figure(f"drafts.{name}", value, **BOUNDS.get(name, {}))


def _learnt(record, file: str, *flags: str) -> dict:
    return learning.run(record, file, SFT, *flags, timeout_s=LIMIT_S, largest=METRICS)


def drafts(record, same: list[str]) -> dict:
    """Trains with drafts and without, and compares all rollouts, the exported weights and the engine's steps."""
    texts, weights, rows = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder) / "free.json"
        table.write_text(json.dumps({"figures": {"step_s": {"64": 1.0, "128": 1.0}}}))
        flags = (*same, *DRAFTED, f"--config.engine.cost_table={table}")
        for number, more in enumerate(((), ("--config.speculation=default",))):
            place = Path(folder) / str(number)
            trained.run(record, "configs/demo/speculation.py", place, "", *flags, *more, timeout_s=LIMIT_S)
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
        "drafts_accepted": sum(row["spec/num_accepted"] for row in rows[0]),
        "engine_steps_off_over_on": sum(off) / sum(on),
        "engine_steps_off_over_on_after_an_epoch": sum(off[EPOCH:]) / sum(on[EPOCH:]),
    }
