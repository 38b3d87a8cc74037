"""What environments answer to the turns of rollouts: a protocols.Environments, and the scores of whole conversations.

Everything is kept by the digest of the tokens up to the end of a turn. So a rollout's tokens alone say which turns it has,
and a rollout that comes again with the same tokens needs no environment.

Invariant: what follows a turn is journaled before it is used, and a resumed run reads it from the journal. The environment
is then asked for later turns only, and is played again from the row and the messages.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from jaxrl_post.data import tool_calls
from jaxrl_post.data.messages import TOOLS
from jaxrl_post.data.turns import Wording, spoken
from jaxrl_post.rewards import jobs
from jaxrl_post.rewards.environments.asking import Asking, spans
from jaxrl_post.rewards.pool import Sharing
from jaxrl_post.ring.types import Finish, Group, Prompt, Rollout, RolloutId

_log = logging.getLogger(__name__)
_COUNTERS = ("turns", "failed", "retries", "exceptions", "cut", "overtime", "sandbox_restarts")


class EnvironmentHost(Protocol):
    """What plays environments: processes (environments/pool.py), or a harness outside (environments/sessions.py)."""

    def ask(self, asking: Asking) -> None: ...

    def take(self, key: str) -> tuple[Mapping[str, Any], dict[str, int]]: ...

    def answered(self, key: str) -> bool: ...

    def drop(self, key: str) -> None: ...


class Log(NamedTuple):
    """The journal of one purpose, and what it held behind the point of a resume (runs/journal.py)."""

    journal: Any
    journaled: Any


class Turn(NamedTuple):
    """A turn of a rollout: its tokens, the digest of all tokens up to its end, and the ids before it, prompt and all."""

    tokens: np.ndarray
    digest: str
    before: np.ndarray


class Conversations:
    """A protocols.Environments.

    Args:
      pool: plays the environments. None in all processes of a job but the first, which receive what it finds.
      wording: the template and the tokenizer.
      parser: how tool calls are read (data/tool_calls.py).
      max_turns: a conversation ends with its turn of this number.
      max_s: a conversation whose environment has worked longer than so many seconds ends unscored. 0: no limit.
      logs: by purpose.
      share: the argument of rewards.pool.Sharing, in a job of several processes.
    """

    def __init__(
        self,
        pool: EnvironmentHost | None,
        wording: Wording,
        *,
        parser: str,
        max_turns: int,
        max_s: float,
        logs: Mapping[str, Log],
        share: Callable[[np.ndarray], np.ndarray] | None = None,
    ):
        self._pool, self._wording, self._parser = pool, wording, parser
        self._max_turns, self._max_s, self._logs = max_turns, max_s, logs
        self._sharing = Sharing(share) if share is not None else None
        self._records: dict[RolloutId, dict[str, Mapping]] = {}
        self._asked: dict[RolloutId, str] = {}  # the digest of the turn that an environment works on
        self._spent_s: dict[RolloutId, dict[str, float]] = {}  # seconds of all steps up to the turn of a digest
        self._counts: dict[str, Counter[str]] = {purpose: Counter() for purpose in logs}
        self._waited_s: Counter[str] = Counter()

    # ---- protocols.Environments

    def start(self, rollout: Rollout) -> None:
        """Hands over the last turn of a rollout. Returns at once; see protocols.Environments."""
        turns = turns_of(rollout)
        last, known = turns[-1].digest, self._known(rollout.id)
        if self._sharing is not None:
            self._sharing.forget(rollout.id)
        if last in known or self._logs[rollout.id.purpose].journaled.find(rollout.id, last) is not None:
            return
        self._asked[rollout.id] = last
        spent_s = self._spent_s.setdefault(rollout.id, {})
        spent_s[last] = spent_s.get(turns[-2].digest, 0.0) if len(turns) > 1 else 0.0
        if self._pool is not None:
            seen = [known[turn.digest]["messages"] for turn in turns[:-1]]
            self._pool.ask(Asking(_key(rollout.id), row(rollout.prompt), self._said(rollout, turns), seen, rollout))

    def join(self, rollout: Rollout) -> list[int] | None:
        """Returns the observed tokens behind the last turn, or None where it ends the conversation, as one that was cut does.

        An environment that failed or took too long ends it, and the rollout stays unscored."""
        turns, counts = turns_of(rollout), self._counts[rollout.id.purpose]
        last, known = turns[-1].digest, self._known(rollout.id)
        if last not in known:
            known[last] = self._found(rollout, last)
        record = known[last]
        counts["turns"] += 1
        over = record["done"] or rollout.finish is Finish.LENGTH or len(turns) >= self._max_turns
        if not record["scored"] or over:
            counts["cut"] += record["scored"] and not record["done"]
            return None
        try:
            before, begun = self._before(rollout, turns)
            end, told = int(rollout.tokens[-1]), rollout.prompt.arguments
            return self._wording.observed(before, record["messages"], end, begun=begun, arguments=told)
        except ValueError as error:
            _log.warning("environment: the rollout %s stays unscored: %s", rollout.id, error)
            known[last] = dict(record) | {"scored": False}
            counts["failed"] += 1
            return None

    def _found(self, rollout: Rollout, last: str) -> Mapping:
        """Returns the record of a turn, from the journal of before a resume or from the environment, and journals it."""
        log = self._logs[rollout.id.purpose]
        if log.journaled.find(rollout.id, last) is not None:
            record = log.journaled.take(rollout.id, last)
        elif self._sharing is not None:
            record = self._sharing.take([rollout.id], self._taken_all if self._pool is not None else None)[0]
        else:
            record = self._taken(rollout.id)
        self._asked.pop(rollout.id, None)
        counts = self._counts[rollout.id.purpose]
        counts.update(record["counts"])
        log.journal.write(record)
        return record

    def _taken_all(self, ids: Sequence[RolloutId]) -> list[Mapping]:
        """Returns the records of these turns, and of all others that are answered by now."""
        assert self._pool is not None
        ready = [id for id in self._asked if id not in ids and self._pool.answered(_key(id))]
        return [self._taken(id) for id in (*ids, *ready)]

    def _taken(self, id: RolloutId) -> Mapping:
        """Waits for an environment and returns the record of the turn."""
        assert self._pool is not None
        late, begun = not self._pool.answered(_key(id)), time.monotonic()
        reply, counts = self._pool.take(_key(id))
        self._waited_s[id.purpose] += time.monotonic() - begun
        self._counts[id.purpose]["late"] += late
        failed, last = "failed" in reply, self._asked.pop(id)
        self._spent_s[id][last] += reply.get("seconds", 0.0)
        over = 0 < self._max_s < self._spent_s[id][last]
        return id._asdict() | {
            "digest": last,
            "scored": not (failed or over),
            "reward": reply.get("reward", 0.0),
            "components": reply.get("numbers", {}),
            "counts": counts | {"failed": int(failed), "overtime": int(over)},
            "done": reply.get("done", True),
            "messages": reply.get("messages", []),
        }

    def _known(self, id: RolloutId) -> dict[str, Mapping]:
        return self._records.setdefault(id, {})

    def _said(self, rollout: Rollout, turns: Sequence[Turn]) -> list[dict]:
        """Returns what the policy said in each turn, as messages with tool calls."""
        tools = {**self._wording.chat.arguments, **rollout.prompt.arguments}.get(TOOLS, ())
        texts = (self._wording.said(turn.tokens, turn.before) for turn in turns)
        return [tool_calls.message(text, self._parser, tools) for text in texts]

    def _before(self, rollout: Rollout, turns: Sequence[Turn]) -> tuple[list[Mapping], bool]:
        """Returns the messages before the last turn, for the template, and whether the last of them begins that turn."""
        known, more = self._known(rollout.id), rollout.prompt.messages
        out = list(more)
        for turn in turns[:-1]:
            out = spoken(out, self._wording.said(turn.tokens, turn.before), _begins(more))
            more = known[turn.digest]["messages"]
            out += more
        return out, _begins(more)

    # ---- scores

    def ended(self, rollout: Rollout) -> None:
        """Takes a rollout whose conversation is over: the environment's object is no longer needed."""
        if self._pool is not None:
            self._pool.drop(_key(rollout.id))

    def score(self, rollout: Rollout) -> dict[str, Any]:
        """Returns what a conversation scored: scored, reward, and components.

        The reward is the sum over turns. A component `turn_N` is the reward of a turn, `turns` their number, and `acc` the
        number of this name that the last turn has, else the reward. A rollout whose environment failed, or never got its last
        turn, is not scored."""
        known, turns = self._known(rollout.id), turns_of(rollout)
        found = [known[turn.digest] for turn in turns if turn.digest in known]
        reward = float(sum(record["reward"] for record in found))
        last = dict(found[-1]["components"]) if found else {}
        seen = bool(turns) and turns[-1].digest in known
        told = {f"turn_{place}": record["reward"] for place, record in enumerate(found, start=1)}
        components = {"acc": reward} | last | {"turns": float(len(turns))} | told
        return {
            "scored": seen and all(record["scored"] for record in found),
            "reward": reward,
            "components": components,
        }

    def forget(self, group: Group) -> None:
        """Drops all that is known of the rollouts of a scored group."""
        first = group.rollouts[0].id
        for id in [id for id in self._records if _of_group(id, first)]:
            del self._records[id]
            self._asked.pop(id, None)
            asked = self._spent_s.pop(id, None) is not None
            if asked and self._pool is not None:  # one that was parked may still be open
                self._pool.drop(_key(id))

    def state_dict(self) -> dict[str, Any]:
        """Returns what is known of conversations that are not scored, as plain values."""
        return {"records": [record for known in self._records.values() for record in known.values()]}

    def load_state_dict(self, state: Mapping, prompts: Mapping[str, Prompt]) -> None:
        """Restores what `state_dict` gave. The prompts are not read."""
        self._records = {}
        for record in state["records"]:
            id = RolloutId(*(record[name] for name in RolloutId._fields))
            self._known(id)[record["digest"]] = record

    def metrics(self, purpose: str) -> dict[str, float]:
        """Returns counts since the last call, and the seconds that `join` waited.

        Counted are turns, environments that failed, second attempts, exceptions, turns that the ring had to wait for, and
        launchers of judged programs that had died.
        Conversations over the limit of turns are `cut`, and those over the limit of seconds `overtime`."""
        counts, self._counts[purpose] = self._counts[purpose], Counter()
        waited_s = self._waited_s.pop(purpose, 0.0)
        out = {f"environment/{name}": float(counts[name]) for name in _COUNTERS}
        return out | {"perf/late_environments": float(counts["late"]), "timing_s/environment_wait": float(waited_s)}


class TurnScores:
    """A protocols.Rewards: the scores that environments gave, for one purpose.

    Args:
      shuffle_seed: permutes the scores of training rollouts, as rewards.pool.Pool does. None: they stay.
    """

    confined: Mapping[str, Any] = {}

    def __init__(self, conversations: Conversations, purpose: str, shuffle_seed: int | None = None):
        self.conversations, self._purpose, self._seed = conversations, purpose, shuffle_seed
        self._unscored = 0

    def start(self, rollout: Rollout) -> None:
        """Takes a finished rollout. Nothing is left to be computed."""
        self.conversations.ended(rollout)

    def join(self, group: Group) -> Group:
        """Returns the group with its scores; see protocols.Rewards."""
        found = [self.conversations.score(rollout) for rollout in group.rollouts]
        self._unscored += sum(not record["scored"] for record in found)
        self.conversations.forget(group)
        return jobs.scored_group(group, found, self._seed)

    def metrics(self) -> dict[str, float]:
        """Returns counts since the last call."""
        unscored, self._unscored = self._unscored, 0
        return {"reward/unscored": float(unscored)} | self.conversations.metrics(self._purpose)


def row(prompt: Prompt) -> dict[str, Any]:
    """Returns the row of a prompt, as environments get it."""
    own = {"id": prompt.id, "answer": prompt.truth, "source": prompt.source}
    return {"prompt": [dict(message) for message in prompt.messages]} | dict(prompt.extra) | own


def turns_of(rollout: Rollout) -> list[Turn]:
    """Returns the turns of a rollout: runs of sampled tokens."""
    every, start = np.concatenate([rollout.prompt.tokens, rollout.tokens]), rollout.prompt.tokens.size
    return [
        Turn(rollout.tokens[begin:end], jobs.digest_of_ids(rollout.tokens[:end]), every[: start + begin])
        for begin, end in spans(rollout.sampled)
    ]


def _begins(messages: Sequence[Mapping]) -> bool:
    """Returns whether the last of the messages that a turn follows is its beginning."""
    return bool(messages) and messages[-1]["role"] == "assistant"


def _key(id: RolloutId) -> str:
    return "\x1f".join(map(str, id))


def _of_group(id: RolloutId, other: RolloutId) -> bool:
    return (id.purpose, id.epoch, id.prompt_id) == (other.purpose, other.epoch, other.prompt_id) and (
        id.purpose == "train" or id.attempt == other.attempt
    )
