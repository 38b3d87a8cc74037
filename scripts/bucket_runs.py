"""Runs whose folder is in a bucket: begun through a server, looked at in the bucket itself, and fetched from there."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import bucket_server
from killed import LIMIT_S, Runs, end

from jaxrl_post.config.address import parse
from jaxrl_post.runs.buckets.objects import Objects
from jaxrl_post.runs.checkpoint import host_state, log_marks, signed_files


class BucketRuns(Runs):
    """Runs in a bucket, each start with scratch folders of its own, as on another machine.

    Args:
      server: port of the bucket's server. through: port through which runs reach it. scheme: gs or s3.
    """

    def __init__(
        self, record, here: Path, arguments: Sequence[str], last: int, server: int, through: int, scheme: str = "gs"
    ):
        super().__init__(record, here, arguments, last)
        self._server, self.through, self._scheme = server, through, scheme
        self._scratch = here  # of the newest start

    def begun(self, name: str) -> list[str]:
        """Returns the command that begins a run, or resumes it."""
        return [*self._command, f"--run-dir={self.url(name)}"]

    def url(self, name: str) -> str:
        return f"{self._scheme}://{bucket_server.BUCKET}/runs/{name}"

    def environment(self) -> dict[str, str]:
        self._scratch = Path(tempfile.mkdtemp(dir=self.here))
        there = bucket_server.environment(self._scheme, self.through)
        return super().environment() | there | {"TMPDIR": str(self._scratch)}

    def ended(self, name: str) -> tuple[str, float]:
        """Begins or resumes a run and waits for its end. Returns what it said, and its seconds."""
        begun = time.monotonic()
        return end(self.begin(name)), time.monotonic() - begun

    def killed_after(self, name: str, seconds: float) -> bool:
        """Begins or resumes a run and kills it after these seconds. Returns False if it had ended by then."""
        process = self.begin(name)
        try:
            process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.communicate()
        return process.returncode == -signal.SIGKILL

    def killed_at_step(self, name: str, step: int, later_s: float) -> bool:
        """Begins or resumes a run and kills it so many seconds after it has logged a step. Returns False if it had ended."""
        process = self.begin(name)
        try:
            while process.poll() is None:
                if any(log_marks.last_step(file.parent) >= step for file in self._scratch.glob("*/*/*/metrics.jsonl")):
                    time.sleep(later_s)
                    process.send_signal(signal.SIGKILL)
                    break
                time.sleep(0.02)
            process.communicate(timeout=LIMIT_S)
        finally:
            process.kill()
        return process.returncode == -signal.SIGKILL

    def orphans(self, name: str) -> int:
        """Returns how many objects of a run no commit needs: what a kill left of an upload."""
        from jaxrl_post.runs.buckets import record, tree

        objects = self.objects(name)
        kept = {one.tree: tree.read(objects, one.tree) for one in record.read(objects).commits}
        return len(tree.garbage({*objects.names(tree.PIECES), *objects.names(tree.TREES)}, kept))

    def objects(self, name: str):
        """Returns a run's objects, reached without the proxy."""
        os.environ.update(bucket_server.environment(self._scheme, self._server))
        return Objects(parse(self.url(name), "name"))

    def steps(self, name: str) -> list[int]:
        """Returns the newest step of each commit of a run, newest first."""
        from jaxrl_post.runs.buckets import record

        return [commit.step for commit in record.read(self.objects(name)).commits]

    def fetched(self, name: str) -> Path:
        """Fetches the newest commit of a run to a new folder."""
        return next(self._commits(name))[1]

    def damages(self, name: str) -> list[str]:
        """Returns what is wrong with the commits of a run: pieces, steps, and logs that are shorter than a step knows."""
        out = []
        for step, folder in self._commits(name):
            places = sorted((folder / "checkpoints").glob("step_??????"))
            for place in places:
                if reason := signed_files.damage(place, signed_files.read_key(folder / "checkpoints")):
                    out.append(f"commit {step}, {place.name}: {reason}")
                    continue
                for state in sorted((place / "host").glob("process_*")):
                    logs = folder / state.name if (folder / state.name).is_dir() else folder
                    try:
                        log_marks.check_reach(logs, host_state.read_state(state)["marks"])
                    except ValueError as error:
                        out.append(f"commit {step}, {place.name}: {error}")
            out += [f"commit {step} has no step"] * (not places)
        return out

    def _commits(self, name: str) -> Iterator[tuple[int, Path]]:
        """Yields step and folder of each commit, newest first. A piece that is not whole raises."""
        from jaxrl_post.runs.buckets import record, tree

        objects = self.objects(name)
        for commit in record.read(objects).commits:
            place = Path(tempfile.mkdtemp(dir=self.here))
            tree.fetch(objects, tree.read(objects, commit.tree), place)
            yield commit.step, place

    def wait_for(self, true, process: subprocess.Popen) -> None:
        """Waits until something holds of a run that goes on."""
        deadline = time.monotonic() + LIMIT_S
        while not true():
            if process.poll() is not None or time.monotonic() > deadline:
                process.kill()
                raise RuntimeError(f"the run ended too early:\n{process.communicate()[0][-4000:]}")
            time.sleep(0.1)
