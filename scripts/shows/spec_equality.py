"""Drafts change no token: every drafter, right and wrong scripts, clones, preemption, swaps, and two whole runs, bit
for bit.

Compares rollouts of an engine that drafts with those of an engine without a drafter, on stories260K (JAXRL_DATA) and on
the demo's policy. Some drafts reach beyond an end or a limit. Then configs/demo_speculation.py runs on fewer prompts
for a dozen steps, with drafts and without, to the same weights. Figures say how many drafts there were, so that no
equality is empty. Last come the planted faults of tests/test_engine_speculation.py, each of which must break an
equality.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import tempfile
from pathlib import Path

MINUTES = 4.0
NAMED = ("ngram", "histospec", "histospec_rewards", "ours")
LEAST = {"random": 0, "ngram": 10, "better_clones": 10}  # least accepted drafts; at least 200 for the other drafters
SHORT = (
    "--config.steps=12",
    "--config.data.size=64",
    "--config.scheduler.prompts=16",
    "--config.eval.prompts=16",
    "--config.eval.every=0",
    "--config.checkpoint.every=12",
)

os.environ.setdefault("JAX_PLATFORMS", "cpu")


def show(record) -> None:
    sys.path[:0] = [str(record.root), str(record.root / "tests")]
    for name, load in (("stories", _stories), ("demo", _demo)):
        _arms(record, name, *load(record))
    _whole_runs(record)
    record.planted("tests/test_engine_speculation.py", 7)


def _stories(record) -> tuple:
    """Returns model, weights, requests, and a token that ends a rollout.

    The token is a full stop, as the end of a whole story is too far.
    """
    import engine_lab as lab

    from jaxrl_post.data import tokenizer
    from jaxrl_post.models import llama2c

    config, params = llama2c.load(record.data("tinystories-260k", "stories260K.bin"))
    stop = int(tokenizer.load(record.data("tinystories-260k", "tok512.bin")).encode(".")[-1])
    asked = lab.requests(128, samples=8, longest_prompt=24, longest=64, vocab=config.vocab_size, seed=1)
    return config, params, [_ending(request, (1, stop)) for request in asked], stop


def _demo(record) -> tuple:
    """Returns the sums of the demo, 8 rollouts each."""
    import engine_lab as lab
    import numpy as np

    from jaxrl_post.data import tokenizer
    from jaxrl_post.models import hf
    from jaxrl_post.types import Prompt

    folder, noise = record.root / "configs" / "demo_policy", np.random.default_rng(0)
    words, (config, params) = tokenizer.load(folder), hf.load(folder)
    texts = ["+".join(map(str, noise.integers(1, 60, 3 + 4 * (n % 2)))) + "=" for n in range(32)]
    prompts = [Prompt(id=str(n), tokens=words.encode(text)) for n, text in enumerate(texts)]
    asked = lab.requests(256, samples=8, longest_prompt=1, longest=48, vocab=config.vocab_size, seed=2)
    asked = [dataclasses.replace(request, prompt=prompts[n // 8]) for n, request in enumerate(asked)]
    return config, params, [_ending(request, words.eos_ids) for request in asked], words.eos_ids[0]


def _ending(request, eos_ids: tuple):
    return dataclasses.replace(request, sampling=dataclasses.replace(request.sampling, eos_ids=tuple(eos_ids)))


def _arms(record, model: str, config, params, asked: list, eos: int) -> None:
    """Compares every drafter, with clones, with an engine without one; then with few pages, then through a swap."""
    import engine_lab as lab
    import numpy as np
    import scripted_drafter as scripted

    plain = lab.run(lab.engine(params, config), asked)
    record.figure(f"{model}.num_requests", len(plain))
    record.figure(f"{model}.num_tokens", sum(map(len, plain.values())), at_least=1000)
    scripts = scripted.Scripts(plain, length=lab.BASE["max_length"], vocab=config.vocab_size, eos=eos)
    groups = [g for epoch in (0, 1) for g in lab.groups_of(asked, plain, epoch, vary=0.1, vocab=config.vocab_size)]

    def made(name, params=params, **more):
        if name in scripted.KINDS:
            drafting = scripts.drafting(width=6, slots=lab.BASE["slots"], clones=True)
        else:
            drafting = lab.drafting(name, groups, vocab=config.vocab_size, clones=True)
        return lab.engine(params, config, drafting=drafting, cost=lab.FREE_ROWS, **more)

    of_scripts = made("perfect")
    for name in (*scripted.KINDS, *NAMED):
        getattr(scripts, name, lambda: None)()
        engine = of_scripts if name in scripted.KINDS else made(name)
        engine.reset()
        _compare(record, f"{model}.{name}", plain, lab.run(engine, asked), engine, LEAST.get(name, 200))
        if name == "perfect":
            inside = {
                kind: sum(r.finish.value == kind and len(r) > 1 and bool(r.drafted[-2]) for r in _again(engine, asked))
                for kind in ("eos", "length")
            }
            for kind, count in inside.items():
                record.figure(f"{model}.{name}.ended_by_{kind}_behind_a_draft", count, at_least=5)
    for name in ("perfect", "ours"):
        getattr(scripts, name, lambda: None)()
        tight = made(name, pages=13)
        out = lab.run(tight, asked)
        counts = tight.metrics()
        record.figure(f"{model}.{name}_few_pages.preemptions", counts["sched/preemptions"], at_least=5)
        record.figure(f"{model}.{name}_few_pages.bits_equal", lab.same_bits(plain, out), equals=True)
    near = {**params, "final_norm": np.asarray(params["final_norm"]) * np.float32(1.1)}
    want = lab.run(lab.engine(near, config), asked)
    engine = made("ours")
    out = lab.swap_in_mid_generation(engine, asked, _placed(near, config), steps=2, mode="verify")
    _compare(record, f"{model}.ours_swap", want, out, engine, 200)
    record.figure(
        f"{model}.ours_swap.rollouts_that_changed",
        sum(plain[name].tokens.tolist() != want[name].tokens.tolist() for name in plain),
        at_least=1,
    )


def _again(engine, asked: list) -> list:
    """Generates the rollouts once more. `drafted` says which tokens were accepted drafts."""
    import engine_lab as lab

    engine.reset()
    return list(lab.run(engine, asked).values())


def _placed(params, config):
    from jaxrl_post.models import decoder
    from jaxrl_post.parallel import mesh as meshes

    return meshes.put(params, meshes.param_shardings(meshes.make_mesh(), decoder.axes(config), "engine"))


def _compare(record, name: str, want: dict, out: dict, engine, least: int) -> None:
    import engine_lab as lab

    counts = engine.metrics()
    record.figure(f"{name}.drafted", counts.get("spec/num_drafted", 0), at_least=200)
    record.figure(f"{name}.accepted", counts.get("spec/num_accepted", 0), at_least=least)
    record.figure(f"{name}.bits_equal", lab.same_bits(want, out), equals=True)


def _whole_runs(record) -> None:
    """Runs synchronously from the same file: with drafts, with drafts and clones, and without."""
    import saved

    from jaxrl_post.telemetry import metrics

    with tempfile.TemporaryDirectory() as folder:
        runs = {name: Path(folder) / name for name in ("off", "ours", "clones")}
        for name, place in runs.items():
            flags = {
                "off": ["--config.speculation=default"],
                "ours": [],
                "clones": ["--config.speculation.clones=True"],
            }
            seconds = record.run(
                "-m",
                "jaxrl_post.main",
                "--config=configs/demo_speculation.py",
                *SHORT,
                *flags[name],
                f"--run-dir={place}",
                timeout_s=900,
            )
            record.figure(f"run.{name}.seconds", round(seconds, 2))
            rows = metrics.read(place / "metrics.jsonl")
            for count in ("spec/num_drafted", "spec/num_accepted", "rows/steps"):
                least = {} if name == "off" or count == "rows/steps" else {"at_least": 500}
                record.figure(f"run.{name}.{count.split('/')[1]}", sum(row.get(count, 0.0) for row in rows), **least)
        for name in ("ours", "clones"):
            differing = saved.differing(
                *(next((place / "checkpoints").glob("step_??????")) / "arrays" for place in (runs["off"], runs[name]))
            )
            record.figure(f"run.{name}.weights_and_moments_that_differ", differing, equals=[])
            exported = [(place / "policy" / "model.safetensors").read_bytes() for place in (runs["off"], runs[name])]
            record.figure(f"run.{name}.exported_policy_equal", exported[0] == exported[1], equals=True)
        start = (record.root / "configs" / "demo_policy" / "model.safetensors").read_bytes()
        record.figure("run.off.has_learned", start != exported[0], equals=True)
