"""What the host writes to the device between dispatches: texts of sequences, and pieces of a drafter's tables."""

from __future__ import annotations

from typing import Any

import jax
from jaxtyping import Array

from jaxrl_post.engine.host.wire import Entry
from jaxrl_post.engine.row_state import State
from jaxrl_post.engine.speculation.interface import Drafter
from jaxrl_post.kernels import attention


def insert(drafter: Drafter, state: State, entry: Entry) -> State:
    """Returns the state after texts entered slots and pages were copied. The drafter learns the texts."""
    cache = tuple(jax.vmap(attention.copy)(layer, entry.source, entry.target) for layer in state.cache)
    put = jax.vmap(lambda old, where, new: old.at[where].set(new, mode="drop"))
    learn = entry.argmax_tokens if entry.argmax_tokens.shape[-1] else entry.tokens
    memory = jax.vmap(drafter.enter)(
        state.memory, entry.slot, entry.row, entry.fresh, entry.seen, entry.tokens, learn, entry.num_tokens
    )
    return State(
        cache,
        put(state.tokens, entry.slot, entry.tokens),
        put(state.argmax_tokens, entry.slot, entry.argmax_tokens),
        memory,
    )


def upload(tables: Any, replica: Array, offset: Array, pieces: tuple) -> Any:
    """Writes one piece of each flat array into one replica's tables, at `offset`."""
    flat = [jax.lax.dynamic_update_slice(old, new[None], (replica, offset)) for old, new in zip(tables, pieces)]
    return tables._replace(**dict(zip(tables._fields, flat)))
