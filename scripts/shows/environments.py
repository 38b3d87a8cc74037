"""Conversations: two policies learn in environments, and nothing that makes the engine fast changes a token of a turn.

- training: configs/demo_calculator.py and configs/demo_grid_world.py, on held-out problems.
- tokens: 1,000 conversations in four chat templates, against the text tokenised once.
- equality: drafts, preemption, parking, deferral, swaps and restarts over turns, bit for bit, with an independent sampler
  and planted faults.
- kill: a pipelined run is killed in the middle of conversations and resumed.
- faults: environments that hang, raise and die mask their rollouts, and are counted.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from killed import CONVERSING, Runs, steps

MINUTES = 12.0

LIMIT_S = 3000.0  # of one run, on a busy machine
KILLS = (30, 90)  # dispatches at which a run is killed, in the middle of conversations
STEPS, EVERY = 8, 2
KILLED = (
    "--config=configs/demo_calculator.py",
    f"--config.steps={STEPS}",
    f"--config.checkpoint.every={EVERY}",
    *CONVERSING,
)
BROKEN = '''
"""A calculator that fails for one problem in four, in its second turn."""
import os, time
from jaxrl_post.rewards.environments.calculator import Calculator

class Broken(Calculator):
    def reset(self, row):
        self._turns, self._fate = 0, sum(map(ord, row["id"])) % 12
        return super().reset(row)

    def step(self, messages):
        self._turns += 1
        if self._turns == 2:
            if self._fate == 0: time.sleep(60)
            if self._fate == 1: raise RuntimeError("broken")
            if self._fate == 2: os._exit(3)
        return super().step(messages)
'''


def show(record) -> None:
    sys.path[:0] = [str(record.root), str(record.root / "tests")]
    _tokens(record)
    _equality(record)
    _trained(record)
    _killed(record)
    _faults(record)


# ---- training


def _trained(record) -> None:
    bounds = {"demo_calculator": {"at_least": 0.8}, "demo_grid_world": {}}
    for name, after in bounds.items():
        found = record.cached(name, lambda name=name: _run(record, f"--config=configs/{name}.py"))
        first, last = found["eval"]["before"], found["eval"]["after"]
        highest = 0.4 if name == "demo_calculator" else 0.9
        record.figure(f"{name}.prompts", first["n"], at_least=40)
        record.figure(f"{name}.mean_at_4.before", first["mean_at_4"], at_most=highest)
        record.figure(f"{name}.mean_at_4.after", last["mean_at_4"], **after)
        error = (first["mean_at_4_se"] ** 2 + last["mean_at_4_se"] ** 2) ** 0.5
        gain = last["mean_at_4"] - first["mean_at_4"]
        record.figure(f"{name}.gain_in_standard_errors", gain / error, at_least=3.0)
        record.figure(f"{name}.greedy.before", first["greedy"])
        record.figure(f"{name}.greedy.after", last["greedy"])
        record.figure(f"{name}.unscored", last["num_unscored"], equals=0)


def _run(record, *arguments: str) -> dict:
    """Runs a whole command. Returns its summary."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        record.run("-m", "jaxrl_post.main", *arguments, f"--run-dir={run}", timeout_s=LIMIT_S)
        return json.loads((run / "summary.json").read_text())


# ---- tokens


def _tokens(record) -> None:
    import numpy as np
    import test_data_turns as turns

    from jaxrl_post.data.chat import Chat
    from jaxrl_post.data.turns import Wording

    number = differ = tokens = 0
    for template, end in turns.TEMPLATES.values():
        chat = Chat(template=template, tokens={"bos_token": "<s>", "eos_token": "</s>"})
        wording, noise = Wording(chat, turns.bpe(end)), np.random.default_rng(1)
        for _ in range(250):
            messages = turns.conversation(noise)
            mine, once = turns.appended(wording, messages), wording.whole(messages)
            number, tokens = number + 1, tokens + len(mine)
            differ += once[: len(mine)] != mine
        chat.close()
    record.figure("conversations", number, equals=1000)
    record.figure("conversations.tokens", tokens)
    record.figure("conversations.that_differ_from_the_text_tokenised_once", differ, equals=0)


# ---- equality


def _equality(record) -> None:
    import engine_lab as lab
    import test_engine_host_turns as turns

    shared = lab.engine()
    plain = lab.run(turns.conversing(shared), turns.ASKED)
    record.figure("equality.conversations", len(plain))
    record.figure("equality.turns", sum(map(turns.turns_of, plain.values())), at_least=80)
    objections = [text for text in _sampled(turns, plain) if text]
    record.figure("equality.objections_of_the_independent_sampler", objections, equals=[])
    for name, out in _arms(turns, lab, shared, plain):
        record.figure(f"equality.{name}", turns.same(plain, out), equals=True)
    record.planted("tests/test_engine_host_turns.py", 3)


def _sampled(turns, plain) -> list[str]:
    import engine_lab as lab
    import fake_environments as fake
    import sampler

    out = []
    for request in turns.ASKED:
        got = plain[request.rollout_id]
        draws, _ = fake.reference(request, lab.weights(0))
        out.append(sampler.disagreement(draws, got.tokens, got.logprobs, got.entropies))
    return out


def _arms(turns, lab, shared, plain):
    """Yields the name and the rollouts of every way to run the same conversations."""
    import dataclasses

    from jaxrl_post.engine.host.swap_policy import SwapPolicy

    asked = turns.ASKED
    for delay in (0, 3, 200):
        yield f"joined_after_{delay}_steps", lab.run(turns.conversing(shared, delay), asked)
    for mode in ("recompute", "verify", "restart"):
        yield f"parked_{mode}", lab.park_and_resume(turns.conversing(shared), asked, mode=mode)[0]
    again = [dataclasses.replace(r, prefix=plain[r.rollout_id], prefix_mode="verify") for r in asked]
    yield "deferred_and_verified", lab.run(turns.conversing(shared), again)
    yield "preempted", lab.run(turns.conversing(lab.engine(pages=12)), asked)
    groups = lab.groups_of(asked, plain, vary=0.1)
    drafted = lab.engine(drafting=lab.drafting("ours", groups), cost=lab.FREE_ROWS)
    yield "speculation", lab.run(turns.Turns(drafted, turns.fake.Scripted(), delay=10), asked)
    for rule in ("recompute", "verify"):
        yield f"swapped_{rule}", _swapped(turns, lab.engine(swap_policy=SwapPolicy(rule)))
    yield "restarted", _restarted(turns, shared)


def _swapped(turns, below) -> dict:
    engine, out, dispatches = turns.conversing(below), {}, 0
    engine.submit(turns.ASKED)
    while engine.pending:
        out.update((r.id, r) for r in engine.step())
        dispatches += 1
        if dispatches % 10 == 0:
            engine.swap(below.device.params, engine.version + 1)
    return out


def _restarted(turns, shared) -> dict:
    """Saves after three dispatches, and goes on in other objects from the state alone."""
    engine, out = turns.conversing(shared), {}
    engine.submit(turns.ASKED)
    for _ in range(3):
        out.update((r.id, r) for r in engine.step())
    states, prompts = (shared.state_dict(), engine.state_dict()), {r.prompt.id: r.prompt for r in turns.ASKED}
    shared.load_state_dict(states[0], prompts)
    revived = turns.Turns(shared, turns.fake.Scripted(), delay=10)
    revived.load_state_dict(states[1], prompts)
    while revived.pending:
        out.update((r.id, r) for r in revived.step())
    return out


# ---- kill


def _killed(record) -> None:
    with tempfile.TemporaryDirectory() as folder:
        runs = Runs(record, Path(folder), KILLED, STEPS)
        runs.finish("whole")
        seen = []
        for dispatch in KILLS:
            name = f"killed-{dispatch}"
            fault = {"JAXRL_FAULT": f"dispatch:{dispatch}:kill"}
            done = subprocess.run(
                runs.begun(name), cwd=record.root, env=runs.environment() | fault, capture_output=True, timeout=LIMIT_S
            )
            record.figure(f"kill_at_dispatch_{dispatch}.exit", done.returncode, equals=-signal.SIGKILL)
            seen.append(max(steps(runs.here / name), default=0))
            runs.finish(name)
            differences = runs.differences(runs.here / "whole", runs.here / name)
            record.figure(f"kill_at_dispatch_{dispatch}.what_differs", differences, equals=[])
        record.figure("kills.newest_steps", seen)
        record.figure("kills.resumed_from_a_save", sum(map(bool, seen)), at_least=1)
        record.figure("kills.conversations_between_turns_in_a_save", _waiting(runs.here / "whole"))


def _waiting(run: Path) -> int:
    """Returns the conversations that waited for their environment in the run's saved steps."""
    from jaxrl_post.checkpoint import host_state

    found = [file.parent for file in (run / "checkpoints").glob("step_*/**/state.json")]
    return sum(len(host_state.read_state(folder)["conversations"][1]["waiting"]) for folder in found)


# ---- faults


def _faults(record) -> None:
    from jaxrl_post.telemetry import metrics, rollout_log

    with tempfile.TemporaryDirectory() as folder:
        file, run = Path(folder) / "broken.py", Path(folder) / "run"
        file.write_text(BROKEN)
        more = ("--config.steps=3", "--config.eval.prompts=0", "--config.checkpoint.every=0")
        own = (f"--config.environment.name={file}:Broken", "--config.environment.timeout_s=3.0")
        record.run(
            *("-m", "jaxrl_post.main", "--config=configs/demo_calculator.py", f"--run-dir={run}", *more, *own),
            timeout_s=LIMIT_S,
            env={"PYTHONPATH": str(record.root) + os.pathsep + os.environ.get("PYTHONPATH", "")},
        )
        rows = metrics.read(run / "metrics.jsonl")
        groups = [group for log in sorted((run / "rollouts").glob("*.npz")) for group in rollout_log.read(log)]
    fates = {0: "hang", 1: "raise", 2: "die"}
    masked = dict.fromkeys(fates.values(), 0)
    wrong = 0
    for group in groups:
        fate = fates.get(sum(map(ord, group.prompt.id)) % 12)
        for rollout, scored in zip(group.rollouts, group.scored, strict=True):
            second = bool((~rollout.sampled).any()) and bool(rollout.sampled[-1])
            failed = fate is not None and second and not scored
            masked[fate or "hang"] += failed
            wrong += (not scored) and fate is None
    for fate, count in masked.items():
        record.figure(f"faults.masked_rollouts.{fate}", count, at_least=1)
    record.figure("faults.masked_without_a_fault", wrong, equals=0)
    counted = sum(row.get("environment/failed", 0) for row in rows)
    record.figure("faults.counted_less_masked", counted - sum(masked.values()), equals=0)
    steps = [row for row in rows if "actor/grad_norm" in row]
    record.figure("faults.steps_with_a_finite_gradient", sum(row["actor/grad_norm"] < 1e6 for row in steps), equals=3)
