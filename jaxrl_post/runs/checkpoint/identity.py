"""What a checkpoint belongs to: configuration, data and versions, and how they differ from those of a run that resumes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxrl_post.ring.types import Prompt

# Config values that may change between a save and its resumption; `steps` may grow too.
MAY_CHANGE = (
    "name",
    "run_dir",
    "eval.show",
    "reward.workers",
    "reward.timeout_s",
    "environment.workers",
    "environment.timeout_s",
    "checkpoint.keep_last",
    "checkpoint.max_failures",
    "logger.console",
    "logger.tensorboard",
    "logger.wandb",
    "logger.project",
    "logger.name",
)

# What versions did that did not have a config value yet. A run of theirs goes on so.
BEFORE = {"config.engine.products": ("library", "auto")}

PIECE, PIECES = 1 << 16, 64  # bytes of a piece of a file of weights, and how many are read


def fingerprint(name: str, seed: int, prompts: Iterable[Prompt]) -> dict:
    """Name, seed, length and content hash of the prompts, each with all of its columns."""
    digest, count = hashlib.blake2b(digest_size=16), 0
    for prompt in prompts:
        fields = [prompt.id, prompt.tokens.tolist(), prompt.answer, prompt.source, prompt.messages, prompt.extra]
        fields += [] if prompt.value is None else ["value"]  # the number 3 is another ground truth than the text "3"
        digest.update(json.dumps(fields, sort_keys=True, default=_column).encode())
        count += 1
    return {"name": name, "seed": seed, "length": count, "digest": digest.hexdigest()}


def reward_code(functions: Iterable[str], folders: Iterable[str]) -> dict[str, str]:
    """Returns the hash of the file of each reward function, by its path as the config names it.

    Functions of this package are left out: its version stands for them. A module is searched below `folders` and not
    imported, so one that is made at run time is left out too.
    """
    out = {}
    for path in functions:
        name = path.rpartition(":")[0]
        if name.startswith("jaxrl_post."):
            continue
        inside = name.replace(".", "/")
        places = (
            [Path(name)]
            if name.endswith(".py")
            else [
                Path(folder or ".") / file for folder in folders for file in (f"{inside}.py", f"{inside}/__init__.py")
            ]
        )
        found = next((place for place in places if place.is_file()), None)
        if found is not None:
            out[path] = hashlib.blake2b(found.read_bytes(), digest_size=16).hexdigest()
    return out


def weights(folder: Path) -> str:
    """Returns a hash of a model's folder, without reading all of it.

    It is of config.json, and of every safetensors file's name, size and pieces that are spread evenly over it.
    """
    digest = hashlib.blake2b((folder / "config.json").read_bytes(), digest_size=16)
    for file in sorted(folder.glob("*.safetensors")):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with file.open("rb") as data:
            for index in range(PIECES):
                data.seek(max(size - PIECE, 0) * index // max(PIECES - 1, 1))
                digest.update(data.read(PIECE))
    return digest.hexdigest()


def _column(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else value.tolist() if hasattr(value, "tolist") else str(value)


def check_same(then: Mapping, now: Mapping, step: int, *, may_move: bool = False) -> None:
    """Refuses to go on under another config, on other data or with another number of processes.

    Args:
      then, now: {"config": nested dict, "data": nested dict, "processes": int, "graders": dict, "reward_code": dict,
        "teacher": str},
        or some of them; others are ignored.
      step: that was saved; 0 before the first save.
      may_move: another mesh and another number of processes are allowed.
    Raises:
      ValueError: one sentence with every field that differs.
    """
    lines = []
    parts = [
        {
            name: told[name]
            for name in ("config", "data", "processes", "graders", "reward_code", "teacher")
            if name in told
        }
        for told in (then, now)
    ]
    for field, old, new in differences(*parts):
        grows = field == "config.steps" and new >= max(old, step)
        moves = may_move and (field == "processes" or field.startswith("config.mesh."))
        as_before = old == "absent" and new in BEFORE.get(field, ())
        if not grows and not moves and not as_before and field.removeprefix("config.") not in MAY_CHANGE:
            lines.append(f"{field.removeprefix('config.')} {_shown(old)} -> {_shown(new)}")
    if lines:
        raise ValueError(
            f"resume refused: {'; '.join(lines)}: step {step} was saved under the first and would go on "
            "under the second; undo that or begin a new run (steps may grow, "
            f"{', '.join(MAY_CHANGE)} may change)"
        )


def differences(then: Any, now: Any, where: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Dotted name, old and new value of every field that differs, in order of names."""
    if isinstance(then, Mapping) and isinstance(now, Mapping):
        for key in sorted({*then, *now}):
            name = f"{where}.{key}" if where else key
            yield from differences(then.get(key, "absent"), now.get(key, "absent"), name)
    elif then != now:
        yield where, then, now


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
