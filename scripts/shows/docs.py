"""Every command and code block of README and docs runs, links and names hold, and the pages build without a warning.

Runs of the pages' commands are real but short: two optimizer steps on a few prompts, where the command itself says nothing else.
Run folders lie in a temporary folder. A command is checked by name alone, and counted apart, where it is another show, serves until
it is stopped, or needs a checkpoint that is not there. `make docs` makes its own environment at the first call.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import re
import subprocess
import sys
import tempfile

import bucket_server
import figures
import prose

from jaxrl_post import config

MINUTES = 30.0
SHORT = (
    "steps=2",
    "scheduler.prompts=4",
    "scheduler.group_size=4",
    "eval.prompts=4",
    "eval.samples=2",
    "eval.every=0",
    "checkpoint.every=2",
)
# What a config needs beside, or instead, to be short.
OWN = {
    "models/stories_elastic": ("eval.at=[1]",),
    "demo/partial": ("scheduler.stream=2",),
    "demo/lending": ("scheduler.stream=2",),
    "demo/pipeline": ("scheduler.ahead=2", "scheduler.max_unscored=4"),
    "demo/interleaved": ("scheduler.ahead=2", "scheduler.max_unscored=4", "scheduler.max_ready=4"),
    "demo/split": ("scheduler.ahead=2", "scheduler.max_unscored=4"),
    "demo/sft": ("scheduler.group_size=1", "optimizer.warmup_steps=1"),
    "demo/dpo": ("scheduler.group_size=2", "optimizer.warmup_steps=1"),
    "demo/reward_model": ("scheduler.group_size=2", "optimizer.warmup_steps=1", "eval.prompts=0", "eval.samples=4"),
    **dict.fromkeys(
        ("recipes/gmpo", "recipes/dppo", "recipes/dro", "recipes/clip_cov", "recipes/kl_cov", "recipes/deepseek_v3_2"),
        ("scheduler.mini_batches=2", "scheduler.ppo_epochs=1", "eval.every=2"),
    ),
    "recipes/ppo": ("scheduler.mini_batches=2", "scheduler.ppo_epochs=1", "eval.every=2", "critic.warmup_steps=1"),
    **dict.fromkeys(("demo/ppo", "recipes/ppo_value_head", "recipes/vapo"), ("critic.warmup_steps=1",)),
    "recipes/gspo": ("scheduler.mini_batches=2", "eval.every=2"),
    "recipes/cispo": ("scheduler.mini_batches=2", "eval.every=2"),
    "recipes/sapo": ("scheduler.mini_batches=1", "scheduler.ppo_epochs=2", "eval.every=2"),
}
OPTIONS = "jaxrl_post.config.reference"  # prints docs/options.md
ENDLESS = ("serve", "jetstream", "tinker", "watch")
READING = ("evaluate", "generate", "export", "report", "rollouts", "compare", "watch")
WRITTEN = ("exported", "adapter", "both.html", "demo.parquet")  # what commands write beside their run
OUTPUTS = ("--out", "--json", "--parquet")
BY_NAME = (
    "scripts/gpu_check.py",
    "make",
    "scripts/show.py",
    "scripts/bench.py",
    "scripts/figures.py",
    "tests/prose.py",
)


def show(record) -> None:
    os.chdir(record.root)
    import pages

    named = pages.names()
    found = {name: record.root / name for name in named}
    record.figure("pages", len(named), at_least=15)
    for check in (pages.broken_links, pages.missing_files, pages.unknown_options, pages.missing_functions):
        record.figure(check.__name__, [line for page in found.values() for line in check(page)], equals=[])
    record.figure("readme_lines", len((record.root / "README.md").read_text().splitlines()), at_most=pages.README_LINES)
    long = [line for line in prose.of_pages() if " words: " in line]
    record.figure("sentences_above_30_words", len(long), equals=0)
    record.figure("retired_words", len(prose.of_pages()) - len(long), equals=0)
    record.figure("sources_with_findings", sorted(prose.unclean()), equals=[])
    _current(record)
    _blocks(record, pages, named)
    _commands(record, pages, found.values())
    _site(record)


def _current(record) -> None:
    """Figures, options and the map of the floors are what results files, schema and imports give."""
    text = figures.PAGE.read_text()
    record.figure("figures_current", figures.filled(text) == text, equals=True)
    done = subprocess.run([sys.executable, "-m", OPTIONS], capture_output=True, text=True, cwd=record.root)
    same = done.returncode == 0 and done.stdout.strip() == (record.root / "docs" / "options.md").read_text().strip()
    record.figure("options_current", same, equals=True)
    done = subprocess.run([sys.executable, "scripts/floors.py", "--check"], capture_output=True, cwd=record.root)
    record.figure("floors_current", done.returncode == 0, equals=True)


def _blocks(record, pages, named: list[str]) -> None:
    count = sum(len(pages.python_blocks(record.root / name)) for name in named)
    seconds = record.run("tests/run_blocks.py", *named, timeout_s=600)
    record.figure("code_blocks_run", count, at_least=9)
    record.figure("code_blocks_seconds", round(seconds, 1))


def _commands(record, pages, found) -> None:
    """Each command once; those of one page in its order, as one may need the run of another. A failure ends no other command."""
    ran, by_name, refused = [], [], []
    with tempfile.TemporaryDirectory() as folder, bucket_server.emulator() as port:
        bucket = {"STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{port}"}
        for command in dict.fromkeys(_key(one) for page in found for one in pages.commands(page)):
            environment, words = dict(command[0]), list(command[1])
            if why := pages.wrong_with(pages.Command(page="", text="", words=tuple(words))):
                refused.append(f"{' '.join(words)}: {why}")
            elif (
                _checked_by_name(words)
                or _lacks_its_library(words)
                or "JAX_PROCESS_ID" in environment
                or _lacks_a_run(words, folder)
            ):
                by_name.append(" ".join(words))
            else:
                print(" ".join(words), flush=True)
                try:
                    record.run(*_shortened(words[1:], folder), timeout_s=900, env=environment | bucket)
                    ran.append(" ".join(words))
                except (RuntimeError, subprocess.TimeoutExpired) as error:
                    refused.append(f"{' '.join(words)}: {error}")
                    print(refused[-1], flush=True)
    record.figure("commands_that_fail", refused, equals=[])
    record.figure("commands_run", len(ran), at_least=30)
    record.figure("commands_checked_by_name", len(by_name))


def _key(command) -> tuple:
    return tuple(sorted(command.environment.items())), command.words


def _checked_by_name(words: list[str]) -> bool:
    """Whether a command is a show or a server, says no config to run, repeats a skipped step, or needs a checkpoint that is not there.

    A command that goes on from a run by that run's config is one of them: here that run has fewer steps than its page says."""
    if "replay" in words or (words[1:3] == ["-m", "jaxrl_post"] and _is_a_form(words[3], words[4:])):
        return True
    if words[1:3] == ["-m", "jaxrl_post.main"] and not any(word.startswith(("--config=", "--help")) for word in words):
        return True
    if words[0] in BY_NAME or words[1] in BY_NAME or words[-1] in ("train", "simulate", "jaxrl_post.simulate"):
        return True
    for word in words:
        if word.startswith("--config=") and "configs/sim/" not in word:
            named = config.resolve(config.load(word.removeprefix("--config=")))
            needed = named.model.path, named.teacher.path, named.reward.model, named.lora.adapter
            return any(path and not os.path.exists(path) for path in needed)
    return False


def _lacks_its_library(words: list[str]) -> bool:
    """Whether a command logs to Weights & Biases, whose library is not here. The show `report` runs it where it is."""
    wanted = any(word.startswith("--config.logger.wandb=") for word in words)
    return wanted and importlib.util.find_spec("wandb") is None


def _is_a_form(name: str, rest: list[str]) -> bool:
    """Whether a command of the package runs until it is stopped, or names what a reader has to give."""
    if "--help" in rest:
        return False
    given = any(re.fullmatch(r"(--[\w-]+=)?[A-Z]{3,}", word) for word in rest)
    return given or (name in ENDLESS and "--once" not in rest) or (not rest and name != "options")


def _lacks_a_run(words: list[str], folder: str) -> bool:
    """Whether a command reads a run or a step that no command before it has made, as runs are short here."""
    short = _shortened(words[1:], folder)
    if words[1:3] == ["-m", "jaxrl_post.main"]:
        runs = [word.partition("=")[2] for word in short if word.startswith("--resume=")]
        return any(not os.path.exists(run) for run in runs)
    if words[1:3] != ["-m", "jaxrl_post"] or words[3] not in READING:
        return False
    for before, word in itertools.pairwise(short):
        path, at, step = word.rpartition("=")[2].partition("@")
        written = before in OUTPUTS or word.startswith(OUTPUTS)
        made = f"{path}/checkpoints/step_{int(step):06d}" if at else path
        if path.startswith(f"{folder}/") and not written and not os.path.exists(made):
            return True
    return False


def _shortened(words: list[str], folder: str) -> list[str]:
    """The command with short settings in front of its own, and run folders in `folder`."""
    words = [re.sub(r"(^|=)(runs|docs|scripts/results)/(?!.*\.py)", rf"\1{folder}/", word) for word in words]
    words = words[: words.index(">")] if ">" in words else words
    words = [re.sub(rf"^(--\w+=)?({'|'.join(WRITTEN)})$", rf"\1{folder}/\2", word) for word in words]
    words = [re.sub(r"^--step=.*", "--step=0:2", word) for word in words]
    words += ["--out", f"{folder}/picture.svg"] if words[0] == "scripts/draw_two_rounds.py" else []
    if "--help" in words:
        return ["scheduler" if word == "SECTION" else word for word in words]
    if words[:2] != ["-m", "jaxrl_post.main"] and words[:3] != ["-m", "jaxrl_post", "train"]:
        return words
    (name,) = [
        word.removeprefix("--config=configs/").partition(".")[0] for word in words if word.startswith("--config=")
    ]
    own = [f"--config.{override}" for override in (*SHORT, *OWN.get(name, ()))]
    if not any(word.startswith(("--run-dir", "--resume=")) for word in words):
        own.append(f"--config.run_dir={folder}/unnamed")
    at = next(place for place, word in enumerate(words) if word.startswith("--config="))
    return [*words[: at + 1], *own, *words[at + 1 :]]


def _site(record) -> None:
    done = subprocess.run(["make", "docs"], cwd=record.root, capture_output=True, text=True, timeout=1200)
    record.figure("site_exit_code", done.returncode, equals=0)
    lines = (done.stdout + done.stderr).splitlines()
    record.figure("site_warnings", [line for line in lines if "WARNING" in line or "ERROR" in line], equals=[])
