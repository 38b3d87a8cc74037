"""python -m jaxrl_post generate --policy POLICY (--prompt TEXT | --data DATA) [--n N] [...]

Samples a policy and prints each rollout.

A JSON object has: prompt (a text, or messages), prompt_id, sample, text, tokens, logprobs (nats) and finish ("eos", "stop" or
"length").
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import Any

from jaxrl_post import config as configs
from jaxrl_post.commands.arguments import POLICY_FLAGS, Command, sampling_changes
from jaxrl_post.config.command_line import Flag, whole
from jaxrl_post.ring import written

_FLAGS = (
    *POLICY_FLAGS,
    Flag("--prompt=TEXT ...", "a prompt; may be given several times"),
    Flag("--data=DATA", "prompts of a JSONL or Parquet file, or of task:NAME"),
    Flag("--n=N", "rollouts of each prompt; 1", whole(1), 1),
    Flag("--json=FILE", "writes one JSON object for each rollout to a file, too"),
)


def _print(flags: argparse.Namespace) -> int:
    if bool(flags.prompt) == bool(flags.data):
        raise ValueError("generate: give prompts by --prompt TEXT, or a file or task by --data DATA")
    configs.refuse_url(flags.json, "--json")
    rows = list(_generated(flags))
    if flags.json:
        written.whole(flags.json, "".join(json.dumps(row) + "\n" for row in rows))
    for row in rows:
        print(f"{row['prompt']!r} #{row['sample']} ({row['finish']}, {len(row['tokens'])} tokens)\n{row['text']}\n")
    return 0


main = Command("generate", __doc__, _FLAGS, _print)


def _generated(flags: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields the rows of the JSON file."""
    from jaxrl_post.launch.parts import saved_policy, scored

    policy = saved_policy.load(flags.policy, flags.overrides)
    asked = policy.prompts(flags.prompt)
    prompts = asked or scored.prompts_of(policy, flags.data, flags.seed, flags.prompts, None)
    rollouts = policy.sampled(prompts, flags.n, sampling_changes(flags), flags.seed, flags.max_tokens)
    for prompt, many in zip(prompts, rollouts):
        for sample, one in enumerate(many):
            yield {
                "prompt": [dict(message) for message in prompt.messages] or policy.tokenizer.decode(prompt.tokens),
                "prompt_id": prompt.id,
                "sample": sample,
                "text": one.text,
                "tokens": one.tokens.tolist(),
                "logprobs": one.logprobs.tolist(),
                "finish": one.finish,
            }
