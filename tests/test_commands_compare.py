"""`compare`: pairs, differences and counts against numbers worked out by hand, intervals against a plain bootstrap."""

from __future__ import annotations

import dataclasses
import json

import made_runs
import numpy as np
import pytest

from jaxrl_post import __main__ as commands
from jaxrl_post.commands import compare
from jaxrl_post.runs import run_logs
from jaxrl_post.telemetry import estimates

ROWS = [{"step": step, "critic/score/mean": step / 10, "timing_s/step": 1.0} for step in range(3)]
OTHER = [{"step": step, "critic/score/mean": step / 5, "only/here": 1.0} for step in range(1, 5)]


def of(name, *rewards, **fields):
    return made_runs.group(name, ["#"] * len(rewards), rewards, **fields)


def evaluated(name, reward, greedy):
    return [of(name, reward, purpose="eval"), of(name, greedy, purpose="eval", attempt=1)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A has prompts p, q, r and a sample that B lacks; in B r is another prompt, and one rollout has no score."""
    here = tmp_path_factory.mktemp("compare")
    a = made_runs.run(
        here / "a",
        rollouts={1: [of("p", 0.0, 1.0, 1.0), of("q", 0.5, 0.5)], 2: [of("r", 1.0), of("p", 0.0, epoch=1)]},
        evaluations={4: [*evaluated("e", 0.0, 1.0), *evaluated("f", 1.0, 0.0)]},
        rows=ROWS,
        config={"name": "a", "optimizer": {"lr": 1.0}},
    )
    b = made_runs.run(
        here / "b",
        rollouts={1: [of("q", 0.75, None), of("p", 1.0, 1.0)], 3: [of("r", 1.0, prompt="2+2="), of("s", 1.0)]},
        evaluations={2: evaluated("e", 1.0, 1.0), 4: [*evaluated("e", 1.0, 1.0), *evaluated("f", 1.0, 0.0)]},
        rows=OTHER,
        config={"name": "b", "optimizer": {"lr": 2.0}},
    )
    return a, b


def test_pairs_differences_and_counts_are_those_worked_out_by_hand(runs):
    found = compare.between(*map(run_logs.opened, runs), lambda a, b: np.array_equal(a.tokens, b.tokens))
    assert [pair.what for pair in found] == [
        "training rewards",
        "evaluation of step 4, sampled",
        "evaluation of step 4, greedy",
    ]
    training = found[0]
    # p: samples 0 and 1 of epoch 0, so 0.5 -> 1.0. q: sample 0, so 0.5 -> 0.75; its sample 1 has no score in B.
    assert (training.mean_a, training.mean_b, training.difference) == (0.5, 0.875, 0.375)
    assert (training.num_prompts, training.num_pairs, training.unscored, training.other_prompts) == (2, 3, 1, 1)
    assert training.alone == (3, 2)  # A: p's third sample, p of epoch 1, r. B: r, s
    assert training.interval == estimates.mean_interval([0.5, 0.25])
    assert training.unpaired == estimates.difference_interval([0.5, 0.5], [1.0, 0.75])
    sampled, greedy = found[1:]
    assert (sampled.mean_a, sampled.mean_b, sampled.difference, sampled.num_pairs) == (0.5, 1.0, 0.5, 2)
    assert (greedy.difference, greedy.interval) == (0.0, (0.0, 0.0))


def test_attempts_of_one_sample_are_pairs_of_their_own(tmp_path):
    rewards = {"a": (0.0, 1.0), "b": (1.0, 0.0)}
    a, b = (
        made_runs.run(tmp_path / name, rollouts={1: [of("p", first), of("p", second, attempt=1)]}, rows=ROWS)
        for name, (first, second) in rewards.items()
    )
    (found,) = compare.between(run_logs.opened(a), run_logs.opened(b), lambda a, b: True)
    assert (found.num_pairs, found.mean_a, found.mean_b, found.difference) == (2, 0.5, 0.5, 0.0)


def test_runs_of_two_seeds_are_paired_by_prompt_alone(runs, tmp_path):
    other = made_runs.run(
        tmp_path / "c",
        rollouts={1: [of("p", 1.0, 0.0, seed=5, epoch=7), of("q", 0.0, None, seed=5)]},
        config={"seed": 5},
    )
    (found,) = compare.between(run_logs.opened(runs[0]), run_logs.opened(other), lambda a, b: True)
    # p: the mean of all four of A, 0.5, beside 0.5; q: 0.5 beside 0.0
    assert (found.mean_a, found.mean_b, found.num_prompts, found.num_pairs) == (0.5, 0.25, 2, 2)
    assert found.unscored == 1 and found.alone == (1, 0)


def test_an_unpaired_interval_is_that_of_two_bootstraps():
    noise = np.random.default_rng(3)
    one, two = noise.normal(0, 1, 200), noise.normal(1, 2, 300)
    low, high = estimates.difference_interval(one, two)
    error = np.sqrt(one.var() / one.size + two.var() / two.size)
    middle = two.mean() - one.mean()
    assert (low, high) == pytest.approx((middle - 1.96 * error, middle + 1.96 * error), abs=0.05 * error + 0.01)
    with pytest.raises(ValueError, match="finite values"):
        estimates.difference_interval([], two)


def test_pairs_make_an_interval_narrower_only_where_noise_is_common(tmp_path):
    noise = np.random.default_rng(4)
    shared, own = noise.random((2, 400))
    almost = np.where(np.arange(400) < 4, 1 - shared, shared)
    runs = []
    for name, drawn in (("one", shared), ("almost", almost), ("own", own)):
        groups = [of(str(n), float(value < 0.5)) for n, value in enumerate(drawn)]
        runs.append(run_logs.opened(made_runs.run(tmp_path / name, rollouts={1: groups})))
    together, apart = (compare.between(runs[0], run, lambda a, b: True)[0] for run in runs[1:])
    assert together.width < 0.2 and 0.9 < apart.width < 1.1


def test_the_screen_and_json_agree(runs, capsys):
    assert commands.main(["compare", *map(str, runs), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["config"] == {"optimizer.lr": [1.0, 2.0]} and told["seeds_equal"] and told["environment"] == {}
    assert told["curves"] == {"critic/score/mean": {"steps": [1, 2], "a": [0.1, 0.2], "b": [0.2, 0.4]}}
    found = compare.between(*map(run_logs.opened, runs), lambda a, b: np.array_equal(a.tokens, b.tokens))
    plain = [dataclasses.asdict(pair) | {"width_over_unpaired": pair.width} for pair in found]
    assert told["paired"] == json.loads(json.dumps(plain))
    assert commands.main(["compare", *map(str, runs), "--metric", "critic/score/mean"]) == 0
    text = capsys.readouterr().out
    assert "training rewards: 0.5000 -> 0.8750, difference +0.3750 [+0.2500, +0.5000]" in text
    assert "2 prompts, 3 pairs; without a partner 3 rollouts of A and 2 of B; without a score 1" in text
    assert "1 ids name different prompts" in text and "\n  1  0.1  0.2\n  2  0.2  0.4\n" in text


def test_it_has_seconds_tokens_a_second_and_staleness(tmp_path, capsys):
    """Medians by hand, without the first step, which compiles."""
    folders = []
    for name, seconds in (("a", (60.0, 2.0, 4.0, 3.0)), ("b", (50.0, 6.0, 6.0, 9.0))):
        rows = [
            {"step": step, "timing_s/step": taken, "perf/throughput": 120 / taken, "off_policy/mean": step / 4}
            for step, taken in enumerate(seconds, start=1)
        ]
        folders.append(str(made_runs.run(tmp_path / name, rows=rows)))
    assert commands.main(["compare", *folders]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "seconds a step A 3 B 6 B/A 2.00" in text and "trained tokens/s a device A 40 B 20 B/A 0.50" in text
    assert "off_policy/mean A" in text
    assert commands.main(["compare", *folders, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["timed"]["timing_s/step"]["b"] == [50, 6, 6, 9] and "timing_s/step" not in told["curves"]


def test_mistakes_and_runs_that_share_nothing_are_one_sentence(runs, tmp_path, capsys):
    lone = made_runs.run(tmp_path / "lone", rollouts={1: [of("z", 1.0)]})
    for flags, words in (
        ([str(runs[0]), str(lone)], "share nothing: no scored prompt, and no metric at one step"),
        ([str(runs[0])], "the following arguments are required: B"),
        ([str(runs[0]), str(tmp_path)], "is no folder of a run"),
        ([*map(str, runs), "--metric=critic/score/men"], "nearest is critic/score/mean"),
        ([*map(str, runs), "--jsn"], "unknown argument '--jsn'; nearest is --json"),
    ):
        assert commands.main(["compare", *flags]) == 1
        said = capsys.readouterr().err
        assert said.startswith("error: ") and said.count("\n") == 1 and words in said
