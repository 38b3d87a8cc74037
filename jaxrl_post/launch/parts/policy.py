"""A policy that generates and scores: its weights on a row engine, without a learner.

Invariant: tokens and log-probs are those that a run's engine gives for equal weights, prompt, seed and sampling law. A
policy of a run has the engine settings of that run, which are part of what bits depend on. Engines are compiled when they
are first needed.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxrl_post.config import Config
from jaxrl_post.data import chat, ends, prompts
from jaxrl_post.engine.row_engine import RowEngine
from jaxrl_post.launch import compile_guard
from jaxrl_post.launch.parts import build, inputs
from jaxrl_post.models import decoder
from jaxrl_post.parallel import mesh as meshes
from jaxrl_post.parallel.processes import say
from jaxrl_post.ring.history import History
from jaxrl_post.ring.types import Finish, Prompt, Request, Rollout, RolloutId, Sampling

Text = str | Sequence[Mapping] | Sequence[int]  # a text, messages, or token ids


@dataclass(frozen=True, kw_only=True)
class Generated:
    """A rollout with its text. Special tokens are left out of the text, and are among the tokens."""

    text: str
    rollout: Rollout = field(repr=False)

    @property
    def tokens(self) -> np.ndarray:
        """Returns int32[T], without the prompt."""
        return self.rollout.tokens

    @property
    def logprobs(self) -> np.ndarray:
        """Returns f32[T], nats, of the sampling law."""
        return self.rollout.logprobs

    @property
    def finish(self) -> str:
        """Returns "eos", "stop" or "length"."""
        return self.rollout.finish.value


class Policy:
    """A policy on devices. launch/parts/saved_policy.py opens one.

    Attributes:
      config: its settings. Only what saved_policy.READ names is read.
      tokenizer: encodes and decodes.
      model: the shape of its decoder.
      sampling: the parameters of calls that name none.
    """

    def __init__(self, config: Config, files: inputs.PolicyFiles):
        self.config, self.tokenizer = config, files.tokenizer
        self.sampling = inputs.sampling_params(config, files.tokenizer)
        self.model, self._files, self._devices = files.model, files, build.device_plan(config)
        self._layout = build.layouts(config)[0]
        self._engines: dict[tuple[bool, bool], RowEngine] = {}
        self._params: Any = None

    @property
    def replicas(self) -> int:
        """Returns the number of engine replicas."""
        return self._layout.replicas

    def generate(
        self,
        prompts: Sequence[Text] | str,
        n: int = 1,
        sampling: Sampling | Mapping[str, Any] | None = None,
        seeds: int | Any = 0,
        max_tokens: int = 0,
    ) -> list[list[Generated]]:
        """Returns n rollouts of each prompt: `generate(prompts)[prompt][sample]`.

        Args:
          prompts: texts, lists of messages {role, content}, or lists of token ids. A single text is one prompt.
          sampling: changes of the policy's parameters: temperature, top_k, top_p, stop_ids, stop_strings. A types.Sampling
            replaces them, end tokens included.
          seeds: a number from which noise is made for each place in `prompts` and each sample, or the noise keys
            themselves, uint32[prompts, n, 2] as in a rollout log.
          max_tokens: of a rollout. 0: sampling.max_tokens of the config, or what fits behind the prompt.

        Raises:
          ValueError: a prompt that does not fit or cannot be read, or wrong parameters or a wrong seed.
        """
        given = self.prompts([prompts] if isinstance(prompts, str) else prompts)
        return self.sampled(given, n, sampling, seeds, max_tokens)

    def logprobs(
        self,
        prompts: Sequence[Text] | str,
        completions: Sequence[Any] | str,
        sampling: Sampling | Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Returns the log-prob of every token of completions, f32[T] in nats, under the sampling law.

        All tokens go through the rows that would have sampled them. A token that the law never samples has -inf. At
        temperature 0 log-probs are those of temperature 1.

        Args:
          prompts: as in `generate`.
          completions: for each prompt a text, token ids, or what `generate` returned; or a list of these, for which a
            list of arrays is returned.

        Raises:
          ValueError: numbers of prompts and completions differ, or one of them cannot be read or is too long.
        """
        given = self.prompts([prompts] if isinstance(prompts, str) else prompts)
        every = [completions] if isinstance(completions, str) else list(completions)
        if len(every) != len(given):
            raise ValueError(
                f"logprobs: {len(every)} completions for {len(given)} prompts: give one, or one list, each"
            )
        sampling_params = dataclasses.replace(self.sampling_with(sampling), eos_ids=(), stop_ids=(), stop_strings=())
        nested = [
            isinstance(one, (list, tuple)) and all(not isinstance(c, (int, np.integer)) for c in one) for one in every
        ]
        wanted = [[self._ids(c) for c in (one if many else [one])] for one, many in zip(every, nested)]
        requests = [
            self._scoring(prompt, index, sample, tokens, sampling_params)
            for index, (prompt, many) in enumerate(zip(given, wanted))
            for sample, tokens in enumerate(many)
            if len(tokens)
        ]
        found = self.run(requests, scoring=True)
        none = np.zeros(0, np.float32)
        out = [
            [found[RolloutId(0, "eval", 0, prompt.id, s)].logprobs if len(ids) else none for s, ids in enumerate(many)]
            for prompt, many in zip(given, wanted)
        ]
        return [one if many else one[0] for one, many in zip(out, nested)]

    # ---- what commands and evaluation use too

    def engine(self, sampling_params: Sampling | None = None, version: int = 0) -> RowEngine:
        """Returns an engine without requests, for callers that submit their own. `run` may not be called then.

        Args:
          sampling_params: of the requests. None: any.
          version: of the weights.
        """
        cut = sampling_params is None or self.config.sampling.restricted or sampling_params.restricted
        engine = self._engine(cut, False, version)
        engine.reset()
        return engine

    def sampled(
        self,
        given: Sequence[Prompt],
        n: int,
        sampling: Sampling | Mapping[str, Any] | None,
        seeds: int | Any,
        max_tokens: int,
    ) -> list[list[Generated]]:
        """Returns n rollouts of each prompt; see `generate`. Noise from a number is that of a prompt's id."""
        sampling_params, keys = self.sampling_with(sampling), _keys(seeds, [prompt.id for prompt in given], n)
        requests = [
            self.request(
                prompt,
                index,
                RolloutId(0, "eval", 0, prompt.id, sample),
                keys[index][sample],
                sampling_params,
                max_tokens,
            )
            for index, prompt in enumerate(given)
            for sample in range(n)
        ]
        found = self.run(requests)
        rows = [self.told(found[request.rollout_id]) for request in requests]
        return [rows[index * n : (index + 1) * n] for index in range(len(given))]

    def request(
        self, prompt: Prompt, index: int, id: RolloutId, seed: np.ndarray, sampling_params: Sampling, max_tokens: int
    ) -> Request:
        """Returns the request for a rollout of the prompt that has this place among all. `max_tokens` as in `generate`."""
        return Request(
            rollout_id=id,
            prompt=prompt,
            seed=seed,
            max_tokens=max_tokens or self.room(prompt),
            sampling=sampling_params,
            replica=index % self.replicas,
        )

    def _scoring(
        self, prompt: Prompt, index: int, sample: int, tokens: np.ndarray, sampling_params: Sampling
    ) -> Request:
        """Returns the request of a scoring engine for the log-probs of `tokens`."""
        name = RolloutId(0, "eval", 0, prompt.id, sample)
        text = Rollout.written(name, prompt, tokens, Finish.LENGTH)
        asked = self.request(prompt, index, name, name.seed(), sampling_params, len(tokens))
        return dataclasses.replace(asked, prefix=text, prefix_mode="verify")

    def prompts(self, given: Sequence[Text]) -> tuple[Prompt, ...]:
        """Returns prompts with token ids, which are named by their place."""
        limit, template = self.config.engine.max_length - 1, self.template()
        out = []
        for index, one in enumerate(given):
            if isinstance(one, str) or _is_messages(one):
                row = {"id": str(index), "prompt": one, "answer": "", "source": "", "where": f"prompts[{index}]"}
                out += prompts.tokenised([row], self.tokenizer, chat=template, limit=limit)
            else:
                out.append(Prompt(id=str(index), tokens=_token_ids(one, f"prompts[{index}]")))
        if template is not None:
            template.close()
        return tuple(out)

    def template(self) -> chat.Chat | None:
        """Returns the chat template beside the tokenizer, if there is one. It needs to be closed."""
        return inputs.chat_template(self.config, self._files.place)

    def sampling_with(self, sampling: Sampling | Mapping[str, Any] | None) -> Sampling:
        """Returns the policy's sampling parameters with changes.

        Raises:
          ValueError: an unknown name, or a value out of range.
        """
        if isinstance(sampling, Sampling):
            return ends.with_special_stops(sampling, self.tokenizer)
        changes = dict(sampling or {})
        for name in changes:
            if name not in _SAMPLING_PARAMS:
                near = difflib.get_close_matches(str(name), _SAMPLING_PARAMS, n=1, cutoff=0.0)
                raise ValueError(
                    f"sampling: {name!r} is not one of {', '.join(_SAMPLING_PARAMS)}; nearest is {near[0]!r}"
                )
        if isinstance(changes.get("stop_strings"), str):
            changes["stop_strings"] = (changes["stop_strings"],)
        changes |= {name: tuple(changes[name]) for name in ("stop_ids", "stop_strings") if name in changes}
        return ends.with_special_stops(dataclasses.replace(self.sampling, **changes), self.tokenizer)

    def room(self, prompt: Prompt) -> int:
        """Returns the default of `max_tokens` behind a prompt."""
        return min(self.config.sampling.max_tokens, self.config.engine.max_length - prompt.tokens.size)

    def told(self, rollout: Rollout) -> Generated:
        """Returns a rollout with its text."""
        return Generated(rollout=rollout, text=self.tokenizer.decode(rollout.tokens, before=rollout.prompt.tokens))

    def run(
        self,
        requests: Sequence[Request],
        scoring: bool = False,
        seen: Callable[[Rollout], object] = lambda rollout: None,
    ) -> dict[RolloutId, Rollout]:
        """Returns the rollouts of requests. `seen` is called with each when it has ended.

        Raises:
          ValueError: a request does not fit. Nothing was generated then.
        """
        cut = self.config.sampling.restricted or any(request.sampling.restricted for request in requests)
        engine, found = self._engine(cut, scoring), {}
        engine.reset()
        engine.submit(requests)
        while engine.pending:
            for rollout in engine.step():
                seen(rollout)
                found[rollout.id] = rollout
        return found

    def _ids(self, completion: Any) -> np.ndarray:
        if isinstance(completion, Generated):
            return completion.tokens
        if isinstance(completion, str):
            return np.array(self.tokenizer.encode(completion, special=False), np.int32)
        return _token_ids(completion, "completions", least=0)

    def placed(self, files: inputs.PolicyFiles) -> Any:
        """Returns the weights of files of the same model, placed as the engine has them."""
        return files.load_params(meshes.param_shardings(self._devices.first, decoder.axes(files.model), "engine"))

    def _engine(self, restricted: bool, scoring: bool, version: int = 0) -> RowEngine:
        """Returns the engine for these requests. It is compiled at its first use; all share the weights."""
        key = restricted, scoring
        if key not in self._engines:
            config, files, mesh = self.config, self._files, self._devices.first
            if self._params is None:
                self._params = self.placed(files)
            drafting = build.drafting(config, files.model, History(epochs=0, max_bytes=1), self._layout)
            with compile_guard.restored():
                compile_guard.use_cache(os.environ)
                self._engines[key] = build.row_engine(
                    config,
                    files,
                    mesh,
                    self._params,
                    version,
                    drafting,
                    say,
                    self._layout,
                    restricted=restricted,
                    kept_ids=0,
                    scoring=scoring,
                )
            self._params = self._engines[key].device.params
        return self._engines[key]


_SAMPLING_PARAMS = ("temperature", "top_k", "top_p", "stop_ids", "stop_strings")


def _keys(seeds: Any, ids: Sequence[str], n: int) -> np.ndarray | list[list[np.ndarray]]:
    """Returns the noise key of each prompt and sample."""
    count = len(ids)
    if n < 1:
        raise ValueError(f"generate: n={n} must be at least 1")
    if isinstance(seeds, (int, np.integer)):
        return [[RolloutId(int(seeds), "eval", 0, id, s).seed() for s in range(n)] for id in ids]
    keys = np.asarray(seeds)
    if keys.shape not in ((count, n, 2), (count, 2) if n == 1 else ()) or keys.dtype.kind not in "iu":
        raise ValueError(
            f"generate: seeds must be a whole number or uint32[{count}, {n}, 2], got {keys.dtype}{list(keys.shape)}"
        )
    return keys.astype(np.uint32).reshape(count, n, 2)


def _token_ids(given: Any, where: str, least: int = 1) -> np.ndarray:
    ids = np.asarray(given)
    if ids.ndim != 1 or ids.size < least or (ids.size and ids.dtype.kind not in "iu"):
        raise ValueError(f"{where}: must be a text, messages or a list of token ids, got {str(given)[:80]!r}")
    return ids.astype(np.int32)


def _is_messages(given: Any) -> bool:
    return isinstance(given, Sequence) and bool(given) and all(isinstance(one, Mapping) for one in given)
