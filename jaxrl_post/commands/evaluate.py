"""python -m jaxrl_post evaluate --policy POLICY --data DATA [--rewards FUNCTION[,FUNCTION ...]] [...]

Scores a policy: unbiased pass@k for every k up to N, and the mean accuracy with a bootstrap interval, in all and by source.
A value stands behind a space or behind "=".

--policy POLICY        a Hugging Face directory, a llama2.c file, RUN for the policy that a run ended with, or RUN@STEP
--data DATA            a JSONL or Parquet file, or task:NAME
--rewards FUNCTIONS    import paths package.module:function or file.py:function, with commas between; the run's own
--samples N            rollouts of each prompt; 4
--temperature T        0 is greedy; the policy's own, which is 1 without a run
--top-p P, --top-k K   what may be sampled; the policy's own
--max-tokens N         of a rollout; the policy's own
--seed N               of the noise, and of the prompts of a task; 0
--prompts N            at most so many; all of a file, 256 of a task
--json FILE            writes the figures to a file, too
--config.a.b=VALUE     an option of the engine or the data, for example --config.engine.max_length=4096

The JSON is {"policy", "data", "settings", "all", "sources": {SOURCE: ...}}. "all" and each source have: prompts, samples,
avg, avg_interval (95 %, over prompts), pass_at {"1": ..., "N": ...}, reward, length_mean (tokens), clip_ratio and unscored.
Right is an accuracy above 0.5: the reward component "acc", else the reward. A figure over no rollouts is null.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrl_post import config as configs
from jaxrl_post.commands.arguments import Arguments, answered, law, sampled, whole
from jaxrl_post.rewards import NoScores


def main(arguments: Sequence[str]) -> int:
    """Prints the figures. Exit code 1, with one sentence, where something given is wrong or nothing could be scored."""
    return answered(lambda: _print(_read(arguments)), NoScores)


def _read(arguments: Sequence[str]) -> argparse.Namespace:
    words = sampled(Arguments("evaluate", str(__doc__), overrides=True))
    words.add_argument("--data", required=True, help=argparse.SUPPRESS)
    words.add_argument("--rewards", default="", help=argparse.SUPPRESS)
    words.add_argument("--samples", type=whole(1), default=4, help=argparse.SUPPRESS)
    return words.read(arguments)


def _print(flags: argparse.Namespace) -> int:
    configs.refuse_url(flags.json, "--json")
    told = _evaluated(flags)
    if flags.json:
        from jaxrl_post.launch.run_folder import write_json

        write_json(Path(flags.json), told)
    print("\n".join(table(told)))
    return 0


def _evaluated(flags: argparse.Namespace) -> dict[str, Any]:
    """Returns what the JSON file holds. The device is not touched before the words of the command line are read."""
    from jaxrl_post.launch import saved_policy, scored

    found = scored.evaluate(
        saved_policy.load(flags.policy, flags.overrides),
        flags.data,
        flags.rewards.split(",") if flags.rewards else (),
        flags.samples,
        sampling=law(flags),
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
