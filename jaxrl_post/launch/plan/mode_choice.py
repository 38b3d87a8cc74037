"""What `scheduler.name=auto` stands for in a run: a mode chosen by the simulator before anything is built.

Each candidate is the run's own config with another scheduler. What the rules of the config refuse is no candidate, and
the refusal is printed. Candidates are simulated on lengths seen before, on the run's devices, by its cost table.

Invariant: process 0 chooses, and every process gets its choice. The choice is stored in config.json and in every
checkpoint. A run that resumes reads it there and never chooses again, whatever became of lengths and table.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from jaxrl_post.config import Config, EngineConfig, SchedulerConfig
from jaxrl_post.launch.parts import build
from jaxrl_post.launch.parts.inputs import Inputs
from jaxrl_post.runs import agreement
from jaxrl_post.scheduler.forecast import Cost
from jaxrl_post.simulate import observed, trial
from jaxrl_post.simulate.trial import TrialInputs

OVERS = (1.25, 1.5)  # RollPacker's own (arXiv 2509.21009), and the best of its 8k workload (configs/sim/ours_8k.py)
DRIFT = 0.001  # chance per token that an update changes it, as in configs/sim/ours_8k.py
MARGIN = 0.03  # a mode must save this share to be chosen before a simpler one
ROLLOUTS = 3072  # of a candidate, at least; about a second
LARGEST = 1024  # rollouts of a round; a larger one is simulated as a part of itself
_RESET = {"scheduler": ("max_staleness", "ahead", "max_unscored", "max_ready"), "engine": ("carry_over", "carry_share")}


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A mode: its options of the scheduler, its config, and the rounds after which it repeats itself."""

    options: Mapping[str, object]
    config: Config
    period: int

    @property
    def name(self) -> str:
        return named(self.options)


def settled(config: Config, start: Inputs, folder: str) -> tuple[Config, dict | None, str]:
    """Returns the config with a definite mode, what is stored of the choice, and what to print. Without `auto`: as it is.

    Args:
      folder: of the run that resumes. Empty: a new run.

    Raises:
      ValueError: lengths or costs cannot be read, or the folder's run is unreadable.
    """
    if config.scheduler.name != "auto":
        return config, (_stored(Path(folder)) or {}).get("auto") if folder else None, ""
    chosen = agreement.of_first(lambda: _look(config, start, folder))
    options, why = chosen["options"], chosen["auto"]
    if chosen["stored"]:
        return concrete(config, options), why, f"scheduler.name=auto: this run has its mode already: {named(options)}"
    return concrete(config, options), why, text(why)


def _look(config: Config, start: Inputs, folder: str) -> dict:
    """Returns the choice of the folder's run, or makes one."""
    stored = _stored(Path(folder)) if folder else None
    if stored is not None:
        return {"stored": True, "options": stored["options"], "auto": stored["auto"]}
    path, cap = config.scheduler.auto_history, config.sampling.max_tokens
    lengths = observed.read(path, cap) if path else observed.prior(cap)
    why = choose(config, job(config, start, lengths)) | {"lengths": lengths.told}
    return {"stored": False, "options": why["chosen"], "auto": why}


# ---- The choice


def choose(config: Config, job: TrialInputs) -> dict:
    """Simulates every candidate and returns the choice, as JSON.

    - `chosen`: options of the scheduler.
    - `modes`: of each candidate its options, seconds of an optimizer step, and the age of its oldest trained token.
    - `left_out`: modes that are no candidates, with the reason.
    - `chips`: the step costs by which it was chosen.
    """
    found, left_out = candidates(config)
    part, small = _part(config, job)
    modes = []
    for one in found:
        ran = _tried(part(one.config), small, one)
        modes.append({"options": dict(one.options), "seconds": float(f"{ran[0]:.6g}"), "oldest": ran[1]})
    fastest = min(mode["seconds"] for mode in modes)
    chosen = next(mode for mode in modes if mode["seconds"] <= fastest * (1 + MARGIN))
    chips = {"source": job.replica.cost.source, "digest": job.replica.cost.digest, "replicas": config.replicas}
    return {"chosen": chosen["options"], "modes": modes, "left_out": left_out, "chips": chips}


def seconds(config: Config, job: TrialInputs) -> tuple[Config, float]:
    """Returns the config with a definite mode, and the predicted seconds of an optimizer step.

    Raises:
      ValueError: `auto` has no mode to choose, or options of the config contradict each other.
    """
    if config.scheduler.name == "auto":
        why = choose(config, job)
        (found,) = (mode["seconds"] for mode in why["modes"] if mode["options"] == why["chosen"])
        return concrete(config, why["chosen"]), found
    over = config.scheduler.over if config.scheduler.name in ("tail_batching", "rollpacker") else 0.0
    period = math.ceil(1 / (over - 1)) + 1 if over > 1 else 1
    part, small = _part(config, job)
    return config, _tried(part(config), small, Candidate(options={}, config=config, period=period))[0]


def candidates(config: Config) -> tuple[list[Candidate], dict[str, str]]:
    """Returns the candidates, the simplest first, and the reasons why other modes are none."""
    most, found, left_out = config.scheduler.max_staleness, [], {}
    kept = most > 0 and config.scheduler.updates == 1 and not config.scheduler.filter_groups
    offered: list[tuple[dict, int]] = [({"name": "sync"}, 1)]
    for over in OVERS:
        waits = math.ceil(1 / (over - 1))
        old = waits + (config.mesh.engine > 0)  # optimizer steps that pass over a deferred token
        mode = "recompute" if kept and old <= most else "verify"
        offered.append(({"name": "tail_batching", "over": over, "prefix_mode": mode}, waits + 1))
    if most > 0:
        offered.append(({"name": "pipeline", "ahead": _ahead(config)}, 1))
    else:
        left_out["pipeline"] = "scheduler.max_staleness=0 allows no token of older weights"
    for options, period in offered:
        try:
            found.append(Candidate(options=options, config=concrete(config, options), period=period))
        except ValueError as refusal:
            left_out[named(options)] = str(refusal)
    if not found:
        raise ValueError(f"scheduler.name='auto' has no mode to choose: {'; '.join(left_out.values())}")
    return found, left_out


def _ahead(config: Config) -> int:
    """Returns the rollouts that wait for a slot in a pipeline, if the config does not say.

    A dispatch ends early once `refill_slots` are free and requests wait. Twice as many groups wait as that frees.
    """
    group = config.scheduler.group_size
    return config.scheduler.ahead or 2 * math.ceil(config.engine.refill_slots / group) * group


def concrete(config: Config, options: Mapping[str, object]) -> Config:
    """Returns the config with a mode. Options that only pipelines read get their defaults in other modes.

    Raises:
      ValueError: other options of the config contradict the mode.
    """
    sections: dict[str, dict] = {"scheduler": {"auto_history": "", **options}, "engine": {}}
    if options["name"] != "pipeline":
        plain = {"scheduler": SchedulerConfig(), "engine": EngineConfig()}
        for section, names in _RESET.items():
            sections[section] |= {name: getattr(plain[section], name) for name in names}
    return replace(
        config, **{section: replace(getattr(config, section), **changes) for section, changes in sections.items()}
    )


def named(options: Mapping[str, object]) -> str:
    """Returns a mode in words: its name, then its options as the command line has them."""
    name, *more = options.items()
    return " ".join([str(name[1]), *(f"{key}={value}" for key, value in more)])


# ---- The simulation


def job(config: Config, start: Inputs, lengths: observed.Observed) -> TrialInputs:
    """Returns what the simulator needs of a run.

    Raises:
      ValueError: the kind of device has no step costs, and the config names no table.
    """
    replica = build.replica(config, start.model, start.cost)
    token_s, step_s = build.training_s(config, replica, start.cost)
    cost = trial.InSizes(cost=replica.cost, sizes=config.engine.row_sizes)
    tokens = [start.train.at(place)[1].tokens.size for place in range(min(len(start.train), 1024))]
    return TrialInputs(
        lengths=lengths.lengths,
        prompts=len(start.train),
        prompt_tokens=max(round(sum(tokens) / len(tokens)), 1),
        replica=replace(replica, cost=cost),
        token_s=token_s,
        step_s=step_s,
        drift=DRIFT,
    )


def _tried(config: Config, job: TrialInputs, one: Candidate) -> tuple[float, int]:
    """Returns predicted seconds of an optimizer step of the whole run, and the age of the oldest trained token.

    A run longer than the simulation goes on at the pace of its steady rounds. A pipeline is steady once its slots hold
    rollouts of all ages, and until no more are begun. Other modes repeat themselves from the start.
    """
    s, per_round = config.scheduler, config.scheduler.prompts * config.scheduler.group_size
    flying = math.ceil(config.replicas * job.replica.slots / per_round)
    edge = min(s.max_staleness, flying) + 2 if s.name == "pipeline" else 0
    steady = math.ceil(max(ROLLOUTS / per_round, 4) / one.period) * one.period
    wanted = one.config.rounds
    rounds = min(steady + 2 * edge, wanted)
    found = trial.run(config, job, rounds)
    ends, before, after = found.ends, edge * s.updates, (rounds - edge) * s.updates
    seconds = ends[-1]
    if rounds < wanted:
        began = ends[before - 1] if before else 0.0
        seconds += (wanted - rounds) * s.updates * (ends[after - 1] - began) / (after - before)
    return seconds / (wanted * s.updates), found.oldest


@dataclass(frozen=True, kw_only=True)
class _Whole:
    """The Cost of a replica of which only one rollout in `times` is simulated."""

    cost: Cost
    times: int

    @property
    def prefill_s(self) -> float:
        return self.cost.prefill_s * self.times

    def __call__(self, rows: np.ndarray, context: np.ndarray) -> np.ndarray:
        return self.cost(np.asarray(rows) * self.times, np.asarray(context) * self.times)


def _part(config: Config, job: TrialInputs) -> tuple[Callable[[Config], Config], TrialInputs]:
    """Returns how a config is cut to at most LARGEST rollouts a round, and the job of that part.

    Slots and KV cache of each replica are cut alike, and a simulated rollout costs as many times more.
    """
    s = config.scheduler
    ways = [
        n
        for n in range(1, s.prompts + 1)
        if s.prompts % n == 0 and (s.prompts // n) % s.mini_batches == 0 and job.replica.slots % n == 0
    ]
    enough = [n for n in ways if s.prompts * s.group_size <= LARGEST * n]
    times = min(enough) if enough else max(ways)
    if times == 1:
        return lambda given: given, job
    replica = replace(
        job.replica,
        slots=job.replica.slots // times,
        kv_tokens=max(job.replica.kv_tokens // times, config.engine.max_length),
        cost=_Whole(cost=job.replica.cost, times=times),
    )

    def cut(given: Config) -> Config:
        own = given.scheduler
        return replace(
            given,
            scheduler=replace(
                own,
                prompts=own.prompts // times,
                stream=math.ceil(own.stream / times),
                **{name: math.ceil(getattr(own, name) / times) for name in ("ahead", "max_unscored", "max_ready")},
            ),
        )

    return cut, replace(job, replica=replica, token_s=job.token_s * times)


# ---- What is stored


def _stored(folder: Path) -> dict | None:
    """Returns options and reasons of the mode that the folder's run has, or None where it has none yet.

    config.json says it. Where that is gone, the newest checkpoint does.

    Raises:
      ValueError: neither can be read.
    """
    files = [folder / "config.json", *sorted(folder.glob("checkpoints/step_*/about.json"), reverse=True)]
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        return None
    try:
        stored = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"--resume: {file} cannot be read, which has the run's mode: {error}") from error
    inner = stored.get("config", stored) if isinstance(stored, dict) else {}
    scheduler = inner.get("scheduler", {})
    if not isinstance(scheduler, dict) or "name" not in scheduler:
        raise ValueError(f"--resume: {file} does not say which scheduler the run has")
    own = {"tail_batching": ("over", "prefix_mode"), "pipeline": ("ahead",)}.get(scheduler["name"], ())
    options = {name: scheduler[name] for name in ("name", *own)}
    return {"options": options, "auto": stored.get("derived", stored).get("auto")}


# ---- As text


def text(why: Mapping) -> str:
    """Returns the table of predicted seconds and a line with the choice."""
    lengths, chips, first = why["lengths"], why["chips"], why["modes"][0]["seconds"]
    rows = [("mode", "seconds", "of the first", "oldest token")]
    for mode in why["modes"]:
        seconds = mode["seconds"]
        rows.append((named(mode["options"]), f"{seconds:.4g}", f"{seconds / first:.2f}", f"{mode['oldest']} steps"))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    (seconds,) = (mode["seconds"] for mode in why["modes"] if mode["options"] == why["chosen"])
    return "\n".join(
        [
            "scheduler.name=auto: predicted seconds of an optimizer step, by simulation",
            f"  lengths of {lengths['rollouts']} rollouts ({lengths['source']}): mean {lengths['mean']:g}, median "
            f"{lengths['median']:g}, 90 % within {lengths['p90']:g}, longest {lengths['longest']} tokens",
            f"  chips: {chips['replicas']} replicas, step costs {chips['source']} ({chips['digest']})",
            *(f"  {line}" for line in table),
            *(f"  not a choice: {name}: {reason}" for name, reason in why["left_out"].items()),
            f"  chosen: {named(why['chosen'])}, {first / seconds:.2f} times as fast as {named(why['modes'][0]['options'])}",
        ]
    )
