"""What a job will take: hours, money, chips against a quota, and the seconds that a stopped job needs to save.

Invariant: nothing is measured here. Seconds of a step are predicted (launch/slice_trial.py), and every line says that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from jaxrl_post.config import Config
from jaxrl_post.launch import activations, roofline
from jaxrl_post.launch.chips import Slice
from jaxrl_post.models import decoder

WRITTEN = 2e8  # bytes a second that a host writes to a bucket or a shared disk: an assumption
MARGIN_S, LEAST_S, MOST_S = 30, 60, 3600  # of the grace period; no cluster grants more than an hour
ASK_S = 10  # the grace period is a multiple of it


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Predicted seconds of an optimizer step and of a save, and how many there are.

    `measured`: the save's were given. `upload_s`: of a save's upload to a bucket, which holds up the end of a run alone."""

    step_s: float
    steps: int
    save_s: float
    saves: int
    between_s: float
    measured: bool
    upload_s: float = 0.0

    @property
    def hours(self) -> float:
        return (self.steps * self.step_s + self.saves * self.save_s) / 3600

    @property
    def grace_s(self) -> int:
        """Returns seconds for the work until the next publish, a save there, its upload, and a margin.

        A process learns them by JAXRL_GRACE_S, and has all but MARGIN_S of launch/stop_signal.py for its end.
        """
        wanted = self.between_s + self.save_s + self.upload_s + MARGIN_S
        return min(max(ASK_S * math.ceil(wanted / ASK_S), LEAST_S), MOST_S)


def of(
    config: Config,
    model: decoder.ModelConfig,
    step_s: float,
    hosts: int,
    save_s: float | None = None,
    slow_s: float = 0.0,
    uploads: bool = False,
) -> Forecast:
    """Returns the forecast of a run.

    Args:
      step_s: predicted seconds of an optimizer step.
      hosts: that write a save together.
      save_s: measured seconds of a save (`timing_s/save_checkpoint` of metrics.jsonl); None: predict.
      slow_s: seconds of a slow step, for which the grace period has room.
      uploads: whether the run lies in a bucket.
    """
    moments = activations.SIZES[config.optimizer.moments_dtype]
    size = roofline.parameters(model) * (4 + 2 * moments)
    every, written_s = config.checkpoint.every, size / hosts / WRITTEN
    return Forecast(
        step_s=step_s,
        steps=config.steps,
        save_s=written_s if save_s is None else save_s,
        saves=math.ceil(config.steps / every) if every else 0,
        between_s=max(step_s, slow_s) * config.scheduler.updates,
        measured=save_s is not None,
        upload_s=written_s if uploads else 0.0,
    )


def lines(found: Forecast, where: Slice, price: float) -> list[str]:
    """Returns the forecast as text. `price`: of a chip for an hour, 0 where it was not given."""
    save = "measured" if found.measured else f"predicted at {WRITTEN / 1e6:g} MB/s a host"
    out = [
        f"{found.steps} steps of {found.step_s:.1f} s and {found.saves} saves of {found.save_s:.0f} s ({save}): "
        f"{found.hours:.1f} hours, predicted, not measured",
        f"{where.chips} chips x {found.hours:.1f} hours = {where.chips * found.hours:,.1f} chip-hours",
        f"Grace period after a signal: {found.grace_s} s"
        + (f", of which an upload may take {found.upload_s:.0f} s" if found.upload_s else ""),
    ]
    if price:
        out[1] += f" x ${price:g} = ${where.chips * found.hours * price:,.2f}"
    return out


def check_quota(where: Slice, quota: int) -> None:
    """Refuses more chips than there is quota for. 0: no quota was given.

    Raises:
      ValueError: with both numbers.
    """
    if quota and where.chips > quota:
        raise ValueError(
            f"--quota={quota}: {where.name} has {where.chips} chips, {where.chips - quota} more than the quota; take a "
            "smaller slice, or ask for more quota"
        )
