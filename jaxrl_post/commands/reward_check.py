"""python -m jaxrl_post reward_check --config=FILE [--config.a.b=VALUE ...] [--rows=N]

Runs the configured reward functions on N rows of the training data, in the real pool. Without --rows it takes 16 rows.
Each row gives gold texts: its reference answer in the usual forms. Gold texts of other rows are wrong texts. Scores,
seconds, failures and alarms of each function are printed, and what the functions print. No model is loaded, and nothing
is written.

Exit code 1, with one sentence, where a function is broken:

- it fails, or applies to no row
- it scores right and wrong texts alike
- it scores some gold texts 1 and others not
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import jax

from jaxrl_post import config as configs
from jaxrl_post.launch import command_line, inputs, reward_trial
from jaxrl_post.rewards.printed import Printed

FORMS = ("--config=FILE", command_line.OVERRIDE, "--rows=N", "--help")
_SHOWN = 20  # lines of what functions print


def main(arguments: Sequence[str]) -> int:
    """Prints what every function makes of the rows. Exit code 1 where one is broken."""
    if "--help" in arguments:
        print(str(__doc__).strip())
        return 0
    try:
        with tempfile.TemporaryDirectory() as folder:
            trials = _tried(arguments, Path(folder) / "rewards.log")
    except (ValueError, OSError) as error:
        return _sorry(str(error))
    broken = [trial for trial in trials if trial.broken]
    return _sorry(f"reward function {broken[0].function!r}: {broken[0].broken[0]}") if broken else 0


def _tried(arguments: Sequence[str], log: Path) -> list[reward_trial.Trial]:
    given = command_line.read(arguments, FORMS)
    named = dict(given)
    rows = named.get("--rows", "16")
    if not rows.isdigit() or int(rows) < 1:
        raise ValueError(f"--rows={rows} must be a whole number above 0")
    if "--config" not in named:
        raise ValueError("reward_check needs a config: write --config=FILE")
    overrides = [value for name, value in given if name == command_line.OVERRIDE]
    config = configs.resolve(configs.load(named["--config"]), overrides, platform=jax.default_backend())
    start = inputs.gather(config)
    prompts = list(itertools.islice(start.train, int(rows)))
    print(f"{len(prompts)} rows of {config.data.train}")
    trials = []
    for function in config.reward.functions:
        trials.append(reward_trial.tried(config, start, function, prompts, Printed(log)))
        print(reward_trial.text(trials[-1]), flush=True)
    with contextlib.suppress(FileNotFoundError):
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        print("\n".join(["printed by the functions:", *(f"  {line}" for line in lines[:_SHOWN])]))
        print(f"  ... and {len(lines) - _SHOWN} more lines" if len(lines) > _SHOWN else "", end="")
    return trials


def _sorry(sentence: str) -> int:
    print(f"error: {' '.join(sentence.split())}", file=sys.stderr)
    return 1
