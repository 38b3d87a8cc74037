"""The schema of a run: its sections, each a frozen dataclass that declares its options, and the rules between them.

Invariant: a Config that exists is valid. Every option is within its range, nothing that is set would be ignored, and all
relations of rules.py hold. Derived values are properties.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxrl_post.config import relations, rules
from jaxrl_post.config.fields import (
    any_of_type,
    file_path,
    fraction,
    input_path,
    mapping,
    number,
    one_of,
    positive,
    switch,
)
from jaxrl_post.config.generation import EngineConfig, SamplingConfig, SchedulerConfig, SpeculationConfig
from jaxrl_post.config.monitoring import AlarmConfig, LoggerConfig, WatchdogConfig
from jaxrl_post.config.scoring import EnvironmentConfig, JudgeConfig, RewardConfig
from jaxrl_post.config.token_terms import TeacherConfig
from jaxrl_post.config.training import AlgorithmConfig, BatchConfig, CriticConfig, LoraConfig, OptimizerConfig

_FILES = "data.train!=task:* or data.sources!= or eval.prompts>0 and eval.data!= and eval.data!=task:*"
_RECORDED = "engine.name=rows and history.epochs>0"
_DRAWN = "curriculum.interest=variance|failure"
_SKIPPED = "curriculum.skip_epochs>0"
_EVALUATED = "eval.prompts>0"
_MEASURED = "eval.prompts>0 or eval.completions>0"
_GENERATES = "engine.name=rows or eval.prompts>0"

KEPT_TIES = 8  # ids beside sampling.top_k that a token's record has room for, where logits tie


@dataclass(frozen=True, kw_only=True)
class PolicyConfig:
    """The policy: a checkpoint, or random weights of a preset."""

    path: str = input_path("", doc="A Hugging Face directory or a llama2.c file. Empty: random weights of `preset`.")
    preset: str = any_of_type("", doc="Name of a model shape for random weights.")
    tokenizer: str = input_path(
        "",
        doc="A tokenizer.json, a directory that holds one, or a llama2.c vocabulary. Empty: the one beside the model.",
    )
    compute_dtype: str = one_of(
        "float32|bfloat16", accelerator="bfloat16", doc="Number format of the learner's activations."
    )
    remat: bool = any_of_type(
        False, doc="Whether the activations of a layer are computed again in the backward pass, to save memory."
    )
    remat_policy: str = one_of(
        "full|attention|projections|offload",
        used_when="model.remat=true",
        doc="What of a layer is kept beside its input. full: nothing. attention: the output of attention. projections: "
        "that and all products with weights. offload: nothing, and inputs wait in host memory.",
    )
    scan_layers: str = switch(
        doc="Whether the learner stacks its layers in the program and scans them. auto: yes, except on a CPU."
    )
    weights: str = one_of(
        "auto|int8|fp8",
        doc="Number format to which the learner rounds the matrices of layers in each product, as `engine.weights` does. The "
        "gradient passes the rounding, and what is trained and saved stays float32.",
    )


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Devices along each axis.

    Without devices of its own the engine shares those of the learner, and its replicas lie along data x fsdp. With them,
    whole processes learn and whole ones generate where the numbers of devices allow it. Else each has its part of both.
    """

    data: int = positive(1, unit="devices", doc="Learner: copies of the weights, each with its part of a micro-batch.")
    fsdp: int = positive(
        1, unit="devices", doc="Learner: parts of weights and moments, which also divide a micro-batch."
    )
    expert: int = positive(
        1,
        unit="devices",
        doc="Learner: parts of the experts of a layer, which also divide a micro-batch. Other weights are copied, as along "
        "`data`. Also of a replica of the engine, without `engine_expert`.",
    )
    tensor: int = positive(
        1,
        unit="devices",
        doc="Learner: parts of every layer. Also of a replica of the engine, without `engine_tensor`.",
    )
    engine: int = number(0, unit="devices", doc="Devices of the engine alone. 0: it shares the learner's.")
    engine_tensor: int = number(
        0,
        unit="devices",
        used_when=f"{_GENERATES} because demonstrations lie on no devices",
        doc="Devices of a replica of the engine, which divide every layer. 0: as many as `tensor`.",
    )
    engine_expert: int = number(
        0,
        unit="devices",
        used_when=f"{_GENERATES} because demonstrations lie on no devices",
        doc="Parts of the experts in a replica of the engine, each of `engine_tensor` devices. 0: as many as `expert`.",
    )
    context: int = positive(
        1,
        unit="devices",
        doc="Learner: devices along fsdp that share packed rows. Each has a part of every row, so a row may be longer than one "
        "device holds.",
    )

    @property
    def engine_parts(self) -> int:
        """Devices of a replica of the engine that divide every layer."""
        return self.engine_tensor or self.tensor

    @property
    def engine_experts(self) -> int:
        """Parts of the experts in a replica of the engine."""
        return self.engine_expert or self.expert

    @property
    def replica(self) -> int:
        """Devices of a replica of the engine."""
        return self.engine_experts * self.engine_parts

    @property
    def alike(self) -> bool:
        """Whether a replica of the engine divides weights as the learner does beside fsdp."""
        return (self.engine_experts, self.engine_parts) == (self.expert, self.tensor)

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Of the learner's mesh: data, fsdp, expert and tensor."""
        return self.data, self.fsdp, self.expert, self.tensor

    @property
    def learner(self) -> int:
        """Devices that learn."""
        return math.prod(self.sizes)

    @property
    def copies(self) -> int:
        """Of the learner's weights that are no experts."""
        return self.data * self.expert

    @property
    def stretches(self) -> int:
        """Equal parts of a packed row, of which a device has two where devices share rows."""
        return 2 * self.context if self.context > 1 else 1

    @property
    def shards(self) -> int:
        """Of a batch: the devices of each have the same rows, or parts of them."""
        return self.copies * self.fsdp // self.context


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Prompts. Files for training and for evaluation are read alike."""

    train: str = input_path(
        "task:sums", used_when="data.sources=", doc="A JSONL or Parquet file, or `task:NAME` for a procedural task."
    )
    sources: tuple[str, ...] = file_path(
        (),
        used_when="engine.name=rows",
        doc="Several such files or tasks instead of `train`, which are mixed. The name of each begins the ids of its prompts.",
    )
    weights: tuple[float, ...] = any_of_type(
        (),
        unit="shares",
        used_when="data.sources!=",
        doc="Weight of each source among the prompts of training. Empty: all alike.",
    )
    format: str = one_of("verl|trl|slime", used_when=_FILES, doc="Whose column names the files have.")
    columns: Mapping[str, Any] = mapping(
        used_when=_FILES,
        doc="Column names that replace those of `format`, by role: id, prompt, answer, source, extra; completion in "
        "supervised training. "
        "An empty name says that rows have none.",
    )
    template: str = any_of_type("", used_when=_FILES, doc="What a prompt becomes. `{prompt}` stands for it.")
    chat: bool = any_of_type(
        False, used_when=_FILES, doc="Whether a text prompt becomes a user's message in the chat template."
    )
    system_prompt: str = any_of_type(
        "", used_when=_FILES, doc="Text of a system message in front of each conversation that has none of its own."
    )
    chat_template_kwargs: Mapping[str, Any] = mapping(
        used_when="data.train!=task:* or data.sources!= or environment.name!=",
        doc="What the chat template may read beside messages, for example `{'enable_thinking': False}`. A row's column of this "
        "name counts before it.",
    )
    date: str = any_of_type(
        "",
        recorded=True,
        doc="Date and time that chat templates are told, such as 2026-07-31 or 2026-07-31T12:00. Empty: that of the run's start "
        "where the template asks for one. A resumed run keeps it.",
    )
    assistant_only_loss: bool = any_of_type(
        False,
        used_when="engine.name=demonstrations and data.train!=task:*",
        doc="Whether every assistant's turn of `messages` is trained on, by the generation marks of the chat template. Else the "
        "last turn is.",
    )
    source: str = any_of_type("", used_when=_FILES, doc="Source of rows that name none.")
    overlong: str = one_of(
        "refuse|drop|cut",
        used_when="engine.name=rows or data.train=task:* or eval.prompts>0",
        doc="What becomes of prompts with more tokens than engine.max_length - sampling.max_tokens. What is dropped or cut is "
        "counted. cut: the last tokens stay, as with verl's truncation=left.",
    )
    duplicates: str = one_of(
        "refuse|drop|number",
        used_when=_FILES,
        doc="What becomes of a row whose id came before; a row without an id or index is known by its content. drop: it is left "
        "out and counted. number: its id gets a number behind `#`.",
    )
    size: int = positive(
        4096, unit="prompts", used_when="data.train=task:*", doc="Training prompts of a procedural task."
    )
    task: Mapping[str, Any] = mapping(
        used_when="data.train=task:* and data.sources= or eval.prompts>0 and eval.data=task:*",
        doc="Arguments of the procedural task.",
    )


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Evaluation on held-out prompts: before and after the run, and at the steps named here."""

    data: str = input_path(
        "",
        used_when=_MEASURED,
        doc="A file or `task:NAME`, as data.train. Empty: the training task, with prompts that training never draws.",
    )
    task: Mapping[str, Any] = mapping(
        used_when="eval.prompts>0 and eval.data=task:* or eval.prompts>0 and eval.data= and data.train=task:* "
        "and data.sources=",
        doc="Arguments of the procedural task. Empty: those of data.task.",
    )
    prompts: int = number(256, unit="prompts", doc="Held-out prompts, or all of a smaller file. 0: nothing is sampled.")
    completions: int = number(
        0,
        unit="completions",
        used_when="engine.name=demonstrations|preferences",
        doc="Held-out solutions or pairs of preferences whose loss is measured, or all of a smaller file. 0: none.",
    )
    samples: int = positive(
        4,
        unit="rollouts",
        used_when=_EVALUATED,
        doc="Rollouts of each prompt at `temperature` and `top_p`, beside a greedy one.",
    )
    temperature: float = number(
        1.0, used_when=_EVALUATED, doc="Divides the logits before the sampled rollouts are drawn. 0: greedy."
    )
    top_p: float = fraction(
        1.0,
        unit="share of probability",
        used_when=_EVALUATED,
        doc="Only the most likely ids that together hold this probability may be drawn. 1: all of them.",
    )
    every: int = number(
        0, unit="optimizer steps", used_when=_MEASURED, doc="Evaluates after every so many. 0: never by this."
    )
    at: tuple[int, ...] = any_of_type(
        (), unit="optimizer steps", used_when=_MEASURED, doc="Further steps after which it evaluates."
    )
    show: int = number(
        3, unit="prompts", used_when=_EVALUATED, doc="Prompts whose rollouts are printed before and after the run."
    )


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints of the whole run. A save is a swap boundary, so `every` is part of what a run's bits depend on."""

    every: int = number(
        50, unit="optimizer steps", doc="Saves at the first publish after every so many, and at the end. 0: never."
    )
    keep_last: int = number(
        3, 2, unit="checkpoints", used_when="checkpoint.every>0", doc="The newest checkpoints that stay."
    )
    max_failures: int = number(
        3,
        unit="saves",
        used_when="checkpoint.every>0",
        doc="Failed saves in a row that end the run, for example where the disk is full. 0: none do.",
    )


@dataclass(frozen=True, kw_only=True)
class HistoryConfig:
    """What is remembered of the rollouts of every prompt, for drafts and for schedules."""

    epochs: int = number(2, unit="epochs", doc="The latest epochs whose rollouts are kept. 0: nothing.")
    max_bytes: int = positive(
        1 << 28, unit="bytes", used_when="history.epochs>0", doc="The most that all of it may take."
    )


@dataclass(frozen=True, kw_only=True)
class CurriculumConfig:
    """Which prompts of an epoch are drawn: by the success rates of their last groups, which the history holds."""

    interest: str = one_of(
        "all|variance|failure",
        used_when=_RECORDED,
        doc="Prompts are drawn in proportion to it, from the success rate p. variance: p(1-p). failure: 1-p. all: every prompt.",
    )
    share: float = number(
        0.5,
        0.01,
        1.0,
        unit="share of the prompts",
        used_when=_DRAWN,
        doc="Prompts that a pass through the data draws, of those that are not skipped.",
    )
    uniform: float = number(
        0.1,
        0.01,
        1.0,
        unit="share of the interest",
        used_when=_DRAWN,
        doc="What is spread evenly, so that every prompt may be drawn.",
    )
    weighted: bool = any_of_type(
        False,
        used_when=_DRAWN,
        doc="Whether the loss of a prompt is multiplied by its importance weight. Else the weights are metrics alone.",
    )
    skip_epochs: int = number(
        0,
        unit="epochs",
        used_when=_RECORDED,
        doc="For so many of its epochs a solved or hopeless prompt is skipped. 0: none is.",
    )
    solved: float = fraction(
        1.0, unit="success rate", used_when=_SKIPPED, doc="From this mean reward on a prompt is solved."
    )
    hopeless: float = fraction(
        0.0, unit="success rate", used_when=_SKIPPED, doc="Up to this mean reward a prompt is hopeless."
    )
    groups: int = positive(
        1,
        unit="groups",
        used_when=f"{_DRAWN} or {_SKIPPED}",
        doc="The last groups of a prompt that its success rate is taken from.",
    )

    @property
    def used(self) -> bool:
        """Whether passes are planned at all."""
        return self.interest != "all" or self.skip_epochs > 0


@dataclass(frozen=True, kw_only=True)
class Config:
    """A whole run."""

    name: str = any_of_type("run", doc="Begins the name of the run's folder.")
    seed: int = number(0, doc="Seeds the sampling noise, the order of the data and random weights.")
    steps: int = positive(10, unit="optimizer steps", doc="Length of the run.")
    run_dir: str = file_path("runs", written=True, doc="The folder in which the run's folder is made.")
    trace_rounds: int = number(
        0,
        unit="rounds",
        doc="The first rounds, from the start or the resume, that are drawn for ui.perfetto.dev and scripts/plot_rounds.py.",
    )
    model: PolicyConfig = PolicyConfig()
    mesh: MeshConfig = MeshConfig()
    engine: EngineConfig = EngineConfig()
    sampling: SamplingConfig = SamplingConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    critic: CriticConfig = CriticConfig()
    teacher: TeacherConfig = TeacherConfig()
    lora: LoraConfig = LoraConfig()
    batch: BatchConfig = BatchConfig()
    data: DataConfig = DataConfig()
    curriculum: CurriculumConfig = CurriculumConfig()
    reward: RewardConfig = RewardConfig()
    judge: JudgeConfig = JudgeConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    alarms: AlarmConfig = AlarmConfig()
    watchdog: WatchdogConfig = WatchdogConfig()
    history: HistoryConfig = HistoryConfig()
    speculation: SpeculationConfig = SpeculationConfig()
    logger: LoggerConfig = LoggerConfig()

    def __post_init__(self):
        relations.check(self, rules.RUN)

    @property
    def restricted(self) -> bool:
        """Whether the engine cuts a distribution, in training or in evaluation."""
        return self.sampling.restricted or self.eval.top_p < 1

    @property
    def kept_ids(self) -> int:
        """The most ids of a token's record; 0 where there are none. More than `sampling.top_k` remain only where ids tie."""
        law, reads = self.sampling, self.algorithm.loss_mode != "gkd"  # which compares whole laws
        return law.top_k + KEPT_TIES if law.keep_mask and law.top_k > 0 and reads and self.engine.name == "rows" else 0

    @property
    def graders(self) -> tuple[str, ...]:
        """Reward functions. An environment scores its conversations itself."""
        return () if self.environment.name else self.reward.functions

    @property
    def only_grader(self) -> str:
        """The name of the one function whose score is the reward; empty where several parts make it."""
        alone = len(self.graders) == 1 and not self.reward.model
        return self.graders[0].rpartition(":")[2] if alone else ""

    @property
    def devices(self) -> int:
        return self.mesh.learner + self.mesh.engine

    @property
    def generating(self) -> int:
        """Devices of the engine, its own or shared."""
        return self.mesh.engine or self.mesh.learner

    @property
    def replicas(self) -> int:
        """Of the engine."""
        return self.generating // self.mesh.replica

    @property
    def staying(self) -> int:
        """Replicas that are never lent."""
        return self.replicas - self.replicas // 2 if self.scheduler.lend else self.replicas

    @property
    def lent(self) -> int:
        """Devices that are lent at times."""
        return (self.replicas - self.staying) * self.mesh.replica

    @property
    def branches(self) -> bool:
        """Whether the learner's attention follows branches of texts: where they share prompts, or rows lie in parts."""
        return self.batch.shared_prompts or self.mesh.context > 1

    @property
    def lent_shards(self) -> int:
        """Parts of a batch that lent devices make."""
        return self.lent // self.mesh.tensor

    def evaluated_at(self, before: int, version: int) -> bool:
        """Whether there is an evaluation during the run at `version`, published after `before`; the one at its end is another
        matter."""
        every = self.eval.every > 0 and version // self.eval.every > before // self.eval.every
        return version != self.steps and (every or any(before < at <= version for at in self.eval.at))

    def saved_at(self, before: int, version: int) -> bool:
        """Whether `version` is saved when it is published after `before`."""
        every = self.checkpoint.every
        return every > 0 and (version >= self.steps or version // every > before // every)

    @property
    def rounds(self) -> int:
        return self.steps // self.scheduler.updates

    @property
    def rollouts_per_step(self) -> int:
        return self.scheduler.prompts * self.scheduler.group_size

    @property
    def head_rows(self) -> int:
        if self.engine.head_rows or self.speculation.drafter == "off":
            return self.engine.head_rows or self.engine.slots
        return max(self.engine.row_sizes)

    @property
    def verifies(self) -> bool:
        """Whether tokens may be proposed to the engine, by a drafter or from a rollout of older weights."""
        name = self.scheduler.name
        deferred = name == "tail_batching" and self.scheduler.prefix_mode == "verify"
        running = name == "pipeline" and self.engine.carry_over in ("verify", "auto")
        return self.speculation.drafter != "off" or name == "auto" or deferred or running

    @property
    def same_formats(self) -> bool:
        """Whether the learner multiplies by the very numbers that the engine does, and reads keys and values in full."""
        matrices, alike = self.engine.weights, self.engine.dtype == self.model.compute_dtype
        return self.engine.kv == "auto" and matrices == self.model.weights and (matrices == "auto" or alike)

    @property
    def pages(self) -> int:
        return self.engine.pages or self.engine.slots * -(-self.engine.max_length // self.engine.page_size)
