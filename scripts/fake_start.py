"""Starts a run on devices that are not there: what a runtime would report, and the vendor's compiler behind it.

    python scripts/fake_start.py KIND SLICE ARGUMENTS...

KIND is what the runtime reports (`device_kind`). SLICE names the devices whose compiler works (launch/plan/chips.py), or is
"none" where there is no compiler. ARGUMENTS are those of a run, with --dry-run. Prints one JSON object: the exit code, what was
said, which programs of the engine were compiled, and the source of the step costs. FAKE_MEMORY holds the bytes that the runtime
grants, FAKE_CUDA the version of CUDA, and FAKE_CAPABILITY what a device without a compiler says of itself.

Invariant: everything between the command line and the compiled programs is the project's own. Only what jax says of devices is
replaced, in this process alone.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from jaxrl_post.launch.plan import chips, device_less  # noqa: E402

device_less.take_none()

import jax  # noqa: E402
from jax._src.pallas.triton import gpu_info  # noqa: E402


def there(kind: str, name: str) -> list[Any]:
    """Returns devices as jax would list them: the compiler's own, or descriptions of devices without a compiler."""
    if name != "none":
        where = chips.read(name)
        # Pallas asks the default device for its capability where it does not know a kind by name, and that is a CPU here.
        gpu_info._get_device_arch_name = lambda kind: where.chip.capability
        return list(device_less.mesh(where, (where.devices, 1, 1, 1), kind).devices.flat)
    return [described(kind, "gpu")]


def described(kind: str, platform: str, like: Any = None) -> Any:
    """Returns what a run asks of a device of this process: what the compiler says, but for what only a runtime knows."""
    granted = int(os.environ.get("FAKE_MEMORY", "0"))
    client = SimpleNamespace(
        platform_version=f"PJRT C API\ncuda {os.environ['FAKE_CUDA']}" if "FAKE_CUDA" in os.environ else ""
    )
    return SimpleNamespace(
        id=0,
        process_index=0,
        platform=platform,
        device_kind=kind,
        coords=getattr(like, "coords", (0, 0, 0)),
        core_on_chip=getattr(like, "core_on_chip", 0),
        compute_capability=getattr(like, "compute_capability", os.environ.get("FAKE_CAPABILITY", "unknown")),
        client=client,
        memory_stats=lambda: {"bytes_limit": granted, "bytes_in_use": 0} if granted else None,
    )


def replace_devices(kind: str, devices: Sequence[Any]) -> None:
    """Makes jax list these devices, and name their platform."""
    first = devices[0]
    own = described(kind, first.platform, first)
    jax.devices = lambda *_: list(devices)
    jax.local_devices = lambda *_, **__: [own]
    jax.device_count = lambda *_: len(devices)
    jax.default_backend = lambda: first.platform


def without_compiler() -> None:
    """Leaves out what only a compiler can say. The kernels are chosen all the same."""
    from jaxrl_post.launch.parts import build

    def chosen(config: Any, start: Any) -> str:
        layout, own = build.layouts(config)[0], SimpleNamespace(devices=SimpleNamespace(flat=jax.devices()))
        return "\n".join(build.references(start.model, own, layout, build.engine_sizes(config, layout)))

    build.foreseen = chosen


def main(arguments: Sequence[str]) -> int:
    kind, name, *rest = arguments
    from jaxrl_post import main as runs
    from jaxrl_post.engine import compiled, step_cost

    names: list[str] = []
    asked = compiled.Programs.temporaries

    def noted(programs: compiled.Programs) -> dict[str, int]:
        found = asked(programs)
        names.extend(found)
        return found

    compiled.Programs.temporaries = noted
    replace_devices(kind, there(kind, name))
    if name == "none":
        without_compiler()
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        code = runs.main(rest)
    cost = step_cost.analytic(jax.devices()[0].device_kind, 10**9, 2, (64,)).source
    told = {"code": code, "out": out.getvalue(), "errors": errors.getvalue(), "programs": names, "cost": cost}
    print(json.dumps(told))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
