"""python -m jaxrl_post generate --policy POLICY (--prompt TEXT | --data DATA) [--n N] [...]

Samples a policy and prints each rollout. A value stands behind a space or behind "=".

--policy POLICY        a Hugging Face directory, a llama2.c file, RUN for the policy that a run ended with, or RUN@STEP
--prompt TEXT          a prompt; may be given several times
--data DATA            prompts of a JSONL or Parquet file, or of task:NAME
--prompts N            of DATA at most so many; all of a file, 256 of a task
--n N                  rollouts of each prompt; 1
--temperature T        0 is greedy; the policy's own, which is 1 without a run
--top-p P, --top-k K   what may be sampled; the policy's own
--max-tokens N         of a rollout; the policy's own
--seed N               of the noise, and of the prompts of a task; 0
--json FILE            writes one JSON object for each rollout to a file, too
--config.a.b=VALUE     an option of the engine or the data, for example --config.engine.max_length=4096

A JSON object has: prompt (a text, or messages), prompt_id, sample, text, tokens, logprobs (nats) and finish ("eos", "stop" or
"length").
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from typing import Any

from jaxrl_post import config as configs
from jaxrl_post import written
from jaxrl_post.commands.arguments import Arguments, answered, law, sampled, whole


def main(arguments: Sequence[str]) -> int:
    """Prints rollouts. Exit code 1, with one sentence, where something given is wrong."""
    return answered(lambda: _print(_read(arguments)))


def _read(arguments: Sequence[str]) -> argparse.Namespace:
    words = sampled(Arguments("generate", str(__doc__), overrides=True))
    words.add_argument("--prompt", action="append", default=[], help=argparse.SUPPRESS)
    words.add_argument("--data", default="", help=argparse.SUPPRESS)
    words.add_argument("--n", type=whole(1), default=1, help=argparse.SUPPRESS)
    flags = words.read(arguments)
    if bool(flags.prompt) == bool(flags.data):
        raise ValueError("generate: give prompts by --prompt TEXT, or a file or task by --data DATA")
    return flags


def _print(flags: argparse.Namespace) -> int:
    configs.refuse_url(flags.json, "--json")
    rows = list(_generated(flags))
    if flags.json:
        written.whole(flags.json, "".join(json.dumps(row) + "\n" for row in rows))
    for row in rows:
        print(f"{row['prompt']!r} #{row['sample']} ({row['finish']}, {len(row['tokens'])} tokens)\n{row['text']}\n")
    return 0


def _generated(flags: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields the rows of the JSON file."""
    from jaxrl_post.launch import saved_policy, scored

    policy = saved_policy.load(flags.policy, flags.overrides)
    asked = policy.prompts(flags.prompt)
    prompts = asked or scored.prompts_of(policy, flags.data, flags.seed, flags.prompts, None)
    rollouts = policy.sampled(prompts, flags.n, law(flags), flags.seed, flags.max_tokens)
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
