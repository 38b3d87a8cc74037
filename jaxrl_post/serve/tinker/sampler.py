"""Samples from saved weights, those of one client after those of another, on one row engine.

Invariant: a token is a function of weights, prompt, seed and sampling law. The engine holds the weights of one path at a
time, so whoever else is served changes no bit.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxrl_post.engine.row_engine import RowEngine
from jaxrl_post.launch.parts.policy import Policy
from jaxrl_post.models import decoder, lora
from jaxrl_post.models.model_config import Lora
from jaxrl_post.parallel import mesh as meshes
from jaxrl_post.ring.json_text import said
from jaxrl_post.ring.types import Finish, Prompt, Sampling
from jaxrl_post.serve.device_thread import EngineRequest, TokenChunk
from jaxrl_post.serve.prompts import engine_requests
from jaxrl_post.serve.request_bodies import SamplingRequest
from jaxrl_post.serve.schema import Refusal
from jaxrl_post.serve.tinker.programs import Datum
from jaxrl_post.serve.tinker.promises import Result, refused
from jaxrl_post.serve.tinker.snapshots import Saved, Snapshots
from jaxrl_post.serve.tinker.trainer import Trainer

BASE = Saved("", "")  # the base's own weights


class Sampler:
    """The engine of all clients. A request is made in any thread; its weights and scores belong to the one of the devices.

    Args:
      engine: of `policy`, with the base's own weights.
    """

    def __init__(self, policy: Policy, engine: RowEngine, trainer: Trainer, snapshots: Snapshots):
        self._policy, self.engine, self._trainer, self._snapshots = policy, engine, trainer, snapshots
        self._base = engine.device.params
        self._held: tuple | None = (BASE, 0)  # the path on the engine, and the stamp of its file; None: not known
        self._mesh = jax.tree.leaves(self._base)[0].sharding.mesh
        self._dtype = jax.tree.leaves(self._base)[0].dtype
        self._homes = meshes.param_shardings(self._mesh, decoder.axes(policy.model), "engine")
        self._cast = jax.jit(
            lambda tree: jax.tree.map(lambda x: x.astype(self._dtype), tree), out_shardings=self._homes
        )
        self._numbers, self._replicas = itertools.count(), itertools.count()
        self._merges: dict[Lora, Any] = {}

    def sampling_params(self, sampling: SamplingRequest) -> Sampling:
        """Returns the sampling parameters of a request. Refused: a stop string that no text can hold (data/ends.py)."""
        try:
            return self._policy.sampling_with(sampling.sampling_changes)
        except ValueError as error:
            raise Refusal(said(error), "sampling_params") from error

    def request(
        self,
        sampling: SamplingRequest,
        sampling_params: Sampling,
        path: Saved,
        *,
        owner: str,
        settle: Callable[[Result], object],
    ) -> EngineRequest:
        """Returns the request of the engine. `path`: of the weights. `settle`: takes the result, in the API's form."""
        (ids,), sequences, scores = sampling.prompts, {}, []

        def prepare() -> None:
            self._use(path)
            scores.append(self._prompt_logprobs(path, ids) if sampling.prompt_logprobs else None)

        def receive(update: TokenChunk | Refusal) -> None:
            if isinstance(update, Refusal):
                settle(refused(update.sentence))
                return
            reason = "length" if update.finish is Finish.LENGTH else "stop"
            sequences[update.place] = {"stop_reason": reason, "tokens": update.tokens, "logprobs": update.logprobs}
            if len(sequences) == sampling.n:
                ordered = [one for _, one in sorted(sequences.items())]
                result = {"type": "sample", "sequences": ordered, "prompt_logprobs": scores[0]}
                settle(result | {"sampling_law": sampling_params.law})

        requests = engine_requests(
            Prompt.of_tokens(ids),
            sampling,
            serial=next(self._numbers),
            max_tokens=sampling.max_tokens or self._policy.config.engine.max_length - len(ids),
            sampling_params=sampling_params,
            replica=next(self._replicas) % self._policy.replicas,
        )
        return EngineRequest(requests=requests, receive=receive, prepare=prepare, weights=path, owner=owner)

    def _use(self, path: Saved) -> None:
        """Gives the engine the weights of a path, unless they are there and no other file has replaced theirs."""
        if self.engine.pending:
            assert self._held is not None and path == self._held[0], "requests of other weights are on the engine"
            return
        held = path, 0 if path == BASE else self._snapshots.stamp(path)
        if held == self._held:
            return
        weights = self._base if path == BASE else self._placed(path)
        self._held = None
        self.engine.swap(weights, self.engine.version + 1)
        self._held = held

    def _placed(self, path: Saved) -> Any:
        """Returns the weights of a path in the engine's layout and dtype, merged where they are additions."""
        saved = self._snapshots.read(path)
        self._trainer.check(saved)
        if saved.lora is None:
            return self._cast(meshes.put(saved.trees["weights"], self._homes))
        axes = lora.axes(lora.adapting(self._policy.model, saved.lora)).adapter
        adapter = meshes.put(saved.trees["weights"], meshes.param_shardings(self._mesh, axes, "engine"))
        matrices, others = lora.matrices(self._base, saved.lora)
        return lora.joined(self._merge(saved.lora)(matrices, adapter), others)

    def _merge(self, given: Lora) -> Any:
        """Returns the program that merges additions of this form."""
        if given not in self._merges:
            homes, _ = lora.matrices(self._homes, given)
            merged = functools.partial(lora.merged, lora=given, dtype=self._dtype)
            self._merges[given] = jax.jit(merged, out_shardings=homes)
        return self._merges[given]

    def _prompt_logprobs(self, path: Saved, prompt: np.ndarray) -> list[float | None]:
        """Returns log-probs of the prompt's tokens by the learner's programs, None for the first."""
        if len(prompt) == 1:
            return [None]
        policy = self._trainer.base if path == BASE else self._trainer.policy(self._snapshots.read(path))
        zeros = np.zeros(len(prompt) - 1, np.float32)
        one = Datum(tokens=prompt[:-1], targets=prompt[1:], weights=zeros, advantages=zeros, logprobs=zeros)
        return [None, *self._trainer.scored(policy, [one], "cross_entropy", {}).logprobs[0].tolist()]
