"""What a run writes while it goes on: rows of metrics, config.json, and a trace. For the run's folder and for viewers."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from jaxrl_post import config as configs
from jaxrl_post.kernels import sampling
from jaxrl_post.launch import autotuning, compile_guard, resume
from jaxrl_post.launch import branch as branches
from jaxrl_post.launch.parts import build as parts
from jaxrl_post.launch.parts import inputs
from jaxrl_post.launch.plan import memory_plan
from jaxrl_post.rewards import math_algebra
from jaxrl_post.ring import written
from jaxrl_post.ring.timing import Stopwatch
from jaxrl_post.runs import metric_rows
from jaxrl_post.runs import run_folder as folder
from jaxrl_post.telemetry import loggers, metrics, mode_report
from jaxrl_post.telemetry.trace import RingTrace
from jaxrl_post.trainer.learner import Learner


def further_rows(config: configs.Config, place: Path, mine: Path, stack: contextlib.ExitStack) -> list:
    """Opens config.logger's writers of process 0, after the logs were cut to the restored step."""
    if jax.process_index() != 0:
        return []
    file = mine / "metrics.jsonl"
    writers = loggers.opened(
        config.logger, place, configs.to_dict(config), metric_rows.read(file) if file.is_file() else []
    )
    for writer in writers:
        stack.callback(writer.close)
    return writers


def rows(
    config: configs.Config,
    start: inputs.Inputs,
    evaluator: Any,
    about: Mapping,
    place: Path,
    mine: Path,
    stack: contextlib.ExitStack,
    parent: branches.Parent | None,
    more: list,
) -> metrics.Several:
    """Opens the metrics of this process. Process 0 also writes config.json and a line to the screen for each step.

    It hands every row to the program's callbacks, too.

    Args:
      about: what a checkpoint must agree with. How the mode was chosen and the programs' digests are written, too.
      more: what `further_rows` returned.
    """
    writers = [metric_rows.Jsonl(mine / "metrics.jsonl"), *more]
    if jax.process_index() == 0:
        told = {  # what tokens depend on beside the config
            "versions": resume.versions(),
            "device": jax.devices()[0].device_kind,
            "devices": jax.device_count(),
            "processes": jax.process_count(),
            "sampling_law": sampling.LAW,
            "swap": memory_plan.swap_case(config),
        }
        told |= parts.keys(evaluator) if evaluator is not None else {}
        told |= {"graders": math_algebra.graders(config.graders)}
        told |= {name: about[name] for name in ("auto", compile_guard.DIGESTS) if name in about}
        told |= (
            {autotuning.RESULTS: autotuning.digest(about[autotuning.RESULTS])} if autotuning.RESULTS in about else {}
        )
        told |= {"parent": parent.told()} if parent else {}
        folder.write_json(place / "config.json", configs.to_dict(config) | {"derived": told})
        columns = metrics.SUPERVISED if mode_report.supervised(config) else metrics.COLUMNS
        screen = metrics.console(config.steps, columns=columns, quiet=config.logger.quiet)
        writers += [screen, *map(metrics.Called, start.handed.callbacks)]
    writer = metrics.Several(*writers)
    stack.callback(writer.close)
    return writer


def drawn_traces(
    config: configs.Config, learner: Learner, watch: Stopwatch, mine: Path, stack: contextlib.ExitStack
) -> list[RingTrace]:
    """Opens the trace of the first `trace_rounds` rounds; none where that is 0."""
    if not config.trace_rounds:
        return []
    file = stack.enter_context(written.Log(mine / f"trace_{learner.step:06d}.json", "w"))
    trace = RingTrace(file.write, watch.now, slots=config.engine.slots, rounds=config.trace_rounds)
    watch.listeners.append(trace.phase)
    stack.callback(trace.close)
    return [trace]
