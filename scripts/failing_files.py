"""Renames that fail and disks that are full, at every kind of file of a run: it says so in one sentence, and resumes bit for bit.

Two arms of the show `faults`. A short run is watched first: which names it renames and writes below its folder. Each name must
be of a kind in the tables below, so a new kind of file fails the arm until it has a fault of its own. Then, for each kind, a
run meets the fault (faulty_calls.py), and the same command without it is compared with the undisturbed run.
"""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from pathlib import Path

from faulty_calls import Faults
from killed import Runs

STEPS = 3
GRADER = """
from jaxrl_post.rewards import math

def score(data_source, solution_str, ground_truth, extra_info):
    print("graded", solution_str)
    return math.exact(data_source, solution_str, ground_truth, extra_info)
"""
RUN = (
    *("--config=configs/demo.py", f"--config.steps={STEPS}", "--config.scheduler.prompts=8", "--config.eval.every=2"),
    *("--config.scheduler.group_size=4", "--config.eval.prompts=8", "--config.reward.workers=1"),
    *("--config.checkpoint.every=1", "--config.checkpoint.keep_last=2"),
    *("--config.logger.tensorboard=True", "--config.trace_rounds=2"),
)
REASONS = (errno.EIO, errno.EXDEV, errno.ESTALE, errno.EBUSY, errno.EPERM)
ARRAYS = "checkpoints/*/arrays.orbax-checkpoint-tmp"
LATER = (
    "checkpoints/step_00000[23]*/arrays.orbax-checkpoint-tmp"  # the first save succeeds: a resume has where to begin
)
KEY = "checkpoints/.key.part"  # without it no save succeeds, so there is nothing to resume from: what was logged must be right
LOGGED = ("rollouts/index.jsonl", "rewards.jsonl", "scheduler_log.jsonl")
RENAMES = {  # pattern of the new name -> which time
    "config.json": (1,),
    "evaluations/*.npz": (1, 3),
    "rollouts/*.npz": (1, 3),
    f"{ARRAYS}/ocdbt.process_0/manifest.ocdbt": (1, 7),
    f"{ARRAYS}/manifest.ocdbt": (1, 3),
    "checkpoints/*.part/arrays": (1, 2),
    "checkpoints/.key": (1,),
    "checkpoints/step_??????": (1, 2, 3),
    "checkpoints/*.gone": (1,),
    "policy": (1,),
    "summary.json": (1,),
    "bias.json": (1,),
    "report.html": (1,),
}
WRITES = {  # pattern of the name -> from which write on
    ".lock": (1,),
    "attempts/*.jsonl": (1, 2),
    "config.json.part": (1,),
    "evaluations/*.npz.part": (2,),
    "evaluations/index.jsonl": (2,),
    "rollouts/*.npz.part": (2,),
    "rollouts/index.jsonl": (1,),
    "metrics.jsonl": (3,),
    "rewards.jsonl": (40,),
    "eval_rewards.jsonl": (60,),
    "rewards.log": (40,),
    "scheduler_log.jsonl": (60,),
    "dispatches.jsonl": (15,),
    "tensorboard/events*": (3,),
    "trace_*.json": (2,),
    KEY: (1,),
    f"{LATER}/d/*": (1,),
    f"{LATER}/manifest.ocdbt.__lock": (1,),
    f"{LATER}/ocdbt.process_0/d/*": (1,),
    f"{LATER}/ocdbt.process_0/manifest.ocdbt.__lock": (1,),
    f"{LATER}/_CHECKPOINT_METADATA": (1,),
    f"{LATER}/_METADATA": (1,),
    f"{LATER}/commit_success.txt": (1,),
    "checkpoints/*/host/*/state.json": (2,),
    "checkpoints/*/host/*/arrays.npz": (30,),
    "checkpoints/*/about.json": (3,),
    "checkpoints/*/MANIFEST.json": (3,),
    ".policy.*/model.safetensors": (5,),
    ".policy.*/*config.json": (1,),
    ".policy.*/tokenizer*.json": (1,),
    "summary.json.part": (1,),
    "bias.json.part": (1,),
    "report.html.part": (1,),
}
RESUMED = {  # how the run ended before -> pattern of a new name, or of a file that is written, and which time
    "before its first save": ((RENAMES, "unsaved/*/*", 1), (RENAMES, "unsaved/*/metrics.jsonl", 1)),
    "with scores after its save": ((RENAMES, "*_aside.jsonl", 1), (WRITES, "*_aside.jsonl.part", 1)),
    "with a damaged step": ((RENAMES, "checkpoints/*.damaged-1", 1),),
}
STRUCK = {"before its first save": "before_save:1:kill", "with scores after its save": "reward_join:20:kill"}
TIMED = ("tensorboard/", "trace_")  # their bytes and names are times


def renames(record) -> None:
    _arm(record, "renames", "rename", RENAMES)


def full_disks(record) -> None:
    _arm(record, "full_disks", "write", WRITES)


def _arm(record, arm: str, call: str, kinds: Mapping[str, tuple[int, ...]]) -> None:
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        tried = Tried(record, Path(folder))
        unknown, missing = tried.whole(call, kinds)
        record.figure(f"{arm}.kinds", len(kinds), at_least=13)
        record.figure(f"{arm}.names_of_no_kind", unknown, equals=[])
        record.figure(f"{arm}.kinds_without_a_name", missing, equals=[])
        asked = [(kinds, kind, at, "") for kind, times in kinds.items() for at in times]
        asked += [(table, kind, at, how) for how, some in RESUMED.items() for table, kind, at in some if table is kinds]
        reasons = itertools.cycle(REASONS)
        work = [
            pool.submit(tried.met, f"{arm}-{number}", call, kind, at, next(reasons), how)
            for number, (_, kind, at, how) in enumerate(asked)
        ]
        found = {(kind, at, how): one.result() for (_, kind, at, how), one in zip(asked, work, strict=True)}
    wrong = {" ".join(map(str, key)): one["wrong"] for key, one in found.items() if one["wrong"]}
    record.figure(f"{arm}.tried", len(found), at_least=20)
    record.figure(f"{arm}.went_on", sum(one["code"] == 0 for one in found.values()), at_least=1)
    record.figure(f"{arm}.ended_and_resumed", sum(one["code"] == 1 for one in found.values()), at_least=5)
    record.figure(f"{arm}.wrong", wrong, equals={})


class Tried:
    """Runs of one command, some with faults, beside the undisturbed one."""

    def __init__(self, record, here: Path):
        (here / "grader.py").write_text(GRADER)
        functions = f"--config.reward.functions=('{here / 'grader.py'}:score',)"
        self._runs, self._faults = Runs(record, here, [*RUN, functions], STEPS), Faults(here / "library")
        self._here = here

    def whole(self, call: str, kinds: Mapping) -> tuple[list[str], list[str]]:
        """Makes the undisturbed run. Returns names of no kind that it renames or writes, and kinds of no name."""
        place, seen = self._here / "whole", self._here / "seen"
        done = self._run("whole", self._faults.watched(place, seen))
        if done.returncode:
            raise RuntimeError(f"the undisturbed run exited {done.returncode}:\n{done.stderr[-4000:]}")
        lines = [line.partition(" ") for line in seen.read_text().splitlines()]
        names = {name for word, _, name in lines if word == call}
        known = {kind.replace(LATER, ARRAYS) for kind in kinds}
        unknown = [name for name in sorted(names) if not any(fnmatchcase(name, kind) for kind in known)]
        return unknown, [kind for kind in kinds if not any(fnmatchcase(name, kind) for name in names)]

    def _run(self, name: str, variables: Mapping[str, str]) -> subprocess.CompletedProcess:
        return self._runs.met(name, 900, PYTHONPATH=str(self._runs.root), JAX_PLATFORMS="cpu", **variables)

    def met(self, name: str, call: str, kind: str, at: int, reason: int, how: str) -> dict:
        """Lets a run meet a fault and resumes it. Returns its exit code, and every promise that it broke.

        Args:
          how: it ended before, and it is a resumed run that meets the fault; empty: it is a new one.
        """
        place, seen = self._here / name, self._here / f"{name}.seen"
        if how:
            self._ended(name, how)
        if call == "write":
            reason, fault = errno.ENOSPC, self._faults.full(place, seen, kind, at)
        else:
            fault = self._faults.rename(place, seen, kind, at, reason)
        done = self._run(name, fault)
        lines = [line.partition(" ")[::2] for line in seen.read_text().splitlines()] if seen.is_file() else []
        failed = [line for word, line in lines if word == "failed"]
        wrong = [] if failed else ["the fault was not met"]
        if not _tried_again(lines):
            wrong += _unsaid(done, failed, os.strerror(reason))
        if kind == KEY:
            code, wrong = done.returncode, wrong + self._nothing_saved(name)
        elif done.returncode:
            done = self._run(name, {})
            wrong += [f"the resumed run exited {done.returncode}: {done.stderr[-300:]}"] * bool(done.returncode)
            code = 1
        else:
            code = 0
        if not done.returncode and kind != KEY:
            found = self._runs.differences(self._here / "whole", place)
            wrong += [f"differs: {one}" for one in found if not one.startswith(TIMED)]
        wrong += [f"left: {one}" for one in _left(place)]
        print(f"{name} {kind} {at} {how}: {code} {wrong}", flush=True)
        shutil.rmtree(place)
        return {"code": code, "wrong": wrong}

    def _nothing_saved(self, name: str) -> list[str]:
        """Returns what is wrong with a run of which no save succeeded: its logs are there, and a resume is refused."""
        done = self._run(name, {})
        said = done.returncode == 1 and "no checkpoint to go on from" in done.stderr
        differ = [
            log for log in LOGGED if (self._here / name / log).read_bytes() != (self._here / "whole" / log).read_bytes()
        ]
        return [f"the resumed run: {done.returncode}, {done.stderr[-300:]}"] * (not said) + [
            f"differs: {one}" for one in differ
        ]

    def _ended(self, name: str, how: str) -> None:
        """Makes a run that ended so."""
        place = self._here / name
        if how in STRUCK:
            self._run(name, {"JAXRL_FAULT": STRUCK[how]})
        else:
            shutil.copytree(self._here / "whole", place, symlinks=True)
            with open(place / "checkpoints" / f"step_{STEPS:06d}" / "about.json", "ab") as file:
                file.write(b" ")


def _tried_again(lines: list[tuple[str, str]]) -> bool:
    """Returns whether the call that failed was made again for the same name, and then did not fail: nothing was lost."""
    at = max((place for place, (word, _) in enumerate(lines) if word == "failed"), default=len(lines))
    return any(word != "failed" and name == lines[at][1] for word, name in lines[at + 1 :])


def _unsaid(done: subprocess.CompletedProcess, failed: list[str], reason: str) -> list[str]:
    """Returns what a run did not say of a fault that it met."""
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    paths = [Path(name.removesuffix(".part")) for name in failed]
    names = {part for path in paths for part in (path.name, path.parent.name) if part}
    names |= {part.removesuffix(".part") for path in paths for part in path.parts if part.startswith("step_")}
    names |= {"policy"} & {part.split(".")[1] for path in paths for part in path.parts if part.startswith(".")}
    said = [line for line in (done.stdout + done.stderr).splitlines() if reason in line]
    wrong = [f"exit code {done.returncode}"] * (done.returncode not in (0, 1))
    # Calls of tensorstore that end after Orbax gave up a save print that its loop is closed.
    wrong += ["a traceback"] * ("Traceback" in done.stderr and "Event loop is closed" not in done.stderr)
    if done.returncode:
        wrong += [f"{len(errors)} errors: {done.stderr[-300:]}"] * (len(errors) != 1)
        said = [line for line in errors if reason in line]
    wrong += [f"no line has the reason: {errors}"] * (not said)
    wrong += [f"no line names the file: {said[:2]}"] * (
        bool(said) and not any(n in line for n in names for line in said)
    )
    return wrong


def _left(place: Path) -> list[str]:
    """Returns what is half written or was renamed away in the folder of a finished run."""
    marks = (".part", ".gone", ".orbax", ".old", ".damaged")
    beside = [path for path in place.parent.glob(f"{place.name}.*") if path.suffix != ".seen"]
    found = [path for path in place.rglob("*") if any(mark in path.name for mark in marks[:4])]
    found += list(place.glob(".policy.*")) + beside
    return sorted(path.relative_to(place.parent).as_posix() for path in found)
