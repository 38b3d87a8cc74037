"""python -m jaxrl_post replay RUN --batch=STEP

Repeats the gradient of a skipped optimizer step from its batch, RUN/skipped/step_NNNNNN.npz, and says what in it is not
finite. The weights are those of the newest whole checkpoint before the step, or those that the run began with.
Nothing in the run's folder is changed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxrl_post.config import refuse_url
from jaxrl_post.launch import skipped_batch


class _Words(argparse.ArgumentParser):
    def error(self, message):
        raise ValueError(f"replay: {message}; write python -m jaxrl_post replay RUN --batch=STEP")


def main(arguments: Sequence[str]) -> int:
    """Prints what the batch does. Exit code 1, with one sentence, where the run or the batch cannot be read."""
    parser = _Words(prog="python -m jaxrl_post replay", description=__doc__)
    parser.add_argument("run", help="the folder of a run")
    parser.add_argument("--batch", type=int, required=True, help="the optimizer step that was skipped")
    try:
        flags = parser.parse_args(arguments)
        refuse_url(flags.run, "RUN")
        learner, groups, at = skipped_batch.opened(Path(flags.run), flags.batch)
        print("\n".join(skipped_batch.findings(learner, groups, flags.batch, at)))
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    return 0
