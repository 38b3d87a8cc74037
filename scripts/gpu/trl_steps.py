"""Steps of TRL's GRPO on the same card, beside our synchronous run: the same policy, reward and number of rollouts.

TRL generates by transformers, here always to the longest length. Our rollouts end earlier. So the ratio is of tokens
that are generated and trained per second. trl, datasets and torch need not be there. They alone hold the device.
"""

from __future__ import annotations

import itertools
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from gpu import rl_config, rl_reward, rl_runs
from gpu.part import Part

STEPS = 3  # that are timed, behind one that warms up


def steps(part: Part, preset: str = rl_runs.PRESET, device: str = "cuda", **sizes: int) -> None:
    """Writes seconds of a step, tokens per second, and ours over those.

    Args:
      sizes: prompts, samples and tokens where they are not those of our run.

    Raises:
      ImportError: trl or a library that it needs is not there.
    """
    import trl  # noqa: F401  # so that its absence ends the section before a policy is written

    if not part.wants("trl_steps", 50.0):
        return
    config = rl_config.get_config()
    rule = {
        "prompts": config.scheduler.prompts,
        "samples": config.scheduler.group_size,
        "tokens": config.sampling.max_tokens,
    } | sizes
    with tempfile.TemporaryDirectory() as folder:
        policy = Path(folder) / "policy"
        how = {"timeout_s": rl_runs.LIMIT_S, "env": rl_runs.path(part) | {"JAX_PLATFORMS": "cpu"}}
        part.run(rl_runs.HERE / "rl_policy.py", policy, preset, **how)
        step = statistics.median(_seconds(policy, Path(folder), device, **rule)[1:])
    made = rule["prompts"] * rule["samples"] * rule["tokens"] / step
    ours = part.told["rl.sync"]["trained_tokens_per_s"]
    part.figure("trl_steps", {"step_s": step, "tokens_per_s": made, "ours_over_peer": ours / made})


def _seconds(policy: Path, folder: Path, device: str, prompts: int, samples: int, tokens: int) -> list[float]:
    """Returns the seconds of each optimizer step."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    import datasets
    import torch
    import transformers
    from trl import GRPOConfig, GRPOTrainer

    ends = [time.perf_counter()]

    class Clock(transformers.TrainerCallback):
        def on_step_end(self, *given: Any, **more: Any) -> None:
            if device == "cuda":
                torch.cuda.synchronize()
            ends.append(time.perf_counter())

    def reward(completions: list[str], **more: Any) -> list[float]:
        return [rl_reward.digits("", text, "", {}) for text in completions]

    rule = GRPOConfig(
        output_dir=str(folder / "trl"),
        use_cpu=device == "cpu",
        bf16=True,
        gradient_checkpointing=False,
        per_device_train_batch_size=samples,
        gradient_accumulation_steps=prompts,
        num_generations=samples,
        max_completion_length=tokens,
        max_steps=1 + STEPS,
        beta=0.0,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        generation_kwargs={"min_new_tokens": tokens},
    )
    asked = datasets.Dataset.from_dict({"prompt": [f"{number}+{number}=" for number in range(prompts * (1 + STEPS))]})
    GRPOTrainer(
        model=transformers.AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32),
        reward_funcs=reward,
        args=rule,
        train_dataset=asked,
        processing_class=transformers.AutoTokenizer.from_pretrained(policy),
        callbacks=[Clock()],
    ).train()
    return [after - before for before, after in itertools.pairwise(ends)]
