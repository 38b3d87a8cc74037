"""The options of training: the algorithm, the optimizer, low-rank additions, the critic, and the micro-batch."""

from __future__ import annotations

from dataclasses import dataclass

from jaxrl_post.config.fields import any_of_type, file_path, fraction, input_path, number, one_of, positive, switch
from jaxrl_post.config.token_terms import TeacherTerms, TokenTerms

_RATIOS = (
    "algorithm.loss_mode!=sft|dpo|ipo|bradley_terry|gkd "
    "because what the data wrote has no log-probs of an engine, and gkd has no ratio"
)
_REWARDED = (
    "algorithm.adv_estimator!=ones|pairs|distill|gdpo "
    "because the advantages 'ones', 'pairs' and 'distill' read no reward, and 'gdpo' reads its components"
)
_NEGATIVE = "algorithm.adv_estimator!=ones|grpo_passk"
_POSITIVE = "others are never negative"


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig(TeacherTerms, TokenTerms):
    """How rewards become a loss, in verl's words. algorithms/PARITY.md says where other projects differ."""

    adv_estimator: str = one_of(
        "grpo|dr_grpo|rloo|opo|maxrl|reinforce_plus_plus|reinforce_plus_plus_baseline|grpo_passk|lite_ppo|gpg|remax|gdpo|rae|optimal_token_baseline|gae|gae_turn|ones|pairs|distill",
        doc="How rewards become advantages. pairs: of preferences, without rewards. distill: of a teacher alone. gae and gae_turn "
        "train a critic. remax takes the last rollout of a group greedily, as its baseline. rae has one for each data source.",
    )
    gamma: float = fraction(
        1.0,
        used_when="algorithm.adv_estimator=reinforce_plus_plus|gae|gae_turn",
        doc="Discount of the return per token, or per turn with gae_turn.",
    )
    lam: float = fraction(
        1.0,
        used_when="algorithm.adv_estimator=gae|gae_turn and algorithm.lam_alpha=0 "
        "or algorithm.adv_estimator=gae|gae_turn and algorithm.lam_value=-1",
        doc="GAE's lambda: 1 sums rewards to the end, 0 looks at the next value alone.",
    )
    loss_mode: str = one_of(
        "vanilla|clip_cov|kl_cov|gspo|cispo|sapo|geo_mean|dppo_tv|dppo_kl|prime_ipo|gpg|dro|topr|luspo|vespo|sft|dpo|ipo|bradley_terry|gkd",
        doc="The policy loss. `vanilla` is PPO's clipped loss, `geo_mean` is GMPO. dpo and ipo compare pairs of preferences, and "
        "bradley_terry trains a reward model on them. gkd compares whole laws with a teacher's.",
    )
    dpo_beta: float = number(
        0.1,
        1e-6,
        used_when="algorithm.loss_mode=dpo|ipo",
        doc="How strongly preferences hold the policy at its reference, as TRL's beta.",
    )
    label_smoothing: float = number(
        0.0,
        0.0,
        0.5,
        used_when="algorithm.loss_mode=dpo",
        doc="The probability that a preference is the wrong way round.",
    )
    loss_agg_mode: str = one_of(
        "token-mean|seq-mean-token-mean|seq-mean-token-sum|seq-mean-token-sum-norm|prompt-mean",
        doc="How the losses of tokens become one number.",
    )
    clip_ratio_low: float = number(
        0.2,
        used_when="algorithm.loss_mode=cispo|prime_ipo or "
        f"algorithm.loss_mode=vanilla|clip_cov|gspo|luspo|geo_mean|dppo_tv|dppo_kl and {_NEGATIVE}",
        doc="The ratio is clipped below 1 minus this. geo_mean bounds its logarithm, dppo the change of the probability.",
    )
    clip_ratio_high: float = number(
        0.2,
        used_when="algorithm.loss_mode=vanilla|clip_cov|gspo|luspo|cispo|geo_mean|dppo_tv|dppo_kl|prime_ipo",
        doc="The ratio is clipped above 1 plus this. geo_mean bounds its logarithm, dppo the change of the probability.",
    )
    clip_ratio_c: float = number(
        0.0,
        used_when="algorithm.loss_mode=dppo_tv|dppo_kl|prime_ipo "
        f"or algorithm.loss_mode=vanilla and {_NEGATIVE} because {_POSITIVE}",
        doc="Dual clip: the largest ratio of a token with a negative advantage. 0: off, else above 1; 3 is usual. With "
        "dppo the largest ratio of any token; 20 is usual.",
    )
    tau_pos: float = number(
        1.0, 1e-3, used_when="algorithm.loss_mode=sapo", doc="Temperature of the gate where the advantage is positive."
    )
    tau_neg: float = number(
        1.05,
        1e-3,
        used_when=f"algorithm.loss_mode=sapo and {_NEGATIVE} because {_POSITIVE}",
        doc="Temperature of the gate where the advantage is not positive.",
    )
    kl_loss_type: str = one_of(
        "k1|k2|k3|abs|k1+|k3+",
        default="k3",
        used_when="algorithm.kl_loss_coef>0",
        doc="Estimator of the KL to the reference in the loss. k1+ and k3+ have the gradient of k2.",
    )
    kl_loss_coef: float = number(0.0, doc="Weight of the KL to the reference in the loss. 0: no such term.")
    use_kl_in_reward: bool = any_of_type(
        False,
        used_when=_REWARDED,
        doc="Whether the reward of every token loses `kl_coef` times the k1 estimate of the KL to the reference.",
    )
    kl_coef: float = number(0.001, used_when="algorithm.use_kl_in_reward=true", doc="Weight of the KL in the reward.")
    kl_target: float = number(
        0.0,
        unit="nats per token",
        used_when="algorithm.use_kl_in_reward=true",
        doc="The KL to which `kl_coef` is moved after every optimizer step, as InstructGPT's. 0: it stays.",
    )
    kl_horizon: float = number(
        10000.0,
        1.0,
        unit="rollouts",
        used_when="algorithm.kl_target>0",
        doc="Over so many rollouts `kl_coef` changes by a fifth at most.",
    )
    entropy_coef: float = number(0.0, doc="Weight of the entropy bonus in the loss. 0: none.")
    rollout_is: str = one_of(
        "none|token|span|sequence",
        used_when=_RATIOS,
        doc="Importance weights pi_old / mu between learner and engine: per token, span of one version, or rollout.",
    )
    rollout_is_threshold: tuple[float, ...] = any_of_type(
        (2.0,),
        used_when="algorithm.rollout_is!=none",
        doc="[upper] truncates importance weights. [lower, upper] sets weights outside of it to 0.",
    )
    rollout_rs: str = one_of(
        "none|token_k1|token_k2|token_k3|seq_sum_k1|seq_sum_k2|seq_sum_k3|seq_mean_k1|seq_mean_k2|seq_mean_k3|seq_max_k2|seq_max_k3|m2po",
        used_when=_RATIOS,
        doc="Rejects tokens or rollouts on which learner and engine differ too much: the level and the KL estimator. m2po "
        "rejects the worst tokens of a round.",
    )
    rollout_rs_threshold: tuple[float, ...] = any_of_type(
        (2.0,),
        used_when="algorithm.rollout_rs!=none",
        doc="[upper] bound of the divergence. For k1 it bounds the ratio, and [lower, upper] is allowed. For m2po it bounds "
        "the mean squared log-ratio of what is kept; 0.04 is usual.",
    )
    prox_logp_method: str = one_of(
        "recompute|rollout|loglinear",
        used_when="algorithm.loss_mode!=sft|dpo|ipo|bradley_terry|gkd|gpg|topr or algorithm.loss_mode=topr "
        f"and {_NEGATIVE} because others read none",
        doc="What gives pi_old: the learner's own pass, the engine's log-probs, or a point between both by how old a token is "
        "(A-3PO).",
    )
    min_ess: float = fraction(
        0.0,
        unit="share of tokens",
        used_when=_RATIOS,
        doc="A batch with a smaller effective sample size does not move the weights. 0: no bound.",
    )
    max_rollout_kl: float = number(
        0.0,
        unit="nats per token",
        used_when=_RATIOS,
        doc="A batch with a larger KL between engine and learner does not move the weights. 0: no bound.",
    )
    overlong_buffer: int = number(
        0,
        unit="tokens",
        used_when=_REWARDED,
        doc="The reward sinks over this many tokens before sampling.max_tokens. 0: no penalty.",
    )
    overlong_penalty: float = number(
        1.0,
        unit="reward",
        used_when="algorithm.overlong_buffer>0",
        doc="What the reward has lost at sampling.max_tokens.",
    )
    overlong_filtering: bool = any_of_type(
        False, doc="Whether rollouts that are cut at sampling.max_tokens leave the loss. They stay in the baseline."
    )

    @property
    def needs_critic(self) -> bool:
        """Whether advantages come from a critic's values."""
        return self.adv_estimator.startswith("gae")

    @property
    def needs_reference(self) -> bool:
        return self.kl_loss_coef > 0 or self.use_kl_in_reward or (self.compares_pairs and not self.trains_reward_model)

    @property
    def needs_score_norms(self) -> bool:
        """Whether advantages come from the norms of tokens' scores."""
        return self.adv_estimator == "optimal_token_baseline"

    @property
    def routes_cost(self) -> bool:
        """Whether the loss has a term about routers."""
        return self.router_aux_loss_coef > 0 or self.router_z_loss_coef > 0

    @property
    def marks(self) -> tuple[str, ...]:
        """The leaves of a batch that mark tokens for a further term of the loss (trainer/packing.py)."""
        there = {"positives": self.positive_nll_coef > 0, "held": self.loss_mode == "kl_cov"}
        return tuple(name for name, needed in there.items() if needed)

    @property
    def teacher_coef(self) -> float:
        """Weight of a teacher in the advantage. The loss gkd has it instead."""
        return self.opd_kl_coef if self.adv_estimator != "distill" else float(self.loss_mode != "gkd")

    @property
    def needs_teacher(self) -> bool:
        return self.teacher_coef > 0 or self.loss_mode == "gkd"

    @property
    def compares_pairs(self) -> bool:
        """Whether groups are pairs of preferences."""
        return self.adv_estimator == "pairs"

    @property
    def trains_reward_model(self) -> bool:
        """Whether the model is a reward model, which writes no tokens."""
        return self.loss_mode == "bradley_terry"

    @property
    def corrects_rollouts(self) -> bool:
        """Whether the host weighs tokens by pi_old / mu, which it must have for that."""
        return self.prox_logp_method == "recompute" and (self.rollout_is != "none" or self.rollout_rs != "none")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW. Norms, biases and other vectors are not decayed."""

    lr: float = number(
        1e-6,
        doc="The largest learning rate. 1e-6 is for all weights of models from 0.5B on; small policies and low-rank additions "
        "take 1e-4 or more.",
    )
    schedule: str = one_of(
        "constant|cosine|linear", doc="The course of the learning rate from the end of the warm-up to the last step."
    )
    warmup_steps: int = number(0, unit="optimizer steps", doc="The learning rate rises over these first steps.")
    final_lr_ratio: float = fraction(
        0.1, unit="share of lr", used_when="optimizer.schedule=cosine|linear", doc="The learning rate at the last step."
    )
    b1: float = number(0.9, 0.0, 0.9999, doc="Decay of Adam's first moment.")
    b2: float = number(0.95, 0.0, 0.9999, doc="Decay of Adam's second moment.")
    eps: float = number(1e-8, doc="Added to the root of Adam's second moment.")
    weight_decay: float = number(0.0, doc="Decoupled decay of matrices, times the learning rate. 0: none.")
    max_grad_norm: float = number(1.0, doc="The gradient is clipped to this global norm. 0: no clipping.")
    moments_dtype: str = one_of("float32|bfloat16", doc="Number format in which both moments are kept between steps.")
    sums_dtype: str = one_of(
        "float32|bfloat16", doc="Number format of the gradient sums over the micro-batches of a step."
    )


_ADDED = "lora.rank>0"


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """LoRA (arXiv 2106.09685), in PEFT's words: low-rank additions are trained and the model's weights stay frozen.

    There is no dropout: the engine's log-probs are those of the whole policy.
    """

    rank: int = number(0, 0, 1024, doc="Rank of every addition. 0: all weights are trained.")
    alpha: float = number(
        16.0,
        1e-3,
        1e6,
        used_when=_ADDED,
        doc="An addition is scaled by this over `rank`, or over its root with `rslora`.",
    )
    targets: tuple[str, ...] = any_of_type(
        ("all-linear",),
        used_when=_ADDED,
        doc="The matrices that have one, by PEFT's names: q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj, and those of "
        "layers with a gated delta rule, such as in_proj_qkv. all-linear: all that the model has.",
    )
    rslora: bool = any_of_type(
        False, used_when=_ADDED, doc="Whether the scale is alpha over the root of the rank (rsLoRA, arXiv 2312.03732)."
    )
    base_dtype: str = one_of(
        "float32|bfloat16",
        used_when=_ADDED,
        accelerator="bfloat16",
        doc="Number format of the frozen weights. The engine shares those without additions where its own is the same.",
    )
    adapter: str = input_path(
        "", used_when=_ADDED, doc="A directory of PEFT to start from. Empty: A is random and B is 0, as in PEFT."
    )


_CRITIC = "algorithm.adv_estimator=gae|gae_turn"


@dataclass(frozen=True, kw_only=True)
class CriticConfig:
    """The critic of algorithm.adv_estimator gae and gae_turn: a value of the state before every token."""

    trunk: str = one_of(
        "own|policy",
        used_when=_CRITIC,
        doc="What the scalar head reads. own: a decoder of its own, of the policy's shape. policy: the policy's last layer, "
        "whose weights then learn values too.",
    )
    path: str = file_path(
        "",
        used_when=f"{_CRITIC} and critic.trunk=own",
        doc="A Hugging Face directory with the weights that the decoder starts from. Empty: the policy's. The head starts "
        "at 0.",
    )
    lr: float = number(1e-5, used_when=_CRITIC, doc="As optimizer.lr. All else is as the section optimizer says.")
    warmup_steps: int = number(
        0,
        unit="optimizer steps",
        used_when=_CRITIC,
        doc="The policy stands still over these first steps, and the critic alone learns.",
    )
    cliprange_value: float = number(
        0.5,
        unit="reward",
        used_when=_CRITIC,
        doc="A value is clipped to this distance from that of the round's start, where the loss is then larger. 0: off.",
    )
    loss_coef: float = number(
        0.5,
        used_when=f"{_CRITIC} and critic.trunk=policy",
        doc="Weight of the critic's loss in the gradient of the policy's weights.",
    )


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """The micro-batch: packed sequences of one shape."""

    rows: int = positive(8, unit="rows", doc="Packed sequences of one micro-batch.")
    tokens: int = number(512, 2, unit="tokens", doc="Length of one packed sequence.")
    head_chunk: int = positive(1024, unit="tokens", doc="Tokens whose logits exist at the same time.")
    split_head: str = switch(
        used_when="mesh.fsdp>1 or mesh.tensor>1 because one part is nothing to split",
        doc="Whether the head stays split over the vocabulary, on all devices of mesh.fsdp x mesh.tensor. "
        "auto: yes, except on a CPU.",
    )
    shared_prompts: bool = any_of_type(
        False,
        doc="Whether a packed row holds a prompt once for all rollouts of its group, and turns that conversations share. "
        "The gradient is that of rows that share nothing, to rounding. A step packs whichever takes fewer rows.",
    )
