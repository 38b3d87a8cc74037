"""Environments: what speaks between the turns of a policy, and scores the conversation.

An environment is a class, or a function without required arguments that returns an object, with two methods:

    reset(row) -> messages
    step(messages) -> (messages, reward, done, info)

- `row` holds the columns of a data row: id, prompt, answer, source, and its other columns.
- `reset` returns the messages that the conversation begins with. The same row always gives the same messages.
- `step` gets the whole conversation, whose last message is the policy's. It returns the messages that follow, the reward of
  this turn, whether the conversation is over, and a mapping from names to numbers.
- An attribute `tools` lists JSON schemas of functions, which the chat template shows to the policy.

HARNESS is the name of an environment without a class: a program outside plays it over HTTP (harness.py, sessions.py).

Invariant: what `step` returns follows from the row and the messages so far. So a conversation can be played again in a
fresh process, after a kill or a resume.
"""

from __future__ import annotations

import difflib

_HERE = "jaxrl_post.rewards.environments"
BUILT_IN = {
    "calculator": f"{_HERE}.calculator:Calculator",
    "calculator_tool": f"{_HERE}.calculator:CalculatorTool",
    "code": f"{_HERE}.code_tool:CodeTool",
    "grid_world": f"{_HERE}.grid_world:GridWorld",
    "guessing": f"{_HERE}.guessing:Guessing",
    "verifiers": f"{_HERE}.verifiers:Adapter",
}
HARNESS = "harness"


def path_of(name: str) -> str:
    """Returns the import path of a built-in environment, or the path itself.

    Raises:
      ValueError: neither a built-in name nor `package.module:name` nor `file.py:name`.
    """
    if ":" in name:
        return name
    if name not in BUILT_IN:
        names = [*BUILT_IN, HARNESS]
        near = difflib.get_close_matches(name, names, n=1, cutoff=0.0)
        raise ValueError(
            f"environment.name={name!r} is neither a path package.module:name or file.py:name nor one of "
            f"{', '.join(names)}; nearest is {near[0]!r}"
        )
    return BUILT_IN[name]
