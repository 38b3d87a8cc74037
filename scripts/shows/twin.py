"""The simulator fed a run's lengths takes the run's decisions: admits, finishes and takes, each at its clock, byte for byte.

The real run: configs/demo.py, shortened, by the command. Its twin: the same loop, scheduler, evaluation and host's side of
the engine over a device of numpy (jaxrl_post/sim/rows.py), which is told how long every answer of the rollout log is, and
nothing of when anything happened. Pages plentiful and so few that answers are parked; two dispatch lengths. Then
configs/demo_speculation.py: there the twin is told too how many tokens each step of an answer settled (accept lengths), and
what the drafts of each dispatch were worth, by which the engine chooses its row size. Equal: scheduler_log.jsonl, and
dispatches.jsonl, in which every dispatch has its clock, steps, row size and the use of its rows.
That this is no tautology: the twin of a run in which one answer is one token longer writes another log.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import tempfile
from pathlib import Path

MINUTES = 6.0
SHORT = ("--config.steps=8", "--config.eval.prompts=24", "--config.eval.every=4", "--config.checkpoint.every=4")
FEW = "--config.engine.pages=110"  # for 64 slots, of which each wants two or three
DEMO, DRAFTING = "configs/demo.py", "configs/demo_speculation.py"
AGAIN = ("--config.data.size=64", "--config.scheduler.prompts=32")  # every second step an epoch: there is a past
ARMS = {
    "plentiful": (DEMO,), "scarce": (DEMO, FEW), "short_dispatches": (DEMO, "--config.engine.steps_per_dispatch=3"),
    "scarce_short_dispatches": (DEMO, FEW, "--config.engine.steps_per_dispatch=3"),
    "speculation": (DRAFTING, *AGAIN), "speculation_scarce": (DRAFTING, *AGAIN, FEW, "--config.engine.steps_per_dispatch=5"),
    "speculation_clones": (DRAFTING, *AGAIN, "--config.speculation.clones=True", "--config.engine.row_sizes=(128,)"),
}

os.environ.setdefault("JAX_PLATFORMS", "cpu")


def show(record) -> None:
    sys.path[:0] = [str(record.root)]
    with tempfile.TemporaryDirectory() as folder:
        for name, (file, *flags) in ARMS.items():
            place, flags = Path(folder) / name, (*SHORT, *flags)
            record.run("-m", "jaxrl_post.main", f"--config={file}", *flags, f"--run-dir={place}", timeout_s=900)
            _compare(record, name, Run(record.root / file, [f.removeprefix("--config.") for f in flags], place))


def _compare(record, name: str, run: Run) -> None:
    decisions, dispatches = run.played()
    logged = {log: (run.place / f"{log}.jsonl").read_text().splitlines() for log in ("scheduler_log", "dispatches")}
    events = [json.loads(line)["event"] for line in logged["scheduler_log"]]
    for event in ("admit", "complete", "take"):
        record.figure(f"{name}.{event}s", events.count(event), at_least=8)
    record.figure(f"{name}.dispatches", len(logged["dispatches"]), at_least=200)
    least = {"at_least": 20} if "scarce" in name else {"equals": 0}
    record.figure(f"{name}.preemptions", int(run.total("sched/preemptions")), **least)
    if "speculation" in name:
        record.figure(f"{name}.accepted_drafts", int(run.total("spec/num_accepted")), at_least=500)
        record.figure(f"{name}.dispatches_that_drafted", sum('"drafts":true' in line for line in logged["dispatches"]), at_least=50)
    record.figure(f"{name}.decisions_that_differ", _differing(logged["scheduler_log"], decisions), equals=0)
    record.figure(f"{name}.dispatches_that_differ", _differing(logged["dispatches"], dispatches), equals=0)
    if name == "scarce":
        longer, _ = run.played(longer=True)
        record.figure(f"{name}.decisions_that_differ_with_one_token_more", _differing(decisions, longer), at_least=1)


def _differing(one: list[str], two: list[str]) -> int:
    return sum(a != b for a, b in zip(one, two)) + abs(len(one) - len(two))


@dataclasses.dataclass
class Run:
    """A run that has ended, and what its twin is made of."""

    file: Path
    overrides: list[str]
    place: Path

    def total(self, name: str) -> float:
        from jaxrl_post import metrics
        return sum(row.get(name, 0.0) for row in metrics.read(self.place / "metrics.jsonl"))

    def played(self, longer: bool = False) -> tuple[list[str], list[str]]:
        """The lines of decisions and of dispatches of its twin. `longer`: with one token more in one answer that ended by
        itself."""
        from jaxrl_post import config as configs
        from jaxrl_post import loop
        from jaxrl_post.launch import inputs
        from jaxrl_post.rollout_log import read
        from jaxrl_post.scheduler.recorder import Recorder
        from jaxrl_post.sim.learner import SimLearner
        from jaxrl_post.sim.logged import LoggedAnswers, LoggedRewards
        config = configs.resolve(configs.load(str(self.file)), self.overrides)
        start, decisions, dispatches = inputs.gather(config), [], []
        train = [group for file in sorted((self.place / "rollouts").glob("step_*.npz")) for group in read(file)]
        evaluations = {int(file.stem.removeprefix("step_")): read(file) for file in (self.place / "evaluations").glob("*.npz")}
        answers = LoggedAnswers([_longer(train[0]), *train[1:]] if longer else train, evaluations,
                                drafted=config.speculation.drafter != "off")
        twin = self._twin(config, start, answers)
        twin.report = lambda dispatch: dispatches.append(dispatch.line())
        observer = Boundaries(config, start, twin, LoggedRewards([g for groups in evaluations.values() for g in groups]))
        observer.evaluate()
        loop.run(twin, Recorder(_scheduler(config, start), decisions.append), LoggedRewards(train), SimLearner(), observer,
                 _publish, config.steps)
        observer.evaluate()
        return [line.rstrip("\n") for line in decisions], [line.rstrip("\n") for line in dispatches]

    def _twin(self, config, start, answers):
        import jax
        from jaxrl_post import cost as costs
        from jaxrl_post import parts
        from jaxrl_post.engine.drafting import Drafting
        from jaxrl_post.models import decoder
        from jaxrl_post.sim.rows import RowTwin
        from jaxrl_post.slots.columns import Sizes
        from jaxrl_post.slots.dispatches import read
        c, derived = config.engine, json.loads((self.place / "config.json").read_text())["derived"]
        parameters = sum(leaf.size for leaf in jax.tree.leaves(decoder.abstract(start.model)))
        cost = start.cost or costs.analytic(derived["device"], parameters, 4, c.row_sizes)
        if cost.digest != derived["cost_table"]["digest"]:
            raise ValueError(f"the run chose its row sizes by cost table {derived['cost_table']}, the twin would by {cost.digest}")
        drafting = Drafting(parts.drafter(config, start.model), replicas=config.replicas, slots=c.slots, past=lambda id: (),
                            clones=config.speculation.clones)
        lines = (self.place / "dispatches.jsonl").read_text().splitlines()
        return RowTwin(
            answers, Sizes.of(config.replicas, slots=c.slots, max_length=c.max_length, page_size=c.page_size, pages=config.pages,
                              head_rows=config.head_rows, steps_per_dispatch=c.steps_per_dispatch),
            drafted=[dispatch for dispatch in map(read, lines) if dispatch.drafts], row_sizes=derived["row_sizes"],
            refill_slots=c.refill_slots, cost=cost, drafting=drafting, vocab_size=start.model.vocab_size)


class Boundaries:
    """A protocols.Observer that does to the twin what a run does to its engine at a publish: evaluation, and the rest before a
    checkpoint."""

    def __init__(self, config, start, twin, rewards):
        self._config, self._start, self._twin, self._rewards, self._version = config, start, twin, rewards, 0

    def commit(self, metrics, part) -> None:
        """Nothing is written."""

    def published(self, version: int) -> None:
        if self._config.evaluated_at(self._version, version):
            self.evaluate()
        if self._config.saved_at(self._version, version):
            self._twin.state_dict()
        self._version = version

    def evaluate(self) -> None:
        from jaxrl_post import evaluate
        config = self._config
        evaluate.evaluate(self._twin, self._rewards, self._start.held_out, samples=config.eval.samples, run_seed=config.seed,
                          sampling=self._start.sampling, max_tokens=config.sampling.max_tokens, replicas=config.replicas)


def _scheduler(config, start):
    """As the command builds it."""
    from jaxrl_post.scheduler.rounds import Sync
    c = config.scheduler
    return Sync(start.train, run_seed=config.seed, steps=config.rounds, prompts_per_round=c.prompts, group_size=c.group_size,
                sampling=start.sampling, max_tokens=config.sampling.max_tokens, filter_groups=c.filter_groups,
                max_waves=c.max_waves, replicas=config.replicas, mini_batches=c.mini_batches, ppo_epochs=c.ppo_epochs)


def _publish(learner, engine) -> int:
    engine.swap(None, learner.step)
    return engine.version


def _longer(group):
    """The group, the first of whose answers that ended by itself has its last token twice."""
    import numpy as np
    from jaxrl_post.types import Finish
    index = next(i for i, rollout in enumerate(group.rollouts) if rollout.finish is Finish.EOS)
    one = group.rollouts[index]
    names = ("tokens", "sampled", "logprobs", "entropies", "versions", "drafted", "favourites", "clocks")
    longer = dataclasses.replace(one, **{name: np.append(getattr(one, name), getattr(one, name)[-1:]) for name in names})
    return dataclasses.replace(group, rollouts=(*group.rollouts[:index], longer, *group.rollouts[index + 1:]))
