"""What strangers saw of running runs: equal rewards, rates of resumed runs, cut turns, drafts that fail, and ends.

Right values come from plain Python here: standard deviations of weighted sums, tokens counted by hand, and laws of costs.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_post.commands import compare
from jaxrl_post.config import OptimizerConfig, SchedulerConfig
from jaxrl_post.engine.host import turns
from jaxrl_post.engine.host.wire import OFFERS
from jaxrl_post.engine.speculation.registry import DRAFTERS
from jaxrl_post.engine.speculation.speculation import Drafting
from jaxrl_post.engine.step_cost import StepCost, best_size
from jaxrl_post.launch import resume
from jaxrl_post.ring.types import Capacity, Finish, Group, Prompt, Request, Rollout, RolloutId, Sampling
from jaxrl_post.runs import run_logs
from jaxrl_post.scheduler import group_filter
from jaxrl_post.scheduler.pipeline import Pipeline
from jaxrl_post.scheduler.placement.placement import LeastLoaded
from jaxrl_post.scheduler.rounds.rounds import Sync
from jaxrl_post.telemetry import metrics, report
from strangers import Members

PROMPT = Prompt(id="p", tokens=[1, 2])


def _rollout(sample: int, prompt: Prompt = PROMPT) -> Rollout:
    return Rollout.written(RolloutId(0, "train", 0, prompt.id, sample), prompt, np.array([1, 2]), Finish.EOS)


def _group(scores: np.ndarray, weights: np.ndarray, scored: np.ndarray) -> Group:
    """Returns a group with the scores [functions, rollouts] as a reward pool hands them on."""
    components = {"acc": scores[0]} | {f"f{place}/score": row for place, row in enumerate(scores)}
    return Group(
        prompt=PROMPT,
        rollouts=tuple(_rollout(sample) for sample in range(scores.shape[1])),
        rewards=weights @ scores,
        scored=scored,
        components=components,
    )


def equal_rewards() -> Members:
    """T01: groups of one to three functions, some constant, some not, with weights and failed rollouts."""
    noise, wrong, tried = np.random.default_rng(43), [], 0
    for functions, size, _ in itertools.product((1, 2, 3), (2, 4, 8), range(6)):
        constant = noise.random(functions) < 0.5
        drawn = noise.integers(0, 3, (functions, size))
        scores = np.where(constant[:, None], drawn[:, :1], drawn).astype(float)
        weights, scored = noise.choice([0.25, 0.5, 1.0, 2.0], functions), noise.random(size) < 0.85
        group, tried = _group(scores, weights, scored), tried + 1
        kept = [place for place in range(size) if scored[place]]
        sums = [sum(w * row[place] for w, row in zip(weights, scores)) for place in kept]
        spread = statistics.pstdev(sums) if sums else 0.0
        told = metrics.describe([group], 0)["frac_reward_zero_std"]
        if told != float(spread == 0):
            wrong.append(f"frac_reward_zero_std {told} where the std of the sum is {spread}")
        right = {f"f{place}": len({row[i] for i in kept}) > 1 for place, row in enumerate(scores)}
        right |= {"seq_reward": spread > 0, "score": spread > 0, "acc": right["f0"]}
        wrong += [
            f"the filter by {name}" for name, value in right.items() if group_filter.differs(group, name) != value
        ]
    return Members(tried, tuple(wrong))


def resumed_rates() -> Members:
    """T04: histories of attempts; the line of the last start has its own tokens by its own seconds."""
    noise, wrong = np.random.default_rng(4), []
    for number in range(24):
        last = max({0, *noise.integers(1, 50, number % 5).tolist()})
        tokens, seconds = noise.integers(100, 10**6, 60), noise.random(60) * 20 + 0.1
        own, spent = int(tokens[last:].sum()), round(float(seconds[last:].sum()), 3)
        told = {"steps": 60, "tokens": own, "all_tokens": int(tokens.sum()), "seconds": spent, "resumed_at": last}
        line = report.pace(told)
        rate = float(line.rsplit(", ", 1)[1].removesuffix(" tokens/s").replace(",", ""))
        if abs(rate - own / spent) > 1 or (f"since step {last}," in line) != (last > 0):
            wrong.append(line)
    return Members(24, tuple(wrong))


class Talking:
    """An engine whose turns are four tokens: so many of each conversation end, and the next one is cut at the limit."""

    clock = version = 0
    capacity = Capacity(slots=(64,), pages=(64,))

    def __init__(self, whole: int):
        self._whole, self._asked = whole, []

    def submit(self, requests: Any) -> None:
        self._asked += requests

    def step(self) -> list[Rollout]:
        asked, self._asked, self.clock = self._asked, [], self.clock + 4
        return [self._turn(request) for request in asked]

    def _turn(self, request: Request) -> Rollout:
        before = request.prefix
        ends = (0 if before is None else int(np.sum(~before.sampled))) < self._whole
        finish, tokens = (Finish.EOS, [5, 6, 7, 1]) if ends else (Finish.LENGTH, [5, 6, 7, 8])
        if before is None:
            rollout = Rollout.written(request.rollout_id, request.prompt, np.array(tokens), finish)
        else:
            rollout = before.extended(tokens, self.clock, sampled=True)
        return dataclasses.replace(rollout, finish=finish, finish_clock=self.clock)


class Heard:
    """An environment that says one token after each turn, and notes the turns that it gets."""

    def __init__(self) -> None:
        self.turns: list[tuple[int, Finish]] = []

    def start(self, rollout: Rollout) -> None:
        self.turns.append((len(rollout), rollout.finish))

    def join(self, rollout: Rollout) -> list[int] | None:
        return None if rollout.finish is Finish.LENGTH else [9]


def cut_turns() -> Members:
    """T05: conversations whose first, second or later turn is cut: the environment gets every turn, or all but that one."""
    wrong, tried = [], 0
    law, most = Sampling(eos_ids=(1,)), 64
    for whole, steps_cut, purpose, delay in itertools.product((0, 1, 2, 5), (True, False), ("train", "eval"), (0, 7)):
        tried += 1
        heard = Heard()
        engine = turns.Turns(Talking(whole), heard, delay=delay, steps_cut=steps_cut)
        name = RolloutId(0, purpose, 0, "p", 0)
        engine.submit([Request(rollout_id=name, prompt=PROMPT, seed=name.seed(), max_tokens=most, sampling=law)])
        ended: list[Rollout] = []
        while engine.pending:
            ended += engine.step()
        right = [(5 * place + 4, Finish.TURN) for place in range(whole)]
        right += [(5 * whole + 4, Finish.LENGTH)] * (steps_cut or purpose == "eval")
        if heard.turns != right or [one.finish for one in ended] != [Finish.LENGTH]:
            wrong.append(f"{whole} turns, steps_cut={steps_cut}, {purpose}: {heard.turns} instead of {right}")
    return Members(tried, tuple(wrong))


def _history(share: float, width: int, chance: int, dispatches: int, switch: int) -> list[bool]:
    """Returns whether each dispatch of 16 steps of 32 slots drafts.

    Of the drafts the share `share` is right, and 0.9 from dispatch `switch` on. The drafter believes in bin `chance`. Rows
    are free by the table, as a lower bound may say.
    """
    drafter = DRAFTERS["ours"](vocab=200, width=width, entries=8192, live=64)
    drafting = Drafting(drafter, replicas=1, slots=32, past=lambda name: (), clones=False)
    table, chosen = StepCost((32, 32 * (1 + width)), (1e-3, 1e-3), "free"), []
    for number in range(dispatches):
        due = drafting.due(0)
        drafts = best_size(table, table.rows, 32, 0.0, lambda rows: drafting.worth(rows, 32), must_draft=due)[1]
        chosen.append(drafts)
        if not drafts:
            drafting.quiet(16)
            continue
        offers, given = np.zeros(OFFERS), width * 512
        offers[chance] = given
        right = round(given * (share if number < switch else 0.9))
        drafting.record_outcome(np.zeros((2, drafter.classes), int), offers, 512, 0, 0, given=given, right=right)
    return chosen


def failing_drafts() -> Members:
    """T06: drafts of which too few are right end with the first dispatch; good ones go on; trials find what has changed."""
    wrong, tried = [], 0
    for share, width, chance in itertools.product((0.0, 0.005, 0.021, 0.05, 0.4, 0.8), (2, 4, 7), (3, 8, 15)):
        tried += 1
        chosen = _history(share, width, chance, 16, 16)
        pays = share >= 0.4  # shares lie far from the bounds, on either side
        if chosen != [True] + [pays] * 15:
            wrong.append(
                f"{share:.1%} right of drafts {width} wide in bin {chance}: {sum(chosen)} of 16 dispatches drafted"
            )
    late = _history(0.0, 4, 8, 400, 10)
    if any(late[1:16]) or not all(late[-50:]):
        wrong.append("drafts that pay again are not found again")
    return Members(tried + 1, tuple(wrong))


class Order:
    """So many prompts, epoch by epoch."""

    def __init__(self, count: int):
        self._prompts = [Prompt(id=f"p{place}", tokens=[1, place + 2]) for place in range(count)]

    def at(self, position: int) -> tuple[int, Prompt]:
        return position // len(self._prompts), self._prompts[position % len(self._prompts)]


def _driven(scheduler: Any, scores: list[list[float]]) -> tuple[str, int]:
    """Drives a scheduler for at most 6 optimizer steps. Returns how it ended, and the steps that it took.

    `scores`: of the four rollouts of every group, by optimizer steps taken.
    """
    steps, free = 0, Capacity(slots=(64,), pages=(64,))
    for clock in range(1, 500):
        try:
            asked = scheduler.admit(free, clock)
        except (group_filter.NoGroups, group_filter.Solved) as end:
            return type(end).__name__, steps
        for request in asked:
            scheduler.complete(dataclasses.replace(_rollout(0, request.prompt), id=request.rollout_id))
        for group in scheduler.due():
            given = np.array(scores[min(steps, len(scores) - 1)])
            scheduler.scored(dataclasses.replace(group, rewards=given, scored=np.ones(4, bool)))
        steps += sum(part.commit for part in scheduler.take())
        if steps >= 6:
            return "trained", steps
    return "stands still", steps


def filters_that_leave_nothing() -> Members:
    """F32: constant rewards, solved and hopeless prompts, from the first round or later, in rounds and a pipeline."""
    wrong, tried = [], 0
    own: dict[str, Any] = dict(run_seed=1, sampling=Sampling(eos_ids=(1,)), max_tokens=8)
    kinds = {"right": [1.0] * 4, "wrong": [0.0] * 4, "half": [0.5] * 4, "mixed": [0.0, 1.0, 0.0, 1.0]}
    for piped, waves, end, begins in itertools.product((False, True), (2, 5), kinds, (0, 1, 3)):
        options = SchedulerConfig(prompts=2, group_size=4, filter_groups=True, max_waves=waves)
        kind: Any = Pipeline if piped else Sync
        scheduler = kind(Order(7), options, steps=6, placement=LeastLoaded(1), **own)
        found, tried = _driven(scheduler, [kinds["mixed"]] * begins + [kinds[end]]), tried + 1
        right = ("trained", 6) if end == "mixed" else ("Solved" if end == "right" and begins else "NoGroups", begins)
        if found != right:
            wrong.append(f"piped={piped}, {waves} waves, {end} from step {begins} on: {found} instead of {right}")
    return Members(tried, tuple(wrong))


def stretched_schedules() -> Members:
    """F33: a line where, and only where, more steps change the learning rate; both rates by hand."""
    wrong, tried = [], 0
    shapes = {"linear": lambda p: 1 - 0.9 * p, "cosine": lambda p: 0.1 + 0.9 * (1 + np.cos(np.pi * p)) / 2}
    for schedule, lr, (old, new), step in itertools.product(
        ("constant", "linear", "cosine"), (1e-4, 3e-3), ((20, 40), (20, 25), (20, 20)), (5, 19)
    ):
        tried += 1
        told = dataclasses.asdict(OptimizerConfig(lr=lr, schedule=schedule))
        line = resume.stretched({"steps": old}, {"steps": new, "optimizer": told}, step)
        if schedule == "constant" or old == new:
            wrong += [line] * bool(line)
            continue
        rates = [lr * shapes[schedule](step / steps) for steps in (new, old)]
        found = [float(line.partition(" rate ")[2].split(",")[0]), float(line.rsplit(" ", 1)[1])]
        if not np.allclose(found, rates, rtol=6e-3):
            wrong.append(f"{line}: {rates}")
    return Members(tried, tuple(wrong))


def _run(folder: Path, seconds: list[float]) -> run_logs.RunLogs:
    rows = [
        {"step": step, "timing_s/step": taken, "perf/throughput": 100 / taken, "off_policy/mean": step / 7}
        for step, taken in enumerate(seconds, start=1)
    ]
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "config.json").write_text(json.dumps({"seed": 0}))
    return run_logs.opened(folder)


def compared_speeds() -> Members:
    """T21: medians of seconds without the first step, tokens a second and staleness, of generated pairs of runs."""
    noise, wrong = np.random.default_rng(21), []
    with tempfile.TemporaryDirectory() as place:
        for number in range(20):
            seconds = [(noise.random(noise.integers(2, 9)) * 50 + 0.01).tolist() for _ in "ab"]
            runs = [_run(Path(place) / f"{number}{side}", own) for side, own in zip("ab", seconds)]
            common = min(map(len, seconds))
            a, b = (statistics.median(own[1:common]) for own in seconds)
            text = " ".join(" ".join(compare.lines(compare.compared(*runs), ())).split())
            words = (f"seconds a step A {a:.4g} B {b:.4g}", "trained tokens/s a device A", "off_policy/mean A")
            wrong += [f"{one}: {text}" for one in words if one not in text]
    return Members(20, tuple(wrong))


KINDS = {
    "T01": equal_rewards,
    "T04": resumed_rates,
    "T05": cut_turns,
    "T06": failing_drafts,
    "T21": compared_speeds,
    "F32": filters_that_leave_nothing,
    "F33": stretched_schedules,
}
