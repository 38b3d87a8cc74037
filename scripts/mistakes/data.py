"""Mistakes in data files: rows without an answer, rows of another kind, demonstrations with nothing to learn."""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CONFIG = """
from pathlib import Path
import jaxrl_post
from jaxrl_post.config import default

def get_config():
    c = default()
    c.name, c.steps, c.run_dir = "own", 2, "runs"
    c.model.path = str(Path(jaxrl_post.__file__).parents[1] / "configs" / "demo_policy")
    c.data.train, c.eval.prompts = "train.jsonl", 0
    c.scheduler.prompts, c.scheduler.group_size = 2, 2
    c.engine.slots, c.engine.max_length, c.engine.row_sizes = 4, 32, (32,)
    c.sampling.max_tokens, c.batch.rows, c.batch.tokens = 8, 2, 64
    return c
"""
SUPERVISED = (
    "--config.engine.row_sizes=(64,128)",
    "--config.engine.name=demonstrations",
    "--config.algorithm.loss_mode=sft",
    "--config.algorithm.adv_estimator=ones",
    "--config.scheduler.group_size=1",
)
TURN = "{% for m in messages %}{{ '=' if m.role == 'assistant' else '+' }}{{ m.content }}<eos>{% endfor %}"
TEMPLATE = TURN + "{% if add_generation_prompt %}={% endif %}"
OTHER = "{% if messages | length > 1 %}+{% endif %}" + TEMPLATE
SILENT = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
REWARDS = """
def by_level(completions, level): return [1.0 for _ in completions]
def by_solution(completions, solution): return [1.0 for _ in completions]
def any_kind(completions, **columns): return [1.0 for _ in completions]
"""
GOOD = {"prompt": "1+1=", "answer": "2"}
TRAIN = ("-m", "jaxrl_post.main", "--config=config.py")


def lines(*rows) -> str:
    return "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)


def talk(*contents: str | None) -> list[dict]:
    """A conversation, the user's turn first."""
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]


def case(name: str, says: str, *rows, flags=(), **files) -> dict:
    """A training file that begins with a good row, if other rows follow it."""
    given = {"config.py": CONFIG, "rewards.py": REWARDS, "train.jsonl": lines(*rows)}
    return {"name": name, "files": given | files, "argv": [*TRAIN, *flags], "says": says}


def supervised(name: str, says: str, *rows, template: str = "", flags=()) -> dict:
    """A supervised file, with a chat template where one is given."""
    folder, found = ROOT / "configs" / "demo_policy", {}
    if template:
        found = {
            f"words/{file}": (folder / file).read_text() for file in ("tokenizer.json", "tokenizer_config.json")
        } | {"words/chat_template.jinja": template}
        flags = ("--config.model.tokenizer=words", *flags)
    return case(name, says, {"prompt": "2+2=", "completion": "4"}, *rows, flags=(*SUPERVISED, *flags), **found)


TRL = "--config.data.format=trl"
SLIME = "--config.data.format=slime"
LACKS = "but reward function 'jaxrl_post.rewards.math:exact' needs a ground truth"


def named(roles: dict) -> str:
    return f"--config.data.columns={roles}"


def function(name: str) -> str:
    return f"--config.reward.functions=['rewards.py:{name}']"


TRUTHS = [
    case(
        "TRL rows without an answer",
        rf"train.jsonl, line 1: no column is named as the answer.*{LACKS}",
        {"prompt": "1="},
        flags=[TRL],
    ),
    case(
        "verl rows without an answer",
        rf"line 2: there is no column 'reward_model.ground_truth'.*{LACKS}",
        GOOD,
        {"prompt": "2="},
    ),
    case(
        "an answer that is null", rf"line 2: column 'answer' is null, {LACKS}", GOOD, {"prompt": "2=", "answer": None}
    ),
    case("an answer that is NaN", rf"line 2: column 'answer' is NaN, {LACKS}", GOOD, '{"prompt": "2=", "answer": NaN}'),
    case("an answer of spaces", rf"line 2: column 'answer' is empty, {LACKS}", GOOD, {"prompt": "2=", "answer": "  "}),
    case(
        "a null inside of verl's object",
        r"line 1: column 'reward_model.ground_truth' is null",
        {"prompt": "1=", "reward_model": {"ground_truth": None}},
    ),
    case(
        "slime rows without a label",
        rf"line 1: there is no column 'label'.*{LACKS}",
        {"prompt": "1=", "metadata": {}},
        flags=[SLIME],
    ),
    case(
        "an answer under another name",
        r"line 1: there is no column 'gold'; its columns are prompt, answer",
        GOOD,
        flags=[named({"answer": "gold"})],
    ),
    case(
        "a column that a TRL reward names",
        r"'rewards.py:by_level' needs the column 'level', which prompt '\w+' \(train.jsonl, line 1\)",
        GOOD,
        flags=[function("by_level")],
    ),
    case(
        "a solution that is null",
        r"train.jsonl, line 1: column 'solution' is null, but reward function 'rewards.py:by_solution'",
        {"prompt": "1=", "solution": None},
        flags=[function("by_solution"), TRL],
    ),
    case(
        "a column named as a list of every call",
        r"line 2: column 'completions' has the name of an argument that reward functions get; rename",
        GOOD,
        GOOD | {"completions": 1, "prompt": "2="},
        flags=[function("any_kind")],
    ),
    case("a column named rollout", r"line 1: column 'rollout' has the name of an argument", GOOD | {"rollout": 3}),
]
ROWS = [
    case("no file", r"data: there is no file train.json; write a path", flags=["--config.data.train=train.json"]),
    case("an empty file", r"no prompts|no rows"),
    case(
        "another kind of file",
        r"'.csv'; known are .jsonl, .json, .parquet",
        flags=["--config.data.train=train.csv"],
        **{"train.csv": "a,b"},
    ),
    case("a line that is no JSON", r"train.jsonl, line 2", GOOD, "{'prompt': 1}"),
    case("a line that is a list", r"train.jsonl, line 2: must be an object, got a list", GOOD, "[1]"),
    case(
        "no prompt",
        r"line 2: there is no column 'prompt'; its columns are question, answer",
        GOOD,
        {"question": "1=", "answer": "1"},
    ),
    case("an empty prompt", r"line 2, column 'prompt': is empty", GOOD, {"prompt": "", "answer": "1"}),
    case(
        "a prompt that is a number",
        r"line 2, column 'prompt': must be a text or a list of messages",
        GOOD,
        {"prompt": 3, "answer": "1"},
    ),
    case(
        "a message without a role",
        r"line 2, column 'prompt\[0\]': must be an object with role and content",
        GOOD,
        {"prompt": [{"content": "1"}], "answer": "1"},
    ),
    case(
        "messages without a chat template",
        r"line 1 .*the tokenizer has no chat template",
        {"prompt": talk("1="), "answer": "1"},
    ),
    case("the same row twice", r"line 2 .*has the id of train.jsonl, line 1", GOOD, GOOD),
    case(
        "a prompt that is too long",
        r"line 2 .*the prompt has 25 tokens; it must have 1 to 24",
        GOOD,
        {"prompt": "1" * 25, "answer": "1"},
    ),
    case("a character that the tokenizer lacks", r"line 2 .*no token for 'x'", GOOD, {"prompt": "x=", "answer": "1"}),
    case(
        "extra_info that is no object",
        r"line 1, column 'extra_info': must be an object, got 3",
        GOOD | {"extra_info": 3},
    ),
    case(
        "a role that does not exist",
        r"data.columns: 'promt' is not one of .*; nearest is 'prompt'",
        GOOD,
        flags=[named({"promt": "q"})],
    ),
    case(
        "a format that does not exist",
        r"data.format='openrlhf' is not one of verl, trl, slime",
        GOOD,
        flags=["--config.data.format=openrlhf"],
    ),
    case(
        "a template without its place",
        r"data.template='think' must hold \{prompt\}",
        GOOD,
        flags=["--config.data.template=think"],
    ),
    case(
        "preferences in a reinforcement run",
        r"line 1: is a row of preferences \(chosen, rejected\)",
        {"chosen": "1", "rejected": "2"},
        flags=[TRL],
    ),
    case(
        "a role of supervised training alone",
        r"data.columns: completion='answer' is read by engine.name='demonstrations' alone",
        GOOD,
        flags=[named({"completion": "answer"})],
    ),
    case(
        "held-out prompts that are trained on",
        r"eval.data and data.train share 1 prompts",
        GOOD,
        flags=["--config.eval.data=train.jsonl", "--config.eval.prompts=1"],
    ),
    case(
        "a file without held-out prompts",
        r"eval.data is empty and data.train='train.jsonl' is a file",
        GOOD,
        flags=["--config.eval.prompts=1"],
    ),
]
DEMONSTRATIONS = [
    supervised(
        "a completion that is empty",
        r"train.jsonl, line 2 .*the demonstration is empty",
        {"prompt": "1=", "completion": ""},
    ),
    supervised(
        "a completion of an end token alone",
        r"line 2 .*the demonstration is empty",
        {"prompt": "1=", "completion": "<eos>"},
    ),
    supervised(
        "a template that drops the answer",
        r"line 2 .*the demonstration is empty",
        {"messages": talk("1=", "1")},
        template=SILENT,
    ),
    supervised(
        "an answer of null", r"line 2 .*the demonstration is empty", {"messages": talk("1=", None)}, template=TEMPLATE
    ),
    supervised(
        "a template that writes a prompt in another way when a completion follows",
        r"line 2 .*the chat template \S*chat_template.jinja writes the prompt in another way .*: at character 1 it",
        {"messages": talk("1=", "1")},
        template=OTHER,
    ),
    supervised(
        "messages that end with the user",
        r"line 2, column 'messages': its last message is of 'user'",
        {"messages": talk("1=", "1", "2=")},
        template=TEMPLATE,
    ),
    supervised(
        "an answer to nothing",
        r"line 2, column 'messages': holds a completion and no prompt",
        {"messages": talk("", "1")[1:]},
        template=TEMPLATE,
    ),
    supervised(
        "messages that are a text",
        r"line 2, column 'messages': must be a list of messages",
        {"messages": "1=1"},
        template=TEMPLATE,
    ),
    supervised(
        "a conversation without a chat template",
        r"line 2 .*the tokenizer has no chat template",
        {"messages": talk("1=", "1")},
    ),
    supervised("a text of one token", r"line 2 .*the demonstration is empty", {"text": "1"}),
    supervised(
        "a text in a template",
        r"line 2, column 'text': is trained on as it is: data.template",
        {"text": "1=1"},
        flags=["--config.data.template={prompt}="],
    ),
    supervised("a text without a ground truth", rf"line 2: .*{LACKS}", {"text": "1=1"}),
    supervised(
        "preferences with a prompt",
        r"line 2: is a row of preferences, with 'chosen' and 'rejected'",
        {"prompt": "1=", "chosen": "1", "rejected": "2"},
    ),
    supervised(
        "preferences without a prompt",
        r"line 2: is a row of preferences, with 'chosen' and 'rejected'",
        {"chosen": talk("1=", "1"), "rejected": talk("1=", "2")},
    ),
    supervised(
        "completions that are labelled",
        r"with 'completion' and a 'label' of true or false",
        {"prompt": "1=", "completion": "2", "label": False},
    ),
    supervised("a completion without a prompt", r"line 2: there is no column 'prompt'", {"completion": "1"}),
    supervised(
        "a completion of messages behind a text",
        r"line 2, column 'completion': is a message, but the prompt is a text",
        {"prompt": "1=", "completion": talk("", "1")[1:]},
        template=TEMPLATE,
    ),
    supervised(
        "a completion of two messages",
        r"must be a text or one message of the assistant",
        {"prompt": talk("1="), "completion": talk("", "1", "2")[1:]},
        template=TEMPLATE,
    ),
    supervised(
        "a completion that is too long",
        r"has 10 tokens with its end, more than sampling.max_tokens=8; the nearest valid value is 10",
        {"prompt": "1=", "completion": "1" * 9},
    ),
    supervised(
        "a prompt with nothing to demonstrate",
        r"line 2: there is no column 'reward_model.ground_truth'.*nothing to demonstrate",
        {"prompt": "1="},
    ),
    supervised(
        "stepwise rows", r"line 2: .*nothing to demonstrate", {"prompt": "1=", "completions": ["1"], "labels": [True]}
    ),
    supervised(
        "evaluation on rows of text",
        r"held.jsonl, line 1: a row of 'text' asks nothing",
        flags=["--config.eval.data=held.jsonl", "--config.eval.prompts=1"],
    ),
]
DEMONSTRATIONS[-1]["files"]["held.jsonl"] = lines({"text": "1=1"})
CASES = [*TRUTHS, *ROWS, *DEMONSTRATIONS]
