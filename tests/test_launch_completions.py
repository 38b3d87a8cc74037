"""Held-out completions: which they are, and their figures against whole softmaxes and formulas written out here."""

from __future__ import annotations

import dataclasses
import json

import gradient_arms as arms
import made_groups
import numpy as np
import preference_arms as pairs
import pytest
from config_arms import PAIRS, SUPERVISED

from jaxrl_post import config as configs
from jaxrl_post.data import tasks
from jaxrl_post.data.tokenizer import characters
from jaxrl_post.launch.parts import completions, inputs

pytestmark = pytest.mark.usefixtures("quick_compilation")

BETA = 0.5
PAIRED = made_groups.groups(6, 2, unscored=False)  # one rollout has observed tokens in its middle
ALONE = made_groups.groups(6, 1, unscored=False)


def summed(groups, params):
    """The log-prob of each rollout's sampled tokens, and how many they are."""
    tokens, mask, _ = made_groups.unpacked(groups)
    scores = np.asarray(made_groups.plain_scores(params, made_groups.MODEL, tokens)[0], float)
    return np.where(mask, scores, 0.0).sum(1), mask.sum(1)


@pytest.fixture(scope="module")
def learner():
    return pairs.learner(pairs.algorithm("dpo", dpo_beta=BETA))


@pytest.fixture(scope="module")
def margins():
    policy = made_groups.weights(0)
    gaps = summed(PAIRED, policy)[0] - summed(PAIRED, made_groups.moved(policy, 2))[0]
    return BETA * (gaps[::2] - gaps[1::2])


def of_pairs(groups, learner):
    return completions.measured(groups, learner, pairs.algorithm("dpo", dpo_beta=BETA))


def test_figures_of_pairs_are_those_of_trl(learner, margins):
    scored, told = of_pairs(PAIRED, learner)
    losses = np.log1p(np.exp(-margins))
    assert 0 < np.mean(margins > 0) < 1
    assert told["val/rewards/accuracies"] == np.mean(margins > 0)
    assert told["val/rewards/margins"] == pytest.approx(margins.mean(), abs=1e-5)
    assert told["val/loss"] == pytest.approx(losses.mean(), abs=1e-5)
    assert told["val/loss_se"] == pytest.approx(losses.std(ddof=1) / 6**0.5, abs=1e-5)
    logps, _ = summed(PAIRED, made_groups.weights(0))
    assert told["val/logps/chosen"] == pytest.approx(logps[::2].mean(), rel=1e-5)
    logged = [float(r.logprobs[r.sampled].sum()) for group in scored for r in group.rollouts]
    np.testing.assert_allclose(logged, logps, rtol=1e-5)
    assert [r.tokens.tolist() for g in scored for r in g.rollouts] == [
        r.tokens.tolist() for g in PAIRED for r in g.rollouts
    ]


def test_planted_swapped_labels_are_seen(learner, margins):
    swapped = [dataclasses.replace(group, rollouts=group.rollouts[::-1]) for group in PAIRED]
    told = of_pairs(swapped, learner)[1]
    assert told["val/rewards/accuracies"] == np.mean(margins < 0) != np.mean(margins > 0)
    assert told["val/rewards/margins"] == pytest.approx(-margins.mean(), abs=1e-5)


def test_the_loss_of_solutions_is_a_mean_over_tokens():
    given = configs.AlgorithmConfig(loss_mode="sft", adv_estimator="ones")
    one = arms.learner(given=given, kind=arms.Uncommitted, temperature=1.0, reference=False)
    told = completions.measured(ALONE, one, given)[1]
    logps, counts = summed(ALONE, made_groups.weights(0))
    assert told.keys() == {"val/loss", "val/loss_se"}
    assert told["val/loss"] == pytest.approx(-logps.sum() / counts.sum(), rel=1e-5)
    without = [
        -(logps.sum() - logps[i]) / (counts.sum() - counts[i]) for i in range(6)
    ]  # the jackknife's error, which is near that of the ratio
    assert told["val/loss_se"] == pytest.approx(np.sqrt(5 / 6 * np.sum((without - np.mean(without)) ** 2)), rel=0.5)


def test_before_and_after_are_the_first_and_the_last_row():
    rows = [{"step": 0, "val/loss": 3.0}, {"step": 1, "actor/pg_loss": 1.0}, {"step": 1, "val/loss": 2.0}]
    assert completions.before_and_after(rows) == {"before": {"loss": 3.0}, "after": {"loss": 2.0}}
    assert completions.before_and_after(rows[1:2]) is None


# ---- which completions are held out


def start(folder, *overrides) -> inputs.Inputs:
    characters("0123456789+=#").save(folder / "tokenizer")
    c = configs.default()
    c.model.preset, c.model.tokenizer, c.eval.prompts = "tiny", str(folder / "tokenizer"), 0
    c.engine.max_length, c.sampling.max_tokens, c.data.size = 128, 96, 64
    return inputs.gather(configs.resolve(c, overrides))


def test_pairs_of_a_task_are_of_problems_that_no_training_draws(tmp_path):
    found = start(tmp_path, *PAIRS, "eval.completions=40")
    words = found.tokenizer
    assert len(found.completions) == 40 and len(found.train) == 64
    assert not {g.prompt.id for g in found.completions} & {prompt.id for prompt in found.train}
    assert {tasks.split_of(words.decode(prompt.tokens)) for prompt in found.train} == {"sft"}
    for group in found.completions:
        assert tasks.split_of(words.decode(group.prompt.tokens)) == "eval"
        chosen, rejected = (words.decode(rollout.tokens) for rollout in group.rollouts)
        assert chosen.endswith(f"#{group.prompt.answer}") and rejected != f"#{group.prompt.answer}"
        assert all(r.tokens[-1] in words.eos_ids and r.sampled.all() for r in group.rollouts)


def test_solutions_of_a_task_are_of_the_problems_that_evaluation_asks(tmp_path):
    found = start(tmp_path, *SUPERVISED, "eval.completions=40", "eval.prompts=40")
    assert [group.prompt.id for group in found.completions] == [prompt.id for prompt in found.held_out]
    styles = set()
    for group in found.completions:
        (rollout,) = group.rollouts
        text = found.tokenizer.decode(rollout.tokens)
        assert text == tasks.TASKS["sums"].demonstrate(group.prompt.extra, rollout.id.seed())
        styles.add(text.startswith("#"))
    assert styles == {True, False}
    with pytest.raises(ValueError, match="the demonstration of prompt .* more than sampling.max_tokens=9"):
        guesses = ("sampling.max_tokens=9", "data.task.careful=0.0", "eval.task.careful=1.0", "eval.prompts=4")
        start(tmp_path, *SUPERVISED, "eval.completions=40", *guesses)


def lines(path, *rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_pairs_of_a_file(tmp_path):
    def row(n):
        return {"prompt": f"{n}+1=", "chosen": f"#{n + 1}", "rejected": "#0"}

    train, held_out = (lines(tmp_path / f"{name}.jsonl", *map(row, r)) for name, r in (("a", (1, 2)), ("b", (3, 4, 5))))
    files = (*PAIRS, "data=default", f"data.train={train}")
    found = start(tmp_path, *files, f"eval.data={held_out}", "eval.completions=2")
    texts = [[found.tokenizer.decode(r.tokens) for r in group.rollouts] for group in found.completions]
    assert texts == [["#4", "#0"], ["#5", "#0"]]
    found = start(tmp_path, *files, f"eval.data={held_out}", "eval.completions=9")
    assert found.notes == (f"eval.completions=9: {held_out} has 3, and all of them are used",)
    with pytest.raises(ValueError, match="share 2 prompts"):
        start(tmp_path, *files, f"eval.data={train}", "eval.completions=2")
    with pytest.raises(ValueError, match="eval.data is empty .* or set eval.completions=0"):
        start(tmp_path, *files, "eval.completions=2")
