"""How the two parts that compile are made from a config: of weights for a run, of shapes for a plan.

Invariant: a plan's programs are a run's, because both are made here with the same arguments.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_post.config import Config, EngineConfig
from jaxrl_post.data.prompts import Prompts
from jaxrl_post.engine import between_products, bit_probe, compiled, prompt_program, step_cost
from jaxrl_post.engine import whole_hosts as engine_hosts
from jaxrl_post.engine.demonstrations import Demonstrations, Preferences
from jaxrl_post.engine.elastic import Elastic
from jaxrl_post.engine.host import wire
from jaxrl_post.engine.host.swap_policy import SwapPolicy
from jaxrl_post.engine.host.wire import EngineSettings
from jaxrl_post.engine.row_engine import MeshDevice, RowEngine
from jaxrl_post.engine.speculation.interface import Drafter
from jaxrl_post.engine.speculation.registry import DRAFTERS
from jaxrl_post.engine.speculation.speculation import Drafting
from jaxrl_post.kernels import choice, eight_bits, hardware
from jaxrl_post.launch import own_process
from jaxrl_post.launch.parts import adapter as adapters
from jaxrl_post.launch.parts import second_models
from jaxrl_post.launch.parts.inputs import Inputs, PolicyFiles
from jaxrl_post.launch.plan import memory_plan
from jaxrl_post.models import cache_kinds, decoder
from jaxrl_post.models.model_config import EightBits
from jaxrl_post.parallel import devices as known_devices
from jaxrl_post.parallel import exchange
from jaxrl_post.parallel import mesh as meshes
from jaxrl_post.parallel.processes import say
from jaxrl_post.ring.history import History
from jaxrl_post.ring.types import Layout
from jaxrl_post.scheduler.curriculum import Choice, Curriculum
from jaxrl_post.scheduler.forecast import ReplicaCapacity
from jaxrl_post.scheduler.learner_pace import Interleaved, Pace, Split
from jaxrl_post.trainer import whole_hosts as learner_hosts
from jaxrl_post.trainer.learner import GRADIENT, Learner, LearnerSettings
from jaxrl_post.trainer.state import is_abstract
from jaxrl_post.trainer.teacher import Teacher

COLLECTIVE_S = (
    1e-5  # of a sum over devices inside a layer, of which there are two; rough, only the order of size matters
)


@dataclass(frozen=True, kw_only=True)
class DevicePlan:
    """Which devices learn and which generate.

    `learner`: the learner's mesh. `engine`: the mesh of each layout that the engine is compiled for; the engine begins in
    the first. `lent`: the mesh on which lent devices train, or None where none are lent. `relays`: what processes tell
    each other where whole ones learn and whole ones generate.
    """

    learner: jax.sharding.Mesh
    engine: Mapping[Layout, jax.sharding.Mesh]
    lent: jax.sharding.Mesh | None
    relays: exchange.Relays = field(default_factory=exchange.Relays)

    @property
    def on_whole_hosts(self) -> bool:
        """Whether whole processes learn and whole processes generate."""
        return meshes.processes(self.learner).isdisjoint(meshes.processes(self.first))

    @property
    def first(self) -> jax.sharding.Mesh:
        """The engine's mesh at the start."""
        return next(iter(self.engine.values()))


def device_plan(config: Config, devices: Sequence[Any] | None = None) -> DevicePlan:
    """Derives every mesh of a run.

    Args:
      devices: what is there; None: what jax sees.

    Raises:
      ValueError: fewer devices are there than the learner, or the engine beside it, needs. Or whole hosts learn and whole
        hosts generate, which the run's additions or a second model do not allow.
    """
    m, every = config.mesh, layouts(config)
    sizes, inner = (m.data, m.fsdp, m.tensor), (m.engine_parts, m.engine_experts)
    shared = None if m.engine else meshes.make_mesh(*sizes, devices, m.expert)
    split = functools.partial(meshes.make_split, *sizes, m.engine, inner[0], devices, m.expert, inner[1])
    learner, own = (shared, shared) if shared else split()
    staying, lent = meshes.divided(own, config.staying, learner) if config.lent else (None, None)

    def mesh_of(layout: Layout) -> jax.sharding.Mesh:
        mesh = own
        if shared and (layout.tensor, layout.expert) != (m.tensor, m.expert):
            count = config.generating // layout.replica
            mesh = meshes.make_mesh(count, 1, layout.tensor, devices, layout.expert)
        return mesh if layout.devices == mesh.size else staying

    plan = DevicePlan(learner=learner, engine={layout: mesh_of(layout) for layout in every}, lent=lent)
    if plan.on_whole_hosts:
        second_models.refuse_whole_hosts(config)
    return plan


def layouts(config: Config) -> tuple[Layout, ...]:
    """Layouts that the engine is compiled for. The engine begins in the first, that of the config's mesh.

    All of them divide the experts alike.
    """
    m = config.mesh
    sizes = m.replica, *config.engine.layouts
    lending = [Layout(config.staying, m.engine_parts)] if config.lent else []
    every = (Layout(config.generating // size, size // m.engine_experts, m.engine_experts) for size in sizes)
    return (*every, *lending)


def learner(config: Config, model: decoder.ModelConfig, params: Any, devices: DevicePlan, adapter: str = "") -> Learner:
    """Builds the learner of these weights. They are the reference too, where the run has one.

    Args:
      params: a function from shardings to weights, as in Inputs, or shapes for a learner that only plans.
      adapter: as in Inputs.
    """
    make: Callable[..., Learner] = Learner
    if devices.engine and devices.on_whole_hosts:
        make = functools.partial(learner_hosts.learner, devices.relays)
    model = adapters.adapting(config.lora, model)
    bits = None if config.model.weights == eight_bits.AUTO else EightBits(config.model.weights, stored=False)
    settings = LearnerSettings(
        algorithm=config.algorithm,
        optimizer=config.optimizer,
        batch=config.batch,
        temperature=config.sampling.temperature,
        steps=config.steps,
        max_tokens=config.sampling.max_tokens,
        written=config.engine.name != "rows",
        remat=config.model.remat,
        remat_policy=config.model.remat_policy,
        scan_layers=config.model.scan_layers,
        compute_dtype=config.model.compute_dtype,
        attention=training_attention(config, model, devices, branches=config.branches)[0],
        context=config.mesh.context,
        kept_ids=config.kept_ids,
        route_words=memory_plan.route_words(config, model),
    )
    return make(
        dataclasses.replace(model, eight_bits=bits),
        mesh=devices.learner,
        settings=settings,
        **adapters.weights(config, model, params, adapter),
        critic=second_models.critic(config, model, params, devices.learner) if config.algorithm.needs_critic else None,
        teacher=teacher(config, model, params, devices) if config.algorithm.needs_teacher else None,
        lent=devices.lent,
    )


def teacher(config: Config, model: decoder.ModelConfig, params: Any, devices: DevicePlan) -> Teacher:
    """Builds the teacher of the policy `model`, for a learner that gets `params`: of shapes where these are."""
    kernel = functools.partial(training_attention, config, devices=devices, branches=config.branches)
    return second_models.teacher(config, model, devices.learner, lambda own: kernel(own)[0], plans=is_abstract(params))


def training_attention(
    config: Config, model: decoder.ModelConfig, devices: DevicePlan, *, branches: bool
) -> tuple[Callable | None, str]:
    """Returns the kernel of the learner's attention, or None and the line that says why an accelerator has none.

    A kernel serves every layer or none. branches: texts share what they begin with.
    """
    tensor, first = devices.learner.shape["tensor"], devices.learner.devices.flat[0]
    fixed = dict(heads=model.heads // tensor, tokens=config.batch.tokens // config.mesh.stretches, branches=branches)
    found = [
        choice.of_packed_rows(first, config.model.compute_dtype, kv_heads=K // tensor, head_dim=H, **fixed)
        for K, H in cache_kinds.shapes(model.kept)
    ]
    return next((one for one in found if one[0] is None), found[0])


def references_of_training(config: Config, model: decoder.ModelConfig, devices: DevicePlan) -> list[str]:
    """Returns a line for each part of the learner that has no kernel on this accelerator, and one on its experts."""
    tensor, first = devices.learner.shape["tensor"], devices.learner.devices.flat[0]
    sizes = dict(ways=tensor, tokens=config.batch.tokens)
    lines = [choice.delta_rule_line(first, one, **sizes) for one in cache_kinds.states(model.kept)]
    attention = training_attention(config, model, devices, branches=config.branches)[1]
    experts = experts_line(model, devices.learner, config.model.compute_dtype)
    return [line for line in dict.fromkeys((attention, *lines, experts)) if line]


def pace(config: Config, replica: Callable[[], ReplicaCapacity], table: step_cost.StepCost | None) -> Pace | None:
    """How long an optimizer step keeps new weights from an engine that goes on meanwhile; None: it rests. `table`: the run's
    own costs. Where it does not tell that of a trained token, this is GRADIENT forward passes."""
    ratio, batch = config.scheduler.interleave, config.batch
    if not config.mesh.engine and not ratio:
        return None
    first = replica()
    token_s, step_s = training_s(config, first, table)
    work = Split(first, token_s=token_s, step_s=step_s)
    return Interleaved(work, ratio=ratio, piece=batch.rows * batch.tokens) if ratio else work


def training_s(config: Config, first: ReplicaCapacity, table: step_cost.StepCost | None) -> tuple[float, float]:
    """Returns the seconds of a trained token, and of an optimizer step beside its tokens, on all devices that learn."""
    forward_s = first.cost.prefill_s * config.mesh.replica / config.mesh.learner
    token_s = table.training if table and table.training else GRADIENT * forward_s
    return token_s, table.updating if table else 0.0


def engine_sizes(config: Config, layout: Layout, model: decoder.ModelConfig | None = None) -> EngineSettings:
    """What the row engine's programs are compiled for: a replica of more devices has as many more slots, pages and rows.

    model: whose routes are recorded, where it has experts. None: none are.
    """
    c, more = config.engine, layout.replica // config.mesh.replica
    return EngineSettings(
        replicas=layout.replicas,
        slots=c.slots * more,
        max_length=c.max_length,
        page_size=c.page_size,
        pages=config.pages * more,
        row_sizes=tuple(size * more for size in c.row_sizes),
        head_rows=config.head_rows * more,
        steps_per_dispatch=c.steps_per_dispatch,
        one_graph=c.one_graph,
        restricted=config.restricted,
        kept_ids=config.kept_ids,
        route_words=memory_plan.route_words(config, model) if model else 0,
        refill_slots=c.refill_slots,
        prompt_rows=c.prompt_rows * more,
        dtype=jnp.dtype(c.dtype),
        verifies=config.verifies,
        weights=c.weights,
        kv=c.kv,
        products=c.products,
    )


def replicas(
    config: Config, model: decoder.ModelConfig, table: step_cost.StepCost | None
) -> dict[Layout, ReplicaCapacity]:
    """What the scheduler forecasts with, of each layout: by the run's own cost table, else by the analytic one.

    Raises:
      ValueError: a kind of device without an analytic cost.
    """
    kv_bytes = memory_plan.position_bytes(config, cache_kinds.read(model.kept), cache_kinds.read_scales(model.kept))
    parameters = memory_plan.engine_weights(config, model) / 2  # a Shape is in 2 bytes
    shape = step_cost.Shape(active=parameters, parameters=parameters, kv_bytes=kv_bytes)
    out = {}
    for layout in layouts(config):
        sizes = engine_sizes(config, layout, model)
        steps = (
            step_cost.TableCost(table=table)
            if table
            else step_cost.decode(
                jax.devices()[0].device_kind,
                shape,
                tensor=layout.replica,
                per_collective_s=2 * model.layers * COLLECTIVE_S,
            )
        )
        out[layout] = ReplicaCapacity(slots=sizes.slots, kv_tokens=sizes.pages * sizes.page_size, cost=steps)
    return out


def replica(config: Config, model: decoder.ModelConfig, table: step_cost.StepCost | None) -> ReplicaCapacity:
    """Of the layout where the engine begins."""
    return replicas(config, model, table)[layouts(config)[0]]


def engine(
    config: Config, start: Inputs, devices: DevicePlan, learner: Learner, history: History, say: Callable[[str], object]
) -> RowEngine | Elastic:
    """Builds the engine. With several layouts, it holds a compiled engine for each."""
    device: Callable[..., Any] = MeshDevice
    if devices.on_whole_hosts:
        device = functools.partial(engine_hosts.device, devices.learner, devices.relays)
    make = {
        layout: functools.partial(
            row_engine,
            config,
            start,
            mesh,
            learner.params,
            learner.step,
            drafting(config, start.model, history, layout),
            say,
            layout,
            device,
        )
        for layout, mesh in devices.engine.items()
    }
    if len(make) == 1:
        return next(iter(make.values()))()
    return Elastic(make, learner.params, learner if config.lent else None)


def check_formats(config: Config, chip: known_devices.Device) -> None:
    """Refuses number formats that a chip does not have.

    Raises:
      ValueError: with the nearest that it has.
    """
    for name in ("weights", "kv"):
        if getattr(config.engine, name) == "fp8" and chip.known and not chip.fp8:
            raise ValueError(
                f"engine.{name}='fp8': {chip.name} has no units for 8-bit floats; the nearest valid engine.{name} is 'int8'"
            )


def check_products(sizes: EngineSettings, model: decoder.ModelConfig, mesh: jax.sharding.Mesh) -> None:
    """Refuses engine.products='fixed' where no kernel computes them, but on a CPU.

    Raises:
      ValueError: with the reason.
    """
    first, heads = mesh.devices.flat[0], [model.heads * H for _, H in cache_kinds.shapes(model.kept)]
    sides = (model.embed, model.ffw, model.vocab_size, *heads, *(K * H for K, H in cache_kinds.shapes(model.kept)))
    if sizes.products != wire.FIXED:
        return
    if reason := choice.without_products(first, mesh.size, sizes.dtype, sizes.weights, sides):
        raise ValueError(f"engine.products='fixed': {reason}; the nearest valid engine.products is 'library'")


def row_engine(
    config: Config,
    start: Inputs | PolicyFiles,
    mesh: jax.sharding.Mesh,
    params: Any,
    version: int,
    drafting: Drafting,
    say: Callable[[str], object],
    layout: Layout,
    device: Callable[..., Any] = MeshDevice,
    **kind: bool,
) -> RowEngine:
    """Builds the engine of one layout, with the row sizes that the probe keeps.

    `device`: as in RowEngine. `kind`: `restricted` and `scoring` of EngineSettings, where they are not the config's.
    """
    sizes = dataclasses.replace(engine_sizes(config, layout, start.model), **kind)
    first = mesh.devices.flat[0]
    check_formats(config, known_devices.of(first.device_kind, first.platform))
    check_products(sizes, start.model, mesh)
    made = RowEngine(
        start.model,
        params,
        mesh,
        sizes,
        cost=start.cost,
        decode=start.tokenizer.decode,
        version=version,
        drafting=drafting,
        swap_policy=SwapPolicy(config.engine.carry_over, config.engine.carry_share),
        device=device,
    )
    exchange.meet()  # programs take unequal time to compile, and the first use of devices of several processes has a limit
    for line in references(start.model, mesh, layout, sizes):
        say(line)
    dropped = [size for size, kept in bit_probe.keep_equal_sizes(made).items() if not kept]
    if line := not_used(config.engine.row_sizes, dropped):
        say(line)
    return made


def not_used(sizes: Sequence[int], dropped: Sequence[int]) -> str:
    """Returns a line on row sizes that give other bits. Of the default's nobody chose any, and config.json has those used."""
    if not dropped or tuple(sizes) == EngineConfig.row_sizes:
        return ""
    return f"engine.row_sizes: {[*dropped]} give other bits than {max(sizes)} on this machine and are not used"


def references(model: decoder.ModelConfig, mesh: jax.sharding.Mesh, layout: Layout, sizes: EngineSettings) -> list[str]:
    """Returns a line for each part of the engine that has no kernel on this accelerator, and one on its experts."""
    ways, rows = layout.tensor, max(sizes.row_sizes)
    codes = None if sizes.kv == eight_bits.AUTO else eight_bits.FORMATS[sizes.kv].dtype
    fixed = dict(heads=model.heads // ways, page=sizes.page_size, rows=rows, vocab=model.vocab_size // ways)
    fixed |= dict(cut_ways=ways * sizes.restricted)
    lines = [
        line
        for K, H in cache_kinds.shapes(model.kept)
        for line in choice.reference_lines(
            mesh.devices.flat[0], sizes.dtype, codes, kv_heads=K // ways, head_dim=H, **fixed
        )
    ]
    lines += between_products.lines(model, mesh.devices.flat[0], ways, sizes)
    walks = {rows, min(sizes.prompt_rows, prompt_program.PIECE)} - {0}
    lines += [
        choice.recurrent_line(mesh.devices.flat[0], one, ways=ways, rows=size)
        for one in cache_kinds.states(model.kept)
        for size in sorted(walks)
    ]
    return [line for line in (*dict.fromkeys(lines), experts_line(model, mesh, sizes.dtype)) if line]


def experts_line(model: decoder.ModelConfig, mesh: jax.sharding.Mesh, dtype: Any) -> str:
    """Returns the line on what multiplies rows with experts, or nothing: on a CPU, or without experts."""
    if model.experts is None:
        return ""
    sizes = dict(embed=model.embed, ffw=model.experts.ffw // mesh.shape[meshes.TENSOR])
    return choice.experts_line(mesh.devices.flat[0], dtype, **sizes)


def keys(engine: RowEngine | Elastic) -> dict[str, Any]:
    """What an engine's tokens and clocks depend on beside its config."""
    if isinstance(engine, Elastic):
        return {
            "layouts": {f"{layout.replicas} x {layout.tensor}": keys(one) for layout, one in engine.engines.items()}
        }
    return {
        "row_sizes": list(engine.row_sizes),
        "products": engine.sizes.products_key,
        "cost_table": {"source": engine.cost.source, "digest": engine.cost.digest},
    }


def swap(engine: RowEngine | Elastic) -> dict[str, Any]:
    """Returns how weights reach the engine, and the bytes of a swap by link."""
    device = (engine.engine if isinstance(engine, Elastic) else engine).device
    return {"case": device.case, "links": dict(device.links)}


def drafter(config: Config, model: decoder.ModelConfig) -> Drafter:
    """What guesses tokens ahead, if anything does."""
    c = config.speculation
    size = sum(-(-part // wire.UPLOAD) * wire.UPLOAD for part in (_shared(config), c.prompt_entries))
    return DRAFTERS[c.drafter](vocab=model.vocab_size, width=c.width, entries=size, live=c.live_entries)


def curriculum(config: Config, train: Prompts, history: History) -> Curriculum | None:
    """Returns the order of prompts by their success rates, or None where the config has no curriculum."""
    section = config.curriculum
    if not section.used:
        return None
    choice = Choice(**vars(section) | {"share": 1.0 if section.interest == "all" else section.share})
    return Curriculum(train, len(train), choice, config.seed, history.of)


def drafting(config: Config, model: decoder.ModelConfig, history: History, layout: Layout) -> Drafting:
    """The host's side of it, reading that history."""
    return Drafting(
        drafter(config, model),
        replicas=layout.replicas,
        slots=engine_sizes(config, layout).slots,
        past=history.of,
        shared=_shared(config),
        clones=config.speculation.clones,
    )


def _shared(config: Config) -> int:
    return config.speculation.shared_entries if config.speculation.drafter == "ours" else 0


def memory(config: Config, start: Inputs) -> tuple[memory_plan.Item, ...]:
    """Returns what each device holds."""
    generates = config.engine.name == "rows" or bool(start.held_out)
    flash = not hardware.without_flash(jax.devices()[0])
    held = memory_of(config, start.model, generates=generates, platform=jax.default_backend(), flash=flash)
    held += memory_plan.reward_model(config, start.reward_model and start.reward_model.model)
    return held + (
        memory_plan.judge(config, second_models.judge_settings(config), start.judge.model) if start.judge else ()
    )


def memory_of(
    config: Config, model: decoder.ModelConfig, *, generates: bool, platform: str, flash: bool
) -> tuple[memory_plan.Item, ...]:
    """Returns what each device of a platform holds, from the model's shape alone.

    flash: the devices run the kernels of packed rows."""
    held = jax.eval_shape(lambda: drafter(config, model).empty(config.engine.slots))
    tables = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(held)) if generates else 0
    return memory_plan.memory(config, model, tables, platform, flash)


def foreseen(config: Config, start: Inputs) -> str:
    """Parts without a kernel, and the memory of this process from the run's programs compiled for shapes alone, as text."""
    if jax.device_count() < config.devices:
        return (
            f"Memory of the process: not known here: the run's {config.devices} devices are needed to compile its "
            f"programs, and here are {jax.device_count()}"
        )
    devices = device_plan(config)
    needed = learner(config, start.model, decoder.abstract(start.model), devices).temporaries()
    if config.engine.name == "rows" or start.held_out:
        for layout, mesh in devices.engine.items():
            sizes = engine_sizes(config, layout, start.model)
            found = compiled.temporaries(start.model, mesh, sizes, drafter(config, start.model))
            needed |= found if mesh is devices.first else {f"{name}, {layout}": n for name, n in found.items()}
    if start.reward_model:
        needed["reward model"] = second_models.scorer_temporaries(config, start.reward_model, devices.first)
    if start.judge:
        own = second_models.judge_settings(config)
        sizes = engine_sizes(own, layouts(own)[0])
        found = compiled.temporaries(start.judge.model, devices.first, sizes)
        needed |= {f"judge: {name}": size for name, size in found.items()}
    own_process.give_back()  # as a run does before its first round
    on_host = jax.devices()[0].platform == "cpu"
    needs = memory_plan.process(config, memory(config, start), needed, memory_plan.resident(), on_host)
    title = f"Memory of the process ({jax.devices()[0].device_kind}, {config.devices} devices)"
    return "\n".join([*_without_kernels(config, start, devices), memory_plan.text(title, needs, "B")])


def _without_kernels(config: Config, start: Inputs, devices: DevicePlan) -> list[str]:
    """Returns the lines by which a run says, as it starts, which parts have no kernel."""
    layout, mesh = next(iter(devices.engine.items()))
    generates = config.engine.name == "rows" or start.held_out
    own = references(start.model, mesh, layout, engine_sizes(config, layout)) if generates else []
    return list(dict.fromkeys((*references_of_training(config, start.model, devices), *own)))


def engines(
    config: Config, start: Inputs, devices: DevicePlan, learner: Learner, history: History
) -> tuple[Any, RowEngine | Elastic | None]:
    """Builds what gives training rollouts, and the row engine that evaluates, if there is any. One row engine does both."""
    sampled = config.engine.name == "rows"
    rows = engine(config, start, devices, learner, history, say) if sampled or start.held_out else None
    evaluator = rows if start.held_out else None
    if sampled:
        return rows, evaluator
    how = dict(slots=config.engine.slots, replicas=config.replicas, version=learner.step)
    if config.engine.name == "demonstrations":
        return Demonstrations(start.write, trained=start.trained, **how), evaluator
    return Preferences(start.pairs, **how), evaluator
