"""How the two parts that compile are made from a config: of weights for a run, of shapes for a plan.

Invariant: a plan's programs are a run's, because both are made here with the same arguments.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_post import mesh as meshes
from jaxrl_post.config import Config
from jaxrl_post.engine import programs, rows
from jaxrl_post.engine.drafter import DRAFTERS, Drafter
from jaxrl_post.engine.drafting import Drafting
from jaxrl_post.history import History
from jaxrl_post.launch import allocation, plan
from jaxrl_post.launch.inputs import Inputs
from jaxrl_post.models import decoder
from jaxrl_post.trainer.learner import Learner


def learner(config: Config, model: decoder.ModelConfig, params: Any, mesh: jax.sharding.Mesh) -> Learner:
    """The learner of these weights, which are the reference too where the run has one; of shapes, it only
    plans."""
    return Learner(
        model, params, mesh, algorithm=config.algorithm, optimizer=config.optimizer, batch=config.batch,
        temperature=config.sampling.temperature, steps=config.steps, max_tokens=config.sampling.max_tokens,
        reference=params if config.algorithm.needs_reference else None, remat=config.model.remat,
        compute_dtype=config.model.compute_dtype)


def engine_sizes(config: Config) -> dict[str, Any]:
    """What the row engine's programs are compiled for."""
    c = config.engine
    return dict(slots=c.slots, max_length=c.max_length, page_size=c.page_size, pages=config.pages,
                row_sizes=c.row_sizes, head_rows=config.head_rows, steps_per_dispatch=c.steps_per_dispatch,
                restricted=config.sampling.restricted, dtype=jnp.dtype(c.dtype))


def drafter(config: Config, model: decoder.ModelConfig) -> Drafter:
    """What guesses tokens ahead, if anything does."""
    c = config.speculation
    size = sum(-(-part // rows.UPLOAD) * rows.UPLOAD for part in (_shared(config), c.prompt_entries))
    return DRAFTERS[c.drafter](vocab=model.vocab_size, width=c.width, entries=size, live=c.live_entries)


def drafting(config: Config, model: decoder.ModelConfig, history: History) -> Drafting:
    """The host's side of it, reading that history."""
    return Drafting(drafter(config, model), replicas=config.replicas, slots=config.engine.slots, past=history.of,
                    shared=_shared(config), clones=config.speculation.clones)


def _shared(config: Config) -> int:
    return config.speculation.shared_entries if config.speculation.drafter == "ours" else 0


def memory(config: Config, start: Inputs) -> dict[str, int]:
    """Bytes on each device, by what they hold."""
    held = jax.eval_shape(lambda: drafter(config, start.model).empty(config.engine.slots))
    generates = config.engine.name == "rows" or bool(start.held_out)
    tables = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(held)) if generates else 0
    return plan.memory(config, start.model, tables)


def foreseen(config: Config, start: Inputs) -> str:
    """Memory of this process, from the run's programs compiled for shapes alone, as text."""
    if jax.device_count() < config.devices:
        return (f"Memory of the process: not known here: the run's {config.devices} devices are needed to compile its "
                f"programs, and here are {jax.device_count()}")
    mesh = meshes.make_mesh(config.mesh.data, config.mesh.fsdp, config.mesh.tensor)
    needed = learner(config, start.model, decoder.abstract(start.model), mesh).temporaries()
    if config.engine.name == "rows" or start.held_out:
        needed |= programs.temporaries(start.model, mesh, drafter=drafter(config, start.model), **engine_sizes(config))
    allocation.give_back()  # as a run does before its first round
    on_host = jax.devices()[0].platform == "cpu"
    needs = plan.process(config, memory(config, start), needed, plan.resident(), on_host)
    return plan.text(f"Memory of the process ({jax.devices()[0].device_kind}, {config.devices} devices)", needs, "B")
