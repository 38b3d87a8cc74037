"""RollPacker's 24 rollout times come out of the simulator, and what follows from the same parameters is predicted.

Its figure 11 (arXiv 2509.21009) has 128 prompts x 8 rollouts, over-provisioned by eta on prompts, on rollouts or on
both, of at most 8k, 16k and 32k tokens. The length model and the seconds of a step were fitted to these 24 numbers,
once and elsewhere. They are used as given: the parameters of configs/sim/rollpacker_*.py.

Predicted and not fitted are the period, the longest rollout of a short round, the seconds of short and long steps, and
tail batching's share of the ablation. Training and rewards have the shares that its profile gives a synchronous step:
23 and 5 of 72 parts of the rollout.
"""

from __future__ import annotations

import math

from jaxrl_post import config
from jaxrl_post.simulate import settings, simulation

MINUTES = 8.0
TIMES = {  # (eta of prompts, eta of rollouts) -> seconds at 8k, 16k, 32k
    (1.0, 1.0): (82, 277, 673),
    (1.0, 1.125): (77, 260, 658),
    (1.125, 1.0): (77, 244, 636),
    (1.0, 1.25): (71, 232, 655),
    (1.25, 1.0): (72, 169, 259),
    (1.25, 1.25): (47, 88, 170),
    (1.0, 1.5): (54, 115, 265),
    (1.5, 1.0): (60, 143, 279),
}
STEPS = {"8k": (106, 129), "16k": (134, 302), "32k": (261, 771)}  # short and long, of the whole system
ABLATION = {"8k": 1.30, "16k": 1.48, "32k": 2.21}  # of steps, tail batching alone
LONGEST = (1100, 2000)  # of a short round at 32k, read off its figure 10
ROUNDS, MANY_ROUNDS = (25, 160)  # many, because with eta on rollouts alone a round lasts to the cap or ends early


def show(record) -> None:
    errors, found = [], {}
    for (prompts, answers), times in TIMES.items():
        for cap, published in zip(STEPS, times):
            name = f"{cap}.prompts_{prompts:g}.answers_{answers:g}"
            ours = found[cap, prompts, answers] = record.cached(name, lambda: _cell(record, cap, prompts, answers))
            errors.append(math.log(ours["rollout_s"] / published))
            record.figure(f"{name}.rollout_s", round(ours["rollout_s"], 1))
            record.figure(f"{name}.published_s", published)
            record.figure(f"{name}.ln_error", round(errors[-1], 3), at_least=-0.35, at_most=0.35)
            if prompts > 1:
                record.figure(f"{name}.period", ours["period"], equals=1 / (prompts - 1) + 1)
    record.figure("rms_ln_error", math.sqrt(sum(error**2 for error in errors) / len(errors)), at_most=0.13)
    record.figure("fitted", "yes: the length model and the seconds of a step, to these 24 numbers")
    for cap in STEPS:
        _predicted(record, cap, found[cap, 1.0, 1.0], found[cap, 1.25, 1.25])


def _cell(record, cap: str, prompts: float, answers: float) -> dict:
    period = round(1 / (prompts - 1)) + 1 if prompts > 1 else 1
    rounds = period * round((MANY_ROUNDS if prompts == 1 and answers >= 1.25 else ROUNDS) / period)
    name = "sync" if prompts == answers == 1 else "rollpacker"
    given = settings.resolve(
        config.load(str(record.root / "configs" / "sim" / f"rollpacker_{cap}.py")),
        (
            f"rounds={rounds}",
            f"workload.prompts={math.ceil(rounds * 128 * prompts)}",
            f"scheduler.name={name}",
            f"scheduler.over={prompts}",
            f"scheduler.over_samples={answers}",
        ),
    )
    return simulation.run(given)


def _predicted(record, cap: str, sync: dict, ours: dict) -> None:
    """Writes what follows with both etas at 1.25. Errors are stated and not bounded."""
    baseline = dict(zip(STEPS, TIMES[1.0, 1.0]))[cap]
    beside = baseline * 28 / 72
    for kind, published in zip(("short", "long"), STEPS[cap]):
        step = ours[f"{kind}_rollout_s"] + beside
        record.figure(
            f"{cap}.{kind}_step_s",
            {"ours": round(step, 1), "published": published, "ln_error": round(math.log(step / published), 3)},
        )
    speedup = (sync["rollout_s"] + beside) / (ours["rollout_s"] + beside)
    record.figure(
        f"{cap}.ablation",
        {
            "ours": round(speedup, 2),
            "published": ABLATION[cap],
            "ln_error": round(math.log(speedup / ABLATION[cap]), 3),
        },
    )
    record.figure(
        f"{cap}.short_longest_tokens",
        round(ours["short_longest"]),
        **(dict(at_least=LONGEST[0], at_most=LONGEST[1]) if cap == "32k" else {}),
    )
    record.figure(f"{cap}.length_bias", round(ours["mean_length"] / sync["mean_length"] - 1, 3), at_most=-0.15)
    record.figure(f"{cap}.tokens_wasted", round(ours["tokens_wasted"], 3))
