"""Several sources in one order: weights, epochs of each source, ids, and random access, against a count by hand."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_groups import rollout
from refusals import refused

from jaxrl_post import config as configs
from jaxrl_post.data import prompts
from jaxrl_post.data.prompts import Mixture
from jaxrl_post.data.tokenizer import characters
from jaxrl_post.launch.parts import inputs
from jaxrl_post.ring.types import Group, Prompt
from jaxrl_post.telemetry import metrics

SIZES = st.lists(st.integers(1, 9), min_size=1, max_size=4)


def named_prompts(name: str, size: int) -> list[Prompt]:
    return [Prompt(id=f"{name}/{i}", tokens=[1, 2]) for i in range(size)]


def made(sizes, weights, seed=0) -> Mixture:
    return Mixture({f"s{i}": named_prompts(f"s{i}", size) for i, size in enumerate(sizes)}, weights, seed)


def source(prompt: Prompt) -> str:
    return prompt.id.partition("/")[0]


@settings(max_examples=20, deadline=None)
@given(
    sizes=SIZES,
    seed=st.integers(0, 99),
    count=st.integers(1, 200),
    start=st.integers(0, 5000),
    noise=st.integers(0, 99),
)
def test_every_stretch_of_positions_has_each_weight_and_every_epoch_each_prompt_once(sizes, seed, count, start, noise):
    weights = np.random.default_rng(noise).uniform(0.1, 5.0, len(sizes))
    data = made(sizes, list(weights), seed)
    drawn = [data.at(position) for position in range(start, start + count)]
    shares, counts = weights / weights.sum(), Counter(source(prompt) for _, prompt in drawn)
    for i, share in enumerate(shares):  # two ends of a stretch, and grain's hundredths of the least weight
        assert abs(counts[f"s{i}"] - count * share) <= 2 + 0.01 * len(sizes) * count
    assert len({(epoch, prompt.id) for epoch, prompt in drawn}) == count
    again = made(sizes, list(weights), seed)  # a resumed run asks for late positions first
    assert [(epoch, prompt.id) for epoch, prompt in map(again.at, range(start, start + count))] == [
        (epoch, prompt.id) for epoch, prompt in drawn
    ]


def test_each_source_runs_through_its_epochs_by_itself():
    data, seen = made((3, 8), (1, 1)), {"s0": [], "s1": []}
    for position in range(48):
        epoch, prompt = data.at(position)
        seen[source(prompt)].append((epoch, prompt.id))
    for name, size in (("s0", 3), ("s1", 8)):
        assert [epoch for epoch, _ in seen[name]] == [place // size for place in range(24)]
        assert set(seen[name]) == {(epoch, f"{name}/{i}") for epoch in range(24 // size) for i in range(size)}
    assert len(data) == 11 and len({prompt.id for prompt in data}) == 11


def test_another_source_changes_no_id_and_no_order_of_the_others():
    one, two = made((5,), (1,)), made((5, 4), (1, 1))
    own = [prompt.id for _, prompt in map(two.at, range(40)) if source(prompt) == "s0"]
    assert own == [one.at(place)[1].id for place in range(len(own))]
    assert [prompt.id for _, prompt in map(made((5,), (1,), 1).at, range(20))] != own


def test_sources_are_named_by_their_files():
    assert prompts.named(("task:sums", "a/gsm8k.jsonl")) == {"sums": "task:sums", "gsm8k": "a/gsm8k.jsonl"}
    refused(r"'a/x.jsonl' and 'b/x.parquet' are both called 'x'", prompts.named, ("a/x.jsonl", "b/x.parquet"))


def gathered(folder, *overrides) -> inputs.Inputs:
    characters("0123456789+=").save(folder / "tokenizer")
    c = configs.default()
    c.data.size, c.eval.prompts, c.model.preset = 8, 4, "tiny"
    c.engine.max_length, c.sampling.max_tokens = 128, 64
    c.model.tokenizer = str(folder / "tokenizer")
    return inputs.gather(configs.resolve(c, overrides))


def test_files_and_tasks_are_read_with_ids_and_sources_of_their_own(tmp_path):
    for name in ("a", "b"):
        rows = [f'{{"id": "{i}", "prompt": "{i}=", "answer": "1"}}\n' for i in range(3)]
        (tmp_path / f"{name}.jsonl").write_text("".join(rows))
    files = f"data.sources=['{tmp_path}/a.jsonl','{tmp_path}/b.jsonl']"
    found = gathered(tmp_path, files, "data.weights=[2,1]", "eval.prompts=0").train
    assert sorted(prompt.id for prompt in found) == [f"{name}/{i}" for name in "ab" for i in range(3)]
    assert {(source(prompt), prompt.source) for prompt in found} == {("a", "a"), ("b", "b")}
    assert Counter(source(found.at(position)[1]) for position in range(30)) == {"a": 20, "b": 10}
    refused(r"eval.data is empty and .*/a.j.* of data.sources is a file", gathered, tmp_path, files)
    refused("share 3 prompts", gathered, tmp_path, files, f"eval.data={tmp_path / 'b.jsonl'}")


def test_tasks_hold_out_prompts_of_each(tmp_path):
    found = gathered(tmp_path, "data.sources=['task:sums','task:sorting']")
    assert Counter(prompt.source for prompt in found.held_out) == {"sums": 2, "sorting": 2}
    assert Counter(prompt.source for prompt in found.train) == {"sums": 8, "sorting": 8}


def test_metrics_tell_the_sources_apart():
    def group(source: str, *rewards: float) -> Group:
        prompt = Prompt(id=source, tokens=[1], source=source)
        rollouts = tuple(rollout(prompt, i, [1]) for i in range(len(rewards)))
        return Group(prompt=prompt, rollouts=rollouts, rewards=rewards, scored=[1] * len(rewards))

    row = metrics.describe([group("a", 1.0, 1.0), group("b", 0.0, 1.0), group("a", 0.0, 0.0), group("a", 0.5, 0.5)], 0)
    assert row["data/a/share"] == 0.75 and row["data/b/score/mean"] == 0.5
    assert row["data/a/score/mean"] == pytest.approx(0.5)
    assert "data/a/share" not in metrics.describe([group("a", 1.0)], 0)
