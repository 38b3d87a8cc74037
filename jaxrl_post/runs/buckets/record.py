"""RECORD.json of a run in a bucket: the one object that changes. It is the run's lock and its commit at once.

Invariants:
- It is replaced only with the generation that its writer knows. So a writer that lost the run cannot commit any more.
- `holder` writes the run until `until`, by its own clock. It renews that. Once nobody has renewed it for a while, or its
  process has ended on this machine, another one may take the run, with the next `term`.
- `commits` are the newest states of the run, newest first. What is not named there does not exist for a resumed run.

Time decides only when a run may be taken, never who may write: two holders cannot both know the generation. Clocks of two
hosts are not compared for it: who wants the run looks whether the record changes, and counts seconds of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxrl_post.runs.buckets.objects import Objects
from jaxrl_post.runs.buckets.store import Changed

NAME = "RECORD.json"
KEPT = 2  # commits
LEASE_S, RENEWED_S = 60.0, 10.0
LAPSED_S = 3 * RENEWED_S  # without a change, where `until` is past by this host's clock, too
_POLL_S = 1.0
_TRIES = 4  # of one change: only an own write whose answer was lost can come between


class Taken(RuntimeError):
    """Another process writes this run now."""


@dataclass(frozen=True, kw_only=True)
class Commit:
    """A state of the run's folder. `tree`: the object that lists it. `step`: the newest saved one, 0 without any. `at`:
    when it was committed, in UNIX seconds."""

    tree: str
    step: int
    at: float = field(default=0.0, compare=False)


@dataclass(frozen=True, kw_only=True)
class State:
    """What the record says. `holder`: {} where nobody writes. `generation`: as Objects.current."""

    term: int = 0
    holder: Mapping = field(default_factory=dict)
    until: float = 0.0
    commits: tuple[Commit, ...] = ()
    generation: int = 0


def read(objects: Objects) -> State:
    """Returns what the record says now.

    Raises:
      Unreachable: no answer came in time.
      ValueError: it is no record, or the bucket refuses.
    """
    found = objects.current(NAME)
    if not found.data:
        return State(generation=found.generation)
    try:
        fields = json.loads(found.data)
        commits = tuple(
            Commit(tree=str(one["tree"]), step=int(one["step"]), at=float(one["at"])) for one in fields["commits"]
        )
        return State(
            term=int(fields["term"]),
            holder=dict(fields["holder"]),
            until=float(fields["until"]),
            commits=commits,
            generation=found.generation,
        )
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{objects.address}/{NAME} is no record of a run ({type(error).__name__})") from error


class HeldRecord:
    """The record in the hands of its holder, for several threads.

    Args:
      state: as it was written when the run was taken.
    """

    def __init__(self, objects: Objects, state: State):
        self._objects, self._state, self._lock = objects, state, threading.Lock()

    @property
    def state(self) -> State:
        return self._state

    def renew(self) -> None:
        """Renews the lease.

        Raises:
          Taken: another process has the run.
          Unreachable, ValueError: of the bucket.
        """
        self._change(lambda state: state.commits, self._state.holder)

    def commit(self, new: Commit) -> tuple[Commit, ...]:
        """Makes a state the newest one and returns all that are kept. Errors are those of `renew`."""
        return self._change(
            lambda state: state.commits if new in state.commits else (new, *state.commits)[:KEPT], self._state.holder
        ).commits

    def release(self) -> None:
        """Gives the run free. A record without commits is deleted. Errors are those of `renew`."""
        if self._state.commits:
            self._change(lambda state: state.commits, {})
        else:
            self._objects.drop(NAME, self._state.generation)

    def _change(self, commits: Callable[[State], tuple[Commit, ...]], holder: Mapping) -> State:
        """Writes the record. A generation that a lost answer of this holder left is taken over."""
        with self._lock:
            for _ in range(_TRIES):
                with contextlib.suppress(Changed):
                    self._state = _written(self._objects, self._state, self._state.term, holder, commits(self._state))
                    return self._state
                there = read(self._objects)
                if there.term != self._state.term:
                    break
                self._state = there
            raise Taken(
                f"{self._objects.address} was taken over by {who(there.holder)}: this run stops, and writes there no more"
            )


def take(objects: Objects, say: Callable[[str], object]) -> HeldRecord:
    """Takes the run: at once where its holder has ended on this machine, else after LEASE_S in which nobody renews the lease.

    A lease that has ended by this host's clock is waited for LAPSED_S only: the holder's clock may be behind this one.

    Raises:
      ValueError: another process writes the run, and renews its lease.
      Unreachable: no answer came in time.
    """
    waited_for, mine, begun = None, _myself(), time.monotonic()
    while True:
        there = read(objects)
        if there.holder and not _ended(there.holder):
            if waited_for not in (None, there.generation):
                raise ValueError(
                    f"{objects.address} is in use by {who(there.holder)}: a run is written by one job at a time; end that "
                    "one first"
                )
            wait_s = LEASE_S if there.until > time.time() else LAPSED_S
            if waited_for is None:
                say(
                    f"{objects.address}: waits for the lease of {who(there.holder)}, which is taken in {wait_s:.0f} s "
                    "unless it is renewed"
                )
            waited_for = there.generation
            if time.monotonic() < begun + wait_s:
                time.sleep(_POLL_S)
                continue
        try:
            return HeldRecord(objects, _written(objects, there, there.term + 1, mine, there.commits))
        except Changed:
            now = read(objects)
            if now.holder.get("id") == mine["id"]:
                return HeldRecord(objects, now)
            waited_for = there.generation


def _written(objects: Objects, over: State, term: int, holder: Mapping, commits: tuple[Commit, ...]) -> State:
    """Writes a record over the one of a generation and returns it. Errors are those of Objects.replace."""
    until = time.time() + LEASE_S
    fields = {
        "term": term,
        "holder": dict(holder),
        "until": until,
        "commits": [{"tree": one.tree, "step": one.step, "at": one.at} for one in commits],
    }
    generation = objects.replace(NAME, json.dumps(fields, indent=1).encode("utf-8"), over.generation)
    return State(term=term, holder=holder, until=until, commits=commits, generation=generation)


def who(holder: Mapping) -> str:
    """Describes a holder."""
    if not holder:
        return "a process that has ended"
    return f"process {holder.get('pid')} on host {holder.get('host')} since {holder.get('since')}"


def _myself() -> dict[str, Any]:
    """Returns what names this process, among all of all machines."""
    return {
        "id": secrets.token_hex(16),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
        "machine": _machine(),
        "began": _began(os.getpid()),
    }


def _ended(holder: Mapping) -> bool:
    """Returns whether a process of this machine has ended. Of other machines nothing is known."""
    here = bool(_machine()) and holder.get("machine") == _machine() and holder.get("host") == socket.gethostname()
    return here and _began(int(holder.get("pid", 0))) != holder.get("began")


def _machine() -> str:
    """Returns what names this boot of this machine, and the processes that are seen here; empty where that is not known."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    return ""


def _began(pid: int) -> str:
    """Returns when a process began, in the kernel's count; empty where there is no such process, or a dead one."""
    with contextlib.suppress(OSError, IndexError):
        words = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
        return "" if words[0] in "ZX" else words[19]
    return ""
