"""Tries reward functions before a run: on gold texts, on texts that are gold for another row, and on sampled ones.

Invariant: a trial changes no file. Functions are called in the real pool, with texts that a policy could write.
A gold text is the reference answer in one of the usual forms. Each function is judged by the form that it scores best.
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from jaxrl_post.config import Config
from jaxrl_post.data.tokenizer import Tokenizer
from jaxrl_post.launch.parts.inputs import Inputs
from jaxrl_post.rewards import math
from jaxrl_post.rewards.pool import Graders, Pool
from jaxrl_post.rewards.printed import Failures, Printed
from jaxrl_post.ring.json_text import shown
from jaxrl_post.ring.types import Finish, Group, Prompt, Rollout, RolloutId

SOLUTIONS = ("solution", "canonical_solution", "code")  # columns that hold a whole solution
FORMS = ("{truth}", "#### {truth}", "\\boxed{{{truth}}}", "The answer is {truth}.", "<answer>{truth}</answer>")
KNOWS = "a program that knows the tests"
STRICT = "jaxrl_post.rewards.math:strict"
_RIGHT = 1e-6  # a score this near to 1 is 1


class Texts:
    """Rollouts of given texts, and the function that decodes them again."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer, self._texts = tokenizer, {}

    def decode(self, tokens: np.ndarray, **how: Any) -> str:
        """Returns the text that the tokens were made for; any other tokens are decoded."""
        tokens = np.asarray(tokens, np.int32)
        return self._texts.get(tokens.tobytes()) or self._tokenizer.decode(tokens, **how)

    def group(self, prompt: Prompt, texts: Sequence[str]) -> Group:
        """Returns a group of rollouts with these texts, not scored yet."""
        return Group.unscored(prompt, (self._rollout(prompt, sample, text) for sample, text in enumerate(texts)))

    def _rollout(self, prompt: Prompt, sample: int, text: str) -> Rollout:
        try:
            tokens = np.asarray(self._tokenizer.encode(text, special=False), np.int32)
        except ValueError:  # a character that the tokenizer lacks; only the text matters here
            tokens = np.arange(len(text), dtype=np.int32)
        if self._texts.setdefault(tokens.tobytes(), text) != text:
            tokens = np.append(tokens, np.int32(-1 - sample))
            self._texts[tokens.tobytes()] = text
        return Rollout.written(RolloutId(0, "eval", 0, prompt.id, sample), prompt, tokens, Finish.EOS)


def gold(prompt: Prompt, reader: str = "") -> dict[str, str]:
    """Returns the gold texts of a prompt, by their form. Empty where none is known.

    `reader`: the module that reads ground truths for the function (rewards/worker.py), or none.
    """
    found = {f"column {column!r}": str(prompt.extra[column]) for column in SOLUTIONS if prompt.extra.get(column)}
    if reader and (text := importlib.import_module(reader).gold(prompt.truth, prompt.extra)):
        found[KNOWS] = text
    answer = prompt.answer
    if isinstance(prompt.truth, (list, tuple)) and prompt.truth and not isinstance(prompt.truth[0], (list, dict)):
        answer = str(prompt.truth[0])  # any member of a list is right
    if answer and not prompt.lacks:
        truth = answer.rpartition("####")[2].strip()
        found |= {form.format(truth="X"): form.format(truth=truth) for form in FORMS}
        found["X"] = answer
    return found


def call_once(start: Inputs, pool: Pool, texts: Texts, group_size: int) -> None:
    """Calls every function of a pool once, on a group of the first row: copies of its gold answer, or of its prompt where
    none is known.

    Raises:
      ValueError: a function fails, with the place in its file.
    """
    prompt = next(iter(start.train))
    right = gold(prompt)
    text = right.get("X") or next(iter(right.values()), start.tokenizer.decode(prompt.tokens))
    _scores(pool, texts, prompt, [text], group_size)
    if pool.failures:
        where = prompt.where or f"prompt {prompt.id!r}"
        raise ValueError(f"{pool.failures[0]}; it was called with the gold answer of {where}")


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What one function made of the rows.

    `right`, `wrong`: scores of gold texts and of gold texts of other rows, NaN where there is none. `form`: of the gold
    texts that it scores best. `broken`: alarms that mean a broken reward. `notes`: alarms that need not.
    """

    function: str
    form: str
    right: np.ndarray
    wrong: np.ndarray
    sampled: np.ndarray
    seconds: float
    failures: tuple[str, ...]
    broken: tuple[str, ...]
    notes: tuple[str, ...]


def tried(
    config: Config,
    start: Inputs,
    function: str,
    prompts: Sequence[Prompt],
    printed: Printed,
    drawn: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> Trial:
    """Calls a function on right, wrong and sampled texts of some prompts, in a pool of its own.

    Args:
      drawn: texts that the policy sampled, equally many for each prompt, by its id; or none.

    Raises:
      ValueError: the function cannot be loaded, or a prompt lacks what it needs.
    """
    about, texts = config.reward, Texts(start.tokenizer)
    graders = Graders(functions=(function,), workers=about.workers, timeout_s=about.timeout_s, sandbox=about.sandbox)
    with Pool(graders, texts.decode, printed=printed, failures=Failures(log=False)) as pool:
        pool.check((*start.train, *start.held_out))
        _, _, truths, instead, reader = pool.signatures[0]
        begun, size = time.monotonic(), config.scheduler.group_size
        scores = _known(pool, texts, prompts, size, whole=bool(instead), reader=reader)
        sampled = [_scores(pool, texts, prompt, drawn[prompt.id], size) for prompt in prompts if prompt.id in drawn]
        spent = time.monotonic() - begun
    every = np.array([*itertools.chain(*scores.values(), *sampled)])
    forms = [form for form, right in scores if right]
    form = max(forms, key=lambda form: _mean(scores[form, True]), default="")
    right, wrong = (np.array(scores.get((form, is_right), [])) for is_right in (True, False))
    missed = _missed(prompts, form, drawn) if function == STRICT and not pool.failures else []
    trial = Trial(
        function=function,
        form=form,
        right=right,
        wrong=wrong,
        sampled=np.array(sampled, np.float64).reshape(len(sampled), -1 if sampled else 0),
        seconds=spent / every.size,
        failures=pool.failures,
        broken=(),
        notes=(),
    )
    return _judged(trial, every, bool(truths), missed)


def _known(
    pool: Pool, texts: Texts, prompts: Sequence[Prompt], size: int, *, whole: bool, reader: str
) -> dict[tuple[str, bool], list[float]]:
    """Returns the scores of known texts, by their form and whether they are right; see `_texts_to_try`."""
    scores: dict[tuple[str, bool], list[float]] = {}
    for prompt in prompts:
        asked = _texts_to_try(prompt, prompts, whole=whole, reader=reader)
        found = _scores(pool, texts, prompt, [text for _, _, text in asked], size)
        for (form, right, _), value in zip(asked, found, strict=True):
            scores.setdefault((form, right), []).append(float(value))
    return scores


def _scores(pool: Pool, texts: Texts, prompt: Prompt, asked: Sequence[str], size: int) -> np.ndarray:
    """Returns the accuracy of each text, NaN where it has no score.

    Functions that get groups get `size` rollouts at a time, as in a run. The last text is repeated where texts are missing.
    """
    together = any(signature == "trl" for signature, *_ in pool.signatures)
    whole = [*asked, *[asked[-1]] * (-len(asked) % size)] if together else list(asked)
    scores = []
    for begin in range(0, len(whole), size if together else len(whole)):
        group = texts.group(prompt, whole[begin : begin + (size if together else len(whole))])
        for rollout in group.rollouts:
            pool.start(rollout)
        group = pool.join(group)
        scores.append(np.where(group.scored, group.accuracies, np.nan))
    return np.concatenate(scores)[: len(asked)]


def _texts_to_try(
    prompt: Prompt, prompts: Sequence[Prompt], whole: bool, reader: str = ""
) -> list[tuple[str, bool, str]]:
    """Returns (form, whether it is right, text) of everything to try.

    whole: the ground truth is no text to score, but what a text is tested with. So only solutions are gold.
    """
    right = gold(prompt, reader)
    other = next((gold(one, reader) for one in prompts if one.answer != prompt.answer), {})
    kept = [form for form in right if not whole or form == KNOWS or form.startswith("column")]
    found = [(form, True, right[form]) for form in kept]
    found += [(form, False, other[form]) for form in kept if form in other]
    found += [(KNOWS, False, "")] if KNOWS in kept and not other else []
    return found or [("some text", False, text) for text in ("", "some text")]


def _missed(prompts: Sequence[Prompt], form: str, drawn: Mapping[str, Sequence[str]]) -> list[str]:
    """Returns a note on gold and sampled texts in which math:strict finds no number, and math:math the right one."""
    asked = [(prompt, text) for prompt in prompts for text in (gold(prompt).get(form, ""), *drawn.get(prompt.id, ()))]
    unread = [(prompt, text) for prompt, text in asked if math.strict_number(text) is None]
    try:
        missed = [(prompt, text) for prompt, text in unread if math.rules("", text, prompt.truth, {})]
    except TypeError as error:  # a ground truth that no math grader takes
        return [str(error)]
    if not missed:
        return []
    prompt, text = missed[0]
    return [
        "math:strict finds a number only as '#### 42' in the last 300 characters, without $ and +; math:math finds it in "
        f"{len(missed)} more of {len(asked)} texts, first in {shown(text)} for {prompt.where or f'prompt {prompt.id!r}'}"
    ]


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if value == value]
    return sum(known) / len(known) if known else -np.inf


def _judged(trial: Trial, every: np.ndarray, needs_truth: bool, notes: Sequence[str]) -> Trial:
    """Returns the trial with its alarms. `every`: all scores, of every form. `notes`: further alarms."""
    broken, notes = [], [*notes]
    known, right, wrong = every[~np.isnan(every)], trial.right, trial.wrong[~np.isnan(trial.wrong)]
    if trial.failures:
        broken.append(f"it fails{trial.failures[0].removeprefix(f'reward function {trial.function!r} fails')}")
    elif known.size == 0:
        broken.append("it scores nothing: it applies to none of the rows")
    elif (known == known[0]).all():
        what = "all scores are 0" if known[0] == 0 else f"all scores are equal: {known[0]:g}"
        (broken if needs_truth and right.size else notes).append(f"{what}, for right texts and for wrong ones")
    elif needs_truth and right.size and np.isnan(right).all():
        broken.append("it scores no gold text, and some wrong ones")
    elif needs_truth and right.size:
        off = ~(np.abs(right - 1) <= _RIGHT)
        if wrong.size and not np.nanmean(right) > wrong.mean():
            broken.append(f"wrong texts score {wrong.mean():g}, right ones {np.nanmean(right):g}: not more")
        elif off.any() and (right == right[0]).all():
            notes.append(f"gold texts score {right[0]:g}, not 1")
        elif off.any():
            broken.append(
                f"{off.sum()} of {right.size} gold texts are not scored 1; the first is that of row {off.argmax() + 1}"
            )
    own = trial.sampled[~np.isnan(trial.sampled)]
    if trial.sampled.size and not own.size:
        notes.append("no sampled rollout has a score")
    elif own.size > 1 and (own == own[0]).all():
        notes.append(f"all sampled rollouts score {own[0]:g}: such groups train nothing")
    return dataclasses.replace(trial, broken=tuple(broken), notes=tuple(notes))


def text(trial: Trial, *, last: bool = False) -> str:
    """Describes a trial on some lines. `last`: an error says the first alarm of a broken reward behind them."""

    def scores(values: np.ndarray) -> str:
        known = values[~np.isnan(values)]
        some = ", ".join(f"{value:g}" for value in known[:8]) + (", ..." if known.size > 8 else "")
        missing = f", {values.size - known.size} without a score" if known.size < values.size else ""
        return f"mean {known.mean():g} of {known.size}{missing} ({some})" if known.size else f"none of {values.size}"

    unequal = sum(len(set(row[~np.isnan(row)].tolist())) > 1 for row in trial.sampled)
    lines = [
        trial.function,
        *(
            [f"  gold texts, written {shown(trial.form)}: {scores(trial.right)}"]
            if trial.form
            else ["  no gold text is known"]
        ),
        *([f"  gold texts of other rows: {scores(trial.wrong)}"] if trial.wrong.size else []),
        *(
            [
                f"  sampled rollouts: {scores(trial.sampled.ravel())}",
                f"  rows whose sampled rollouts have several scores: {unequal} of {len(trial.sampled)}",
            ]
            if trial.sampled.size
            else []
        ),
        f"  {trial.seconds:.4f} s for each text, {len(trial.failures)} kinds of failure",
        *(f"  BROKEN: {line}" for line in trial.broken[last:]),
        *(f"  alarm: {line}" for line in trial.notes),
    ]
    return "\n".join(lines)
