"""The options of on-policy distillation: the teacher, and what AlgorithmConfig has of it."""

from __future__ import annotations

from dataclasses import dataclass

from jaxrl_post.config.fields import at_least, file_path, one_of

_TEACHER = "algorithm.adv_estimator=distill or algorithm.opd_kl_coef>0"


@dataclass(frozen=True, kw_only=True)
class TeacherTerms:
    """A part of AlgorithmConfig: what is learned from a teacher."""

    opd_kl_coef: float = at_least(
        0.0,
        0.0,
        used_when="algorithm.adv_estimator!=ones|pairs|distill",
        why="the advantages 'ones' and 'pairs' are not of sampled tokens, and with 'distill' it is 1",
        doc="Weight of on-policy distillation beside rewards: a token's advantage gains this times log teacher - log pi. 0: none.",
    )
    gkd_beta: float = at_least(
        1.0,
        0.0,
        1.0,
        used_when="algorithm.loss_mode=gkd",
        doc="The divergence from the teacher, as TRL's beta: 1 is the reverse KL, 0 the forward KL, between them a Jensen-Shannon one.",
    )


@dataclass(frozen=True, kw_only=True)
class TeacherConfig:
    """The teacher of on-policy distillation: a frozen model of any size with the policy's tokenizer."""

    path: str = file_path(
        "", used_when=_TEACHER, doc="A Hugging Face directory with its weights and its tokenizer. There must be one."
    )
    dtype: str = one_of(
        "float32",
        "float32",
        "bfloat16",
        used_when=_TEACHER,
        accelerator="bfloat16",
        doc="Number format of its weights. Its activations have that of the learner.",
    )
