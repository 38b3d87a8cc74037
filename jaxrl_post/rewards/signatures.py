"""The two signatures of reward functions, distinguished by the names of their arguments.

verl's is (data_source, solution_str, ground_truth, extra_info) -> number or dict. extra_info holds the prompt's `extra`, and
under "rollout":

- "tokens": its length; "finish": "eos", "stop" or "length"
- "limit_s": CPU seconds; "sandbox": the level for judged programs
- "workers_per_core": reward processes for each processor
- "prompt_end": the text of the prompt's last tokens, special ones included, such as a "<think>" that the template opens

TRL's is (prompts, completions, completion_ids, **columns) -> list of number or None (rewards/batched.py).

- It is called once for a group: every list, those of columns too, holds one entry for each of its rollouts.
- A prompt of messages comes as messages, and so does its completion. A text comes as a text.
- Columns are the prompt's `extra`, its ground truth (`ground_truth` and `answer`), `data_source` and `rollout`.

Functions of both signatures get a ground truth as it stands in the file: a text, a number, a list or an object.

- None means that the function does not apply: it is left out of the sum. Where no function applies, the rollout is
  unscored.
- TRL's log_metric and log_extra are given. Its trainer_state is not.
- No column may have the name of an argument that every call gives.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence

from jaxrl_post.data.continuations import Decode
from jaxrl_post.rewards.batched import GIVEN, LOGS, STATE
from jaxrl_post.ring.types import Prompt, Rollout, missing_value

_PROMPT_END = 24  # tokens; "<think>" and a newline are 8 of a tokenizer of characters


def about(rollout: Rollout, limit_s: float, judging: Mapping, decode: Decode) -> dict:
    """Describes a rollout to a reward function.

    `limit_s`: CPU seconds that a judged program may take. `judging`: "sandbox" and "workers_per_core".
    """
    end = decode(rollout.prompt.tokens[-_PROMPT_END:], skip_special=False)
    return {"tokens": len(rollout), "finish": rollout.finish.value, "prompt_end": end, "limit_s": limit_s, **judging}


def verl(rollout: Rollout, text: str, about: dict) -> list:
    """Returns verl's arguments: data_source, solution_str, ground_truth, extra_info."""
    prompt = rollout.prompt
    return [prompt.source, text, prompt.truth, dict(prompt.extra) | {"rollout": about}]


def trl(rollouts: Sequence[Rollout], texts: Sequence[str], abouts: Sequence[dict], decode: Decode) -> dict:
    """Returns TRL's arguments for the rollouts of a group: every value is a list with one entry for each."""
    prompt, count = rollouts[0].prompt, len(rollouts)
    said = [[{"role": "assistant", "content": text}] if prompt.messages else text for text in texts]
    asked = [dict(message) for message in prompt.messages] or decode(prompt.tokens)
    ids = [rollout.tokens.tolist() for rollout in rollouts]
    return {name: [value] * count for name, value in columns(prompt).items()} | {
        "prompts": [asked] * count,
        "completions": said,
        "completion_ids": ids,
        "completions_ids": ids,
        "rollout": list(abouts),
    }


def columns(prompt: Prompt) -> dict:
    """Returns the columns of a prompt that a function of TRL's signature may name."""
    return {"ground_truth": prompt.truth, "answer": prompt.truth, "data_source": prompt.source} | dict(prompt.extra)


def check(
    prompt: Prompt,
    function: str,
    needs: Sequence[str],
    truths: Sequence[str],
    instead: Sequence[str] = (),
    reader: str = "",
) -> None:
    """Refuses a prompt that lacks what a function needs, or whose ground truth scores nothing.

    Args:
      needs: columns that the prompt must have.
      truths: columns that must hold a ground truth. "" stands for the prompt's own.
      instead: columns of which one may stand for the prompt's own.
      reader: the module that says why a ground truth scores nothing (rewards/worker.py); or none.

    Raises:
      ValueError: one sentence, with the prompt's file and line where it has one.
    """
    known = columns(prompt)
    missing = [need for need in needs if need not in known]
    where = f"prompt {prompt.id!r}" + (f" ({prompt.where})" if prompt.where else "")
    if missing:
        raise ValueError(
            f"reward function {function!r} needs the column {missing[0]!r}, which {where} has not; its "
            f"columns are {', '.join(known)}"
        )
    for column in truths:
        own = column in prompt.extra
        lacks = (value := missing_value(prompt.extra[column])) and f"column {column!r} {value}" if own else prompt.lacks
        given = [prompt.extra.get(name) for name in instead] if column == "" else []
        if lacks and not any(value and not missing_value(value) for value in given):
            remedy = f", or the column {' or '.join(instead)}," if instead else ","
            raise ValueError(
                f"data: {prompt.where or where}: {lacks}, but reward function {function!r} needs a ground truth; give "
                f"one{remedy} or set the function's attribute needs_truth = False"
            )
    if reader and (why := importlib.import_module(reader).refusal(prompt.truth, prompt.extra)):
        raise ValueError(
            f"data: {prompt.where or where}: reward function {function!r} cannot score its rollouts: {why}"
        )


def check_names(prompt: Prompt, signature: str) -> None:
    """Refuses a prompt with a column that a call would overwrite.

    Raises:
      ValueError: one sentence, with the prompt's file and line where it has one.
    """
    taken = [name for name in ((*GIVEN, *LOGS, STATE) if signature == "trl" else ("rollout",)) if name in prompt.extra]
    if taken:
        raise ValueError(
            f"data: {prompt.where or f'prompt {prompt.id!r}'}: column {taken[0]!r} has the name of an argument that reward "
            "functions get; rename the column"
        )


def names(functions: Sequence[str]) -> tuple[str, ...]:
    """Returns the prefix of each function's components: its name, or its whole path where two names are equal."""
    short = [path.rpartition(":")[2] for path in functions]
    return tuple(name if short.count(name) == 1 else path for name, path in zip(short, functions, strict=True))
