"""The open sessions of a run: a conversations.Asked whose replies come from a harness outside, in other threads.

The ring hands a turn over by `ask` and waits for what follows it in `take`. A harness takes a session, reads the turn, and
goes on with the conversation or posts the reward. Between two turns a harness waits, and is woken.

Invariants:
- What follows a turn is used as it came, once. When it comes changes no order: the ring waits for it.
- A session that is played and not gone on with for `timeout_s` is offered once more. Then it fails, as an environment that
  hangs. One that nobody has taken waits, within the limits of the run's watchdog.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxrl_post.rewards.environments.asking import Asking
from jaxrl_post.rewards.environments.session import OVER, UNKNOWN, NotPlayed, Session, Spoken
from jaxrl_post.rewards.printed import Failures

REMEMBERED = 4096  # sessions that have ended, to tell them from those that never were
UNNAMED = "unnamed"  # a harness that goes on with a session which it did not take
_LOOK_S = 1.0  # between two looks at limits, while the ring waits
_SILENT_S = 30.0  # until the run says that it waits for a harness
_ENDED = "the session has ended: its rollout is complete, by its reward or at a limit of the run; take another session"

Wake = Callable[[], object]


class Sessions:
    """Sessions by name.

    Args:
      timeout_s: a turn that is played must be followed within so many seconds.
      say: gets a line where the run waits for a harness.
      clock: seconds that never go back.
    """

    def __init__(self, *, timeout_s: float, say: Callable[[str], object], clock: Callable[[], float] = time.monotonic):
        self._timeout_s, self._say, self._clock = timeout_s, say, clock
        self._open: dict[str, Session] = {}
        self._over: OrderedDict[str, None] = OrderedDict()
        self._wakes: list[Wake] = []  # of those who wait for any session
        self._changed = threading.Condition()
        self._failures = Failures("harness")
        self._stopped = ""

    # ---- the ring's side: conversations.Asked

    def ask(self, asking: Asking) -> None:
        """Opens a session, or goes on with one. A conversation that begins again in another way is offered anew."""
        name = name_of(asking.key)
        with self._changed:
            session = self._open.get(name)
            if session is None or not session.goes_on(asking):
                self._end(name)
                self._over.pop(name, None)
                session = self._open[name] = Session(name, asking)
            elif len(asking.said) > len(session.asking.said):
                session.turn(asking)
                session.since = self._clock() if session.holder else None
            else:
                session.asking = asking
            _wake(session.wakes)
            if not session.holder:
                _wake(self._wakes)

    def answered(self, key: str) -> bool:
        """Returns whether `take` would not wait."""
        with self._changed:
            session = self._open[name_of(key)]
            self._limit(session)
            return session.reply is not None

    def take(self, key: str) -> tuple[Mapping[str, Any], dict[str, int]]:
        """Waits for what follows a turn and returns it with the counts of its attempts.

        Raises:
          RuntimeError: harnesses can no longer be heard.
        """
        begun, said = self._clock(), False
        with self._changed:
            session = self._open[name_of(key)]
            while session.reply is None:
                if self._stopped:
                    raise RuntimeError(f"environment: no harness can be heard: {self._stopped}")
                self._limit(session)
                if session.reply is None:
                    self._changed.wait(_LOOK_S)
                if not said and not session.holder and self._clock() - begun > _SILENT_S:
                    said = True
                    self._say(
                        f"environment: {self.count()[0]} sessions wait for a harness, which must play all sessions of a "
                        "step at the same time"
                    )
            return session.reply, dict(session.counts)

    def drop(self, key: str) -> None:
        """Ends a session whose conversation is over."""
        with self._changed:
            self._end(name_of(key))

    def stop(self, why: str) -> None:
        """Ends all sessions. Everybody who waits is woken, and nothing is heard any more."""
        with self._changed:
            self._stopped = self._stopped or why
            for name in list(self._open):
                _wake(self._open[name].wakes)
            _wake(self._wakes)
            self._changed.notify_all()

    def _end(self, name: str) -> None:
        session = self._open.pop(name, None)
        if session is None:
            return
        self._over[name] = None
        while len(self._over) > REMEMBERED:
            self._over.popitem(last=False)
        _wake(session.wakes)

    def _limit(self, session: Session) -> None:
        """Offers a session again whose harness is late, and fails it after the second time."""
        late = session.since is not None and self._clock() - session.since > self._timeout_s
        if session.reply is not None or not late:
            return
        why = f"longer than {self._timeout_s:g} s without what follows a turn"
        self._failures.tell(session.holder, session.asking.rollout.id, why, "", "")
        if session.counts["retries"]:
            session.failed(why)
            return
        session.counts["retries"] += 1
        self._free(session)

    def _free(self, session: Session) -> None:
        """Offers a session again."""
        session.holder, session.since = "", None
        _wake(self._wakes)

    # ---- the harness's side

    def claim(self, harness: str, most: int, wake: Wake) -> list[Session]:
        """Gives a harness the oldest sessions that nobody plays. Empty: there is none; `wake` is called when to look again.

        Raises:
          NotPlayed: the run has ended.
        """
        with self._changed:
            if self._stopped:
                raise NotPlayed(OVER, self._stopped)
            for session in self._open.values():
                self._limit(session)
            free = [one for one in self._open.values() if not one.holder and one.reply is None][:most]
            for session in free:
                self._hold(session, harness)
            if not free:
                self._wakes.append(wake)
            return free

    def release(self, harness: str) -> int:
        """Offers the sessions of a harness again, as one does that begins anew. Returns how many.

        One whose next turn is still being sampled is offered with that turn."""
        with self._changed:
            held = [one for one in self._open.values() if one.holder == harness and not one.over]
            for session in held:
                self._free(session)
            return len(held)

    def heard(self, name: str, messages: Sequence[Mapping], wake: Wake) -> Spoken | None:
        """Takes the messages of a request. Returns the turn behind them. None: `wake` is called when to ask again.

        Raises:
          NotPlayed: there is no such session, it has ended, or its messages are others.
        """
        with self._changed:
            session = self._found(name)
            found = session.heard(messages, self._clock())
            if found is None:
                session.wakes.append(wake)
                self._changed.notify_all()
            return found

    def leave(self, wake: Wake, name: str = "") -> None:
        """Takes back what `claim` or, with the name of a session, `heard` would call."""
        with self._changed:
            session = self._open.get(name)
            for wakes in (self._wakes, session.wakes if session else []):
                if wake in wakes:
                    wakes.remove(wake)

    def rewarded(self, name: str, reward: float, numbers: Mapping[str, float], done: bool) -> None:
        """Takes the reward of the last turn; see Session.rewarded."""
        with self._changed:
            self._found(name).rewarded(reward, numbers, done, self._clock())
            self._changed.notify_all()

    def failed(self, name: str, why: str) -> None:
        """Masks a rollout, as an environment that fails; see Session.failed. `why`: for the log of the run."""
        with self._changed:
            session = self._found(name)
            session.failed(why)
            self._failures.tell(session.holder, session.asking.rollout.id, why, "", "")
            self._changed.notify_all()

    def count(self) -> tuple[int, int]:
        """Returns how many sessions wait for a harness, and how many one plays."""
        with self._changed:
            open_ = [session for session in self._open.values() if session.reply is None]
            played = sum(bool(session.holder) for session in open_)
            return len(open_) - played, played

    def _found(self, name: str) -> Session:
        """Returns a session that a harness calls by its name, which plays it from now on."""
        if self._stopped:
            raise NotPlayed(OVER, self._stopped)
        session = self._open.get(name)
        if session is None:
            if name in self._over:
                raise NotPlayed(OVER, _ENDED)
            raise NotPlayed(UNKNOWN, f"there is no session {name[:40]!r} now; take one by POST /v1/sessions")
        if not session.holder:
            self._hold(session, UNNAMED)
        return session

    def _hold(self, session: Session, harness: str) -> None:
        session.holder, session.since = harness, self._clock()


def name_of(key: str) -> str:
    """Returns the name of the session of a conversation. It stays the same over a restart of the run."""
    return hashlib.blake2b(key.encode(), digest_size=8).hexdigest()


def _wake(wakes: list[Wake]) -> None:
    waiting, wakes[:] = wakes[:], []
    for wake in waiting:
        wake()
