"""Finds the point at which a run resumes: the newest valid checkpoint, or the beginning. Cuts every log back to it.

Scores that were journaled after that point are set apart for the resumed run, which uses them instead of grading
again.

Invariant: nothing is cut before the config and the data are known to be those of the save. Refused are another config,
other data, a run whose checkpoints are all damaged, and a log that lost lines. Another library version, device, mesh or
number of processes prints a warning, because bits may differ from there on.
"""

from __future__ import annotations

import itertools
import json
import platform
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import flax
import jax
import jaxlib
import numpy as np
import optax

import jaxrl_post
from jaxrl_post import config
from jaxrl_post.checkpoint import identity, log_marks, store, unsaved
from jaxrl_post.config import Config
from jaxrl_post.launch import judge_start, moved_run
from jaxrl_post.launch.inputs import Inputs
from jaxrl_post.parallel import processes
from jaxrl_post.rewards import math_algebra
from jaxrl_post.rewards.environments import HARNESS, path_of
from jaxrl_post.telemetry import journal as journal_file
from jaxrl_post.trainer import optimizer

ORDER = 64  # positions whose prompts stand for the order of the data


def about(settings: Config, start: Inputs, versions: Mapping[str, str]) -> dict:
    """Returns the identity of a run, as JSON: config, data, processes, device, versions, and the reward functions' code.

    With reward functions whose verdicts depend on what is installed, also what they compare with (`graders`). A teacher and a
    reward model are known by a hash of their folders.
    """
    ordered = (start.train.at(position)[1] for position in range(ORDER))
    data = {
        "train": identity.fingerprint(settings.data.train, settings.seed, itertools.chain(start.train, ordered)),
        "eval": identity.fingerprint(
            settings.eval.data, settings.seed, (*start.held_out, *(g.prompt for g in start.completions))
        ),
    }
    code = identity.reward_code(_judges(settings), sys.path)
    if start.reward_model is not None:
        code["reward.model"] = identity.weights(start.reward_model.place)
    code |= judge_start.digest(settings)
    told = {
        "config": config.to_dict(settings),
        "data": data,
        "processes": jax.process_count(),
        "device": jax.devices()[0].device_kind,
        "versions": dict(versions),
        "reward_code": code | dict(start.handed.digests),
    }
    compared = math_algebra.graders(settings.graders)
    taught = {"teacher": identity.weights(Path(settings.teacher.path))} if settings.algorithm.needs_teacher else {}
    return json.loads(json.dumps(told | taught | ({"graders": compared} if compared else {})))


def _judges(settings: Config) -> tuple[str, ...]:
    """Returns the import paths of what scores rollouts: reward functions, or an environment. A harness has none."""
    name = settings.environment.name
    return (path_of(name),) if name not in ("", HARNESS) else settings.graders


def point(
    saves: store.Checkpoints, place: Path, mine: Path, now: Mapping, say: Callable[[str], object]
) -> store.Saved | None:
    """Returns the step to resume from, or None for the beginning. Cuts the logs below `mine`, this process's folder.

    A run that was killed before its first save begins again. Its logs are set aside until it has finished
    (checkpoint/unsaved.py).

    Args:
      now: the result of `about`.

    Raises:
      ValueError: the run cannot be resumed. No log was changed.
    """
    steps = int(processes.share_text(str(unsaved.last_step(mine)) if jax.process_index() == 0 else ""))
    lost = not saves.steps() and jax.process_index() == 0
    if refusal := processes.share_text(unsaved.refusal(place, steps, now["config"]) if lost else ""):
        raise ValueError(refusal)
    saved = saves.newest()
    if saved is not None:
        identity.check_same(saved.about, now, saved.step, may_move=moved_run.may_move(now["config"]))
        for line in _changes(saved, now):
            say(line)
    elif (place / "config.json").is_file():
        then = json.loads((place / "config.json").read_text(encoding="utf-8"))
        graders = then.get("derived", {}).get("graders")
        compared = {"graders": graders} if graders else {}
        identity.check_same(
            {"config": {name: value for name, value in then.items() if name != "derived"}} | compared,
            {name: now[name] for name in ("config", "graders") if name in now},
            0,
        )
    marks = saved.host["marks"] if saved is not None else {}
    if saved is not None and saved.about["processes"] != now["processes"]:
        moved_run.take_logs(place, mine, saved.about["processes"])
        processes.share_text("")  # process 0 cuts its logs only after they were copied
    log_marks.check_reach(mine, marks)
    if jax.process_index() == 0:  # process 0 grades and shares its scores with the others
        for journal in journal_file.JOURNALS:
            journal_file.put_aside(mine / journal, marks.get(journal, 0))
    if saved is None and steps:
        unsaved.set_aside(mine)
    log_marks.rewind(mine, marks)
    if jax.process_index() == 0:
        (place / "summary.json").unlink(missing_ok=True)
    say(
        f"resume: {place} goes on after step {saved.step}"
        if saved is not None
        else f"resume: {place} has no checkpoint yet and starts over"
        + (f"; logs up to step {steps} are kept below {unsaved.NAME}/ until the run has finished" if steps else "")
    )
    return saved


def _changes(saved: store.Saved, now: Mapping) -> Iterator[str]:
    """Yields a line for each allowed change that may change what the run computes from here on."""
    if line := stretched(saved.about["config"], now["config"], saved.step):
        yield line
    for change in moved_run.changes(saved.about, now):
        yield f"resume: {change} now: from here on bits may differ"
    for name in ("versions", "device"):
        for field, old, new in identity.differences(saved.about[name], now[name], name):
            yield f"resume: {field} was {old} and is {new} now: from here on bits may differ"


def stretched(then: Mapping, now: Mapping, step: int) -> str:
    """Returns a line where more steps give the learning rate another course from `step` on, or an empty text."""
    told = now["optimizer"]
    if told["schedule"] == "constant" or then["steps"] == now["steps"] or step >= now["steps"]:
        return ""
    given = config.OptimizerConfig(**told)
    before, after = (float(optimizer.rate(given, steps)(step)) for steps in (then["steps"], now["steps"]))
    return (
        f"resume: optimizer.schedule={told['schedule']!r} is stretched from {then['steps']} to {now['steps']} steps: step "
        f"{step + 1} has the learning rate {after:.3g}, where the first course had {before:.3g}"
    )


def versions() -> dict[str, str]:
    """Returns the versions of everything whose change may change a bit or a verdict."""
    return {
        "jaxrl_post": jaxrl_post.__version__,
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "flax": flax.__version__,
        "optax": optax.__version__,
        "numpy": np.__version__,
        "math": math_algebra.grader(),  # a user's own function may call it
    }
