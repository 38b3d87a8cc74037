"""Reads the curves of a run back with the readers of TensorBoard and of Weights & Biases, and compares them with metrics.jsonl.

    python scripts/curve_readers.py RUN     prints both comparisons as JSON; it needs the extras tensorboard and wandb

TensorBoard's reader is its EventAccumulator, which drops what a restarted writer took back. Its values are float32. The
reader of Weights & Biases is its DataStore, over the one file that an offline run leaves.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

Points = dict[tuple[str, int], list[float]]  # (metric, step) -> values, in the order of the file


def tensorboard(run: Path) -> Points:
    """Returns every scalar of the run's event files."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0})
    reader.Reload()
    return _points((tag, one.step, one.value) for tag in reader.Tags()["scalars"] for one in reader.Scalars(tag))


def wandb(run: Path) -> Points:
    """Returns every number of the run's history records. Names with an underscore in front are the library's own."""
    (file,) = (run / "wandb").glob("offline-run-*/*.wandb")
    return _points(
        (name, int(row["_step"]), float(value))
        for row in _history(file)
        for name, value in row.items()
        if name[0] != "_"
    )


def _history(file: Path) -> Iterator[dict]:
    from wandb.proto import wandb_internal_pb2
    from wandb.sdk.internal.datastore import DataStore

    store = DataStore()
    store.open_for_scan(str(file))
    while (data := store.scan_data()) is not None:
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            yield {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}


def metrics(run: Path) -> Points:
    """Returns every value of metrics.jsonl. null is NaN."""
    rows = map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return _points(
        (name, row["step"], math.nan if value is None else value)
        for row in rows
        for name, value in row.items()
        if name != "step"
    )


def compared(found: Points, wanted: Points, kind: type) -> dict:
    """Returns counts: points, steps, points that differ, and points that one side has twice or not at all.

    Args:
      kind: of the numbers that the found side stores.
    """
    both = found.keys() & wanted.keys()
    different = [
        key
        for key in both
        if not np.array_equal(np.array(found[key], kind), np.array(wanted[key], kind), equal_nan=True)
    ]
    return {
        "points": sum(map(len, found.values())),
        "steps": len({step for _, step in found}),
        "missing": len(wanted.keys() - found.keys()),
        "added": len(found.keys() - wanted.keys()),
        "twice": sum(len(values) > 1 for values in found.values()),
        "different": len(different),
    }


def _points(values: Iterable[tuple[str, int, float]]) -> Points:
    out: Points = {}
    for name, step, value in values:
        out.setdefault((name, step), []).append(value)
    return out


def main(arguments: list[str]) -> int:
    run = Path(arguments[0])
    wanted = metrics(run)
    told = {
        "metrics": sum(map(len, wanted.values())),
        "tensorboard": compared(tensorboard(run), wanted, np.float32),
        "wandb": compared(wandb(run), wanted, np.float64),
    }
    print(json.dumps(told))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
