"""The round policies by name."""

from __future__ import annotations

from jaxrl_post.scheduler.rollpacker import RollPacker
from jaxrl_post.scheduler.rounds import Sync
from jaxrl_post.scheduler.tail_batching import TailBatching

SCHEDULERS = {"sync": Sync, "tail_batching": TailBatching, "rollpacker": RollPacker}
