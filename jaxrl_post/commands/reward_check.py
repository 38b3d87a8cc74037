"""python -m jaxrl_post reward_check --config=FILE [--config.a.b=VALUE ...] [--rows=N] [--sampled=N]

Runs the configured reward functions on rows of the training data, in the real pool. Scores, seconds, failures and alarms
of each function are printed, and what the functions print. Nothing is written.

Each row gives gold texts: its reference answer in the usual forms. Gold texts of other rows are wrong texts.

Exit code 1, with one sentence, where a function is broken:

- it fails, or applies to no row
- it scores right and wrong texts alike
- it scores some gold texts 1 and others not
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from collections.abc import Sequence
from pathlib import Path

from jaxrl_post import config as configs
from jaxrl_post.commands.arguments import Command
from jaxrl_post.config.command_line import OVERRIDE, Flag, whole
from jaxrl_post.ring.json_text import cut
from jaxrl_post.ring.types import Prompt

_SHOWN, _WIDTH = 20, 200  # lines of what functions print, and characters of a line

_FLAGS = (
    Flag("--config=FILE", "the config of a run", required=True),
    Flag(OVERRIDE, "overrides an option of the config"),
    Flag("--rows=N", "the first N rows; 16", whole(1), 16),
    Flag("--sampled=N", "rollouts that the policy samples for each row; 4. With 0 no weights are loaded", whole(0), 4),
)


def _check(flags: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory() as folder:
        trials = _tried(flags, Path(folder) / "rewards.log")
    broken = [trial for trial in trials if trial.broken]
    if broken:
        raise ValueError(f"reward function {broken[0].function!r}: {broken[0].broken[0]}")
    return 0


main = Command("reward_check", __doc__, _FLAGS, _check)


def _tried(flags: argparse.Namespace, log: Path) -> list:
    """Tries each function and prints its Trial. jax is imported once the command line is read."""
    import jax

    from jaxrl_post.launch.parts import inputs, reward_trial
    from jaxrl_post.rewards.printed import Printed

    config = configs.resolve(configs.load(flags.config), flags.overrides, platform=jax.default_backend())
    if config.environment.name:
        raise ValueError(
            f"reward_check: {flags.config} has environment.name={config.environment.name!r}, whose conversations "
            "are scored by the environment; only reward.functions are tried"
        )
    start = inputs.gather(config)
    prompts = list(itertools.islice(start.train, flags.rows))
    drawn = _sampled(config, prompts, flags.sampled) if flags.sampled else {}
    print(f"{len(prompts)} rows of {config.data.train}")
    trials = []
    for function in config.reward.functions:
        trials.append(reward_trial.tried(config, start, function, prompts, Printed(log), drawn))
        first = not any(trial.broken for trial in trials[:-1])
        print(reward_trial.text(trials[-1], last=first), flush=True)
    _show(log)
    return trials


def _show(log: Path) -> None:
    """Prints the first lines of what functions have printed, long ones cut."""
    if not log.is_file():
        return
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    print("\n".join(["printed by the functions:", *(f"  {cut(line, _WIDTH)}" for line in lines[:_SHOWN])]))
    print(f"  ... and {len(lines) - _SHOWN} more lines" if len(lines) > _SHOWN else "", end="")


def _sampled(config: configs.Config, prompts: Sequence[Prompt], n: int) -> dict[str, list[str]]:
    """Returns texts that the policy samples, by the id of their prompt."""
    from jaxrl_post.launch.parts import inputs
    from jaxrl_post.launch.parts.policy import Policy

    rollouts = Policy(config, inputs.policy(config)).sampled(prompts, n, None, config.seed, 0)
    return {prompt.id: [one.text for one in many] for prompt, many in zip(prompts, rollouts)}
