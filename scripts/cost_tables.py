"""Writes what Qwen2.5-7B costs on slices that are not there, as tables by which a small real run decides and is priced.

    python scripts/cost_tables.py

Writes one file for each slice below scripts/tables/. A table has two placements. In `shared`, learner and engine have
all devices. In `split`, each has half of them. Every second is bytes or FLOPs over a published rate, times a share that
good programs reach (jaxrl_post/launch/plan/roofline.py). The learner's mesh is the one with the fewest predicted seconds of
those whose memory plan fits.

Keys and values of a row are left out. The runs' contexts are below 240 tokens, of which a step reads under 2 % of what
it reads of the weights.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = Path(__file__).resolve().parent / "tables"
MODEL, TOKENS = "qwen2_5_7b", 4096  # tokens of an optimizer step for which the mesh is chosen
SLICES = {"8xh100": 1, "v5e-16": 4}  # devices of a replica
ROWS = (1, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024)
LAUNCH_S = 5e-5  # of a step: its kernels are launched


@dataclasses.dataclass(frozen=True, kw_only=True)
class Price:
    """Seconds of one placement.

    - step_s: of an engine step by its rows, over all replicas, without its launch.
    - launch_s, dispatch_s: of launching a step, and a dispatch. slot_s: of each slot in a dispatch, on the host.
    - train_token_s, train_step_s: of a trained token, and of an optimizer step beside its tokens.
    - publish_s: of handing weights to the engine, while nothing else runs.
    """

    step_s: dict[int, float]
    launch_s: float
    dispatch_s: float
    slot_s: float
    train_token_s: float
    train_step_s: float
    publish_s: float

    def scaled(self, *, launch: float = 1.0, train: float = 1.0) -> Price:
        """Returns the price with other costs of launching and of training."""
        return dataclasses.replace(
            self,
            launch_s=launch * self.launch_s,
            dispatch_s=launch * self.dispatch_s,
            slot_s=launch * self.slot_s,
            train_token_s=train * self.train_token_s,
            train_step_s=train * self.train_step_s,
        )

    def turn_s(self, rows: int) -> float:
        """Returns the seconds of an engine step of `rows` rows, its launch included."""
        import numpy as np

        return float(np.interp(rows, list(self.step_s), list(self.step_s.values()))) + self.launch_s

    def table(self) -> dict:
        """Returns the object of an engine.cost_table file. A step holds its launch."""
        steps = {str(rows): seconds + self.launch_s for rows, seconds in self.step_s.items()}
        figures = {"step_s": steps, "train_token_s": self.train_token_s, "train_step_s": self.train_step_s}
        return {"figures": figures}


def read(slice_name: str, placement: str) -> Price:
    """Returns the committed price of a slice and a placement."""
    found = dict(json.loads((FOLDER / f"{slice_name}.json").read_text())["placements"][placement]["seconds"])
    found["step_s"] = {int(rows): seconds for rows, seconds in found["step_s"].items()}
    return Price(**found)


def made(name: str) -> dict:
    """Returns the object of a slice's file.

    Raises:
      ValueError: no mesh of a placement fits.
    """
    from jaxrl_post.launch.plan import chips, roofline

    where = chips.read(name)
    placements = {"shared": _placed(where, 0), "split": _placed(where, where.devices // 2)}
    return {"slice": name, "model": MODEL, "assumed": roofline.ASSUMED, "placements": placements}


def _placed(where, engine: int) -> dict:
    """Returns the placement with `engine` devices of the engine's own; 0: it shares the learner's."""
    from jaxrl_post.launch.plan import slice_plan
    from jaxrl_post.models.presets import PRESETS

    model, found = PRESETS[MODEL], []
    for options, config in _configs(where, engine):
        plan = slice_plan.plan(config, model, where)
        if plan.word != "does not fit":
            found.append((options, plan, _price(config, model, where)))
    if not found:
        raise ValueError(f"{where.name}: no mesh of {where.devices - engine} devices holds the learner of {MODEL}")
    options, plan, price = min(found, key=lambda one: one[2].train_step_s + TOKENS * one[2].train_token_s)
    held = {"word": plan.word, "mib": round(plan.most / 2**20)}
    return {"options": options, "memory": held, "seconds": _rounded(dataclasses.asdict(price))}


def _configs(where, engine: int) -> Iterator[tuple]:
    """Yields the options and configs of all meshes of the learner."""
    from jaxrl_post import config as configs

    learner, ways = where.devices - engine, SLICES[where.name]
    for tensor in (1, 2, 4):
        fsdp = learner // tensor
        options = [
            *(f"mesh.{name}={n}" for name, n in (("fsdp", fsdp), ("tensor", tensor), ("engine", engine))),
            f"mesh.engine_tensor={ways}",
            f"batch.rows={fsdp}",
            f"batch.tokens={max(512, TOKENS // fsdp)}",
            "optimizer.moments_dtype=bfloat16",
            "optimizer.sums_dtype=bfloat16",
            "optimizer.b2=0.98",
            *(["scheduler.name=pipeline", "scheduler.max_staleness=4"] if engine else []),
            *(["engine.sleep=true"] if where.chip.platform == "tpu" and not engine else []),
        ]
        yield options, configs.resolve(configs.default(), [*_SHAPE, *options])


_SHAPE = (
    f"model.preset={MODEL}",
    "model.compute_dtype=bfloat16",
    "model.remat=true",
    "engine.dtype=bfloat16",
    "engine.max_length=256",
    "engine.page_size=64",
    "engine.slots=32",
    "engine.row_sizes=(64,)",
    "sampling.max_tokens=192",
    "scheduler.prompts=8",
    "scheduler.group_size=8",
    "eval.prompts=0",
)


def _price(config, model, where) -> Price:
    from jaxrl_post.launch.plan import activations, roofline

    count, chip, m = roofline.parameters(model), where.chip, config.mesh
    generating = m.engine or m.learner
    replicas, sums = generating // m.replica, (2 * model.layers * roofline.SUM_S if m.replica > 1 else 0.0)
    weights = 2 * count / m.replica / (chip.bandwidth * roofline.MEMORY)
    row = 2 * count / m.replica / (chip.flops * roofline.PREFILL)
    moments, added = (activations.SIZES[one] for one in (config.optimizer.moments_dtype, config.optimizer.sums_dtype))
    moved = count / m.learner * (2 * 4 + 2 * 2 * moments + 2 * added)  # weights and moments both ways, sums, zeros
    batches = -(-TOKENS // (config.batch.rows * config.batch.tokens))
    links = roofline.train_collectives(config, model, where, batches)
    return Price(
        step_s={rows: max(weights, row * rows / replicas) + sums for rows in ROWS},
        launch_s=LAUNCH_S,
        dispatch_s=roofline.DISPATCH_S,
        slot_s=roofline.SLOT_S,
        train_token_s=6 * count / (m.learner * chip.flops * roofline.TRAIN),
        train_step_s=links + moved / (chip.bandwidth * roofline.MEMORY),
        publish_s=2 * count / m.replica / (where.link(m.learner) * roofline.LINKS),
    )


def _rounded(value):
    if isinstance(value, dict):
        return {str(key): _rounded(member) for key, member in value.items()}
    return float(f"{value:.6g}")


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name in SLICES:
        (FOLDER / f"{name}.json").write_text(json.dumps(made(name), indent=1) + "\n")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
