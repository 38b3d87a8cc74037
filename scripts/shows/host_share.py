"""The host's part of a dispatch: CPU milliseconds at 256, 1,024 and 4,096 live slots.

The real host runs over a device that computes nothing (scripts/idle_device.py). Slots are those of one replica, or of
eight. Rollouts have 2,000 tokens on average and are somewhere in their midst at the start. Prompts have 300 tokens and 8
rollouts each, and pages hold 64 positions. A dispatch has 8 steps, the default. Rollouts end and others enter all the
time. A figure is a mean of 40 dispatches: CPU time of the host's thread, without that of the device. Eight equal runs
time each dispatch, and the least counts: other programs on the machine make CPU time longer too.

`ms` is everything. `serial_ms` leaves out what the host does while a dispatch runs. Calls of jax are not in it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
from idle_device import EOS, VOCABULARY, IdleDevice

from jaxrl_post.engine.host.row_host import RowHost
from jaxrl_post.engine.host.wire import EngineSettings
from jaxrl_post.engine.speculation.interface import Drafter
from jaxrl_post.engine.speculation.speculation import Drafting
from jaxrl_post.engine.step_cost import StepCost
from jaxrl_post.ring.types import Finish, Prompt, Request, Rollout, RolloutId, Sampling

MINUTES = 3.0

LIVE, REPLICAS = (256, 1024, 4096), (1, 8)
STEPS, PAGE, PROMPT, GROUP, MEAN, LONGEST = 8, 64, 300, 8, 2000, 8192
WARM, DISPATCHES, RUNS = 6, 40, 8


def show(record) -> None:
    cases = [(live, replicas) for replicas in REPLICAS for live in LIVE]
    runs = [{case: _run(*case) for case in cases} for _ in range(RUNS)]
    found = {}
    for replicas in REPLICAS:
        for live in LIVE:
            where, bound = f"{live}_slots.{replicas}_replicas", {"at_most": 4.0} if live == 1024 else {}
            taken, ended = zip(*(run[live, replicas] for run in runs))
            assert len({*ended}) == 1, "the runs are not equal"
            found[live, replicas], serial = np.mean(np.min(taken, axis=0), axis=0)
            record.figure(f"{where}.ms", found[live, replicas], **bound)
            record.figure(f"{where}.serial_ms", serial)
            record.figure(f"{where}.ended_in_a_dispatch", ended[0] / DISPATCHES, at_least=live * STEPS / MEAN / 2)
        ratio = found[4096, replicas] / found[1024, replicas]
        record.figure(f"4096_over_1024.{replicas}_replicas", ratio, at_most=5.0)


def _run(live: int, replicas: int) -> tuple[np.ndarray, int]:
    """Returns milliseconds [dispatches, 2], all and those without the device at work, and how many rollouts ended."""
    host = _host(live, replicas)
    asked = _requests(replicas)
    host.submit([next(asked) for _ in range(live + 2 * GROUP * replicas)])
    taken, ended = [], 0
    for number in range(WARM + DISPATCHES):
        lacking = live + GROUP * replicas - len(host.sequences)
        if lacking > 0:
            host.submit([next(asked) for _ in range(lacking)])
        host.device.clear()
        begun = time.thread_time()
        done = host.step()
        if number >= WARM:
            whole = time.thread_time() - begun - host.device.own_s
            taken.append((whole, whole - host.device.meanwhile_s))
            ended += len(done)
    assert sum(one is not None for r in host.admission.replicas for one in r.slots) > 0.95 * live
    return 1e3 * np.array(taken), ended


def _host(live: int, replicas: int):
    slots = live // replicas
    cost = StepCost((slots, 2 * slots), (1.0, 1.5), "two sizes")
    settings = EngineSettings(
        replicas=replicas,
        slots=slots,
        max_length=LONGEST,
        page_size=PAGE,
        pages=slots * LONGEST // PAGE,
        row_sizes=cost.rows,
        head_rows=slots,
        steps_per_dispatch=STEPS,
        refill_slots=slots // 16,
    )
    drafting = Drafting(Drafter(), replicas=replicas, slots=slots, past=lambda id: ())
    device = IdleDevice(settings, MEAN)
    return RowHost(device, settings, cost=cost, vocab_size=VOCABULARY, drafting=drafting)


def _requests(replicas: int) -> Iterator:
    """Yields requests whose rollouts begin with up to twice the mean length, as rollouts in the midst of a run do."""
    noise, number, law = np.random.default_rng(1), 0, Sampling(eos_ids=(EOS,))
    while True:
        prompt = Prompt(id=f"prompt-{number}", tokens=noise.integers(3, 1000, PROMPT))
        for sample in range(GROUP):
            id = RolloutId(0, "train", 0, prompt.id, sample)
            size = int(noise.integers(1, 2 * MEAN))
            zeros = np.zeros(size)
            before = Rollout(id=id, prompt=prompt, tokens=zeros + 5, sampled=zeros == 0, logprobs=zeros, entropies=zeros,
                             versions=zeros, drafted=zeros > 0, finish=Finish.PARKED, start_clock=0, finish_clock=0)  # fmt: skip
            yield Request(rollout_id=id, prompt=prompt, seed=id.seed(), max_tokens=LONGEST - PROMPT - 1, sampling=law,
                          replica=number % replicas, prefix=before)  # fmt: skip
        number += 1
