"""A session: the conversation of one rollout, as a harness outside sees it and goes on with it.

Its messages are those of the prompt, then in turns what the policy said and what the harness put behind it. The policy's
tokens are stored as they were sampled. Messages are compared with the stored ones and never tokenised again.

Invariant: a request whose messages are a beginning of the stored ones, up to a turn of the policy, gets that turn. So a
harness may begin again at any time. Messages that differ from the stored ones are refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxrl_post.rewards.environments.asking import Asking, spans
from jaxrl_post.ring.json_text import shown
from jaxrl_post.ring.types import Finish

UNKNOWN, OVER, UNLIKE, AGAIN = "unknown", "over", "unlike", "again"


class NotPlayed(Exception):
    """A request of a harness that is refused, with one sentence.

    Attributes:
      kind: UNKNOWN: no such session. OVER: it has ended. UNLIKE: messages or values do not fit. AGAIN: the last turn is settled
        already, in another way.
    """

    def __init__(self, kind: str, sentence: str):
        super().__init__(sentence)
        self.kind, self.sentence = kind, sentence


class Spoken(NamedTuple):
    """A turn of the policy.

    number: of the turn, from 1.
    message: what it said.
    before: the ids before the turn, with those of the prompt.
    tokens, logprobs, versions: of the turn.
    cut: whether it ends at the limit of tokens, which ends the conversation.
    """

    number: int
    message: Mapping
    before: np.ndarray
    tokens: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    cut: bool = False


class Session:
    """One session.

    Attributes:
      name: by which a harness calls it.
      asking: the turn that is to be followed, and all before it.
      reply: what follows the turn, as EnvironmentPool.take returns it. None: nothing yet.
      holder: the harness that plays it. Empty: none.
      since: when the turn was there for its holder, in seconds of time.monotonic. None: nobody plays it.
      counts: of attempts at this turn.
      wakes: called once when there is another turn or the session ends.
    """

    def __init__(self, name: str, asking: Asking):
        self.name, self.holder = name, ""
        self.since: float | None = None
        self.wakes: list[Callable[[], object]] = []
        self.turn(asking)

    def turn(self, asking: Asking) -> None:
        """Takes another turn of the policy."""
        self.asking, self.counts = asking, {"retries": 0, "exceptions": 0}
        self.reply: Mapping[str, Any] | None = None
        self._part: tuple[float, Mapping[str, float]] = (0.0, {})

    def goes_on(self, asking: Asking) -> bool:
        """Returns whether this conversation is the beginning of another one, or is the same."""
        said, seen = self.asking.said, [*self.asking.seen]
        if self.reply is not None and len(asking.said) > len(said):
            seen.append(self.reply.get("messages", []))
        return list(asking.said[: len(said)]) == list(said) and list(asking.seen[: len(seen)]) == seen

    @property
    def over(self) -> bool:
        """Returns whether it has its last reward, or its rollout is masked."""
        return self.reply is not None and (bool(self.reply.get("done")) or "failed" in self.reply)

    def messages(self) -> list[Mapping]:
        """Returns all messages, up to the last turn of the policy or what follows it."""
        out = list(self.asking.rollout.prompt.messages)
        seen = [*self.asking.seen, (self.reply or {}).get("messages", [])]
        for said, more in zip(self.asking.said, seen, strict=True):
            out += [said, *more]
        return out

    def begun(self) -> list[Mapping]:
        """Returns the messages before the last turn: whoever sends them gets the turn."""
        return self.messages()[: self._places()[-1]]

    def _places(self) -> list[int]:
        """Returns where the policy's turns stand among the messages."""
        place, out = len(self.asking.rollout.prompt.messages), []
        for more in [*self.asking.seen, []]:
            out.append(place)
            place += 1 + len(more)
        return out

    def heard(self, given: Sequence[Mapping], now: float) -> Spoken | None:
        """Takes the messages of a request. Returns the turn behind them, or None where it is still to be sampled.

        Raises:
          NotPlayed: they differ from the stored ones, or do not end where the policy speaks.
        """
        stored, places = self.messages(), self._places()
        for place, (one, known) in enumerate(zip(given, stored)):
            if _compared(one) != _compared(known):
                raise NotPlayed(
                    UNLIKE,
                    f"messages[{place}] differs from the session's: it is {shown(dict(one))}, and the session has "
                    f"{shown(dict(known))}; send the session's messages as they were given",
                )
        if len(given) in places:
            return self._spoken(places.index(len(given)))
        if len(given) < len(stored) or (len(given) == len(stored) and self.reply is None):
            raise NotPlayed(UNLIKE, self._ends_wrong(len(given), len(stored), places))
        if self.over:
            raise NotPlayed(
                OVER, "the session has ended: it has its reward, or its rollout is masked; take another session"
            )
        if len(given) > len(stored):
            self._follow(given[len(stored) :], len(stored), now)
        return None

    def _ends_wrong(self, given: int, stored: int, places: Sequence[int]) -> str:
        ahead = [place for place in places if place > given]
        if not ahead and self.reply is None:
            return (
                f"messages end with messages[{given - 1}], the policy's own turn, at {given} of {stored}: add what follows "
                "it, or post the reward"
            )
        return (
            f"messages has {given} of the session's {stored} messages and ends where the policy does not speak; the nearest "
            f"valid number is {ahead[0] if ahead else stored}"
        )

    def _follow(self, more: Sequence[Mapping], first: int, now: float) -> None:
        """Takes what the harness puts behind the last turn."""
        if self.reply is not None:
            raise NotPlayed(
                UNLIKE, f"messages[{first}] comes too late: what follows the turn before it is given already"
            )
        for place, one in enumerate(more, start=first):
            if one["role"] == "assistant":
                raise NotPlayed(
                    UNLIKE,
                    f"messages[{place}] is of the assistant, and the policy alone writes its turns; leave it out",
                )
        reward, numbers = self._part
        self._replied([dict(one) for one in more], reward, False, numbers, now)

    def rewarded(self, reward: float, numbers: Mapping[str, float], done: bool, now: float) -> None:
        """Takes the reward of the last turn. `done`: it ends the conversation; else the harness goes on with it.

        Raises:
          NotPlayed: the conversation goes on already, or ended with another reward.
        """
        if self.reply is not None:
            posted = self.reply.get("reward")
            if self.reply.get("done") and (posted, self.reply["numbers"]) == (reward, numbers):
                return
            raise NotPlayed(AGAIN, f"reward={reward:g} {self._settled()}")
        if done:
            self._replied([], reward, True, numbers, now)
        else:
            self._part = reward, dict(numbers)

    def failed(self, why: str) -> None:
        """Ends the conversation without a reward, and masks its rollout.

        Raises:
          NotPlayed: the conversation goes on already, or has a reward.
        """
        if self.reply is not None and "failed" not in self.reply:
            raise NotPlayed(AGAIN, f"the failure {self._settled()}")
        self.reply = self.reply or {"failed": why}

    def _settled(self) -> str:
        """Returns why the last turn takes no reward any more, as the end of a sentence."""
        assert self.reply is not None
        if "failed" in self.reply:
            return f"comes too late: the rollout is masked: {self.reply['failed']}"
        if self.reply["done"]:
            return f"comes too late: the session has ended with the reward {self.reply['reward']:g}"
        return "is of no turn: the policy's next one is still being sampled; read it first"

    def _replied(self, messages: list, reward: float, done: bool, numbers: Mapping[str, float], now: float) -> None:
        seconds = now - self.since if self.since is not None else 0.0
        told = {"messages": messages, "reward": reward, "done": done, "numbers": dict(numbers)}
        self.reply = told | {"seconds": seconds}

    def _spoken(self, index: int) -> Spoken:
        rollout = self.asking.rollout
        begin, end = spans(rollout.sampled)[index]
        return Spoken(
            number=index + 1,
            message=self.asking.said[index],
            before=np.concatenate([rollout.prompt.tokens, rollout.tokens[:begin]]),
            tokens=rollout.tokens[begin:end],
            logprobs=rollout.logprobs[begin:end],
            versions=rollout.versions[begin:end],
            cut=rollout.finish is Finish.LENGTH and end == len(rollout),
        )


def _compared(message: Mapping) -> tuple:
    """Returns what of a message must be equal. A client may write absent fields and calls in other forms."""
    role, content = message["role"], message.get("content") or ""
    if not isinstance(content, str):
        content = "".join(part.get("text", "") for part in content)
    calls = [(call.get("id"), *_function(call["function"])) for call in message.get("tool_calls") or ()]
    about = (message.get(name) or "" for name in ("name", "tool_call_id"))
    return "system" if role == "developer" else role, content, *about, calls


def _function(called: Mapping) -> tuple[str, Any]:
    """Returns name and arguments of a call. OpenAI's form has them as a text of JSON."""
    arguments = called.get("arguments") or {}
    return called["name"], json.loads(arguments) if isinstance(arguments, str) else arguments
