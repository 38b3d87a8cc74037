"""One training step on a tiny shape: rollout by the row engine, then the learner and the weight sync.

    python scripts/bench.py step --json FILE [--turns=5] [--SETTING=VALUE ...]

There are two cases, each in a process of its own. In `fixed` every rollout has all of its tokens. `lognormal` has one
fixed list of lengths drawn log-normal, and each rollout ends at its own limit. No end token is given, so nothing else
ends a rollout. The model has random weights in float32. The reward counts one token against another. Figures of a case
are medians over the turns, after two of warm-up:

- `rollout_s`: from submitting the requests to the last rollout.
- `train_s`: all of prepare, accumulate, commit and swap until the weights are there.
- `step_s`: both, and the reward between them.
- `compile_s`: what building engine and learner and the first step took beyond a later step.
- `peak_rss_mib`: the highest resident memory of the process.

The settings (slots, row size, micro-batch) are free choices of each case and are printed with it.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import time

PROMPTS, GROUP, PROMPT, ANSWER, VOCAB = 8, 8, 32, 128, 1024
MEDIAN, SIGMA, DRAW = 24.0, 1.0, 0  # of the log-normal lengths
WARMUP = 2
SETTINGS = {
    "fixed": dict(slots=64, rows=64, page=64, steps=32, refill=64, batch_rows=8, batch_tokens=160),
    "lognormal": dict(slots=32, rows=32, page=64, steps=16, refill=1, batch_rows=8, batch_tokens=160),
}


def lengths(case: str) -> list[int]:
    """Returns the tokens of each rollout, the same in every run."""
    import numpy as np

    if case == "fixed":
        return [ANSWER] * (PROMPTS * GROUP)
    drawn = np.random.default_rng(DRAW).lognormal(np.log(MEDIAN), SIGMA, PROMPTS * GROUP)
    return np.clip(np.rint(drawn), 1, ANSWER).astype(int).tolist()


def bench(record) -> None:
    given = record.options
    turns = int(given.pop("turns", 5))
    for case in SETTINGS:
        settings = SETTINGS[case] | {name: int(value) for name, value in given.items()}
        uncached = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
        done = subprocess.run(
            [sys.executable, __file__, case, str(turns), json.dumps(settings)],
            cwd=record.root,
            env={"JAX_PLATFORMS": "cpu", **uncached},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        record.figure(case, json.loads(done.stdout))


def measure(case: str, turns: int, settings: dict) -> dict:
    """Returns the figures of one case."""
    import jax

    begun = time.perf_counter()
    parts = build(settings)
    times = []
    for turn in range(WARMUP + turns):
        times.append(one_step(*parts, turn, lengths(case)))
        if turn == 0:
            first = time.perf_counter() - begun
    rollout, train, step = (statistics.median(kind) for kind in zip(*times[WARMUP:]))
    tokens = sum(lengths(case))
    return dict(
        rollout_s=rollout,
        train_s=train,
        step_s=step,
        rollout_tokens_per_s=tokens / rollout,
        trained_tokens_per_s=tokens / train,
        compile_s=first - step,
        peak_rss_mib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        answer_tokens=tokens,
        longest_answer=max(lengths(case)),
        devices=len(jax.devices()),
        settings=settings,
        turns=[[round(x, 4) for x in turn] for turn in times],
    )


def build(s: dict) -> tuple:
    """Returns the engine and the learner of a case, on shared weights."""
    trainer = learner(s["batch_rows"], s["batch_tokens"])
    return engine(
        trainer.params,
        slots=s["slots"],
        rows=s["rows"],
        heads=s["slots"],
        page=s["page"],
        steps=s["steps"],
        refill=s["refill"],
    ), trainer


def shape():
    """Returns the shape of the tiny model: a Qwen3 of 3.7 million weights."""
    from jaxrl_post.models import decoder

    return decoder.ModelConfig(
        vocab_size=VOCAB,
        embed=256,
        layers=4,
        heads=8,
        kv_heads=4,
        head_dim=32,
        ffw=768,
        max_length=4096,
        norm_eps=1e-6,
        qk_norm=True,
    )


def weights():
    """Returns its random weights, placed as the engine wants them."""
    from jaxrl_post.models import decoder
    from jaxrl_post.parallel import mesh

    return mesh.put(decoder.init(shape(), 0), mesh.param_shardings(mesh.make_mesh(), decoder.axes(shape()), "engine"))


def learner(rows: int, tokens: int):
    """Returns a compiled learner of micro-batches rows x tokens."""
    from jaxrl_post import config
    from jaxrl_post.models import decoder
    from jaxrl_post.parallel import mesh
    from jaxrl_post.trainer.learner import Learner, LearnerSettings

    made = Learner(
        shape(),
        decoder.init(shape(), 0),
        mesh.make_mesh(),
        LearnerSettings(
            algorithm=config.AlgorithmConfig(),
            optimizer=config.OptimizerConfig(),
            batch=config.BatchConfig(rows=rows, tokens=tokens, head_chunk=rows * tokens),
            temperature=1.0,
            steps=1000,
            max_tokens=ANSWER,
        ),
    )
    made.compile()
    return made


def engine(params, *, slots: int, rows: int, heads: int, page: int, steps: int, refill: int):
    """Returns an engine of one row size, with pages for every slot and every shared prompt."""
    from jaxrl_post.engine.row_engine import EngineSettings, RowEngine
    from jaxrl_post.parallel import mesh

    whole = PROMPT + ANSWER
    return RowEngine(
        shape(),
        params,
        mesh.make_mesh(),
        EngineSettings(
            slots=slots,
            max_length=whole,
            page_size=page,
            pages=slots * -(-whole // page) + PROMPTS,
            row_sizes=(rows,),
            head_rows=heads,
            steps_per_dispatch=steps,
            refill_slots=refill,
        ),
    )


def one_step(engine, learner, turn: int, limits: list[int]) -> tuple[float, float, float]:
    """Returns the seconds of the rollout, of the training, and of the whole step."""
    import jax

    asked = requests(turn, limits)
    begun = time.perf_counter()
    engine.submit(asked)
    rollouts = {}
    while engine.pending:
        rollouts.update((rollout.id, rollout) for rollout in engine.step())
    rolled = time.perf_counter()
    assert [len(rollouts[r.rollout_id]) for r in asked] == limits
    groups = [scored([rollouts[r.rollout_id] for r in asked[at : at + GROUP]]) for at in range(0, len(asked), GROUP)]
    rewarded = time.perf_counter()
    learner.prepare(groups)
    learner.accumulate(groups)
    metrics = learner.commit()
    engine.swap(learner.params, learner.step, learner.finite)
    jax.block_until_ready(learner.params)
    ended = time.perf_counter()
    assert int(metrics["training/trained_tokens"]) == sum(limits) and float(metrics["actor/grad_norm"]) > 0
    return rolled - begun, ended - rewarded, ended - begun


def requests(turn: int, limits: list[int]) -> list:
    """Returns what a scheduler would submit: new prompts each turn, the rollouts of one side by side."""
    import numpy as np

    from jaxrl_post.ring.types import Prompt, Request, RolloutId, Sampling

    noise, out = np.random.default_rng(turn), []
    for index in range(PROMPTS):
        prompt = Prompt(id=f"{turn}-{index}", tokens=noise.integers(3, VOCAB, PROMPT))
        for sample in range(GROUP):
            name = RolloutId(0, "train", 0, prompt.id, sample)
            out.append(
                Request(
                    rollout_id=name, prompt=prompt, seed=name.seed(), max_tokens=limits[len(out)], sampling=Sampling()
                )
            )
    return out


def scored(rollouts: list):
    """Returns their group. A rollout is worth its count of even tokens less that of odd ones."""
    import numpy as np

    from jaxrl_post.ring.types import Group

    rewards = [float(len(r) - 2 * np.sum(r.tokens % 2)) for r in rollouts]
    return Group(prompt=rollouts[0].prompt, rollouts=tuple(rollouts), rewards=rewards, scored=[True] * len(rollouts))


if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    print(json.dumps(measure(sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3]))))
