"""The rollout log: rollouts/step_NNNNNN.npz, one file per round, written with its first step, and index.jsonl.

Invariant: `read` returns the groups that `write` received, with every field. Equal groups give equal bytes (fixed
names, order and zip dates), so the logs of two processes can be compared byte by byte. A file is written completely or
not at all.

Nothing is pickled: texts are JSON in an array of bytes. So a prompt's `extra` and `messages` must be values that JSON
can hold.

Arrays of a file with N rollouts in g groups, M tokens and C components:

- groups: `group_offsets` int64[g+1], `prompt_offsets` int64[g+1], `prompt_tokens` int32.
- tokens, each [M] in the order of rollouts: `tokens sampled logprobs entropies versions drafted favourites clocks`.
- the record of a token, where it has one: `kept_ids` int32 of all tokens, `kept_ends` int64[M] (ring/ragged.py). Words of the route
  through experts stand behind the ids that were kept (models/experts.py).
- rollouts: `offsets` int64[N+1], `seeds` uint32[N, 2], `finish` uint8[N] (index into texts.finishes).
- clocks of rollouts: `start_clock` and `finish_clock`, int64[N].
- scores: `rewards` f32[N], `scored` bool[N], `components` f32[C, N], `present` bool[C, g].
- `texts`: {"finishes", "components", "ids": [N], "prompts": [g]}.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxrl_post.ring import written
from jaxrl_post.ring.ragged import Ragged
from jaxrl_post.ring.types import PER_TOKEN, Finish, Group, Prompt, Rollout, RolloutId, saved_name

# arrays of a file that do not grow with its tokens
_SCORES = ("group_offsets", "prompt_offsets", "prompt_tokens", "rewards", "scored", "components", "present")
_FINISHES = [finish.value for finish in Finish]


class Scores(NamedTuple):
    """What a group scored, without the tokens of its rollouts. The arrays are those of types.Group."""

    prompt: Prompt
    ids: list[RolloutId]
    rewards: np.ndarray
    scored: np.ndarray
    components: Mapping[str, np.ndarray]

    @property
    def accuracies(self) -> np.ndarray:
        """Returns f32[G]: the component "acc", or the reward where there is no such component."""
        return self.components.get("acc", self.rewards)


class RolloutLog:
    """Writes into `folder`, which is created. Writing a step again replaces its file and adds an index line."""

    def __init__(self, folder: str | Path):
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)

    def write(self, step: int, groups: Sequence[Group]) -> None:
        """Writes a file and a line of the index: step, file, num_groups, num_rollouts, num_tokens, bytes, sha256."""
        name, data = f"step_{step:06d}.npz", to_bytes(groups)
        written.whole(self._folder / name, data)
        self._index(step, name, groups, data)

    def _index(self, step: int, name: str, groups: Sequence[Group], data: bytes) -> None:
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        line = {
            "step": step,
            "file": name,
            "num_groups": len(groups),
            "num_rollouts": len(rollouts),
            "num_tokens": sum(len(rollout) for rollout in rollouts),
            "bytes": len(data),
            "sha256": hashlib.sha256(data).hexdigest(),
        }
        with written.Log(self._folder / "index.jsonl") as index:
            index.write(json.dumps(line) + "\n")


def read(path: str | Path) -> tuple[Group, ...]:
    """Returns the groups of a step's file.

    Raises:
      ValueError: the file is no rollout log, or is damaged.
    """
    with _archive(path) as archive:
        arrays = {name.removesuffix(".npy"): _array(archive.read(name)) for name in archive.namelist()}
        return _groups(arrays, json.loads(arrays["texts"].tobytes()))


def ids(path: str | Path) -> list[RolloutId]:
    """Returns the ids of a step's rollouts, in the order of the file. Reads no tokens.

    Raises:
      ValueError: the file is no rollout log, or is damaged.
    """
    with _archive(path) as archive:
        return [RolloutId(*fields) for fields in json.loads(_array(archive.read("texts.npy")).tobytes())["ids"]]


def scores(path: str | Path) -> list[Scores]:
    """Returns what the groups of a step's file scored. Reads no tokens of rollouts, and so takes a tenth of the time.

    Raises:
      ValueError: the file is no rollout log, or is damaged.
    """
    with _archive(path) as archive:
        arrays = {name: _array(archive.read(f"{name}.npy")) for name in (*_SCORES, "texts")}
        texts = json.loads(arrays["texts"].tobytes())
        names = [RolloutId(*fields) for fields in texts["ids"]]
        return [
            Scores(
                prompt=prompt,
                ids=names[mine],
                rewards=arrays["rewards"][mine],
                scored=arrays["scored"][mine],
                components=_present(arrays, texts, i, mine),
            )
            for i, (prompt, mine) in enumerate(_prompts(arrays, texts))
        ]


def lengths(path: str | Path) -> np.ndarray:
    """Returns int64[N], the tokens of each of a step's rollouts. Reads nothing else.

    Raises:
      ValueError: the file is no rollout log, or is damaged.
    """
    with _archive(path) as archive:
        return np.diff(_array(archive.read("offsets.npy")))


@contextlib.contextmanager
def _archive(path: str | Path) -> Iterator[zipfile.ZipFile]:
    """Opens a step's file. What is wrong with it is a ValueError."""
    try:
        with open(path, "rb") as file, zipfile.ZipFile(file) as archive:
            yield archive
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no rollout log, or is damaged: {error}") from error


def to_bytes(groups: Sequence[Group]) -> bytes:
    """Returns the bytes of a step's file."""
    arrays = _arrays(groups)
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, array in arrays.items():
            entry = zipfile.ZipInfo(f"{name}.npy", date_time=(1980, 1, 1, 0, 0, 0))
            entry.compress_type, entry.create_system = zipfile.ZIP_DEFLATED, 3
            body = io.BytesIO()
            np.lib.format.write_array(body, np.ascontiguousarray(array), allow_pickle=False)
            archive.writestr(entry, body.getvalue())
    return out.getvalue()


def _array(data: bytes) -> np.ndarray:
    return np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)


def _arrays(groups: Sequence[Group]) -> dict[str, np.ndarray]:
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    names = sorted({name for group in groups for name in group.components})
    texts = {
        "finishes": _FINISHES,
        "components": names,
        "ids": [list(rollout.id) for rollout in rollouts],
        "prompts": [_prompt(group.prompt) for group in groups],
    }
    components = [
        _joined([group.components.get(name, np.full(len(group.rollouts), np.nan)) for group in groups], np.float32)
        for name in names
    ]
    present = [[name in group.components for group in groups] for name in names]
    return {
        "group_offsets": _offsets(len(group.rollouts) for group in groups),
        "prompt_offsets": _offsets(group.prompt.tokens.size for group in groups),
        "prompt_tokens": _joined([group.prompt.tokens for group in groups], np.int32),
        "offsets": _offsets(len(rollout) for rollout in rollouts),
        **{saved_name(name): _joined([getattr(r, name) for r in rollouts], kind) for name, kind in PER_TOKEN.items()},
        **Ragged.joined([rollout.records for rollout in rollouts]).state("kept"),
        "seeds": np.array([rollout.id.seed() for rollout in rollouts], np.uint32).reshape(len(rollouts), 2),
        "finish": np.array([_FINISHES.index(rollout.finish.value) for rollout in rollouts], np.uint8),
        "start_clock": np.array([rollout.start_clock for rollout in rollouts], np.int64),
        "finish_clock": np.array([rollout.finish_clock for rollout in rollouts], np.int64),
        "rewards": _joined([group.rewards for group in groups], np.float32),
        "scored": _joined([group.scored for group in groups], bool),
        "components": np.array(components, np.float32).reshape(len(names), len(rollouts)),
        "present": np.array(present, bool).reshape(len(names), len(groups)),
        "texts": np.frombuffer(json.dumps(texts, default=_plain).encode(), np.uint8),
    }


def _groups(arrays: Mapping[str, np.ndarray], texts: Mapping) -> tuple[Group, ...]:
    kept = Ragged.restored(arrays, "kept")
    return tuple(
        Group(
            prompt=prompt,
            rollouts=tuple(_rollout(arrays, texts, prompt, n, kept) for n in range(mine.start, mine.stop)),
            rewards=arrays["rewards"][mine],
            scored=arrays["scored"][mine],
            components=_present(arrays, texts, i, mine),
        )
        for i, (prompt, mine) in enumerate(_prompts(arrays, texts))
    )


def _prompts(arrays: Mapping[str, np.ndarray], texts: Mapping) -> Iterator[tuple[Prompt, slice]]:
    """Yields the prompt of each group, and where its rollouts lie."""
    starts, prompt_starts = arrays["group_offsets"].tolist(), arrays["prompt_offsets"].tolist()
    for i, fields in enumerate(texts["prompts"]):
        tokens = arrays["prompt_tokens"][prompt_starts[i] : prompt_starts[i + 1]]
        prompt = Prompt(tokens=tokens, **fields | {"messages": tuple(fields["messages"])})
        yield prompt, slice(starts[i], starts[i + 1])


def _present(arrays: Mapping[str, np.ndarray], texts: Mapping, i: int, mine: slice) -> dict[str, np.ndarray]:
    """Returns the components that group i has."""
    names = enumerate(texts["components"])
    return {name: arrays["components"][c, mine] for c, name in names if arrays["present"][c, i]}


def _rollout(arrays: Mapping[str, np.ndarray], texts: Mapping, prompt: Prompt, n: int, kept: Ragged | None) -> Rollout:
    mine = slice(*arrays["offsets"][n : n + 2].tolist())
    return Rollout(
        id=RolloutId(*texts["ids"][n]),
        prompt=prompt,
        **{name: arrays[saved_name(name)][mine] for name in PER_TOKEN},
        kept=kept and kept[mine].apart(),
        finish=Finish(texts["finishes"][arrays["finish"][n]]),
        start_clock=int(arrays["start_clock"][n]),
        finish_clock=int(arrays["finish_clock"][n]),
    )


def _prompt(prompt: Prompt) -> dict:
    return {
        "id": prompt.id,
        "answer": prompt.answer,
        "source": prompt.source,
        "messages": [dict(message) for message in prompt.messages],
        "extra": dict(prompt.extra),
        **({"weight": prompt.weight} if prompt.weight != 1 else {}),
    }


def _offsets(sizes: Iterable[int]) -> np.ndarray:
    return np.cumsum([0, *sizes], dtype=np.int64)


def _joined(parts: Sequence[np.ndarray], kind: type) -> np.ndarray:
    return np.concatenate([np.zeros(0, kind), *parts]).astype(kind)


def _plain(value):
    """Converts mappings and numbers of other libraries to values that JSON can hold."""
    if isinstance(value, Mapping):
        return dict(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} in a prompt's columns cannot be logged: {value!r}")
