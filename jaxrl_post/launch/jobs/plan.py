"""From a request to rendered files: every check that needs no cluster, in the order from cheap to dear.

The plan says what the job will take: hours, money, chips against a quota, and the seconds that a stopped job needs to save.
Nothing of that is measured. Seconds of a step are predicted (launch/plan/slice_plan.py), and every line says that.

Invariant: the config is resolved as the run will resolve it, with the variables that its processes get, so what is
checked here is what runs there. Nothing is written and nothing is called.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import jax

from jaxrl_post import config as configs
from jaxrl_post.config import Config, fields
from jaxrl_post.config.address import is_bucket
from jaxrl_post.launch import command_line
from jaxrl_post.launch.jobs import gke, local, roles, slurm, tpu_vm
from jaxrl_post.launch.jobs import request as requests
from jaxrl_post.launch.jobs.request import SHARED, Rendered, Request
from jaxrl_post.launch.parts import inputs
from jaxrl_post.launch.plan import activations, memory_plan, roofline, slice_plan
from jaxrl_post.launch.plan.chips import Slice
from jaxrl_post.models import decoder

LOCAL = "local"
TARGETS: dict[str, Callable[[Request], Rendered]] = {
    "gke-tpu": gke.tpu,
    "gke-gpu": gke.gpu,
    "tpu-vm": tpu_vm.render,
    "slurm": slurm.render,
}
NAMES = (*TARGETS, LOCAL)
CONTAINERS = ("gke-tpu", "gke-gpu", "tpu-vm")  # whose processes have the files of the image and of shared disks alone
WRITTEN = 2e8  # bytes a second that a host writes to a bucket or a shared disk: an assumption
MARGIN_S, LEAST_S, MOST_S = 30, 60, 3600  # of the grace period; no cluster grants more than an hour
ASK_S = 10  # the grace period is a multiple of it


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What the user knows and no file says: dollars of a chip-hour, chips of the quota, and measured seconds of a save.

    `length`: the mean length of a rollout in tokens. 0: that of lengths seen before, or of the prior."""

    price: float = 0.0
    quota: int = 0
    save_s: float | None = None
    length: float = 0.0


def prepare(request: Request, terms: Terms, say: Callable[[str], object]) -> Rendered:
    """Checks a request, says its plan, and renders it.

    Raises:
      ValueError: the first thing that does not fit, in one sentence.
    """
    requests.check(request)
    command_line.parse(request.words[3:])  # what the run itself would refuse
    platform = "cpu" if request.where is None else request.where.chip.platform
    with _with(request.environment):  # as a process of the job resolves it
        config = configs.resolve(configs.load(request.config), request.overrides, platform=platform)
    model = inputs.shape(config)
    _check_run(request, config)
    if request.target == LOCAL:
        rendered = _local(request, config, model, say)
    else:
        check_quota(request.where, terms.quota)
        TARGETS[request.target](request)  # what a target refuses, before a compiler plans the memory for minutes
        found = _planned(request, config, model, terms, say)
        rendered = TARGETS[request.target](dataclasses.replace(request, grace_s=found.grace_s))
    requests.refuse_secrets(rendered, os.environ)
    return rendered


@contextlib.contextmanager
def _with(environment: Mapping[str, str]) -> Iterator[None]:
    """Sets variables for a while, because a config file may read them."""
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _check_run(request: Request, config: Config) -> None:
    """Refuses a run that cannot start again, lacks a secret, or reads files that its hosts do not have."""
    if not config.checkpoint.every:
        raise ValueError(
            "checkpoint.every=0 saves nothing, so a job that is stopped begins again; write --config.checkpoint.every=10"
        )
    if request.target not in CONTAINERS:
        return
    if request.target == "tpu-vm":
        tpu_vm.check_disks(request)
    if config.logger.wandb == "online" and "WANDB_API_KEY" not in request.secrets:
        raise ValueError(
            "logger.wandb=online needs a key on every host: write --secret=WANDB_API_KEY=PLACE, or "
            "--config.logger.wandb=offline"
        )
    for name, path in _read(config):
        if is_bucket(path) or path.startswith(f"{SHARED}/") or not os.path.isabs(path):
            continue
        if not Path(path).resolve().is_relative_to(Path.cwd()):
            raise ValueError(
                f"{name}={path[:200]} lies on this machine alone: write --config.{name}={SHARED}/{Path(path).name}, or the "
                "variable that the config reads, by --env=NAME=VALUE"
            )
    on_vms = request.target == "tpu-vm"
    if request.share if on_vms else request.claim:
        return
    flag = "--share=SERVER:/EXPORT, a network file system" if on_vms else "--claim=CLAIM, a PersistentVolumeClaim"
    for name, path in _read(config):
        if path.startswith(f"{SHARED}/"):
            raise ValueError(
                f"{name}={path[:200]} lies on a disk that no {'host' if on_vms else 'pod'} has: write {flag} with these files, "
                f"which is mounted at {SHARED}"
            )


def _read(config: Config) -> Iterator[tuple[str, str]]:
    """Yields (option, path) of what the run reads. A task's name or a function of a package is a path of no file."""
    values = configs.to_dict(config)
    for option in fields.options(Config):
        section, _, name = option.name.rpartition(".")
        given = (values[section] if section else values)[name]
        if option.about.path and not option.about.written:
            yield from ((option.name, one) for one in ([given] if isinstance(given, str) else given))


def _planned(
    request: Request, config: Config, model: decoder.ModelConfig, terms: Terms, say: Callable[[str], object]
) -> Forecast:
    """Says memory, seconds, roles and cost, and returns the forecast."""
    where = request.where
    slice_plan.check_devices(config, where)
    slice_plan.plan(config, model, where)  # whether the mesh divides the model
    hosts = roles.of(config, model, roles.planned(where))
    near = ("ICI", "DCN") if where.chip.grids else ("NVLink", "network")
    say(roles.table(hosts, *near))
    step = slice_plan.predicted(config, model, where, say, terms.length)
    # Rollouts may grow: a slow step has rollouts of half the longest on average, whatever was seen.
    slow_s = roofline.seconds(config, model, where, config.engine.max_length - config.sampling.max_tokens)["all"]
    uploads = is_bucket(request.run_dir)
    found = forecast(config, model, step.step_s, where.hosts, terms.save_s, slow_s=slow_s, uploads=uploads)
    for line in forecast_lines(found, where, terms.price):
        say(line)
    return found


def _local(request: Request, config: Config, model: decoder.ModelConfig, say: Callable[[str], object]) -> Rendered:
    """Says the roles of the processes and renders the job. No device of this machine is asked for."""
    request = dataclasses.replace(request, grace_s=LEAST_S)
    rendered = local.render(request, config.devices)
    memory_plan.memory(config, model)  # whether the mesh divides the model
    jax.config.update("jax_platforms", "cpu")
    devices = roles.planned_here(request.processes, config.devices)
    say(roles.table(roles.of(config, model, devices), "memory of a process", "processes"))
    return rendered


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Predicted seconds of an optimizer step and of a save, and how many there are.

    `measured`: the save's were given. `upload_s`: of a save's upload to a bucket, which holds up the end of a run alone."""

    step_s: float
    steps: int
    save_s: float
    saves: int
    between_s: float
    measured: bool
    upload_s: float = 0.0

    @property
    def hours(self) -> float:
        return (self.steps * self.step_s + self.saves * self.save_s) / 3600

    @property
    def grace_s(self) -> int:
        """Returns seconds for the work until the next publish, a save there, its upload, and a margin.

        A process learns them by JAXRL_GRACE_S, and has all but MARGIN_S of launch/stop_signal.py for its end.
        """
        wanted = self.between_s + self.save_s + self.upload_s + MARGIN_S
        return min(max(ASK_S * math.ceil(wanted / ASK_S), LEAST_S), MOST_S)


def forecast(
    config: Config,
    model: decoder.ModelConfig,
    step_s: float,
    hosts: int,
    save_s: float | None = None,
    slow_s: float = 0.0,
    uploads: bool = False,
) -> Forecast:
    """Returns the forecast of a run.

    Args:
      step_s: predicted seconds of an optimizer step.
      hosts: that write a save together.
      save_s: measured seconds of a save (`timing_s/save_checkpoint` of metrics.jsonl); None: predict.
      slow_s: seconds of a slow step, for which the grace period has room.
      uploads: whether the run lies in a bucket.
    """
    moments = activations.SIZES[config.optimizer.moments_dtype]
    size = roofline.parameters(model) * (4 + 2 * moments)
    every, written_s = config.checkpoint.every, size / hosts / WRITTEN
    return Forecast(
        step_s=step_s,
        steps=config.steps,
        save_s=written_s if save_s is None else save_s,
        saves=math.ceil(config.steps / every) if every else 0,
        between_s=max(step_s, slow_s) * config.scheduler.updates,
        measured=save_s is not None,
        upload_s=written_s if uploads else 0.0,
    )


def forecast_lines(found: Forecast, where: Slice, price: float) -> list[str]:
    """Returns the forecast as text. `price`: of a chip for an hour, 0 where it was not given."""
    save = "measured" if found.measured else f"predicted at {WRITTEN / 1e6:g} MB/s a host"
    out = [
        f"{found.steps} steps of {found.step_s:.1f} s and {found.saves} saves of {found.save_s:.0f} s ({save}): "
        f"{found.hours:.1f} hours, predicted, not measured",
        f"{where.chips} chips x {found.hours:.1f} hours = {where.chips * found.hours:,.1f} chip-hours",
        f"Grace period after a signal: {found.grace_s} s"
        + (f", of which an upload may take {found.upload_s:.0f} s" if found.upload_s else ""),
    ]
    if price:
        out[1] += f" x ${price:g} = ${where.chips * found.hours * price:,.2f}"
    return out


def check_quota(where: Slice, quota: int) -> None:
    """Refuses more chips than there is quota for. 0: no quota was given.

    Raises:
      ValueError: with both numbers.
    """
    if quota and where.chips > quota:
        raise ValueError(
            f"--quota={quota}: {where.name} has {where.chips} chips, {where.chips - quota} more than the quota; take a "
            "smaller slice, or ask for more quota"
        )
