"""The options of what scores rollouts: an environment of conversations, or reward functions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxrl_post.config.fields import any_of_type, at_least, file_path, input_path, mapping, one_of

_CONVERSES = "environment.name!="
_IN_PROCESSES = "environment.name!=|harness"
_GRADED, _NOT_GRADED = "environment.name=", "the environment scores its conversations"


@dataclass(frozen=True, kw_only=True)
class EnvironmentConfig:
    """An environment, which speaks between the turns of the policy and scores the conversation (docs/environments.md)."""

    name: str = file_path(
        "",
        doc="A built-in name, or an import path `package.module:name` or `file.py:name`. harness: a program outside plays it "
        "over HTTP. Empty: one turn, no environment.",
    )
    arguments: Mapping[str, Any] = mapping(used_when=_CONVERSES, doc="What the environment is made with.")
    workers: int = at_least(
        1,
        1,
        unit="processes",
        used_when=_IN_PROCESSES,
        why="a harness has processes of its own",
        doc="Processes that play environments.",
    )
    timeout_s: float = at_least(
        10.0, 0.01, unit="seconds", used_when=_CONVERSES, doc="After this long a step of an environment is stopped."
    )
    max_turns: int = at_least(
        8, 1, unit="turns", used_when=_CONVERSES, doc="A conversation ends with its turn of this number."
    )
    max_s: float = at_least(
        0.0,
        0.0,
        unit="seconds",
        used_when=_CONVERSES,
        doc="A conversation whose environment has worked longer than this ends, and its rollout is masked. 0: no limit.",
    )
    delay: int = at_least(
        16,
        0,
        unit="engine steps",
        used_when=_CONVERSES,
        doc="From the end of a turn to the next one. The run waits for an environment that is later.",
    )
    cut_turns: str = one_of(
        "step",
        "step",
        "mask",
        used_when=_CONVERSES,
        doc="What becomes of a turn of training that is cut at `sampling.max_tokens`. step: the environment gets it and may "
        "reward it; the conversation ends. mask: the environment does not see it, and the rollout is masked.",
    )
    tool_calls: str = one_of(
        "none", "none", "hermes", "llama3", "mistral", used_when=_CONVERSES, doc="How tool calls are read from a turn."
    )


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """Graders, which run in processes of their own."""

    functions: tuple[str, ...] = file_path(
        ("jaxrl_post.rewards.math:exact",),
        used_when=_GRADED,
        why=_NOT_GRADED,
        doc="Import paths `package.module:function` or `file.py:function`.",
    )
    weights: tuple[float, ...] = any_of_type(
        (), used_when=_GRADED, why=_NOT_GRADED, doc="Weight of each function in the sum. Empty: all 1."
    )
    model: str = input_path(
        "",
        used_when=_GRADED,
        why=_NOT_GRADED,
        doc="A folder with a reward model, whose score of prompt and rollout is added. It runs on the engine's devices.",
    )
    model_weight: float = at_least(
        1.0, 0.0, unit="reward", used_when="reward.model!=", doc="Weight of the reward model's score in the sum."
    )
    workers: int = at_least(1, 1, unit="processes", used_when=_GRADED, why=_NOT_GRADED, doc="Processes that grade.")
    timeout_s: float = at_least(
        10.0, 0.01, unit="seconds", used_when=_GRADED, why=_NOT_GRADED, doc="After this long a grader is stopped."
    )
    test_limit_s: float = at_least(
        0.0,
        0.0,
        unit="CPU seconds",
        used_when=f"reward.adaptive_limit=false and {_GRADED}",
        doc="What a judged program may take for one test. 0: half of `timeout_s`.",
    )
    adaptive_limit: bool = any_of_type(
        False,
        used_when=_GRADED,
        why=_NOT_GRADED,
        doc="Whether the limit follows what right programs took, from 2 to 30 CPU seconds, as in RollPacker. "
        "A run then repeats itself from its journal only.",
    )
    skip_special_tokens: bool = any_of_type(
        True,
        used_when=_GRADED,
        why=_NOT_GRADED,
        doc="Whether reward functions get texts without the tokens that the tokenizer marks as special. false: with them, such as a "
        "special <think>, but without the one that ends the rollout.",
    )
    sandbox: str = one_of(
        "auto",
        "auto",
        "none",
        "basic",
        "strict",
        used_when=_GRADED,
        why=_NOT_GRADED,
        doc="How judged programs are confined. strict: in namespaces of their own; basic: by Landlock and seccomp; "
        "auto: strict where the host gives it, else basic. A level that the host lacks is refused.",
    )
    shuffle: bool = any_of_type(
        False,
        used_when="algorithm.adv_estimator!=ones|pairs|distill|gdpo",
        why="the advantages 'ones', 'pairs' and 'distill' read no reward, and 'gdpo' its components",
        doc="Whether the scores of a group change hands at random: a control that must learn nothing.",
    )

    @property
    def limit_s(self) -> float:
        """CPU seconds that a test may take at most."""
        return 30.0 if self.adaptive_limit else self.test_limit_s or self.timeout_s / 2
