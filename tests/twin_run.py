"""A run that has ended, and its twin: the same loop, scheduler, evaluation and host's side, fed the lengths it logged."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
from models.twin import LoggedRewards, LoggedTexts, RowTwin, lives

from jaxrl_post import config as configs
from jaxrl_post.engine import step_cost as costs
from jaxrl_post.engine.eight_bit_weights import held_bytes
from jaxrl_post.engine.host import dispatch_log
from jaxrl_post.engine.host.row_host import RowHost
from jaxrl_post.engine.speculation.speculation import Drafting
from jaxrl_post.launch.parts import build, inputs
from jaxrl_post.launch.parts import evaluation as evaluate
from jaxrl_post.models import decoder
from jaxrl_post.ring import loop
from jaxrl_post.ring.events import Ring
from jaxrl_post.ring.history import History
from jaxrl_post.ring.ragged import Ragged
from jaxrl_post.ring.types import PER_TOKEN, Finish
from jaxrl_post.runs import metric_rows
from jaxrl_post.runs.rollout_log import read
from jaxrl_post.scheduler import registry
from jaxrl_post.scheduler.decision_log import Recorder
from jaxrl_post.simulate.learner import SimLearner, SimRewards
from jaxrl_post.simulate.simulation import publish


@dataclasses.dataclass
class Run:
    """A run that has ended, and what its twin is made of."""

    file: Path
    overrides: list[str]
    place: Path

    def lines(self, log: str) -> list[str]:
        return (self.place / f"{log}.jsonl").read_text().splitlines()

    def total(self, name: str) -> float:
        return sum(row.get(name, 0.0) for row in metric_rows.read(self.place / "metrics.jsonl"))

    def played(self, longer: bool = False) -> tuple[list[str], list[str]]:
        """The lines of decisions and of dispatches of its twin. `longer`: with one token more in one answer that ended by
        itself."""
        config = configs.resolve(configs.load(str(self.file)), self.overrides)
        start, decisions, dispatched = inputs.gather(config), [], []
        train = [group for file in sorted((self.place / "rollouts").glob("step_*.npz")) for group in read(file)]
        evaluations = {
            int(file.stem.removeprefix("step_")): read(file) for file in (self.place / "evaluations").glob("*.npz")
        }
        logged = [json.loads(line) for line in self.lines("scheduler_log")]
        ended = lives(logged)
        if longer:
            train = [_longer(train[0], ended), *train[1:]]
        answers = LoggedTexts(
            train,
            ended,
            evaluations,
            drafted=config.speculation.drafter != "off",
            prefix_mode=config.scheduler.prefix_mode,
        )
        twin = self._twin(config, start, answers)
        twin.report = lambda dispatch: dispatched.append(dispatch.line())
        observer = Boundaries(config, start, twin)
        observer.evaluate()
        history = History(epochs=config.history.epochs, max_bytes=config.history.max_bytes)
        rounds = registry.made(
            config,
            start.train,
            start.sampling,
            history.of,
            lambda: next(iter(build.replicas(config, start.model, start.cost).values())),
        )
        scheduler = Recorder(rounds, decisions.append)
        ring = Ring()
        ring.on("scored", history.record)
        ring.on("published", observer.published)
        loop.run(ring, twin, scheduler, LoggedRewards(logged), SimLearner(), publish, config.steps)
        observer.evaluate()
        return [line.rstrip("\n") for line in decisions], [line.rstrip("\n") for line in dispatched]

    def _twin(self, config, start, answers):
        c, derived = config.engine, json.loads((self.place / "config.json").read_text())["derived"]
        sizes = build.engine_sizes(config, build.layouts(config)[0])
        parameters = sum(leaf.size for leaf in jax.tree.leaves(decoder.abstract(start.model)))
        bytes_of_one = held_bytes(start.model, sizes.weights, sizes.dtype) / parameters
        cost = start.cost or costs.analytic(derived["device"], parameters, bytes_of_one, sizes.row_sizes)
        if cost.digest != derived["cost_table"]["digest"]:
            raise ValueError(
                f"the run chose row sizes by cost table {derived['cost_table']}, the twin would by {cost.digest}"
            )
        drafting = Drafting(
            build.drafter(config, start.model),
            replicas=config.replicas,
            slots=c.slots,
            past=lambda id: (),
            clones=config.speculation.clones,
        )
        drafted = [dispatch for dispatch in map(dispatch_log.read, self.lines("dispatches")) if dispatch.drafts]
        sizes = dataclasses.replace(sizes, row_sizes=derived["row_sizes"])
        twin = RowTwin(answers, sizes, drafted=drafted, classes=drafting.drafter.classes)
        return RowHost(twin, sizes, cost=cost, vocab_size=start.model.vocab_size, drafting=drafting)


class Boundaries:
    """A listener that does to the twin what a run does to its engine at a publish: evaluation, and the rest before a
    checkpoint."""

    def __init__(self, config, start, twin):
        self._config, self._start, self._twin, self._version = config, start, twin, 0

    def published(self, version: int) -> None:
        if self._config.evaluated_at(self._version, version):
            self.evaluate()
        if self._config.saved_at(self._version, version):
            self._twin.state_dict()
        self._version = version

    def evaluate(self) -> None:
        config = self._config
        evaluate.evaluate(
            self._twin,
            SimRewards(),
            self._start.held_out,
            samples=config.eval.samples,
            run_seed=config.seed,
            sampling=self._start.sampling,
            max_tokens=config.sampling.max_tokens,
            replicas=config.replicas,
        )


def _longer(group, ended):
    """The group, the first of whose answers that ended by itself has its last token twice."""
    index = next(i for i, rollout in enumerate(group.rollouts) if rollout.finish is Finish.EOS)
    one = group.rollouts[index]
    longer = dataclasses.replace(
        one,
        **{name: np.append(getattr(one, name), getattr(one, name)[-1:]) for name in PER_TOKEN},
        kept=Ragged.joined([one.records, one.records[-1:]]),
    )
    ended[one.id] = {when: end and (end[0] + 1, end[1]) for when, end in ended[one.id].items()}
    return dataclasses.replace(group, rollouts=(*group.rollouts[:index], longer, *group.rollouts[index + 1 :]))
