"""Mistakes in reward functions: they cannot be loaded, fail when they are called, or cannot tell right from wrong."""

from __future__ import annotations

CONFIG = """
from pathlib import Path
import jaxrl_post
from jaxrl_post.config import default

def get_config():
    c = default()
    c.name, c.steps, c.run_dir = "own", 2, "runs"
    c.model.path = str(Path(jaxrl_post.__file__).parents[1] / "configs" / "demo_policy")
    c.data.train, c.eval.prompts = "train.jsonl", 0
    c.reward.functions, c.reward.timeout_s = ("reward.py:score",), 2.0
    c.scheduler.prompts, c.scheduler.group_size = 2, 2
    c.engine.slots, c.engine.max_length, c.engine.row_sizes = 4, 32, (32,)
    c.sampling.max_tokens, c.batch.rows, c.batch.tokens = 8, 2, 64
    return c
"""
ROWS = '{"prompt": "1+1=", "answer": "2"}\n{"prompt": "1+2=", "answer": "3"}\n{"prompt": "1+3=", "answer": "4"}\n'
ARGUMENTS = "data_source, solution_str, ground_truth, extra_info"
RUN = ("-m", "jaxrl_post.main", "--config=config.py")
PLAN = (*RUN, "--dry-run")
CHECK = ("-m", "jaxrl_post", "reward_check", "--config=config.py", "--sampled=0")


def case(name: str, says: str, body: str, argv=RUN, *flags: str, head: str = f"def score({ARGUMENTS}):") -> dict:
    """A reward function of one line behind its head, which is line 2."""
    files = {"config.py": CONFIG, "train.jsonl": ROWS, "reward.py": f"import os, sys, time\n{head}\n    {body}\n"}
    return {"name": name, "files": files, "argv": [*argv, *flags], "says": says}


def group(name: str, says: str, body: str, argv=PLAN, arguments: str = "completions, **columns") -> dict:
    """The same, of TRL's signature."""
    return case(name, says, body, argv, head=f"def score({arguments}):")


def functions(text: str) -> str:
    return f"--config.reward.functions={text}"


LOADED = [
    case("no such file", r"there is no file .*rewards.py", "return 1.0", RUN, functions("['rewards.py:score']")),
    case("no such function", r"has no 'scor'; nearest is 'score'", "return 1.0", RUN, functions("['reward.py:scor']")),
    case("no such module", r"there is no module 'rewardz'", "return 1.0", RUN, functions("['rewardz:score']")),
    case(
        "no function named", r"must be written pkg.mod:fn or file.py:fn", "return 1.0", RUN, functions("['reward.py']")
    ),
    case("no functions at all", r"reward.functions is empty", "return 1.0", RUN, functions("[]")),
    case(
        "weights of another number",
        r"reward.weights has 2 entries, reward.functions 1",
        "return 1.0",
        RUN,
        "--config.reward.weights=(1.0,2.0)",
    ),
    case(
        "what is no function", r"'sys' is a module, not a function", "return 1.0", RUN, functions("['reward.py:sys']")
    ),
    case(
        "a built-in under a wrong name",
        r"has no 'exakt'; nearest is 'exact'",
        "return 1.0",
        RUN,
        functions("['jaxrl_post.rewards.math:exakt']"),
    ),
    case(
        "arguments of neither signature",
        r"does not take the four arguments",
        "return 1.0",
        head="def score(text, truth):",
    ),
    case(
        "a file that raises while it is loaded",
        r"cannot be loaded: ZeroDivisionError: division by zero at .*reward.py:2",
        "pass",
        head="1 / 0\nif True:",
    ),
    case(
        "a file with a mistake of syntax",
        r"cannot be loaded: SyntaxError: .* at .*reward.py:2",
        "pass",
        head="def score(:",
    ),
    case(
        "an import that is missing",
        r"cannot be loaded: ModuleNotFoundError: No module named 'nowhere' at .*reward.py:2",
        "pass",
        head="import nowhere\nif True:",
    ),
    case(
        "needs_truth that is no bool",
        r"its attribute needs_truth must be True or False, got 'no'",
        "return 1.0\nscore.needs_truth = 'no'",
    ),
    group(
        "trainer_state, which only TRL has",
        r"needs 'trainer_state', which is not given",
        "return [1.0]",
        RUN,
        "completions, trainer_state",
    ),
    group("arguments by position", r"must take its arguments by name", "return [1.0]", RUN, "completions, /"),
]
CALLED = [
    case(
        "an exception at the first call",
        r"'reward.py:score' fails at .*reward.py:3: KeyError: 'level'; it was called with the gold answer of train.jsonl, line 1",
        "return extra_info['level']",
        PLAN,
    ),
    case(
        "a number that is not finite",
        r"fails at .*reward.py:2: ValueError: score is nan, which is no finite number",
        "return float('nan')",
        PLAN,
    ),
    case("a dict without a score", r"ValueError: the dict has no 'score', only \['acc'\]", "return {'acc': 1.0}", PLAN),
    case("nothing returned", r"ValueError: score is None, which is no finite number", "pass", PLAN),
    case("a function that ends its process", r"fails: the process ended with status 3", "os._exit(3)", PLAN),
    case("a function that takes too long", r"fails: took longer than 2 s", "time.sleep(60)", PLAN),
    group(
        "one number for a group",
        r"it must return a list of 1 numbers or None, one per completion; got 1.0",
        "return 1.0",
    ),
    group(
        "a list of another length", r"it returned a list of 3 for a group of 1 completions", "return [1.0, 2.0, 3.0]"
    ),
    group(
        "a list for one completion of a group",
        r"it returned a list of 1 for a group of \d+ completions",
        "return [1.0]",
        CHECK,
    ),
    group("a text in the list", r"score is 'yes', which is no finite number", "return ['yes' for _ in completions]"),
    group(
        "a value logged for one completion",
        r"log_extra\('n'\) needs a list of 1 values",
        "log_extra('n', [1, 2]); return [1.0 for _ in completions]",
        arguments="completions, log_extra, **columns",
    ),
]
CHECKED = [
    case(
        "scores that are all 0",
        r"'reward.py:score': all scores are 0, for right texts and for wrong ones",
        "return 0.0",
        CHECK,
    ),
    case("scores that are all 1", r"all scores are equal: 1, for right texts and for wrong ones", "return 1.0", CHECK),
    case(
        "right and wrong the wrong way round",
        r"wrong texts score 1, right ones 1: not more",
        "return float(solution_str != ground_truth)",
        CHECK,
    ),
    case(
        "one gold answer that is not read",
        r"1 of 3 gold texts are not scored 1; the first is that of row 2",
        "return float(solution_str == ground_truth != '3')",
        CHECK,
    ),
    group(
        "a function that applies to nothing",
        r"it scores nothing: it applies to none of the rows",
        "return [None for _ in completions]",
        CHECK,
    ),
    case("an exception in a check", r"it fails: .* at .*reward.py:3: IndexError", "return [][0]", CHECK),
    case("no config for a check", r"the following arguments are required: --config", "return 1.0", CHECK[:3]),
    case("no rows for a check", r"--rows: '0' must be a whole number of at least 1", "return 1.0", CHECK, "--rows=0"),
    case(
        "an unknown flag of a check", r"unknown argument '--row=3'; nearest is --rows,", "return 1.0", CHECK, "--row=3"
    ),
]
CASES = [*LOADED, *CALLED, *CHECKED]
