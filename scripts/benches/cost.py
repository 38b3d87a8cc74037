"""The step-cost table: seconds of one engine step at each row size, every row in use.

    python scripts/bench.py cost --json FILE --config=configs/demo.py [--config.engine.row_sizes=(64,96,128) ...]

The model, sizes and mesh are those of the config; name the file in engine.cost_table. Every size is measured on the same
requests, prompts long enough that each step has work for all of its rows, in turns so that a disturbance of the machine
falls on all sizes; a figure is the median over dispatches without an idle row. A row that the prompts' attention
makes dearer or cheaper than one of your own is not told apart.
"""

from __future__ import annotations

import statistics
import time

TURNS = 5


def bench(record) -> None:
    import jax.numpy as jnp

    from jaxrl_post import config as configs
    from jaxrl_post import mesh as meshes
    from jaxrl_post.engine.engine import RowEngine
    from jaxrl_post.launch import inputs
    from jaxrl_post.models import decoder
    path, overrides = _arguments(record.args)
    config = configs.resolve(configs.load(path), overrides)
    start, c = inputs.gather(config), config.engine
    mesh = meshes.make_mesh(config.mesh.data, config.mesh.fsdp, config.mesh.tensor)
    params = start.load_params(meshes.param_shardings(mesh, decoder.axes(start.model), "engine"))
    engine = RowEngine(start.model, params, mesh, slots=c.slots, max_length=c.max_length, page_size=c.page_size,
                       pages=config.pages, row_sizes=c.row_sizes, head_rows=config.head_rows,
                       steps_per_dispatch=c.steps_per_dispatch, refill_slots=c.refill_slots, dtype=jnp.dtype(c.dtype))
    seconds: dict[int, list[float]] = {size: [] for size in c.row_sizes}
    for _ in range(TURNS):
        for size in c.row_sizes:
            seconds[size] += _steps(engine, size)
    for size, times in seconds.items():
        if not times:
            raise ValueError(f"row size {size} never had work for all rows: engine.max_length={c.max_length} is too short")
    record.figure("step_s", {str(size): statistics.median(times) for size, times in seconds.items()})
    record.figure("num_dispatches", {str(size): len(times) for size, times in seconds.items()})
    record.figure("config", {"file": path, "overrides": overrides, "slots": c.slots, "page_size": c.page_size,
                             "max_length": c.max_length})


def _arguments(args: list[str]) -> tuple[str, list[str]]:
    unknown = [a for a in args if not a.startswith("--config")]
    if unknown:
        raise ValueError(f"bench cost: unknown argument {unknown[0]!r}; it takes --config=FILE and --config.a.b=VALUE")
    path = next((a.removeprefix("--config=") for a in args if a.startswith("--config=")), "configs/demo.py")
    return path, [a.removeprefix("--config.") for a in args if a.startswith("--config.")]


def _steps(engine, size: int) -> list[float]:
    """Seconds per step of each dispatch that left no row idle."""
    engine.reset()
    engine.metrics()
    engine.row_sizes = (size,)
    engine.submit(_requests(engine))
    times = []
    while engine.pending:
        begun = time.perf_counter()
        engine.step()
        took, counts = time.perf_counter() - begun, engine.metrics()
        if counts.get("rows/steps") and counts["rows/idle"] == 0:
            times.append(took / counts["rows/steps"])
    return times[1:]


def _requests(engine) -> list:
    """Twice as many prompts as slots, each with half of the positions, all answers as long as fits."""
    import numpy as np

    from jaxrl_post.types import Prompt, Request, RolloutId, Sampling
    sizes, noise, out = engine.sizes, np.random.default_rng(0), []
    half = sizes.max_length // 2
    for index in range(2 * sizes.slots * sizes.replicas):
        prompt = Prompt(id=str(index), tokens=noise.integers(0, engine.vocab_size, half))
        name = RolloutId(0, "train", 0, prompt.id, 0)
        out.append(Request(rollout_id=name, prompt=prompt, seed=name.seed(), max_tokens=sizes.max_length - half,
                           sampling=Sampling(), replica=index % sizes.replicas))
    return out
