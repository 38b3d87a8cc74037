"""The options of what scores rollouts: an environment of conversations, reward functions, and a judge on the engine's devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxrl_post.config.fields import any_of_type, file_path, input_path, mapping, number, one_of, positive
from jaxrl_post.config.relations import relation

_CONVERSES = "environment.name!="
_GRADED = "environment.name= because the environment scores its conversations"


@dataclass(frozen=True, kw_only=True)
class EnvironmentConfig:
    """An environment, which speaks between the turns of the policy and scores the conversation (docs/environments.md)."""

    name: str = file_path(
        "",
        doc="A built-in name, or an import path `package.module:name` or `file.py:name`. harness: a program outside plays it "
        "over HTTP. Empty: one turn, no environment.",
    )
    arguments: Mapping[str, Any] = mapping(used_when=_CONVERSES, doc="What the environment is made with.")
    workers: int = positive(
        1,
        unit="processes",
        used_when="environment.name!=|harness because a harness has processes of its own",
        doc="Processes that play environments.",
    )
    timeout_s: float = number(
        10.0, 0.01, unit="seconds", used_when=_CONVERSES, doc="After this long a step of an environment is stopped."
    )
    max_turns: int = positive(
        8, unit="turns", used_when=_CONVERSES, doc="A conversation ends with its turn of this number."
    )
    max_s: float = number(
        0.0,
        unit="seconds",
        used_when=_CONVERSES,
        doc="A conversation whose environment has worked longer than this ends, and its rollout is masked. 0: no limit.",
    )
    delay: int = number(
        16,
        unit="engine steps",
        used_when=_CONVERSES,
        doc="From the end of a turn to the next one. The run waits for an environment that is later.",
    )
    cut_turns: str = one_of(
        "step|mask",
        used_when=_CONVERSES,
        doc="What becomes of a turn of training that is cut at `sampling.max_tokens`. step: the environment gets it and may "
        "reward it; the conversation ends. mask: the environment does not see it, and the rollout is masked.",
    )
    tool_calls: str = one_of(
        "none|hermes|llama3|mistral|qwen3_coder|gemma4",
        used_when=_CONVERSES,
        doc="How tool calls are read from a turn.",
    )


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """Graders, which run in processes of their own."""

    functions: tuple[str, ...] = file_path(
        ("jaxrl_post.rewards.math:exact",),
        used_when=_GRADED,
        doc="Import paths `package.module:function` or `file.py:function`.",
    )
    weights: tuple[float, ...] = any_of_type(
        (), used_when=_GRADED, doc="Weight of each function in the sum. Empty: all 1."
    )
    model: str = input_path(
        "",
        used_when=_GRADED,
        doc="A folder with a reward model, whose score of prompt and rollout is added. It runs on the engine's devices.",
    )
    model_weight: float = number(
        1.0, unit="reward", used_when="reward.model!=", doc="Weight of the reward model's score in the sum."
    )
    workers: int = positive(1, unit="processes", used_when=_GRADED, doc="Processes that grade.")
    timeout_s: float = number(10.0, 0.01, unit="seconds", used_when=_GRADED, doc="After this long a grader is stopped.")
    test_limit_s: float = number(
        0.0,
        unit="CPU seconds",
        used_when="reward.adaptive_limit=false and environment.name=",
        doc="What a judged program may take for one test. 0: half of `timeout_s`.",
    )
    adaptive_limit: bool = any_of_type(
        False,
        used_when=_GRADED,
        doc="Whether the limit follows what right programs took, from 2 to 30 CPU seconds, as in RollPacker. "
        "A run then repeats itself from its journal only.",
    )
    skip_special_tokens: bool = any_of_type(
        True,
        used_when=_GRADED,
        doc="Whether reward functions get texts without the tokens that the tokenizer marks as special. false: with them, such as a "
        "special <think>, but without the one that ends the rollout.",
    )
    sandbox: str = one_of(
        "auto|none|basic|strict",
        used_when=_GRADED,
        doc="How judged programs are confined. strict: in namespaces of their own; basic: by Landlock and seccomp; "
        "auto: strict where the host gives it, else basic. A level that the host lacks is refused.",
    )
    shuffle: bool = any_of_type(
        False,
        used_when="algorithm.adv_estimator!=ones|pairs|distill|gdpo "
        "because the advantages 'ones', 'pairs' and 'distill' read no reward, and 'gdpo' its components",
        doc="Whether the scores of a group change hands at random: a control that must learn nothing.",
    )

    @property
    def limit_s(self) -> float:
        """CPU seconds that a test may take at most."""
        return 30.0 if self.adaptive_limit else self.test_limit_s or self.timeout_s / 2


_JUDGED = "judge.model!="


@dataclass(frozen=True, kw_only=True)
class JudgeConfig:
    """A policy that is asked about every rollout. It runs on the engine's devices, in slots that are free (docs/judge.md)."""

    model: str = file_path(
        "", used_when=_GRADED, doc="The judge, a Hugging Face directory. Its verdict is added to the reward."
    )
    question: str = any_of_type(
        "",
        used_when=_JUDGED,
        doc="What it is asked. {answer} stands for the rollout, {task} for the column `task` or the prompt, {truth} for the "
        "ground truth. The verdict is the last line of its greedy reply, 'VERDICT: number'.",
    )
    high: float = number(
        1.0,
        1e-9,
        unit="verdict",
        used_when=_JUDGED,
        doc="The highest verdict. The lowest is 0, and others count as none.",
    )
    weight: float = number(1.0, unit="reward", used_when=_JUDGED, doc="Weight of a verdict in the sum.")
    max_length: int = number(
        1024,
        2,
        unit="tokens",
        used_when=_JUDGED,
        doc="Positions of a question and its reply. Rollouts with longer questions stay unscored.",
    )
    max_tokens: int = positive(64, unit="tokens", used_when=_JUDGED, doc="The longest reply.")
    asleep: bool = any_of_type(
        False,
        used_when=_JUDGED,
        doc="Whether its weights wait in host memory. They come to the devices for a batch of questions.",
    )


JUDGING = (
    relation(
        "judge.question",
        when=f"{_JUDGED} and environment.name=",
        need=lambda question: "{answer}" in question,
        says="{judge.question} must say where the rollout goes: it lacks the word answer in braces",
    ),
    relation(
        "judge.model",
        "reward.model",
        when=_JUDGED,
        need=lambda judge, model: not model,
        says="{judge.model} and {reward.model} would both be added to the reward: leave one of them empty",
    ),
    relation(
        "judge.model",
        "scheduler.lend",
        when=_JUDGED,
        need=lambda judge, lend: lend == 0,
        says="{judge.model} lies on every device of the engine, of which {scheduler.lend} lends some to the learner: leave one of "
        "them empty or 0",
    ),
    relation(
        "judge.max_tokens",
        "judge.max_length",
        when=_JUDGED,
        need=lambda tokens, length: tokens < length,
        says="{judge.max_tokens} must be below {judge.max_length}, which holds the question too",
        nearest=lambda tokens, length: length - 1,
    ),
)
