"""A run at one of its saved steps, or at its beginning, built again so that its ring can be turned once more. And the batch
of a skipped optimizer step, with the learner and the weights of that time.

Invariant: nothing in the run's folder is changed. Logs go to another folder, nothing is saved, and no reward is
graded: scores come from the run's journal. Refused are changed data, jobs of several processes, environments, and
a rollout whose score the journal does not hold.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import optax

from jaxrl_post import config as configs
from jaxrl_post.launch import assemble, compile_guard, own_process, resume
from jaxrl_post.launch.parts import build, inputs
from jaxrl_post.parallel.processes import say
from jaxrl_post.rewards import jobs
from jaxrl_post.ring.json_text import shown
from jaxrl_post.ring.types import Group, Rollout, RolloutId
from jaxrl_post.runs import rollout_log, run_logs
from jaxrl_post.runs.checkpoint import identity, store
from jaxrl_post.runs.journal import Journaled, read_journal
from jaxrl_post.runs.run_logs import Name, RunLogs
from jaxrl_post.trainer.learner import Learner

BEGINNING = 0  # the step at which a run begins, without a checkpoint


class Unsaved:
    """Stands for checkpoint.background.Background where nothing is to be saved."""

    lost = ""

    def steps(self) -> list[int]:
        return []

    def save(self, step: int, arrays: Any, host: Mapping, about: Mapping, last: bool = False) -> None:
        """Does nothing. The caller has collected the host's state, which makes a save a swap boundary."""

    def join(self) -> None:
        """Does nothing."""


class Graded:
    """A protocols.Rewards that takes every score from a run's journal.

    Args:
      found: the journal's records, each used once.
      shuffle_seed: as jobs.scored_group.
    """

    def __init__(self, found: Journaled, shuffle_seed: int | None):
        self._found, self._shuffle_seed = found, shuffle_seed
        self._digests: dict[RolloutId, str] = {}
        self.confined: dict = {}

    def start(self, rollout: Rollout) -> None:
        """Notes the rollout's tokens."""
        self._digests[rollout.id] = jobs.digest_of_tokens(rollout)

    def join(self, group: Group) -> Group:
        """Returns the group with its rewards.

        Raises:
          ValueError: the journal holds no score of a rollout with these tokens.
        """
        mine = [(rollout.id, self._digests.pop(rollout.id)) for rollout in group.rollouts]
        for id, tokens in mine:
            if self._found.find(id, tokens) is None:
                raise ValueError(
                    f"replay: the run's journal has no score of rollout {shown(tuple(id), 200)} with the tokens that "
                    "it has here: the ring does not repeat the run"
                )
        return jobs.scored_group(group, [self._found.take(*one) for one in mine], self._shuffle_seed)

    def metrics(self) -> dict[str, float]:
        return {}


def begin_at(logs: RunLogs, name: Name, rollout: Rollout) -> int:
    """Returns the newest saved step before a rollout's first token, or BEGINNING where none was saved before it.

    The weights of that token tell: a save follows a publish at once, after an evaluation at that publish.

    Raises:
      ValueError: the checkpoints before it were pruned. The sentence has the earliest step that can be replayed.
    """
    there = store.read_only(logs.folder).steps()
    first = int(rollout.versions.min(initial=1 << 30)) if name.step is None else name.step - 1
    before = [step for step in there if step <= first]
    about = logs.kept.get("checkpoint", {})
    every, keep = about.get("every", 0), about.get("keep_last", 0)
    if before:
        return before[-1]
    if not every or first < every or len(there) < keep:
        return BEGINNING
    where = f"of weights {first}" if name.step is None else f"after the publish of step {first}"
    raise ValueError(
        f"replay: {name} has its first token {where}, and the checkpoints before it were pruned "
        f"(checkpoint.keep_last={keep}); the earliest step that can be replayed is {there[0]}, and --from-start turns "
        "the ring from the beginning of the run"
    )


def config_after(logs: RunLogs, step: int) -> configs.Config:
    """Returns the config under which the run went on after a step: that of the next save, else the run's last one.

    `steps` may grow when a run is resumed, and decisions near the end of a run depend on it.
    """
    later = [number for number in store.read_only(logs.folder).steps() if number > step]
    kept = store.read_only(logs.folder).about(later[0])["config"] if later else logs.kept
    return configs.resolve(kept)


def opened(logs: RunLogs, step: int, place: Path, stack: contextlib.ExitStack) -> assemble.Run:
    """Builds the run as it was at `step`, with logs in the folder `place`.

    Raises:
      ValueError: the run was a job of several processes, its data or devices are not there, or a checkpoint is damaged.
    """
    processes = logs.derived.get("processes", 1)
    if processes != 1:
        raise ValueError(f"replay: {logs.folder} was a job of {processes} processes; only runs of one are replayed")
    environment = logs.kept.get("environment", {}).get("name", "")
    if environment:
        raise ValueError(
            f"replay: {logs.folder} is a run in the environment {environment!r}; only runs of one turn are replayed"
        )
    own_process.return_large_blocks()
    config = config_after(logs, step)
    config = replace(config, logger=replace(config.logger, tensorboard=False, wandb="off"))
    compile_guard.use_cache(os.environ)
    start = inputs.gather(config)
    devices = build.device_plan(config)
    about = resume.about(config, start)
    saved = store.read_only(logs.folder).at(step, "replay") if step != BEGINNING else None
    _check(logs, about)
    marks = saved.host["marks"] if saved is not None else {}
    shuffled = config.seed if config.reward.shuffle else None
    origin = assemble.Origin(
        about=about,
        saves=Unsaved(),
        saved=saved,
        rewards=Graded(_scores(logs, "rewards.jsonl", marks), shuffled),
        judge=Graded(_scores(logs, "eval_rewards.jsonl", marks), None),
    )
    return assemble.build(config, start, devices, place, origin, stack)


def restored(run: assemble.Run, ids: Sequence[RolloutId]) -> dict[RolloutId, int]:
    """Returns how many tokens of these rollouts come from the run's checkpoint and are not sampled again."""
    there: dict[RolloutId, int] = {}
    for engine in run.saved.host["engines"] if run.saved is not None else ():
        lives = engine.get("engine", engine).get("lives", ())  # of several layouts, the active one's
        there |= {RolloutId(*one["id"]): len(one["logprobs"]) for one in lives}
    return {id: there.get(id, 0) for id in ids}


def _scores(logs: RunLogs, journal: str, marks: Mapping[str, int]) -> Journaled:
    file = logs.mine / journal
    return Journaled(read_journal(file, marks.get(journal, 0)) if file.is_file() else ())


def _check(logs: RunLogs, now: Mapping) -> None:
    """Refuses data that are not those of the run, and says which versions and devices are not."""
    there = store.read_only(logs.folder).steps()
    if not there:
        return
    then = store.read_only(logs.folder).about(there[-1])
    for field, _, _ in identity.differences(then["data"], now["data"], "data"):
        raise ValueError(f"replay: {field} is not what it was when {logs.folder} was saved: its prompts were changed")
    for name in ("versions", "device"):
        for field, old, new in identity.differences(then[name], now[name], name):
            say(f"replay: {field} was {old} and is {new} now: bits may differ")


def skipped_batch(run: str, step: int) -> tuple[Learner, tuple[Group, ...], int]:
    """Returns the learner, the batch of a skipped step, and the step whose weights the learner has.

    Raises:
      ValueError: there is no such run or batch, or it is damaged.
    """
    logs = run_logs.opened(run)
    folder = logs.mine / "skipped"
    file = folder / f"step_{step:06d}.npz"
    if not file.is_file():
        there = sorted(int(path.stem.removeprefix("step_")) for path in folder.glob("step_*.npz"))
        raise ValueError(f"replay: {run} has no skipped batch of step {step}; it has those of steps {there}")
    groups = rollout_log.read(file)
    config = configs.resolve(logs.kept)
    start = inputs.gather(config)
    compile_guard.use_cache({})
    learner = build.learner(config, start.model, start.load_params, build.device_plan(config), start.adapter)
    saved = store.read_only(logs.folder).before(step)
    if saved is not None:
        learner.restore(saved.arrays, saved.step)
    return learner, groups, learner.step


def batch_findings(learner: Learner, groups: Sequence[Group], step: int, at: int) -> Iterator[str]:
    """Yields lines on a batch: its gradient's norm, and each rollout with a number that is not finite."""
    yield f"step {step}: {len(groups)} groups, {sum(len(group.rollouts) for group in groups)} rollouts, at the weights of step {at}"
    logprobs = learner.logprobs(groups)
    odd = 0
    for group in groups:
        for rollout, reward, scored in zip(group.rollouts, group.rewards, group.scored, strict=True):
            found = {
                "the engine's log-probs": rollout.logprobs[rollout.sampled],
                "the learner's log-probs": logprobs[rollout.id][rollout.sampled],
                "the reward": np.array([reward] if scored else []),
            }
            wrong = [name for name, values in found.items() if not np.isfinite(values).all()]
            odd += bool(wrong)
            if wrong:
                yield f"  {rollout.id}: not finite: {', '.join(wrong)}"
    learner.prepare(groups)
    learner.accumulate(groups)
    norm = float(optax.global_norm(learner.gradient()))
    yield f"  gradient norm {norm:g}; rollouts with a number that is not finite: {odd}"
