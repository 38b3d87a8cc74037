"""Options of verl, TRL and OpenRLHF by their own names, and what is set here instead.

One table feeds the error on an unknown name and the page docs/coming_from.md:

  python -m jaxrl_post.config.reference coming_from > docs/coming_from.md

Sources: verl's trainer/config/_generated_ppo_trainer.yaml (commit 035682e), GRPOConfig of TRL 1.16 with transformers'
TrainingArguments, and the flags of OpenRLHF's train_ppo_ray.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

VERL, TRL, OPENRLHF = "verl", "TRL", "OpenRLHF"


@dataclass(frozen=True)
class Known:
    """A name of another framework.

    `ours`: options and flags here; none where nothing of the kind is set. `note`: how the value changes, or why there is
    nothing to set.
    """

    framework: str
    name: str
    ours: tuple[str, ...]
    note: str

    def words(self) -> str:
        """Returns the answer as a part of a sentence."""
        if not self.ours:
            return f"{self.framework}'s {self.name} has no option here: {self.note}"
        verb = "is" if len(self.ours) == 1 else "becomes"
        return f"{self.framework}'s {self.name} {verb} {' and '.join(self.ours)} here" + (
            f" ({self.note})" if self.note else ""
        )


_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_LENGTH = "it holds prompt and rollout together"
_DERIVED = "it follows from scheduler.prompts, scheduler.group_size and batch"
_EPOCHS = "counted in optimizer steps"
_ITSELF = "weights and pages share the device by the memory plan; --dry-run prints it"

# name -> options here, divided by spaces, and behind a bar a note
_TABLE: dict[str, dict[str, str]] = {
    VERL: {
        "data.train_files": "data.train data.sources | one file, or task:NAME; of several files data.sources",
        "data.val_files": "eval.data | one file, or task:NAME",
        "data.prompt_key": "data.columns | {'prompt': NAME}",
        "data.reward_fn_key": "data.columns | {'source': NAME}",
        "data.train_batch_size": "scheduler.prompts",
        "data.val_batch_size": "eval.prompts",
        "data.max_prompt_length": f"engine.max_length | {_LENGTH}",
        "data.max_response_length": "sampling.max_tokens",
        "data.filter_overlong_prompts": "data.overlong | 'drop'",
        "data.apply_chat_template_kwargs": "data.chat_template_kwargs",
        "data.truncation": "data.overlong | error: 'refuse', left: 'cut'",
        "actor_rollout_ref.model.path": "model.path",
        "actor_rollout_ref.model.lora_rank": "lora.rank",
        "actor_rollout_ref.model.lora_alpha": "lora.alpha",
        "actor_rollout_ref.model.target_modules": "lora.targets",
        "actor_rollout_ref.model.lora_adapter_path": "lora.adapter",
        "actor_rollout_ref.model.enable_gradient_checkpointing": "model.remat",
        "actor_rollout_ref.model.enable_activation_offload": "model.remat_policy | 'offload'",
        f"{_ACTOR}.ppo_mini_batch_size": "scheduler.mini_batches | train_batch_size / ppo_mini_batch_size",
        f"{_ACTOR}.ppo_micro_batch_size_per_gpu": "batch.rows batch.tokens | packed rows of all devices",
        f"{_ACTOR}.ppo_max_token_len_per_gpu": "batch.tokens",
        f"{_ACTOR}.use_dynamic_bsz": "| rows are always packed",
        f"{_ACTOR}.use_prefix_grouper": "batch.shared_prompts",
        f"{_ACTOR}.ppo_epochs": "scheduler.ppo_epochs",
        f"{_ACTOR}.grad_clip": "optimizer.max_grad_norm",
        f"{_ACTOR}.clip_ratio": "algorithm.clip_ratio_low algorithm.clip_ratio_high",
        f"{_ACTOR}.clip_ratio_low": "algorithm.clip_ratio_low",
        f"{_ACTOR}.clip_ratio_high": "algorithm.clip_ratio_high",
        f"{_ACTOR}.clip_ratio_c": "algorithm.clip_ratio_c",
        f"{_ACTOR}.loss_agg_mode": "algorithm.loss_agg_mode",
        f"{_ACTOR}.entropy_coeff": "algorithm.entropy_coef",
        f"{_ACTOR}.use_kl_loss": "algorithm.kl_loss_coef | 0 is off",
        f"{_ACTOR}.kl_loss_coef": "algorithm.kl_loss_coef",
        f"{_ACTOR}.kl_loss_type": "algorithm.kl_loss_type | low_var_kl: 'k3'",
        f"{_ACTOR}.policy_loss.loss_mode": "algorithm.loss_mode",
        f"{_ACTOR}.policy_loss.clip_cov_ratio": "algorithm.clip_cov_ratio",
        f"{_ACTOR}.policy_loss.clip_cov_lb": "algorithm.clip_cov_lb",
        f"{_ACTOR}.policy_loss.clip_cov_ub": "algorithm.clip_cov_ub",
        f"{_ACTOR}.policy_loss.kl_cov_ratio": "algorithm.kl_cov_ratio",
        f"{_ACTOR}.policy_loss.ppo_kl_coef": "algorithm.ppo_kl_coef",
        "algorithm.gdpo_reward_keys": "algorithm.gdpo_reward_keys",
        "algorithm.gdpo_reward_weights": "algorithm.gdpo_reward_weights",
        f"{_ACTOR}.optim.lr": "optimizer.lr",
        f"{_ACTOR}.optim.lr_warmup_steps": "optimizer.warmup_steps",
        f"{_ACTOR}.optim.lr_warmup_steps_ratio": "optimizer.warmup_steps | in optimizer steps",
        f"{_ACTOR}.optim.lr_scheduler_type": "optimizer.schedule",
        f"{_ACTOR}.optim.min_lr_ratio": "optimizer.final_lr_ratio",
        f"{_ACTOR}.optim.weight_decay": "optimizer.weight_decay",
        f"{_ACTOR}.fsdp_config.fsdp_size": "mesh.fsdp",
        f"{_ACTOR}.ulysses_sequence_parallel_size": "mesh.context | devices of mesh.fsdp that share rows",
        f"{_ACTOR}.megatron.context_parallel_size": "mesh.context | devices of mesh.fsdp that share rows",
        f"{_ROLLOUT}.n": "scheduler.group_size",
        f"{_ROLLOUT}.temperature": "sampling.temperature",
        f"{_ROLLOUT}.top_k": "sampling.top_k",
        f"{_ROLLOUT}.top_p": "sampling.top_p | below 1 it needs a sampling.top_k, or sampling.keep_mask=False",
        f"{_ROLLOUT}.response_length": "sampling.max_tokens",
        f"{_ROLLOUT}.max_model_len": "engine.max_length",
        f"{_ROLLOUT}.max_num_seqs": "engine.slots",
        f"{_ROLLOUT}.max_num_batched_tokens": "engine.row_sizes engine.prompt_rows",
        f"{_ROLLOUT}.gpu_memory_utilization": f"engine.pages | {_ITSELF}",
        f"{_ROLLOUT}.free_cache_engine": "engine.sleep",
        f"{_ROLLOUT}.quantization": "engine.weights engine.kv",
        f"{_ROLLOUT}.tensor_model_parallel_size": "mesh.engine_tensor",
        f"{_ROLLOUT}.val_kwargs.n": "eval.samples",
        f"{_ROLLOUT}.val_kwargs.temperature": "eval.temperature",
        f"{_ROLLOUT}.val_kwargs.top_p": "eval.top_p",
        f"{_ROLLOUT}.val_kwargs.do_sample": "| every evaluation has a greedy rollout and eval.samples sampled ones",
        "algorithm.lam": "algorithm.lam | with algorithm.adv_estimator='gae'",
        "algorithm.kl_ctrl.type": "algorithm.kl_target | adaptive: above 0, fixed: 0",
        "algorithm.kl_ctrl.kl_coef": "algorithm.kl_coef | with algorithm.use_kl_in_reward",
        "algorithm.kl_ctrl.target_kl": "algorithm.kl_target",
        "algorithm.kl_ctrl.horizon": "algorithm.kl_horizon",
        "critic.model.path": "critic.path | empty: the policy's weights",
        "critic.optim.lr": "critic.lr",
        "critic.cliprange_value": "critic.cliprange_value",
        "critic.ppo_epochs": "scheduler.ppo_epochs | of policy and critic alike",
        "critic.ppo_mini_batch_size": "scheduler.mini_batches | of policy and critic alike",
        "critic.grad_clip": "optimizer.max_grad_norm | of policy and critic alike",
        "critic.loss_agg_mode": "algorithm.loss_agg_mode | of policy and critic alike",
        "trainer.critic_warmup": f"critic.warmup_steps | {_EPOCHS}",
        "algorithm.kl_penalty": "| the KL in the reward is the k1 estimate, verl's 'kl'",
        "algorithm.norm_adv_by_std_in_grpo": "algorithm.adv_estimator | false: 'dr_grpo'",
        "algorithm.filter_groups.enable": "scheduler.filter_groups",
        "algorithm.filter_groups.metric": "scheduler.filter_metric | 'seq_final_reward' is refused: the learner alone knows the KL",
        "algorithm.filter_groups.max_num_gen_batches": "scheduler.max_waves",
        "algorithm.rollout_correction.rollout_is": "algorithm.rollout_is",
        "algorithm.rollout_correction.rollout_is_threshold": "algorithm.rollout_is_threshold",
        "algorithm.rollout_correction.rollout_rs": "algorithm.rollout_rs",
        "reward_model.overlong_buffer.len": "algorithm.overlong_buffer",
        "reward_model.overlong_buffer.penalty_factor": "algorithm.overlong_penalty",
        "custom_reward_function.path": "reward.functions | ('FILE.py:NAME',)",
        "custom_reward_function.name": "reward.functions | ('FILE.py:NAME',)",
        "trainer.total_training_steps": f"steps | {_EPOCHS}",
        "trainer.total_epochs": f"steps | {_EPOCHS}",
        "trainer.experiment_name": "name",
        "trainer.default_local_dir": "run_dir",
        "trainer.n_gpus_per_node": "mesh.data mesh.fsdp mesh.tensor mesh.engine | their devices",
        "trainer.nnodes": "mesh.data mesh.fsdp mesh.tensor mesh.engine | their devices, of all hosts",
        "trainer.save_freq": f"checkpoint.every | {_EPOCHS}",
        "trainer.max_actor_ckpt_to_keep": "checkpoint.keep_last",
        "trainer.test_freq": f"eval.every | {_EPOCHS}",
        "trainer.val_before_train": "| a run always evaluates before and after, where eval.prompts is above 0",
        "trainer.resume_mode": "--resume | --resume=RUN",
    },
    TRL: {
        "model_name_or_path": "model.path",
        "dataset_name": "data.train | a local file",
        "datasets": "data.sources | local files",
        "output_dir": "run_dir",
        "run_name": "name",
        "max_steps": "steps",
        "num_train_epochs": f"steps | {_EPOCHS}",
        "learning_rate": "optimizer.lr",
        "lr_scheduler_type": "optimizer.schedule",
        "warmup_ratio": "optimizer.warmup_steps | in optimizer steps",
        "adam_beta1": "optimizer.b1",
        "adam_beta2": "optimizer.b2",
        "adam_epsilon": "optimizer.eps",
        "per_device_train_batch_size": "batch.rows batch.tokens | packed rows of all devices",
        "per_device_eval_batch_size": "engine.slots",
        "gradient_accumulation_steps": f"| {_DERIVED}",
        "use_peft": "lora.rank | above 0",
        "lora_r": "lora.rank",
        "lora_alpha": "lora.alpha",
        "lora_dropout": "| no dropout: log-probs are those of the whole policy",
        "lora_target_modules": "lora.targets",
        "use_rslora": "lora.rslora",
        "gradient_checkpointing": "model.remat",
        "bf16": "model.compute_dtype engine.dtype | 'bfloat16', the default on accelerators",
        "eval_steps": "eval.every",
        "save_steps": "checkpoint.every",
        "save_total_limit": "checkpoint.keep_last",
        "resume_from_checkpoint": "--resume | --resume=RUN",
        "chat_template_kwargs": "data.chat_template_kwargs",
        "assistant_only_loss": "data.assistant_only_loss | with a chat template that has generation marks",
        "packing": "batch.rows batch.tokens | rows are always packed",
        "num_generations": "scheduler.group_size",
        "num_generations_eval": "eval.samples",
        "generation_batch_size": "scheduler.prompts scheduler.group_size | their product",
        "steps_per_generation": "scheduler.mini_batches",
        "num_iterations": "scheduler.ppo_epochs",
        "max_prompt_length": f"engine.max_length | {_LENGTH}",
        "max_completion_length": "sampling.max_tokens",
        "temperature": "sampling.temperature",
        "min_p": "| cut the law by sampling.top_p or sampling.top_k",
        "repetition_penalty": "| the policy's own law is sampled",
        "beta": "algorithm.kl_loss_coef",
        "label_smoothing": "algorithm.label_smoothing",
        "precompute_ref_log_probs": "| computed at the start of each round",
        "epsilon": "algorithm.clip_ratio_low algorithm.clip_ratio_high",
        "epsilon_high": "algorithm.clip_ratio_high | one less with loss_type cispo",
        "delta": "algorithm.clip_ratio_c",
        "loss_type": "algorithm.loss_mode algorithm.loss_agg_mode | bnpo and dapo: 'token-mean', grpo: 'seq-mean-token-mean'",
        "scale_rewards": "algorithm.adv_estimator | 'group': 'grpo', 'none': 'dr_grpo'",
        "importance_sampling_level": "algorithm.loss_mode | 'sequence': 'gspo'",
        "top_entropy_quantile": "algorithm.top_entropy_quantile",
        "use_bias_correction_kl": "algorithm.use_bias_correction_kl",
        "off_policy_mask_threshold": "algorithm.opsm_delta",
        "mask_truncated_completions": "algorithm.overlong_filtering",
        "reward_funcs": "reward.functions",
        "reward_weights": "reward.weights",
        "log_completions": "eval.show | every rollout is in the run's folder",
        "num_completions_to_print": "eval.show",
        "use_vllm": "| one engine generates, in the same process",
        "vllm_mode": "mesh.engine | 0 is colocate",
        "vllm_gpu_memory_utilization": f"engine.pages | {_ITSELF}",
        "vllm_max_model_length": "engine.max_length",
        "vllm_tensor_parallel_size": "mesh.engine_tensor",
        "vllm_enable_sleep_mode": "engine.sleep",
        "vllm_importance_sampling_correction": "algorithm.rollout_is",
        "vllm_importance_sampling_cap": "algorithm.rollout_is_threshold",
    },
    OPENRLHF: {
        "pretrain": "model.path",
        "save_path": "run_dir | the policy lies in the run's folder",
        "lora_rank": "lora.rank",
        "lora_alpha": "lora.alpha",
        "lora_dropout": "| no dropout: log-probs are those of the whole policy",
        "target_modules": "lora.targets",
        "prompt_data": "data.train | a local file",
        "eval_dataset": "eval.data | a local file",
        "input_key": "data.columns | {'prompt': NAME}",
        "label_key": "data.columns | {'answer': NAME}",
        "apply_chat_template": "data.chat",
        "input_template": "data.template | {} becomes {prompt}",
        "remote_rm_url": "reward.functions | ('FILE.py:NAME',)",
        "rollout_batch_size": "scheduler.prompts",
        "train_batch_size": "scheduler.mini_batches | rollout_batch_size * n_samples_per_prompt / train_batch_size",
        "micro_train_batch_size": "batch.rows batch.tokens | packed rows of all devices",
        "micro_rollout_batch_size": "engine.slots",
        "n_samples_per_prompt": "scheduler.group_size",
        "prompt_max_len": f"engine.max_length | {_LENGTH}",
        "generate_max_len": "sampling.max_tokens",
        "max_epochs": "scheduler.ppo_epochs",
        "num_episodes": f"steps | {_EPOCHS}",
        "actor_learning_rate": "optimizer.lr",
        "lr_scheduler": "optimizer.schedule",
        "lr_warmup_ratio": "optimizer.warmup_steps | in optimizer steps",
        "adam_betas": "optimizer.b1 optimizer.b2",
        "l2": "optimizer.weight_decay",
        "max_norm": "optimizer.max_grad_norm",
        "advantage_estimator": "algorithm.adv_estimator",
        "init_kl_coef": "algorithm.kl_coef algorithm.kl_loss_coef | the second with use_kl_loss",
        "kl_estimator": "algorithm.kl_loss_type",
        "eps_clip": "algorithm.clip_ratio_low algorithm.clip_ratio_high",
        "eps_clip_low_high": "algorithm.clip_ratio_low algorithm.clip_ratio_high",
        "dual_clip": "algorithm.clip_ratio_c",
        "critic_pretrain": "critic.path",
        "critic_learning_rate": "critic.lr",
        "value_clip": "critic.cliprange_value",
        "freezing_actor_steps": "critic.warmup_steps",
        "gamma": "algorithm.gamma",
        "lambd": "algorithm.lam",
        "kl_target": "algorithm.kl_target",
        "kl_horizon": "algorithm.kl_horizon",
        "entropy_loss_coef": "algorithm.entropy_coef",
        "policy_loss_type": "algorithm.loss_mode | ppo: 'vanilla'",
        "dynamic_filtering": "scheduler.filter_groups",
        "enable_vllm_is_correction": "algorithm.rollout_is",
        "vllm_is_truncated_threshold": "algorithm.rollout_is_threshold",
        "overlong_buffer_len": "algorithm.overlong_buffer",
        "overlong_penalty_factor": "algorithm.overlong_penalty",
        "vllm_num_engines": "mesh.engine | devices, of which mesh.engine_tensor make a replica",
        "vllm_tensor_parallel_size": "mesh.engine_tensor",
        "vllm_enable_sleep": "engine.sleep",
        "colocate_all_models": "mesh.engine | 0",
        "async_train": "scheduler.name | 'pipeline'",
        "async_queue_size": "scheduler.max_staleness",
        "partial_rollout": "engine.carry_over | rollouts go on under new weights in a pipeline",
        "zero_stage": "mesh.fsdp | 3: as many as devices",
        "ring_attn_size": "mesh.context | devices of mesh.fsdp that share rows",
        "packing_samples": "| rows are always packed",
        "eval_temperature": "eval.temperature",
        "eval_n_samples_per_prompt": "eval.samples",
        "max_ckpt_num": "checkpoint.keep_last",
        "load_checkpoint": "--resume | --resume=RUN",
    },
}
# option -> verl's default and TRL's, where one of them is another than ours; "-": it has no such option
DEFAULTS: dict[str, tuple[str, str]] = {
    "algorithm.adv_estimator": ("gae, with a critic", "as grpo"),
    "algorithm.clip_ratio_c": ("3.0", "off (delta)"),
    "algorithm.rollout_is": ("off", "sequence mask, with vLLM"),
    "algorithm.rollout_is_threshold": ("2.0", "3.0"),
    "algorithm.kl_loss_coef": ("0.001, with use_kl_loss", "0.0 (beta)"),
    "algorithm.use_bias_correction_kl": ("-", "True"),
    "optimizer.b2": ("0.999", "0.999"),
    "optimizer.weight_decay": ("0.01", "0.0"),
    "optimizer.schedule": ("constant", "linear, to 0"),
    "optimizer.final_lr_ratio": ("0.0 (min_lr_ratio)", "0.0"),
    "lora.alpha": ("16", "32 (lora_alpha)"),
    "sampling.max_tokens": ("512", "512"),
    "scheduler.group_size": ("1 (rollout.n)", "8"),
    "scheduler.prompts": ("1024", "by the batch sizes"),
    "scheduler.mini_batches": ("4 (1024 / 256)", "1"),
    "steps": ("30 epochs", "3 epochs"),
    "seed": ("-", "42"),
    "eval.temperature": ("0.0", "1.0"),
    "eval.samples": ("1", "8"),
    "checkpoint.every": ("off", "500"),
    "checkpoint.keep_last": ("all", "all"),
}
_SECTIONS = {
    "actor_rollout_ref": "model, optimizer, batch, engine and sampling",
    "trainer": "checkpoint, eval and mesh",
}
_SHORT = 4  # letters that a name needs to be known behind a section of ours


# what a reward function gets and gives, beside verl's and TRL's
_REWARDS = (
    "| | here | verl | TRL |",
    "|---|---|---|---|",
    "| signature | both, known by the names of the parameters | `(data_source, solution_str, ground_truth, extra_info)` | "
    "`(prompts, completions, **columns)` |",
    "| one call scores | a rollout by verl's signature, a group by TRL's | a rollout | all completions of a batch |",
    "| a completion of a chat | a text by verl's signature, a list of one message by TRL's | a text | a list of one message |",
    "| special tokens | left out, unless `reward.skip_special_tokens=false` | left out | left out |",
    "| `None` | the rollout is unscored, and left out of the baseline | - | this function does not count |",
    "| a dict | `score`, `acc`, and numbers that become metrics | `score`, and values that are logged | - |",
    "| `trainer_state` | not given: a score depends on texts alone | - | given |",
    "| a failure | tried once more, then the rollout is unscored and the step goes on | ends the run | ends the run |",
    "| runs in | processes of its own, killed after `reward.timeout_s` | the trainer, or a worker | the trainer |",
)


def known() -> Iterator[Known]:
    """Yields every name of the table, in its order."""
    for framework, names in _TABLE.items():
        for name, text in names.items():
            ours, _, note = text.partition("|")
            yield Known(framework, name, tuple(ours.split()), note.strip())


def answer(path: str, ours: Collection[str] = ()) -> str:
    """Returns what another framework's name is called here, as a part of a sentence; empty where nobody has the name.

    Args:
      path: an unknown name, as it was written: whole (`data.train_batch_size`), its end (`rollout.n`), or behind a section
        of ours (`optimizer.learning_rate`).
      ours: last parts of the names here. One of them alone, or behind a section, is taken for ours.
    """
    whole = path.split(".")
    last = whole[-1]
    found = [one for one in known() if _ends(one.name, whole)] if len(whole) > 1 or last not in ours else []
    if not found and len(whole) > 1 and len(last) >= _SHORT and last not in ours:
        found = [one for one in known() if _ends(one.name, [last])]
    if not found and whole[0] in _SECTIONS:
        return f"verl's {whole[0]} is divided into the sections {_SECTIONS[whole[0]]} here; see docs/coming_from.md"
    return "; ".join(dict.fromkeys(one.words() for one in found))


def _ends(name: str, parts: list[str]) -> bool:
    return name.split(".")[-len(parts) :] == parts


def page(defaults: Mapping[str, object]) -> str:
    """Returns docs/coming_from.md. `defaults`: of every option here, by its name."""
    out = [
        "# Coming from verl, TRL or OpenRLHF",
        "Written by `python -m jaxrl_post.config.reference coming_from > docs/coming_from.md`; do not edit. An unknown name on the "
        "command line or in a config file is answered from the same table: `unknown name 'rollout.n'; verl's "
        "actor_rollout_ref.rollout.n is scheduler.group_size here`. Options whose names are equal are left out where the "
        "section is clear.",
        "A config is a Python file, and one option is overridden by `--config.scheduler.prompts=64`. Rows of data are read in "
        "verl's, TRL's or slime's columns (`data.format`), and reward functions may have verl's or TRL's signature. See "
        "[data and rewards](data_and_rewards.md), [configs](configs.md) and [options](options.md).",
        "Three traps: `steps`, `eval.every` and `checkpoint.every` count optimizer steps, while verl counts rounds. "
        "TRL's epsilon_high is an absolute bound with its loss_type cispo, so 5.0 there is `clip_ratio_high` 4.0 here. "
        "verl always averages gspo and sapo by seq-mean-token-mean; here they obey `algorithm.loss_agg_mode`.",
    ]
    rows = ["| option | here | verl | TRL |", "|---|---|---|---|"]
    rows += [f"| `{name}` | {defaults[name]} | {verl} | {trl} |" for name, (verl, trl) in DEFAULTS.items()]
    out.append(
        "## Defaults that differ\n\n" + "\n".join(rows) + "\n\n"
        "`optimizer.lr` is 1e-6 in all three, the rate of recipes that train all weights of models from 0.5B on. The demo's "
        "policy of 161,000 weights learns nothing at it in 30 steps, and much at 1e-4 ([measured](performance.md#learning)). "
        "Low-rank additions take 1e-4, too (`models/gsm8k_qwen2_5_7b_lora`). TRL's SFT has 2e-5, and so has the config `sft`."
    )
    out.append("## What reward functions receive\n\n" + "\n".join(_REWARDS))
    for framework in _TABLE:
        rows = [f"| {framework} | here | note |", "|---|---|---|"]
        rows += [
            f"| {one.name} | {', '.join(f'`{name}`' for name in one.ours)} | {one.note} |".replace("  ", " ")
            for one in known()
            if one.framework == framework
        ]
        out.append(f"## {framework}\n\n" + "\n".join(rows))
    return "\n\n".join(out) + "\n"
