"""The words of a run's rollouts: the tokenizer that the run used, found again."""

from __future__ import annotations

from pathlib import Path

from jaxrl_post.data import tokenizer
from jaxrl_post.data.continuations import Decode
from jaxrl_post.telemetry.run_logs import RunLogs


def decoder(logs: RunLogs) -> Decode:
    """Returns what turns token ids into text, by the tokenizer beside RUN/policy, else by that of the run's config.

    Raises:
      ValueError: there is no tokenizer in either place.
    """
    policy, model = logs.folder / "policy", logs.kept.get("model", {})
    if (policy / "tokenizer.json").is_file():
        place = policy
    elif len(beside := sorted(policy.glob("tok*.bin"))) == 1:
        place = beside[0]
    elif model.get("tokenizer"):
        place = Path(model["tokenizer"])
    elif model.get("path"):
        place = tokenizer.beside(model["path"])
    else:
        raise ValueError(f"{logs.folder}: config.json names no model and no tokenizer, so that no text can be read")
    try:
        return tokenizer.load(place).decode
    except OSError as error:
        raise ValueError(f"the tokenizer {place} of {logs.folder} cannot be read: {error.strerror}") from error
