"""Sessions, training runs and samplers of the Tinker API, between the event loop and the thread of the devices.

Invariant: a request is checked whole before it is queued. A refused request changes nothing.
"""

from __future__ import annotations

import asyncio
import functools
import secrets
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import anyio

from jaxrl_post.json_text import shown
from jaxrl_post.models.model_config import Lora
from jaxrl_post.serve import fields
from jaxrl_post.serve.refusal import Refusal
from jaxrl_post.serve.tinker import forms
from jaxrl_post.serve.tinker.promises import Promise, Promises, refused
from jaxrl_post.serve.tinker.sampler import BASE, Sampler, Sampling
from jaxrl_post.serve.tinker.snapshots import Snapshots
from jaxrl_post.serve.tinker.trainer import Outcome, Trainer
from jaxrl_post.serve.tinker.worker import Piece, Worker

_STOP_S = 30.0  # for the last piece
_SEED_BITS = 63  # of a seed that the server draws
_SWEEP_S = 5.0  # between two looks for sessions that are over
_STOPPED = "the server is stopping"
_UNEMBEDDED = (
    "additions are trained in attention and feed-forward alone; train_unembed is not served. rank=0 trains all weights"
)


@dataclass(eq=False)
class Session:
    """A client. `heard`: time.monotonic() of its last sign. `waits`: requests for a result that wait for it now.

    `runs`: names. `passing`: paths that end with it.
    """

    name: str
    heard: float
    waits: int = 0
    runs: dict[str, Lora | None] = field(default_factory=dict)
    passing: list[str] = field(default_factory=list)


class Service:
    """What the endpoints do.

    Args:
      name: of the base, as clients call it.
      tokenizer: a folder that transformers reads, or the name of one.
      queue: pieces of work that may wait. idle_s: seconds without a sign after which a session is over.
      say: gets lines for the operator.
    """

    def __init__(
        self,
        trainer: Trainer,
        sampler: Sampler,
        snapshots: Snapshots,
        limits: forms.Limits,
        *,
        name: str,
        tokenizer: str,
        queue: int,
        idle_s: float,
        say: Callable[[str], object],
    ):
        self.name, self.tokenizer, self.limits = name, tokenizer, limits
        self.promises, self.worker = Promises(), Worker(sampler, lambda: self._later(self._end))
        self.failed, self.broken, self._stopping = asyncio.Event(), False, False
        self._trainer, self._snapshots, self._queue, self._idle_s, self._say = trainer, snapshots, queue, idle_s, say
        self._sessions: dict[str, Session] = {}
        self._owners: dict[str, Session] = {}  # of training runs
        self._samplers: dict[str, tuple[Session, str]] = {}  # session and path of a sampler
        self._loop: asyncio.AbstractEventLoop | None = None
        self._sweeper: asyncio.Task | None = None

    def start(self) -> None:
        """Starts the thread of the devices. It is called in the event loop."""
        self._loop = asyncio.get_running_loop()
        self.worker.start()
        self._sweeper = asyncio.create_task(self._sweep())

    async def stop(self) -> None:
        """Ends the thread, and open requests with it."""
        self._stopping = True
        if self._sweeper is not None:
            self._sweeper.cancel()
        await anyio.to_thread.run_sync(self.worker.stop, _STOP_S)
        for session in list(self._sessions.values()):
            self._leave(session)

    # ---- sessions

    def create_session(self, body: Any) -> dict[str, Any]:
        """Begins a session."""
        forms.body(body, _SESSION)
        one = Session(f"session-{secrets.token_hex(8)}", time.monotonic())
        self._sessions[one.name] = one
        told = {"info_message": None, "warning_message": _UNEMBEDDED, "error_message": None}
        return {"type": "create_session", "session_id": one.name, **told}

    def session_heartbeat(self, body: Any) -> dict[str, Any]:
        """Keeps a session."""
        self._session(forms.body(body, _HEARTBEAT, "session_id")["session_id"]).heard = time.monotonic()
        return {"type": "session_heartbeat"}

    def create_sampling_session(self, body: Any) -> dict[str, Any]:
        """Begins to sample saved weights, or the base."""
        given = forms.body(body, _SAMPLING, "session_id")
        sampled, name = (self._session(given["session_id"]), self._path(given)), f"sampler-{secrets.token_hex(8)}"
        self._samplers[name] = sampled
        return {"type": "create_sampling_session", "sampling_session_id": name}

    def sampler(self, name: str) -> dict[str, Any]:
        """Tells what a sampler samples."""
        _, path = self._sampled(name)
        return {"sampler_id": name, "base_model": self.name, "model_path": path or None}

    # ---- training runs

    def create_model(self, body: Any) -> dict[str, Any]:
        """Begins a training run."""
        given = forms.body(body, _MODEL, "session_id", "base_model")
        session = self._session(given["session_id"])
        self._check_base(given["base_model"])
        if not isinstance(given.get("lora_config", {}), dict):
            raise Refusal(400, "lora_config must be an object", "lora_config")
        added, seed = forms.lora("lora_config", given.get("lora_config", {"rank": 0}))
        key = ("create_model", session.name, given.get("model_seq_id", secrets.token_hex(8)))
        earlier = self.promises.earlier(key)
        if earlier is not None:
            return _future(earlier)
        run = f"run-{secrets.token_hex(8)}"

        def begin() -> dict[str, Any]:
            self._trainer.begin(run, added, seed)
            return {"type": "create_model", "model_id": run}

        promise = self._queued(session, begin, key)
        session.runs[run], self._owners[run] = added, session
        return _future(promise) | {"model_id": run}

    def get_info(self, body: Any) -> dict[str, Any]:
        """Tells what a training run trains, and which tokenizer its tokens are of."""
        run = forms.body(body, _NAMED, "model_id")["model_id"]
        added = self._owner(run).runs[run]
        about = {"model_name": self.name, "tokenizer_id": self.tokenizer}
        more = {"is_lora": added is not None, "lora_rank": added.rank if added else None, "model_name": self.name}
        return {"type": "get_info", "model_data": about, "model_id": run, **more}

    def unload_model(self, body: Any) -> dict[str, Any]:
        """Ends a training run. What it saved under a name stays."""
        run = forms.body(body, _NAMED, "model_id")["model_id"]
        session = self._owner(run)

        def end() -> dict[str, Any]:
            self._trainer.runs.pop(run, None)
            return {"type": "unload_model", "model_id": run}

        promise = self._queued(session, end, None)
        del self._owners[run]  # the session keeps the name, as it may end before the piece is run
        return _future(promise)

    def forward(self, body: Any) -> dict[str, Any]:
        """Gives log-probs and losses."""
        return self._passed(body, "forward_input", self._trainer.forward)

    def forward_backward(self, body: Any) -> dict[str, Any]:
        """Gives log-probs and losses, and adds the gradient."""
        return self._passed(body, "forward_backward_input", self._trainer.forward_backward)

    def _passed(self, body: Any, name: str, run: Callable[..., Outcome]) -> dict[str, Any]:
        given = forms.body(body, _TRAINED | {name: fields.anything}, "model_id", name)
        asked = forms.passed(name, given[name], self.limits)

        def work() -> dict[str, Any]:
            return _outcome(run(given["model_id"], asked.datums, asked.loss, asked.bounds))

        return self._trained(given, work)

    def optim_step(self, body: Any) -> dict[str, Any]:
        """Takes an optimizer step."""
        given = forms.body(body, _TRAINED | {"adam_params": fields.anything}, "model_id", "adam_params")
        adam = forms.adam("adam_params", given["adam_params"])

        def work() -> dict[str, Any]:
            return {"type": "optim_step", "metrics": {"grad_norm": self._trainer.step(given["model_id"], adam)}}

        return self._trained(given, work)

    # ---- saved weights

    def save_weights(self, body: Any) -> dict[str, Any]:
        """Saves weights and the optimizer's state."""
        given = forms.body(body, _SAVED, "model_id", "path")
        self._refuse_lifetime(given)

        def work() -> dict[str, Any]:
            path = self._snapshots.path(
                given["model_id"], "weights", given["path"], replace=given.get("overwrite", False)
            )
            self._snapshots.write(path, self._trainer.snapshot(given["model_id"], optimizer=True))
            return {"type": "save_weights", "path": path}

        return self._trained(given, work)

    def save_weights_for_sampler(self, body: Any) -> dict[str, Any]:
        """Saves weights to sample from. Without a name they end with the session."""
        given = forms.body(body, _SAVED, "model_id")
        self._refuse_lifetime(given)
        session, run, passing = self._owner(given["model_id"]), given["model_id"], "path" not in given
        sampler = f"sampler-{secrets.token_hex(8)}"

        def work() -> dict[str, Any]:
            path = self._snapshots.path(run, "sampler_weights", given.get("path", sampler))
            self._snapshots.write(path, self._trainer.snapshot(run, optimizer=False))
            if not passing:
                return {"type": "save_weights_for_sampler", "path": path}
            session.passing.append(path)
            self._later(self._keep, sampler, session, path)
            return {"type": "save_weights_for_sampler", "path": None, "sampling_session_id": sampler}

        return self._trained(given, work)

    def load_weights(self, body: Any) -> dict[str, Any]:
        """Continues a run from saved weights."""
        given = forms.body(body, _LOADED, "model_id", "path")

        def work() -> dict[str, Any]:
            saved = self._snapshots.read(given["path"])
            self._trainer.load(given["model_id"], saved, optimizer=given.get("optimizer", False))
            return {"type": "load_weights", "path": given["path"]}

        return self._trained(given, work)

    def weights_info(self, body: Any) -> dict[str, Any]:
        """Tells which run may load saved weights."""
        about = self._snapshots.about(forms.body(body, _INFO, "tinker_path")["tinker_path"])
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

    def asample(self, body: Any) -> dict[str, Any]:
        """Samples."""
        given = forms.body(body, forms.SAMPLE, "prompt", "sampling_session_id")
        session, path = self._sampled(given["sampling_session_id"])
        asked = forms.ask(given, self.limits)
        seed = secrets.randbits(_SEED_BITS) if asked.seed is None else asked.seed
        key = ("asample", given["sampling_session_id"], given.get("seq_id"))
        return _future(self._queued(session, None, key, Sampling(path=path, ask=asked, seed=seed)))

    async def retrieve_future(self, body: Any, seconds: float) -> Mapping[str, Any] | None:
        """Returns the result of a request, or None where it is not there after some seconds."""
        name = forms.body(body, _FETCHED, "request_id")["request_id"]
        promise = self.promises.find(name)
        if promise is None:
            raise Refusal(410, f"there is no request {shown(name)} any more; send it again", "request_id")
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

    def _trained(self, given: Mapping[str, Any], work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Queues a piece of a training run. A number that was sent before gives the earlier request."""
        run, number = given["model_id"], given.get("seq_id")
        session = self._owner(run)
        return _future(self._queued(session, functools.partial(self._of_run, run, work), ("run", run, number)))

    def _of_run(self, run: str, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Runs a piece in the thread of the devices, where its run is still there."""
        if run not in self._trainer.runs:
            raise Refusal(404, f"the training run {run} has ended", "model_id")
        return work()

    def _queued(
        self,
        session: Session,
        run: Callable[[], dict[str, Any]] | None,
        key: Hashable,
        sampling: Sampling | None = None,
    ) -> Promise:
        """Returns the promise of a piece, which is queued unless it was before."""
        whole = isinstance(key, tuple) and None not in key
        earlier = self.promises.earlier(key) if whole else None
        if earlier is not None:
            return earlier
        if not self.worker.alive:
            raise Refusal(503, "the devices' thread has stopped; the log of the server says why")
        if self.worker.waiting >= self._queue:
            raise Refusal(429, f"{self.worker.waiting} requests wait, and at most {self._queue} may; ask again later")
        promise = self.promises.make(session.name, key if whole else None)
        session.heard = time.monotonic()
        tell = functools.partial(self._later, promise.settle)
        self.worker.submit(Piece(owner=session.name, tell=tell, run=run, sampling=sampling))
        return promise

    def _session(self, name: str) -> Session:
        if name not in self._sessions:
            raise Refusal(
                404, f"there is no session {shown(name)}; it may have ended after {self._idle_s:g} s without a sign"
            )
        return self._sessions[name]

    def _owner(self, run: str) -> Session:
        if run not in self._owners:
            raise Refusal(404, f"there is no training run {shown(run)}; create_model gives one", "model_id")
        return self._owners[run]

    def _sampled(self, name: str) -> tuple[Session, str]:
        if name not in self._samplers:
            raise Refusal(404, f"there is no sampler {shown(name)}; its session may have ended", "sampling_session_id")
        return self._samplers[name]

    def _keep(self, name: str, session: Session, path: str) -> None:
        """Adds a sampler, unless its session has ended meanwhile."""
        if session.name in self._sessions:
            self._samplers[name] = session, path

    def _path(self, given: Mapping[str, Any]) -> str:
        """Returns the path of the weights that a body names."""
        if ("base_model" in given) == ("model_path" in given):
            raise Refusal(400, "exactly one of base_model and model_path must be given", "model_path")
        if "base_model" in given:
            self._check_base(given["base_model"])
            return BASE
        self._trainer.check(self._snapshots.about(given["model_path"]))
        return given["model_path"]

    def _check_base(self, name: str) -> None:
        if name != self.name:
            raise Refusal(404, f"there is no model {shown(name)}; the only one is {self.name!r}", "base_model")

    @staticmethod
    def _refuse_lifetime(given: Mapping[str, Any]) -> None:
        if given.get("ttl_seconds") is not None:
            raise Refusal(
                400, "ttl_seconds is not served: saved weights stay until their files are removed", "ttl_seconds"
            )

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
        self.worker.drop(session.name)
        self.promises.end(refused("the session has ended"), session.name)
        self._samplers = {name: one for name, one in self._samplers.items() if one[0] is not session}
        runs = tuple(session.runs)
        for run in runs:
            self._owners.pop(run, None)

        def end() -> dict[str, Any]:
            for run in runs:
                self._trainer.runs.pop(run, None)
            for path in session.passing:
                self._snapshots.remove(path)
            return {}

        if self.worker.alive:
            self.worker.submit(Piece(owner="", tell=lambda result: None, run=end))
        else:
            end()

    def _later(self, call: Callable[..., object], *arguments: Any) -> None:
        """Calls something in the event loop, where there still is one."""
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(call, *arguments)

    def _end(self) -> None:
        self.promises.end(refused(_STOPPED, ours=True))
        self.broken = not self._stopping
        self.failed.set()


def _future(promise: Promise) -> dict[str, Any]:
    return {"request_id": promise.name, "model_id": None}


def _outcome(found: Outcome) -> dict[str, Any]:
    """Returns the result of a pass, in the API's form."""
    rows = [{"logprobs": {"data": one.tolist(), "dtype": "float32", "shape": [one.size]}} for one in found.logprobs]
    return {"loss_fn_output_type": "TensorData", "loss_fn_outputs": rows, "metrics": {"loss:sum": found.total}}


_ANY = fields.anything
_TYPE: dict[str, fields.Reader] = {"type": _ANY}
_SESSION = _TYPE | dict.fromkeys(("tags", "user_metadata", "sdk_version", "project_id"), _ANY)
_HEARTBEAT = _TYPE | {"session_id": fields.text}
_NAMED = _TYPE | {"model_id": fields.text}
_NUMBER = fields.whole(0, (1 << 63) - 1)
_SAMPLING = _TYPE | dict.fromkeys(("session_id", "base_model", "model_path"), fields.text)
_SAMPLING |= {"sampling_session_seq_id": _NUMBER}
_MODEL = _TYPE | dict.fromkeys(("session_id", "base_model"), fields.text)
_MODEL |= {"model_seq_id": _NUMBER, "lora_config": _ANY, "user_metadata": _ANY}
_TRAINED = _NAMED | {"seq_id": _NUMBER}
_SAVED = _TRAINED | {
    "path": fields.text,
    "sampling_session_seq_id": _NUMBER,
    "ttl_seconds": _ANY,
    "overwrite": fields.truth,
}
_LOADED = _TRAINED | {"path": fields.text, "optimizer": fields.truth}
_INFO = {"tinker_path": fields.text}
_FETCHED = {"request_id": fields.text, "allow_metadata_only": _ANY}
