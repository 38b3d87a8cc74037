"""Mistakes of data, rewards, names and resume are one sentence each, and nothing is lost or written over.

Sentences are held by tests, whose files are in TESTS. What tests of functions cannot see is shown here with whole commands.
Each case is made in an empty folder. Its command must end with exit code 1, one line `error: ...` and no traceback. Every file
that was there keeps its bytes, and none is left behind. A control plants three faults in the judging itself.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

MINUTES = 9.0
SOURCES = ("jaxrl_post/**/*.py",)
TIMEOUT_S = 900.0
TESTS = (
    "test_config_rules",
    "test_config_relations",
    "test_config_elsewhere",
    "test_main_refusals",
    "test_data_prompts",
    "test_data_supervised",
    "test_data_columns",
    "test_rewards_failures",
    "test_launch_reward_trial",
)
LEAST = 5  # tests of each of these files

CONFIG = """
from pathlib import Path

import jaxrl_post
from jaxrl_post.config import default


def get_config():
    c = default()
    c.name, c.steps, c.run_dir = "own", 2, "runs"
    c.model.path = str(Path(jaxrl_post.__file__).parents[1] / "configs" / "demo_policy")
    c.data.train, c.eval.prompts = "train.jsonl", 0
    c.reward.functions, c.reward.timeout_s, c.checkpoint.every = ("reward.py:score",), 2.0, 1
    c.scheduler.prompts, c.scheduler.group_size = 2, 2
    c.engine.slots, c.engine.max_length, c.engine.row_sizes = 4, 32, (32,)
    c.sampling.max_tokens, c.batch.rows, c.batch.tokens = 8, 2, 64
    return c
"""
FOUR = "data_source, solution_str, ground_truth, extra_info"
ROWS = '{"prompt": "1+1=", "answer": "2"}\n{"prompt": "1+2=", "answer": "3"}\n{"prompt": "1+3=", "answer": "4"}\n'
FILES = {
    "config.py": CONFIG,
    "reward.py": f"import os, time\n\n\ndef score({FOUR}):\n    return float(len(solution_str) % 3)\n",
    "train.jsonl": ROWS,
    "other.jsonl": ROWS.replace("1+1", "2+2"),
    "notes/todo.txt": "nothing to do with a run",
}
TRAIN = ("-m", "jaxrl_post.main", "--config=config.py")
RUN = (*TRAIN, "--run-dir=run")
AGAIN = (*RUN, "--resume")
CHECK = ("-m", "jaxrl_post", "reward_check", "--config=config.py", "--sampled=0")
SFT = "engine.row_sizes=(64,128) engine.name=demonstrations algorithm.loss_mode=sft algorithm.adv_estimator=ones"
GONE = r"--resume: run has logs of 2 finished steps and no checkpoint to go on from"
HELD = ("eval.data=train.jsonl", "eval.prompts=1")

# what is wrong -> the sentence, options of the config, and text of train.jsonl
DATA: dict[str, tuple] = {
    "no answer": (r"line 1: no column is named as the answer", ("data.format=trl",), '{"prompt": "1="}'),
    "an answer of null": (r"line 1: column 'answer' is null", (), '{"prompt": "2=", "answer": null}'),
    "an empty file": (r"no prompts|no rows", (), ""),
    "a line that is no JSON": (r"train.jsonl, line 4: no JSON", (), ROWS + "{'prompt': 1}"),
    "the same row twice": (r"line 4 .*has the id of train.jsonl, line 1", (), ROWS + ROWS.splitlines()[0]),
    "a prompt that is too long": (r"the prompt has 25 tokens", (), json.dumps({"prompt": "1" * 25, "answer": "1"})),
    "held-out prompts that are trained on": (r"eval.data and data.train share 1 prompts", HELD, ROWS),
    "a column of supervised training": (r"is read by engine.name", ("data.columns={'completion': 'answer'}",), ROWS),
    "stepwise rows": (
        r"line 1: .*nothing to demonstrate",
        tuple(SFT.split()),
        '{"prompt": "1=", "completions": ["1"]}',
    ),
    "no such way with long prompts": (r"'truncate' is not one of refuse, drop, cut", ("data.overlong=truncate",), ROWS),
    "verl's name of an option": (r"verl's .*rollout\.n is scheduler\.group_size here", ("rollout.n=8",), ROWS),
    "an option that nothing reads": (r"speculation.width=5 would be ignored", ("speculation.width=5",), ROWS),
    "a typing error": (r"nearest valid name is 'scheduler\.prompts'", ("scheduler.promts=8",), ROWS),
}
# what is wrong -> the sentence, the command, and the body of the reward function
REWARDS: dict[str, tuple] = {
    "no such function": (r"has no 'scor'; nearest is 'score'", ("--config.reward.functions=['reward.py:scor']",), ""),
    "a dict without a score": (r"the dict has no 'score', only \['acc'\]", ("--dry-run",), "return {'acc': 1.0}"),
    "a function that takes too long": (r"fails: took longer than 2 s", ("--dry-run",), "time.sleep(60)"),
    "a function that ends its process": (r"the process ended with status 3", ("--dry-run",), "os._exit(3)"),
    "a score that is not finite": (r"score is nan, which is no finite number", ("--dry-run",), "return float('nan')"),
    "the wrong way round": (
        r"wrong texts score 1, right ones 1: not more",
        CHECK,
        "return float(ground_truth != solution_str)",
    ),
    "scores that are all 0": (r"all scores are 0, for right texts and for wrong ones", CHECK, "return 0.0"),
    "an exception in a check": (r"it fails at reward.py:5: IndexError", CHECK, "return [][0]"),
    "an unknown flag of a check": (r"'--row=3'; nearest is --rows,", (*CHECK, "--row=3"), "return 1.0"),
}
# what is wrong -> the sentence, the command behind a run that has ended, and what happened to its folder in between
RESUMED: dict[str, tuple] = {
    "checkpoints that are gone": (GONE, AGAIN, "shutil.rmtree('run/checkpoints')"),
    "more steps asked for without them": (GONE, (*AGAIN, "--config.steps=4"), "shutil.rmtree('run/checkpoints')"),
    "the key gone": (r"checkpoints/.key is missing or unreadable", AGAIN, "os.remove('run/checkpoints/.key')"),
    "metrics gone": (
        r"run/metrics.jsonl has 0 bytes, the checkpoint knows of \d+",
        AGAIN,
        "os.remove('run/metrics.jsonl')",
    ),
    "a log that was cut": (r"run/scheduler_log.jsonl has 9 bytes", AGAIN, "os.truncate('run/scheduler_log.jsonl', 9)"),
    "a config that was cut": (r"run/config.json cannot be read", AGAIN, "os.truncate('run/config.json', 20)"),
    "another learning rate": (r"resume refused: optimizer.lr .* -> 0.5", (*AGAIN, "--config.optimizer.lr=0.5"), ""),
    "another seed": (r"resume refused: .*seed 0 -> 1", (*AGAIN, "--config.seed=1"), ""),
    "other data": (r"resume refused: .*data.train", (*AGAIN, "--config.data.train=other.jsonl"), ""),
    "rows that changed": (
        r"resume refused: .*data.train.digest",
        AGAIN,
        "rows = open('train.jsonl').readlines(); open('train.jsonl', 'w').writelines(rows[:-1])",
    ),
    "a reward function that changed": (
        r"resume refused: .*reward_code",
        AGAIN,
        "open('reward.py', 'a').write('A = 1')",
    ),
    "a run that would be written over": (r"--run-dir=run exists already .*a run is never written over", RUN, ""),
    "a step that was not saved": (r"there is no step 7 in run/checkpoints; it has", (*TRAIN, "--branch=run@7"), ""),
    "a branch from a damaged step": (
        r"--branch=run@2: step 2 is damaged, because about\.json has",
        (*TRAIN, "--branch=run@2", "--config.steps=9"),
        "open('run/checkpoints/step_000002/about.json', 'a').write(' ')",
    ),
}
# what is wrong -> the sentence and the arguments, where there is no run
FOLDERS: dict[str, tuple] = {
    "no config": (r"^error: no config file: write --config=FILE", ()),
    "an override without --config": (
        r"write --config\.optimizer\.lr=1e-5$",
        ("--config=config.py", "--optimizer.lr=1e-5"),
    ),
    "a run that is not there": (
        r"--resume=nowhere: there is no such folder",
        ("--config=config.py", "--resume=nowhere"),
    ),
    "a folder that is no run": (r"notes is not the folder of a run", ("--config=config.py", "--resume=notes")),
    "a file as a run": (r"train.jsonl", ("--config=config.py", "--resume=train.jsonl")),
    "a folder in use": (
        r"--run-dir=notes exists already and is not an empty folder",
        ("--config=config.py", "--run-dir=notes"),
    ),
    "a run folder below a file": (r"train.jsonl", ("--config=config.py", "--run-dir=train.jsonl/run")),
    "a bucket": (r"s3://bucket/run: the bucket refuses", ("--config=config.py", "--run-dir=s3://bucket/run")),
}


def cases() -> list[dict]:
    """All cases, as `wrong` takes them."""
    body = FILES["reward.py"].rpartition("    return")[0]
    out = [
        _case(name, says, [*TRAIN, *(f"--config.{one}" for one in options)], **{"train.jsonl": rows})
        for name, (says, options, rows) in DATA.items()
    ]
    for name, (says, given, text) in REWARDS.items():
        argv = given if given[0] == "-m" else (*TRAIN, *given)
        out.append(_case(name, says, argv, **{"reward.py": f"{body}    {text or 'return 1.0'}\n"}))
    for name, (says, argv, then) in RESUMED.items():
        made = [[*RUN], *([["-c", f"import os, shutil; {then}"]] if then else [])]
        out.append(_case(name, says, argv) | {"before": made})
    return out + [_case(name, says, [*TRAIN[:2], *argv]) for name, (says, argv) in FOLDERS.items()]


def _case(name: str, says: str, argv: Sequence[str], **files: str) -> dict:
    return {"name": name, "files": FILES | files, "argv": [*argv], "says": says}


def wrong(case: Mapping, folder: Path) -> str | None:
    """What of the promise does not hold for a case that is made in an empty folder, or None.

    `files` are written first, and the commands of `before` must end well. `argv` follows python on the command line. `says` is a
    regular expression that the one line of stderr which begins with "error: " must match.
    """
    for path, text in case["files"].items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")
    for argv in case.get("before", ()):
        code, said = _ran(argv, folder)
        if code:
            return f"before: exit code {code}: {said[-1500:]}"
    there = _contents(folder)
    code, said = _ran(case["argv"], folder)
    errors = [line for line in said.replace(f"{folder}/", "").splitlines() if line.startswith("error: ")]
    then = _contents(folder)
    changed = [path for path, data in there.items() if then.get(path) != data]
    if code != 1:
        return f"exit code {code}; it said: {said[-1500:]}"
    if "Traceback (most recent call last)" in said:
        return f"a traceback: {said[-1500:]}"
    if len(errors) != 1:
        return f"{len(errors)} lines begin with 'error: ': {said[-1500:]}"
    if not re.search(case["says"], errors[0]):
        return f"it says {errors[0]!r}, not {case['says']!r}"
    if changed:
        return f"it changed or removed {changed[:5]}"
    return f"it left {[path for path in then if path not in there][:5]}" if then.keys() - there.keys() else None


def _contents(folder: Path) -> dict[str, bytes]:
    """Path -> bytes of every file; an empty folder counts as a file without bytes."""
    return {
        f"{path.relative_to(folder)}{'/' * path.is_dir()}": path.read_bytes() if path.is_file() else b""
        for path in sorted(folder.rglob("*"))
        if path.is_file() or not any(path.iterdir())
    }


def _ran(argv: Sequence[str], folder: Path) -> tuple[int, str]:
    """Runs `python *argv` in a folder. Returns its exit code and its stderr."""
    env = os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, *argv], cwd=folder, env=env, capture_output=True, timeout=TIMEOUT_S, encoding="utf-8"
    )
    return done.returncode, done.stderr


def show(record) -> None:
    os.environ["PYTHONPATH"] = str(record.root)
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(record.root / ".cache" / "jax"))
    record.figure("cases", len(cases()), at_least=40)
    failed = [f"{case['name']}: {said}" for case in cases() if (said := _judged(case)) is not None]
    record.figure("failures", failed, equals=[])
    record.figure("planted_faults_caught", _planted(), equals=3)
    for name in TESTS:
        record.figure(f"tests.{name}", record.passed(f"tests/{name}.py", ""), at_least=LEAST)


def _judged(case: Mapping) -> str | None:
    folder = Path(tempfile.mkdtemp()).resolve()
    try:
        return wrong(case, folder)
    finally:
        shutil.rmtree(folder)


def _planted() -> int:
    """Counts the planted faults that are noticed: commands that do not keep the promise."""
    code = "import sys; {}; print('error: a sentence', file=sys.stderr); sys.exit(1)"
    faults = {
        "it changed or removed": (code.format("open('kept.txt', 'w')"), "a sentence"),
        "it left": (code.format("open('new.txt', 'w')"), "a sentence"),
        "it says": (code.format("pass"), "another sentence"),
    }
    kept = {"kept.txt": "kept"}
    cases = [{"files": kept, "argv": ["-c", program], "says": says} for program, says in faults.values()]
    return sum(str(_judged(case)).startswith(word) for word, case in zip(faults, cases, strict=True))
