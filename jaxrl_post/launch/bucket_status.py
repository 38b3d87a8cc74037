"""What a bucket alone says of a run: how far it is committed, when, who writes it, and how its attempts ended.

Nothing is changed in the bucket, and jax is not loaded.
"""

from __future__ import annotations

import re
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from jaxrl_post.buckets import record, tree
from jaxrl_post.buckets.address import parse
from jaxrl_post.buckets.objects import Objects
from jaxrl_post.launch import attempts

_READ = re.compile(r"config\.json|attempts/.*|(process_0/)?metrics\.jsonl")


def status(text: str, now: float | None = None) -> attempts.Status:
    """Returns the status of the run in gs://BUCKET/NAME, as its newest whole commit has it.

    Args:
      now: UNIX seconds; None: the present.

    Raises:
      ValueError: there is no run, or every commit is damaged.
      Unreachable: the bucket does not answer.
    """
    objects, now = Objects(parse(text, "--status")), time.time() if now is None else now
    there = record.read(objects)
    if not there.generation:
        raise ValueError(f"--status={objects.address}: there is no run")
    held = attempts.Lease(
        holder=record.who(there.holder) if there.holder else "",
        live=bool(there.holder) and there.until > now,
        committed_s=None,
        starts=there.term,
    )
    renewed = now - (there.until - record.LEASE_S)
    for commit in there.commits:
        try:
            with tempfile.TemporaryDirectory() as folder:
                found = tree.read(objects, commit.tree)
                told = attempts.status(_small(objects, found, Path(folder)), now)
                held = replace(held, committed_s=now - commit.at)
                return replace(told, folder=str(objects.address), age_s=renewed, lease=held)
        except tree.Damaged:
            continue
    if there.commits:
        raise ValueError(f"--status={objects.address}: every commit of the run is damaged")
    return attempts.Status(
        folder=str(objects.address), attempts=(), step=0, steps=None, saved=None, age_s=renewed, lease=held
    )


def _small(objects: Objects, found: tree.Tree, folder: Path) -> Path:
    """Writes what a status needs of a run, with an empty folder for each saved step."""
    tree.fetch(objects, found, folder, lambda name: _READ.fullmatch(name) is not None)
    for name in found:
        if name.startswith("checkpoints/step_"):
            (folder / Path(name).parent).mkdir(parents=True, exist_ok=True)
    return folder
