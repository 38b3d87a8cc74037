"""What a launch was asked for, and what it becomes: files and the calls that start it.

Invariant: a request holds no secret, only the names of places where secrets lie. The command of every target is `words`.
"""

from __future__ import annotations

import functools
import math
import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jinja2
import yaml

from jaxrl_post.config.address import is_bucket, parse
from jaxrl_post.launch.plan.chips import Slice
from jaxrl_post.ring.json_text import shown

SHARED = "/mnt"  # where a disk that all hosts share is mounted, in every container
_NAME = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")  # a label of DNS, with room for the numbers behind it
_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]*")
_SECRET = re.compile(r"(^|_)(KEY|TOKEN|SECRET|PASSWORD|CREDENTIALS?)(_|$)")
_LEAST_SECRET = 8  # characters; a shorter value may be anything


@dataclass(frozen=True, kw_only=True)
class Request:
    """A job and the places that it needs.

    - config, overrides: as the run's command line has them; a relative path is one in the working directory
    - where: all devices; None: those of this machine
    - processes: of the job, one a host
    - grace_s: seconds between a signal and a kill
    - restarts: at most so many after exit code 42
    - environment: variables of every process
    - secrets: variable to the place of its value, in the form of the target
    - spot: capacity that may be taken away
    - wait_s: seconds to wait for a slice
    - port: of process 0 of a local job
    - share: SERVER:/EXPORT of a network file system that TPU VMs mount at /mnt
    """

    target: str
    config: str
    overrides: tuple[str, ...]
    where: Slice | None
    processes: int
    name: str
    run_dir: str
    restarts: int
    grace_s: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict)
    image: str = ""
    namespace: str = "default"
    queue: str = ""
    service_account: str = ""
    claim: str = ""
    project: str = ""
    zone: str = ""
    partition: str = ""
    account: str = ""
    hours: float = 0.0
    wait_s: int = 0
    port: int = 12400
    spot: bool = False
    share: str = ""

    @property
    def words(self) -> tuple[str, ...]:
        """Returns the command of one process. It begins the run, or continues it."""
        overrides = (f"--config.{one}" for one in self.overrides)
        run = (f"--config={self.config}", *overrides, f"--run-dir={self.run_dir}", "--resume")
        return "python", "-m", "jaxrl_post.main", *run

    @property
    def variables(self) -> Mapping[str, str]:
        """Returns the variables of every process, without secrets and without those that differ between processes."""
        own = {"JAXRL_GRACE_S": str(self.grace_s)}
        if self.where is not None and self.where.chip.platform == "gpu":
            own["XLA_PYTHON_CLIENT_MEM_FRACTION"] = "0.95"
        return own | dict(self.environment)


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """Files of a job by name, and the commands that start it. A command names a file as `{folder}/NAME`."""

    files: Mapping[str, str]
    calls: tuple[tuple[str, ...], ...]


def from_template(name: str, request: Request, **values: Any) -> str:
    """Returns the file that templates/NAME.j2 makes of the request, which it calls `job`, and of further values.

    Filters: `quote` and `join_quoted` write words of a shell, `quoted` writes a string or a list of strings of YAML.
    """
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("jaxrl_post.launch.jobs"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    of_yaml = functools.partial(yaml.safe_dump, default_style='"', default_flow_style=True, width=math.inf)
    environment.filters |= {"quote": shlex.quote, "join_quoted": shlex.join, "quoted": of_yaml}
    return environment.get_template(f"{name}.j2").render(job=request, shared=SHARED, **values)


def check(request: Request) -> None:
    """Refuses names that no target takes.

    Raises:
      ValueError: one sentence with flag, value and a valid choice.
    """
    if not _NAME.fullmatch(request.name):
        near = re.sub(r"[^a-z0-9]+", "-", request.name.lower()).strip("-0123456789")[:40].strip("-") or "run"
        raise ValueError(
            f"--name={shown(request.name, 60)} must be at most 40 of a-z, 0-9 and -, and begin with a letter; the nearest "
            f"valid name is {near}"
        )
    if is_bucket(request.run_dir):
        parse(request.run_dir, "--run-dir")
    for name in (*request.environment, *request.secrets):
        if not _VARIABLE.fullmatch(name):
            raise ValueError(
                f"--env and --secret: {shown(name, 60)} is no name of a variable; write for example HF_TOKEN"
            )
    for name in request.environment:
        if _SECRET.search(name):
            raise ValueError(
                f"--env={name}=...: a variable of this name holds a secret, which no file of a job may; write "
                f"--secret={name}=PLACE"
            )
    twice = sorted(set(request.environment) & set(request.secrets))
    if twice:
        raise ValueError(f"--env and --secret both set {twice[0]}: leave one of them out")


def check_run_dir(request: Request, shared: str) -> None:
    """Refuses a run folder that not all hosts see. `shared`: what mounts a disk below /mnt, as a hint.

    Raises:
      ValueError: the folder lies neither below /mnt nor in a bucket.
    """
    if is_bucket(request.run_dir) or request.run_dir.startswith(f"{SHARED}/"):
        return
    last = os.path.basename(request.run_dir.rstrip("/")) or request.name
    raise ValueError(
        f"--run-dir={shown(request.run_dir, 80)} is a folder of one host alone, and a lost host would lose it: write "
        f"--run-dir={SHARED}/{last} {shared}"
    )


def check_image(request: Request) -> None:
    """Raises ValueError where a target that runs containers has no image."""
    if not re.fullmatch(r"[\w.-]+(:\d+)?(/[\w.-]+)+(:[\w.-]+|@sha256:[0-9a-f]{64})", request.image):
        raise ValueError(
            f"--image={shown(request.image, 80)} must be REGISTRY/NAME:TAG; build one from docker/, for example "
            "--image=us-docker.pkg.dev/PROJECT/REPOSITORY/jaxrl-post:1"
        )


def refuse_secrets(rendered: Rendered, environment: Mapping[str, str]) -> None:
    """Refuses files that hold the value of a variable whose name says that it is secret.

    Args:
      environment: of this process, which may know such values.

    Raises:
      ValueError: with the file and the variable, never with the value.
    """
    for variable, value in environment.items():
        if not (_SECRET.search(variable) and len(value) >= _LEAST_SECRET):
            continue
        for file, text in rendered.files.items():
            if value in text:
                raise ValueError(
                    f"{file} would hold the value of {variable}, which is a secret: write --secret={variable}=PLACE"
                )
