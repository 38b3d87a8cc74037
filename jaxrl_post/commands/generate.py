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

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrl_post import config as configs
from jaxrl_post.commands.values import read
from jaxrl_post.launch.command_line import OVERRIDE

KNOWN = (
    "--policy POLICY",
    "--prompt TEXT",
    "--data DATA",
    "--prompts N",
    "--n N",
    "--temperature T",
    "--top-p P",
    "--top-k K",
    "--max-tokens N",
    "--seed N",
    "--json FILE",
    OVERRIDE,
    "--help",
)
NUMBERS = {
    "--prompts": int,
    "--n": int,
    "--temperature": float,
    "--top-p": float,
    "--top-k": int,
    "--max-tokens": int,
    "--seed": int,
}

LAW = {"temperature": "--temperature", "top_p": "--top-p", "top_k": "--top-k"}


def main(arguments: Sequence[str]) -> int:
    """Prints rollouts. Exit code 1, with one sentence, where something given is wrong."""
    try:
        given, overrides = read("generate", arguments, KNOWN, NUMBERS, needed=("--policy",), several=("--prompt",))
        if "--help" in given:
            print(str(__doc__).strip())
            return 0
        configs.refuse_url(given.get("--json", ""), "--json")
        if ("--prompt" in given) == ("--data" in given):
            raise ValueError("generate: give prompts by --prompt TEXT, or a file or task by --data DATA")
        rows = list(_generated(given, overrides))
        if "--json" in given:
            part = Path(f"{given['--json']}.part")
            part.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
            os.replace(part, given["--json"])
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    for row in rows:
        print(f"{row['prompt']!r} #{row['sample']} ({row['finish']}, {len(row['tokens'])} tokens)\n{row['text']}\n")
    return 0


def _generated(given: Mapping[str, Any], overrides: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yields the rows of the JSON file."""
    from jaxrl_post.launch import saved_policy, scored

    policy, n, seed = saved_policy.load(given["--policy"], overrides), given.get("--n", 1), given.get("--seed", 0)
    if "--prompt" in given:
        prompts = policy.prompts(given["--prompt"])
    else:
        prompts = scored.prompts_of(policy, given["--data"], seed, given.get("--prompts", 0), None)
    law = {name: given[flag] for name, flag in LAW.items() if flag in given}
    rollouts = policy.sampled(prompts, n, law, seed, given.get("--max-tokens", 0))
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
