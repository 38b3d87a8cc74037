"""A run that begins from a checkpoint of another run, its parent, under changed settings.

It takes weights, moments, the position in the data, the history and the optimizer step. Then it is a run of its own: it
saves the step as its first checkpoint, so that the parent is needed no more. The parent's folder is only read.

What was in flight at the checkpoint, rollouts of groups that were not trained on yet:

- It goes on where only settings of learning, evaluation and saving change. Then the first round is that of the parent,
  to the bit.
- It is dropped where settings change by which rollouts are generated, scored or scheduled. Its prompts come first in the
  new run, so that every prompt of an epoch is still trained on once.

Refused are changes under which the state is of no use: another model or tokenizer, and another tree of the optimizer.
Refused too are a run that ends at the step, and a step within a round. With other data or another seed the order of the data begins anew
and the history is empty, which is said.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from jaxrl_post import config as configs
from jaxrl_post.launch import resume
from jaxrl_post.launch.command_line import Flags
from jaxrl_post.launch.parts.inputs import Inputs
from jaxrl_post.parallel.processes import say
from jaxrl_post.ring import written
from jaxrl_post.ring.history import History
from jaxrl_post.runs import bucket_run, run_folder
from jaxrl_post.runs.checkpoint import identity, store
from jaxrl_post.runs.checkpoint.signed_files import MANIFEST
from jaxrl_post.trainer.update_gate import Gate

FILE = "parent.json"
# Under changes of these a rollout in flight is still what the new run would have generated.
_LEARNING = ("algorithm", "optimizer", "teacher", "batch", "eval", "checkpoint", "alarms", "watchdog")
_ALONE = ("steps", "trace_rounds", "model.remat", "model.remat_policy", "model.scan_layers", "model.compute_dtype")
_MODEL = ("model.path", "model.preset", "model.tokenizer")
_OPEN = ("open", "queue", "kept", "left")  # where schedulers keep groups


@dataclass(frozen=True, kw_only=True)
class Parent:
    """The checkpoint that a run began from.

    `run`: the folder. `checkpoint`: the hash of the list of its files. `changes`: options that differ, as [then, now].
    `position`: of the next prompt in the parent's order. `again`: positions of prompts whose rollouts were dropped.
    """

    run: str
    step: int
    checkpoint: str
    changes: Mapping[str, list] = field(default_factory=dict)
    position: int = 0
    again: tuple[int, ...] = ()

    @property
    def detour(self) -> dict[int, int]:
        """The positions just before `position` that stand for those of `again`."""
        return {self.position - len(self.again) + at: there for at, there in enumerate(self.again)}

    def ordered(self, start: Inputs) -> Inputs:
        """Returns the inputs with the order of the prompts that this run has."""
        return replace(start, train=start.train.detoured(self.detour)) if self.again else start

    def told(self) -> dict:
        """Returns what config.json and summary.json say of it."""
        return {"run": self.run, "step": self.step, "checkpoint": self.checkpoint}


@dataclass(frozen=True, kw_only=True)
class Branch:
    """What a new run takes from its parent. `goes_on`: rollouts in flight do, and the scheduler with them.

    `same_order`: data and seed are the parent's.
    """

    parent: Parent
    saved: store.Saved
    goes_on: bool
    same_order: bool

    def begin(self, updates: int, history: History, gate: Gate, scheduler: Any) -> None:
        """Gives a new scheduler its place in the data and in the run. What was in flight is dropped.

        Args:
          updates: optimizer steps of a round.
        """
        if self.same_order:
            history.load_state_dict(self.saved.host["history"])
        gate.load_state_dict(self.saved.host["gate"])
        state = scheduler.state_dict()
        own, step = _ledger(state), self.saved.step
        own["position"] = self.parent.position - len(self.parent.again)
        own |= {name: value for name, value in _counted(step, updates).items() if name in own}
        scheduler.load_state_dict(state)


def _counted(step: int, updates: int) -> dict[str, int]:
    """Returns what schedulers call the optimizer steps so far."""
    return {"round": step // updates, "step": step, "version": step}


def named(text: str) -> tuple[Path, int | None]:
    """Returns folder and step of RUN@STEP. Without @STEP the step is None: the newest."""
    run, at, step = text.rpartition("@")
    return (Path(run), int(step)) if at and run and step.isdecimal() else (Path(text), None)


def settings(flags: Flags) -> Any:
    """Returns the config that was named, else that of the run which is branched from or resumed.

    Raises:
      ValueError: a mistake in the config file, or no config.json in the run's folder.
    """
    if flags.config:
        return configs.load(flags.config)
    if flags.branch:
        return run_folder.settings(named(flags.branch)[0], f"--branch={flags.branch}")
    return run_folder.settings(
        Path(bucket_run.config_folder(flags.run_dir, must_exist=True)), f"--resume of {flags.run_dir}"
    )


def opened(text: str, config: configs.Config, start: Inputs) -> Branch:
    """Returns what the run takes from RUN@STEP, and says what changes.

    Raises:
      ValueError: there is no such run or step, or its state is of no use to this run.
    """
    about, (run, step) = resume.about(config, start), named(text)
    saved = store.read_only(run).at(step, f"--branch={text}")
    changes = {
        name.removeprefix("config."): [then, now]
        for name, then, now in identity.differences(saved.about["config"], about["config"])
        if name not in ("name", "run_dir")
    }
    _check(text, config, saved, changes)
    same_order = saved.about["data"]["train"]["digest"] == about["data"]["train"]["digest"]
    open_groups = sorted(_positions(saved.host["scheduler"]))
    other = _other(saved, about, changes)
    if other and (config.curriculum.used or "order" in saved.host["scheduler"]):
        raise ValueError(
            f"--branch={text}: {other[0]} changes, and the passes of a curriculum go on only where neither data nor rollouts "
            "change; leave it, or begin a new run from the policy of this step"
        )
    parent = Parent(
        run=str(run.absolute()),
        step=saved.step,
        checkpoint=hashlib.blake2b((saved.path / MANIFEST).read_bytes(), digest_size=16).hexdigest(),
        changes=changes,
        position=_ledger(saved.host["scheduler"])["position"] if same_order else 0,
        again=tuple(open_groups) if other and same_order else (),
    )
    say(_sentence(parent, len(open_groups), other, same_order))
    return Branch(parent=parent, saved=saved, goes_on=not other, same_order=same_order)


def _other(saved: store.Saved, about: Mapping, changes: Mapping) -> list[str]:
    """Returns what changes of that by which rollouts are generated, scored or scheduled."""
    allowed = {*_ALONE, *identity.MAY_CHANGE}
    out = [name for name in changes if name not in allowed and name.partition(".")[0] not in _LEARNING]
    for name in ("processes", "graders", "reward_code"):
        out += [name] * (saved.about.get(name) != about.get(name))
    data = (about_one["data"]["train"]["digest"] for about_one in (saved.about, about))
    return out + ["the training data"] * (len(set(data)) > 1 and "data.train" not in out)


def _check(text: str, config: configs.Config, saved: store.Saved, changes: Mapping[str, list]) -> None:
    """Refuses changes under which the state is of no use."""
    step, updates = saved.step, config.scheduler.updates
    for name in _MODEL:
        if name in changes:
            then, now = map(json.dumps, changes[name])
            raise ValueError(
                f"--branch={text}: {name} {then} -> {now}: the weights of step {step} belong to the first; leave it, or begin a "
                "new run without --branch"
            )
    for name in sorted(name for name in changes if name.startswith("lora.")):
        raise ValueError(
            f"--branch={text}: {name} {changes[name][0]!r} -> {changes[name][1]!r}: the weights of step {step} are additions "
            "of the first form; leave it, or export the policy and begin a new run from it"
        )
    for name, same in (("optimizer.moments_dtype", str), ("optimizer.max_grad_norm", bool)):
        if name in changes and len({*map(same, changes[name])}) > 1:
            raise ValueError(
                f"--branch={text}: {name} {changes[name][0]} -> {changes[name][1]}: the optimizer's state of step {step} has "
                "another form under the second; leave it as it was"
            )
    if config.steps <= step:
        raise ValueError(
            f"--branch={text}: steps={config.steps} is reached at step {step}, where the branch begins; the nearest valid value is "
            f"{(step // updates + 1) * updates}"
        )
    if step % updates:
        raise ValueError(
            f"--branch={text}: step {step} lies within a round of {updates} optimizer steps (scheduler.mini_batches * "
            "scheduler.ppo_epochs); leave these as they were"
        )


def _sentence(parent: Parent, count: int, other: list[str], same_order: bool) -> str:
    """Returns one line on where the run begins, what changes, and what becomes of rollouts in flight."""
    changed = [f"{name} {_short(then)} -> {_short(now)}" for name, (then, now) in sorted(parent.changes.items())]
    words = [f"branch: it begins at step {parent.step} of {parent.run}", *(changed or ["no setting changes"])]
    if not same_order:
        words.append("data or seed are others, so the order of the data begins anew and the history is empty")
    if count and not other:
        words.append(f"{count} groups in flight go on")
    elif count:
        words.append(f"{count} groups in flight are dropped{' and their prompts come first' if same_order else ''}")
    return "; ".join(words)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _ledger(state: Mapping) -> dict:
    """Returns the part of a scheduler's state that counts prompts. Wrappers keep the inner state under a name."""
    while "position" not in state:
        state = state["scheduler"] if "scheduler" in state else state["rounds"]
    return state if isinstance(state, dict) else dict(state)


def _positions(state: Mapping) -> Iterator[int]:
    """Yields the positions of groups that were admitted and not trained on."""
    own = _ledger(state)
    return iter({group["position"] for name in _OPEN for group in own.get(name, ())})


def write(place: Path, parent: Parent) -> None:
    """Writes parent.json into the folder of a new run."""
    text = json.dumps(parent.told() | {"changes": parent.changes, "position": parent.position, "again": parent.again})
    written.whole(place / FILE, text + "\n")


def read(place: Path) -> Parent | None:
    """Returns the parent of a run that is resumed, or None.

    Raises:
      ValueError: parent.json cannot be read.
    """
    with contextlib.suppress(FileNotFoundError):
        try:
            values = json.loads((place / FILE).read_text(encoding="utf-8"))
            return Parent(**values | {"again": tuple(values["again"])})
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"resume: {place / FILE} is no parent.json of a run ({type(error).__name__})") from error
    return None


def ordered(taken: Branch | None, place: Path, start: Inputs) -> tuple[Parent | None, Inputs]:
    """Returns the parent of a run in the folder `place`, if any, and the inputs in the order that the run has then.

    Args:
      taken: what the run takes from its parent now; None: a parent is read from parent.json.
    """
    parent = taken.parent if taken else read(place)
    return parent, parent.ordered(start) if parent else start


def check_begun(place: Path, steps: list[int]) -> None:
    """Refuses to resume a branch that has no checkpoint of its own: it would start over from the first weights.

    Raises:
      ValueError: no step was saved.
    """
    parent = read(place)
    if parent is not None and not steps:
        raise ValueError(
            f"resume: {place} branched from step {parent.step} of {parent.run} and has no checkpoint of its own: begin it anew "
            f"by --branch={parent.run}@{parent.step}"
        )
