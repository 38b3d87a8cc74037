"""Finds the point at which a run resumes: the newest valid checkpoint, or the beginning. Cuts every log back to it.

Scores that were journaled after that point are set apart for the resumed run, which uses them instead of grading
again.

Invariant: nothing is cut before the config and the data are known to be those of the save. Refused are another config,
other data, a run whose checkpoints are all damaged, and a log that lost lines. Another library version, device, mesh or
number of processes prints a warning, because bits may differ from there on.

With another mesh or number of processes, weights and optimizer come as pieces of any size (runs/checkpoint/store.py). Processes
decide alike, so the state and the logs of process 0 are those of the run. Requests that wait in the engine get other
replicas, and scheduler and engine agree on them. That is refused where decisions hold layouts or pages of their own: lent
devices, several engine layouts, drafts, conversations, and placements that order a round.
"""

from __future__ import annotations

import itertools
import json
import platform
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import flax
import jax
import jaxlib
import numpy as np
import optax

import jaxrl_post
from jaxrl_post import config
from jaxrl_post.config import Config
from jaxrl_post.engine.elastic import moved
from jaxrl_post.engine.row_engine import RowEngine
from jaxrl_post.launch.parts import second_models
from jaxrl_post.launch.parts.inputs import Inputs
from jaxrl_post.parallel import exchange
from jaxrl_post.parallel.processes import say
from jaxrl_post.rewards import math_algebra
from jaxrl_post.rewards.environments import HARNESS, path_of
from jaxrl_post.runs import journal as journal_file
from jaxrl_post.runs import run_folder
from jaxrl_post.runs.checkpoint import identity, log_marks, store
from jaxrl_post.runs.checkpoint.log_marks import LOGS
from jaxrl_post.runs.journal import JOURNALS, aside
from jaxrl_post.trainer import optimizer

ORDER = 64  # positions whose prompts stand for the order of the data
LOG_FOLDERS = ("rollouts", "evaluations", "completions")


def about(settings: Config, start: Inputs) -> dict:
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
    name = settings.environment.name  # a harness has no file
    scorers = (path_of(name),) if name not in ("", HARNESS) else settings.graders
    code = identity.reward_code(scorers, sys.path)
    if start.reward_model is not None:
        code["reward.model"] = identity.weights(start.reward_model.place)
    code |= second_models.judge_digest(settings)
    told = {
        "config": config.to_dict(settings),
        "data": data,
        "processes": jax.process_count(),
        "device": jax.devices()[0].device_kind,
        "versions": versions(),
        "reward_code": code | dict(start.handed.digests),
    }
    compared = math_algebra.graders(settings.graders)
    taught = {"teacher": identity.weights(Path(settings.teacher.path))} if settings.algorithm.needs_teacher else {}
    return json.loads(json.dumps(told | taught | ({"graders": compared} if compared else {})))


def point(saves: store.Checkpoints, place: Path, mine: Path, now: Mapping) -> store.Saved | None:
    """Returns the step to resume from, or None for the beginning. Cuts the logs below `mine`, this process's folder.

    A run that was killed before its first save begins again. Its logs are set aside until it has finished
    (runs/checkpoint/log_marks.py).

    Args:
      now: the result of `about`.

    Raises:
      ValueError: the run cannot be resumed. No log was changed.
    """
    steps = int(exchange.broadcast_text(str(log_marks.last_step(mine)) if jax.process_index() == 0 else ""))
    lost = not saves.steps() and jax.process_index() == 0
    if refusal := exchange.broadcast_text(log_marks.refusal(place, steps, now["config"]) if lost else ""):
        raise ValueError(refusal)
    saved = saves.newest()
    if saved is not None:
        identity.check_same(saved.about, now, saved.step, may_move=may_move(now["config"]))
        for line in _changes(saved, now):
            say(line)
    elif (then := run_folder.read_config(place, "--resume")) is not None:
        graders = then.get("derived", {}).get("graders")
        compared = {"graders": graders} if graders else {}
        identity.check_same(
            {"config": {name: value for name, value in then.items() if name != "derived"}} | compared,
            {name: now[name] for name in ("config", "graders") if name in now},
            0,
        )
    marks = saved.host["marks"] if saved is not None else {}
    if saved is not None and saved.about["processes"] != now["processes"]:
        take_logs(place, mine, saved.about["processes"])
        exchange.broadcast_text("")  # process 0 cuts its logs only after they were copied
    log_marks.check_reach(mine, marks)
    if jax.process_index() == 0:  # process 0 grades and shares its scores with the others
        for journal in journal_file.JOURNALS:
            journal_file.set_apart(mine / journal, marks.get(journal, 0))
    if saved is None and steps:
        log_marks.set_aside(mine)
    log_marks.rewind(mine, marks)
    if jax.process_index() == 0:
        (place / "summary.json").unlink(missing_ok=True)
    say(
        f"resume: {place} goes on after step {saved.step}"
        if saved is not None
        else f"resume: {place} has no checkpoint yet and starts over"
        + (f"; logs up to step {steps} are kept below {log_marks.UNSAVED}/ until the run has finished" if steps else "")
    )
    return saved


def _changes(saved: store.Saved, now: Mapping) -> Iterator[str]:
    """Yields a line for each allowed change that may change what the run computes from here on."""
    if line := stretched(saved.about["config"], now["config"], saved.step):
        yield line
    for change in layout_changes(saved.about, now):
        yield f"resume: {change} now: from here on bits may differ"
    for name in ("versions", "device"):
        for field, old, new in identity.differences(saved.about[name], now[name], name):
            yield f"resume: {field} was {old} and is {new} now: from here on bits may differ"


def stretched(then: Mapping, now: Mapping, step: int) -> str:
    """Returns a line where more steps give the learning rate another course from `step` on, or an empty text."""
    section = now["optimizer"]
    if section["schedule"] == "constant" or then["steps"] == now["steps"] or step >= now["steps"]:
        return ""
    given = config.OptimizerConfig(**section)
    before, after = (float(optimizer.rate(given, steps)(step)) for steps in (then["steps"], now["steps"]))
    return (
        f"resume: optimizer.schedule={section['schedule']!r} is stretched from {then['steps']} to {now['steps']} steps: step "
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


def may_move(config: Mapping) -> bool:
    """Returns whether a run of this config, as nested dicts, can go on in another layout."""
    return (
        not config["scheduler"]["lend"]
        and not config["engine"]["layouts"]
        and config["speculation"]["drafter"] == "off"
        and config["scheduler"]["placement"] == "least_loaded"
        and not config.get("environment", {}).get("name")
    )


def layout_changes(then: Mapping, now: Mapping) -> list[str]:
    """Returns what differs between two layouts: mesh and number of processes, each as words."""
    parts = [
        {"processes": start.get("processes"), "mesh": start.get("config", {}).get("mesh", {})} for start in (then, now)
    ]
    return [f"{name} was {old} and is {new}" for name, old, new in identity.differences(*parts)]


def take_logs(place: Path, mine: Path, processes: int) -> None:
    """Copies the logs of process 0 of a job of so many processes to `mine`, in the run's folder `place`."""
    there = place if processes == 1 else place / "process_0"
    if there == mine:
        return
    for name in (*LOGS, *(aside(journal).name for journal in JOURNALS)):
        (mine / name).unlink(missing_ok=True)
        if (there / name).is_file() and Path(name).parent.name not in LOG_FOLDERS:
            shutil.copyfile(there / name, mine / name)
    for name in LOG_FOLDERS:
        shutil.rmtree(mine / name, ignore_errors=True)
        if (there / name).is_dir():
            shutil.copytree(there / name, mine / name)


def resharded(host: Mapping, engines: list[Any]) -> Mapping:
    """Returns the saved state of the host for engines with other replicas.

    Args:
      engines: of the run, in the order of the state.
    """
    homes: dict[tuple, int] = {}
    states, replicas = [], 1
    for engine, state in zip(engines, host["engines"], strict=True):
        if not isinstance(engine, RowEngine):
            states.append(state)
            continue
        replicas = engine.layout.replicas
        there = moved([(one["id"], one["replica"]) for one in state["lives"]], replicas)
        lives = [one | {"replica": replica} for one, replica in zip(state["lives"], there, strict=True)]
        homes |= {tuple(one["id"]): one["replica"] for one in lives}
        states.append(state | {"row_sizes": engine.row_sizes, "cost": engine.cost.digest, "lives": lives})
    scheduler = host["scheduler"]["scheduler"]
    before = scheduler["placement"]
    of = [[id, homes.get(tuple(id), replica % replicas)] for id, replica in before["of"]]
    placed = scheduler | {"placement": before | {"replicas": replicas, "of": of}}
    return host | {"engines": states, "scheduler": host["scheduler"] | {"scheduler": placed}}
