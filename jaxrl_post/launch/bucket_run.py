"""The run of a bucket, SCHEME://BUCKET/NAME: fetched to a folder of this machine, run there, and mirrored back.

Everything else of a run knows the local folder only. Its scratch folder lies below the system's folder for temporary
files (TMPDIR). It is made anew at every start, from the newest commit that is whole. Those of starts that have ended are removed.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path

import jax

from jaxrl_post.buckets import record, tree
from jaxrl_post.buckets.address import Address, is_bucket, parse, refuse_several
from jaxrl_post.buckets.mirror import Mirror, Nowhere
from jaxrl_post.buckets.objects import Objects
from jaxrl_post.buckets.scratch import own_folder, remove_unused
from jaxrl_post.config import refuse_url
from jaxrl_post.launch import run_lock

_TRIES = 5  # to read a commit before a run that goes on replaces it


def opened(
    run_dir: str, resumes: str, stack: contextlib.ExitStack, say: Callable[[str], object]
) -> tuple[str, Mirror | Nowhere]:
    """Returns the local folder of a run, and what mirrors it: `run_dir` itself and nothing, unless it is a URL.

    The run of a bucket is taken for this process until `stack` closes.

    Args:
      resumes: as command_line.Flags.resume.

    Raises:
      ValueError: another process writes the run, it is there or is not there, it is damaged, or the job has several
        processes.
      Unreachable: the bucket does not answer.
    """
    if not is_bucket(run_dir):
        refuse_url(run_dir, "--run-dir")
        return run_dir, Nowhere()
    flag = "--resume" if resumes == "required" else "--run-dir"
    address = parse(run_dir, flag)
    refuse_several(address, jax.process_count(), flag)
    objects = Objects(address)
    there = record.read(objects).commits
    if there and not resumes:
        raise ValueError(
            f"--run-dir={address} holds a run already: a run is never written over; name a new place, or continue it by --resume"
        )
    if resumes == "required":
        _check_there(address, there)
    held = record.take(objects, say)
    mirror = stack.enter_context(Mirror(objects, held, say))
    own = own_folder(address)
    remove_unused(own, run_lock.NAME)
    place = own / f"{held.state.term:06d}"
    shutil.rmtree(place, ignore_errors=True)
    mirror.found(_fetched(objects, held.state.commits, place, say))
    say(f"{address} is mirrored from {place}; a kill loses what came after its newest commit, which is computed again")
    return str(place), mirror


def fetch(text: str, folder: Path) -> int:
    """Copies a run to a new folder, as its newest whole commit has it. Returns its newest saved step, 0 without any.

    Raises:
      ValueError: there is no run, every commit is damaged, or the folder is there and not empty.
      Unreachable: the bucket does not answer.
    """
    address = parse(text, "fetch")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"fetch: {folder} exists already and is not an empty folder: name a new one")
    objects, part = Objects(address), folder.with_name(f"{folder.name}.part")
    folder.parent.mkdir(parents=True, exist_ok=True)
    for tries_left in reversed(range(_TRIES)):
        commits = record.read(objects).commits
        _check_there(address, commits)
        shutil.rmtree(part, ignore_errors=True)
        try:
            found = _fetched(objects, commits, part, print)
            break
        except ValueError:
            if not tries_left or record.read(objects).commits == commits:
                raise  # else newer ones have replaced these while they were read
    part.replace(folder)
    return tree.newest(next(iter(found.values())))


def config_folder(run_dir: str, must_exist: bool) -> str:
    """Returns a local folder that holds the run's config.json, if the run has one. It is for reading only.

    Raises:
      ValueError: there is no run where there must be one, or it is damaged.
      Unreachable: the bucket does not answer.
    """
    if not is_bucket(run_dir):
        return run_dir
    objects = Objects(parse(run_dir, "--run-dir"))
    commits = record.read(objects).commits
    if must_exist:
        _check_there(objects.address, commits)
    place = own_folder(objects.address) / "config"
    shutil.rmtree(place, ignore_errors=True)
    _fetched(objects, commits, place, lambda line: None, lambda name: name == "config.json")
    return str(place)


def _check_there(address: Address, commits: tuple[record.Commit, ...]) -> None:
    if not commits:
        raise ValueError(
            f"--resume={address}: there is no run; to begin one there write --config=FILE --run-dir={address} --resume"
        )


def _fetched(
    objects: Objects,
    commits: tuple[record.Commit, ...],
    place: Path,
    say: Callable[[str], object],
    only: Callable[[str], bool] = lambda name: True,
) -> dict[str, tree.Tree]:
    """Fetches the newest commit that is whole to a new folder. Returns its tree and those of older ones, by name.

    Raises:
      ValueError: there are commits, and none is whole.
    """
    kept: dict[str, tree.Tree] = {}
    for commit in commits:
        try:
            found = tree.read(objects, commit.tree)
            if not kept:
                tree.fetch(objects, found, place, only)
            kept[commit.tree] = found
        except tree.Damaged as error:
            say(f"BUCKET DAMAGED: the commit of step {commit.step} is not used, because {error}")
            if not kept:
                shutil.rmtree(place, ignore_errors=True)
    if commits and not kept:
        raise ValueError(f"{objects.address}: every commit of the run is damaged; begin a new run in another place")
    return kept
