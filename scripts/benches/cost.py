"""Measures the step-cost table: seconds of an engine step at each row size, of drafting, and of a trained token.

    python scripts/bench.py cost --json FILE --config=configs/demo.py [--config.engine.row_sizes=(64,96,128) ...]

The model, sizes, mesh and drafter are those of the config. Name the file in engine.cost_table. Every size is measured
on the same requests while all slots are busy. Prompts are long enough that each step has work for all of its rows.
Sizes take turns, so that a disturbance of the machine falls on all of them. A figure is the median over turns.

Where the config has a drafter, each turn comes without and with drafts. Its prompts have rollouts in every epoch that
is remembered. Rows cost a little more or less with the prompts' attention, and the table does not separate that. A
trained token is one of a whole optimizer step on the learner's mesh. Its rollouts have all lengths that the config
allows, and all have a gradient.
"""

from __future__ import annotations

import statistics
import time

import jax
import numpy as np

from jaxrl_post import config as configs
from jaxrl_post.engine.row_engine import RowEngine
from jaxrl_post.launch.parts import build, inputs
from jaxrl_post.models import decoder
from jaxrl_post.parallel import mesh as meshes
from jaxrl_post.ring.history import Past
from jaxrl_post.ring.types import Finish, Group, Prompt, Request, Rollout, RolloutId, Sampling

TURNS = 5


def bench(record) -> None:

    path, overrides = _arguments(record.args)
    config = configs.resolve(configs.load(path), overrides)
    start, c = inputs.gather(config), config.engine
    mesh = meshes.make_mesh(config.mesh.data, config.mesh.fsdp, config.mesh.tensor)
    params = start.load_params(meshes.param_shardings(mesh, decoder.axes(start.model), "engine"))
    layout = build.layouts(config)[0]
    engine = RowEngine(
        start.model,
        params,
        mesh,
        build.engine_sizes(config, layout),
        drafting=build.drafting(config, start.model, _Answered(config, start.model.vocab_size), layout),
    )
    steps, drafting, opening = measure(engine, _requests(engine), TURNS)
    record.figure("step_s", {str(size): seconds for size, seconds in steps.items()})
    record.figure("drafting_s", drafting)
    record.figure("opening_s", opening)
    learner = build.learner(config, start.model, start.load_params, build.device_plan(config))
    record.figure("train_token_s", trained(learner, _groups(config, start), TURNS))
    record.figure(
        "config",
        {"file": path, "overrides": overrides, "slots": c.slots, "page_size": c.page_size, "max_length": c.max_length},
    )


def measure(engine, requests: list, turns: int) -> tuple[dict[int, float], float, float]:
    """Returns three medians over turns: step seconds by row size, what drafting adds, and what beginning to draft
    takes.

    The second is the median over sizes. The third is how much longer the first dispatch that drafts takes than the
    next. The last two are 0 without a drafter. Only dispatches after which every slot is still taken count.

    Raises:
      ValueError: the requests are too few to keep every slot busy.
    """
    sizes, times = engine.row_sizes, {}
    kinds = (False, True) if engine.drafting.drafter.width else (False,)
    for _ in range(1 + turns):
        for size in sizes:
            for drafts in kinds:
                times.setdefault((size, drafts), []).append(_step_s(engine, requests, size, drafts))
    openings = [_opening_s(engine, requests, sizes[0]) for _ in range(1 + turns)][1:] if kinds[-1] else [0.0]
    engine.row_sizes, engine.drafting.forced = sizes, None
    median = {key: statistics.median(seconds[1:]) for key, seconds in times.items()}
    added = statistics.median(median[size, kinds[-1]] - median[size, False] for size in sizes)
    return {size: median[size, False] for size in sizes}, max(0.0, added), max(0.0, statistics.median(openings))


def trained(learner, groups: list, turns: int) -> float:
    """Returns seconds of a token, prompts included, in an optimizer step on these groups: the median over turns."""
    tokens = sum(len(rollout) + group.prompt.tokens.size for group in groups for rollout in group.rollouts)
    seconds = []
    for _ in range(1 + turns):
        begun = time.perf_counter()
        learner.prepare(groups)
        learner.accumulate(groups)
        learner.commit()
        jax.block_until_ready(learner.params)
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds[1:]) / tokens


def _groups(config, start) -> list:
    """Returns a batch of the run's own prompts with rollouts of random tokens."""
    noise, size, most = np.random.default_rng(0), config.scheduler.group_size, config.sampling.max_tokens

    def answer(prompt, sample: int, count: int) -> Rollout:
        return Rollout(
            id=RolloutId(0, "train", 0, prompt.id, sample),
            prompt=prompt,
            tokens=noise.integers(0, start.model.vocab_size, count),
            sampled=[True] * count,
            logprobs=[-1.0] * count,
            entropies=[1.0] * count,
            versions=[0] * count,
            drafted=[False] * count,
            finish=Finish.LENGTH,
            start_clock=0,
            finish_clock=count,
        )

    prompts = [start.train.at(position)[1] for position in range(config.scheduler.prompts)]
    return [
        Group(
            prompt=prompt,
            rollouts=tuple(answer(prompt, sample, int(noise.integers(1, most + 1))) for sample in range(size)),
            rewards=np.arange(size) % 2,
            scored=np.ones(size, bool),
        )
        for prompt in prompts
    ]


def _step_s(engine, requests: list, size: int, drafts: bool) -> float:
    """Returns seconds a step while requests wait for slots. The first dispatch, which begins drafting, does not count."""
    _begin(engine, requests, size, drafts)
    engine.step()
    engine.metrics()
    seconds = steps = 0.0
    while engine.pending:
        took, made = _timed(engine)
        if any(engine.capacity.slots):
            continue
        seconds, steps = seconds + took, steps + made
    if not steps:
        raise ValueError(
            f"row size {size} never had every slot busy with {len(requests)} requests: too few or too short "
            "answers (engine.max_length)"
        )
    return seconds / steps


def _opening_s(engine, requests: list, size: int) -> float:
    """Returns how many seconds longer the first dispatch takes that drafts, after dispatches that did not."""
    _begin(engine, requests, size, False)
    _timed(engine)
    while any(engine.capacity.slots):
        _timed(engine)
    engine.drafting.forced = True
    (first, steps), (second, as_many) = _timed(engine), _timed(engine)
    engine.drafting.forced = False
    while engine.pending:
        engine.step()
    return first - second * steps / as_many


def _begin(engine, requests: list, size: int, drafts: bool) -> None:
    engine.reset()
    engine.metrics()
    engine.row_sizes, engine.drafting.forced = (size,), drafts
    engine.submit(requests)


def _timed(engine) -> tuple[float, float]:
    begun = time.perf_counter()
    engine.step()
    return time.perf_counter() - begun, engine.metrics()["rows/steps"]


class _Answered:
    """A history in which one prompt of a group's size has rollouts in every remembered epoch, as long as fits, of
    random tokens.

    There are as many tables as for the groups that a run would have in as many slots.
    """

    def __init__(self, config, vocab: int):
        self._config, self._vocab, self._known = config, vocab, {}

    def of(self, prompt_id: str) -> tuple:
        if int(prompt_id) % self._config.scheduler.group_size:
            return ()
        if prompt_id not in self._known:
            self._known[prompt_id] = self._past(prompt_id)
        return self._known[prompt_id]

    def _past(self, prompt_id: str) -> tuple:
        config, noise = self._config, np.random.default_rng(int(prompt_id))
        answers = config.scheduler.group_size
        offsets = np.arange(answers + 1) * (config.engine.max_length // 2)
        none = np.zeros(answers, np.int32)
        texts = [noise.integers(0, self._vocab, offsets[-1], np.int32) for _ in range(config.history.epochs)]
        return tuple(
            Past(
                epoch=epoch,
                tokens=text,
                argmax_tokens=text,
                offsets=offsets,
                rewards=none.astype(np.float32),
                scored=none == 0,
                versions=none,
            )
            for epoch, text in reversed(list(enumerate(texts)))
        )


def _arguments(args: list[str]) -> tuple[str, list[str]]:
    unknown = [a for a in args if not a.startswith("--config")]
    if unknown:
        raise ValueError(f"bench cost: unknown argument {unknown[0]!r}; it takes --config=FILE and --config.a.b=VALUE")
    path = next((a.removeprefix("--config=") for a in args if a.startswith("--config=")), "configs/demo.py")
    return path, [a.removeprefix("--config.") for a in args if a.startswith("--config.")]


def _requests(engine) -> list:
    """Returns twice as many prompts as slots, each with half of the positions. All rollouts are as long as fits."""
    sizes, noise, out = engine.sizes, np.random.default_rng(0), []
    half = sizes.max_length // 2
    for index in range(2 * sizes.slots * sizes.replicas):
        prompt = Prompt(id=str(index), tokens=noise.integers(0, engine.vocab_size, half))
        name = RolloutId(0, "train", 0, prompt.id, 0)
        out.append(
            Request(
                rollout_id=name,
                prompt=prompt,
                seed=name.seed(),
                max_tokens=sizes.max_length - half,
                sampling=Sampling(),
                replica=index % sizes.replicas,
            )
        )
    return out
