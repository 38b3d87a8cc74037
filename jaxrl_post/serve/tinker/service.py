"""Sessions, training runs and samplers of the Tinker API, between the event loop and the thread of the devices.

Invariant: a request is checked whole before it is queued. A refused request changes nothing.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from jaxrl_post.models.model_config import Lora
from jaxrl_post.ring.json_text import shown
from jaxrl_post.serve.device_service import DeviceService
from jaxrl_post.serve.request_bodies import SamplingRequest
from jaxrl_post.serve.schema import Refusal
from jaxrl_post.serve.tinker.bodies import Limits, Pass
from jaxrl_post.serve.tinker.promises import Promise, Promises, Result, answered, refused
from jaxrl_post.serve.tinker.sampler import BASE, Sampler
from jaxrl_post.serve.tinker.snapshots import Saved, Snapshots
from jaxrl_post.serve.tinker.trainer import Outcome, Trainer

_SEED_BITS = 63  # of a seed that the server draws
_SWEEP_S = 5.0  # between two looks for sessions that are over
_STOPPED = "the server is stopping"
_FAILED = "the devices' thread failed, and begins anew; send the request again; the log of the server says why"
_UNEMBEDDED = (
    "additions are trained in attention and feed-forward alone; train_unembed is not served. rank=0 trains all weights"
)


@dataclass(eq=False)
class Session:
    """A client. `owner`: of the key that began it, the only one who may use it. `heard`: time.monotonic() of its last sign.

    `waits`: requests for a result that wait for it now. `runs`: names. `passing`: weights that end with it.
    """

    name: str
    owner: str
    heard: float
    waits: int = 0
    runs: dict[str, Lora | None] = field(default_factory=dict)
    passing: list[Saved] = field(default_factory=list)


class Service(DeviceService):
    """What the endpoints do: a method for each path, which gets the owner of the key and the body, `given`.

    Args:
      name: of the base, as clients call it.
      tokenizer: a folder that transformers reads, or the name of one.
      queue: calls and requests that may wait. idle_s: seconds without a sign after which a session is over.
      say: gets lines for the operator.
    """

    def __init__(
        self,
        trainer: Trainer,
        sampler: Sampler,
        snapshots: Snapshots,
        limits: Limits,
        *,
        name: str,
        tokenizer: str,
        queue: int,
        idle_s: float,
        say: Callable[[str], object],
    ):
        self.name, self.tokenizer, self.limits = name, tokenizer, limits
        super().__init__(sampler.engine, say=say)
        self.promises, self._sampler = Promises(), sampler
        self._trainer, self._snapshots, self._most_waiting, self._idle_s = trainer, snapshots, queue, idle_s
        self._sessions: dict[str, Session] = {}
        self._owners: dict[str, Session] = {}  # of training runs
        self._samplers: dict[str, tuple[Session, Saved]] = {}  # session and weights of a sampler
        self._sweeper: asyncio.Task | None = None

    def start(self) -> None:
        """Starts the thread of the devices, and looks for sessions that are over."""
        super().start()
        self._sweeper = asyncio.create_task(self._sweep())

    async def stop(self) -> None:
        """Ends the thread, and all sessions."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        await super().stop()
        for session in list(self._sessions.values()):
            self._leave(session)

    # ---- sessions

    def create_session(self, owner: str, given: Any) -> Result:
        """Begins a session."""
        one = Session(_id("session"), owner, time.monotonic())
        self._sessions[one.name] = one
        messages = {"info_message": None, "warning_message": _UNEMBEDDED, "error_message": None}
        return {"type": "create_session", "session_id": one.name, **messages}

    def session_heartbeat(self, owner: str, given: Any) -> Result:
        """Keeps a session."""
        self._session(owner, given.session_id).heard = time.monotonic()
        return {"type": "session_heartbeat"}

    def create_sampling_session(self, owner: str, given: Any) -> Result:
        """Begins to sample saved weights, or the base."""
        sampled, name = (self._session(owner, given.session_id), self._path(owner, given)), _id("sampler")
        self._samplers[name] = sampled
        return {"type": "create_sampling_session", "sampling_session_id": name}

    def sampler(self, owner: str, name: str) -> Result:
        """Tells what a sampler samples."""
        _, saved = self._sampled(owner, name)
        return {"sampler_id": name, "base_model": self.name, "model_path": saved.path or None}

    # ---- training runs

    def create_model(self, owner: str, given: Any) -> Result:
        """Begins a training run."""
        session = self._session(owner, given.session_id)
        self._check_base(given.base_model)
        added, seed = given.lora_config.read()
        key = ("create_model", session.name, given.model_seq_id)
        earlier = self.promises.earlier(key) if given.model_seq_id is not None else None
        if earlier is not None:
            return _future(earlier)
        run = _id("run")

        def begin() -> Result:
            self._trainer.begin(run, added, seed)
            return {"type": "create_model", "model_id": run}

        promise = self._queued(session, begin, key)
        session.runs[run], self._owners[run] = added, session
        return _future(promise) | {"model_id": run}

    def get_info(self, owner: str, given: Any) -> Result:
        """Tells what a training run trains, and which tokenizer its tokens are of."""
        added = self._owner(owner, given.model_id).runs[given.model_id]
        about = {"model_name": self.name, "tokenizer_id": self.tokenizer}
        more = {"is_lora": added is not None, "lora_rank": added.rank if added else None, "model_name": self.name}
        return {"type": "get_info", "model_data": about, "model_id": given.model_id, **more}

    def unload_model(self, owner: str, given: Any) -> Result:
        """Ends a training run. What it saved under a name stays."""
        run = given.model_id
        session = self._owner(owner, run)

        def end() -> Result:
            self._trainer.runs.pop(run, None)
            return {"type": "unload_model", "model_id": run}

        promise = self._queued(session, end, None)
        del self._owners[run]  # the session keeps the name, as it may end before the piece is run
        return _future(promise)

    def forward(self, owner: str, given: Any, given_pass: Pass) -> Result:
        """Gives log-probs and losses."""
        return self._passed(owner, given, given_pass, self._trainer.forward)

    def forward_backward(self, owner: str, given: Any, given_pass: Pass) -> Result:
        """Gives log-probs and losses, and adds the gradient."""
        return self._passed(owner, given, given_pass, self._trainer.forward_backward)

    def _passed(self, owner: str, given: Any, given_pass: Pass, run: Callable[..., Outcome]) -> Result:
        def work() -> Result:
            return _outcome(run(given.model_id, given_pass.datums, given_pass.loss, given_pass.bounds))

        return self._trained(owner, given, work)

    def optim_step(self, owner: str, given: Any) -> Result:
        """Takes an optimizer step."""
        adam, step = given.adam_params.model_dump(), self._trainer.step
        return self._trained(
            owner, given, lambda: {"type": "optim_step", "metrics": {"grad_norm": step(given.model_id, adam)}}
        )

    # ---- saved weights

    def save_weights(self, owner: str, given: Any) -> Result:
        """Saves weights and the optimizer's state."""

        def work() -> Result:
            saved = self._snapshots.path(owner, given.model_id, "weights", given.path, replace=given.overwrite)
            self._snapshots.write(saved, self._trainer.snapshot(given.model_id, optimizer=True))
            return {"type": "save_weights", "path": saved.path}

        return self._trained(owner, given, work)

    def save_weights_for_sampler(self, owner: str, given: Any) -> Result:
        """Saves weights to sample from. Without a name they end with the session."""
        session, run, sampler = self._owner(owner, given.model_id), given.model_id, _id("sampler")

        def work() -> Result:
            saved = self._snapshots.path(owner, run, "sampler_weights", given.path or sampler)
            self._snapshots.write(saved, self._trainer.snapshot(run, optimizer=False))
            if given.path is not None:
                return {"type": "save_weights_for_sampler", "path": saved.path}
            session.passing.append(saved)
            self._later(self._keep, sampler, session, saved)
            return {"type": "save_weights_for_sampler", "path": None, "sampling_session_id": sampler}

        return self._trained(owner, given, work)

    def load_weights(self, owner: str, given: Any) -> Result:
        """Continues a run from saved weights."""

        def work() -> Result:
            saved = self._snapshots.read(Saved(owner, given.path))
            self._trainer.load(given.model_id, saved, optimizer=given.optimizer)
            return {"type": "load_weights", "path": given.path}

        return self._trained(owner, given, work)

    def weights_info(self, owner: str, given: Any) -> Result:
        """Tells which run may load saved weights."""
        about = self._snapshots.read(Saved(owner, given.tinker_path), whole=False)
        added = about.lora
        return {
            "base_model": about.base,
            "is_lora": added is not None,
            "lora_rank": added.rank if added else 0,
            "train_unembed": added is None,
            "train_mlp": added is None or "gate" in added.targets,
            "train_attn": added is None or "q" in added.targets,
        }

    # ---- sampling

    def asample(self, owner: str, given: Any, sampling: SamplingRequest) -> Result:
        """Samples."""
        session, saved = self._sampled(owner, given.sampling_session_id)
        sampling_params, key = (
            self._sampler.sampling_params(sampling),
            ("asample", given.sampling_session_id, given.seq_id),
        )

        def submit(settle: Callable[[Result], object]) -> None:
            seeded = sampling.seeded(_SEED_BITS)
            self.thread.submit(self._sampler.request(seeded, sampling_params, saved, owner=session.name, settle=settle))

        return _future(self._promised(session, key, submit))

    async def retrieve_future(self, owner: str, given: Any, seconds: float) -> Result | None:
        """Returns the result of a request, or None where it is not there after some seconds."""
        promise = self.promises.find(given.request_id, owner)
        if promise is None:
            raise Refusal(
                f"there is no request {shown(given.request_id)} any more; send it again", "request_id", status=410
            )
        session = self._sessions.get(promise.owner)
        if session is None:
            return promise.take()
        session.waits += 1
        try:
            return promise.take() if await promise.wait(seconds) else None
        finally:
            session.waits -= 1
            session.heard = time.monotonic()

    # ---- what several of them do

    def _trained(self, owner: str, given: Any, work: Callable[[], Result]) -> Result:
        """Queues work of a training run. A number that was sent before gives the earlier request."""
        run = given.model_id

        def call() -> Result:
            if run not in self._trainer.runs:
                raise Refusal(f"the training run {run} has ended", "model_id", status=404)
            return work()

        return _future(self._queued(self._owner(owner, run), call, ("run", run, given.seq_id)))

    def _queued(self, session: Session, call: Callable[[], Result], key: Hashable) -> Promise:
        """Returns the promise of a call, which is queued unless it was before."""

        def submit(settle: Callable[[Result], object]) -> None:
            self.thread.call(lambda: self._later(settle, answered(call)), owner=session.name)

        return self._promised(session, key, submit)

    def _promised(
        self, session: Session, key: Hashable, submit: Callable[[Callable[[Result], object]], None]
    ) -> Promise:
        """Returns the promise of what `submit` queues, unless it was before. `submit`: gets what takes the result."""
        whole = isinstance(key, tuple) and None not in key
        earlier = self.promises.earlier(key) if whole else None
        if earlier is not None:
            return earlier
        if self.failed.is_set():
            raise Refusal("the devices' thread has stopped; the log of the server says why", status=503)
        waiting = self.thread.waiting
        if waiting >= self._most_waiting:
            raise Refusal(f"{waiting} requests wait, and at most {self._most_waiting} may; ask again later", status=429)
        promise = self.promises.make(session.name, key if whole else None, session.owner)
        session.heard = time.monotonic()
        submit(promise.settle)
        return promise

    # What another owner has does not exist for the one who asks: the sentence is the same.

    def _session(self, owner: str, name: str) -> Session:
        session = self._sessions.get(name)
        if session is None or session.owner != owner:
            raise Refusal(
                f"there is no session {shown(name)}; it may have ended after {self._idle_s:g} s without a sign",
                status=404,
            )
        return session

    def _owner(self, owner: str, run: str) -> Session:
        session = self._owners.get(run)
        if session is None or session.owner != owner:
            raise Refusal(f"there is no training run {shown(run)}; create_model gives one", "model_id", status=404)
        return session

    def _sampled(self, owner: str, name: str) -> tuple[Session, Saved]:
        session, saved = self._samplers.get(name, (None, BASE))
        if session is None or session.owner != owner:
            raise Refusal(
                f"there is no sampler {shown(name)}; its session may have ended", "sampling_session_id", status=404
            )
        return session, saved

    def _keep(self, name: str, session: Session, path: Saved) -> None:
        """Adds a sampler, unless its session has ended meanwhile."""
        if session.name in self._sessions:
            self._samplers[name] = session, path

    def _path(self, owner: str, given: Any) -> Saved:
        """Returns the weights that a body names."""
        if (given.base_model is None) == (given.model_path is None):
            raise Refusal("exactly one of base_model and model_path must be given", "model_path")
        if given.base_model is not None:
            self._check_base(given.base_model)
            return BASE
        saved = Saved(owner, given.model_path)
        self._trainer.check(self._snapshots.read(saved, whole=False))
        return saved

    def _check_base(self, name: str) -> None:
        if name != self.name:
            raise Refusal(f"there is no model {shown(name)}; the only one is {self.name!r}", "base_model", status=404)

    # ---- the end of sessions, and of the thread

    async def _sweep(self) -> None:
        """Ends sessions that gave no sign for too long."""
        while True:
            await asyncio.sleep(min(_SWEEP_S, self._idle_s))
            limit = time.monotonic() - self._idle_s
            for session in [one for one in self._sessions.values() if one.heard < limit and not one.waits]:
                self._leave(session)
                self._say(f"{session.name} gave no sign for {self._idle_s:g} s and has ended")

    def _leave(self, session: Session) -> None:
        """Ends a session: its runs, its samplers, and the weights that were saved for no longer."""
        del self._sessions[session.name]
        self.thread.drop(session.name)
        self.promises.end(refused("the session has ended"), session.name)
        self._samplers = {name: one for name, one in self._samplers.items() if one[0] is not session}
        runs = tuple(session.runs)
        for run in runs:
            self._owners.pop(run, None)

        def end() -> None:
            for run in runs:
                self._trainer.runs.pop(run, None)
            for path in session.passing:
                self._snapshots.remove(path)

        if self.thread.alive:
            self.thread.call(end, kept=True)
        else:
            end()

    def last_word(self) -> None:
        self.promises.end(refused(_STOPPED, ours=True))

    def _begin_anew(self) -> None:
        self.promises.end(refused(_FAILED, ours=True))
        half_done = self._sessions.get(self.thread.running)
        self.thread.restart()
        if half_done is not None:
            self._leave(half_done)
            self._say(f"{half_done.name} has ended: the devices' thread failed on a piece of its work")


def _future(promise: Promise) -> Result:
    return {"request_id": promise.name, "model_id": None}


def _outcome(found: Outcome) -> Result:
    """Returns the result of a pass, in the API's form."""
    rows = [{"logprobs": {"data": one.tolist(), "dtype": "float32", "shape": [one.size]}} for one in found.logprobs]
    return {"loss_fn_output_type": "TensorData", "loss_fn_outputs": rows, "metrics": {"loss:sum": found.total}}


def _id(what: str) -> str:
    """Returns a name that nobody can guess."""
    return f"{what}-{secrets.token_hex(16)}"
