"""A run's folder, committed to a bucket while the run goes on.

A thread looks for a newly saved step. It uploads the folder's new pieces, then the tree that lists them, and then names
the tree in the record: that is the commit. Nothing before it changes what a resumed run finds. Another thread renews
the lease. A bucket that does not answer holds up the uploads and not the run. It catches up with the newest state.
In a job of several processes this is process 0, and the others are its followers (followers.py).

Invariant: what is committed is whole, and is never deleted before KEPT newer states are committed.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from jaxrl_post.runs.buckets import record, tree
from jaxrl_post.runs.buckets.followers import END_S, Alone, Behind, Followers
from jaxrl_post.runs.buckets.objects import Objects
from jaxrl_post.runs.buckets.store import Unreachable, one_line

_POLL_S, _PAUSE_S = 0.2, 2.0
_IN_A_ROW = 3  # failures to read the folder that are not said: each may be a step that was pruned


class Nowhere:
    """Stands for a Mirror where the run's folder is the run."""

    def begin(self, folder: Path) -> None:
        """Does nothing."""

    def check(self) -> None:
        """Does nothing."""

    def finished(self) -> None:
        """Does nothing."""


class Mirror:
    """Commits one folder, from `begin` on to the end as a context manager.

    Args:
      held: the record, in the hands of this run.
      end_s: seconds to wait for the last commit.
      others: the other processes of the job.
    """

    def __init__(
        self,
        objects: Objects,
        held: record.HeldRecord,
        say: Callable[[str], object],
        end_s: float = END_S,
        others: Alone | Followers | None = None,
    ):
        self._objects, self._held, self._say, self._end_s = objects, held, say, end_s
        self._others = others or Alone()
        self._kept: dict[str, tree.Tree] = {}
        self._uploads = tree.Uploads(objects, held.state.term)
        self._there: set[str] | None = None  # pieces and trees in the bucket; None: not listed yet
        self._folder: Path | None = None
        self._step, self._whole, self._silent, self._in_a_row = 0, False, False, 0
        self._resumed = False
        self._together = True
        self._last = "the thread that uploads ended by an error of its own"
        self._over, self._free = threading.Event(), threading.Event()
        self._taken: record.Taken | None = None
        self._lease = threading.Thread(target=self._renew, name="lease", daemon=True)
        self._mirror = threading.Thread(target=self._follow, name="mirror", daemon=True)

    def __enter__(self) -> Mirror:
        self._lease.start()
        return self

    def found(self, kept: Mapping[str, tree.Tree]) -> None:
        """Takes note of the trees that the record names, by name. Call it before `begin`."""
        self._kept = dict(kept)
        self._uploads.found(kept.values())

    def begin(self, folder: Path) -> None:
        """Commits this folder from now on: after every saved step, and at the end. It is what the newest tree has.

        A resumed run is committed at once, with the note that it was started again.
        """
        self._folder, self._step = folder, _newest(folder)
        self._resumed = self._step > 0
        self._mirror.start()

    def check(self) -> None:
        """
        Raises:
          Taken: another process writes the run now.
          Behind: the run has ended, and the bucket has not all of it. Or the thread that uploads has ended before it.
        """
        if self._taken is not None:
            raise self._taken
        if self._folder is not None and not self._whole and not self._mirror.is_alive():
            raise Behind(self._rest())

    def _rest(self) -> str:
        return (
            f"{self._objects.address} has this run up to step {self._step} only ({self._last}): all of it is in "
            f"{self._folder} on this machine, and --resume continues from step {self._step}"
        )

    def finished(self) -> None:
        """Waits until the run has ended in every process of the job."""
        self._others.finished()

    def __exit__(self, *error: object) -> None:
        """Waits for the last commit, and gives the run free. Nothing is raised: see `check`.

        Processes that do not end together commit nothing more: what one of them has may not fit what another has.
        """
        if self._folder is not None:
            self._together = self._others.meet()
            self._over.set()
            self._mirror.join()
        self._free.set()
        self._lease.join()
        if self._taken is None:
            try:
                self._held.release()
            except (Unreachable, record.Taken, ValueError) as late:
                self._say(f"the lease was not given free: {late}; it ends by itself in {record.LEASE_S:.0f} s")

    # ---- the threads

    def _renew(self) -> None:
        while not self._free.wait(record.RENEWED_S):
            try:
                self._held.renew()
            except record.Taken as taken:
                self._taken = taken
                return
            except (Unreachable, ValueError) as error:
                self._wait_for(error)

    def _follow(self) -> None:
        """Commits after every saved step, and once more after the end. Then it says to the others that this is all."""
        try:
            self._commits()
        finally:
            self._others.end(str(self._taken or "") or ("" if self._whole else self._rest()), self._taken is not None)

    def _commits(self) -> None:
        while self._taken is None and not self._over.wait(_POLL_S):
            if self._resumed or _newest(self._folder) != self._step:
                done = self._commit()
                self._resumed = self._resumed and not done
                self._over.wait(0.0 if done else _PAUSE_S)
        if not self._together:
            self._last = "the processes of the job did not end together"
            return
        deadline = time.monotonic() + self._end_s
        while self._taken is None and not self._whole and time.monotonic() < deadline:
            self._whole = self._commit()
            self._free.wait(0.0 if self._whole else min(_PAUSE_S, self._end_s / 10))

    def _commit(self) -> bool:
        """Commits the folder as it is. Returns whether that is done; else it is to be tried again."""
        try:
            self._committed(self._folder)
            self._silent, self._in_a_row = False, 0
            return True
        except record.Taken as taken:
            self._taken = taken
        except OSError as error:  # a step may have been pruned meanwhile
            self._in_a_row += 1
            if self._in_a_row > _IN_A_ROW:
                self._wait_for(error)
        except (Unreachable, ValueError) as error:
            self._wait_for(error)
        return False

    def _wait_for(self, error: Exception) -> None:
        """Says once what the uploads wait for."""
        self._last = one_line(error)
        if not self._silent:
            self._silent = True
            self._say(f"BUCKET: {self._last}; the run goes on, and uploads wait")

    def _committed(self, folder: Path) -> None:
        """Uploads the folder, commits it, and deletes what no kept commit needs."""
        self._others.ask(self._kept, _newest(folder))
        own = self._uploads.part(folder, folder.with_name(f"{folder.name}.linked"), self._others.mine)
        new, beside = self._others.joined(self._objects, own, self._end_s)
        if (step := tree.newest(new)) < self._step:
            raise Unreachable(f"step {self._step} is not whole in every process")
        if new not in self._kept.values() or step != self._step:
            if self._there is None:
                self._there = {*self._objects.names(tree.PIECES), *self._objects.names(tree.TREES)}
            name = tree.write(self._objects, self._held.state.term, new)
            commits = self._held.commit(record.Commit(tree=name, step=step, at=time.time()))
            self._step = step
            self._there |= {name, *tree.names(new), *beside}
            self._kept |= {name: new}
            self._kept = {one.tree: self._kept[one.tree] for one in commits if one.tree in self._kept}
            self._clean()

    def _clean(self) -> None:
        """Deletes what no kept commit needs. What cannot be deleted now is deleted after another commit."""
        gone = tree.garbage(self._there, self._kept)
        self._uploads.forget(gone)
        with contextlib.suppress(Unreachable), ThreadPoolExecutor(8, thread_name_prefix="delete") as pool:
            list(pool.map(self._objects.delete, gone))
            self._there -= gone


def _newest(folder: Path) -> int:
    return max(tree.steps(folder), default=0)
