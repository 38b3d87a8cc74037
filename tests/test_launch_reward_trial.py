"""Trials of reward functions: scores and alarms that are known by hand, and the commands that make them."""

from __future__ import annotations

import json
import time
import types
from pathlib import Path

import numpy as np
import pytest

from jaxrl_post import __main__ as commands
from jaxrl_post import config as configs
from jaxrl_post.data.tokenizer import characters
from jaxrl_post.launch.parts import graders, inputs, reward_trial
from jaxrl_post.rewards.printed import Printed
from jaxrl_post.ring.types import Prompt

pytestmark = pytest.mark.usefixtures("quick_compilation")

ROOT = Path(__file__).resolve().parents[1]
REWARDS = r"""
from jaxrl_post.rewards import needs_no_truth

def exact(data_source, solution_str, ground_truth, extra_info):
    return float(solution_str == ground_truth)

def boxed(data_source, solution_str, ground_truth, extra_info):
    print("seen", repr(solution_str))
    return {"score": 2.0 * (solution_str == "\\boxed{" + ground_truth + "}"), "acc": float(ground_truth in solution_str)}

def twice(completions, answer):
    assert len(set(map(len, (completions, answer)))) == 1
    return [2.0 * (text == truth) for text, truth in zip(completions, answer)]

def zero(data_source, solution_str, ground_truth, extra_info): return 0.0

@needs_no_truth
def same(data_source, solution_str, ground_truth, extra_info): return 0.5

def misread(data_source, solution_str, ground_truth, extra_info):
    return float(solution_str == ground_truth and ground_truth != "3")

def shy(completions, answer):
    return [None if truth in text else float(len(text) % 2) for text, truth in zip(completions, answer)]

def alone(completions, **columns): return [1.0]

def loud(data_source, solution_str, ground_truth, extra_info):
    print("x" * (1 << 20))
    return float(solution_str == ground_truth)

def fails(data_source, solution_str, ground_truth, extra_info): return {}["x"]
"""


def start(*answers) -> types.SimpleNamespace:
    prompts = [
        Prompt(
            id=str(i),
            tokens=[1 + i],
            answer=str(answer),
            value=None if isinstance(answer, str) else answer,
            lacks="" if answer else "nothing",
            where=f"f.jsonl, line {i + 1}",
        )
        for i, answer in enumerate(answers)
    ]
    return types.SimpleNamespace(train=prompts, held_out=(), tokenizer=characters("0123456789+="))


@pytest.fixture
def tried(tmp_path):
    (tmp_path / "r.py").write_text(REWARDS)

    def one(name, *answers, sampled=()):
        given = start(*(answers or ("2", "3", "4")))
        function = f"{tmp_path / 'r.py'}:{name}" if ":" not in name else name
        about, size = configs.RewardConfig(workers=1, timeout_s=20.0), types.SimpleNamespace(group_size=4)
        config = types.SimpleNamespace(reward=about, scheduler=size)
        return reward_trial.tried(
            config, given, function, given.train, Printed(tmp_path / "rewards.log"), dict(sampled)
        )

    return one


def test_right_and_wrong_answers_in_the_form_that_a_function_reads(tried, tmp_path):
    begun = time.monotonic()
    trial = tried("exact")
    measured = time.monotonic() - begun
    assert trial.right.tolist() == [1, 1, 1] and trial.wrong.tolist() == [0, 0, 0] and trial.form == "X"
    assert trial.broken == trial.notes == trial.failures == () and 0 < trial.seconds < measured
    trial = tried("boxed")  # by "acc", which every form has
    assert trial.right.tolist() == [1, 1, 1] and not trial.broken
    assert "seen '\\\\boxed{2}'" in (tmp_path / "rewards.log").read_text()
    trial = tried("jaxrl_post.rewards.math:strict", "so 2\n#### 2", "#### 3")  # GSM8K's whole solutions
    assert trial.right.tolist() == [1, 1] and trial.wrong.tolist() == [0, 0] and trial.form == "X"
    assert tried("jaxrl_post.rewards.math:boxed").form == r"\boxed{X}"


def test_a_number_that_the_strict_rule_does_not_find_is_said(tried):
    strict, missed = "jaxrl_post.rewards.math:strict", "finds a number only as '#### 42' in the last 300 characters"
    drawn = {"1": ["#### +12", "so 12", "#### 12", "#### 12" + "." * 300, "none"]}
    trial = tried(strict, "so\n#### 2", "so\n#### 12", "so\n#### 4", sampled=drawn)
    (note,) = trial.notes  # "so 12" is right for math:math, too, and nothing is in "none"
    assert missed in note and "in 3 more of 8 texts, first in '#### +12' for f.jsonl, line 2" in note
    trial = tried(strict, "so\n#### $1,080", "so\n#### 3")
    assert "in 1 more of 2 texts, first in 'so\\n#### $1,080' for f.jsonl, line 1" in trial.notes[0]
    assert trial.broken == ("1 of 2 gold texts are not scored 1; the first is that of row 1",)
    assert not tried(strict).notes and not tried("jaxrl_post.rewards.math:flexible", "#### $5", "#### 3").notes
    assert "is a dict: math graders take" in tried(strict, {"x": 1}, {"x": 2}).notes[0]


@pytest.mark.parametrize(
    "name, answers, broken, note",
    [
        ("twice", (), "", "gold texts score 2, not 1"),
        ("zero", (), "all scores are 0, for right texts and for wrong ones", ""),
        ("same", ("", ""), "", "all scores are equal: 0.5, for right texts and for wrong ones"),
        ("misread", (), "1 of 3 gold texts are not scored 1; the first is that of row 2", ""),
        ("shy", (), "it scores no gold text, and some wrong ones", ""),
        ("fails", (), "it fails at ", ""),
        ("alone", (), "it returned a list of 1 for a group of 4 completions", ""),
        ("jaxrl_post.rewards.format:thinking", ("", ""), "", "all scores are 0"),
    ],
)
def test_alarms(tried, name, answers, broken, note):
    trial = tried(name, *answers)
    assert [bool(trial.broken), bool(trial.notes)] == [bool(broken), bool(note)]
    assert broken in "".join(trial.broken) and note in "".join(trial.notes)
    assert ("BROKEN: " in reward_trial.text(trial)) == bool(broken)


def test_sampled_rollouts_are_scored_by_row(tried):
    drawn = {"0": ["2", "9"], "1": ["3", "3"], "2": ["1", "1"]}
    trial = tried("exact", sampled=drawn)
    assert trial.sampled.tolist() == [[1, 0], [1, 1], [0, 0]] and not trial.notes
    assert "rows whose sampled rollouts have several scores: 1 of 3" in reward_trial.text(trial)
    assert tried("twice", sampled=drawn).sampled.tolist() == [[2, 0], [2, 2], [0, 0]]  # a group at a time
    none = tried("exact", sampled={prompt: ["x", "y"] for prompt in "012"})
    assert none.notes == ("all sampled rollouts score 0: such groups train nothing",) and not none.broken


def test_tests_are_no_answer_and_a_whole_program_is(tried):
    prompt = Prompt(id="p", tokens=[1], answer="assert f() == 1", extra={"code": "def f(): return 1"})
    assert [form for form, _, _ in reward_trial._texts_to_try(prompt, [prompt], whole=True)] == ["column 'code'"]
    texts = reward_trial.Texts(characters("ab"))
    group = texts.group(prompt, ["a", "Z", "", "ab"])  # a character that the tokenizer lacks
    assert [texts.decode(rollout.tokens) for rollout in group.rollouts] == ["a", "Z", "", "ab"]
    assert texts.decode(np.array([1, 1])) == "aa"


CONFIG = """
from jaxrl_post.config import default

def get_config():
    c = default()
    c.model.preset, c.model.tokenizer = "tiny", "{here}/tokenizer"
    c.engine.slots, c.engine.max_length, c.engine.page_size, c.engine.row_sizes = 8, 32, 8, (32,)
    c.sampling.max_tokens, c.eval.prompts = 8, 0
    c.data.train = "{here}/train.jsonl"
    c.reward.functions = ("{here}/r.py:exact", "{here}/r.py:boxed")
    return c
"""


@pytest.fixture
def here(tmp_path):
    characters("0123456789+=").save(tmp_path / "tokenizer")
    rows = [{"prompt": f"1+{n}=", "answer": str(n + 1)} for n in range(5)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "r.py").write_text(REWARDS)
    (tmp_path / "c.py").write_text(CONFIG.format(here=tmp_path))
    return tmp_path


def test_the_command_prints_every_function_and_writes_nothing(here, capsys):
    before = sorted(path for path in here.rglob("*") if "__pycache__" not in path.parts)
    assert commands.main(["reward_check", f"--config={here / 'c.py'}", "--rows=3", "--sampled=2"]) == 0
    said = capsys.readouterr().out
    assert said.count("sampled rollouts: mean ") == 2 == said.count("several scores: ") and " of 6 (" in said
    assert "3 rows of" in said and "gold texts, written 'X': mean 1 of 3 (1, 1, 1)" in said
    assert "printed by the functions:" in said and "more lines" in said
    functions = f"--config.reward.functions=['{here / 'r.py'}:exact','{here / 'r.py'}:fails']"
    assert commands.main(["reward_check", f"--config={here / 'c.py'}", functions, "--sampled=0"]) == 1
    said = capsys.readouterr()
    assert said.err.count("error: ") == 1 and "r.py:fails': it fails at " in said.err
    assert (said.out + said.err).count("KeyError: 'x'") == 1 and "WARNING" not in said.err
    assert sorted(path for path in here.rglob("*") if "__pycache__" not in path.parts) == before
    assert commands.main(["reward_check", f"--config={ROOT / 'configs' / 'demo/calculator.py'}"]) == 1
    assert "scored by the environment; only reward.functions are tried" in capsys.readouterr().err
    with pytest.raises(SystemExit) as end:
        commands.main(["reward_check", "--help"])
    assert end.value.code == 0 and "--rows=N" in capsys.readouterr().out


def test_the_command_cuts_what_functions_print_and_refuses_tests_of_nothing(here, capsys):
    words = ["reward_check", f"--config={here / 'c.py'}", "--sampled=0", "--rows=1"]
    assert commands.main([*words, f"--config.reward.functions=['{here / 'r.py'}:loud']"]) == 0
    assert len(capsys.readouterr().out) < 2000
    tests = "--config.reward.functions=['jaxrl_post.rewards.code:tests']"
    assert commands.main([*words, tests]) == 1
    assert "train.jsonl, line 1: reward function" in (said := capsys.readouterr().err) and "tests nothing" in said
    pairs = {"prompt": "1+1=", "answer": {"inputs": ["1 2\n"], "outputs": ["3\n"]}}
    (here / "train.jsonl").write_text(json.dumps(pairs) + "\n")
    assert commands.main([*words, tests]) == 0
    assert "'a program that knows the tests': mean 1 of 1 (1)" in capsys.readouterr().out


def test_one_call_says_where_a_function_fails(here):
    config = configs.resolve(configs.load(str(here / "c.py")))
    begun = inputs.gather(config)
    graders.checked(config, begun)
    changed = configs.resolve(configs.load(str(here / "c.py")), [f"reward.functions=['{here / 'r.py'}:fails']"])
    line = 1 + REWARDS.splitlines().index(
        'def fails(data_source, solution_str, ground_truth, extra_info): return {}["x"]'
    )
    with pytest.raises(ValueError) as caught:
        graders.checked(changed, begun)
    where = f"the gold answer of {here / 'train.jsonl'}, line 1"
    assert f"r.py:{line}: KeyError: 'x'" in str(caught.value) and str(caught.value).endswith(where)
