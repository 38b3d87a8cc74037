"""A run of several processes in a bucket: each uploads its own folder, and process 0 commits what all have uploaded.

Process 0 asks in rounds. In each round every process uploads its part: the files that it wrote, as a tree of its own.
It replies with the tree's name and the steps that its folder has. Process 0 joins all parts to one tree and commits it.

Invariant: a step is committed only if every process has uploaded its files. Else the commit before stays the newest.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

from jaxrl_post.runs.buckets import record, tree
from jaxrl_post.runs.buckets.objects import Objects
from jaxrl_post.runs.buckets.store import Unreachable, one_line

END_S = 300.0  # for the last commit
MEET_S = 30.0  # for all processes to end together
_TOLD_S, _POLL_S = 5.0, 0.2
_RUN_S = 86400.0  # for the slowest process to end; a watchdog ends a run that hangs earlier
_OF_PROCESS = re.compile(r"(?:ocdbt\.)?process_([0-9]+)(?:\.jsonl)?")


class Behind(RuntimeError):
    """The run has ended, and the bucket has not all of it."""


class Board(Protocol):
    """Texts that the processes of a job share, each under a key that is used once."""

    def put(self, key: str, text: str) -> None: ...

    def get(self, key: str, limit_s: float) -> str:
        """Raises TimeoutError where no process puts one within `limit_s` seconds."""

    def remove(self, key: str) -> None: ...

    def meet(self, key: str, limit_s: float) -> bool: ...


def writer(name: str, processes: int) -> int:
    """Returns the process that writes a file of a run, by its name below the run's folder.

    Files of a process that the job has no more stay as they are. Process 0 has them.
    """
    top, *_ = parts = name.split("/")
    for part in parts if top in ("checkpoints", "attempts") else [top]:
        if (found := _OF_PROCESS.fullmatch(part)) and int(found[1]) < processes:
            return int(found[1])
    return 0


class Alone:
    """Stands for Followers where the job has one process."""

    def mine(self, name: str) -> bool:
        return True

    def ask(self, kept: Iterable[str], step: int) -> None:
        """Asks nobody."""

    def joined(self, objects: Objects, own: tree.FolderSnapshot, limit_s: float) -> tuple[tree.Tree, set[str]]:
        return own.files, set()

    def meet(self) -> bool:
        return True

    def finished(self) -> None:
        """Waits for nobody."""

    def end(self, why: str, taken: bool) -> None:
        """Tells nobody."""


class Followers:
    """The other processes of a job, as process 0 sees them.

    Args:
      board: of the job, for this run alone.
      processes: of the job.
    """

    def __init__(self, board: Board, processes: int):
        self._board, self._processes, self._round = board, processes, 0

    def mine(self, name: str) -> bool:
        """Returns whether process 0 uploads a file."""
        return writer(name, self._processes) == 0

    def ask(self, kept: Iterable[str], step: int) -> None:
        """Begins a round.

        Args:
          kept: names of the trees that are committed now.
          step: the newest that process 0 has saved.
        """
        self._round += 1
        self._board.put(f"round/{self._round}", json.dumps({"kept": sorted(kept), "step": step}))

    def joined(self, objects: Objects, own: tree.FolderSnapshot, limit_s: float) -> tuple[tree.Tree, set[str]]:
        """Returns the tree of all processes, and the names of what the others uploaded beside it.

        Raises:
          Unreachable: a process has not uploaded its part.
          ValueError: a bucket refuses, or no step is whole in all parts.
        """
        parts, beside, deadline = [own], set(), time.monotonic() + limit_s
        for index in range(1, self._processes):
            message = self._reply(index, deadline)
            files = tree.read(objects, message["tree"])
            beside |= {message["tree"], *tree.names(files)}
            parts.append(tree.FolderSnapshot(files=files, steps=frozenset(message["steps"])))
        found = tree.joined(parts)
        if not tree.newest(found) and any(part.steps for part in parts):
            raise Unreachable("the processes have no saved step in common yet")
        self._board.remove(f"round/{self._round}")
        return found, beside

    def _reply(self, index: int, deadline: float) -> dict:
        key = f"part/{self._round}/{index}"
        try:
            message = json.loads(self._board.get(key, max(deadline - time.monotonic(), 1.0)))
        except TimeoutError as late:
            raise Unreachable(f"process {index} has not uploaded its part of the run") from late
        self._board.remove(key)
        if message["error"]:
            raise Unreachable(f"process {index}: {message['error']}")
        return message

    def meet(self) -> bool:
        """Returns whether all processes end now."""
        return self._board.meet("over", MEET_S)

    def finished(self) -> None:
        """Waits until the run has ended in every process."""
        self._board.meet("finished", _RUN_S)

    def end(self, why: str, taken: bool) -> None:
        """Says to all that no round follows. `why`: why the bucket has not all of the run, or an empty text."""
        self._board.put(f"round/{self._round + 1}", json.dumps({"end": why, "taken": taken}))


class Follower:
    """Uploads the part of one process, whenever process 0 asks for it. It stands for a Mirror in other processes.

    Args:
      term: of the job, as process 0 has it from the record.
      index: of this process.
    """

    def __init__(self, objects: Objects, term: int, board: Board, index: int, processes: int, end_s: float = END_S):
        self._objects, self._term, self._board, self._end_s = objects, term, board, end_s
        self._index, self._processes = index, processes
        self._uploads = tree.Uploads(objects, term)
        self._kept: dict[str, tree.Tree] = {}
        self._folder = Path()
        self._ended: Mapping | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="follower", daemon=True)

    def __enter__(self) -> Follower:
        return self

    def found(self, kept: Mapping[str, tree.Tree]) -> None:
        """Takes note of the trees that the record names, by name. Call it before `begin`."""
        self._kept = dict(kept)
        self._uploads.found(kept.values())

    def begin(self, folder: Path) -> None:
        """Uploads from this folder now on."""
        self._folder = folder
        self._thread.start()

    def check(self) -> None:
        """
        Raises:
          Taken: another process writes the run now.
          Behind: the run has ended, and the bucket has not all of it.
        """
        if self._ended is not None and self._ended["taken"]:
            raise record.Taken(self._ended["end"])
        if self._folder != Path() and not self._thread.is_alive() and (self._ended is None or self._ended["end"]):
            raise Behind(self._ended["end"] if self._ended else f"process {self._index} uploads nothing any more")

    def finished(self) -> None:
        """Waits until the run has ended in every process."""
        self._board.meet("finished", _RUN_S)

    def __exit__(self, *error: object) -> None:
        """Uploads for the last commit, if all processes end now. Nothing is raised: see `check`."""
        if self._folder == Path():
            return
        if self._board.meet("over", MEET_S):
            self._thread.join(2 * self._end_s + MEET_S)  # a commit may be under way
        self._over.set()
        self._thread.join()

    # ---- the thread

    def _follow(self) -> None:
        """Replies in each round until process 0 says that none follows."""
        number = 1
        while not self._over.is_set():
            try:
                message = json.loads(self._board.get(f"round/{number}", _TOLD_S))
            except TimeoutError:
                self._over.wait(_POLL_S)
                continue
            if "end" in message:
                self._ended = message
                return
            self._board.put(f"part/{number}/{self._index}", json.dumps(self._reply(message)))
            number += 1

    def _reply(self, message: Mapping) -> dict:
        try:
            return self._uploaded(message) | {"error": ""}
        except (OSError, Unreachable, ValueError) as error:
            return {"error": one_line(error)}

    def _uploaded(self, message: Mapping) -> dict:
        """Uploads this process's files. Pieces that no kept tree has are uploaded again: process 0 may delete them."""
        if {*message["kept"]} != self._kept.keys():
            self._kept = {name: self._kept.get(name) or tree.read(self._objects, name) for name in message["kept"]}
            self._uploads.keep(self._kept.values())
        deadline = time.monotonic() + MEET_S
        while max(tree.steps(self._folder), default=0) < message["step"] and time.monotonic() < deadline:
            self._over.wait(_POLL_S)
        linked = self._folder.with_name(f"{self._folder.name}.linked")
        found = self._uploads.part(self._folder, linked, lambda name: writer(name, self._processes) == self._index)
        return {"tree": tree.write(self._objects, self._term, found.files), "steps": sorted(found.steps)}
