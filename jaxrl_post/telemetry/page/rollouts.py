"""Which rollouts a page shows, and all that it shows of them.

The rule: at most STEPS steps, evenly spaced, with the first and the last. Of each step groups that are evenly spaced in
the log, the first one always, whole while there is room: at most OF_STEP rollouts, and a share of the page's TOKENS. At
least one rollout of a step is shown, cut to the share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from jaxrl_post.data import tokenizer
from jaxrl_post.data.continuations import Pieces
from jaxrl_post.ring.types import Group, Rollout
from jaxrl_post.runs import run_logs
from jaxrl_post.runs.run_logs import RunLogs
from jaxrl_post.telemetry.page.curves import evenly, number

STEPS, OF_STEP, TOKENS = 16, 32, 120_000
KINDS = {"train": "training", "eval": "evaluation"}  # purpose -> what a page calls it
_PROMPT = 20_000  # characters of a prompt


def rollouts(
    files: RunLogs, text: Callable[..., list[str]], most: int = TOKENS
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Returns the rollouts shown, in order of steps, and the rule with its counts.

    Args:
      text: text(ids, before) returns the text of each token.
      most: tokens that all shown rollouts may have together.

    Raises:
      ValueError: a rollout file is damaged.
    """
    out, steps = [], {kind: evenly(files.steps(kind), STEPS) for kind in KINDS}
    share = most // max(sum(map(len, steps.values())), 1)
    for kind, chosen in steps.items():
        for step in chosen:
            out += [_told(kind, step, *one, text, share) for one in sampled(files.groups(kind, step), share)]
    whole = {kind: files.num_rollouts(kind) for kind in KINDS}
    shown = {kind: sum(one["kind"] == KINDS[kind] for one in out) for kind in KINDS}
    rule = {
        "shown": {KINDS[kind]: shown[kind] for kind in KINDS},
        "all": {KINDS[kind]: whole[kind] for kind in KINDS},
        "rule": f"at most {STEPS} steps, evenly spaced, with the first and the last; of each at most {OF_STEP} rollouts in "
        f"groups evenly spaced in its log, the first one always, and at most {share:,} tokens",
    }
    return out, rule


def sampled(groups: Sequence[Group], share: int) -> Iterator[tuple[Group, int]]:
    """Yields (group, index of a rollout) of a step, group by group in the order of the log."""
    if not groups:
        return
    size = max(len(group.rollouts) for group in groups)
    room, left = share, OF_STEP
    for group in evenly(groups, max(OF_STEP // size, 2)):
        for index, rollout in enumerate(group.rollouts):
            if left == OF_STEP or (left > 0 and len(rollout) <= room):
                yield group, index
                room, left = room - min(len(rollout), share), left - 1


def _told(kind: str, step: int, group: Group, index: int, text: Callable[..., list[str]], share: int) -> dict[str, Any]:
    rollout = group.rollouts[index]
    shown = slice(0, share)
    return {
        "kind": KINDS[kind],
        "step": step,
        "id": group.prompt.id,
        "sample": rollout.id.sample,
        "epoch": rollout.id.epoch,
        "prompt": "".join(text(group.prompt.tokens.tolist()))[:_PROMPT],
        "truth": group.prompt.answer,
        "reward": number(float(group.rewards[index])) if group.scored[index] else None,
        "parts": {
            name: number(float(values[index]))
            for name, values in group.components.items()
            if group.scored[index] and not np.isnan(values[index])
        },
        "finish": rollout.finish.value,
        "length": len(rollout),
        "clock": [rollout.start_clock, rollout.finish_clock],
        "text": text(rollout.tokens[shown].tolist(), group.prompt.tokens.tolist()),
        **_by_token(rollout, shown),
    }


def _by_token(rollout: Rollout, shown: slice) -> dict[str, Any]:
    """Returns log-probs and entropies with 3 decimals, versions as [first token, version], and indices of flags."""
    versions = rollout.versions[shown]
    starts = [0, *(np.flatnonzero(np.diff(versions)) + 1).tolist()] if versions.size else []
    return {
        "logprobs": _rounded(rollout.logprobs[shown]),
        "entropies": _rounded(rollout.entropies[shown]),
        "versions": [[start, int(versions[start])] for start in starts],
        "drafted": np.flatnonzero(rollout.drafted[shown]).tolist(),
        "forced": np.flatnonzero(~rollout.sampled[shown]).tolist(),
    }


def _rounded(values: np.ndarray) -> list[float | None]:
    return [number(round(float(value), 3)) for value in values]


def words_of(files: RunLogs) -> tokenizer.Tokenizer | None:
    """Returns the tokenizer of a run, if it is still there."""
    try:
        return run_logs.tokenizer_of(files)
    except ValueError:
        return None


def pieces(words: tokenizer.Tokenizer | None, ids: Sequence[int], before: Sequence[int] = ()) -> list[str]:
    """Returns the text of each token, behind those `before`. Bytes of one character belong to the token that completes it.

    Without a tokenizer a piece is the id in brackets. Tokens that end a text are shown by name.
    """
    return [f"[{id}]" for id in ids] if words is None else Pieces(words.decode, before).more(ids)
