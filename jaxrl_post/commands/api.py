"""jaxrl_post.train, .load and .evaluate: the parts of the commands, for a program or a notebook.

A run here is the run of `python -m jaxrl_post.main`: the same parts, the same loop, the same folder. A mistake raises
ValueError with the sentence that the command would print. What was set for the run is set back when it has ended.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrl_post import config as configs
from jaxrl_post.launch import compile_guard
from jaxrl_post.launch.assemble import begin
from jaxrl_post.launch.parts import scored, second_models
from jaxrl_post.launch.parts.policy import Policy
from jaxrl_post.launch.parts.python_inputs import OWN, PythonInputs, listed_rows
from jaxrl_post.launch.parts.saved_policy import load
from jaxrl_post.launch.parts.scored import Scored
from jaxrl_post.launch.stop_signal import Stopped
from jaxrl_post.main import leave, run_training
from jaxrl_post.rewards.carried import carried, several
from jaxrl_post.ring.types import Sampling
from jaxrl_post.runs import attempts
from jaxrl_post.runs.trained import Trained
from jaxrl_post.serve.agents import endpoint

__all__ = ["evaluate", "load", "train"]

Rows = str | Path | Sequence[Mapping]  # a file, task:NAME, or rows as dicts


def train(
    config: Any,
    rewards: Callable | str | Sequence[Callable | str] = (),
    data: Rows | None = None,
    callbacks: Callable[[dict], object] | Sequence[Callable[[dict], object]] = (),
    *,
    held_out: Rows | None = None,
    overrides: Sequence[str] = (),
    folder: str | Path = "",
    resume: bool = False,
    **options: Any,
) -> Trained:
    """Trains a policy and returns what the run left.

    Args:
      config: the path of a config file, the result of `jaxrl_post.config.default()` with values assigned, or nested dicts.
      rewards: functions of verl's or TRL's signature, or their import paths; one may stand alone. Empty: reward.functions
        of the config.
      data: training rows; None: data.train of the config. Rows are dicts with the columns of a data file.
        Evaluation is then off, unless `held_out` or eval.data says on what.
      callbacks: called with each row of metrics as a dict: at every commit, and after every evaluation. One may stand alone.
      held_out: rows of evaluation; None: eval.data of the config.
      overrides: options as `a.b=value`, as on the command line. They come last.
      folder: of the run, or SCHEME://BUCKET/NAME; must be new or empty, or hold the run to resume. Empty: a new one below run_dir.
      resume: goes on from the newest checkpoint in `folder`, if there is one. Rewards and rows must be the same.
      options: options of the config as keywords, with "__" for each dot: optimizer__lr=1e-4.

    Raises:
      ValueError: a mistake in config, data or rewards, or a folder that does not fit. No new folder is left.
      NoScores, NoGroups: no rollout of the first round could be scored, or filters leave no group.
      SaveFailed: saves fail again and again, or the last one did. After that one the policy is there.
      KeyboardInterrupt: a signal ended the run, after a checkpoint where one may be saved.
      Unreachable, Behind, Taken: a run's bucket did not answer, has not all of the run, or is written by another process.
    """
    if resume and not folder:
        raise ValueError("train: resume=True says not which run: give its folder, too")
    values = _values(config)
    sources = _data(values, data, held_out)
    configs.assign(values, options)
    code: Mapping[str, str] = {}
    digests: Mapping[str, str] = {}
    if rewards:
        names, code, digests = carried(rewards, OWN)
        configs.assign(values, {"reward.functions": names})
    handed = PythonInputs(
        sources=sources, code=code, digests=digests, callbacks=_called(callbacks), endpoint=endpoint.opened
    )
    exit_code = 1
    with compile_guard.restored(), contextlib.ExitStack() as stack:
        try:
            run = begin(
                values, overrides, stack, run_dir=str(folder), resumes="allowed" if resume else "", handed=handed
            )
            run_training(run)
            run.mirror.finished()
            attempts.ending(0)
            stack.close()  # a mirror commits the logs once they are closed
            run.mirror.check()
            exit_code = 0
        except Stopped as stopped:
            raise KeyboardInterrupt(str(stopped)) from None
        finally:
            leave(exit_code)
    left = run.folder / second_models.folder_name(run.start.model)
    return Trained(folder=run.folder, logs=run.mine, policy=left, decode=run.start.tokenizer.decode)


def evaluate(
    policy: Policy | str | Path,
    data: Rows,
    rewards: Callable | str | Sequence[Callable | str] = (),
    n: int = 4,
    *,
    sampling: Sampling | Mapping[str, Any] | None = None,
    **how: Any,
) -> Scored:
    """Scores a policy, or the one at a path, on data. See launch/parts/scored.py for the other arguments and the figures."""
    opened = policy if isinstance(policy, Policy) else load(policy)
    return scored.evaluate(opened, data, rewards, n, sampling=sampling, **how)


def _called(callbacks: Any) -> tuple[Callable[[dict], object], ...]:
    """Returns the callbacks, of which one may have stood alone."""
    found = several("train: callbacks", callbacks)
    if odd := [one for one in found if not callable(one)]:
        raise ValueError(f"train: callbacks must be functions, got {odd[0]!r}, a {type(odd[0]).__name__}")
    return found


def _values(config: Any) -> dict:
    """Returns a config as nested dicts that belong to the caller no more."""
    if isinstance(config, (str, Path)):
        config = configs.load(str(config))
    if hasattr(config, "to_dict"):
        return config.to_dict()
    if isinstance(config, Mapping):
        return copy.deepcopy(dict(config))
    raise ValueError(
        f"train: config must be a path, the result of jaxrl_post.config.default() or dicts, got {type(config).__name__}"
    )


def _data(values: dict, data: Rows | None, held_out: Rows | None) -> dict[str, tuple]:
    """Replaces the data of a config. Returns rows by the name that the config has for them.

    Options of a task that is replaced go with it. Training rows of a program are none that evaluation may draw from.
    """
    sources: dict[str, tuple] = {}
    about, tested = (dict(values.get(section) or {}) for section in ("data", "eval"))
    if data is not None:
        about["train"] = _named("data.train", data, sources)
        for name in () if about["train"].startswith("task:") else ("size", "task"):
            about.pop(name, None)
        if held_out is None and not tested.get("data") and not about["train"].startswith("task:"):
            tested = {"prompts": 0}
    if held_out is not None:
        tested["data"] = _named("eval.data", held_out, sources)
        if tested["data"] in sources:
            tested["prompts"] = min(tested.get("prompts") or len(sources[tested["data"]]), len(sources[tested["data"]]))
            tested.pop("task", None)
    values |= {"data": about, "eval": tested}
    return sources


def _named(option: str, given: Rows, sources: dict[str, tuple]) -> str:
    """Returns the value of a data option. Rows are added to `sources` under that name."""
    if isinstance(given, (str, Path)):
        return str(given)
    sources[f"{OWN}{option}"] = listed_rows(f"train: {option}", given)
    return f"{OWN}{option}"
