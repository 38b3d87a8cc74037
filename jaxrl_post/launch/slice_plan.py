"""Plans a run for a slice that is not there: bytes of each device by part, whether they fit, and seconds of a step.

Invariant: nothing is read but the config and the model's shape, and no device is asked for. Temporaries of the train
step are the compiler's where its wheel is installed, and those of the formulas elsewhere.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxrl_post.config import Config
from jaxrl_post.launch import build, chips, device_less, memory_plan, roofline, slice_trial
from jaxrl_post.launch.chips import Slice
from jaxrl_post.launch.memory_plan import Item, Kind
from jaxrl_post.models import decoder
from jaxrl_post.parallel.devices import MIB

TIGHT = 0.9  # share of the memory above which a plan is not to be trusted
GRANTED = 0.75  # share of a GPU that jax takes by itself
Temporaries = Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What each sort of device holds, beside what it has.

    `compiled`: temporaries are the compiler's, not an estimate.
    """

    where: Slice
    held: Mapping[str, tuple[Item, ...]]
    compiled: bool

    @property
    def most(self) -> int:
        """Returns the bytes of the fullest sort of device."""
        return max(sum(item.bytes for item in own) for own in self.held.values())

    @property
    def word(self) -> str:
        """Returns "fits", "tight" or "does not fit"."""
        share = self.most / self.where.chip.memory
        return "fits" if share <= TIGHT else "tight" if share <= 1 else "does not fit"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A change of options, and the plan with it."""

    options: tuple[str, ...]
    config: Config
    plan: Plan


def check_devices(config: Config, where: Slice) -> None:
    """Refuses a mesh that does not use the slice's devices, all of them.

    Raises:
      ValueError: with the nearest mesh.fsdp that does.
    """
    m = config.mesh
    if config.devices == where.devices:
        return
    others = m.data * m.tensor
    fsdp = (where.devices - m.engine) // others
    near = (
        f"mesh.fsdp={fsdp}" if fsdp > 0 and fsdp * others + m.engine == where.devices else f"mesh.fsdp={where.devices}"
    )
    more = "" if near == f"mesh.fsdp={fsdp}" else " with data, tensor and engine as they are by default"
    raise ValueError(
        f"--slice={where.name} has {where.devices} devices, and the mesh data*fsdp*tensor+engine={m.data}*{m.fsdp}*"
        f"{m.tensor}+{m.engine} takes {config.devices}; the nearest valid value is {near}{more}"
    )


def plan(config: Config, model: decoder.ModelConfig, where: Slice, compiled: Temporaries | None = None) -> Plan:
    """Returns the plan of a config.

    Args:
      compiled: bytes of temporaries of each of the learner's programs, or None for the formulas.

    Raises:
      ValueError: the mesh does not divide the model.
    """
    rows, chip = config.engine.name == "rows", where.chip
    items = build.memory_of(config, model, generates=rows, platform=chip.platform, flash=chip.flash)
    if compiled is not None:
        items = (
            *(item for item in items if item.kind is not Kind.ACTIVATIONS),
            Item(Kind.ACTIVATIONS, "temporaries of the train step, as compiled", max(compiled.values())),
        )
    held = {
        name: tuple(item for item in own if item.bytes) for name, own in memory_plan.by_device(config, items).items()
    }
    held.pop(memory_plan.HOST, None)
    for sort in {memory_plan.GENERATES, memory_plan.GENERATING} & held.keys():
        held[sort] += (Item(Kind.PAGES, "logits of a dispatch (estimate)", _dispatch(config, model)),)
    return Plan(where=where, held=held, compiled=compiled is not None)


def _dispatch(config: Config, model: decoder.ModelConfig) -> int:
    """Returns bytes of float32 logits: from the head, divided by the temperature, and weighed."""
    return 3 * 4 * config.head_rows * model.vocab_size


def compiled(config: Config, model: decoder.ModelConfig, where: Slice) -> Temporaries | None:
    """Returns the temporaries of the gradient and of the optimizer's step by this slice's compiler, or None without it."""
    if config.lent or not device_less.is_there(where):
        return None
    m = config.mesh
    mesh = device_less.mesh(where, (m.data, m.fsdp, m.tensor))
    learner = build.learner(
        config, model, decoder.abstract(model), build.DevicePlan(learner=mesh, engine={}, lent=None)
    )
    programs = {name: found for name, found in learner.jitted().items() if name in ("accumulate", "commit")}
    return {
        name: program.lower(*shapes).compile().memory_analysis().temp_size_in_bytes
        for name, (program, shapes) in programs.items()
    }


# ---- What would fit


def nearest(config: Config, model: decoder.ModelConfig, where: Slice) -> Setting | None:
    """Returns the first setting that fits, by the formulas: one change alone in the order of `_changes`, then several."""
    single = [(change,) for change in _changes(config, model)]
    several = [tuple(change for (change,) in single[:count]) for count in range(2, len(single) + 1)]
    tried = [found for changes in (*single, *several) if (found := _with(config, model, where, changes))]
    for word in ("fits", "tight"):
        fitting = (one for one in tried if one.plan.word == word)
        if (first := next(fitting, None)) is not None:
            return first
    return None


def _with(config: Config, model: decoder.ModelConfig, where: Slice, changes: Sequence[str]) -> Setting | None:
    """Returns the setting of these changes, or None where options contradict each other or the model."""
    try:
        changed = config
        for change in changes:
            changed = _set(changed, change)
        return Setting(options=tuple(changes), config=changed, plan=plan(changed, model, where))
    except ValueError:
        return None


def _set(config: Config, change: str) -> Config:
    path, _, text = change.partition("=")
    section, _, name = path.partition(".")
    own = getattr(config, section)
    kind = type(getattr(own, name))
    value: Any = text == "true" if kind is bool else kind(text)
    return dataclasses.replace(config, **{section: dataclasses.replace(own, **{name: value})})


def _changes(config: Config, model: decoder.ModelConfig) -> Iterator[str]:
    """Yields options that save memory, as `a.b=value`: those that cost least time or memory elsewhere first."""
    c = config
    shared = not c.mesh.engine and c.engine.name == "rows"
    if shared and not c.engine.sleep and not c.lent:
        yield "engine.sleep=true"
    ways = [n for n in _divisors(math.gcd(model.kv_heads, c.generating)) if n > c.mesh.replica]
    if ways and not c.engine.layouts and not c.lent:
        yield f"mesh.engine_tensor={ways[0]}"
    if not c.model.remat:
        yield "model.remat=true"
    if c.model.remat_policy != "full":
        yield "model.remat_policy=full"
    if c.optimizer.moments_dtype == "float32":
        yield "optimizer.moments_dtype=bfloat16"
    if c.optimizer.sums_dtype == "float32":
        yield "optimizer.sums_dtype=bfloat16"
    if c.batch.rows > c.mesh.shards:
        yield f"batch.rows={c.mesh.shards}"
    if c.batch.tokens > c.engine.max_length:
        yield f"batch.tokens={c.engine.max_length}"
    if ways[1:] and not c.engine.layouts and not c.lent:
        yield f"mesh.engine_tensor={ways[-1]}"
    slots = c.engine.slots // 2
    while slots >= 8:
        yield f"engine.slots={slots}"
        slots //= 2


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


# ---- As text


def text(
    config: Config, model: decoder.ModelConfig, name: str, say: Callable[[str], object], length: float = 0.0
) -> None:
    """Says the plan for the slice of that name, and the seconds of a step by simulation. `length`: as in `predicted`.

    Raises as `say_plan` does, and where there is no such slice.
    """
    predicted(config, model, chips.read(name), say, length)


def predicted(
    config: Config, model: decoder.ModelConfig, where: Slice, say: Callable[[str], object], length: float = 0.0
) -> slice_trial.Predicted:
    """Says the plan, and the one prediction of the seconds of an optimizer step.

    Args:
      length: mean tokens of a rollout; 0: of lengths seen before, else of the prior.

    Raises as `say_plan` does.
    """
    seen = slice_trial.lengths(config, length)
    mean = seen.told["mean"] if config.engine.name == "rows" else length
    parts = say_plan(config, model, where, say, mean)
    step = slice_trial.of(config, model, where, parts["all"], seen)
    say("\n".join(step.lines))
    return step


def say_plan(
    config: Config, model: decoder.ModelConfig, where: Slice, say: Callable[[str], object], mean: float
) -> dict[str, float]:
    """Says the plan, and returns the predicted seconds of an optimizer step by part, by the roofline alone.

    Args:
      mean: as in roofline.seconds.

    Raises:
      ValueError: a mesh of another size, or a run that does not fit, with the nearest setting that does.
    """
    check_devices(config, where)
    device_less.take_none()
    prompt = config.engine.max_length - config.sampling.max_tokens
    if device_less.is_there(where):
        say(f"Compiling the train step for {where.name}, which takes up to some minutes")
    found = plan(config, model, where, compiled(config, model, where))
    by = "with temporaries as compiled" if found.compiled else "by formulas"
    for sort, own in found.held.items():
        say(memory_plan.text(f"Memory per {sort} of {where.name}, {by}", memory_plan.table(own), "B"))
    parts = roofline.seconds(config, model, where, prompt, mean)
    shown = {part: round(value, 2) for part, value in parts.items() if part != "all"}
    say(memory_plan.text("Seconds of the parts of an optimizer step, each by itself", shown))
    say(f"  {roofline.ASSUMED}")
    if found.word == "does not fit":
        raise ValueError(refusal(config, model, found))
    say(f"{where.name}: {_sentence(found)}")
    if where.chip.platform == "gpu" and found.most > GRANTED * where.chip.memory:
        say(f"  jax takes {GRANTED:.0%} of a GPU unless it is told more: XLA_PYTHON_CLIENT_MEM_FRACTION=0.95")
    return parts


def _sentence(found: Plan) -> str:
    by = "the compiler" if found.compiled else "formulas"
    room = found.where.chip.memory
    return f"{found.word}: {found.most / MIB:,.0f} of {room / MIB:,.0f} MiB a device, by {by}"


def refusal(config: Config, model: decoder.ModelConfig, found: Plan) -> str:
    """Returns why a plan does not fit, with the nearest setting that does."""
    name = config.model.path.rpartition("/")[2] or config.model.preset
    near = nearest(config, model, found.where)
    other = "no setting tried fits; take a larger slice"
    if near is not None:
        options = " ".join(f"--config.{option}" for option in near.options)
        other = f"the nearest setting that fits is {options} with {near.plan.most / MIB:,.0f} MiB"
    return f"{name} on {found.where.name} {_sentence(found)}; {other}"
