"""Procedural tasks: answers against arithmetic done here, disjoint splits over the real sizes, shares, solutions."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from refusals import refused

from jaxrl_post import config
from jaxrl_post.data import prompts, tasks, tokenizer
from jaxrl_post.rewards import math as scorers

ROOT = Path(__file__).resolve().parents[1]


def seeds(n, start=0):
    return [np.array([start + i, 7], np.uint32) for i in range(n)]


def test_sums_are_right_and_pure():
    rows = tasks.sum_rows(3, "train", 200)
    assert rows == tasks.sum_rows(3, "train", 200) != tasks.sum_rows(4, "train", 200)
    for row in rows:
        assert re.fullmatch(r"[1-9]\d(\+[1-9]){2,8}=", row["prompt"])
        assert int(row["answer"]) == eval(row["prompt"][:-1]) == sum(row["extra"]["terms"])
        assert set(row["prompt"]) <= set(tasks.ALPHABET) and row["source"] == "sums" and row["prompt"] in row["id"]
    assert tasks.sum_rows(3, "train", 50) == rows[:50]


@pytest.mark.parametrize("name", sorted(tasks.TASKS))
def test_splits_share_no_problem_whatever_the_seed(name):
    size = {"grid_world": 40, "turns": 80}.get(name, 150)  # a grid has few places
    seen = {
        split: {row["id"] for seed in range(3) for row in tasks.TASKS[name].rows(seed, split, size)}
        for split in tasks.SHARES
    }
    assert all(len(ids) > size for ids in seen.values())
    assert sum(map(len, seen.values())) == len(set.union(*seen.values()))


@pytest.mark.parametrize("name", sorted(tasks.TASKS))
def test_solved_held_out_problems_are_those_of_the_held_out_split(name):
    rows = tasks.TASKS[name].rows(0, "eval-sft", 30)
    asked = {row["id"] for row in tasks.TASKS[name].rows(0, "eval", 30)}
    assert all(row["id"] in asked or row["id"].rpartition("/")[0] in asked for row in rows) and len(rows) == 30
    assert all(tasks.TASKS[name].demonstrate(row["extra"], seeds(1)[0]) for row in rows)


def test_demo_sizes_are_disjoint():
    """The prompts of configs/demo/sft.py, configs/demo.py and its evaluation, at the seeds that are shown."""
    rl, sft = (config.resolve(config.load(str(ROOT / "configs" / f"{name}.py"))) for name in ("demo", "demo/sft"))

    def ids(settings, split, seed, size):
        rows = prompts.rows(settings.data.train, seed=seed, split=split, size=size, arguments=settings.data.task)
        return {row["id"] for row in rows}

    taught = ids(sft, "sft", sft.seed, sft.data.size)
    assert len(taught) == sft.data.size
    for seed in range(3):
        trained, held_out = ids(rl, "train", seed, rl.data.size), ids(rl, "eval", seed, 1024)
        assert len(trained) == rl.data.size and len(held_out) == 1024
        assert not trained & held_out and not taught & held_out and not taught & trained


def test_split_shares():
    texts = [f"{a}+{b}+{c}=" for a in range(10, 100) for b in range(1, 10) for c in range(1, 10)]
    found = [tasks.split_of(text) for text in texts]
    for split, sixteenths in tasks.SHARES.items():
        assert abs(found.count(split) / len(found) - sixteenths / 16) < 0.02


@pytest.mark.parametrize("size", [64, 256, 1024])
def test_terms_keep_their_shares_in_small_sets(size):
    rows = tasks.sum_rows(11, "eval", size, more=0.25, tail=0.1, longest=8)
    terms = np.array([len(row["extra"]["terms"]) for row in rows])
    expected = {3: 0.9 * 0.75, 4: 0.9 * 0.25 * 0.75, 5: 0.9 * 0.25**2 * 0.75, 6: 0.9 * 0.25**3, 7: 0.05, 8: 0.05}
    assert sum(expected.values()) == pytest.approx(1.0)
    for n, share in expected.items():
        assert abs(float(np.mean(terms == n)) - share) < 3 / size


def test_edges_of_the_number_of_terms():
    assert {len(r["extra"]["terms"]) for r in tasks.sum_rows(0, "sft", 40, more=0.0, tail=0.0)} == {3}
    assert {len(r["extra"]["terms"]) for r in tasks.sum_rows(0, "sft", 40, more=1.0, tail=0.0)} == {6}
    assert {len(r["extra"]["terms"]) for r in tasks.sum_rows(0, "sft", 40, tail=1.0)} == {7, 8, 9}


def test_careful_solution():
    assert tasks.work_out([55, 5, 1]) == "60+1=61#61"
    assert tasks.work_out([97, 4, 9, 2]) == "101+9+2=110+2=112#112"
    assert tasks.work_out([10, 9]) == "19#19"
    for row in tasks.sum_rows(1, "sft", 100, careful=1.0):
        solution = tasks.solve_sum(row["extra"], seeds(1)[0])
        chain, _, answer = solution.partition("#")
        assert {eval(step) for step in chain.split("=")} == {int(row["answer"])} and answer == row["answer"]
        assert scorers.exact("sums", solution, row["answer"], {}) == 1.0


def test_styles_have_their_shares_and_ignore_the_problem():
    extra = {"terms": [40, 1, 2, 4], "careful": 0.35, "luck": 0.15}
    found = [tasks.solve_sum(extra, seed) for seed in seeds(4000)]
    careful = [not text.startswith("#") for text in found]
    assert abs(np.mean(careful) - 0.35) < 0.03
    assert abs(found.count("#47") / 4000 - 0.65 * 0.15) < 0.02
    for wrong in ("#46", "#45", "#43"):
        assert abs(found.count(wrong) / 4000 - 0.65 * 0.85 / 3) < 0.03
    other = extra | {"terms": [12, 3, 3, 3, 3, 3, 3]}
    assert careful == [not tasks.solve_sum(other, seed).startswith("#") for seed in seeds(4000)]


def test_only_supervised_rows_say_how_to_solve():
    assert tasks.sum_rows(0, "sft", 1, careful=0.5)[0]["extra"].keys() == {"terms", "careful", "luck"}
    assert tasks.sum_rows(0, "eval", 1, careful=0.5)[0]["extra"].keys() == {"terms"}


def test_sorting():
    rows = tasks.sorting_rows(0, "train", 50, shortest=3, longest=7)
    assert {len(row["answer"]) for row in rows} == {3, 4, 5, 6, 7}
    for row in rows:
        counts = [row["prompt"].count(d) for d in "0123456789"]
        assert row["answer"] == "".join(d * n for d, n in zip("0123456789", counts))
        assert tasks.solve_sorting(row["extra"], seeds(1)[0]) == "#" + row["answer"]


def test_a_gap_leaves_the_tail_alone_and_the_rest_as_it_was():
    wide, plain = (tasks.sum_rows(5, "train", 400, usual=3, tail=0.1, gap=gap) for gap in (5, 0))
    terms = [[len(row["extra"]["terms"]) for row in rows] for rows in (wide, plain)]
    assert set(terms[0]) == {3, 9} and set(terms[1]) == {3, 4, 5, 6, 7, 8, 9}
    assert [n == 3 for n in terms[0]] == [n == 3 for n in terms[1]] and abs(
        np.mean(terms[0] == np.array(9)) - 0.1
    ) < 0.01


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (dict(gap=3), "usual <= usual \\+ gap < longest <= 20"),
        (dict(gap=-1), "gap=-1"),
        (dict(split="test"), "split 'test' is not one of eval, train, sft"),
        (dict(size=2000, usual=3, tail=0.0), r"size=2000 is more than split 'eval' has .* is about [89]\d\d"),
        (dict(usual=9), "2 <= shortest <= usual <= usual"),
        (dict(tail=1.5), "tail=1.5 must lie from 0 to 1"),
    ],
)
def test_refusals(arguments, sentence):
    refused(sentence, tasks.sum_rows, **{"seed": 0, "split": "eval", "size": 4, **arguments})


def test_shipped_tokenizer_has_the_alphabet():
    words = tokenizer.load(ROOT / "configs" / "demo_policy")
    ids = words.encode(tasks.ALPHABET)
    assert len(set(ids)) == len(tasks.ALPHABET) and words.decode(ids) == tasks.ALPHABET
    assert words.eos_ids == (0,) and words.decode([*ids, 0]) == tasks.ALPHABET


@pytest.mark.parametrize("name, given", [("sums", {}), ("sums", {"careful": 0.0}), ("sorting", {}), ("openings", {})])
def test_no_seed_gives_a_longer_demonstration_than_the_longest(name, given):
    task = tasks.TASKS[name]
    for row in task.rows(0, "sft", 20, **given):
        lengths = [len(task.demonstrate(row["extra"], seed)) for seed in seeds(40)]
        assert max(lengths) == len(task.longest(row["extra"]))
