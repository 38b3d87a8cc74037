"""The types that pass through the ring: Prompt -> Request -> Rollout -> Group -> Part.

Invariant: every value is frozen, its arrays are read-only numpy, and its lengths agree. A value that breaks this
cannot be built. Nothing here knows a device, a clock or a file.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from jaxrl_post.ring.ragged import Ragged

PURPOSES = ("train", "eval", "judge")  # "judge": a question to a judge, on an engine of its own
MOST_ENDS = 8  # ids that can end a rollout, eos and stop together
LEAST_OF_LAW = 1e-30  # of temperature and top_p: float32 logits divided by it stay finite, and it is no 0 in float32
PREFIX_MODES = ("recompute", "verify", "restart")
# a rollout's arrays with one entry for each token: name -> dtype
PER_TOKEN = {
    "tokens": np.int32,
    "sampled": bool,
    "logprobs": np.float32,
    "entropies": np.float32,
    "versions": np.int32,
    "drafted": bool,
    "argmax_tokens": np.int32,
    "clocks": np.int64,
}
COLUMNS = (*PER_TOKEN, "kept")  # with what has several entries a token


def saved_name(array: str) -> str:
    """Returns what the files of a run call a rollout's array, which is what the first releases called it."""
    return "favourites" if array == "argmax_tokens" else array


class Finish(enum.Enum):
    """Why a rollout stopped. TURN and PARKED go back into the engine.

    TURN: the end of a turn, from which an environment takes the conversation on."""

    EOS = "eos"
    STOP = "stop"
    LENGTH = "length"
    TURN = "turn"
    PARKED = "parked"


class RolloutId(NamedTuple):
    """The identity of a rollout: everything that its noise depends on. Round, step and slot are not part of it."""

    run_seed: int
    purpose: str
    epoch: int
    prompt_id: str
    sample: int
    attempt: int = 0

    def seed(self) -> np.ndarray:
        """Returns uint32[2], the key of this rollout's noise: 8 bytes of BLAKE2b over the tuple's text."""
        text = "\x1f".join(str(part) for part in self)
        return frozen(np.frombuffer(hashlib.blake2b(text.encode(), digest_size=8).digest(), "<u4").astype(np.uint32))


def served_seed(seed: int, prompt_id: str, sample: int) -> np.ndarray:
    """Returns uint32[2], the key of the noise of a request from outside a run. It does not depend on who else asks."""
    return RolloutId(seed, "eval", 0, prompt_id, sample).seed()


def frozen(array: np.ndarray) -> np.ndarray:
    """Makes the array read-only and returns it."""
    array.setflags(write=False)
    return array


def missing_value(value: object) -> str:
    """Returns "is null", "is NaN" or "is empty" for a value of a data file that says nothing, else an empty text."""
    if isinstance(value, str):
        return "" if value.strip() else "is empty"
    return "is null" if value is None else "is NaN" if isinstance(value, float) and value != value else ""


def _array(value, dtype) -> np.ndarray:
    """Returns a read-only copy. An array that is read-only down to its memory is returned without a copy."""
    return value if _sealed(value, dtype) else frozen(np.array(value, dtype=dtype, copy=True))


def _sealed(value, dtype) -> bool:
    if type(value) is not np.ndarray or value.dtype != dtype:
        return False
    while type(value) is np.ndarray and not value.flags.writeable:
        value = value.base
    return value is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One row of the data.

    `id` is the same in every epoch. `tokens` is int32[T] with T >= 1. `arguments`: what its chat template was given beside
    `messages`. `extra` holds the other columns of verl's format. `where`: the file and line that it was read from. `lacks`: why
    `answer` is no ground truth, if it is none. `value`: the ground truth as it stands in the file where it is no text; `answer` is
    then its JSON. `weight`: of its rollouts in the loss.
    """

    id: str
    tokens: np.ndarray
    answer: str = ""
    source: str = ""
    where: str = ""
    lacks: str = ""
    messages: tuple[Mapping, ...] = ()
    arguments: Mapping = field(default_factory=dict)
    extra: Mapping = field(default_factory=dict)
    weight: float = 1.0
    value: Any = None

    @property
    def truth(self) -> Any:
        """Returns the ground truth as it stands in the file."""
        return self.answer if self.value is None else self.value

    @classmethod
    def of_tokens(cls, tokens: np.ndarray) -> Prompt:
        """Returns a prompt of no data row. Its id is the BLAKE2b hash of int32[T], 16 bytes in hex."""
        tokens = np.asarray(tokens, np.int32)
        return cls(id=hashlib.blake2b(tokens.tobytes(), digest_size=16).hexdigest(), tokens=tokens)

    def __post_init__(self):
        object.__setattr__(self, "tokens", _array(self.tokens, np.int32))
        if self.tokens.ndim != 1 or self.tokens.size == 0:
            raise ValueError(f"prompt {self.id!r}: tokens must be a non-empty vector, got shape {self.tokens.shape}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are sampled, and what ends a rollout.

    - `temperature`: 0 is greedy. Any other is from LEAST_OF_LAW to its inverse.
    - `top_k`: only the k most likely ids are sampled. 0 means all.
    - `top_p`: only the most likely ids that together have probability p are sampled. 1.0 means all. At least LEAST_OF_LAW.
    - `eos_ids`: end a rollout with Finish.EOS.
    - `stop_ids`, `stop_strings`: end a rollout with Finish.STOP.

    The token that ends a rollout is kept in the rollout.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    eos_ids: tuple[int, ...] = ()
    stop_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()

    def __post_init__(self):
        if self.temperature != 0 and not LEAST_OF_LAW <= self.temperature <= 1 / LEAST_OF_LAW:
            raise ValueError(
                f"temperature must be 0 or from {LEAST_OF_LAW:g} to {1 / LEAST_OF_LAW:g}, got {self.temperature}"
            )
        if self.top_k < 0:
            raise ValueError(f"top_k must be >= 0, where 0 keeps every id, got {self.top_k}")
        if not LEAST_OF_LAW <= self.top_p <= 1:
            raise ValueError(
                f"top_p must be at least {LEAST_OF_LAW:g} and at most 1, where 1 keeps every id, got {self.top_p}"
            )

        for text in self.stop_strings:
            if not isinstance(text, str) or not text or "\ufffd" in text:
                raise ValueError(
                    f"stop_strings: {text!r} must be a text of at least 1 character, without U+FFFD, which stands for "
                    "bytes of no character; leave it out"
                )

    @property
    def restricted(self) -> bool:
        """Returns whether some ids are never sampled."""
        return self.top_k > 0 or self.top_p < 1

    @property
    def law(self) -> dict[str, float]:
        """Returns the numbers that decide how likely an id is, by name."""
        return {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """The T tokens that the engine generated for a prompt, with facts about each of them.

    - `tokens` int32[T]: without the prompt.
    - `sampled` bool[T]: False where the token was observed and forced.
    - `logprobs` f32[T], `entropies` f32[T]: of the sampling distribution (temperature, top-k, top-p). At temperature 0
      they are those of temperature 1.
    - `versions` int32[T]: of the weights that sampled the token, non-decreasing.
    - `drafted` bool[T]: whether the token was an accepted draft.
    - `argmax_tokens` int32[T]: the argmax token at that position where the engine drafts, else the token. None stands for
      the tokens.
    - `clocks` int64[T]: the engine step that settled the token, non-decreasing. None stands for `finish_clock`.
    - `kept`: the ids that top-k and top-p left to be drawn, for each token, where the engine records them. A token without
      ids was drawn from all of them, or has no record. Of a model with experts the words of the token's route come behind
      them (models/experts.py). None stands for no record.
    """

    id: RolloutId
    prompt: Prompt
    tokens: np.ndarray
    sampled: np.ndarray
    logprobs: np.ndarray
    entropies: np.ndarray
    versions: np.ndarray
    drafted: np.ndarray
    finish: Finish
    start_clock: int
    finish_clock: int
    argmax_tokens: np.ndarray | None = None
    clocks: np.ndarray | None = None
    kept: Ragged | None = None

    def __post_init__(self):
        if self.kept is None:
            object.__setattr__(self, "kept", Ragged.empty(len(self.tokens)))
        if self.argmax_tokens is None:
            object.__setattr__(self, "argmax_tokens", self.tokens)
        if self.clocks is None:
            object.__setattr__(self, "clocks", np.full(len(self.tokens), self.finish_clock))
        for name, dtype in PER_TOKEN.items():
            object.__setattr__(self, name, _array(getattr(self, name), dtype))
            if getattr(self, name).shape != self.tokens.shape:
                raise ValueError(
                    f"rollout {self.id}: {name} has shape {getattr(self, name).shape}, tokens {self.tokens.shape}"
                )
        if self.records.size != len(self):
            raise ValueError(f"rollout {self.id}: kept has ids for {self.records.size} tokens of {len(self)}")
        if np.any(np.diff(self.versions[self.sampled]) < 0):
            raise ValueError(f"rollout {self.id}: versions decrease")
        if np.any(np.diff(self.clocks) < 0):
            raise ValueError(f"rollout {self.id}: clocks decrease")

    @classmethod
    def written(
        cls,
        id: RolloutId,
        prompt: Prompt,
        tokens: np.ndarray,
        finish: Finish,
        *,
        version: int = 0,
        clocks: tuple[int, int] = (0, 0),
    ) -> Rollout:
        """Returns a rollout of tokens that were written and not drawn: its log-probs and entropies are 0.

        Args:
          clocks: of its start and of its end.
        """
        zeros = np.zeros(len(tokens))
        return cls(
            id=id,
            prompt=prompt,
            tokens=tokens,
            sampled=zeros == 0,
            logprobs=zeros,
            entropies=zeros,
            versions=zeros + version,
            drafted=zeros,
            finish=finish,
            start_clock=clocks[0],
            finish_clock=clocks[1],
        )

    def state(self) -> dict:
        """Returns it without its prompt as plain values and arrays, for a checkpoint."""
        return {
            "id": list(self.id),
            "finish": self.finish.value,
            "start_clock": self.start_clock,
            "finish_clock": self.finish_clock,
            **{saved_name(name): getattr(self, name) for name in PER_TOKEN},
            **self.records.state("kept"),
        }

    @classmethod
    def restored(cls, state: Mapping, prompt: Prompt) -> Rollout:
        """Returns the rollout of a prompt that gave this state."""
        return cls(
            id=RolloutId(*state["id"]),
            prompt=prompt,
            finish=Finish(state["finish"]),
            start_clock=state["start_clock"],
            finish_clock=state["finish_clock"],
            **{name: state[saved_name(name)] for name in PER_TOKEN},
            kept=Ragged.restored(state, "kept"),
        )

    def __len__(self) -> int:
        return self.tokens.size

    @property
    def records(self) -> Ragged:
        """Returns `kept`, which is never None once the rollout is built."""
        assert self.kept is not None
        return self.kept

    def extended(self, tokens: Sequence[int], clock: int, *, sampled: bool = False) -> Rollout:
        """Returns a rollout that goes on with observed tokens, whose log-probs and entropies are 0.

        Args:
          clock: of the engine when they were observed.
          sampled: marks them as sampled, for tokens that are to be verified.
        """
        more = np.zeros(len(tokens))
        added = dict.fromkeys(PER_TOKEN, more) | {
            "tokens": tokens,
            "argmax_tokens": tokens,
            "sampled": more + sampled,
            "versions": more + self.versions.max(initial=0),
            "clocks": more + clock,
        }
        joined: dict[str, Any] = {
            name: np.concatenate([getattr(self, name), np.asarray(added[name], kind)])
            for name, kind in PER_TOKEN.items()
        }
        joined["kept"] = Ragged.joined([self.records, Ragged.empty(len(tokens))])
        return replace(self, finish_clock=clock, **joined)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A rollout to be generated: at most `max_tokens` tokens on `replica`, with the noise of `seed`.

    `prefix` is what was generated before. `prefix_mode` decides how the engine uses the prefix:
    - recompute: its tokens are forced, log-probs and versions are kept, and the KV cache is computed again.
    - verify: the tokens of its last turn become candidates. Their log-probs and versions are new.
    - restart: it is dropped.
    """

    rollout_id: RolloutId
    prompt: Prompt
    seed: np.ndarray
    max_tokens: int
    sampling: Sampling
    replica: int = 0
    prefix: Rollout | None = None
    prefix_mode: str = "recompute"

    def __post_init__(self):
        object.__setattr__(self, "seed", _array(self.seed, np.uint32))
        if self.seed.shape != (2,):
            raise ValueError(f"request {self.rollout_id}: seed must be uint32[2], got shape {self.seed.shape}")
        if self.max_tokens < 1:
            raise ValueError(f"request {self.rollout_id}: max_tokens must be >= 1, got {self.max_tokens}")
        if self.purpose not in PURPOSES:
            raise ValueError(f"request {self.rollout_id}: purpose must be one of {PURPOSES}, got {self.purpose!r}")
        if self.prefix_mode not in PREFIX_MODES:
            raise ValueError(
                f"request {self.rollout_id}: prefix_mode must be one of {PREFIX_MODES}, got {self.prefix_mode!r}"
            )

    @property
    def purpose(self) -> str:
        return self.rollout_id.purpose


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """All rollouts of one prompt, by sample index.

    - `rewards` f32[G].
    - `scored` bool[G]: an unscored rollout is masked and left out of the baseline. It never counts as 0.
    - `components`: name -> f32[G], the parts of a reward. The component "acc" is the accuracy.
    """

    prompt: Prompt
    rollouts: tuple[Rollout, ...]
    rewards: np.ndarray
    scored: np.ndarray
    components: Mapping[str, np.ndarray] = field(default_factory=dict)

    def __post_init__(self):
        size = len(self.rollouts)
        object.__setattr__(self, "rewards", _array(self.rewards, np.float32))
        object.__setattr__(self, "scored", _array(self.scored, bool))
        object.__setattr__(self, "components", {k: _array(v, np.float32) for k, v in self.components.items()})
        for name, array in (("rewards", self.rewards), ("scored", self.scored), *self.components.items()):
            if array.shape != (size,):
                raise ValueError(f"group {self.prompt.id!r}: {name} has shape {array.shape}, expected ({size},)")
        if any(rollout.prompt.id != self.prompt.id for rollout in self.rollouts):
            raise ValueError(f"group {self.prompt.id!r}: a rollout belongs to another prompt")

    @classmethod
    def unscored(cls, prompt: Prompt, rollouts: Iterable[Rollout]) -> Group:
        """Returns a group without scores, as a reward pool takes it."""
        rollouts = tuple(rollouts)
        zeros = np.zeros(len(rollouts))
        return cls(prompt=prompt, rollouts=rollouts, rewards=zeros, scored=zeros == 1)

    @property
    def accuracies(self) -> np.ndarray:
        """Returns f32[G]: the component "acc", or the reward where there is no such component."""
        return self.components.get("acc", self.rewards)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The work that the learner gets in one call.

    - `fresh`: groups that the learner sees for the first time.
    - `groups`: groups whose gradient is accumulated.
    - `commit`: an optimizer step follows the accumulation.
    - `publish`: the weights go to the engine after that step.
    """

    fresh: tuple[Group, ...]
    groups: tuple[Group, ...]
    commit: bool
    publish: bool

    @classmethod
    def joined(cls, parts: Sequence[Part]) -> Part:
        """Returns several parts as one part. Only the last of them may commit."""
        return cls(
            fresh=tuple(group for part in parts for group in part.fresh),
            groups=tuple(group for part in parts for group in part.groups),
            commit=parts[-1].commit,
            publish=parts[-1].publish,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """Ids of rollouts that the engine parks because another rollout finished."""

    park: tuple[RolloutId, ...] = ()


class Layout(NamedTuple):
    """The shape of the engine on its devices: `replicas`, each over `expert` x `tensor` devices.

    With fewer replicas than the devices allow, the last devices of each process stay free.
    """

    replicas: int
    tensor: int
    expert: int = 1

    def __repr__(self) -> str:
        more = f", expert={self.expert}" if self.expert > 1 else ""
        return f"Layout(replicas={self.replicas}, tensor={self.tensor}{more})"

    @property
    def devices(self) -> int:
        return self.replicas * self.replica

    @property
    def numbers(self) -> list[int]:
        """As logs and replies have it: the parts of the experts only where there are several."""
        return [*self] if self.expert > 1 else [self.replicas, self.tensor]

    @property
    def replica(self) -> int:
        """Devices of each replica."""
        return self.expert * self.tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """Free slots and free pages of each replica. Slots promised to waiting requests are not free."""

    slots: tuple[int, ...]
    pages: tuple[int, ...]
