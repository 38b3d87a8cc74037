"""300 random corruptions of a run's checkpoints: each is found and named or harms nothing, and a whole step is used.

A short run of the demo leaves four whole steps, and another seed gives foreign ones. Each corruption changes a copy
of the folder: a bit, a length, a name, a file, two files or two steps exchanged, or a manifest that was written anew.
Then the newest step is asked for. Its files must be those that the run wrote, byte for byte. A step that is passed over
must be named, with a reason. Twelve of the corruptions, one of each kind, are also resumed by the command. Those runs
end as the undisturbed one.

`--count=30` makes fewer, and `--resumed=3` resumes fewer.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from killed import Runs, end

MINUTES = 8.0
STEPS, EVERY = 8, 2
COMMAND = (
    "--config=configs/demo.py",
    f"--config.steps={STEPS}",
    f"--config.checkpoint.every={EVERY}",
    "--config.checkpoint.keep_last=4",
    "--config.scheduler.prompts=8",
    "--config.eval.prompts=4",
    "--config.eval.every=3",
)


class Folder:
    """A copy of checkpoints/, and random choices in it. `foreign`: the checkpoints of another run."""

    def __init__(self, place: Path, foreign: Path, seed: int):
        self.place, self.foreign, self.noise = place, foreign, random.Random(seed)

    def step(self) -> Path:
        """Returns a step, the newest one in half of the cases."""
        steps = sorted(self.place.glob("step_??????"))
        return steps[-1] if self.noise.random() < 0.5 else self.noise.choice(steps)

    def file(self, step: Path | None = None) -> Path:
        """Returns a file of a step."""
        step = step or self.step()
        return self.noise.choice(sorted(path for path in step.rglob("*") if path.is_file()))


def flip(folder: Folder) -> str:
    """Flips a bit."""
    path = folder.file()
    data = bytearray(path.read_bytes() or b"\0")
    data[folder.noise.randrange(len(data))] ^= 1 << folder.noise.randrange(8)
    path.write_bytes(data)
    return path.name


def cut(folder: Folder) -> str:
    """Truncates a file."""
    path = folder.file()
    os.truncate(path, folder.noise.randrange(max(path.stat().st_size, 1)))
    return path.name


def longer(folder: Folder) -> str:
    """Appends bytes to a file."""
    path = folder.file()
    path.write_bytes(path.read_bytes() + folder.noise.randbytes(folder.noise.randrange(1, 99)))
    return path.name


def delete(folder: Folder) -> str:
    """Deletes a file, a folder of a step, or a step."""
    step = folder.step()
    path = folder.noise.choice([folder.file(step), folder.noise.choice(sorted(step.iterdir())), step])
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    return path.name


def rename(folder: Folder) -> str:
    """Renames a file or a step: to another number, to more zeros, or to any word."""
    step = folder.step()
    if folder.noise.random() < 0.5:
        path = folder.file(step)
        path.rename(path.with_name(f"{path.name}.old"))
        return path.name
    number = int(step.name.removeprefix("step_"))
    names = [f"step_{number + 1:06d}", f"step_{number:08d}", f"step_{number:06d}.part", f"{step.name}-old", "step_x"]
    step.rename(step.with_name(name := folder.noise.choice(names)))
    return f"{step.name} -> {name}"


def exchange_steps(folder: Folder) -> str:
    """Exchanges the names of two steps."""
    one, two = folder.noise.sample(sorted(folder.place.glob("step_??????")), 2)
    one.rename(folder.place / "between")
    two.rename(one)
    (folder.place / "between").rename(two)
    return f"{one.name}, {two.name}"


def exchange_files(folder: Folder) -> str:
    """Gives a step a file of another step."""
    step = folder.step()
    other = folder.noise.choice([path for path in sorted(folder.place.glob("step_??????")) if path != step])
    same = [
        path.relative_to(step)
        for path in step.rglob("*")
        if path.is_file() and (other / path.relative_to(step)).is_file()
    ]
    inside = folder.noise.choice(sorted(same))
    shutil.copyfile(other / inside, step / inside)
    return f"{step.name}/{inside} of {other.name}"


def foreign_step(folder: Folder) -> str:
    """Puts a step of another run in the place of one."""
    step = folder.step()
    shutil.rmtree(step)
    shutil.copytree(folder.foreign / step.name, step)
    return step.name


def rewritten(folder: Folder) -> str:
    """Takes arrays of another step and computes the manifest anew, without the run's key."""
    step = folder.step()
    other = folder.noise.choice([path for path in sorted(folder.place.glob("step_??????")) if path != step])
    shutil.rmtree(step / "arrays")
    shutil.copytree(other / "arrays", step / "arrays")
    path = step / "MANIFEST.json"
    listed = json.loads(path.read_text())
    listed["files"] = {
        file.relative_to(step).as_posix(): {
            "bytes": file.stat().st_size,
            "blake2b": hashlib.blake2b(file.read_bytes()).hexdigest(),
        }
        for file in sorted(step.rglob("*"))
        if file.is_file() and file != path
    }
    signed = json.dumps({"files": listed["files"], "step": listed["step"]}, sort_keys=True).encode()
    keys = [b"", folder.noise.randbytes(32)]
    listed["signature"] = hashlib.blake2b(signed, digest_size=32, key=folder.noise.choice(keys)).hexdigest()
    path.write_text(json.dumps(listed))
    return f"{step.name}/arrays of {other.name}"


def edited(folder: Folder) -> str:
    """Writes a manifest or about.json by hand."""
    step = folder.step()
    path = step / folder.noise.choice(["MANIFEST.json", "MANIFEST.json", "about.json"])
    listed = json.loads(path.read_text())
    name = folder.noise.choice(sorted(listed))
    value = folder.noise.choice([None, {}, [], "\u00e9", 7, 1e400, {"about.json": 3}, {"../../x": {"bytes": "1"}}])
    text = folder.noise.choice(["", "{", "[" * 100_000, json.dumps(listed | {name: value}), "null", "\ufeff{}"])
    path.write_text(text, encoding="utf-8")
    return f"{path.name}: {name}"


def clutter(folder: Folder) -> str:
    """Puts files and folders where steps or leftovers are expected."""
    name = folder.noise.choice(
        ["step_000009.part", "step_000009", "step_000004.gone", "step_999999", "notes.txt", "x.part"]
    )
    path = folder.place / name
    path.mkdir() if folder.noise.random() < 0.5 else path.write_text("not a step")
    return name


def key(folder: Folder) -> str:
    """Changes or removes the key of the run."""
    path = folder.place / ".key"
    text = path.read_text()
    at = folder.noise.randrange(len(text))
    texts = [text[:at] + chr(ord(text[at]) ^ 1) + text[at + 1 :], text[:at], "", "\u00e9"]
    path.unlink() if folder.noise.random() < 0.2 else path.write_text(folder.noise.choice(texts), encoding="utf-8")
    return path.name


KINDS: tuple[Callable[[Folder], str], ...] = (
    flip,
    cut,
    longer,
    delete,
    rename,
    exchange_steps,
    exchange_files,
    foreign_step,
    rewritten,
    edited,
    clutter,
    key,
)


def show(record) -> None:
    sys.path.insert(0, str(record.root))
    count, resumed = int(record.options.get("count", 300)), int(record.options.get("resumed", len(KINDS)))
    with tempfile.TemporaryDirectory() as folder:
        runs = Runs(record, Path(folder), COMMAND, STEPS)
        runs.finish("whole")
        foreign = Runs(record, Path(folder), [*COMMAND, "--config.seed=1"], STEPS)
        foreign.finish("foreign")
        found = [_asked(runs.here, seed) for seed in range(count)]
        for name in ("found_and_named", "harmless", "refused_and_named"):
            record.figure(name, sum(one["what"] == name for one in found), at_least=1)
        wrong = [one for one in found if one["what"] == "wrong"]
        record.figure("corruptions", len(found), at_least=count)
        record.figure("kinds", dict(Counter(one["kind"] for one in found)))
        record.figure("wrong", wrong, equals=[])
        differing = {kind.__name__: _resumed(runs, number) for number, kind in enumerate(KINDS[:resumed])}
        record.figure("resumed", len(differing), at_least=resumed)
        record.figure("resumed.wrong", {name: what for name, what in differing.items() if what}, equals={})


def _asked(here: Path, seed: int) -> dict:
    """Corrupts a copy, asks for its newest step, and judges the answer."""
    from jaxrl_post.checkpoint.store import Checkpoints

    place, said = here / "copy" / "checkpoints", []
    shutil.rmtree(place.parent, ignore_errors=True)
    shutil.copytree(here / "whole" / "checkpoints", place)
    kind = KINDS[seed % len(KINDS)]
    one = {"seed": seed, "kind": kind.__name__, "of": kind(Folder(place, here / "foreign" / "checkpoints", seed))}
    try:
        step = Checkpoints(place, keep_last=4, say=said.append).newest()
    except ValueError as error:
        named = str(error).startswith("resume: ") and str(place) in str(error)
        return one | {"what": "refused_and_named" if named and kind is key else "wrong", "said": str(error)[:200]}
    if step is None or _bytes(step.path) != _bytes(here / "whole" / "checkpoints" / step.path.name):
        return one | {"what": "wrong", "said": said}
    passed = {int(path.name[5:11]) for path in place.glob("step_*.damaged-*")}
    named = all(any(f"DAMAGED: step {number} is not used, because" in line for line in said) for number in passed)
    gone = [
        n for n in range(step.step + EVERY, STEPS + 1, EVERY) if n not in passed
    ]  # removed or renamed, not passed over
    if not named or (gone and kind not in (delete, rename)):
        return one | {"what": "wrong", "said": said}
    return one | {"what": "found_and_named" if passed else "harmless"}


def _bytes(step: Path) -> dict[str, str]:
    """Returns the hash of every file of a step by its name."""
    files = (path for path in sorted(step.rglob("*")) if path.is_file())
    return {path.relative_to(step).as_posix(): hashlib.blake2b(path.read_bytes()).hexdigest() for path in files}


def _resumed(runs: Runs, number: int) -> list[str]:
    """Resumes a corrupted copy of the whole run by the command. Returns what differs, or is missing in what it says."""
    run, kind = runs.here / f"resumed-{number}", KINDS[number]
    shutil.copytree(runs.here / "whole", run)
    kind(Folder(run / "checkpoints", runs.here / "foreign" / "checkpoints", number))
    process = runs.begin(run.name)
    if kind is key:
        said = process.communicate(timeout=300)[0]
        return (
            [] if process.returncode == 1 and "error: resume: " in said and "Traceback" not in said else [said[-400:]]
        )
    said = end(process)
    whole = {int(path.name[5:11]) for path in (run / "checkpoints").glob("step_??????")}
    differs = runs.differences(runs.here / "whole", run) if STEPS in whole else ["the last step"]
    shutil.rmtree(run)
    return differs
