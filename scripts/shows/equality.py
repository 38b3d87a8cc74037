"""What makes the engine fast changes no token: against an independent sampler, and bit for bit among engine runs.

On the stories260K weights (JAXRL_DATA) 200 requests go over 16 slots, with random lengths, temperatures and submit
times. On a tiny random model the arms are tensor parallel 1 and 2, and data 2 x tensor 2, on forced devices. Then the
planted faults follow, each of which must break an equality.
"""

from __future__ import annotations

import dataclasses
import functools
import os

import numpy as np
import sampler

from jaxrl_post.engine import bit_probe
from jaxrl_post.models import llama2c
from jaxrl_post.parallel import mesh as meshes

MINUTES = 6.0
PLATFORM = "cpu"

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")


def show(record) -> None:
    _on_real_weights(record)
    _sharded(record)
    record.planted("tests/test_engine_equality.py", 5)


def _on_real_weights(record) -> None:
    import engine_lab as lab

    config, params = llama2c.load(record.data("tinystories-260k", "stories260K.bin"))
    asked = lab.requests(200, samples=8, longest_prompt=24, longest=64, vocab=config.vocab_size, seed=1)
    asked = [_ending(r, eos=1) for r in asked]
    noise = np.random.default_rng(0)
    late = noise.integers(0, 60, len(asked)).tolist()

    several = lab.engine(params, config, row_sizes=(64, 96, 128, 192))
    bit_probe.keep_equal_sizes(several)
    sizes = several.row_sizes
    record.figure("row_sizes_kept_by_the_probe", list(sizes))

    def run(engine, size, *args, **more):
        engine.reset()
        engine.row_sizes = (size,)
        return lab.run(engine, *args, **more)

    plain = run(several, sizes[-1], asked, submit_at=late)
    record.figure("num_requests", len(plain), equals=200)
    record.figure("num_tokens", sum(len(r) for r in plain.values()))
    objections = _against_sampler(record, lab, plain, asked, config, params)
    for objection in objections[:5]:
        print(objection)
    record.figure("objections_of_the_independent_sampler", len(objections), equals=0)

    for size in sizes[:-1]:
        record.figure(f"bits_equal_row_size_{size}", lab.same_bits(plain, run(several, size, asked)), equals=True)
    _among_engine_runs(record, lab, several, functools.partial(run, several, sizes[-1]), asked, plain, (config, params))


def _among_engine_runs(record, lab, several, run, asked, plain, model) -> None:
    config, params = model
    noise = np.random.default_rng(1)
    turned = [asked[i] for i in noise.permutation(len(asked))]
    record.figure("bits_equal_other_slot_order", lab.same_bits(plain, run(turned)), equals=True)
    tight = lab.engine(params, config, row_sizes=several.row_sizes[-1:], pages=14)
    some = asked[:64]
    few = {r.rollout_id: plain[r.rollout_id] for r in some}
    record.figure("bits_equal_tight_pages", lab.same_bits(few, lab.run(tight, some)), equals=True)
    record.figure("preemptions_in_64_rollouts", tight.metrics()["sched/preemptions"], at_least=20)
    several.reset()
    for mode in ("recompute", "verify", "restart"):
        out, parks = lab.park_and_resume(several, asked, mode=mode)
        record.figure(f"bits_equal_parked_{mode}", lab.same_bits(plain, out), equals=True)
        record.figure(f"parks_{mode}", parks, at_least=20)
        several.reset()
    junk = [lab.with_guesses(r, noise.integers(0, config.vocab_size, 64)) for r in asked]
    record.figure("bits_equal_random_candidates", lab.same_bits(plain, run(junk)), equals=True)
    right = [lab.with_guesses(r, plain[r.rollout_id].tokens) for r in asked]
    record.figure("bits_equal_perfect_candidates", lab.same_bits(plain, run(right)), equals=True)
    for steps in (1, 5):
        other = lab.engine(params, config, row_sizes=several.row_sizes[-1:], steps_per_dispatch=steps)
        record.figure(f"bits_equal_{steps}_steps_a_dispatch", lab.same_bits(plain, lab.run(other, asked)), equals=True)


def _against_sampler(record, lab, plain, asked, config, params) -> list[str]:
    """Compares this run's rollouts with the sampler's draws, which are kept by commit."""

    def draws() -> list:
        return [[[d.token, d.logprob, d.entropy, d.gap] for d in lab.reference(r, params, config)] for r in asked]

    kept = record.cached("draws", draws)
    out = []
    for request, told in zip(asked, kept, strict=True):
        got = plain[request.rollout_id]
        out.append(sampler.disagreement([sampler.Draw(*d) for d in told], got.tokens, got.logprobs, got.entropies))
    return [objection for objection in out if objection]


def _ending(request, eos: int):
    return dataclasses.replace(request, sampling=dataclasses.replace(request.sampling, eos_ids=(eos,)))


def _sharded(record) -> None:
    import engine_lab as lab

    sizes = dict(max_length=176, pages=200, row_sizes=(64,))
    how = dict(samples=4, exact=128, longest_prompt=40, temperatures=(1.0,), seed=3)
    one = lab.run(lab.engine(**sizes), lab.requests(16, **how))
    for name, shape in (("tensor2", (1, 1, 2)), ("data2_tensor2", (2, 1, 2))):
        mesh = meshes.make_mesh(*shape)
        asked = lab.requests(16, replicas=meshes.replicas(mesh), **how)
        many = lab.run(lab.engine(mesh=mesh, **sizes), asked)
        gaps, worst = lab.first_differences(one, many, asked, lab.weights(0))
        record.figure(f"{name}_rollouts_that_differ", len(gaps))
        record.figure(f"{name}_first_differences_per_1000_tokens", 1000 * len(gaps) / (16 * 128))
        record.figure(f"{name}_largest_gap_at_a_first_difference", max(gaps, default=0.0), at_most=1e-4)
        record.figure(f"{name}_max_logprob_difference", worst, at_most=1e-5)
