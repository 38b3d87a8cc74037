"""python -m jaxrl_post COMMAND: a run, a simulation, and the commands beside them."""

from __future__ import annotations

import argparse
import difflib
import importlib
import sys
from collections.abc import Sequence

from jaxrl_post.config.command_line import Arguments
from jaxrl_post.launch.own_process import begun, ended
from jaxrl_post.ring.json_text import shown

HELP = """
python -m jaxrl_post COMMAND ...

python -m jaxrl_post COMMAND --help says more about each.
"""
COMMANDS = {  # the module whose `main` it is, and what it does
    "train": ("jaxrl_post.main", "a run; the same as python -m jaxrl_post.main"),
    "simulate": ("jaxrl_post.simulate.simulation", "a run without a model; the same as python -m jaxrl_post.simulate"),
    "options": ("jaxrl_post.commands.options", "what a config may say"),
    "evaluate": (
        "jaxrl_post.commands.evaluate",
        "a policy or a saved step on data: pass@k and the mean with its interval",
    ),
    "generate": ("jaxrl_post.commands.generate", "rollouts of a policy or a saved step"),
    "serve": ("jaxrl_post.commands.serve", "a policy over HTTP, in OpenAI's form"),
    "export": (
        "jaxrl_post.commands.export",
        "a policy or a saved step as a directory that Hugging Face tools load, or its adapter for PEFT",
    ),
    "rollouts": ("jaxrl_post.commands.rollouts", "rollouts of a run as text, JSON or Parquet"),
    "compare": ("jaxrl_post.commands.compare", "two runs: options, curves, and rewards pair by pair"),
    "replay": ("jaxrl_post.commands.replay", "a rollout again, bit for bit, or the gradient of a skipped step"),
    "report": ("jaxrl_post.commands.report", "one page on one or several runs, for a browser"),
    "fetch": ("jaxrl_post.commands.fetch", "the run of a bucket as a local folder"),
    "watch": ("jaxrl_post.commands.watch", "a run while it goes on, in the terminal"),
    "reward_check": (
        "jaxrl_post.commands.reward_check",
        "the reward functions on rows of the data and on sampled rollouts",
    ),
    "launch": ("jaxrl_post.commands.launch", "a run on several hosts, from one command"),
    "jetstream": ("jaxrl_post.commands.jetstream", "a policy over gRPC, by the orchestrator of google-jetstream"),
    "tinker": ("jaxrl_post.commands.tinker", "a policy that clients of the Tinker SDK train and sample"),
}


def tree() -> Arguments:
    """Returns the parser of all commands. The flags of one are added by its own module."""
    parser = Arguments("", HELP, ())
    commands = parser.add_subparsers(title="commands", metavar="COMMAND [FLAGS]", parser_class=argparse.ArgumentParser)
    for name, (_, text) in COMMANDS.items():
        commands.add_parser(name, help=text)
    return parser


def main(arguments: Sequence[str]) -> int:
    """Runs a command and returns its exit code. Only the command's own modules are imported."""
    name, *rest = arguments or ["--help"]
    if name in ("--help", "-h"):
        print(tree().format_help().strip())
        return 0
    if name not in COMMANDS:
        near = difflib.get_close_matches(name[:100], COMMANDS, n=1, cutoff=0.0)
        print(
            f"error: unknown command {shown(name)}; nearest is {near[0]!r}, all are {', '.join(COMMANDS)}",
            file=sys.stderr,
        )
        return 1
    return importlib.import_module(COMMANDS[name][0]).main(rest)


if __name__ == "__main__":
    begun()
    sys.exit(ended(main(sys.argv[1:])))
