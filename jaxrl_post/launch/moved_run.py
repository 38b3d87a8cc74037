"""A run that goes on with another mesh or another number of processes than it was saved with.

Weights and optimizer come as pieces of any size (checkpoint/store.py). Processes decide alike, so the state and the
logs of process 0 are those of the run. Requests that wait in the engine get other replicas, and scheduler and engine
agree on them. Numerics change with the layout, so bits may differ from there on.

Refused where decisions hold layouts or pages of their own: lent devices, several engine layouts, drafts, conversations,
and placements that order a round.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxrl_post.checkpoint import identity
from jaxrl_post.checkpoint.log_marks import LOGS
from jaxrl_post.engine.elastic import moved
from jaxrl_post.engine.row_engine import RowEngine
from jaxrl_post.telemetry.journal import JOURNALS, aside

FOLDERS = ("rollouts", "evaluations", "completions")


def may_move(config: Mapping) -> bool:
    """Returns whether a run of this config, as nested dicts, can go on in another layout."""
    return (
        not config["scheduler"]["lend"]
        and not config["engine"]["layouts"]
        and config["speculation"]["drafter"] == "off"
        and config["scheduler"]["placement"] == "least_loaded"
        and not config.get("environment", {}).get("name")
    )


def changes(then: Mapping, now: Mapping) -> list[str]:
    """Returns what differs between two layouts: mesh and number of processes, each as words."""
    parts = [
        {"processes": told.get("processes"), "mesh": told.get("config", {}).get("mesh", {})} for told in (then, now)
    ]
    return [f"{name} was {old} and is {new}" for name, old, new in identity.differences(*parts)]


def take_logs(place: Path, mine: Path, processes: int) -> None:
    """Copies the logs of process 0 of a job of so many processes to `mine`, in the run's folder `place`."""
    there = place if processes == 1 else place / "process_0"
    if there == mine:
        return
    for name in (*LOGS, *(aside(journal).name for journal in JOURNALS)):
        (mine / name).unlink(missing_ok=True)
        if (there / name).is_file() and Path(name).parent.name not in FOLDERS:
            shutil.copyfile(there / name, mine / name)
    for name in FOLDERS:
        shutil.rmtree(mine / name, ignore_errors=True)
        if (there / name).is_dir():
            shutil.copytree(there / name, mine / name)


def rehomed(host: Mapping, engines: list[Any]) -> Mapping:
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
