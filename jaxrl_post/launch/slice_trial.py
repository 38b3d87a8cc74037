"""Predicts the seconds of an optimizer step on a slice that is not there by a trial of the run's own scheduler.

Step costs are the roofline's (launch/roofline.py). What the trial adds is the schedule: how long slots wait for the
longest rollouts, and what learner and engine do at the same time.

Invariant: a prediction is a function of config, model and slice. Nothing is measured, and every line says that.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxrl_post.config import Config
from jaxrl_post.launch import mode_choice, roofline
from jaxrl_post.launch.chips import Slice
from jaxrl_post.models import decoder
from jaxrl_post.scheduler.forecast import ReplicaCapacity
from jaxrl_post.sim import observed, trial

MOST_PROMPTS = 100_000  # of an epoch; no trial comes so far


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """Seconds of an optimizer step, and how they were found: lines of text. `simulated`: by a trial, else by the roofline alone."""

    step_s: float
    simulated: bool
    lines: tuple[str, ...]


def of(
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


def _job(config: Config, model: decoder.ModelConfig, where: Slice, lengths: observed.Observed) -> trial.Job:
    prompt = max(config.engine.max_length - config.sampling.max_tokens, 1)
    cost = roofline.engine_step(config, model, where, prompt)
    replica = ReplicaCapacity(
        slots=config.engine.slots,
        kv_tokens=config.pages * config.engine.page_size,
        cost=trial.InSizes(cost=cost, sizes=config.engine.row_sizes),
    )
    return trial.Job(
        lengths=lengths.lengths,
        prompts=min(config.rounds * config.scheduler.prompts, MOST_PROMPTS),
        prompt_tokens=prompt,
        replica=replica,
        token_s=roofline.trained_token(config, model, where, prompt + lengths.told["mean"]),
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
