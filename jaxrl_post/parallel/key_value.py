"""The key-value store of a job's coordinator: short texts that processes share before anything is compiled.

Needs joined processes (processes.start). jax has no public name for the store.
"""

from __future__ import annotations

from jax._src import distributed

_PREFIX = "jaxrl_post/"


def put(key: str, text: str) -> None:
    """Puts a text under a key that is used once."""
    distributed.global_state.client.key_value_set(_PREFIX + key, text)


def get(key: str, limit_s: float) -> str:
    """Returns the text that some process puts under the key.

    Raises:
      TimeoutError: none did within `limit_s` seconds.
    """
    try:
        return distributed.global_state.client.blocking_key_value_get(_PREFIX + key, int(limit_s * 1000))
    except RuntimeError as error:
        raise TimeoutError(f"{key}: not there after {limit_s:g} s") from error


def coordinator() -> str:
    """Returns the host where process 0 is reached."""
    return distributed.global_state.coordinator_address.rpartition(":")[0].strip("[]")
