"""How long calls take on a device, and what it could do at most."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax

from jaxrl_post.parallel import devices
from jaxrl_post.parallel.devices import Device


def seconds(run: Callable, *arguments: Any, turns: int = 20) -> float:
    """Returns the seconds of one call: `turns` calls in a row, waited for once, after one call that compiles."""
    jax.block_until_ready(run(*arguments))
    begun = time.perf_counter()
    out = None
    for _ in range(turns):
        out = run(*arguments)  # a result is freed when the next one is there, so that two exist at most
    jax.block_until_ready(out)
    return (time.perf_counter() - begun) / turns


def chip(kind: str) -> Device | None:
    """Returns the published figures of a device by the name that jax has for it, or None for an unknown one."""
    found = devices.of(kind)
    return found if found.known and found.platform != "cpu" else None  # those of a CPU are rough


def share_of_peak(flops: float, took: float) -> float | None:
    """Returns FLOPs over what the chip's peak gives in `took` seconds, or None where no peak is known."""
    about = chip(jax.devices()[0].device_kind)
    return flops / took / about.flops if about else None


def memory() -> float:
    """Returns the bytes that arrays may take on the device."""
    told = jax.devices()[0].memory_stats()
    return float(told["bytes_limit"]) if told and "bytes_limit" in told else float("inf")
