"""A model as judge: scores from any endpoint with OpenAI's chat completions, requested in a reward process.

Write a file that makes a judge, and name it in the config:

    from jaxrl_post.rewards.judge import Judge
    score = Judge("http://localhost:8000/v1", model="qwen2.5-7b-instruct",
                  question="Task: {task}\\nAnswer: {answer}\\nReference: {truth}\\nIs it right? End with VERDICT: 0 or 1.")

The option is reward.functions = ("file.py:score",). The verdict is the last line of the reply, "VERDICT: number" and
nothing else. A judge fails if it cannot be reached, or if its replies repeatedly have no verdict. It then raises, so
the rollout is unscored and counted, never scored 0. Repeated questions are served from a cache.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

_VERDICT = re.compile(r"VERDICT: (-?\d+(?:\.\d+)?)")
_PLACES = re.compile(r"\{(?:task|answer|truth)\}")
_PAUSE_S = 0.2  # before the second attempt; twice as long before each further one
_LARGEST_REPLY = 1 << 20  # bytes
_PASSING = (408, 425, 429, 500, 502, 503, 504)  # HTTP errors that may pass


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
          deadline_s: seconds for all attempts together. Keep it below reward.timeout_s.
          attempts: at most this many, at least 1. Only failures that may pass are tried again: no connection, a busy
            server, a reply without a verdict.
          cache: folder of verdicts, by request. None: no cache.
          key_variable: environment variable with the API key. Without a key, no Authorization header is sent.

        Raises:
          ValueError: endpoint, attempts, deadline_s, low and high, or question are invalid.
        """
        if not endpoint.startswith(("http://", "https://")):
            raise ValueError(f"judge: endpoint {endpoint!r} must begin with http:// or https://")
        if attempts < 1 or not deadline_s > 0 or not low < high:
            raise ValueError(
                f"judge: attempts={attempts} must be at least 1, deadline_s={deadline_s} above 0 and low={low} below "
                f"high={high}"
            )
        if "{answer}" not in question:
            raise ValueError("judge: the question does not say where {answer} goes")
        self._url, self._model, self._question = endpoint.rstrip("/") + "/chat/completions", model, question
        self._low, self._high, self._deadline_s, self._attempts = low, high, deadline_s, attempts
        self._cache = None if cache is None else Path(cache)
        self._key, self._now, self._sleep = os.environ.get(key_variable, ""), now, sleep

    def __call__(self, data_source: str, solution_str: str, ground_truth: str, extra_info: dict) -> float:
        """Returns the verdict for one rollout, from the cache if the same request is in it.

        Raises:
          Undecided: no verdict within the deadline and the attempts.
          ValueError: the question contains {task}, and the row has no task.
        """
        if "{task}" in self._question and "task" not in extra_info:
            raise ValueError(
                f'judge: the question holds {{task}}, and extra_info has no "task" but {sorted(extra_info)}'
            )
        told = {"{task}": str(extra_info.get("task")), "{answer}": solution_str, "{truth}": ground_truth}
        question = _PLACES.sub(lambda place: told[place[0]], self._question)  # one pass: inserted text is not searched
        body = json.dumps(
            {"model": self._model, "temperature": 0, "messages": [{"role": "user", "content": question}]},
            sort_keys=True,
        ).encode()
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
                found, said = self._verdict(self._reply(body, left))
            except urllib.error.HTTPError as error:
                with error:
                    found, said = None, f"HTTP {error.code}"
                if error.code not in _PASSING:
                    break
            except (OSError, http.client.HTTPException, json.JSONDecodeError) as error:
                found, said = None, f"{type(error).__name__}: {error}"
            if found is not None:
                return found
        raise Undecided(
            f"judge {self._url}: no verdict within {self._deadline_s:g} s and {self._attempts} attempts; the last "
            f"one brought {said}"
        )

    def _reply(self, body: bytes, left: float) -> object:
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self._key}"} if self._key else {})
        with urllib.request.urlopen(urllib.request.Request(self._url, body, headers), timeout=left) as answer:
            return json.loads(answer.read(_LARGEST_REPLY))

    def _verdict(self, reply: object) -> tuple[float | None, str]:
        """Returns the number in the reply's last line if that line is a verdict and nothing else, and the reply."""
        try:
            text = reply["choices"][0]["message"]["content"]
            lines = text.strip().splitlines()
        except (TypeError, KeyError, IndexError, AttributeError):
            return None, f"a reply without choices[0].message.content: {str(reply)[:200]}"
        match = _VERDICT.fullmatch(lines[-1].strip()) if lines else None
        if match is None or not self._low <= float(match[1]) <= self._high:
            return (
                None,
                f"{text[-200:]!r}, whose last line is no 'VERDICT: number' from {self._low:g} to {self._high:g}",
            )
        return float(match[1]), text

    def _file(self, body: bytes) -> Path:
        name = hashlib.sha256(self._url.encode() + b"\n" + body).hexdigest()
        return self._cache / name[:2] / f"{name}.json"

    def _known(self, body: bytes) -> float | None:
        if self._cache is None or not self._file(body).is_file():
            return None
        return float(json.loads(self._file(body).read_text())["verdict"])

    def _remember(self, body: bytes, found: float) -> None:
        """Writes the verdict to the cache. The file is renamed into place, because several processes may write it."""
        if self._cache is not None:
            file = self._file(body)
            file.parent.mkdir(parents=True, exist_ok=True)
            part = file.with_suffix(f".{os.getpid()}")
            part.write_text(json.dumps({"verdict": found}))
            part.replace(file)
