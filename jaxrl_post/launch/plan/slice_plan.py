"""Plans a run for a slice that is not there: bytes of each device by part, whether they fit, and seconds of a step.

The seconds come from a trial of the run's own scheduler with the step costs of the roofline. What the trial adds is the
schedule: how long slots wait for the longest rollouts, and what learner and engine do at the same time.

Invariant: a plan is a function of config, model and slice. No device is asked for and nothing is measured, and every line
of seconds says that. Temporaries of the train step are the compiler's where its wheel is installed, and those of the
formulas elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from jaxrl_post import config as configs
from jaxrl_post.config import Config
from jaxrl_post.launch.parts import build
from jaxrl_post.launch.plan import device_less, memory_plan, mode_choice, roofline
from jaxrl_post.launch.plan.chips import Slice
from jaxrl_post.launch.plan.memory_plan import Item, Kind
from jaxrl_post.models import cache_kinds, decoder
from jaxrl_post.parallel import device_order
from jaxrl_post.parallel.devices import MIB
from jaxrl_post.scheduler.forecast import ReplicaCapacity
from jaxrl_post.simulate import observed, trial

TIGHT = 0.9  # share of the memory above which a plan is not to be trusted
GRANTED = 0.75  # share of a GPU that jax takes by itself
Temporaries = Mapping[str, int]
MOST_PROMPTS = 100_000  # of an epoch; no trial comes so far


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
    others = m.copies * m.tensor
    fsdp = (where.devices - m.engine) // others
    near = (
        f"mesh.fsdp={fsdp}" if fsdp > 0 and fsdp * others + m.engine == where.devices else f"mesh.fsdp={where.devices}"
    )
    more = "" if near == f"mesh.fsdp={fsdp}" else " with all other sizes as they are by default"
    sizes = device_order.shown(m.sizes)
    raise ValueError(
        f"--slice={where.name} has {where.devices} devices, and the mesh {'*'.join(sizes)}+engine="
        f"{'*'.join(map(str, sizes.values()))}+{m.engine} takes {config.devices}; the nearest valid value is {near}{more}"
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
    logits = (
        3 * 4 * config.head_rows * model.vocab_size
    )  # float32: from the head, divided by the temperature, and weighed
    for sort in {memory_plan.GENERATES, memory_plan.GENERATING} & held.keys():
        held[sort] += (Item(Kind.PAGES, "logits of a dispatch (estimate)", logits),)
    return Plan(where=where, held=held, compiled=compiled is not None)


def compiled(config: Config, model: decoder.ModelConfig, where: Slice) -> Temporaries | None:
    """Returns the temporaries of the gradient and of the optimizer's step by this slice's compiler, or None without it."""
    if config.lent or not device_less.is_there(where):
        return None
    mesh = device_less.mesh(where, config.mesh.sizes)
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
        changed = configs.resolve(configs.to_dict(config), changes)
        return Setting(options=tuple(changes), config=changed, plan=plan(changed, model, where))
    except ValueError:
        return None


def _changes(config: Config, model: decoder.ModelConfig) -> Iterator[str]:
    """Yields options that save memory, as `a.b=value`: those that cost least time or memory elsewhere first."""
    c = config
    shared = not c.mesh.engine and c.engine.name == "rows"
    if shared and not c.engine.sleep and not c.lent:
        yield "engine.sleep=true"
    most = math.gcd(cache_kinds.whole_heads(model.kept), c.generating // c.mesh.engine_experts)
    ways = [n for n in range(c.mesh.engine_parts + 1, most + 1) if most % n == 0]
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


# ---- As text


def predicted(
    config: Config, model: decoder.ModelConfig, where: Slice, say: Callable[[str], object], length: float = 0.0
) -> Predicted:
    """Says the plan, and the one prediction of the seconds of an optimizer step.

    Args:
      length: mean tokens of a rollout; 0: of lengths seen before, else of the prior.

    Raises as `say_plan` does.
    """
    build.check_formats(config, where.chip)
    seen = lengths(config, length)
    mean = seen.told["mean"] if config.engine.name == "rows" else length
    parts = say_plan(config, model, where, say, mean)
    step = step_seconds(config, model, where, parts["all"], seen)
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


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """Seconds of an optimizer step, and how they were found: lines of text. `simulated`: by a trial, else by the roofline alone."""

    step_s: float
    simulated: bool
    lines: tuple[str, ...]


def step_seconds(
    config: Config, model: decoder.ModelConfig, where: Slice, alone_s: float, lengths: observed.Observed
) -> Predicted:
    """Returns the prediction by a trial, or by the roofline alone where a trial cannot be made.

    Args:
      alone_s: what the roofline predicts of a step, with the same mean length.
    """
    if config.engine.name != "rows":
        why = f"engine.name={config.engine.name} generates nothing, so there is no schedule to simulate"
        return _by_roofline(alone_s, why)
    try:
        chosen, step_s = mode_choice.seconds(config, _job(config, model, where, lengths))
    except ValueError as refusal:
        return _by_roofline(alone_s, f"the simulator cannot run this config: {refusal}")
    told = lengths.told
    mode = chosen.scheduler.name + (", chosen by the simulator" if config.scheduler.name == "auto" else "")
    return Predicted(
        step_s=step_s,
        simulated=True,
        lines=(
            f"An optimizer step takes {step_s:.1f} s by simulation of the scheduler ({mode}), predicted, not measured",
            f"  rollouts of {told['mean']:g} tokens on average, at most {told['longest']} ({lengths.source}); step costs of "
            "the roofline",
            *_left_out(config),
        ),
    )


def _by_roofline(step_s: float, why: str) -> Predicted:
    line = f"An optimizer step takes {step_s:.1f} s by the roofline alone, predicted, not measured: {why}"
    return Predicted(step_s=step_s, simulated=False, lines=(line,))


def lengths(config: Config, mean: float = 0.0) -> observed.Observed:
    """Returns lengths seen before, where the config names them, or the prior.

    Args:
      mean: to which they are stretched (--length); 0: as they are.

    Raises:
      ValueError: no rollout can be so long.
    """
    path, cap = config.scheduler.auto_history, config.sampling.max_tokens
    found = observed.read(path, cap) if path else observed.prior(cap)
    if not mean:
        return found
    if not 1 <= mean <= cap:
        raise ValueError(
            f"--length={mean:g} must be the mean length of a rollout in tokens, from 1 to sampling.max_tokens={cap}; the "
            f"nearest valid value is {min(max(mean, 1), cap):g}"
        )
    return observed.stretched(found, mean, cap)


def _job(config: Config, model: decoder.ModelConfig, where: Slice, lengths: observed.Observed) -> trial.TrialInputs:
    prompt = max(config.engine.max_length - config.sampling.max_tokens, 1)
    cost = roofline.engine_step(config, model, where, prompt)
    replica = ReplicaCapacity(
        slots=config.engine.slots,
        kv_tokens=config.pages * config.engine.page_size,
        cost=trial.InSizes(cost=cost, sizes=config.engine.row_sizes),
    )
    return trial.TrialInputs(
        lengths=lengths.lengths,
        prompts=min(config.rounds * config.scheduler.prompts, MOST_PROMPTS),
        prompt_tokens=prompt,
        replica=replica,
        token_s=roofline.trained_token(config, model, where, prompt, lengths.told["mean"]),
        step_s=roofline.publish(config, model, where),
        drift=mode_choice.DRIFT,
    )


def _left_out(config: Config) -> tuple[str, ...]:
    """Returns a line with what the run has and the trial has not."""
    s = config.scheduler
    parts = {
        "drafts": config.speculation.drafter != "off",
        "loans": config.lent > 0,
        "filtered groups": s.filter_groups,
        "further layouts": bool(config.engine.layouts),
        "evaluations": bool(config.eval.prompts),
    }
    named = ", ".join(name for name, there in parts.items() if there)
    return (f"  not simulated: {named}",) if named else ()
