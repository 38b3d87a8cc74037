"""What a run says of the devices that it found, before anything is compiled: their kind, their units, their memory.

Invariant: an unknown kind is one line and never a refusal. What is refused cannot run: bytes that the plan counts exactly
and that the runtime does not grant, or a GPU that the installed compiler has given up.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jaxrl_post.config import Config
from jaxrl_post.launch.parts import build
from jaxrl_post.launch.plan import chips, memory_plan, slice_plan
from jaxrl_post.launch.plan.chips import Slice
from jaxrl_post.launch.plan.memory_plan import Item, Kind
from jaxrl_post.launch.plan.slice_plan import Plan
from jaxrl_post.models import decoder
from jaxrl_post.parallel import devices

FIRST_OF_CUDA_13 = (7, 5)  # compute capability: CUDA 13 compiles for no older one
_HOSTS = (memory_plan.HOST, memory_plan.JUDGE_HOST)


def lines(config: Config, model: decoder.ModelConfig, held: Mapping[str, Sequence[Item]]) -> list[str]:
    """Returns what a user must know of the devices that jax sees. On a CPU that is nothing.

    Args:
      held: what each sort of device holds, by the plan.

    Raises:
      ValueError: the run cannot fit, with the nearest setting that does, or no program can be compiled for these devices.
    """
    own = jax.local_devices()[0]
    where = chips.found(jax.devices()[: config.devices], own)
    if where.chip.platform == "cpu":
        return []
    _check_compiler(own)
    build.check_formats(config, where.chip)
    out = [devices.estimated(where.chip, own.device_kind)]
    if not where.chip.bfloat16 and "bfloat16" in (config.engine.dtype, config.model.compute_dtype):
        out.append(f"devices: {own.device_kind} has no units for bfloat16, whose products take as long as float32's")
    return [*filter(None, out), *_memory(config, model, held, where, own)]


def _memory(
    config: Config, model: decoder.ModelConfig, held: Mapping[str, Sequence[Item]], where: Slice, own: Any
) -> list[str]:
    """Refuses what cannot fit, and says what may not fit because activations are an estimate."""
    if not (own.memory_stats() or {}).get("bytes_limit"):
        return []
    here = {name: tuple(items) for name, items in held.items() if name not in _HOSTS}
    found = Plan(where=where, held=here, compiled=False)
    sure = {name: tuple(one for one in items if one.kind is not Kind.ACTIVATIONS) for name, items in here.items()}
    if Plan(where=where, held=sure, compiled=False).word == "does not fit":
        more = "; XLA_PYTHON_CLIENT_MEM_FRACTION=0.95 lets jax take more than 75 %" if own.platform != "tpu" else ""
        raise ValueError(slice_plan.refusal(config, model, found) + more)
    if found.word == "does not fit":
        return [f"memory: {slice_plan.refusal(config, model, found)}; activations are an estimate, so it is tried"]
    return []


def _check_compiler(own: Any) -> None:
    """Refuses an NVIDIA GPU that is older than what the CUDA of this installation compiles for.

    Raises:
      ValueError: with what to install instead.
    """
    capability = re.fullmatch(r"(\d+)\.(\d+)", str(getattr(own, "compute_capability", "")))
    cuda = re.search(r"cuda (\d+)", str(own.client.platform_version), re.IGNORECASE)
    if capability is None or cuda is None or int(cuda[1]) < 13000:
        return
    if (int(capability[1]), int(capability[2])) < FIRST_OF_CUDA_13:
        raise ValueError(
            f"{own.device_kind} has compute capability {capability[0]}, and CUDA 13 compiles for 7.5 and later: install "
            'CUDA 12 in its place, by pip install "jax[cuda12]"'
        )
