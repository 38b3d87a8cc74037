"""The server of the Tinker API: a policy, its engine, its training programs and uvicorn, put together."""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrl_post.config import Config
from jaxrl_post.kernels import eight_bits
from jaxrl_post.launch.parts import build, inputs
from jaxrl_post.launch.parts.policy import Policy
from jaxrl_post.ring.types import MOST_ENDS
from jaxrl_post.serve.http_server import HttpServer
from jaxrl_post.serve.listening import address
from jaxrl_post.serve.tinker.app import app
from jaxrl_post.serve.tinker.bodies import Limits
from jaxrl_post.serve.tinker.sampler import Sampler
from jaxrl_post.serve.tinker.service import Service
from jaxrl_post.serve.tinker.snapshots import Snapshots
from jaxrl_post.serve.tinker.trainer import Trainer
from jaxrl_post.trainer import programs


class Server:
    """A server of one base.

    Args:
      config: of the policy. A micro-batch has batch.rows rows of engine.max_length tokens.
      folder: of saved weights.
      keys: key that a client sends -> its owner, whose folder holds the saved weights; empty: none is asked for.
      how: as in Service.
    """

    def __init__(
        self,
        config: Config,
        files: inputs.PolicyFiles,
        *,
        name: str,
        folder: Path,
        keys: Mapping[str, str],
        say: Callable[[str], object],
        **how: Any,
    ):
        for option, given, without in (
            ("mesh.context", config.mesh.context, 1),
            ("batch.shared_prompts", config.batch.shared_prompts, False),
        ):
            if given != without:
                raise ValueError(
                    f"{option}={given}: the texts of a client lie in rows of their own, each on one device; the nearest valid "
                    f"value is {without}"
                )
        for option, form in (("engine.weights", config.engine.weights), ("model.weights", config.model.weights)):
            if form != eight_bits.AUTO:
                raise ValueError(
                    f"{option}={form!r}: a client trains additions to the engine's own matrices, which are no codes; the nearest "
                    f"valid value is {eight_bits.AUTO!r}"
                )
        policy, snapshots = Policy(config, files), Snapshots(folder)
        engine = policy.engine()
        trainer = _trainer(config, files, policy, engine.device.params, name)
        vocab, length = files.model.used_vocab or files.model.vocab_size, config.engine.max_length
        limits = Limits(vocab=vocab, positions=length, stops=MOST_ENDS - len(policy.sampling.eos_ids))
        sampler = Sampler(policy, engine, trainer, snapshots)
        self.service = Service(
            trainer, sampler, snapshots, limits, name=name, tokenizer=str(files.place.resolve()), say=say, **how
        )
        self._keys, self._say = keys, say
        self._http = HttpServer(app(self.service, keys), self.service.last_word)

    def serve(self, listening: socket.socket) -> int:
        """Serves at a socket until a signal, `stop`, or the end of the devices' thread. Returns the exit code."""
        self._say(f"serving {self.service.name} to the Tinker SDK at {address(listening)}")
        one = [key for key, owner in self._keys.items() if not owner]
        owners = (
            f"keys of {', '.join(self._keys.values())}"
            if self._keys
            else "no key is asked for: whoever reaches the port is served"
        )
        self._say(f"key {one[0]}" if one else owners)
        self._http.run(listening, self.service.failed)
        return int(self.service.broken)

    def stop(self) -> None:
        """Ends the server. It may be called in any thread."""
        self._http.stop()


def _trainer(config: Config, files: inputs.PolicyFiles, policy: Policy, params: Any, name: str) -> Trainer:
    """Returns the trainer, whose base is the engine's own weights where dtype and layout agree. `params`: these."""
    batch = dataclasses.replace(config.batch, tokens=config.engine.max_length)
    config, devices = dataclasses.replace(config, batch=batch), build.device_plan(config)
    recipe = programs.recipe(
        files.model,
        config.algorithm,
        config.optimizer,
        batch,
        devices.learner,
        temperature=1.0,
        remat=config.model.remat_policy if config.model.remat else None,
        scan_layers=config.model.scan_layers,
        dtype=config.model.compute_dtype,
        attention=build.training_attention(config, files.model, devices, branches=False)[0],
    )
    wide = jax.tree.leaves(params)[0].dtype == np.float32
    return Trainer(recipe, params if wide else files.load_params, name=name, rows=batch.rows, tokens=batch.tokens)
