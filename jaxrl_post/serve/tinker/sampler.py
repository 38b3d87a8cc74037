"""Samples from saved weights, those of one client after those of another, on one row engine.

Invariant: a token is a function of weights, prompt, seed and sampling law. The engine holds the weights of one path at a
time, so whoever else is served changes no bit.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from jaxrl_post.engine.row_engine import RowEngine
from jaxrl_post.json_text import said
from jaxrl_post.launch.policy import Policy
from jaxrl_post.models import decoder, lora
from jaxrl_post.models.model_config import Lora
from jaxrl_post.parallel import mesh as meshes
from jaxrl_post.serve.refusal import Refusal
from jaxrl_post.serve.tinker.datums import Datum
from jaxrl_post.serve.tinker.forms import Ask
from jaxrl_post.serve.tinker.snapshots import Saved, Snapshots
from jaxrl_post.serve.tinker.trainer import Trainer
from jaxrl_post.types import Finish, Prompt, Request, Rollout, RolloutId, served_seed

BASE = Saved("", "")  # the base's own weights


@dataclass(frozen=True, kw_only=True, eq=False)
class Sampling:
    """A request to sample. `path`: of the weights. `seed`: of its noise."""

    path: Saved
    ask: Ask
    seed: int


@dataclass(eq=False)
class _Live:
    """A request on the engine: the rollouts that have ended by their place, and log-probs of the prompt if wanted."""

    prompt_logprobs: list[float | None] | None
    rollouts: dict[int, Rollout] = field(default_factory=dict)


class Sampler:
    """The engine of all clients. It belongs to one thread.

    Args:
      engine: of `policy`, with the base's own weights.
    """

    def __init__(self, policy: Policy, engine: RowEngine, trainer: Trainer, snapshots: Snapshots):
        self._policy, self._engine, self._trainer, self._snapshots = policy, engine, trainer, snapshots
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
        self._live: dict[Sampling, _Live] = {}
        self._places: dict[RolloutId, tuple[Sampling, int]] = {}

    def check(self, ask: Ask) -> None:
        """Checks the sampling law of a request, in any thread.

        Raises:
          Refusal: a stop string cannot be found in a text (data/ends.py).
        """
        try:
            self._policy.law(ask.law)
        except ValueError as error:
            raise Refusal(400, said(error), "sampling_params") from error

    def begin(self, sampling: Sampling) -> None:
        """Hands a request to the engine, which takes its weights first. What runs must be of the same weights.

        Raises:
          Refusal: there are no such weights. ValueError: they or the request are not taken.
        """
        self._use(sampling.path)
        requests = self._requests(sampling)
        scores = self._prompt_logprobs(sampling) if sampling.ask.prompt_logprobs else None  # may refuse, so it is first
        self._engine.submit(requests)
        self._live[sampling] = _Live(scores)
        self._places |= {request.rollout_id: (sampling, place) for place, request in enumerate(requests)}

    def step(self) -> list[tuple[Sampling, Mapping[str, Any]]]:
        """Runs a dispatch. Returns the requests that have ended with it, and their results."""
        done = []
        for rollout in self._engine.step():
            sampling, place = self._places.pop(rollout.id)
            live = self._live[sampling]
            live.rollouts[place] = rollout
            if len(live.rollouts) == sampling.ask.n:
                done.append((sampling, _result(self._live.pop(sampling))))
        return done

    def clear(self) -> None:
        """Drops what still runs."""
        self._engine.park(list(self._places))
        self._places.clear()
        self._live.clear()

    def restart(self) -> None:
        """Begins anew, whatever an error has left of a dispatch."""
        self._engine.restart()
        self._places.clear()
        self._live.clear()

    def _use(self, path: Saved) -> None:
        """Gives the engine the weights of a path, unless they are there and no other file has replaced theirs."""
        if self._live:
            assert self._held is not None and path == self._held[0], "requests of other weights are on the engine"
            return
        held = path, 0 if path == BASE else self._snapshots.stamp(path)
        if held == self._held:
            return
        weights = self._base if path == BASE else self._placed(path)
        self._held = None
        self._engine.swap(weights, self._engine.version + 1)
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

    def _requests(self, sampling: Sampling) -> list[Request]:
        """Returns a request of the engine for each sample. Their noise does not depend on who else asks."""
        ask, serial = sampling.ask, next(self._numbers)
        prompt = Prompt.of_tokens(ask.prompt)
        room, law = self._policy.config.engine.max_length - prompt.tokens.size, self._policy.law(ask.law)
        return [
            Request(
                rollout_id=RolloutId(serial, "eval", 0, prompt.id, sample),
                prompt=prompt,
                seed=served_seed(sampling.seed, prompt.id, sample),
                max_tokens=ask.max_tokens or room,
                sampling=law,
                replica=next(self._replicas) % self._policy.replicas,
            )
            for sample in range(ask.n)
        ]

    def _prompt_logprobs(self, sampling: Sampling) -> list[float | None]:
        """Returns log-probs of the prompt's tokens by the learner's programs, None for the first."""
        prompt = sampling.ask.prompt
        if len(prompt) == 1:
            return [None]
        policy = (
            self._trainer.base if sampling.path == BASE else self._trainer.policy(self._snapshots.read(sampling.path))
        )
        zeros = np.zeros(len(prompt) - 1, np.float32)
        one = Datum(tokens=prompt[:-1], targets=prompt[1:], weights=zeros, advantages=zeros, logprobs=zeros)
        return [None, *self._trainer.scored(policy, [one], "cross_entropy", {}).logprobs[0].tolist()]


def _result(live: _Live) -> dict[str, Any]:
    """Returns the result of a request, in the API's form."""
    sequences = [
        {
            "stop_reason": "length" if rollout.finish is Finish.LENGTH else "stop",
            "tokens": rollout.tokens.tolist(),
            "logprobs": rollout.logprobs.tolist(),
        }
        for _, rollout in sorted(live.rollouts.items())
    ]
    return {"type": "sample", "sequences": sequences, "prompt_logprobs": live.prompt_logprobs}
