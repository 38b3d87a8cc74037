"""python -m jaxrl_post COMMAND ...

train      a run: --config=FILE [--config.a.b=VALUE ...]; the same as python -m jaxrl_post.main
simulate   a run without a model: --config=configs/sim/FILE.py; the same as python -m jaxrl_post.simulate
options    what a config may say: options [SECTION]
evaluate   a policy or a saved step on data: pass@k and the mean with its interval
generate   rollouts of a policy or a saved step
serve      a policy over HTTP, in OpenAI's form: serve --model=POLICY | --run=RUN
export     a policy or a saved step as a directory that Hugging Face tools load, or its adapter for PEFT
rollouts   rollouts of a run as text, JSON or Parquet: rollouts RUN [--step=A:B ...]
compare    two runs: options, curves, and rewards pair by pair: compare A B
replay     a rollout again, bit for bit, or the gradient of a skipped step: replay RUN --rollout=ID | --batch=STEP
report     one page on one or several runs, for a browser: report RUN [RUN ...] [--out=FILE]
fetch      the run of a bucket as a local folder: fetch gs://BUCKET/NAME FOLDER
watch      a run while it goes on, in the terminal: watch RUN [--once]
reward_check  the reward functions on rows of the data and on sampled rollouts: --config=FILE [--rows=N]
launch     a run on several hosts, from one command: --target=TARGET --config=FILE --run-dir=FOLDER [--slice=NAME]
jetstream  a policy over gRPC, by the orchestrator of google-jetstream: --policy=POLICY [--port=PORT]
tinker     a policy that clients of the Tinker SDK train and sample: --model=POLICY [--port=PORT]

python -m jaxrl_post COMMAND --help says more about each.
"""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Sequence

from jaxrl_post.json_text import shown
from jaxrl_post.launch.ended import begun, ended

COMMANDS = {
    "train": "jaxrl_post.main",
    "simulate": "jaxrl_post.simulate",
    "options": "jaxrl_post.commands.options",
    "evaluate": "jaxrl_post.commands.evaluate",
    "generate": "jaxrl_post.commands.generate",
    "serve": "jaxrl_post.commands.serve",
    "export": "jaxrl_post.commands.export",
    "rollouts": "jaxrl_post.commands.rollouts",
    "compare": "jaxrl_post.commands.compare",
    "replay": "jaxrl_post.commands.replay",
    "report": "jaxrl_post.commands.report",
    "fetch": "jaxrl_post.commands.fetch",
    "watch": "jaxrl_post.commands.watch",
    "reward_check": "jaxrl_post.commands.reward_check",
    "launch": "jaxrl_post.commands.launch",
    "jetstream": "jaxrl_post.commands.jetstream",
    "tinker": "jaxrl_post.commands.tinker",
}


def main(arguments: Sequence[str]) -> int:
    """Runs a command and returns its exit code. Only the command's own modules are imported."""
    if not arguments or arguments[0] in ("--help", "-h"):
        print(str(__doc__).strip())
        return 0
    name, *rest = arguments
    if name not in COMMANDS:
        near = difflib.get_close_matches(name[:100], COMMANDS, n=1, cutoff=0.0)
        print(
            f"error: unknown command {shown(name)}; nearest is {near[0]!r}, all are {', '.join(COMMANDS)}",
            file=sys.stderr,
        )
        return 1
    return importlib.import_module(COMMANDS[name]).main(rest)


if __name__ == "__main__":
    begun()
    sys.exit(ended(main(sys.argv[1:])))
