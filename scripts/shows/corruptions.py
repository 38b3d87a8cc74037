"""300 random corruptions of a run's checkpoints: each is detected and named, or harmless, and the step before is used.

A real run is saved every second step. Then its checkpoints are copied and corrupted one at a time:

- bits are flipped; files are cut, grown, deleted, renamed, or exchanged between steps;
- folders are exchanged, emptied or renumbered; manifests are edited or computed anew;
- leftovers are planted, and the key is removed.

The newest step that is offered must have the very bytes that were saved under its number. Some corrupted runs are
resumed and end as the undisturbed one.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from killed import Runs

MINUTES = 5.0
COUNT, RESUMED = 300, 4
STEPS = 8
COMMAND = (
    "--config=configs/demo.py",
    f"--config.steps={STEPS}",
    "--config.scheduler.prompts=8",
    "--config.eval.prompts=4",
    "--config.eval.every=0",
    "--config.checkpoint.every=2",
    "--config.checkpoint.keep_last=4",
)


def show(record) -> None:
    sys.path.insert(0, str(record.root))
    with tempfile.TemporaryDirectory() as folder:
        runs = Runs(record, Path(folder), COMMAND, STEPS)
        runs.finish("whole")
        whole = runs.here / "whole"
        truth = _contents(whole / "checkpoints")
        record.figure("steps_saved", len(truth), at_least=3)
        outcomes, wrong = Counter(), []
        for seed in range(COUNT):
            kind, outcome = _corrupted(whole / "checkpoints", runs.here / "copy", seed, truth)
            outcomes[f"{kind}: {outcome}"] += 1
            if outcome == "WRONG":
                wrong.append([seed, kind])
        for name in sorted(outcomes):
            print(f"  {name:60} {outcomes[name]}", flush=True)
        record.figure("corruptions", sum(outcomes.values()), at_least=300)
        record.figure("kinds", len(KINDS))
        for outcome in ("detected", "harmless", "refused"):
            record.figure(outcome, sum(n for name, n in outcomes.items() if name.endswith(f": {outcome}")))
        record.figure("wrong", wrong, equals=[])
        for seed in range(RESUMED):
            record.figure(f"resumed_{seed}.what_differs", _resumed(runs, seed), equals=[])


def _contents(folder: Path) -> dict[int, dict[str, bytes]]:
    """Returns the bytes of every file of every step."""
    return {
        int(step.name.removeprefix("step_")): {
            path.relative_to(step).as_posix(): path.read_bytes() for path in step.rglob("*") if path.is_file()
        }
        for step in sorted(folder.glob("step_*[0-9]"))
    }


def _corrupted(source: Path, copy: Path, seed: int, truth: dict[int, dict[str, bytes]]) -> tuple[str, str]:
    """Corrupts a copy. Returns the kind, and "detected", "harmless", "refused" or "WRONG"."""
    from jaxrl_post.checkpoint.store import Checkpoints

    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(source, copy)
    noise = random.Random(seed)
    kind = sorted(KINDS)[seed % len(KINDS)]
    KINDS[kind](copy, noise)
    said: list[str] = []
    try:
        found = Checkpoints(copy, keep_last=2, say=said.append).newest()
    except ValueError as error:
        return kind, "refused" if str(copy) in str(error) else "WRONG"
    if found is None:
        return kind, "WRONG"
    names = truth.get(found.step, {})
    same = names and all(
        (found.path / name).is_file() and (found.path / name).read_bytes() == data for name, data in names.items()
    )
    if not same:
        return kind, "WRONG"
    if found.step == max(truth):
        return kind, "harmless"
    return kind, "detected" if said and f"step {max(truth)}" in " ".join(said) else "WRONG"


def _resumed(runs: Runs, seed: int) -> list[str]:
    """Cuts a run back to before its end, corrupts its newest step, resumes it, and returns what differs."""
    name = f"corrupted-{seed}"
    shutil.copytree(runs.here / "whole", runs.here / name)
    shutil.rmtree(runs.here / name / "checkpoints" / f"step_{STEPS:06d}")
    KINDS[sorted(KINDS)[(3 * seed) % len(KINDS)]](runs.here / name / "checkpoints", random.Random(seed))
    if not (runs.here / name / "checkpoints" / ".key").is_file():
        shutil.copy(runs.here / "whole" / "checkpoints" / ".key", runs.here / name / "checkpoints" / ".key")
    runs.finish(name)
    return runs.differences(runs.here / "whole", runs.here / name)


# ---- Corruptions. Each changes the newest step below `folder`.


def _newest(folder: Path) -> Path:
    return sorted(folder.glob("step_*[0-9]"))[-1]


def _file(folder: Path, noise: random.Random) -> Path:
    return noise.choice(sorted(path for path in _newest(folder).rglob("*") if path.is_file() and path.stat().st_size))


def _flip(folder: Path, noise: random.Random) -> None:
    path = _file(folder, noise)
    data = bytearray(path.read_bytes())
    data[noise.randrange(len(data))] ^= 1 << noise.randrange(8)
    path.write_bytes(data)


def _cut(folder: Path, noise: random.Random) -> None:
    path = _file(folder, noise)
    path.write_bytes(path.read_bytes()[: noise.randrange(path.stat().st_size)])


def _grow(folder: Path, noise: random.Random) -> None:
    path = _file(folder, noise)
    path.write_bytes(path.read_bytes() + noise.randbytes(1 + noise.randrange(100)))


def _delete(folder: Path, noise: random.Random) -> None:
    _file(folder, noise).unlink()


def _rename(folder: Path, noise: random.Random) -> None:
    path = _file(folder, noise)
    path.rename(path.with_name(f"{path.name}x"))


def _exchange_file(folder: Path, noise: random.Random) -> None:
    path = _file(folder, noise)
    other = sorted(folder.glob("step_*[0-9]"))[0] / path.relative_to(_newest(folder))
    if other.is_file():
        path.write_bytes(other.read_bytes())
    else:
        path.unlink()


def _exchange_arrays(folder: Path, noise: random.Random) -> None:
    """Puts an older step's arrays into the newest, and computes its manifest anew, with a key of its own."""
    from jaxrl_post.checkpoint import store

    newest, oldest = _newest(folder), sorted(folder.glob("step_*[0-9]"))[0]
    part = noise.choice(("arrays", "host"))
    shutil.rmtree(newest / part)
    shutil.copytree(oldest / part, newest / part)
    step = int(newest.name.removeprefix("step_"))
    made = store.manifest(newest, step, noise.randbytes(32))
    (newest / store.MANIFEST).write_text(json.dumps(made))


def _renumber(folder: Path, noise: random.Random) -> None:
    """Puts an older step under the newest one's number."""
    newest, oldest = _newest(folder), sorted(folder.glob("step_*[0-9]"))[0]
    shutil.rmtree(newest)
    shutil.copytree(oldest, newest)


def _edit_manifest(folder: Path, noise: random.Random) -> None:
    path = _newest(folder) / "MANIFEST.json"
    listed = json.loads(path.read_text())
    choices: list[Callable[[], object]] = [
        lambda: listed.update(files={}),
        lambda: listed.update(step=listed["step"] + 1),
        lambda: listed.update(signature="0" * 64),
        lambda: listed.pop("signature"),
        lambda: listed["files"].pop(noise.choice(sorted(listed["files"]))),
        lambda: listed["files"].update({noise.choice(sorted(listed["files"])): None}),
        lambda: listed.update(files=sorted(listed["files"])),
    ]
    noise.choice(choices)()
    path.write_text(json.dumps(listed))


def _junk_manifest(folder: Path, noise: random.Random) -> None:
    junk = noise.choice([b"", b"{", b"[]", b"null", noise.randbytes(64), b"[" * 100_000, b'{"files": 3}'])
    (_newest(folder) / "MANIFEST.json").write_bytes(junk)


def _empty_folder(folder: Path, noise: random.Random) -> None:
    newest = _newest(folder)
    shutil.rmtree(newest)
    newest.mkdir()


def _leftovers(folder: Path, noise: random.Random) -> None:
    """What a kill or a user may leave beside the steps: harmless."""
    noise.choice(
        [
            lambda: (folder / "step_000010.part").write_text("a file"),
            lambda: (folder / "step_000010.part" / "arrays").mkdir(parents=True),
            lambda: (folder / "step_000001.gone").mkdir(),
            lambda: (folder / "notes.txt").write_text("mine"),
            lambda: (folder / "step_000002.damaged-1").mkdir(),
        ]
    )()


def _no_key(folder: Path, noise: random.Random) -> None:
    key = folder / ".key"
    noise.choice(
        [key.unlink, lambda: key.write_text(""), lambda: key.write_text("zz"), lambda: key.write_bytes(b"\xff")]
    )()


KINDS: dict[str, Callable[[Path, random.Random], None]] = {
    "bit flipped": _flip,
    "cut": _cut,
    "grown": _grow,
    "deleted": _delete,
    "renamed": _rename,
    "file of another step": _exchange_file,
    "folder of another step, manifest computed anew": _exchange_arrays,
    "older step under the newest number": _renumber,
    "manifest edited": _edit_manifest,
    "manifest replaced by junk": _junk_manifest,
    "step emptied": _empty_folder,
    "leftovers": _leftovers,
    "key removed or damaged": _no_key,
}
