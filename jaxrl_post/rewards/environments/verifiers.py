"""An adapter for environments of the verifiers library, by their methods alone: the library itself is not imported here.

It takes a MultiTurnEnv as version 0.1 has them, sync or async:

- setup_state(state), where there is one
- is_completed(messages, state) -> bool
- env_response(messages, state) -> messages, or (messages, state)
- rubric.score_rollout(prompt, completion, answer, state, ...) -> an object with `reward` and `metrics`
- oai_tools, the JSON schemas of tools, where there are some

Rows have the columns of its data sets: prompt (messages), answer, and where they are used info and task.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl_post.rewards.batched import accepted, waited


class Adapter:
    """An environment over one of verifiers.

    Args:
      load: import path `module:function` of what returns it, usually `package:load_environment`.
      options: arguments of that function.

    Raises:
      ValueError: the path is not of that form.
    """

    def __init__(self, load: str, options: Mapping[str, Any] | None = None):
        module, colon, name = load.partition(":")
        if not colon:
            raise ValueError(f"environment.arguments: load={load!r} must be written module:function")
        self._environment = getattr(importlib.import_module(module), name)(**dict(options or {}))
        self.tools = tuple(getattr(self._environment, "oai_tools", None) or ())

    def reset(self, row: Mapping) -> list[dict]:
        """Returns the prompt of the row."""
        prompt = row["prompt"]
        self._prompt = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(m) for m in prompt]
        state = {
            "prompt": list(self._prompt),
            "completion": [],
            "answer": row.get("answer", ""),
            "task": row.get("task", "default"),
            "info": row.get("info", {}),
            "responses": [],
            "turn": 0,
        }
        setup = getattr(self._environment, "setup_state", None)
        self._state = (waited(setup(state)) if setup else None) or state
        return self._prompt

    def step(self, messages: Sequence[Mapping]) -> tuple[list[dict], float, bool, dict]:
        """Returns what the environment responds, or at the end the score of its rubric."""
        said, state = [dict(message) for message in messages], self._state
        state["turn"] += 1
        state["responses"].append(said[-1])
        state["completion"] = said[len(self._prompt) :]
        most = getattr(self._environment, "max_turns", 0) or 0
        if waited(self._environment.is_completed(said, state)) or 0 < most <= state["turn"]:
            reward, metrics = self._score(state)
            return [], reward, True, metrics
        response = waited(self._environment.env_response(said, state))
        if isinstance(response, tuple):
            response, self._state = response
        return [dict(message) for message in response], 0.0, False, {}

    def _score(self, state: Mapping) -> tuple[float, dict]:
        """Returns what the rubric gives for the whole conversation."""
        score = self._environment.rubric.score_rollout
        given = {name: state[name] for name in ("prompt", "completion", "answer", "task", "info")} | {"state": state}
        found = waited(score(**accepted(inspect.signature(score), given)))
        return float(found.reward), dict(getattr(found, "metrics", None) or {})
