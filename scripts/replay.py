"""A recorded run, and its next round answered by one drafter or another: what shows and benches of speculation share.

A workload is a run of several epochs, made by `main` with a rollout log, and the weights it ended in. `Stage.cold` answers
prompts of the first round with the first weights and nothing remembered; `Stage.steady` those of the round behind the log,
with everything the log holds remembered. Every arm answers the same requests, so all must give the same tokens.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np


@dataclass
class Stage:
    """Requests under one set of weights, with what is remembered; `width`: the longest chain of a draft."""

    config: Any
    model: Any
    params: Any
    rounds: list[list]  # of requests, each begun when all before are answered
    history: Any
    groups: list  # of the log, oldest first
    epoch: int
    width: int


@dataclass
class Phase:
    """What happened while all slots were busy (`full_batch`) or while the last answers drained (`tail`)."""

    steps: int = 0
    slot_steps: int = 0
    tokens: int = 0
    accepted: int = 0
    drafted: int = 0
    row_steps: int = 0
    seconds: float = 0.0


@dataclass
class Run:
    phases: dict[str, Phase] = field(default_factory=lambda: {"full_batch": Phase(), "tail": Phase()})
    rollouts: dict = field(default_factory=dict)

    @property
    def bits(self) -> bytes:
        return b"".join(r.tokens.tobytes() + r.logprobs.tobytes() for _, r in sorted(self.rollouts.items()))


def stage(
    root: Path, folder: Path, file: str, overrides: list[str], *, steady: bool, prompts: int, rounds: int, width: int
) -> Stage:
    """The stage of a recorded run (`folder`) of a config file: so many rounds of so many prompts."""
    from jaxrl_post import config as configs
    from jaxrl_post.history import History
    from jaxrl_post.launch import inputs
    from jaxrl_post.models import decoder
    from jaxrl_post.parallel import mesh as meshes
    from jaxrl_post.telemetry.rollout_log import read
    from jaxrl_post.types import Request, RolloutId

    given = [*overrides, f"model.path={folder / 'policy'}"] if steady else overrides
    config = configs.resolve(configs.load(str(root / file)), given)
    start = inputs.gather(config)
    params = start.load_params(meshes.param_shardings(meshes.make_mesh(), decoder.axes(start.model), "engine"))
    groups = (
        [group for log in sorted((folder / "rollouts").glob("step_*.npz")) for group in read(log)] if steady else []
    )
    history = History(epochs=64, max_bytes=1 << 30)
    for group in groups:
        history.record(group)
    asked = [[] for _ in range(rounds)]
    for number in range(rounds * prompts):
        epoch, prompt = start.train.at(len(groups) + number)
        for sample in range(config.scheduler.group_size):
            name = RolloutId(config.seed, "train", epoch, prompt.id, sample)
            asked[number // prompts].append(
                Request(
                    rollout_id=name,
                    prompt=prompt,
                    seed=name.seed(),
                    sampling=start.sampling,
                    max_tokens=config.sampling.max_tokens,
                )
            )
    return Stage(config, start.model, params, asked, history, groups, epoch, width)


class Arm:
    """One engine with one drafter, ready to answer the stage's requests again and again."""

    def __init__(
        self,
        stage: Stage,
        name: str,
        *,
        row_sizes: tuple[int, ...],
        cost: Any,
        clones: bool,
        entries: dict[str, int],
        slots: int,
        steps: int,
    ):
        from jaxrl_post.engine.host.wire import UPLOAD
        from jaxrl_post.engine.row_engine import EngineSettings, RowEngine
        from jaxrl_post.engine.speculation.registry import DRAFTERS
        from jaxrl_post.engine.speculation.speculation import Drafting
        from jaxrl_post.parallel import mesh as meshes

        c = stage.config.engine
        shared = entries["shared"] if name == "ours" else 0
        size = sum(-(-part // UPLOAD) * UPLOAD for part in (shared, entries["prompts"]))
        self.name, self.stage = name, stage
        drafter = DRAFTERS[name](
            vocab=stage.model.vocab_size,
            width=32 if name == "histospec" else stage.width,
            entries=size,
            live=entries["live"],
        )
        self._drafting = Drafting(drafter, replicas=1, slots=slots, past=stage.history.of, shared=shared, clones=clones)
        for group in stage.groups:
            self._drafting.record(group)
        if shared:
            _ = self._drafting.corpus.entries  # built, as it is after rounds that drafted
        self.engine = RowEngine(
            stage.model,
            stage.params,
            meshes.make_mesh(),
            EngineSettings(
                slots=slots,
                max_length=c.max_length,
                page_size=c.page_size,
                pages=2 * slots * -(-c.max_length // c.page_size),
                row_sizes=row_sizes,
                head_rows=max(row_sizes),
                steps_per_dispatch=steps,
                refill_slots=c.refill_slots,
            ),
            cost=cost,
            drafting=self._recorded(),
        )

    def _recorded(self) -> Any:
        """The host's side of drafting as it was before the first request. Texts, history and the table over all prompts are
        shared: memory that every run takes and gives back would make the dispatches after it slower."""
        corpus = self._drafting.corpus
        same = (self.stage.history, *(() if corpus is None else (corpus.entries, *corpus._window, *corpus._new)))
        return copy.deepcopy(self._drafting, {id(one): one for one in same})

    def run(self) -> Run:
        """All requests, from the state before the first; only what drafts proved worth is remembered from run to run."""
        return side_by_side([self])[0]

    def dispatches(self) -> Iterator[Run]:
        """`run`, a dispatch at a time: what happened so far, the same object every time."""
        engine, known = self.engine, self.engine.drafting
        known = {name: getattr(known, name) for name in ("estimates", "value", "forced")}
        engine.reset()
        engine.drafting = self._recorded()
        vars(engine.drafting).update(known)
        engine.metrics()
        out, groups, rounds = Run(), {}, iter(self.stage.rounds)
        while True:
            if not engine.pending:
                following = next(rounds, None)
                if following is None:
                    return
                engine.submit(following)
            phase = out.phases["full_batch" if engine.admission.waiting else "tail"]
            before = sum(len(one.tokens) for one in engine.sequences.values())
            begun = time.perf_counter()
            finished = engine.step()
            phase.seconds += time.perf_counter() - begun
            counted = engine.metrics()
            phase.tokens += sum(map(len, finished)) + sum(len(one.tokens) for one in engine.sequences.values()) - before
            phase.steps += int(counted["rows/steps"])
            phase.slot_steps += int(counted["rows/decode"])
            phase.accepted += int(counted["spec/num_accepted"])
            phase.drafted += int(counted["spec/num_drafted"])
            phase.row_steps += sum(
                int(name.rpartition("_")[2]) * int(n) for name, n in counted.items() if name.startswith("rows/size_")
            )
            for rollout in finished:
                out.rollouts[rollout.id] = rollout
                self._remember(groups, rollout)
            yield out

    def _remember(self, groups: dict, rollout: Any) -> None:
        """A group is recorded once all its answers are there, as the ring does when it is scored."""
        from jaxrl_post.types import Group

        mine = groups.setdefault(rollout.prompt.id, [])
        mine.append(rollout)
        if len(mine) == self.stage.config.scheduler.group_size:
            mine.sort(key=lambda r: r.id)
            self.engine.drafting.record(
                Group(prompt=rollout.prompt, rollouts=tuple(mine), rewards=[0.0] * len(mine), scored=[True] * len(mine))
            )


def side_by_side(arms: Sequence[Arm]) -> list[Run]:
    """A run of each, taking turns dispatch by dispatch, so that what the machine does besides meets all of them alike."""
    going = [(arm.dispatches(), number) for number, arm in enumerate(arms)]
    out: list[Run] = [Run() for _ in arms]
    while going:
        for dispatches, number in tuple(going):
            done = next(dispatches, None)
            if done is None:
                going.remove((dispatches, number))
            else:
                out[number] = done
    return out


def oracle(done: Run, rounds: list[list], **sizes: int) -> dict[str, tuple[int, int]]:
    """`best_drafts` of all rounds together."""
    each = [best_drafts(done, requests, **sizes) for requests in rounds]
    return {phase: tuple(map(sum, zip(*(one[phase] for one in each)))) for phase in each[0]}


def best_drafts(done: Run, requests: list, *, rows: int, slots: int, width: int) -> dict[str, tuple[int, int]]:
    """Accepted drafts and steps of slots, by phase, of a drafter that always drafts the token the model holds most likely
    after the true text (`done` was made by a drafter that watches those): no other chain is accepted more often. Rows
    beside one for each running answer are shared out evenly, at most `width` each, and no slot is a clone."""
    waiting = [done.rollouts[r.rollout_id] for r in requests]
    right = [rollout.tokens == rollout.favourites for rollout in waiting]
    running, told = {}, {"full_batch": [0, 0], "tail": [0, 0]}
    at, following = [0] * len(waiting), 0
    while following < len(waiting) or running:
        while following < len(waiting) and len(running) < slots:
            running[following] = True
            following += 1
        phase = told["full_batch" if following < len(waiting) else "tail"]
        share = min(width, (rows - len(running)) // len(running))
        for number in list(running):
            ahead = right[number][at[number] : at[number] + share]
            accepted = min(int(np.argmin(np.append(ahead, False))), right[number].size - at[number] - 1)
            at[number] += accepted + 1
            phase[0], phase[1] = phase[0] + accepted, phase[1] + 1
            if at[number] >= right[number].size:
                del running[number]
    return {name: tuple(pair) for name, pair in told.items()}
