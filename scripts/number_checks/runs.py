"""Whole runs: resumed pipelines and LoRA, lent devices, a judge, and `serve --run`, each against another way to its numbers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import killed
import numpy as np
import numpy_llama
import sampler
import served

import jaxrl_post
from jaxrl_post.data import tokenizer
from jaxrl_post.launch.parts import saved_policy
from jaxrl_post.launch.parts.policy import Policy
from jaxrl_post.models import hf
from jaxrl_post.ring.types import served_seed
from jaxrl_post.runs import rollout_log
from jaxrl_post.serve import prompts, server
from number_checks import logs

LIMIT_S = 900.0
DEVICES = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
SMALL = (
    "--config.scheduler.prompts=8",
    "--config.scheduler.group_size=4",
    "--config.eval.prompts=8",
    "--config.eval.every=0",
)
STEPS = 6
LORA = ("--config.lora.rank=4", "--config.lora.alpha=8.0", "--config.optimizer.lr=0.03")
TEXTS = ("12+34=", "7+5=", "90+9=", "3+81=")
ASKED = dict(seed=3, n=4, max_tokens=16, return_token_ids=True, logprobs=0)


def show(record) -> None:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        _resumed(record, place, "pipeline", "demo/pipeline", "--config.scheduler.max_unscored=32")
        _resumed(record, place, "lora", "demo/lora")
        _resumed(record, place, "pipeline_lora", "demo/pipeline", "--config.scheduler.max_unscored=32", *LORA)
        _lent(record, place)
        _judged(record, place)
        _served(record, place)


def _command(config: str, place: Path, *flags: str) -> tuple[str, ...]:
    return ("-m", "jaxrl_post.main", f"--config=configs/{config}.py", f"--run-dir={place}", *SMALL, *flags)


def _run(record, config: str, place: Path, *flags: str, devices: bool = False) -> Path:
    env = DEVICES if devices else {"XLA_FLAGS": ""}
    record.run(*_command(config, place, *flags), timeout_s=LIMIT_S, env=env)
    return place


def _resumed(record, place: Path, name: str, config: str, *flags: str) -> None:
    """A run in one piece, and the same one that was killed behind its first save and resumed."""
    saved = (f"--config.steps={STEPS}", "--config.checkpoint.every=2", "--config.engine.steps_per_dispatch=4", *flags)
    whole, again = _run(record, config, place / f"{name}_whole", *saved), place / f"{name}_killed"
    _kill_behind_a_save(record, _command(config, again, *saved), again)
    _run(record, config, again, *saved, "--resume")
    found = [logs.rollouts(one) for one in (whole, again)]
    record.figure(f"resume.{name}.rollouts", len(found[0]), at_least=STEPS * 32)
    record.figure(f"resume.{name}.differing", logs.differing(*found), equals=0)
    weights = [(one / "policy" / "model.safetensors").read_bytes() for one in (whole, again)]
    record.figure(f"resume.{name}.policy_equal", weights[0] == weights[1], equals=True)


def _kill_behind_a_save(record, command: tuple[str, ...], place: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, *command],
        cwd=record.root,
        env=os.environ | {"XLA_FLAGS": ""},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    end = time.monotonic() + LIMIT_S
    while not killed.steps(place):
        assert process.poll() is None and time.monotonic() < end, f"{place.name} saved no step"
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert process.returncode == -signal.SIGKILL, f"{place.name} had ended before it was killed"


def _lent(record, place: Path) -> None:
    """Rollouts of a run that lends a device while its rounds drain, against the same run without loans; weights stay."""
    flags = ("--config.steps=4", "--config.optimizer.lr=0", "--config.checkpoint.every=0")
    sizes = ("--config.engine.slots=16", "--config.batch.rows=2", "--config.scheduler.stream=2")
    lent = _run(record, "demo/lending", place / "lent", *flags, *sizes, devices=True)
    kept = _run(record, "demo/lending", place / "kept", *flags, *sizes, "--config.scheduler.lend=0", devices=True)
    rows = [json.loads(line) for line in (lent / "metrics.jsonl").read_text().splitlines()]
    record.figure("lending.loans", sum(row.get("sched/num_lendings", 0) for row in rows), at_least=1)
    found = [logs.rollouts(one) for one in (lent, kept)]
    record.figure("lending.rollouts", len(found[0]), at_least=100)
    record.figure("lending.differing", logs.differing(*found), equals=0)


def _judged(record, place: Path) -> None:
    """Verdicts of a judge on the engine's devices against greedy decoding of its weights in numpy."""
    run = _run(record, "demo/judge", place / "judged", "--config.steps=2", "--config.checkpoint.every=0")
    folder = record.root / "configs" / "judge_policy"
    words, texts = tokenizer.load(folder), tokenizer.load(record.root / "configs" / "demo_policy")
    judge, weights = hf.load(folder)
    told = {
        (one["prompt_id"], one["epoch"], one["sample"]): one["verdict"]
        for one in map(json.loads, (run / "rewards.jsonl").read_text().splitlines())
    }
    wrong = compared = 0
    for file in sorted((run / "rollouts").glob("*.npz")):
        for group in rollout_log.read(file):
            for one in group.rollouts[:2]:
                asked = f"{texts.decode(group.prompt.tokens)} {texts.decode(one.tokens)}"
                said = _greedy(weights, judge, words, asked)
                verdict = told[one.id.prompt_id, one.id.epoch, one.id.sample]
                wrong, compared = wrong + (said != verdict), compared + 1
    record.figure("judge.compared", compared, at_least=16)
    record.figure("judge.differing", wrong, equals=0)


def _greedy(weights, model, words, asked: str) -> float | None:
    """The verdict that the most probable tokens behind the question say. The judge's template writes ">" behind a turn."""
    ids = list(words.encode(f"{asked}>", special=False))
    begin = len(ids)
    while len(ids) < begin + 16 and (len(ids) == begin or ids[-1] not in words.eos_ids):
        ids.append(int(numpy_llama.forward(weights, model, ids)[-1].argmax()))
    text = words.decode(np.array(ids[begin:], np.int32))
    _, _, number = text.strip().rpartition("VERDICT: ")
    return float(number) if number else None


def _served(record, place: Path) -> None:
    """Servers of a run: of each saved step against the independent sampler, and one that follows the run to its last step."""
    # A high rate moves the weights of the two steps well apart.
    saved = ("--config.steps=2", "--config.checkpoint.every=1", "--config.optimizer.lr=0.003")
    run = _run(record, "demo", place / "served", *saved)
    objections, found = [], {}
    for step in (1, 2):
        opened = jaxrl_post.load(f"{run}@{step}")
        with served.served(opened) as one:
            found[step] = [one.post("/v1/completions", prompt=text, **ASKED) for text in TEXTS]
        objections += [text for told, said in zip(TEXTS, found[step]) for text in _objections(opened, told, said)]
    record.figure("serve_run.objections_of_the_independent_sampler", len(objections), equals=0)
    record.figure("serve_run.steps_differ", found[1] != found[2], equals=True)
    config, start = saved_policy.started(run)
    own = Policy(config, start)
    with served.served(own, following=server.following(str(run), own, start, 0.1)) as one:
        end = time.monotonic() + 60
        while json.loads(one.ask("GET", "/v1/models")[2])["data"][0]["weight_version"] != 2:
            assert time.monotonic() < end, "the server did not take the last step within 60 s"
            time.sleep(0.1)
        followed = [one.post("/v1/completions", prompt=text, **ASKED) for text in TEXTS]
    pairs = [
        (one[name], other[name])
        for mine, told in zip(followed, found[2], strict=True)
        for one, other in zip(mine["choices"], told["choices"], strict=True)
        for name in ("token_ids", "logprobs")
    ]
    record.figure("serve_run.compared", len(pairs), at_least=32)
    record.figure("serve_run.differing", sum(one != other for one, other in pairs), equals=0)


def _objections(opened, prompt: str, said: dict) -> list[str]:
    """What the independent sampler says of the choices, with the weights that the policy has."""
    weights, model = jax.device_get(opened.placed(opened._files)), opened._files.model
    read = prompts.Reading(opened.tokenizer, None, 64, tools=False)._bounded("prompt", prompt)
    out = []
    for choice in said["choices"]:
        tokens = np.array(choice["token_ids"])
        seed = served_seed(ASKED["seed"], read.id, choice["index"])
        draws = sampler.generate(weights, model, read.tokens, seed, ASKED["max_tokens"], 1.0, opened.tokenizer.eos_ids)
        logprobs = np.array(choice["logprobs"]["token_logprobs"])
        entropies = np.array([one.entropy for one in draws])[: len(tokens)]  # a response has none
        out.append(sampler.disagreement(draws, tokens, logprobs, entropies))
    return [text for text in out if text]
