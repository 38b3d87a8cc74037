"""At frozen weights tail batching trains on exactly what synchronous rounds do; under drift each way to go on has its
price.

Frozen: the multiset of (prompt, seed, tokens) equals that of synchronous rounds. That holds on the simulator over 7
periods of the fitted 16k workload, and on the real engine, for verify, recompute and restart.

Drift: every token of a rollout changes under the next version with probability TV. TV is 0, 0.001, 0.005, 0.02, or what
a run of configs/demo.py has. The latter is its mean total variation of the next token's law between two steps, over the
rollouts it trains on. Lengths trained stand beside what synchronous rounds launch and train under the same drift.
RollPacker's own mode shows how much it shrinks.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import math
import tempfile
from collections import Counter

import frozen_rounds as real
import numpy as np
from dense_attend import dense

from jaxrl_post import main
from jaxrl_post.models import decoder
from jaxrl_post.ring import loop
from jaxrl_post.simulate import settings, simulation

MINUTES = 8.0
PLATFORM = "cpu"
MODES = ("verify", "recompute", "restart")
DRIFTS = (0.0, 0.001, 0.005, 0.02)
ROUNDS, STEPS = 35, 30


def show(record) -> None:
    _frozen(record)
    _engine(record)
    measured = record.cached("demo_drift", lambda: _measured(record))
    record.figure("demo_tv_per_token", measured)
    for tv in sorted({*DRIFTS, round(measured["mean"], 4)}):
        _under(record, tv)


def _given(record, *overrides: str):
    from jaxrl_post import config

    return settings.resolve(
        config.load(str(record.root / "configs" / "sim" / "rollpacker_16k.py")),
        (
            f"rounds={ROUNDS}",
            f"workload.prompts={ROUNDS * 128}",
            "scheduler.name=sync",
            "scheduler.over=1.0",
            "scheduler.over_samples=1.0",
            *overrides,
        ),
    )


def _ours(mode: str) -> tuple[str, ...]:
    return ("scheduler.name=tail_batching", "scheduler.over=1.25", f"scheduler.prefix_mode={mode}")


def _frozen(record) -> None:
    sync = _trained(_given(record))
    for mode in MODES:
        ours = _trained(_given(record, *_ours(mode)))
        record.figure(f"simulated.{mode}.equal_multisets", ours == sync, equals=True)
    record.figure("simulated.rollouts", sum(sync.values()), at_least=ROUNDS * 128 * 8)
    other = _trained(_given(record, *_ours("verify"), "workload.tv=0.001"))
    record.figure("simulated.a_drift_of_0.001_is_seen", other != sync, equals=True)


def _trained(given) -> Counter:
    """Returns (prompt, seed, digest of the tokens) of everything the learner got."""
    ring = simulation.assemble(given)
    learned, accumulate = Counter(), ring.learner.accumulate

    def counted(groups) -> None:
        for rollout in (rollout for group in groups for rollout in group.rollouts):
            tokens = hashlib.blake2b(rollout.tokens.tobytes(), digest_size=16).digest()
            learned[rollout.id.epoch, rollout.prompt.id, rollout.id.seed().tobytes(), tokens] += 1
        accumulate(groups)

    ring.learner.accumulate = counted
    loop.run(
        simulation.tallied(ring),
        ring.engine,
        ring.scheduler,
        ring.rewards,
        ring.learner,
        simulation.publish,
        given.rounds,
    )
    return learned


def _engine(record) -> None:
    sync, _ = real.rounds("sync", steps=6)
    for mode in MODES:
        ours, counts = real.rounds("tail_batching", steps=6, over=1.5, prefix_mode=mode)
        record.figure(f"engine.{mode}.equal_multisets", real.multiset(ours) == real.multiset(sync), equals=True)
        record.figure(f"engine.{mode}.groups_deferred", counts["sched/num_groups_deferred"], at_least=1)


def _under(record, tv: float) -> None:
    """Writes all ways to go on at one drift, beside synchronous rounds."""

    def figures(*overrides: str) -> dict:
        return record.cached(
            f"tv{tv:g}." + ".".join(overrides).replace("/", "_"),
            lambda: simulation.run(_given(record, f"workload.tv={tv}", *overrides)),
        )

    sync, found = figures(), {}
    for mode in MODES:
        ours = found[mode] = figures(*_ours(mode))
        bias = ours["mean_length"] / sync["mean_length"] - 1
        record.figure(
            f"tv_{tv:g}.{mode}",
            {
                "speedup": round(sync["rollout_s"] / ours["rollout_s"], 2),
                "length_bias": round(bias, 4),
                "staleness": round(ours["staleness"], 2),
                "tokens_recomputed": round(ours["tokens_recomputed"], 3),
                "tokens_wasted": round(ours["tokens_wasted"], 3),
            },
        )
        if tv == 0 or mode == "recompute":  # two draws of the same law differ by a standard deviation of 1.3 %
            record.figure(f"tv_{tv:g}.{mode}.length_bias", bias, at_least=-0.04 * (tv > 0), at_most=0.04 * (tv > 0))
    record.figure(f"tv_{tv:g}.verify_below_restart", found["verify"]["rollout_s"] > found["restart"]["rollout_s"])
    other = figures("scheduler.name=rollpacker", "scheduler.over=1.25", "scheduler.over_samples=1.25")
    record.figure(
        f"tv_{tv:g}.rollpacker",
        {
            "speedup": round(sync["rollout_s"] / other["rollout_s"], 2),
            "tokens_wasted": round(other["tokens_wasted"], 3),
        },
    )
    record.figure(f"tv_{tv:g}.rollpacker.length_bias", other["mean_length"] / sync["mean_length"] - 1, at_most=-0.15)


def _measured(record) -> dict:
    """Measures the total variation of the next token's law between one version and the next, on a real run."""
    import jax

    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.ExitStack() as stack,
        contextlib.redirect_stdout(io.StringIO()),
    ):
        run = main.assemble(
            [
                f"--config={record.root / 'configs' / 'demo.py'}",
                f"--config.steps={STEPS}",
                "--config.eval.prompts=0",
                "--config.eval.every=0",
                "--config.checkpoint.every=0",
                f"--run-dir={folder}/run",
            ],
            stack,
        )
        run.learner = watched = _Watched(run, jax)
        main.run_training(run)
    return {"mean": sum(watched.found) / len(watched.found), "largest": max(watched.found), "steps": len(watched.found)}


class _Watched:
    """The run's learner, which after each commit compares the policies before and after it."""

    def __init__(self, run, jax):
        self._run, self._learner, self._jax = run, run.learner, jax
        self.found: list[float] = []

    def __getattr__(self, name):
        return getattr(self._learner, name)

    def accumulate(self, groups):
        self._groups = groups
        return self._learner.accumulate(groups)

    def commit(self):
        before = self._jax.device_get(self._learner.params)
        out = self._learner.commit()
        with self._run.guard.lifted(), self._jax.transfer_guard("allow"):
            self.found.append(self._apart(before, self._jax.device_get(self._learner.params)))
        return out

    def _apart(self, before, after) -> float:
        """Returns half the 1-norm between two laws of the next token, the mean over the tokens of 64 rollouts."""
        config = self._run.start.model
        rollouts = [group.rollouts[0] for group in self._groups][:64]
        length = max(rollout.prompt.tokens.size + len(rollout) for rollout in rollouts)
        tokens, answers = np.zeros((len(rollouts), length), np.int32), np.zeros((len(rollouts), length), bool)
        for row, rollout in enumerate(rollouts):
            text = np.concatenate([rollout.prompt.tokens, rollout.tokens])
            tokens[row, : text.size] = text
            answers[row, rollout.prompt.tokens.size - 1 : text.size - 1] = True
        positions = np.broadcast_to(np.arange(length, dtype=np.int32), tokens.shape)
        laws = []
        for params in (before, after):
            h, _ = decoder.hidden(params, config, tokens, positions, dense(positions), None)
            laws.append(np.asarray(self._jax.nn.softmax(decoder.logits(params, config, h), axis=-1), np.float64))
        value = float(np.abs(laws[0] - laws[1]).sum(-1)[answers].mean() / 2)
        assert math.isfinite(value), "the policies' laws are no numbers"
        return value
