"""python -m jaxrl_post evaluate --policy POLICY --data DATA [--rewards FUNCTION[,FUNCTION ...]] [...]

Scores a policy: unbiased pass@k for every k up to N, and the mean accuracy with a bootstrap interval, in all and by source.

The JSON is {"policy", "data", "settings", "all", "sources": {SOURCE: ...}}. "all" and each source have: prompts, samples,
avg, avg_interval (95 %, over prompts), pass_at {"1": ..., "N": ...}, reward, length_mean (tokens), clip_ratio and unscored.
Right is an accuracy above 0.5: the reward component "acc", else the reward. A figure over no rollouts is null.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxrl_post import config as configs
from jaxrl_post.commands.arguments import POLICY_FLAGS, Command, sampling_changes
from jaxrl_post.config.command_line import Flag, whole
from jaxrl_post.rewards import NoScores

_FLAGS = (
    *POLICY_FLAGS,
    Flag("--data=DATA", "a JSONL or Parquet file, or task:NAME", required=True),
    Flag(
        "--rewards=FUNCTIONS",
        "import paths package.module:function or file.py:function, with commas between; the run's own",
    ),
    Flag("--samples=N", "rollouts of each prompt; 4", whole(1), 4),
    Flag("--json=FILE", "writes the figures to a file, too"),
)


def _print(flags: argparse.Namespace) -> int:
    configs.refuse_url(flags.json, "--json")
    try:
        told = _evaluated(flags)
    except NoScores as error:
        raise ValueError(str(error)) from error
    if flags.json:
        from jaxrl_post.runs.run_folder import write_json

        write_json(Path(flags.json), told)
    print("\n".join(table(told)))
    return 0


main = Command("evaluate", __doc__, _FLAGS, _print)


def _evaluated(flags: argparse.Namespace) -> dict[str, Any]:
    """Returns what the JSON file holds. The device is not touched before the words of the command line are read."""
    from jaxrl_post.launch.parts import saved_policy, scored

    found = scored.evaluate(
        saved_policy.load(flags.policy, flags.overrides),
        flags.data,
        flags.rewards.split(",") if flags.rewards else (),
        flags.samples,
        sampling=sampling_changes(flags),
        max_tokens=flags.max_tokens,
        seed=flags.seed,
        most=flags.prompts,
    )
    return {"policy": flags.policy, "data": flags.data, **found.to_dict()}


def table(told: Mapping[str, Any]) -> list[str]:
    """Returns the figures as lines: one for all prompts, and one for each source where there are several."""
    rows = {"all": told["all"]} | (told["sources"] if len(told["sources"]) > 1 else {})
    width = max(len(name or "(no source)") for name in rows)
    lines = []
    for name, figures in rows.items():
        low, high = figures["avg_interval"] or (float("nan"), float("nan"))
        lines.append(
            f"{name or '(no source)':<{width}}  {figures['prompts']} prompts x {figures['samples']}  avg@{figures['samples']} "
            f"{_shown(figures['avg'])} [{low:.4f}, {high:.4f}]  length {figures['length_mean']:.1f}  "
            f"cut {figures['clip_ratio']:.3f}  unscored {figures['unscored']}"
        )
        passed = [f"pass@{k} {_shown(value)}" for k, value in figures["pass_at"].items()]
        lines.append(f"{'':<{width}}  {'  '.join(passed)}")
    return lines


def _shown(value: float | None) -> str:
    return "none" if value is None else f"{value:.4f}"
