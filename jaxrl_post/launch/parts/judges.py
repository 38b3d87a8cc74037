"""The judge of a run on the engine's devices: its engine, its questions, and what adds its verdicts to scores.

The tokens of a question are those that `python -m jaxrl_post serve` makes of the same question, and so is its noise. So a
verdict equals that of rewards.judge.Judge at such an endpoint.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterable

import jax.numpy as jnp
import numpy as np

from jaxrl_post.config import Config
from jaxrl_post.data import chat
from jaxrl_post.data.continuations import Decode
from jaxrl_post.engine.row_engine import HostWeights
from jaxrl_post.launch.parts import build, inputs, second_models
from jaxrl_post.models import decoder
from jaxrl_post.parallel import mesh as meshes
from jaxrl_post.parallel.processes import say
from jaxrl_post.rewards.modelled import BATCHES, Judged, JudgeQueue, SleepingJudgeQueue
from jaxrl_post.rewards.question import Question
from jaxrl_post.ring.history import History
from jaxrl_post.ring.types import Prompt, Request, Rollout, RolloutId, served_seed

_log = logging.getLogger(__name__)


class Questions:
    """Makes a question about a rollout, as a request to the judge's engine.

    Args:
      decode: token ids to text.
      own: the judge's files. `engine`: the settings of its engine.
    """

    def __init__(self, form: Question, decode: Decode, own: inputs.PolicyFiles, engine: Config):
        self._form, self._decode, self._tokenizer, self._engine = form, decode, own.tokenizer, engine
        self._chat = chat.load(own.place, now=engine.data.date) if own.place.is_dir() else None
        self._sampling_params = dataclasses.replace(inputs.sampling_params(engine, own.tokenizer), temperature=0.0)

    def __call__(self, rollout: Rollout) -> Request | None:
        """Returns the request, or None where the question has characters without a token or leaves no room for a reply."""
        try:
            return self._request(
                self.tokens(rollout.prompt, self._decode(rollout.tokens, before=rollout.prompt.tokens))
            )
        except ValueError as error:
            _log.info("judge: no question on %s: %s", rollout.id, error)
            return None

    def tokens(self, prompt: Prompt, answer: str) -> np.ndarray:
        """Returns int32[T], the question about a response to a prompt.

        Raises:
          ValueError: the question cannot be written in the judge's tokens, or is too long.
        """
        text = self._form.asked(task=self._task(prompt), answer=answer, truth=prompt.answer)
        if self._chat is None:
            ids = self._tokenizer.encode(text)
        else:
            shown = self._chat.render([{"role": "user", "content": text}])
            ids = self._tokenizer.encode(shown, special=False)
        most = self._engine.engine.max_length - 1
        if not 0 < len(ids) <= most:
            raise ValueError(f"a question of {len(ids)} tokens, and judge.max_length={most + 1} holds 1 to {most}")
        return np.array(ids, np.int32)

    def text(self, reply: Rollout) -> str:
        """Returns the text of a reply."""
        return self._tokenizer.decode(reply.tokens, before=reply.prompt.tokens)

    def check(self, prompts: Iterable[Prompt]) -> None:
        """Checks that the longest task leaves room for a rollout and a reply.

        Raises:
          ValueError: a question without a rollout does not fit, or cannot be written.
        """
        longest = max(prompts, key=lambda prompt: len(self._task(prompt)) + len(prompt.answer))
        try:
            self.tokens(longest, "")
        except ValueError as error:
            raise ValueError(f"judge.question: without a rollout, prompt {longest.id!r} makes {error}") from error

    def close(self) -> None:
        """Ends the process of the chat template."""
        if self._chat is not None:
            self._chat.close()

    def _task(self, prompt: Prompt) -> str:
        if "task" in prompt.extra:
            return str(prompt.extra["task"])
        asked = [one for one in prompt.messages if one["role"] != "assistant"] or prompt.messages
        return chat.text_of(asked[-1].get("content")) if asked else self._decode(prompt.tokens)

    def _request(self, tokens: np.ndarray) -> Request:
        about, prompt = self._engine, Prompt.of_tokens(tokens)
        return Request(
            rollout_id=RolloutId(0, "judge", 0, prompt.id, 0),
            prompt=prompt,
            seed=served_seed(0, prompt.id, 0),
            max_tokens=min(about.sampling.max_tokens, about.engine.max_length - tokens.size),
            sampling=self._sampling_params,
            replica=int(prompt.id[:8], 16) % about.replicas,
        )


def questions(config: Config, start: inputs.Inputs, stack: contextlib.ExitStack) -> Questions:
    """Returns what asks the run's judge. Its questions are checked.

    Raises:
      ValueError: a question does not fit.
    """
    form = Question(text=config.judge.question, high=config.judge.high)
    made = Questions(form, start.tokenizer.decode, start.judge, second_models.judge_settings(config))
    stack.callback(made.close)
    made.check((*start.train, *start.held_out))
    return made


def beside(
    config: Config, start: inputs.Inputs, devices: build.DevicePlan, stack: contextlib.ExitStack
) -> Callable[[], Judged]:
    """Builds the judge, and returns what makes its part of each reward pool. Both pools ask one judge.

    Raises:
      ValueError: a question does not fit.
    """
    ask = questions(config, start, stack)
    queue = _queue(config, start, devices)
    form, alone = Question(text=config.judge.question, high=config.judge.high), not config.reward.functions
    return lambda: Judged(queue, ask, ask.text, form, config.judge.weight, alone=alone)


def _queue(config: Config, start: inputs.Inputs, devices: build.DevicePlan) -> JudgeQueue:
    """Loads the judge onto the engine's mesh, in the engine's dtype, and compiles its programs."""
    own, files, mesh = second_models.judge_settings(config), start.judge, devices.first
    homes = meshes.param_shardings(mesh, decoder.axes(files.model), "engine")
    layout = build.layouts(own)[0]
    engine = build.row_engine(
        own,
        files,
        mesh,
        files.load_params(homes, jnp.dtype(own.engine.dtype)),
        0,
        build.drafting(own, files.model, History(epochs=0, max_bytes=1), layout),
        lambda line: say(f"judge: {line}"),
        layout,
    )
    most = own.engine.slots * own.replicas
    if config.judge.asleep:  # waking costs a transfer of all weights
        return SleepingJudgeQueue(engine, most, most, HostWeights(engine))
    return JudgeQueue(engine, most, -(-most // BATCHES))
