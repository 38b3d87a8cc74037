"""The engine of a run, and its evaluator, by `engine.name`."""

from __future__ import annotations

from typing import Any

from jaxrl_post.engine.demonstrations import Demonstrations
from jaxrl_post.engine.elastic import Elastic
from jaxrl_post.engine.preferences import Preferences
from jaxrl_post.engine.row_engine import RowEngine
from jaxrl_post.launch import build as parts
from jaxrl_post.parallel.processes import say


def rows_for_all(config, start, devices, learner, history) -> tuple[Any, RowEngine | Elastic | None]:
    """Builds one row engine that generates and evaluates."""
    engine = parts.engine(config, start, devices, learner, history, say)
    return engine, engine if start.held_out else None


def data_for_training(config, start, devices, learner, history) -> tuple[Any, RowEngine | None]:
    """Builds an engine that takes training rollouts from the data, and a row engine for evaluation, if there is any."""
    engine = Demonstrations(
        start.write, trained=start.trained, slots=config.engine.slots, replicas=config.replicas, version=learner.step
    )
    return engine, parts.engine(config, start, devices, learner, history, say) if start.held_out else None


def pairs_for_training(config, start, devices, learner, history) -> tuple[Any, RowEngine | None]:
    """Builds an engine that takes pairs of preferences from the data, and a row engine for evaluation, if there is any."""
    engine = Preferences(start.pairs, slots=config.engine.slots, replicas=config.replicas, version=learner.step)
    return engine, parts.engine(config, start, devices, learner, history, say) if start.held_out else None


ENGINES = {"rows": rows_for_all, "demonstrations": data_for_training, "preferences": pairs_for_training}
