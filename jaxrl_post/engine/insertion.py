"""What is put on the device between dispatches: texts of rollouts in slots, and pieces of a drafter's tables."""

from __future__ import annotations

from typing import Any

import jax
from jaxtyping import Array

from jaxrl_post.engine.host.wire import Entry
from jaxrl_post.engine.row_program import State
from jaxrl_post.engine.speculation.registry import Drafter
from jaxrl_post.kernels import attention


def insert(drafter: Drafter, state: State, entry: Entry) -> State:
    """Puts texts into slots, copies pages, and shows the texts to the drafter."""
    cache = tuple(jax.vmap(attention.copy)(layer, entry.source, entry.target) for layer in state.cache)
    put = jax.vmap(lambda old, where, new: old.at[where].set(new, mode="drop"))
    learn = entry.favourites if entry.favourites.shape[-1] else entry.tokens
    memory = jax.vmap(drafter.enter)(
        state.memory, entry.slot, entry.row, entry.fresh, entry.seen, entry.tokens, learn, entry.known
    )
    return State(
        cache, put(state.tokens, entry.slot, entry.tokens), put(state.favourites, entry.slot, entry.favourites), memory
    )


def upload(tables: Any, replica: Array, offset: Array, pieces: tuple) -> Any:
    """Puts a piece of each flat array at its place in one replica's tables."""
    flat = [jax.lax.dynamic_update_slice(old, new[None], (replica, offset)) for old, new in zip(tables, pieces)]
    return tables._replace(**dict(zip(tables._fields, flat)))
