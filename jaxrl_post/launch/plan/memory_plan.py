"""Plans a run before anything is placed: batch arithmetic, memory per device, memory of the process.

Invariant: no array is made. Batch arithmetic and memory per device follow from shapes and need no device, so a run for
many devices can be planned on none. Weights, optimizer, gradient and KV pages are exact; activations are an estimate and
say so. The memory of the process uses the sizes that compiled programs report instead of the estimate.
"""

from __future__ import annotations

import math
import os
import resource
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from jax.sharding import AbstractMesh, AxisType

from jaxrl_post.config import Config
from jaxrl_post.engine import recurrent_rows
from jaxrl_post.engine.eight_bit_weights import held_bytes, stored
from jaxrl_post.engine.host.wire import most_new, state_rows
from jaxrl_post.kernels.eight_bits import AUTO
from jaxrl_post.launch.parts import adapter, second_models
from jaxrl_post.launch.plan import activations
from jaxrl_post.launch.plan.activations import SIZES
from jaxrl_post.models import cache_kinds, decoder, experts, lora
from jaxrl_post.models.layer import EIGHT_BITS
from jaxrl_post.parallel import mesh as meshes

SHARED, LEARNS, GENERATES = "device", "device that learns", "device that generates"
HOST = "host, for each device that learns"
WHILE_LENT = "device while it is lent"
JUDGING = "device while a judge is awake"
JUDGE_HOST = "host, for each device of a replica"  # replicas share the copy of their process
LEARNING, GENERATING = "device while it learns", "device while it generates"  # with an engine that sleeps


class Kind(Enum):
    """What bytes on a device hold."""

    WEIGHTS = "weights of the learner"
    BASE = "frozen weights, beside low-rank additions"
    MOMENTS = "moments of the optimizer"
    GRADIENT = "gradient"
    REFERENCE = "weights of the reference policy"
    TEACHER = "weights of the teacher"
    ACTIVATIONS = "activations, an estimate"
    OFFLOADED = "activations that wait in host memory"
    ENGINE_WEIGHTS = "weights of the engine"
    ENGINE_BASE = "frozen weights in the engine's layout, beside merged ones"
    PAGES = "KV cache"
    DRAFTING = "tables of the drafter"
    RECORDS = "records of kept ids and routes, of the tokens of a dispatch"
    BATCH_RECORDS = "records of kept ids and routes, of the tokens of a micro-batch"
    REWARD_MODEL = "weights of the reward model"
    JUDGE = "weights and KV cache of a judge that stays on the devices"
    JUDGE_AWAKE = "weights and KV cache of a judge, while questions run"
    JUDGE_ASLEEP = "weights of a judge that wait in host memory"

    @property
    def generates(self) -> bool:
        """Whether only generation needs it."""
        scores = (Kind.REWARD_MODEL, Kind.JUDGE, Kind.JUDGE_AWAKE)
        return self in (Kind.ENGINE_WEIGHTS, Kind.ENGINE_BASE, Kind.PAGES, Kind.DRAFTING, Kind.RECORDS, *scores)


@dataclass(frozen=True)
class Item:
    """Bytes of one kind on each device that holds them.

    Attributes:
      kind: what the bytes hold.
      what: their words in a table.
      bytes: on one device.
      lent: only a device that is lent to the learner holds them, while it is lent.
    """

    kind: Kind
    what: str
    bytes: int
    lent: bool = False


def route_words(config: Config, model: decoder.ModelConfig) -> int:
    """Returns the words of a token's route through the experts, or 0 where none is recorded."""
    return experts.route_words(model) if config.sampling.keep_routes and config.engine.name == "rows" else 0


def arithmetic(config: Config, prompts: int, longest_prompt: int, words: int = 0) -> dict[str, int | float]:
    """Returns how many rollouts, rows and steps a round has, by words.

    Args:
      prompts: prompts per epoch.
      longest_prompt: tokens of the longest prompt.
      words: of a token's route, as `route_words` returns them.
    """
    c = config
    longest = longest_prompt + c.sampling.max_tokens
    rollouts_per_row = max(c.batch.tokens // longest, _sharing(config, longest_prompt), 1)
    slots, record = c.engine.slots * c.replicas, _record(config, words)
    records = {
        "records of the longest rollout, bytes at most": record * c.sampling.max_tokens,
        "records of rollouts at hand, host bytes at most": record * c.sampling.max_tokens * _at_hand(config),
        "records of a micro-batch, bytes": record * c.batch.rows * c.batch.tokens,
    }
    return {
        "devices": c.devices,
        "engine replicas": c.replicas,
        "prompts per round": c.scheduler.prompts,
        "rollouts per prompt": c.scheduler.group_size,
        "rollouts per round": c.rollouts_per_step,
        "engine slots in all": slots,
        "times the slots are filled per round": round(c.rollouts_per_step / slots, 2),
        "longest prompt, tokens": longest_prompt,
        "longest rollout, tokens": c.sampling.max_tokens,
        "micro-batch, rows": c.batch.rows,
        "micro-batch, tokens": c.batch.rows * c.batch.tokens,
        **({"longest rollouts of a row that share prompts": rollouts_per_row} if c.batch.shared_prompts else {}),
        "optimizer steps per round": c.scheduler.updates,
        "most micro-batches per step": math.ceil(
            c.rollouts_per_step // c.scheduler.mini_batches / (c.batch.rows * rollouts_per_row)
        ),
        "steps": c.steps,
        "epochs": round(c.rounds * c.scheduler.prompts / prompts, 3),
        "rollouts per evaluation": c.eval.prompts * (c.eval.samples + 1),
        **(records if record else {}),
    }


def _sharing(config: Config, prompt: int) -> int:
    """Returns how many of the longest rollouts fit into a row where a group has its prompt once; 0 where it has not."""
    if not config.batch.shared_prompts:
        return 0
    size, answer, tokens = config.scheduler.group_size, 1 + config.sampling.max_tokens, config.batch.tokens
    groups, room = tokens // (prompt - 1 + size * answer), (tokens - (prompt - 1)) // answer
    if groups or room < 1:
        return size * groups
    return size // -(-size // room)  # rows of a group are as full as its last one, which no other group joins


def _record(config: Config, words: int) -> int:
    """Returns the bytes of a token's record at most: of its kept ids, and of `words` of its route."""
    return 4 * (config.kept_ids + words)


def _at_hand(config: Config) -> int:
    """Returns how many rollouts every process has in memory at least: those that run, or those of a round."""
    return max(config.engine.slots * config.replicas, config.rollouts_per_step)


def check_records(config: Config, words: int, host: int) -> None:
    """Refuses records of tokens that host memory does not hold where rollouts are as long as they may be.

    Args:
      words: of a token's route, as `route_words` returns them.
      host: bytes of memory of this machine.

    Raises:
      ValueError: with how many rollouts fit, and the option that records nothing.
    """
    count, each = _at_hand(config), _record(config, words) * config.sampling.max_tokens
    if count * each <= host:
        return
    name = "sampling.keep_routes" if words else "sampling.keep_mask"
    also = " with algorithm.router_replay=False" if words and config.algorithm.router_replay else ""
    raise ValueError(
        f"{name}=True: records of {count:,} rollouts of {config.sampling.max_tokens:,} tokens take up to {count * each / 2**30:,.1f} GiB "
        f"of host memory, and this host has {host / 2**30:,.1f} GiB; the nearest valid number of rollouts, in engine.slots and "
        f"scheduler.prompts, is {host // each:,}, and {name}=False{also} records none"
    )


def memory(
    config: Config, model: decoder.ModelConfig, drafting: int = 0, platform: str = "cpu", flash: bool = True
) -> tuple[Item, ...]:
    """Returns what each device holds. `by_device` says which devices hold which items.

    Args:
      drafting: bytes of the drafter's tables of one replica.
      platform: of the devices, as jax names it.
      flash: the devices run the kernels of packed rows.

    Raises:
      ValueError: the mesh does not divide the model or the teacher, or nothing says the shape of the teacher.
    """
    m, shapes = config.mesh, decoder.abstract(model)
    homes = _homes(model, _mesh(*m.sizes), "learner")
    learner = _elements(shapes, homes)
    critic = config.algorithm.needs_critic and config.critic.trunk == "own"
    trained = _additions(config, model) if config.lora.rank else learner
    moments, sums = config.optimizer.moments_dtype, config.optimizer.sums_dtype
    dtype, base = config.engine.dtype, config.lora.base_dtype
    frozen = Item(Kind.BASE, f"weights (frozen, {base})", SIZES[base] * learner)
    lent = SIZES[sums] * trained if config.lent else 0
    waiting = activations.offloaded(config, model)
    kv = dtype if config.engine.kv == AUTO else config.engine.kv
    pages = f"KV pages ({config.pages} of {config.engine.page_size} tokens, {kv})"
    if cache_kinds.states(model.kept):
        pages += f" and recurrent states of {config.engine.slots} slots"
    return (
        *((frozen,) if config.lora.rank else ()),
        Item(Kind.WEIGHTS, f"{'additions' if config.lora.rank else 'weights'} (learner, float32)", 4 * trained),
        Item(Kind.MOMENTS, f"optimizer (two moments, {moments})", 2 * SIZES[moments] * trained),
        Item(Kind.GRADIENT, f"gradient ({sums})", SIZES[sums] * trained),
        *(_critic(config, learner - _elements(shapes.get("head", {}), homes.get("head", {}))) if critic else ()),
        Item(Kind.GRADIENT, f"gradient of lent devices, as it is added ({sums})", lent),
        *_of_engine(config, model),
        Item(Kind.REFERENCE, "weights (reference, float32)", 4 * trained if config.algorithm.needs_reference else 0),
        *(_teacher(config, model) if config.algorithm.needs_teacher else ()),
        Item(Kind.PAGES, pages, _cache(config, model)),
        Item(Kind.DRAFTING, "drafting (tables of one replica)", drafting),
        *_records(config, config.kept_ids + route_words(config, model)),
        *_micro_batch(config, model, m.shards, _elements(shapes["layers"], homes["layers"]), platform, flash),
        *((Item(Kind.OFFLOADED, "activations of layers, offloaded", waiting),) if waiting else ()),
        *(_lent(config, model, platform, flash) if config.lent else ()),
    )


def _records(config: Config, width: int) -> tuple[Item, ...]:
    """Returns the window of records that a dispatch fills, with its copy for the host, and those of a micro-batch.

    width: ids and words of a token's record; 0: there are none.

    Every device of a replica holds the window. The learner shifts a micro-batch's records by a token, which is a copy. A head that
    is split over devices has the records of all rows along fsdp.
    """
    if not width:
        return ()
    m, size = config.mesh, 4 * width
    tokens = config.engine.slots * most_new(config.engine.max_length, config.engine.steps_per_dispatch)
    mine = config.batch.rows // m.shards * config.batch.tokens // m.context
    every = mine * (m.fsdp if m.fsdp * m.tensor > 1 else 0)
    window = f"records of kept ids and routes ({tokens} tokens of {width} words, twice)"
    batch = f"records of a micro-batch ({mine} tokens, int32, and copies)"
    return (Item(Kind.RECORDS, window, 2 * size * tokens), Item(Kind.BATCH_RECORDS, batch, size * (2 * mine + every)))


def _additions(config: Config, model: decoder.ModelConfig) -> int:
    """Returns the numbers of low-rank additions on one device that learns."""
    added = adapter.adapting(config.lora, model)
    homes = meshes.param_shardings(_mesh(*config.mesh.sizes), lora.axes(added).adapter, "learner")
    return _elements(lora.abstract(added).adapter, homes)


def _of_engine(config: Config, model: decoder.ModelConfig) -> tuple[Item, ...]:
    """Returns what the engine holds of weights beside those that it shares with the learner."""
    shapes, homes = decoder.abstract(model), _engine_homes(config, model)
    case, dtype, engine = swap_case(config), config.engine.dtype, _elements(shapes, homes)
    base, form = config.lora.base_dtype, config.engine.weights
    shares = case in ("merge", "merge and code") and dtype == base  # all that has no additions and no codes
    if not config.lora.rank or form != AUTO:
        own = stored(model, form)
        name = dtype if form == AUTO else f"matrices in {form}, else {dtype}"
        whole = _bytes(decoder.abstract(own, jnp.dtype(dtype)), _engine_homes(config, own))
        size = whole if case != "shared" or config.engine.layouts else 0
        if shares:
            size -= SIZES[dtype] * _elements(*(_without_codes(tree, config, model) for tree in (shapes, homes)))
        return (Item(Kind.ENGINE_WEIGHTS, f"weights (engine, {name}, {case})", size),)
    added = adapter.adapting(config.lora, model).lora
    merged = _elements(*(lora.matrices(tree, added)[0] for tree in (shapes, homes)))
    apart = 0 if case == "merge" else SIZES[base] * merged
    return (
        Item(Kind.ENGINE_WEIGHTS, f"weights (engine, {dtype}, {case})", SIZES[dtype] * (merged if shares else engine)),
        Item(Kind.ENGINE_BASE, f"matrices to be merged (engine, {base})", apart),
    )


def _without_codes(tree: Any, config: Config, model: decoder.ModelConfig) -> dict:
    """Returns the leaves that low-rank additions do not change, and that are no matrices in codes."""
    kept = traverse_util.flatten_dict(lora.matrices(tree, adapter.adapting(config.lora, model).lora)[1])
    return {path: leaf for path, leaf in kept.items() if path[-1] not in EIGHT_BITS}


def _micro_batch(
    config: Config, model: decoder.ModelConfig, shards: int, layers: int, platform: str, flash: bool, lent: bool = False
) -> tuple[Item, ...]:
    """Returns what a micro-batch takes on one of `shards` devices that hold `layers` weights of all layers each."""
    needed = activations.estimate(config, model, shards, platform, flash)
    stack = f"layers stacked in the step, and their gradient ({config.model.compute_dtype})"
    return (
        Item(Kind.ACTIVATIONS, "activations (estimate)", needed, lent),
        Item(Kind.ACTIVATIONS, stack, activations.stacked(config, layers, platform), lent),
    )


def _critic(config: Config, elements: int) -> tuple[Item, ...]:
    """Returns what a critic with a decoder of its own holds. Its micro-batches come after the policy's, in their room."""
    moments, sums = config.optimizer.moments_dtype, config.optimizer.sums_dtype
    return (
        Item(Kind.WEIGHTS, "weights (critic, float32)", 4 * elements),
        Item(Kind.MOMENTS, f"optimizer of the critic (two moments, {moments})", 2 * SIZES[moments] * elements),
        Item(Kind.GRADIENT, f"gradient of the critic ({sums})", SIZES[sums] * elements),
    )


def _teacher(config: Config, model: decoder.ModelConfig) -> tuple[Item, ...]:
    """Returns the weights of the teacher. Its forward pass has the room of the policy's backward pass."""
    own, dtype = second_models.teacher_shape(config, model), config.teacher.dtype
    elements = _elements(decoder.abstract(own), _homes(own, _mesh(*config.mesh.sizes), "learner"))
    return (Item(Kind.TEACHER, f"weights (teacher, {dtype})", SIZES[dtype] * elements),)


def reward_model(config: Config, model: decoder.ModelConfig | None) -> tuple[Item, ...]:
    """Returns what the engine's devices hold of the reward model of this shape, if there is one."""
    if model is None:
        return ()
    dtype = config.engine.dtype
    size = SIZES[dtype] * _elements(decoder.abstract(model), _engine_homes(config, model))
    return (Item(Kind.REWARD_MODEL, f"weights (reward model, {dtype})", size),)


def judge(config: Config, own: Config, model: decoder.ModelConfig) -> tuple[Item, ...]:
    """Returns what a judge of this shape holds. `own`: the settings of its engine (second_models.judge_settings)."""
    homes, dtype = _homes(model, _mesh(own.replicas, 1, 1, own.mesh.replica), "engine"), own.engine.dtype
    size = SIZES[dtype] * _elements(decoder.abstract(model), homes)
    kind = Kind.JUDGE_AWAKE if config.judge.asleep else Kind.JUDGE
    pages = f"KV pages (judge, {own.pages} of {own.engine.page_size} tokens, {dtype})"
    items = (Item(kind, f"weights (judge, {dtype})", size), Item(kind, pages, _cache(own, model)))
    return (*items, Item(Kind.JUDGE_ASLEEP, "weights (judge, asleep)", size)) if config.judge.asleep else items


def _lent(config: Config, model: decoder.ModelConfig, platform: str, flash: bool) -> tuple[Item, ...]:
    """Returns what a device holds while it is lent. Its mesh is that of mesh.divided."""
    shards, shapes = config.lent_shards, decoder.abstract(model)
    mesh = _mesh(*meshes.along(shards, config.mesh.fsdp), 1, config.mesh.tensor)
    homes = meshes.param_shardings(mesh, decoder.axes(model), "learner")
    elements, layers = _elements(shapes, homes), _elements(shapes["layers"], homes["layers"])
    sums = config.optimizer.sums_dtype
    there = config.mesh.engine == 0 and config.mesh.fsdp == 1  # the learner's own weights serve here too
    return (
        Item(Kind.WEIGHTS, "weights (lent, float32)", 0 if there else 4 * elements, lent=True),
        Item(Kind.GRADIENT, f"gradient (lent, {sums})", SIZES[sums] * elements, lent=True),
        *_micro_batch(config, model, shards, layers, platform, flash, lent=True),
    )


def _mesh(data: int, fsdp: int, expert: int, tensor: int) -> AbstractMesh:
    return AbstractMesh((data, fsdp, expert, tensor), meshes.AXES, axis_types=(AxisType.Auto,) * len(meshes.AXES))


def _homes(model: decoder.ModelConfig, mesh: AbstractMesh, room: str, options: Mapping[str, str] | None = None) -> Any:
    """Returns the sharding of every weight. Refuses a mesh that does not divide them. `options`: as in check_divisible."""
    axes, counts = decoder.axes(model), {"heads": model.heads, "kv_heads": cache_kinds.whole_heads(model.kept)}
    meshes.check_divisible(mesh, axes, decoder.abstract(model), room, counts, options)
    return meshes.param_shardings(mesh, axes, room)


def _engine_homes(config: Config, model: decoder.ModelConfig) -> Any:
    """Returns the sharding of every weight of a model of this shape that lies with the engine."""
    m = config.mesh
    own = {"tensor": m.engine_tensor, "expert": m.engine_expert}
    mesh = _mesh(config.replicas, 1, m.engine_experts, m.engine_parts)
    return _homes(model, mesh, "engine", {axis: f"engine_{axis}" for axis, size in own.items() if size})


def by_device(config: Config, items: Sequence[Item]) -> dict[str, tuple[Item, ...]]:
    """Returns the items of each sort of device. There is one sort where learner and engine share all devices.

    There are two of the same devices where the engine sleeps while they learn.

    A device that is lent holds nothing that generates meanwhile. It holds the items marked `lent` in addition.
    """
    held: dict[str, list[Item]] = {}
    for item in items:
        for device in _devices(config, item):
            held.setdefault(device, []).append(item)
    return {device: tuple(own) for device, own in held.items()}


def _devices(config: Config, item: Item) -> tuple[str, ...]:
    """Returns the sorts of devices that hold the item."""
    if item.kind is Kind.OFFLOADED:
        return (HOST,)
    if item.kind is Kind.JUDGE_ASLEEP:
        return (JUDGE_HOST,)
    if item.lent:
        return (WHILE_LENT,)
    if config.mesh.engine:
        return (GENERATES,) if item.kind.generates else (LEARNS,)
    stays = item.kind in (Kind.ENGINE_BASE, Kind.REWARD_MODEL, Kind.JUDGE) or not (
        item.kind.generates or item.kind is Kind.ACTIVATIONS
    )
    if config.engine.sleep:
        return (LEARNING, GENERATING) if stays else (GENERATING,) if item.kind.generates else (LEARNING,)
    if config.judge.asleep:  # in rounds that are not streamed the learner computes nothing while the judge is awake
        rests = config.scheduler.name != "pipeline" and not config.scheduler.stream
        awake = (JUDGING,) * (not rests or item.kind is not Kind.ACTIVATIONS)
        return awake + (SHARED,) * (item.kind is not Kind.JUDGE_AWAKE)
    return (SHARED, WHILE_LENT) if config.lent and stays else (SHARED,)


def table(items: Sequence[Item]) -> dict[str, int]:
    """Returns the bytes of each item by its words, and of all together."""
    return {item.what: item.bytes for item in items} | {"all": sum(item.bytes for item in items)}


def process(
    config: Config, items: Sequence[Item], temporaries: Mapping[str, int], resident: int, on_host: bool
) -> dict[str, int]:
    """Returns bytes of this process at its highest, by what holds them.

    While a checkpoint is written, the process holds a copy of weights and moments. No program runs then, so the larger
    of the two needs counts. An export reads the present weights: on the CPU the arrays themselves.

    Args:
      items: the items of `memory`.
      temporaries: bytes that each program needs on a device in addition, by name of the program.
      resident: bytes of the process after imports, inputs and compilation, without weights.
      on_host: the devices are the CPU, whose memory is the memory of the process. Otherwise the process holds one copy
        of the weights, at the beginning and at the end, and the bytes on devices are given per device.
    """
    on_hosts = {Kind.OFFLOADED: config.mesh.learner, Kind.JUDGE_ASLEEP: config.mesh.replica}
    kept = [item for item in items if item.kind not in (Kind.ACTIVATIONS, *on_hosts) and item.bytes]
    waiting = {item.what: on_hosts[item.kind] * item.bytes for item in items if item.kind in on_hosts}
    # Of weights that are no experts this is more than there are: they are copied along expert.
    largest, shards = max(temporaries, key=lambda name: temporaries[name]), math.prod(config.mesh.sizes[1:])
    copied = {kind: shards * sum(item.bytes for item in kept if item.kind is kind and not item.lent) for kind in Kind}
    saved = {}
    if config.checkpoint.every:
        saved = {"copy of weights and moments for a checkpoint": copied[Kind.WEIGHTS] + copied[Kind.MOMENTS]}
    if not on_host:
        staged = saved or {"weights in transfer (float32)": copied[Kind.WEIGHTS]}
        if copied[Kind.BASE] > sum(saved.values()):
            staged = {"frozen weights in transfer": copied[Kind.BASE]}
        inside = {"process itself (compiled, no weights yet)": resident, **staged, **waiting}
        most = max(sum(item.bytes for item in own) for own in by_device(config, kept).values())
        return inside | {
            "process at its highest": sum(inside.values()),
            "each device at its highest": most + temporaries[largest],
        }
    program = {f"largest program beside it ({largest})": temporaries[largest] * config.devices}
    totals = [_on_all(config, kept, counts) for counts in _counts(config)]
    inside = {
        "process itself (compiled, no weights yet)": resident,
        **max(totals, key=lambda lines: sum(lines.values())),
        **waiting,
        **max(program, saved, key=lambda line: sum(line.values())),
    }
    return inside | {"process at its highest": sum(inside.values())}


def _counts(config: Config) -> list[dict[str, int]]:
    """Returns how many devices of each sort there are, at each time that memory differs."""
    if config.engine.sleep:
        return [{LEARNING: config.devices}, {GENERATING: config.devices}]
    return [
        {
            SHARED: config.devices - lent,
            LEARNS: config.mesh.learner,
            WHILE_LENT: lent,
            GENERATES: config.generating - lent,
        }
        for lent in (0, config.lent)
    ] + [{JUDGING: config.devices}]


def _on_all(config: Config, items: Sequence[Item], counts: Mapping[str, int]) -> dict[str, int]:
    """Returns bytes on all devices together, by words of the items."""
    out: Counter[str] = Counter()
    for device, own in by_device(config, items).items():
        for item in own:
            out[item.what] += item.bytes * counts.get(device, 0)
    return dict(+out)


def resident() -> int:
    """Returns the resident bytes of this process now, or its highest so far where the system has no /proc."""
    status = Path("/proc/self/status")
    if status.is_file():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmRSS:"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def of_host() -> int:
    """Returns the bytes of memory of this machine, or of the part of it that its container may have."""
    whole, bound = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), Path("/sys/fs/cgroup/memory.max")
    told = bound.read_text().strip() if bound.is_file() else ""
    return min(whole, int(told)) if told.isdigit() else whole


def swap_case(config: Config) -> str:
    """Returns how weights reach the engine: "shared", "cast" or "relayout" (another sharding).

    Of low-rank additions: "merge", or "relayout and merge". In 8 bits: "code", or "code and relayout"; of both: "merge and code",
    or "merge, code and relayout".
    """
    apart = config.mesh.fsdp > 1 or config.mesh.engine or not config.mesh.alike
    codes = config.engine.weights != AUTO
    if config.lora.rank and codes:
        return "merge, code and relayout" if apart else "merge and code"
    if config.lora.rank:
        return "relayout and merge" if apart else "merge"
    if codes:
        return "code and relayout" if apart else "code"
    if apart:
        return "relayout"
    return "shared" if config.engine.dtype == "float32" else "cast"


def _elements(shapes: Any, shardings: Any) -> int:
    """Returns the number of weights on one device."""
    leaves = zip(jax.tree.leaves(shapes), jax.tree.leaves(shardings), strict=True)
    return sum(int(np.prod(sharding.shard_shape(shape.shape))) for shape, sharding in leaves)


def _bytes(shapes: Any, shardings: Any) -> int:
    """Returns the bytes of weights on one device, whose leaves have dtypes of their own."""
    leaves = zip(jax.tree.leaves(shapes), jax.tree.leaves(shardings), strict=True)
    return sum(_elements(one, sharding) * one.dtype.itemsize for one, sharding in leaves)


def engine_weights(config: Config, model: decoder.ModelConfig) -> int:
    """Returns the bytes of the engine's weights, undivided."""
    return held_bytes(model, config.engine.weights, config.engine.dtype)


def position_bytes(config: Config, numbers: int, scales: int) -> int:
    """Returns the bytes of a position in the KV cache, of so many numbers. In 8 bits it has scales too, in float32."""
    if config.engine.kv == AUTO:
        return numbers * SIZES[config.engine.dtype]
    return numbers + SIZES["float32"] * scales


def _cache(config: Config, model: decoder.ModelConfig) -> int:
    """Returns the bytes of one replica's pages and recurrent states, on each of its devices. Rows of a file need none."""
    if config.engine.name != "rows" and not config.eval.prompts:
        return 0
    positions, ways = config.pages * config.engine.page_size, config.mesh.engine_parts
    each = cache_kinds.held(model.kept, ways), cache_kinds.held_scales(model.kept, ways)
    pages = positions * position_bytes(config, *each)

    def states() -> list:
        e = config.engine
        rows = state_rows(e.max_length, e.steps_per_dispatch, config.head_rows, verifies=config.verifies)
        return [recurrent_rows.empty(e.slots, rows, one, e.dtype) for one in cache_kinds.states(model.kept)]

    parts = jax.tree.leaves(jax.eval_shape(states))
    return pages + sum(part.size * part.dtype.itemsize for part in parts) // config.mesh.engine_parts


def text(title: str, rows: dict, unit: str = "") -> str:
    """Returns a titled table as text. Bytes (unit "B") are shown in MiB, without the rows that would read 0.0 MiB."""
    shown = {name: f"{value / 2**20:,.1f} MiB" if unit == "B" else f"{value:,}" for name, value in rows.items()}
    shown = {name: value for name, value in shown.items() if value != "0.0 MiB"} or shown
    wide = max(map(len, shown))
    return "\n".join([title, *(f"  {name:<{wide}}  {value:>14}" for name, value in shown.items())])
