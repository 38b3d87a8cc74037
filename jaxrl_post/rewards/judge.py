"""A model as judge: scores from any endpoint with OpenAI's chat completions, requested in a reward process.

Write a file that makes a judge, and name it in the config:

    from jaxrl_post.rewards.judge import Judge
    score = Judge("http://localhost:8000/v1", model="qwen2.5-7b-instruct",
                  question="Task: {task}\\nAnswer: {answer}\\nReference: {truth}\\nIs it right? End with VERDICT: 0 or 1.")

The option is reward.functions = ("file.py:score",). The verdict is the last line of the reply, "VERDICT: number" and
nothing else. A judge fails if it cannot be reached, or if its replies repeatedly have no verdict. It then raises, so
the rollout is unscored and counted, never scored 0. Repeated questions are served from a cache.

Invariants:
- The API key goes to the endpoint alone: over https, or to this host. Redirects are not followed.
- One deadline covers everything that an answer takes: name lookup, connection, headers, body and further attempts. A
  request runs in a thread of its own, because a name lookup cannot be interrupted and a socket's timeout begins anew with
  every byte. At the deadline its connections are shut down and the caller goes on.
- A host that is this one is reached without the proxies of the environment.
- A verdict outside the range counts as none, also one from the cache. A damaged cache file is asked for anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import ipaddress
import json
import logging
import math
import os
import re
import socket
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path

from jaxrl_post.rewards.question import Question

_log = logging.getLogger(__name__)
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
_LARGEST_REPLY = 1 << 20  # bytes
_PASSING = (408, 425, 429, 500, 502, 503, 504)  # HTTP errors that may pass
_PAUSE_S = 0.2  # before the second attempt; twice as long before each further one


class Undecided(Exception):
    """The judge gave no verdict in time. The message holds the outcome of the last attempt."""


class Judge:
    """A reward function of verl's signature.

    `question` contains {answer}, which stands for the rollout. It contains {truth} and {task} if the judge shall see
    the ground truth and the task. The task is extra_info["task"], because the signature has no prompt.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        model: str,
        question: str,
        low: float = 0.0,
        high: float = 1.0,
        max_tokens: int = 0,
        deadline_s: float = 8.0,
        attempts: int = 3,
        cache: str | None = None,
        key_variable: str = "OPENAI_API_KEY",
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ):
        """Checks the options. No request is sent.

        Args:
          endpoint: the URL before /chat/completions.
          low, high: range of valid verdicts. A number outside counts as no verdict.
          max_tokens: of a reply; 0: the endpoint's own.
          deadline_s: seconds for all attempts together. Keep it below reward.timeout_s.
          attempts: at most this many, at least 1. Only failures that may pass are tried again: no connection, a busy
            server, a reply without a verdict.
          cache: folder of verdicts, by request. None: no cache.
          key_variable: environment variable with the API key. Without a key, no Authorization header is sent. With one,
            the endpoint must be https or on this host; an empty name sends no key.

        Raises:
          ValueError: endpoint, attempts, deadline_s, low and high, question or cache are invalid.
        """
        key = os.environ.get(key_variable, "") if key_variable else ""
        _check_endpoint(endpoint, key_variable if key else "")
        if attempts < 1 or not 0 < deadline_s < math.inf or max_tokens < 0:
            raise ValueError(
                f"judge: attempts={attempts} must be at least 1, deadline_s={deadline_s} above 0 and finite, and "
                f"max_tokens={max_tokens} at least 0"
            )
        self._question = Question(text=question, low=low, high=high)
        if _URL.match(str(cache)):
            raise ValueError(f"judge: cache={str(cache)!r} must be a local folder, and it is a URL; mount the bucket")
        if cache is not None and Path(cache).exists() and not Path(cache).is_dir():
            raise ValueError(f"judge: cache={str(cache)!r} must be a folder, and it is a file")
        self.needs_truth = self._question.needs_truth
        self._url, self._deadline_s, self._attempts = endpoint.rstrip("/") + "/chat/completions", deadline_s, attempts
        self._asks = {"model": model, "temperature": 0} | ({"max_tokens": max_tokens} if max_tokens else {})
        self._cache = None if cache is None else Path(cache)
        self._key, self._now, self._sleep = key, now, sleep

    def __call__(self, data_source: str, solution_str: str, ground_truth: str, extra_info: dict) -> float:
        """Returns the verdict for one rollout, from the cache if the same request is in it.

        Raises:
          Undecided: no verdict within the deadline and the attempts.
          ValueError: the question contains {task}, and the row has no task.
        """
        if self._question.needs_task and "task" not in extra_info:
            raise ValueError(
                f'judge: the question holds {{task}}, and extra_info has no "task" but {sorted(extra_info)}'
            )
        truth = ground_truth if isinstance(ground_truth, str) else json.dumps(ground_truth, ensure_ascii=False)
        asked = self._question.asked(task=str(extra_info.get("task")), answer=solution_str, truth=truth)
        body = json.dumps(self._asks | {"messages": [{"role": "user", "content": asked}]}, sort_keys=True).encode()
        known = self._known(body)
        if known is not None:
            return known
        found = self._asked(body)
        self._remember(body, found)
        return found

    def _asked(self, body: bytes) -> float:
        end, said = self._now() + self._deadline_s, "nothing"
        for attempt in range(self._attempts):
            if attempt:
                self._sleep(min(_PAUSE_S * 2 ** (attempt - 1), max(end - self._now(), 0.0)))
            left = end - self._now()
            if left <= 0:
                break
            try:
                found, said = self._verdict(_reply(self._url, body, self._key, left))
            except _Refused as error:
                found, said = None, str(error)
                if not error.may_pass:
                    break
            if found is not None:
                return found
        raise Undecided(
            f"judge {self._url}: no verdict within {self._deadline_s:g} s and {self._attempts} attempts; the last "
            f"one brought {said}"
        )

    def _verdict(self, reply: object) -> tuple[float | None, str]:
        """Returns the verdict of the reply and its text. Without a verdict, the text says what it lacks."""
        try:
            choice = reply["choices"][0]
            text = choice["message"]["content"]
            found = self._question.verdict(text)
            cut = choice.get("finish_reason") == "length"
        except (TypeError, KeyError, IndexError, AttributeError):
            return None, f"a reply without choices[0].message.content: {str(reply)[:200]}"
        if cut:  # the number at its end may lack digits
            return None, f"{text[-200:]!r}, which is cut off at max_tokens"
        if found is None:
            return None, f"{text[-200:]!r}, whose last line is no 'VERDICT: number' {self._range}"
        return found, text

    @property
    def _range(self) -> str:
        return f"from {self._question.low:g} to {self._question.high:g}"

    def _file(self, body: bytes) -> Path:
        name = hashlib.sha256(self._url.encode() + b"\n" + body).hexdigest()
        return self._cache / name[:2] / f"{name}.json"

    def _known(self, body: bytes) -> float | None:
        """Returns the cached verdict. None: there is none, its file is damaged, or it is out of range."""
        if self._cache is None or not self._file(body).is_file():
            return None
        try:
            held = json.loads(self._file(body).read_bytes())
        except (OSError, ValueError, RecursionError):
            held = None
        verdict = held.get("verdict") if isinstance(held, dict) else None
        numeric = isinstance(verdict, (int, float)) and not isinstance(verdict, bool)
        if numeric and self._question.low <= verdict <= self._question.high:
            return float(verdict)
        _log.warning("judge: %s holds no verdict %s and is asked for anew", self._file(body), self._range)
        return None

    def _remember(self, body: bytes, found: float) -> None:
        """Writes the verdict to the cache. The file is renamed into place, because several processes may write it.

        A cache that cannot be written costs further requests, never the verdict.
        """
        if self._cache is None:
            return
        file, made = self._file(body), None
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=file.parent, suffix=".part", delete=False) as part:
                made = Path(part.name)
                part.write(json.dumps({"verdict": found}))
            made.replace(file)
        except OSError as error:
            if made is not None:
                made.unlink(missing_ok=True)
            _log.warning("judge: the verdict could not be kept in %s: %s", file, error)


class _Refused(Exception):
    """There is no reply. `may_pass`: whether another attempt may bring one."""

    def __init__(self, said: str, may_pass: bool = True):
        super().__init__(said)
        self.may_pass = may_pass


def _check_endpoint(url: str, key_name: str) -> None:
    """Refuses an endpoint that is no web address, or that would carry a key in the clear.

    Args:
      key_name: the environment variable of the key; empty where no key is sent.

    Raises:
      ValueError: one sentence.
    """
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"judge: endpoint {url!r} must begin with http:// or https:// and name a host")
    if key_name and parts.scheme == "http" and not _is_here(parts.hostname):
        raise ValueError(
            f"judge: endpoint {url!r} would carry the key of {key_name} unencrypted; use https://, or send no key with "
            "key_variable=''"
        )


def _is_here(host: str) -> bool:
    """Returns whether a host's name or address is this host's loopback."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _reply(url: str, body: bytes, key: str, left_s: float) -> object:
    """Sends `body` and returns the JSON that comes back.

    Raises:
      _Refused: no reply within `left_s` seconds, an HTTP error, a redirect, or no JSON.
    """
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    connections, here = _Connections(), _is_here(urllib.parse.urlsplit(url).hostname or "")
    direct = [urllib.request.ProxyHandler({})] if here else []
    opener = urllib.request.build_opener(connections, _NoRedirects(), *direct)
    request = urllib.request.Request(url, body, headers)
    came: list[object] = []

    def ask() -> None:
        try:
            with opener.open(request, timeout=left_s) as answer:
                came.append(json.loads(answer.read(_LARGEST_REPLY)))
        except urllib.error.HTTPError as error:
            with error:
                came.append(_refusal(error))
        except (OSError, http.client.HTTPException, ValueError, RecursionError) as error:
            came.append(_Refused(f"{type(error).__name__}: {error}"[:300]))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(left_s)
    if thread.is_alive():
        connections.cut()
        raise _Refused(f"timed out after {left_s:.3g} s")
    found = came[0] if came else None
    if isinstance(found, _Refused):
        raise found
    return found


def _refusal(error: urllib.error.HTTPError) -> _Refused:
    if 300 <= error.code < 400:
        place = str(error.headers.get("Location", ""))[:200]
        return _Refused(f"HTTP {error.code}, a redirect to {place!r}, which is not followed: name that endpoint", False)
    return _Refused(f"HTTP {error.code}", error.code in _PASSING)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *given):
        return None


class _Connections(urllib.request.HTTPSHandler, urllib.request.HTTPHandler):
    """Opens the connections of one request, and keeps them so that they can be shut down from another thread."""

    def __init__(self):
        super().__init__()
        self._connections: list[http.client.HTTPConnection] = []
        self._sockets: list[socket.socket] = []  # a connection forgets its socket when the body begins
        self._late = False

    def http_open(self, request):
        return self.do_open(self._keeping(http.client.HTTPConnection), request)

    def https_open(self, request):
        return self.do_open(self._keeping(http.client.HTTPSConnection), request)

    def cut(self) -> None:
        """Shuts the connections down, which ends the request unless it waits for a name."""
        self._late = True
        for line in (*self._sockets, *(connection.sock for connection in self._connections)):
            if line is not None:
                with contextlib.suppress(OSError):  # it is closed already
                    line.shutdown(socket.SHUT_RDWR)

    def _keeping(self, kind: type) -> Callable[..., http.client.HTTPConnection]:
        """Returns a maker of connections of this kind that are kept here."""

        def make(*given, **named):
            connection = kind(*given, **named)
            connect = connection.connect

            def kept():
                connect()
                self._sockets.append(connection.sock)
                if self._late:
                    raise TimeoutError("connected after the deadline")

            connection.connect = kept
            self._connections.append(connection)
            return connection

        return make
