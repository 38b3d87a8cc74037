"""A command beside a run and a simulation: its flags, its work, and its mistakes as one sentence."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxrl_post.config.command_line import OVERRIDE, Arguments, Flag, number, whole
from jaxrl_post.runs.buckets.store import Unreachable

POLICY = "a Hugging Face directory, a llama2.c file, RUN for the policy that a run ended with, or RUN@STEP"
SAMPLING_FLAGS = (
    Flag("--temperature=T", "0 is greedy; the policy's own, which is 1 without a run", number, None),
    Flag("--top-p=P", "what may be sampled; the policy's own", number, None),
    Flag("--top-k=K", "what may be sampled; the policy's own", whole(0), None),
    Flag("--seed=N", "of the noise, and of the prompts of a task; 0", whole(0), 0),
)
POLICY_FLAGS = (  # of a command that samples a policy
    Flag("--policy=POLICY", POLICY, required=True),
    *SAMPLING_FLAGS,
    Flag("--max-tokens=N", "of a rollout; the policy's own", whole(1), 0),
    Flag("--prompts=N", "of DATA at most so many; all of a file, 256 of a task", whole(1), 0),
    Flag(OVERRIDE, "an option of the engine or the data, for example --config.engine.max_length=4096"),
)


@dataclass(frozen=True)
class Command:
    """One command. Called with its words it does its work and returns the exit code.

    - `name`, `text`, `flags`: as of Arguments.
    - `work`: returns the exit code for flags that were read.
    """

    name: str
    text: str | None
    flags: Sequence[Flag]
    work: Callable[[Namespace], int]

    def read(self, arguments: Sequence[str]) -> Namespace:
        """Returns the flags by name. A mistake is a ValueError."""
        return Arguments(self.name, str(self.text), self.flags).read(arguments)

    def __call__(self, arguments: Sequence[str]) -> int:
        """Returns 1 after one sentence where something given is wrong, or a bucket does not answer.

        A reader that closes its pipe has seen enough: that is no error.
        """
        try:
            return self.work(self.read(arguments))
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nothing is left for the flush at the exit
        except (ValueError, OSError, Unreachable) as error:
            print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
            return 1
        return 0


def sampling_changes(flags: Namespace) -> dict[str, float]:
    """Returns the changes that SAMPLING_FLAGS make to a policy's sampling parameters."""
    given = {name: getattr(flags, name) for name in ("temperature", "top_p", "top_k")}
    return {name: value for name, value in given.items() if value is not None}
