"""The kinds of runtime that the notebook knows, and the settings of each: what is generated and trained at once.

The recipe is the same on all of them: 64 prompts of 8 rollouts for an optimizer step. An accelerator generates all of them at
once, in float32 as a CPU does. Its settings are planned from shapes, and no such device has run them yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

CONFIG = "configs/demo.py"
_RECIPE = {"checkpoint__every": 0, "trace_rounds": 3, "engine__page_size": 16, "engine__max_length": 116}
# Why float32: the recipe was measured so. The policy is too small for the kernels in any case.
_ACCELERATOR = {
    "model__compute_dtype": "float32",
    "engine__dtype": "float32",
    "engine__slots": 512,
    "engine__row_sizes": (512, 1024),
}


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """name: as Colab's menu has it. options: those of a run beside CONFIG. ran: whether such a device has run them."""

    name: str
    options: Mapping[str, Any]
    ran: bool = False

    @property
    def engine(self) -> dict[str, Any]:
        """The options of the engine alone, for a policy that is loaded without a run."""
        return {name: value for name, value in self.options.items() if name.startswith("engine__")}


RUNTIMES = {
    "cpu": Runtime(
        name="CPU",
        options={**_RECIPE, "engine__slots": 64, "engine__row_sizes": (64, 128), "batch__rows": 16},
        ran=True,
    ),
    "gpu": Runtime(name="T4 or L4 GPU", options={**_RECIPE, **_ACCELERATOR, "batch__rows": 32}),
    "tpu": Runtime(name="TPU v5e-1", options={**_RECIPE, **_ACCELERATOR, "batch__rows": 64}),
}


def of(platform: str) -> Runtime:
    """Returns the runtime of a platform, as jax names it.

    Raises:
      ValueError: there are no settings for it.
    """
    if platform not in RUNTIMES:
        raise ValueError(f"notebook: there are no settings for {platform!r}; known are {', '.join(RUNTIMES)}")
    return RUNTIMES[platform]


def found() -> Runtime:
    """Says which device jax found, and returns the settings for it."""
    import jax

    devices = jax.devices()
    runtime = of(devices[0].platform)
    print(f"jax found {len(devices)} x {devices[0].device_kind}. Settings: {runtime.name}.")
    for name, value in sorted(runtime.options.items()):
        print(f"  {name.replace('__', '.')} = {value}")
    if not runtime.ran:
        print("No device of this kind has run these settings yet. Please report what you see.")
    return runtime
