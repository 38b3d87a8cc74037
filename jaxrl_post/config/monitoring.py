"""The sections of the schema that watch a run: alarms, limits of a hang, and loggers."""

from __future__ import annotations

from dataclasses import dataclass

from jaxrl_post.config.fields import any_of_type, fraction, number, one_of

_MEASURED = "eval.prompts>0 or eval.completions>0"


@dataclass(frozen=True, kw_only=True)
class AlarmConfig:
    """Alarms on what is trained. Each is a line in the log when it begins, and a metric `alarm/NAME`."""

    max_skipped: int = number(
        3,
        unit="optimizer steps",
        doc="Stops the run after so many steps in a row whose gradient was not finite. 0: never.",
    )
    equal_rewards: float = fraction(
        1.0,
        unit="share of groups",
        doc="Alarm from this share of groups with equal rewards on. 0: none. Idle where the loss reads no reward.",
    )
    min_entropy: float = number(0.01, unit="nats", doc="Alarm at a mean entropy below it. 0: none.")
    max_entropy: float = fraction(
        0.9, unit="share of log(vocabulary)", doc="Alarm at a mean entropy above it. 0: none."
    )
    shrinkage: float = fraction(
        0.25,
        unit="share of the first length",
        doc="Alarm where the mean length falls below this share of that of the first 4 steps. 0: none. Idle where the data wrote "
        "the completions.",
    )
    growth: float = number(
        4.0,
        unit="times the first length",
        doc="Alarm where the mean length rises above so many times that of the first 4 steps. 0: none. Idle where the data "
        "wrote the completions.",
    )
    max_mismatch: float = number(
        0.1,
        unit="nats per token",
        used_when="algorithm.loss_mode!=sft|dpo|ipo|bradley_terry because what the data wrote has no log-probs of an engine",
        doc="Alarm at a larger KL between engine and learner. 0: none.",
    )
    hacking: float = fraction(
        0.5,
        unit="share of the first length",
        doc="Alarm where the reward rises while the mean length falls below this share of that of the first 4 steps, "
        "a sign of reward hacking. 0: none. Idle where the loss reads no reward.",
    )


@dataclass(frozen=True, kw_only=True)
class WatchdogConfig:
    """Limits of a hang. A phase beyond its limit ends the run with exit code 42 and leaves stacks. 0: no limit."""

    dispatch_s: float = number(900.0, unit="seconds", doc="Of one dispatch of the engine.")
    train_s: float = number(
        1800.0, unit="seconds", doc="Of one call of the learner, a weight sync, or host work between two calls."
    )
    reward_s: float = number(3600.0, unit="seconds", doc="Of the wait for the rewards of one group.")
    save_s: float = number(3600.0, unit="seconds", doc="Of one checkpoint.")
    evaluate_s: float = number(14400.0, unit="seconds", used_when=_MEASURED, doc="Of one evaluation.")
    compile_s: float = number(
        7200.0, unit="seconds", doc="Of any of these until the first publish, as programs are compiled until then."
    )

    @property
    def phases(self) -> dict[str, float]:
        """Seconds by phase of the ring."""
        return {
            "gen": self.dispatch_s,
            "host": self.train_s,
            "reward": self.reward_s,
            "save_checkpoint": self.save_s,
            "testing": self.evaluate_s,
        }


@dataclass(frozen=True, kw_only=True)
class LoggerConfig:
    """What the screen shows, and where metrics go beside metrics.jsonl. Each gets the same rows (verl: `trainer.logger`)."""

    console: str = one_of(
        "full|quiet",
        doc="What a run prints. quiet: one line for each step and each evaluation, warnings, and the figures at its end, "
        "without the plan, samples and the folder's contents.",
    )
    tensorboard: bool = any_of_type(False, doc="Whether RUN/tensorboard is written, for `tensorboard --logdir RUN`.")
    wandb: str = one_of(
        "off|offline|online",
        doc="Weights & Biases. offline: into RUN/wandb, without a network, for `wandb sync`. online: sent while the run goes on.",
    )
    project: str = any_of_type("jaxrl_post", used_when="logger.wandb!=off", doc="Project at Weights & Biases.")
    name: str = any_of_type(
        "", used_when="logger.wandb!=off", doc="Name of the run there. Empty: that of the run's folder."
    )

    @property
    def quiet(self) -> bool:
        return self.console == "quiet"
