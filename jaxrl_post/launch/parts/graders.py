"""What scores a run's rollouts: reward processes of training and of evaluation, or the environment.

Every prompt is checked against the reward functions first.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

from jaxrl_post import config as configs
from jaxrl_post.data import special_tags
from jaxrl_post.launch.parts import build as parts
from jaxrl_post.launch.parts import environments, evaluation, inputs, judges, reward_trial, second_models
from jaxrl_post.parallel import exchange
from jaxrl_post.parallel.processes import say
from jaxrl_post.rewards.environments.conversations import TurnScores
from jaxrl_post.rewards.limits import Adaptive, Fixed
from jaxrl_post.rewards.modelled import Beside, Modelled
from jaxrl_post.rewards.pool import Graders, Pool
from jaxrl_post.rewards.printed import Failures, Printed
from jaxrl_post.ring.types import RolloutId
from jaxrl_post.runs.journal import Journal, read_aside, read_journal


def both(
    config: configs.Config, start: inputs.Inputs, devices: parts.DevicePlan, mine: Path, stack: contextlib.ExitStack
) -> tuple[Pool, Pool] | tuple[TurnScores, TurnScores]:
    """Starts the graders of training and those of evaluation. Every prompt is checked against the reward functions."""
    if config.environment.name:
        return environments.scores(config, start, _sharing(devices), mine, stack)
    beside = _beside(config, start, devices, stack)
    shown = Printed(mine / "rewards.log"), Failures()  # of both, so that a failure is shown once
    grade = functools.partial(pool, config, start, devices, stack, *shown, beside)
    of_training, of_evaluation = config.scheduler.group_size, config.eval.samples
    rewards = grade(mine / "rewards.jsonl", lambda rollout: of_training, shuffle=config.reward.shuffle)
    judge = grade(
        mine / "eval_rewards.jsonl",
        lambda rollout: 1 if rollout.attempt == evaluation.GREEDY else of_evaluation,
        shuffle=False,
    )
    rewards.check((*start.train, *start.held_out))
    tags = (
        special_tags.hidden(start.tokenizer, next(iter(start.train)).tokens)
        if config.reward.skip_special_tokens
        else ()
    )
    if tags and config.reward.functions:
        say(
            f"reward functions never see {', '.join(tags)}, nor what closes them: the tokenizer marks them as special; "
            "reward.skip_special_tokens=false shows them"
        )
    if rewards.confined and not config.logger.quiet:
        say(f"judged programs: sandbox {rewards.confined['level']}, layers {', '.join(rewards.confined['layers'])}")
    return rewards, judge


def checked(config: configs.Config, start: inputs.Inputs) -> None:
    """Loads the reward functions, checks every prompt against them, and calls each once, for a plan."""
    if start.judge is not None:
        with contextlib.ExitStack() as stack:
            judges.questions(config, start, stack)
    if config.environment.name or not config.graders:
        return  # every row began a conversation when it was read, or a model alone scores
    texts = reward_trial.Texts(start.tokenizer)
    with Pool(_graders(config), texts.decode, failures=Failures(log=False)) as workers:
        workers.check((*start.train, *start.held_out))
        reward_trial.call_once(start, workers, texts, config.scheduler.group_size)


def _beside(
    config: configs.Config, start: inputs.Inputs, devices: parts.DevicePlan, stack: contextlib.ExitStack
) -> Callable[[], Beside | None]:
    """Returns what makes the part of a model in a reward pool: of the reward model, of the judge, or None without either."""
    if start.judge is not None:
        return judges.beside(config, start, devices, stack)
    if start.reward_model is None:
        return lambda: None
    score, alone = second_models.scorer(config, start.reward_model, devices.first), not config.reward.functions
    return lambda: Modelled(score, config.reward.model_weight, alone=alone)


def _sharing(devices: parts.DevicePlan) -> Callable[[np.ndarray], np.ndarray] | None:
    """Returns what gives scores of process 0 to all processes, or None for one process. No learner is waited for."""
    if jax.process_count() == 1:
        return None
    if devices.on_whole_hosts:
        return devices.relays.open("scores", 0).broadcast_array
    return exchange.broadcast_array


def _graders(config: configs.Config) -> Graders:
    """Returns the reward functions of a run, in one process."""
    about = config.reward
    return Graders(
        functions=about.functions, weights=about.weights, workers=1, timeout_s=about.timeout_s, sandbox=about.sandbox
    )


def pool(
    config: configs.Config,
    start: inputs.Inputs,
    devices: parts.DevicePlan,
    stack: contextlib.ExitStack,
    printed: Printed,
    failures: Failures,
    beside: Callable[[], Beside | None],
    journal: Path,
    group_size: Callable[[RolloutId], int],
    *,
    shuffle: bool,
) -> Pool:
    """Starts a pool of reward processes. In a job of several processes, process 0 scores and shares the scores."""
    limits = Fixed(config.reward.limit_s)
    if config.reward.adaptive_limit:
        limits = Adaptive(config.reward.limit_s, read_journal(journal) if journal.is_file() else ())
    graders = dataclasses.replace(
        _graders(config), code=start.handed.code, workers=config.reward.workers, limits=limits
    )
    ends = (*start.sampling.eos_ids, *start.sampling.stop_ids)
    log = Journal(journal)
    stack.callback(log.close)
    before = read_aside(journal)
    if len(before):
        say(f"resume: {len(before)} scores of {journal.name} after that point are used again, not asked for again")
    workers = Pool(
        graders,
        special_tags.graded(start.tokenizer, ends, skip=config.reward.skip_special_tokens),
        shuffle_seed=config.seed if shuffle else None,
        share=_sharing(devices),
        compute=jax.process_index() == 0,
        journal=log,
        journaled=before,
        group_size=group_size,
        printed=printed,
        failures=failures,
        beside=beside(),
    )
    return stack.enter_context(workers)
