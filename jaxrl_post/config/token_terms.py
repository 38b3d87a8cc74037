"""The options of rules that pick tokens, of on-policy distillation, and of further terms of the loss. AlgorithmConfig has them all."""

from __future__ import annotations

from dataclasses import dataclass

from jaxrl_post.config.fields import any_of_type, file_path, fraction, number, one_of

_NEGATIVE = "algorithm.adv_estimator!=ones|grpo_passk"
_POSITIVE = "others are never negative"
_SUPERVISED = "what supervised losses and gkd train on has no advantage"
_COMPARED = "algorithm.loss_mode!=sft|dpo|ipo|bradley_terry|gkd|gpg"
_GAE = "algorithm.adv_estimator=gae|gae_turn"


@dataclass(frozen=True, kw_only=True)
class TokenTerms:
    """A part of AlgorithmConfig: what few recipes use."""

    neftune_alpha: float = number(
        0.0,
        used_when="algorithm.loss_mode=sft|dpo",
        doc="NEFTune: embeddings get uniform noise of at most this over the root of a text's tokens times its width. 0: none. "
        "5 is usual.",
    )
    center_rewards_coefficient: float = number(
        0.0,
        used_when="algorithm.loss_mode=bradley_terry",
        doc="Weight of the squared sum of a pair's rewards, which draws their mean to 0, as in TRL. 0: no such term.",
    )
    old_kl_coef: float = number(
        0.0,
        used_when="algorithm.loss_mode=dro|dppo_tv|dppo_kl|prime_ipo",
        doc="Weight of half the squared log-ratio to the old policy in the policy loss. It is dro's beta; 0.1 is usual.",
    )
    clip_cov_ratio: float = fraction(
        2e-4,
        unit="share of tokens",
        used_when="algorithm.loss_mode=clip_cov and algorithm.adv_estimator!=ones",
        doc="So many tokens of a round lose their gradient, chosen at random between both bounds of the covariance.",
    )
    clip_cov_lb: float = number(
        1.0,
        used_when="algorithm.loss_mode=clip_cov and algorithm.adv_estimator!=ones",
        doc="The covariance of a token is above this to lose its gradient.",
    )
    clip_cov_ub: float = number(
        5.0,
        used_when="algorithm.loss_mode=clip_cov and algorithm.adv_estimator!=ones",
        doc="The covariance of a token is below this to lose its gradient.",
    )
    kl_cov_ratio: float = fraction(
        2e-4,
        unit="share of tokens",
        used_when="algorithm.loss_mode=kl_cov",
        doc="So many tokens of a round, those of the largest covariances, are held at the old policy.",
    )
    ppo_kl_coef: float = number(
        0.1,
        used_when="algorithm.loss_mode=kl_cov",
        doc="Weight of the absolute log-ratio of such a token in the loss, as verl's ppo_kl_coef.",
    )
    top_entropy_quantile: float = number(
        1.0,
        1e-6,
        1.0,
        unit="share of tokens",
        used_when=f"algorithm.loss_mode!=sft|dpo|ipo|bradley_terry|gkd because {_SUPERVISED}",
        doc="So many tokens of a round, those of the highest entropies, keep their advantage. 1: all; 0.2 is usual.",
    )
    opsm_delta: float = number(
        0.0,
        unit="nats per token",
        used_when=f"{_COMPARED} and {_NEGATIVE} because {_POSITIVE}",
        doc="A rollout of negative advantage leaves the policy loss where the old policy's mean log-prob is more above the "
        "policy's (OPSM). 0: off.",
    )
    use_bias_correction_kl: bool = any_of_type(
        False,
        used_when=f"algorithm.kl_loss_coef>0 and {_COMPARED}",
        doc="Whether the KL in the loss is multiplied by the ratio to the old policy, which makes its gradient unbiased.",
    )
    positive_nll_coef: float = number(
        0.0,
        used_when="algorithm.adv_estimator!=ones|pairs because supervised losses have this term already",
        doc="Weight of the negative log-likelihood of rollouts with a positive reward (VAPO). 0: no such term; 0.1 is usual.",
    )
    router_aux_loss_coef: float = number(
        0.0,
        doc="Weight of the load-balance loss of a model with experts (arXiv 2101.03961 eq. 4), of each sequence by itself as in "
        "DeepSeek-V3 (arXiv 2412.19437 eq. 17). 0: off; 0.001 is usual.",
    )
    router_z_loss_coef: float = number(
        0.0,
        doc="Weight of the squared logsumexp of the routers' scores (arXiv 2202.08906 eq. 5). 0: off; 0.001 is usual.",
    )
    router_replay: bool = any_of_type(
        False,
        doc="Whether the learner uses the experts that the engine recorded for every sampled token, with gates from its own "
        "scores (R3, arXiv 2510.11370). It needs `sampling.keep_routes`.",
    )
    router_replay_reference: bool = any_of_type(
        True,
        used_when="algorithm.router_replay=true",
        doc="Whether the reference uses the recorded experts too. False: those of its own scores.",
    )
    lam_value: float = number(
        -1.0,
        -1.0,
        1.0,
        used_when=_GAE,
        doc="GAE's lambda of the returns that the critic learns. -1: as `lam`; 1 is usual with a `lam` below 1.",
    )
    lam_alpha: float = number(
        0.0,
        used_when=_GAE,
        doc="A rollout of T sampled tokens, or turns, has lambda 1 - 1 / (this T) in its advantages (VAPO). 0: `lam`; 0.05 "
        "is usual.",
    )
    gdpo_reward_keys: tuple[str, ...] = any_of_type(
        (),
        used_when="algorithm.adv_estimator=gdpo",
        doc="The components of the reward that are normalised one by one, by name.",
    )
    gdpo_reward_weights: tuple[float, ...] = any_of_type(
        (),
        used_when="algorithm.adv_estimator=gdpo",
        doc="Weight of each component of `gdpo_reward_keys`. Empty: all are 1.",
    )
    rae_decay: float = number(
        0.95,
        0.0,
        0.9999,
        used_when="algorithm.adv_estimator=rae",
        doc="What the mean reward of a role keeps of itself when a rollout is scored.",
    )


_TEACHER = "algorithm.adv_estimator=distill or algorithm.opd_kl_coef>0"


@dataclass(frozen=True, kw_only=True)
class TeacherTerms:
    """A part of AlgorithmConfig: what is learned from a teacher."""

    opd_kl_coef: float = number(
        0.0,
        used_when="algorithm.adv_estimator!=ones|pairs|distill "
        "because the advantages 'ones' and 'pairs' are not of sampled tokens, and with 'distill' it is 1",
        doc="Weight of on-policy distillation beside rewards: a token's advantage gains this times log teacher - log pi. 0: none.",
    )
    gkd_beta: float = fraction(
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
        "float32|bfloat16",
        used_when=_TEACHER,
        accelerator="bfloat16",
        doc="Number format of its weights. Its activations have that of the learner.",
    )
