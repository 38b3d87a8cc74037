"""What is known of a run before it begins, as text: options, batch arithmetic, memory, the weight sync. Nothing is written."""

from __future__ import annotations

import json
import os

from jaxrl_post import config as configs
from jaxrl_post.config import reference
from jaxrl_post.launch import branch as branches
from jaxrl_post.launch import compile_guard, device_check
from jaxrl_post.launch.parts import build as parts
from jaxrl_post.launch.parts import graders, inputs
from jaxrl_post.launch.plan import activations, memory_plan, mode_choice
from jaxrl_post.parallel.processes import say
from jaxrl_post.rewards import math_algebra
from jaxrl_post.telemetry import loggers


def planned(config: configs.Config, start: inputs.Inputs) -> tuple[list[str], list[str]]:
    """Returns two lists of texts: what a user must know of data and devices, and the plan.

    The plan has batch arithmetic, memory per device, the weight sync and what graders compare with.

    Raises:
      ValueError: the run cannot fit the devices that are there, or records of its tokens this host.
    """
    words = memory_plan.route_words(config, start.model)
    memory_plan.check_records(config, words, memory_plan.of_host())
    numbers = memory_plan.arithmetic(config, len(start.train), start.longest_prompt, words)
    held = memory_plan.by_device(config, parts.memory(config, start))
    remarks = [*start.notes, *device_check.lines(config, start.model, held)]
    if config.engine.uncorrected and not config.same_formats:
        remarks.append("engine: rollouts of 8 bits are trained on without correction (engine.uncorrected=True)")
    return remarks, [
        memory_plan.text("Batch", numbers),
        *(memory_plan.text(f"Memory per {one}", memory_plan.table(own), "B") for one, own in held.items()),
        memory_plan.text(
            "Kept for the backward pass per device, by model.remat_policy",
            activations.kept(config, start.model, config.mesh.shards),
            "B",
        ),
        f"Weights reach the engine: {memory_plan.swap_case(config)}",
        *(f"{path} compares by {by}" for path, by in math_algebra.graders(config.graders).items()),
    ]


def announce(config: configs.Config, start: inputs.Inputs, chosen: str) -> None:
    """Says what a run will be, once per job. A quiet run says only what its user must know.

    `chosen`: how the mode was chosen, or an empty text.
    """
    remarks, plan = planned(config, start)
    if shown := remarks if config.logger.quiet else [*filter(None, [chosen]), *remarks, *plan]:
        say("\n".join(shown))


def show(config: configs.Config, branch: str, *, every_option: bool) -> None:
    """Prints the options and the plan of a run (--dry-run).

    `every_option`: all options as JSON, and not only those that differ from their defaults."""
    loggers.check(config.logger)
    start = inputs.gather(config)
    config, _, chosen = mode_choice.settled(config, start, "")
    print(json.dumps(configs.to_dict(config), indent=2) if every_option else reference.changed(config))
    print(chosen, end="\n" if chosen else "")
    if branch:
        branches.opened(branch, config, start)
    graders.checked(config, start)
    remarks, plan = planned(config, start)
    print("\n".join([*remarks, *plan]), flush=True)
    compile_guard.use_cache(os.environ)
    print(parts.foreseen(config, start))
