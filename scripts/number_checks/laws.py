"""One sampling law with and without cuts, in a kernel, in `generate` beside the server, and in runs; and LUSPO's objective."""

from __future__ import annotations

import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import served

from jaxrl_post.algorithms import aggregation, losses
from jaxrl_post.config import AlgorithmConfig, default, fields, resolve
from jaxrl_post.kernels import sampling, thresholds
from jaxrl_post.ring.types import RolloutId
from jaxrl_post.serve import prompts
from number_checks import logs

VOCABULARIES = (5, 16, 40, 128, 503, 1000, 1024, 1025, 2053)
HEATS = (0.3, 0.6, 1.0, 1.7)
ROWS = 64
SHORT = (
    "--config.steps=3",
    "--config.checkpoint.every=0",
    "--config.sampling.temperature=0.6",
    "--config.scheduler.prompts=16",
    "--config.eval.prompts=16",
    "--config.eval.every=1",
)


def show(record) -> None:
    _law(record)
    _server(record)
    _runs(record)
    _luspo(record)


def _law(record) -> None:
    """Counts the log-probs and entropies of rows without a cut that differ with what the other rows of a batch ask for."""
    sample, find = jax.jit(sampling.sample), jax.jit(thresholds.find)
    differ, compared, cut = 0, 0, np.arange(ROWS) % 2 == 1
    for vocab in VOCABULARIES:
        noise = np.random.default_rng(vocab)
        logits = jnp.asarray(noise.normal(size=(ROWS, vocab)) * 3, jnp.float32)
        seeds = jnp.asarray(noise.integers(0, 2**32, (ROWS, 2)), jnp.uint32)
        for heat in HEATS:
            heats = jnp.full(ROWS, heat, jnp.float32)
            lowest = find(logits, heats, jnp.where(cut, 2, 0), jnp.where(cut, 0.8, 1.0))
            given = (logits, seeds, jnp.arange(ROWS), heats)
            plain = sample(*given)
            for other in (sample(*given, jnp.full(ROWS, -jnp.inf)), sample(*given, lowest)):
                for one, two in zip(plain, other, strict=True):
                    one, two = np.asarray(one)[~cut], np.asarray(two)[~cut]
                    differ, compared = differ + int((one != two).sum()), compared + one.size
    record.figure("N01.law.compared", compared, at_least=10_000)
    record.figure("N01.law.differing_bits", differ, equals=0)


def _server(record) -> None:
    """Counts the choices of a server whose log-probs are not those of `generate` with the same noise."""
    own, differ, compared = served.policy(), 0, 0
    with served.served(served.policy()) as one:
        for number, heat in enumerate(HEATS):
            text = f"{12 + number}+34="
            asked = dict(n=8, seed=5, max_tokens=20, return_token_ids=True, logprobs=0, temperature=heat)
            found = one.post("/v1/completions", prompt=text, **asked)
            named = prompts.Reading(own.tokenizer, None, 64, tools=False)._bounded("prompt", text).id
            keys = [[RolloutId(5, "eval", 0, named, sample).seed() for sample in range(8)]]
            law = {"temperature": heat}
            rollouts = own.generate([text], n=8, seeds=keys, max_tokens=20, sampling=law)[0]
            for choice, rollout in zip(found["choices"], rollouts, strict=True):
                told = (choice["token_ids"], choice["logprobs"]["token_logprobs"])
                differ += told != (rollout.tokens.tolist(), rollout.logprobs.tolist())
                compared += 1
    record.figure("N01.server.compared", compared, at_least=32)
    record.figure("N01.server.differing", differ, equals=0)


def _runs(record) -> None:
    """Counts the training rollouts that change with eval.top_p."""
    with tempfile.TemporaryDirectory() as folder:
        found = []
        for share in (1.0, 0.9):
            place = Path(folder) / str(share)
            flags = (*SHORT, f"--config.eval.top_p={share}", f"--run-dir={place}")
            record.run("-m", "jaxrl_post.main", "--config=configs/demo.py", *flags, timeout_s=900)
            found.append(logs.rollouts(place))
    record.figure("N02.rollouts", len(found[0]), at_least=100)
    record.figure("N02.differing", logs.differing(*found), equals=0)


def _luspo(record) -> None:
    """The largest difference of the loss and of the mean over rollouts from LUSPO's formula in float64, and what is refused.

    The formula is that of TRL's documentation: the mean over rollouts of the length times GSPO's clipped objective."""
    noise, worst = np.random.default_rng(0), 0.0
    algorithm = AlgorithmConfig(loss_mode="luspo", loss_agg_mode="seq-mean-token-mean")
    low, high = 1 - algorithm.clip_ratio_low, 1 + algorithm.clip_ratio_high
    for _ in range(20):
        lengths, gains = noise.integers(1, 30, 8), noise.normal(size=8)
        weights, counts = aggregation.AGGREGATIONS[algorithm.loss_agg_mode](lengths, 32)
        got = want = 0.0
        for length, gain, weight in zip(lengths, gains, weights, strict=True):
            old, new = noise.normal(size=length) - 2, noise.normal(size=length) * 0.3 - 2
            ratio = np.exp(np.mean(new - old))
            want += length * max(-gain * ratio, -gain * np.clip(ratio, low, high)) / len(lengths)
            row = [jnp.asarray(x, jnp.float32)[None] for x in (new, old, np.full(length, gain))]
            terms = losses.Terms(*row, jnp.ones((1, length), bool), jnp.ones((1, length), int), algorithm)
            loss, _ = losses.luspo(terms)
            got += float(np.asarray(loss, np.float64).sum()) * weight / counts.sum()
        worst = max(worst, abs(got - want) / max(abs(want), 1.0))
    record.figure("N03.largest_difference", worst, at_most=1e-5)
    taken = []
    for mode in fields.members(AlgorithmConfig)["loss_agg_mode"][1].metadata["choices"]:
        try:
            asked = ("model.preset=tiny", "algorithm.loss_mode=luspo", f"algorithm.loss_agg_mode={mode}")
            taken.append(resolve(default(), asked).algorithm.loss_agg_mode)
        except ValueError:
            continue
    record.figure("N03.modes_taken", taken, equals=["seq-mean-token-mean"])
