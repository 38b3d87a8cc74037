"""What strangers met of options and of the screen: calls from Python, defaults, pages, recipes, ignored options, words, and less of it.

Right values are written here and in _defaults.py:
texts by plain string operations, lines by Python's own formats, and defaults as the sources of verl and TRL have them.
"""

from __future__ import annotations

import contextlib
import datetime
import decimal
import fractions
import functools
import io
import json
import os
import random
import re
import shlex
import string
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_post import config
from jaxrl_post.commands import api
from jaxrl_post.config import elsewhere, fields, reference
from jaxrl_post.config.command_line import split
from jaxrl_post.data.tokenizer import characters
from jaxrl_post.launch import command_line
from jaxrl_post.launch.parts import build, inputs
from jaxrl_post.launch.parts.python_inputs import OWN, PythonInputs
from jaxrl_post.rewards import math as graders
from jaxrl_post.rewards.carried import carried
from jaxrl_post.telemetry import metrics, mode_report
from strangers import Members
from strangers._defaults import PEERS
from strangers._written import Tried

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = {option.name: option.default for option in fields.options(config.Config)}
SMALL = ("model.path=", "model.preset=tiny", "engine.max_length=256", "sampling.max_tokens=32")
NUMBERS = ("18", "5", "-3", "1080", "0", "7.5", "42", "1000000", "12", "99")
NAMES = ("Ann", "Bo", "Li Wei", "Zoe", "O'Neil")


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """Yields a folder with a tokenizer that reads each printable character, which is the working directory."""
    with tempfile.TemporaryDirectory() as place, contextlib.chdir(place):
        characters(string.printable).save(Path(place) / "tokenizer")
        yield Path(place)


def gathered(given: Any, *overrides: str, handed: PythonInputs | None = None) -> inputs.Inputs:
    own = (*SMALL, f"model.tokenizer={os.getcwd()}/tokenizer", *overrides)
    return inputs.gather(config.resolve(given, own), handed or PythonInputs())


# ---- F30: calls from Python


def even(data_source, solution_str, ground_truth, extra_info):
    return 1.0


class Grader:
    def __call__(self, data_source, solution_str, ground_truth, extra_info):
        return 0.5


def rowed(value: Any) -> Any:
    """Returns what a reward function gets of a column with this value."""
    values = config.default().to_dict()
    rows = [{"prompt": f"1+{number}=", "answer": "2", "x": value} for number in (1, 2)]
    sources = api._data(values, rows, None)
    return next(iter(gathered(values, handed=PythonInputs(sources=sources)).train)).extra["x"]


VALUES = [  # a value of a column, and what a reward function gets
    *((value, value) for value in (None, True, 5, 10**30, 0.5, "é", [1, [2]], {"a": [1]}, {})),
    (np.int64(3), 3),
    (np.float32(0.5), 0.5),
    (np.bool_(True), True),
    (np.array([1, 2]), [1, 2]),
    ((1, "b"), [1, "b"]),
    ([np.int64(1)], [1]),
    (datetime.date(2026, 1, 2), "2026-01-02"),
    (np.datetime64("2026-01-02"), "2026-01-02"),
    (decimal.Decimal("1.50"), "1.50"),
]
NO_VALUES = [
    {1, 2},
    frozenset("a"),
    b"ab",
    bytearray(b"a"),
    1 + 2j,
    Path("x"),
    range(3),
    object(),
    even,
    fractions.Fraction(1, 2),
]


def f30() -> Members:
    out = Tried()
    with folder():
        for value, wanted in VALUES:
            out.same(f"value {value!r}", lambda: rowed(value), wanted)
        for value in NO_VALUES:
            out.refused(f"value {value!r}", lambda: rowed(value), "row 1, column 'x'", "which no")
            out.refused(f"deep {value!r}", lambda: rowed({"a": [value]}), "row 1, column 'x'", "which no")
    path, made = "jaxrl_post.rewards.math:exact", functools.partial(even)
    alone = [
        (path, path),
        (even, None),
        (Grader(), "python:Grader"),
        (made, "python:even"),
        (Path("own.py:f"), "own.py:f"),
    ]
    for given, name in alone:
        wanted = (name,) if name else carried([even], OWN).names
        for form in (given, [given], (given,), iter([given])):
            out.same(f"rewards {form!r}", lambda: carried(form, OWN).names, wanted)
    for bad in (5, {"a": even}, {even}, b"x", [5], [even, None], [[even]], 0.5):
        out.refused(f"rewards {bad!r}", lambda: carried(bad, OWN), "rewards")
    for given in (print, Grader()):
        for form in (given, [given], (given,), iter([given])):
            out.same(f"callbacks {form!r}", lambda: api._called(form), (given,))
    out.same("no callbacks", lambda: (api._called(None), api._called([])), ((), ()))
    for bad in (5, "print", {"a": print}, [print, None], [5], b"x"):
        out.refused(f"callbacks {bad!r}", lambda: api._called(bad), "callbacks must be")
    row = {"prompt": "a", "answer": "b"}
    for form in ([row], (row,), iter([row]), (one for one in [row])):
        out.same(f"rows {type(form)}", lambda: api._data({}, form, None), {"python:data.train": (row,)})
    for text in ("rows.jsonl", Path("rows.jsonl"), "task:sums"):
        values: dict = {}
        out.same(f"path {text}", lambda: (api._data(values, text, None), values["data"]["train"]), ({}, str(text)))
    for bad in (5, row, b"x", ["a"], [row, None], "".join):
        out.refused(f"rows {bad!r}", lambda: api._data({}, bad, None), "data.train")
    return out.members()


# ---- T03: defaults


def t03() -> Members:
    """An option stands in the table of differing defaults where a peer's default is another one, with ours on the page."""
    wrong, page = [], (ROOT / "docs" / "coming_from.md").read_text(encoding="utf-8")
    for name, peers in PEERS.items():
        differs = any(peer is not None and peer != OPTIONS[name] for peer in peers)
        if differs != (name in elsewhere.DEFAULTS):
            wrong.append(f"{name}: {OPTIONS[name]!r} here, {peers} there, and the table has it: {not differs}")
        elif differs and f"| `{name}` | `{OPTIONS[name]!r}` |" not in page:
            wrong.append(f"{name}: the page does not say {OPTIONS[name]!r}")
    for name, told in elsewhere.DEFAULTS.items():
        for peer, text in zip(PEERS.get(name, (None, None)), told, strict=True):
            number = re.match(r"\d[\d.e-]*", text)
            if isinstance(peer, float | int) and number and float(number[0]) != peer:
                wrong.append(f"{name}: the table says {text!r}, and it is {peer!r}")
    return Members(len(PEERS), tuple(wrong))


# ---- T07: what the pages print


def t07() -> Members:
    """The page's config for GSM8K over rows of its form, and each command of a page that begins a run, with its overrides."""
    sys.path[:0] = [str(ROOT / "tests")]
    import pages

    out, noise = Tried(), random.Random(7)
    (block,) = [one for one in pages.python_blocks(ROOT / "docs" / "data_and_rewards.md") if "gsm8k/train.jsonl" in one]
    rows = []
    for number in range(24):
        asked = f"{noise.choice(NAMES)} has {number} eggs and finds {noise.randrange(9)}.\nHow many now?"
        rows.append({"question": asked, "answer": f"{number}+2=<<{number}+2>>.\n#### {noise.choice(NUMBERS)}"})
    with folder() as here:
        (here / "gsm8k").mkdir()
        for name, some in (
            ("train", rows),
            ("test", [row | {"question": f"{row['question']} Say!"} for row in rows[:9]]),
        ):
            (here / "gsm8k" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
        (here / "mine.py").write_text(block)
        start = gathered(config.load("mine.py"), "eval.prompts=8")
        found = {start.tokenizer.decode(one.tokens): one for one in start.train}
        for row in rows:
            shown = f'{row["question"]} Let\'s think step by step and output the final answer after "####".'
            out.same(row["question"], lambda: shown in found, True)
            prompt = found.get(shown)
            if prompt is None:
                continue
            truth = row["answer"].rpartition("#### ")[2]
            for text, right in ((f"so #### {truth}", 1.0), (f"so #### {truth}1", 0.0), (f"so it is {truth}", 0.0)):
                score = graders.strict("gsm8k", text, prompt.answer, {})
                out.same(
                    f"{text} for {row['answer']}",
                    lambda: float(score["score"] if isinstance(score, Mapping) else score),
                    right,
                )
    for page in pages.names(ROOT):
        for command in pages.commands(ROOT / page):
            if "jaxrl_post.main" in command.words and any(
                word.startswith("--config=configs/") for word in command.words
            ):
                _resolves(out, page, list(command.words))
    return out.members()


def _resolves(out: Tried, page: str, words: list[str]) -> None:
    """Takes a command of a page: its config resolves, and holds what its overrides say."""
    flags = command_line.parse(words[words.index("jaxrl_post.main") + 1 :])

    def held() -> list[Any]:
        found = config.resolve(config.load(str(ROOT / flags.config)), flags.overrides)
        return [functools.reduce(getattr, one.partition("=")[0].split("."), found) for one in flags.overrides]

    values = [one.partition("=")[2] for one in flags.overrides]
    wanted = [json.loads(one) if re.fullmatch(r"true|false|[\d.e-]+", one) else one for one in values]
    out.same(f"{page}: {' '.join(words)}", held, wanted)


# ---- T10: the recipe of supervised training


def t10() -> Members:
    """Rows under TRL's names on configs/sft.py as it is shipped: what is shown, and what is trained on."""
    out, rows = Tried(), []
    texts = [(f"{name}: {one}", f" is {two}") for name in NAMES for one, two in zip(NUMBERS[:4], NUMBERS[4:8])]
    for at, (shown, said) in enumerate(texts):
        forms = (
            {"prompt": shown, "completion": said},
            {"prompt": shown, "solution": said},
            {"prompt": shown, "reward_model": {"style": "rule", "ground_truth": said}},
            {"prompt": shown, "completion": said, "data_source": "own", "extra_info": {"index": at}},
        )
        rows.append((forms[at % len(forms)] | {"id": f"row-{at:02}"}, shown, said))
    with folder() as here:
        (here / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row, _, _ in rows))
        given = config.load(str(ROOT / "configs" / "sft.py"))
        start = gathered(given, "batch.tokens=256", f"data.train={here / 'rows.jsonl'}")
        words = start.tokenizer
        known = {words.decode(one.tokens): words.decode(start.write(one, 0)) for one in start.train}
        for row, shown, said in rows:
            out.same(str(row), lambda: known.get(shown), said)
        ends = {start.write(one, 0)[-1] for one in start.train}
        out.same("ends", lambda: ends <= {*words.eos_ids} and len(ends) == 1, True)
        for bad, said in (
            ({"prompt": "a", "chosen": "b", "rejected": "c"}, "row of preferences"),
            ({"prompt": "a"}, "nothing to demonstrate"),
            ({"prompt": "a", "completion": ""}, "line 1"),
            ({"messages": [{"role": "user", "content": "a"}]}, "no completion"),
        ):
            (here / "bad.jsonl").write_text(json.dumps(bad) + "\n")
            out.refused(str(bad), lambda: gathered(given, "batch.tokens=256", f"data.train={here / 'bad.jsonl'}"), said)
    found = config.resolve(given)
    lines = {
        "engine.name": "demonstrations",
        "algorithm.loss_mode": "sft",
        "scheduler.group_size": 1,
        "optimizer.lr": 2e-5,
    }
    for name, value in lines.items():
        out.same(name, lambda: functools.reduce(getattr, name.split("."), found), value)
    return out.members()


# ---- T11: what would be ignored

FEATURES = {  # a feature that is off, and what is set although only the feature reads it
    "eval.prompts=0": {
        "eval.samples": "2",
        "eval.temperature": "0.5",
        "eval.show": "1",
        "eval.every": "5",
        "eval.top_p": "0.9",
    },
    "lora.rank=0": {"lora.alpha": "8.0", "lora.rslora": "True", "lora.targets": "('q_proj',)"},
    "checkpoint.every=0": {"checkpoint.keep_last": "5", "checkpoint.max_failures": "9"},
    "speculation.drafter=off": {"speculation.width": "3", "speculation.clones": "False"},
    "scheduler.name=sync": {"scheduler.over": "2.0", "scheduler.lane": "0.5", "scheduler.ahead": "4"},
    "scheduler.filter_groups=False": {"scheduler.max_waves": "3", "scheduler.filter_metric": "acc"},
    "optimizer.schedule=constant": {"optimizer.final_lr_ratio": "0.5"},
    "algorithm.kl_loss_coef=0.0": {"algorithm.kl_loss_type": "k1"},
    "logger.wandb=off": {"logger.project": "two words", "logger.name": "it's"},
    "algorithm.use_kl_in_reward=False": {"algorithm.kl_coef": "0.5", "algorithm.kl_target": "0.1"},
}


def t11() -> Members:
    """One refusal names all of them, and its flags are taken by the command line as they stand."""
    noise, wrong, tried = random.Random(11), [], 0
    for features in [*([one] for one in FEATURES), *(noise.sample([*FEATURES], 1 + at % 4) for at in range(30))]:
        known = [(name, value) for feature in features for name, value in FEATURES[feature].items()]
        chosen = noise.sample(known, noise.randint(1, len(known)))
        given = ["model.preset=tiny", *features, *(f"{name}={value}" for name, value in chosen)]
        tried += 1
        try:
            config.resolve(config.default(), given)
            wrong.append(f"{given}: was taken")
            continue
        except ValueError as error:
            said = str(error)
        names = {name for name, _ in chosen}
        if any(f"{name}=" not in said for name in names) or "\n" in said:
            wrong.append(f"{given}: {said}")
        if len(names) > 1:
            flags = shlex.split(said.partition("defaults, add ")[2])
            own = split(flags)[1]
            if {one.partition("=")[0] for one in own} != names or not _taken([*given, *own]):
                wrong.append(f"{given}: its flags {flags} are not enough, or too many")
    return Members(tried, tuple(wrong))


def _taken(overrides: list[str]) -> bool:
    try:
        config.resolve(config.default(), overrides)
    except ValueError:
        return False
    return True


# ---- T12: the words of supervised runs


def _printed(row: Mapping[str, float], given: config.Config) -> str:
    stream, columns = io.StringIO(), metrics.SUPERVISED if mode_report.supervised(given) else metrics.COLUMNS
    metrics.console(9, stream, columns=columns, quiet=True).write(3, row)
    return stream.getvalue()


def t12() -> Members:
    """Rows of each config here: those that learn what is written show no reward. A row without figures has no line."""
    out, noise = Tried(), random.Random(12)
    for file in sorted(one for one in (ROOT / "configs").rglob("*.py") if one.parent.name not in ("own", "sim")):
        text = file.read_text(encoding="utf-8")
        name, given = f"{file.parent.name}/{file.stem}", config.resolve(config.load(str(file)))
        inherits = re.search(r'load\(str\(\w+ / "([\w/]+)\.py"', text)
        words = text + ((ROOT / "configs" / f"{inherits[1]}.py").read_text(encoding="utf-8") if inherits else "")
        learns = bool(re.search(r'"demonstrations"|"preferences"|"distill"', words))
        loss, rate, tokens = noise.uniform(0, 9), 10 ** noise.uniform(-7, -2), float(noise.randrange(10**6))
        row = {"actor/pg_loss": loss, "actor/lr": rate, "training/trained_tokens": tokens, "critic/score/mean": 1.0}
        row |= {"reward/acc/mean": 1.0, "actor/entropy": 0.5, "response_length/mean": 3.0}
        line = f"step 3/9  loss {loss:.4f}  lr {rate:.3g}  tokens {tokens:,.0f}\n"
        other = f"step 3/9  reward 1.0000  acc 1.0000  length 3.0  entropy 0.5000  loss {loss:.5f}\n"
        out.same(name, lambda: _printed(row, given), line if learns else other)
        empty = {"training/epoch": 1.0, "val/loss_se": 0.5}
        out.same(f"{name}: nothing", lambda: _printed(empty, given), "")
        held = {"val/loss": loss, "val/loss_se": 0.5}
        out.same(f"{name}: held out", lambda: _printed(held, given), f"step 3/9  val/loss {loss:.4f}\n")
    return out.members()


# ---- T24: less on the screen

QUOTE = "'"
CHANGES = {
    "steps": "7",
    "seed": "3",
    "name": "'mine'",
    "engine.slots": "16",
    "engine.row_sizes": "(32, 64)",
    "optimizer.lr": "0.5",
    "optimizer.b2": "0.5",
    "sampling.temperature": "0.7",
    "sampling.max_tokens": "64",
    "scheduler.prompts": "4",
    "scheduler.group_size": "2",
    "eval.task": "{'more': 0.5}",
    "checkpoint.every": "3",
    "data.size": "64",
    "reward.weights": "(2.0,)",
    "logger.console": "'quiet'",
}


def t24() -> Members:
    """Options that differ are listed with both values and no others; notes on row sizes come where someone chose them."""
    out, noise = Tried(), random.Random(24)
    for _ in range(30):
        chosen = dict(noise.sample([*CHANGES.items()], noise.randint(0, 8)))
        given = ["model.preset=tiny", *(f"{name}={value.strip(QUOTE)}" for name, value in chosen.items())]
        chosen["model.preset"] = "'tiny'"
        wanted = sorted(f"{name} {value} (default {OPTIONS[name]!r})" for name, value in chosen.items())
        found = lambda: reference.changed(config.resolve(config.default(), given)).splitlines()  # noqa: E731
        out.same(str(given), lambda: sorted(" ".join(line.split()) for line in found()[1:]), wanted)
        out.same(f"{given}: how many", lambda: int(found()[0].split()[0]), len(chosen))
    for sizes in ((64, 128), (64,), (32, 64, 128), (128,)):
        for dropped in ([], [size for size in sizes if size < max(sizes)]):
            told = bool(dropped) and sizes != (64, 128)
            out.same(f"{sizes} {dropped}", lambda: bool(build.not_used(sizes, dropped)), told)
    forms = {"--dry-run": (True, False), "--dry-run=all": (True, True), "": (False, False)}
    for form, wanted in forms.items():
        asked = ["--config=a.py", *([form] if form else [])]
        out.same(form, lambda: (lambda f: (f.dry_run, f.every_option))(command_line.parse(asked)), wanted)
    for bad in ("json", "full", "0", "ALL"):
        out.refused(bad, lambda: command_line.parse(["--config=a.py", f"--dry-run={bad}"]), "--dry-run=all")
    return out.members()


KINDS = {"F30": f30, "T03": t03, "T07": t07, "T10": t10, "T11": t11, "T12": t12, "T24": t24}
