"""Metrics of a batch against numbers counted by hand; writers against what they must have written."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import re

import numpy as np
import plain_rollouts
import pytest
import rich.console

from jaxrl_post.ring.types import Finish, Group, Prompt, Rollout, RolloutId
from jaxrl_post.runs import metric_rows
from jaxrl_post.telemetry import metrics


def rollout(prompt: Prompt, sample: int, versions: list[int], finish: Finish = Finish.EOS, sampled=None) -> Rollout:
    id, zeros = RolloutId(0, "train", 2, prompt.id, sample), np.zeros(len(versions))
    given = {"versions": versions} | ({} if sampled is None else {"sampled": sampled})
    return plain_rollouts.rollout(id, prompt, zeros, finish=finish, clock=(0, 1), **given)


def groups() -> tuple[Group, Group, Group]:
    """Rewards 1 0 | 2 (unscored) | both unscored; lengths 2 4 | 1 3 | 1 1; weights at version 5."""
    a, b, c = (Prompt(id=name, tokens=[1] * size) for name, size in (("a", 3), ("b", 5), ("c", 1)))
    first = Group(
        prompt=a,
        rollouts=(rollout(a, 0, [4, 5]), rollout(a, 1, [5, 5, 5, 5], Finish.LENGTH)),
        rewards=[1, 0],
        scored=[1, 1],
        components={"acc": [1, 0], "form": [0.5, np.nan]},
    )
    second = Group(
        prompt=b,
        rollouts=(rollout(b, 0, [2]), rollout(b, 1, [5, 5, 5])),
        rewards=[2, 7],
        scored=[1, 0],
        components={"acc": [1, np.nan]},
    )
    third = Group(prompt=c, rollouts=(rollout(c, 0, [5]), rollout(c, 1, [5])), rewards=[9, 9], scored=[0, 0])
    return first, second, third


def test_describe_counted_by_hand():
    row = metrics.describe(groups(), version=5)
    assert row == {
        "training/epoch": 2.0,
        "critic/score/mean": 1.0,
        "critic/score/max": 2.0,
        "critic/score/min": 0.0,
        "critic/rewards/mean": 1.0,
        "critic/rewards/max": 2.0,
        "critic/rewards/min": 0.0,
        "reward/mean": 1.0,
        "reward/acc/mean": pytest.approx(2 / 3),
        "reward/form/mean": 0.5,
        "reward_std": 0.25,  # 0.5 and 0
        "frac_reward_zero_std": pytest.approx(2 / 3),
        "response_length/mean": 2.0,
        "response_length/max": 4.0,
        "response_length/min": 1.0,
        "response_length/clip_ratio": pytest.approx(1 / 6),
        "response_length/correct_mean": 1.5,
        "prompt_length/mean": 3.0,
        "prompt_length/max": 5.0,
        "prompt_length/min": 1.0,
        "off_policy/mean": pytest.approx(4 / 12),
        "off_policy/max": 3.0,
        "off_policy/first_token_mean": pytest.approx(4 / 6),
        "off_policy/share_0": pytest.approx(10 / 12),
        "off_policy/share_1": pytest.approx(1 / 12),
        "off_policy/share_2": 0.0,
        "off_policy/share_3": pytest.approx(1 / 12),
        "rollout/num_sampled_tokens": 12.0,
        "rollout/num_tokens": 30.0,
    }


def test_observed_tokens_have_no_age():
    """Of six tokens four were sampled, one and two versions ago; those that were observed are of no version."""
    prompt = Prompt(id="a", tokens=[1])
    told, asked = rollout(prompt, 0, [0, 3, 4], sampled=[0, 1, 1]), rollout(prompt, 1, [4, 0, 4], sampled=[1, 0, 1])
    row = metrics.describe([Group(prompt=prompt, rollouts=(told, asked), rewards=[1, 0], scored=[1, 1])], version=5)
    assert (row["off_policy/mean"], row["off_policy/max"]) == (1.25, 2.0)
    assert row["off_policy/first_token_mean"] == 1.5 and row["rollout/num_sampled_tokens"] == 4.0
    assert (row["off_policy/share_1"], row["off_policy/share_2"]) == (0.75, 0.25) and "off_policy/share_5" not in row


def test_what_was_not_scored_is_in_no_mean_and_rewards_that_differ_are_a_signal():
    """The unscored answer has components all the same; a penalty parts the rewards of two right answers, as TRL counts."""
    prompt = Prompt(id="a", tokens=[1])
    three = tuple(rollout(prompt, sample, [0]) for sample in range(3))
    given = Group(
        prompt=prompt,
        rollouts=three,
        rewards=[1, 0.5, 7],
        scored=[1, 1, 0],
        components={"acc": [1, 1, 0], "form": [1, 0, 9]},
    )
    row = metrics.describe([given], version=0)
    assert (row["reward/acc/mean"], row["reward/form/mean"], row["critic/score/max"]) == (1.0, 0.5, 1.0)
    assert row["frac_reward_zero_std"] == 0.0 and row["reward_std"] == 0.25


def test_groups_of_one_rollout_compare_no_rewards():
    """Supervised training has such groups: equal rewards are no alarm there."""
    (one,) = groups()[:1]
    single = dataclasses.replace(
        one, rollouts=one.rollouts[:1], rewards=one.rewards[:1], scored=one.scored[:1], components={}
    )
    row = metrics.describe([single], version=5)
    assert "critic/score/mean" in row and "frac_reward_zero_std" not in row and "reward_std" not in row


def test_describe_of_nothing_scored_has_no_score():
    row = metrics.describe(groups()[2:], version=5)
    assert "critic/score/mean" not in row and "reward/mean" not in row and row["frac_reward_zero_std"] == 1.0
    assert not any(math.isnan(value) for value in row.values()) and metrics.describe((), 0) == {}


def test_timings_are_told_apart():
    row = {
        "timing_s/gen": 1.0,
        "perf/throughput": 2.0,
        "memory/peak_gb": 3.0,
        "critic/score/mean": 4.0,
        "rows/idle": 5.0,
    }
    assert metric_rows.deterministic(row) == {"critic/score/mean": 4.0, "rows/idle": 5.0}


def test_jsonl_is_json_and_reads_back(tmp_path):
    file = metric_rows.Jsonl(tmp_path / "metrics.jsonl")
    file.write(1, {"b": np.float32(0.1), "a": np.array(2)})
    file.write(2, {"a": float("nan"), "b": float("inf")})
    file.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert list(json.loads(lines[0])) == ["step", "a", "b"]
    assert json.loads(lines[0]) == {"step": 1, "a": 2.0, "b": float(np.float32(0.1))}  # exact
    assert lines[1] == '{"step": 2, "a": null, "b": null}'
    assert math.isnan(metric_rows.read(tmp_path / "metrics.jsonl")[1]["a"])


ROW = {
    "critic/score/mean": 0.5,
    "reward/acc/mean": 0.25,
    "response_length/mean": 31.25,
    "actor/entropy": 0.125,
    "actor/pg_loss": -0.5,
    "actor/grad_norm": 1.5,
    "perf/throughput": 1234.4,
    "timing_s/step": 2.0,
    "other/x": 1.0,
}
EVAL = {"val-core/sums/acc/mean@4": 0.75, "val-aux/sums/acc/greedy": 0.5, "val-aux/sums/acc/pass@2": 1.0}


def test_a_plain_line_per_step():
    stream = io.StringIO()
    writer = metrics.console(60, stream)
    writer.write(3, ROW)
    writer.write(3, EVAL)
    writer.close()
    assert stream.getvalue() == (
        "step 3/60  reward 0.5000  acc 0.2500  length 31.2  entropy 0.1250  loss -0.50000  grad 1.5000  tokens/s 1234"
        "  s 2.00\nstep 3/60  sums/acc/greedy 0.5000  sums/acc/mean@4 0.7500\n"
    )


def test_supervised_runs_show_what_they_learn_and_no_reward():
    """As TRL's SFTTrainer and DPOTrainer print them. A row with nothing to show has no line."""
    stream = io.StringIO()
    writer = metrics.console(8, stream, columns=metrics.SUPERVISED)
    more = {"actor/lr": 2e-5, "training/trained_tokens": 1049.0}
    writer.write(3, ROW | more)
    writer.write(3, {"training/epoch": 1.0})
    writer.write(3, {"val/loss": 1.25, "val/loss_se": 0.5})
    pairs = {"actor/preference_loss": 0.6931, "rewards/accuracies": 0.75, "rewards/margins": 0.125}
    writer.write(4, ROW | more | pairs)
    assert stream.getvalue().splitlines() == [
        "step 3/8  loss -0.5000  lr 2e-05  grad 1.5000  tokens 1,049  tokens/s 1234  s 2.00",
        "step 3/8  val/loss 1.2500",
        "step 4/8  loss 0.6931  accuracy 0.7500  margin 0.1250  lr 2e-05  grad 1.5000  tokens 1,049  tokens/s 1234  s 2.00",
    ]


def test_a_quiet_run_has_plain_lines_on_a_terminal_too():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    assert isinstance(metrics.console(8, Terminal(), quiet=True), metrics.Plain)
    live = metrics.console(8, Terminal(), columns=metrics.SUPERVISED)
    live.write(1, ROW)
    live.close()
    assert isinstance(live, metrics.Live)


def test_the_live_table_shows_the_last_rows():
    stream = io.StringIO()
    writer = metrics.Live(60, rich.console.Console(file=stream, force_terminal=True, width=120, color_system=None))
    both = metrics.Several(writer, metrics.Plain(60, plain := io.StringIO()))
    for step in range(1, 20):
        both.write(step, ROW | {"critic/score/mean": step / 1000})
    both.write(19, EVAL)
    both.close()
    last = stream.getvalue().rpartition("step 19/60")[2]
    shown = [line.split()[1] for line in last.splitlines() if line.split()[1:2] and line.split()[0].isdigit()]
    assert shown == [f"{step / 1000:.4f}" for step in range(8, 20)]
    assert "evaluated at step 19: sums/acc/greedy 0.5000" in last and plain.getvalue().count("\n") == 20


@pytest.mark.parametrize(
    "garbage, words", [(b"\xff\xfe", "is no UTF-8 text"), (b"{", "no JSON"), (b"[1]", "a JSON object")]
)
def test_garbage_in_metrics_names_file_and_line(tmp_path, garbage, words):
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b'{"step": 1}\n' + garbage + b"\n")
    with pytest.raises(ValueError, match=f"{re.escape(str(file))}, line 2: .*{words}"):
        metric_rows.read(file)
