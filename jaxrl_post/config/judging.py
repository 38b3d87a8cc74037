"""The options of a judge on the engine's devices, and the rules between them and others."""

from __future__ import annotations

from dataclasses import dataclass

from jaxrl_post.config.fields import any_of_type, at_least, file_path
from jaxrl_post.config.relations import relation

_JUDGED = "judge.model!="


@dataclass(frozen=True, kw_only=True)
class JudgeConfig:
    """A policy that is asked about every rollout. It runs on the engine's devices, in slots that are free (docs/judge.md)."""

    model: str = file_path(
        "",
        used_when="environment.name=",
        why="the environment scores its conversations",
        doc="The judge, a Hugging Face directory. Its verdict is added to the reward.",
    )
    question: str = any_of_type(
        "",
        used_when=_JUDGED,
        doc="What it is asked. {answer} stands for the rollout, {task} for the column `task` or the prompt, {truth} for the "
        "ground truth. The verdict is the last line of its greedy reply, 'VERDICT: number'.",
    )
    high: float = at_least(
        1.0,
        1e-9,
        unit="verdict",
        used_when=_JUDGED,
        doc="The highest verdict. The lowest is 0, and others count as none.",
    )
    weight: float = at_least(1.0, 0.0, unit="reward", used_when=_JUDGED, doc="Weight of a verdict in the sum.")
    max_length: int = at_least(
        1024,
        2,
        unit="tokens",
        used_when=_JUDGED,
        doc="Positions of a question and its reply. Rollouts with longer questions stay unscored.",
    )
    max_tokens: int = at_least(64, 1, unit="tokens", used_when=_JUDGED, doc="The longest reply.")
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
