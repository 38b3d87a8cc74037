"""The run of a bucket, SCHEME://BUCKET/NAME: fetched to a folder of this machine, run there, and mirrored back.

Everything else of a run knows the local folder only. Its scratch folder lies below the system's folder for temporary
files (TMPDIR). It is made anew at every start, from the newest commit that is whole. Those of starts that have ended are removed.

In a job of several processes each has a scratch folder of its own. Process 0 takes the run for all. Then each fetches the
same commit.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax

from jaxrl_post.config import refuse_url
from jaxrl_post.config.address import Address, is_bucket, parse
from jaxrl_post.parallel import exchange
from jaxrl_post.runs import agreement, run_folder
from jaxrl_post.runs.buckets import record, tree
from jaxrl_post.runs.buckets.files import made_whole, own_folder, remove_unused
from jaxrl_post.runs.buckets.followers import Alone, Follower, Followers
from jaxrl_post.runs.buckets.mirror import Mirror, Nowhere
from jaxrl_post.runs.buckets.objects import Objects
from jaxrl_post.runs.checkpoint.disks import ONE_DISK, Disks, OwnDisks

_TRIES = 5  # to read a commit before a run that goes on replaces it


@dataclass(frozen=True, kw_only=True)
class Opened:
    """The local folder of a run, what mirrors it, and on which disks the processes of the job have it."""

    run_dir: str
    mirror: Mirror | Follower | Nowhere
    disks: Disks


def opened(run_dir: str, resumes: str, stack: contextlib.ExitStack, say: Callable[[str], object]) -> Opened:
    """Returns where a run works. All processes of the job call it.

    The run of a bucket is taken for this job until `stack` closes.

    Args:
      resumes: as command_line.Flags.resume.

    Raises:
      ValueError: another job writes the run, it is there or is not there, or it is damaged.
      Unreachable: the bucket does not answer.
    """
    if not is_bucket(run_dir):
        refuse_url(run_dir, "--run-dir")
        return Opened(run_dir=run_dir, mirror=Nowhere(), disks=ONE_DISK)
    flag = "--resume" if resumes == "required" else "--run-dir"
    objects = agreement.everywhere(lambda: Objects(parse(run_dir, flag)))
    processes, index = jax.process_count(), jax.process_index()
    agreement.everywhere(lambda: record.read(objects))  # where one process cannot, none takes the run
    held = agreement.everywhere(lambda: _taken(objects, resumes, say) if index == 0 else None)
    state = _state(exchange.broadcast_text(_text(held.state) if held is not None else ""))
    mirror = stack.enter_context(_mirror(objects, held, state, say))
    name = f"{state.term:06d}-{index}" if processes > 1 else f"{state.term:06d}"
    place = agreement.everywhere(lambda: _scratch(objects.address, name))
    kept = agreement.everywhere(lambda: _fetched(objects, state.commits, place, say))
    first = exchange.broadcast_text(newest := next(iter(kept), ""))
    agreement.everywhere(lambda: _check_same(objects.address, newest, first))
    mirror.found(kept)
    say(
        f"{objects.address} is mirrored from {place}; a kill loses what came after its newest commit, which is computed again"
    )
    return Opened(run_dir=str(place), mirror=mirror, disks=OwnDisks() if processes > 1 else ONE_DISK)


def _taken(objects: Objects, resumes: str, say: Callable[[str], object]) -> record.HeldRecord:
    """Takes the run for this job. Errors are those of `opened`."""
    there = record.read(objects).commits
    if there and not resumes:
        raise ValueError(
            f"--run-dir={objects.address} holds a run already: a run is never written over; name a new place, or continue it "
            "by --resume"
        )
    if resumes == "required":
        _check_there(objects.address, there)
    return record.take(objects, say)


def _check_same(address: Address, newest: str, first: str) -> None:
    if newest != first:
        raise ValueError(f"{address}: a commit that process 0 reads is damaged here; start again")


def _mirror(
    objects: Objects, held: record.HeldRecord | None, state: record.State, say: Callable[[str], object]
) -> Mirror | Follower:
    """Returns what commits the run, or in other processes than 0 what uploads their part of it."""
    processes = jax.process_count()
    board = agreement.board("bucket")
    if held is None:
        return Follower(objects, state.term, board, jax.process_index(), processes)
    return Mirror(objects, held, say, others=Followers(board, processes) if processes > 1 else Alone())


def _scratch(address: Address, name: str) -> Path:
    """Returns the path of a scratch folder that is not there. Those of starts that have ended are removed."""
    own = own_folder(address)
    remove_unused(own, run_folder.LOCK)
    place = own / name
    shutil.rmtree(place, ignore_errors=True)
    return place


def _text(state: record.State) -> str:
    return json.dumps({"term": state.term, "commits": [[one.tree, one.step] for one in state.commits]})


def _state(text: str) -> record.State:
    told = json.loads(text)
    commits = tuple(record.Commit(tree=tree, step=step) for tree, step in told["commits"])
    return record.State(term=told["term"], commits=commits)


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
    own = own_folder(objects.address)  # other processes of this machine may do the same now
    place = own / f"config-{commits[0].tree.rpartition('/')[2] if commits else 'none'}"
    if not place.is_dir():
        made_whole(
            place, lambda part: _fetched(objects, commits, part, lambda line: None, lambda name: name == "config.json")
        )
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
