"""The one schema of a run: frozen dataclasses that hold defaults, ranges and cross-field rules.

`default()` mirrors them into a locked ConfigDict; a file in configs/ starts from it and assigns; `resolve()` turns that,
plus `--config.a.b=value` overrides, into a Config, once. After that nobody sees a ConfigDict. A mistake gives one sentence
with name, value, bound and the nearest valid name, before anything is compiled.
"""

from __future__ import annotations

import ast
import copy
import dataclasses
import difflib
import importlib.util
import math
import re
import traceback
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_collections


def at_least(default, low, high=None):
    """A field with a default and an inclusive range."""
    return field(default=default, metadata={"low": low, "high": high})


def one_of(default, *choices):
    """A field with a default and a closed list of values."""
    return field(default=default, metadata={"choices": choices})


@dataclass(frozen=True, kw_only=True)
class Model:
    """`path`: a Hugging Face directory or a llama2.c file; empty: random weights of `preset`."""

    path: str = ""
    preset: str = ""
    tokenizer: str = ""  # tokenizer.json, a directory holding one, or a llama2.c vocabulary; empty: beside the model
    compute_dtype: str = one_of("float32", "float32", "bfloat16")
    remat: bool = False


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """Devices along each axis. Learner and engine share them, and replicas of the engine lie along data x fsdp; or `engine`
    more devices generate, in replicas of `tensor`, while those learn: of several processes each has its part of both, and
    there are as many of one kind as of the other."""

    data: int = at_least(1, 1)
    fsdp: int = at_least(1, 1)
    tensor: int = at_least(1, 1)
    engine: int = at_least(0, 0)

    @property
    def learner(self) -> int:
        """Devices that learn."""
        return self.data * self.fsdp * self.tensor

    @property
    def shards(self) -> int:
        """Of a batch."""
        return self.data * self.fsdp


@dataclass(frozen=True, kw_only=True)
class Engine:
    """Sizes of the row engine, each per replica. `row_sizes`: rows per step that are compiled; a single size is kept as it
    is, of several the probe drops those whose bits differ from the largest one's. `pages` 0: enough for every slot at
    `max_length`. `cost_table`: a file written by scripts/bench.py cost; empty: the analytic table of the device kind.
    `layouts`: further tensor parallelisms, for example (2, 4), compiled at the start; a planner chooses one for each round by
    its forecasts (scheduler/rounds/layout_planner.py). A replica of n times as many devices has n times the slots, pages and rows.
    `carry_over`: what becomes of answers on their way when weights are published (engine/host/swap_policy.py); at most `carry_share` of all
    rows are computed again for it, 1: any number."""

    name: str = one_of("rows", "rows", "demonstrations")
    slots: int = at_least(64, 1)
    max_length: int = at_least(512, 2)  # prompt and answer together, tokens
    page_size: int = at_least(16, 1)
    pages: int = at_least(0, 0)
    row_sizes: tuple[int, ...] = (64, 128)
    head_rows: int = at_least(0, 0)  # rows that may sample in one step; 0: as many as slots, all where drafts are made
    steps_per_dispatch: int = at_least(8, 1)
    refill_slots: int = at_least(4, 1)  # a dispatch ends early when so many slots are free and requests wait
    dtype: str = one_of("float32", "float32", "bfloat16")
    cost_table: str = ""
    layouts: tuple[int, ...] = ()
    carry_over: str = one_of("keep", "keep", "recompute", "verify", "auto")
    carry_share: float = at_least(1.0, 0.0, 1.0)


@dataclass(frozen=True, kw_only=True)
class Speculation:
    """Drafting of rollouts from history. `drafter`: its name (engine/speculation/registry.py); off compiles no drafting at all. `width`:
    tokens of a draft at most. Sizes per replica, in entries of 4 bytes (12 for histospec): `prompt_entries` for the past
    answers to the prompts in slots, `shared_entries` for the last answers to all prompts, `live_entries` for what the
    running answers to one prompt share. Only `ours` reads the last two. `clones`: slots that nobody waits for try other
    drafts for the answers that still run; it does not always save steps (scripts/results/spec-equality.json)."""

    drafter: str = one_of("off", "off", "ngram", "histospec", "histospec_rewards", "ours")
    width: int = at_least(7, 2)
    prompt_entries: int = at_least(1 << 17, 0)
    shared_entries: int = at_least(3 << 15, 0)
    live_entries: int = at_least(1 << 11, 16)
    clones: bool = True


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Of training rollouts; evaluation draws from the whole law. `max_tokens` bounds the answer. `top_k` 0 or -1 and
    `top_p` 1: every id may be drawn. With a cut on, rollout log-probs are of the cut law and the learner's, as verl's, of
    the whole one: the logged gap then holds the mass that was cut, and algorithm.rollout_is weighs by it."""

    temperature: float = at_least(1.0, 0.0)
    top_k: int = at_least(0, -1)
    top_p: float = at_least(1.0, 0.0, 1.0)
    max_tokens: int = at_least(256, 1)
    stop_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()

    @property
    def restricted(self) -> bool:
        return self.top_k > 0 or self.top_p < 1


@dataclass(frozen=True, kw_only=True)
class Scheduler:
    """`prompts`: groups per optimizer round (verl's train_batch_size); `group_size`: answers per prompt (rollout.n).
    `filter_groups`: leave out groups whose accuracies are all equal, and refill, at most `max_waves` waves a round.
    A round is trained on in `mini_batches` optimizer steps, and that `ppo_epochs` times; then weights are published.

    `name`: sync waits for every prompt of a round; tail_batching launches `over` times the prompts, puts off the groups that
    finish last and lets them go on in a long round of their own, by `prefix_mode`, which makes `long_batches` batches,
    trained on one after the other; `lane` is the share of the surplus that history may send there at once, which saves tokens
    and not always time. rollpacker launches `over` times the prompts and `over_samples` times the answers, drops the slow ones
    and draws slow prompts anew: shorter answers than the policy gives, for comparison. `stream`: groups that are scored and
    handed to the learner together while others are still generated; 0: all of a round at its end.

    pipeline has no rounds: every slot stays full, each optimizer step trains on the oldest `prompts` groups that are whole, and
    new weights go under the answers that run. No trained token is older than `max_staleness` optimizer steps; `ahead` answers
    wait for a slot; the graders of at most `max_unscored` whole groups are still at work (0: those of one batch). `interleave`:
    on shared devices, seconds of generation for each second of training while an optimizer step is under way, in turns by
    micro-batch, reckoned from the step costs; 0: the engine rests, and weights are there the sooner.

    `lend`: where rounds are streamed, half of the engine's replicas are lent to the learner once that share of a round's answers
    is done and the others fit into the rest, until the round is full; 0: never. On shared devices whole groups wait for that.

    `placement`: least_loaded gives a group to the replica with the fewest answers on their way; divided binds an answer when
    a slot is free; longest_first does so by what probes and history tell; rank_groups gives replicas of their own to prompts
    of like length. Only with more answers than slots do the middle two differ from the first, and the last only pays where
    replicas step on their own."""

    name: str = one_of("sync", "sync", "tail_batching", "rollpacker", "pipeline")
    placement: str = one_of("least_loaded", "least_loaded", "divided", "longest_first", "rank_groups")
    over: float = at_least(1.0, 1.0)
    over_samples: float = at_least(1.0, 1.0)
    prefix_mode: str = one_of("verify", "verify", "recompute", "restart")
    long_batches: int = at_least(1, 1)
    lane: float = at_least(0.0, 0.0, 1.0)
    stream: int = at_least(0, 0)
    max_staleness: int = at_least(0, 0)
    ahead: int = at_least(0, 0)
    max_unscored: int = at_least(0, 0)
    interleave: float = at_least(0.0, 0.0)
    lend: float = at_least(0.0, 0.0, 1.0)
    prompts: int = at_least(32, 1)
    group_size: int = at_least(8, 1)
    filter_groups: bool = False
    max_waves: int = at_least(10, 1)
    mini_batches: int = at_least(1, 1)
    ppo_epochs: int = at_least(1, 1)

    @property
    def updates(self) -> int:
        """Optimizer steps per round."""
        return self.mini_batches * self.ppo_epochs


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """verl's words; algorithms/PARITY.md says where other projects mean something else by them."""

    adv_estimator: str = one_of(
        "grpo", "grpo", "dr_grpo", "rloo", "opo", "maxrl", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "ones"
    )
    gamma: float = at_least(1.0, 0.0, 1.0)  # discount per token, of reinforce_plus_plus
    loss_mode: str = one_of("vanilla", "vanilla", "gspo", "cispo", "sapo", "sft")
    loss_agg_mode: str = one_of(
        "token-mean",
        "token-mean",
        "seq-mean-token-mean",
        "seq-mean-token-sum",
        "seq-mean-token-sum-norm",
        "prompt-mean",
    )
    clip_ratio_low: float = at_least(0.2, 0.0)
    clip_ratio_high: float = at_least(0.2, 0.0)
    clip_ratio_c: float = at_least(0.0, 0.0)  # dual clip of the vanilla loss; 0: off
    tau_pos: float = at_least(1.0, 1e-3)  # of sapo
    tau_neg: float = at_least(1.05, 1e-3)
    kl_loss_type: str = one_of("k3", "k1", "k2", "k3")
    kl_loss_coef: float = at_least(0.0, 0.0)
    use_kl_in_reward: bool = False  # every token's reward loses kl_coef * k1
    kl_coef: float = at_least(0.001, 0.0)
    entropy_coef: float = at_least(0.0, 0.0)
    rollout_is: str = one_of("none", "none", "token", "span", "sequence")  # importance weights pi_old / mu
    rollout_is_threshold: tuple[float, ...] = (2.0,)  # (upper,) truncates, (lower, upper) sets to 0 outside
    rollout_rs: str = one_of(
        "none",
        "none",
        *(f"{level}_{kind}" for level in ("token", "seq_sum", "seq_mean") for kind in ("k1", "k2", "k3")),
        "seq_max_k2",
        "seq_max_k3",
    )
    rollout_rs_threshold: tuple[float, ...] = (2.0,)  # (upper,), or for k1 (lower, upper)
    # pi_old: the learner's own pass; the engine's log-probs; between both by how old a token is, without a pass (A-3PO)
    prox_logp_method: str = one_of("recompute", "recompute", "rollout", "loglinear")
    min_ess: float = at_least(
        0.0, 0.0, 1.0
    )  # effective sample size of tokens below which a batch moves nothing; 0: none
    max_rollout_kl: float = at_least(
        0.0, 0.0
    )  # nats a token between engine and learner above which it moves nothing; 0: none
    overlong_buffer: int = at_least(0, 0)  # tokens before max_tokens in which the reward sinks; 0: none
    overlong_penalty: float = at_least(1.0, 0.0)  # at max_tokens
    overlong_filtering: bool = False  # answers cut at max_tokens stay in the baseline and leave the loss

    @property
    def needs_reference(self) -> bool:
        return self.kl_loss_coef > 0 or self.use_kl_in_reward

    @property
    def corrects_rollouts(self) -> bool:
        """Whether the host weighs tokens by pi_old / mu, which it must have for that."""
        return self.prox_logp_method == "recompute" and (self.rollout_is != "none" or self.rollout_rs != "none")


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """AdamW. `schedule` runs over `Config.steps` after `warmup_steps`; norms, biases and other vectors are not decayed."""

    lr: float = at_least(1e-4, 0.0)
    schedule: str = one_of("constant", "constant", "cosine", "linear")
    warmup_steps: int = at_least(0, 0)
    final_lr_ratio: float = at_least(0.1, 0.0, 1.0)
    b1: float = at_least(0.9, 0.0, 0.9999)
    b2: float = at_least(0.95, 0.0, 0.9999)
    eps: float = at_least(1e-8, 0.0)
    weight_decay: float = at_least(0.0, 0.0)
    max_grad_norm: float = at_least(1.0, 0.0)  # 0: no clipping


@dataclass(frozen=True, kw_only=True)
class Batch:
    """A micro-batch is `rows` packed sequences of `tokens` tokens. `head_chunk`: tokens whose logits exist at once."""

    rows: int = at_least(8, 1)
    tokens: int = at_least(512, 2)
    head_chunk: int = at_least(1024, 1)


@dataclass(frozen=True, kw_only=True)
class Data:
    """`train`: a JSONL or Parquet file, or `task:NAME` for a procedural task; `task` are that task's own arguments. Files,
    of training and evaluation alike, are read by the names of `format`, in which `columns` replaces a role's column:
    {"prompt": "question"}; roles are id, prompt, answer, source, extra, and '' says that rows have none. `template`: what
    a prompt becomes, "{prompt}" standing for it; `chat`: a text prompt becomes a user's message to the chat template."""

    train: str = "task:sums"
    format: str = one_of("verl", "verl", "trl", "slime")
    columns: Mapping[str, Any] = field(default_factory=dict)
    template: str = ""
    chat: bool = False
    source: str = ""  # of rows that name none
    size: int = at_least(4096, 1)  # prompts of a procedural task; a file has its own length
    task: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Reward:
    """`functions`: import paths `pkg.mod:fn` or `file.py:fn`, summed with `weights` (empty: all 1).
    `shuffle`: hands each group's scores to its rollouts in a random order: a control that must learn nothing. A program that is
    judged may take `test_limit_s` CPU seconds a test (0: half of `timeout_s`); with `adaptive_limit` RollPacker's limit
    instead, from 2 to 30 s by what right programs took (rewards/limits.py), and then a run repeats itself from its journal
    only."""

    functions: tuple[str, ...] = ("jaxrl_post.rewards.math:exact",)
    weights: tuple[float, ...] = ()
    workers: int = at_least(1, 1)
    timeout_s: float = at_least(10.0, 0.01)
    test_limit_s: float = at_least(0.0, 0.0)
    adaptive_limit: bool = False
    shuffle: bool = False

    @property
    def limit_s(self) -> float:
        """CPU seconds that a test may take at most."""
        return 30.0 if self.adaptive_limit else self.test_limit_s or self.timeout_s / 2


@dataclass(frozen=True, kw_only=True)
class Eval:
    """Held-out prompts, greedy once and `samples` times at temperature 1, before, every `every` steps (and at those listed
    in `at`), and after.
    `data` as Data.train; for a procedural task the prompts are drawn apart from the training ones. prompts 0: never."""

    data: str = ""
    task: Mapping[str, Any] = field(default_factory=dict)
    prompts: int = at_least(256, 0)
    samples: int = at_least(4, 1)
    every: int = at_least(0, 0)
    at: tuple[int, ...] = ()
    show: int = at_least(3, 0)  # prompts whose answers are printed before and after


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """The whole run is saved at the first publish after every `every` optimizer steps and at the end; 0: never. The newest
    `keep_last` stay. A save is a swap boundary, so `every` is part of what a run is keyed by."""

    every: int = at_least(50, 0)
    keep_last: int = at_least(3, 2)


@dataclass(frozen=True, kw_only=True)
class History:
    """What is remembered of every prompt: its answers of the last `epochs` epochs (0: nothing), `max_bytes` in all."""

    epochs: int = at_least(2, 0)
    max_bytes: int = at_least(1 << 28, 1)


@dataclass(frozen=True, kw_only=True)
class Config:
    """A whole run. `trace_rounds`: so many rounds from its start, or from where it is resumed, are drawn into a file that
    ui.perfetto.dev and scripts/plot_rounds.py read."""

    name: str = "run"
    seed: int = at_least(0, 0)
    steps: int = at_least(10, 1)
    run_dir: str = "runs"
    trace_rounds: int = at_least(0, 0)
    model: Model = Model()
    mesh: Mesh = Mesh()
    engine: Engine = Engine()
    sampling: Sampling = Sampling()
    scheduler: Scheduler = Scheduler()
    algorithm: Algorithm = Algorithm()
    optimizer: Optimizer = Optimizer()
    batch: Batch = Batch()
    data: Data = Data()
    reward: Reward = Reward()
    eval: Eval = Eval()
    checkpoint: Checkpoint = Checkpoint()
    history: History = History()
    speculation: Speculation = Speculation()

    def __post_init__(self):
        for rule in _RULES:
            rule(self)

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
        return self.generating // self.mesh.tensor

    @property
    def staying(self) -> int:
        """Replicas that are never lent."""
        return self.replicas - self.replicas // 2 if self.scheduler.lend else self.replicas

    @property
    def lent(self) -> int:
        """Devices that are lent at times."""
        return (self.replicas - self.staying) * self.mesh.tensor

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
    def pages(self) -> int:
        return self.engine.pages or self.engine.slots * -(-self.engine.max_length // self.engine.page_size)


def _need(condition: bool, sentence: str) -> None:
    if not condition:
        raise ValueError(sentence)


def _model_given(c: Config) -> None:
    _need(
        bool(c.model.path or c.model.preset),
        "model.path and model.preset are both empty: name a checkpoint "
        "(model.path) or a preset for random weights (model.preset)",
    )


def _rows_fit(c: Config) -> None:
    sizes = c.engine.row_sizes
    _need(min(sizes, default=0) > 0, f"engine.row_sizes must hold at least one positive size, got {sizes}")
    _need(
        max(sizes) >= c.engine.slots,
        f"engine.row_sizes {sizes} must reach engine.slots={c.engine.slots}: every "
        f"running slot needs a row; nearest valid size is {c.engine.slots}",
    )
    _need(
        c.head_rows >= c.engine.slots,
        f"engine.head_rows={c.engine.head_rows} must be 0 or at least engine.slots={c.engine.slots}",
    )


def _lengths_fit(c: Config) -> None:
    _need(
        c.sampling.max_tokens < c.engine.max_length,
        f"sampling.max_tokens={c.sampling.max_tokens} must be below "
        f"engine.max_length={c.engine.max_length}, which holds prompt and answer",
    )
    _need(
        c.batch.tokens >= c.engine.max_length,
        f"batch.tokens={c.batch.tokens} cannot hold a rollout of "
        f"engine.max_length={c.engine.max_length} tokens; nearest valid value is {c.engine.max_length}",
    )
    pages = -(-c.engine.max_length // c.engine.page_size)
    _need(
        c.pages >= pages,
        f"engine.pages={c.engine.pages} cannot hold one rollout of engine.max_length="
        f"{c.engine.max_length} tokens: at least {pages} pages of {c.engine.page_size} are needed",
    )


def _something_can_be_drawn(c: Config) -> None:
    _need(
        c.sampling.top_p > 0,
        f"sampling.top_p={c.sampling.top_p} leaves nothing to draw: it must be above 0 and at most 1; 1 keeps every id",
    )


def _shards_fit(c: Config) -> None:
    shards = c.mesh.shards
    _need(
        c.batch.rows % shards == 0,
        f"batch.rows={c.batch.rows} must be a multiple of mesh.data*mesh.fsdp={shards}; "
        f"nearest valid value is {-(-c.batch.rows // shards) * shards}",
    )


def _groups_make_sense(c: Config) -> None:
    grouped = c.algorithm.adv_estimator not in ("ones", "reinforce_plus_plus")
    _need(
        not grouped or c.scheduler.group_size >= 2,
        f"algorithm.adv_estimator={c.algorithm.adv_estimator!r} compares "
        f"the answers of a group: scheduler.group_size={c.scheduler.group_size} must be at least 2",
    )


def _demonstrations_are_imitated(c: Config) -> None:
    imitates, loss, estimator = c.engine.name == "demonstrations", c.algorithm.loss_mode, c.algorithm.adv_estimator
    _need(
        imitates == (loss == "sft") and (not imitates or estimator == "ones"),
        f"engine.name={c.engine.name!r} with algorithm.loss_mode={loss!r} and algorithm.adv_estimator={estimator!r}: "
        "supervised training is 'demonstrations' with 'sft' and 'ones', and neither of the first two goes without the other",
    )


def _layouts_fit(c: Config) -> None:
    own, given = c.mesh.tensor, c.engine.layouts
    fitting = [n for n in range(2 * own, c.generating + 1, own) if c.generating % n == 0]
    for tensor in given:
        _need(
            tensor in fitting,
            f"engine.layouts={given}: {tensor} devices a replica must be a multiple of mesh.tensor={own} "
            f"above it that divides the {c.generating} devices; "
            + (
                f"the nearest valid value is {min(fitting, key=lambda n: (abs(n - tensor), n))}"
                if fitting
                else "there is none, leave it empty"
            ),
        )
    _need(len(set(given)) == len(given), f"engine.layouts={given} names a layout twice")
    _need(
        not given or c.engine.name == "rows",
        f"engine.layouts={given} is of engine.name='rows': {c.engine.name!r} lies on no devices",
    )
    _need(
        not (given and c.engine.cost_table),
        f"engine.cost_table={c.engine.cost_table!r} was measured in one layout and "
        f"engine.layouts={given} compares several: leave one of them empty",
    )


def _placements_know(c: Config) -> None:
    ranks = c.scheduler.placement == "rank_groups"
    _need(
        not ranks or c.history.epochs > 0,
        "scheduler.placement='rank_groups' ranks prompts by their past answers: history.epochs=0 must be at least 1",
    )
    _need(
        not ranks or c.replicas > 1,
        "scheduler.placement='rank_groups' needs replicas to choose from, mesh.data*mesh.fsdp="
        "1 gives one; the nearest valid value is 'least_loaded'",
    )


def _rounds_divide(c: Config) -> None:
    s, updates = c.scheduler, c.scheduler.updates
    _need(
        s.prompts % s.mini_batches == 0,
        f"scheduler.mini_batches={s.mini_batches} must divide scheduler.prompts="
        f"{s.prompts}; nearest valid value is {max(n for n in range(1, s.mini_batches + 1) if s.prompts % n == 0)}",
    )
    for name, step in (("steps", c.steps), ("eval.every", c.eval.every), *(("eval.at", at) for at in c.eval.at)):
        _need(
            step % updates == 0,
            f"{name}={step} must be a multiple of the {updates} optimizer steps of a round "
            f"(scheduler.mini_batches * scheduler.ppo_epochs); nearest valid value is {-(-step // updates) * updates}",
        )


def _evaluations_are_reached(c: Config) -> None:
    beyond = [at for at in c.eval.at if not 0 <= at <= c.steps]
    _need(
        not beyond,
        f"eval.at={beyond[:1]} is never reached: it must be at least 0 and at most steps={c.steps}, where "
        "there is an evaluation anyway",
    )


def _loss_makes_sense(c: Config) -> None:
    a = c.algorithm
    _need(
        a.clip_ratio_c == 0 or a.clip_ratio_c > 1,
        f"algorithm.clip_ratio_c={a.clip_ratio_c} must be 0 (off) or above 1; 3 is usual",
    )
    _need(
        a.clip_ratio_c == 0 or a.loss_mode == "vanilla",
        f"algorithm.clip_ratio_c={a.clip_ratio_c} is of algorithm."
        f"loss_mode='vanilla' and not of {a.loss_mode!r}; nearest valid value is 0",
    )
    off_policy = a.use_kl_in_reward or a.corrects_rollouts or a.min_ess > 0 or a.max_rollout_kl > 0
    _need(
        a.loss_mode != "sft" or not off_policy,
        "algorithm.loss_mode='sft' has no old log-probs: leave "
        "algorithm.use_kl_in_reward, algorithm.rollout_is, algorithm.rollout_rs, algorithm.min_ess and algorithm.max_rollout_kl "
        "at their defaults",
    )
    told = f"algorithm.prox_logp_method={a.prox_logp_method!r}"
    _need(
        a.prox_logp_method == "recompute"
        or (a.loss_mode != "sft" and not a.use_kl_in_reward and a.rollout_rs == "none"),
        f"{told} makes no pass for old log-probs, which algorithm.loss_mode='sft' has no use for and algorithm.use_kl_in_reward "
        "and algorithm.rollout_rs need; the nearest valid value is 'recompute'",
    )
    _need(
        a.prox_logp_method != "rollout" or a.rollout_is == "none",
        f"{told} takes the engine's log-probs for pi_old, so pi_old / "
        f"mu is 1: algorithm.rollout_is={a.rollout_is!r} must be 'none'",
    )
    _need(
        a.prox_logp_method != "loglinear" or (a.rollout_is in ("none", "token") and len(a.rollout_is_threshold) == 1),
        f"{told} weighs token by token on the device and truncates: algorithm.rollout_is={a.rollout_is!r} must be 'token' or "
        f"'none', algorithm.rollout_is_threshold={a.rollout_is_threshold} one number",
    )
    _need(
        a.overlong_buffer <= c.sampling.max_tokens,
        f"algorithm.overlong_buffer={a.overlong_buffer} is above "
        f"sampling.max_tokens={c.sampling.max_tokens}, which is the nearest valid value",
    )
    lowers = a.use_kl_in_reward or a.overlong_buffer > 0
    _need(
        a.adv_estimator != "maxrl" or not lowers,
        "algorithm.adv_estimator='maxrl' needs rewards of at least 0: leave "
        "algorithm.use_kl_in_reward and algorithm.overlong_buffer at their defaults",
    )


def _thresholds_make_sense(c: Config) -> None:
    a = c.algorithm
    for name, given, most in (
        ("rollout_is", a.rollout_is_threshold, 2),
        ("rollout_rs", a.rollout_rs_threshold, 2 if a.rollout_rs.endswith("k1") else 1),
    ):
        whole = 1 <= len(given) <= most and all(bound > 0 for bound in given) and list(given) == sorted(given)
        _need(
            whole,
            f"algorithm.{name}_threshold={given} must be [upper]"
            + " or [lower, upper]" * (most - 1)
            + f", above 0 and rising, for algorithm.{name}={getattr(a, name)!r}",
        )


def _races_make_sense(c: Config) -> None:
    s = c.scheduler
    _need(
        s.name != "sync" or s.over == s.over_samples == 1,
        f"scheduler.name='sync' waits for all it launches: scheduler."
        f"over={s.over} and scheduler.over_samples={s.over_samples} must be 1, or the name tail_batching",
    )
    _need(
        s.name != "tail_batching" or s.over > 1 == s.over_samples,
        f"scheduler.name='tail_batching' races prompts and "
        f"drops no answer: scheduler.over={s.over} must be above 1, 1.25 is usual, and scheduler.over_samples="
        f"{s.over_samples} must be 1",
    )
    _need(
        s.name != "rollpacker" or s.over > 1 or s.over_samples > 1,
        "scheduler.name='rollpacker' races nobody with "
        "scheduler.over and scheduler.over_samples at 1: the paper has 1.25 for both",
    )
    _need(
        s.name == "sync" or c.engine.name == "rows",
        f"scheduler.name={s.name!r} needs answers that take their time: "
        f"engine.name={c.engine.name!r} has none; the nearest valid name is 'sync'",
    )
    _need(
        s.name != "tail_batching" or s.lane == 0 or c.history.epochs > 0,
        f"scheduler.lane={s.lane} asks the history which "
        "prompts are long, and history.epochs=0 remembers nothing; the nearest valid lane is 0",
    )
    _need(
        s.name != "rollpacker" or c.speculation.drafter == "off",
        "scheduler.name='rollpacker' drops who needs most engine "
        f"steps: with speculation.drafter={c.speculation.drafter!r} those would be the answers that are hard to draft, not "
        "the long ones; the nearest valid drafter is 'off'",
    )


def _streams_make_sense(c: Config) -> None:
    s, a = c.scheduler, c.algorithm
    _need(
        s.long_batches == 1 or (s.name == "tail_batching" and s.stream == 0),
        f"scheduler.long_batches="
        f"{s.long_batches} is of the long rounds of 'tail_batching', where only the last batch could be streamed: with "
        f"scheduler.name={s.name!r} and scheduler.stream={s.stream} it must be 1",
    )
    _need(
        s.stream <= s.prompts,
        f"scheduler.stream={s.stream} is above scheduler.prompts={s.prompts}, the nearest valid "
        "value, which is the whole round",
    )
    _need(
        s.stream == 0 or s.updates == 1,
        f"scheduler.stream={s.stream} adds up a gradient while rollouts are generated, "
        f"so weights stand still until the round's one commit: scheduler.mini_batches={s.mini_batches} and "
        f"scheduler.ppo_epochs={s.ppo_epochs} must be 1, or the stream 0",
    )
    _need(
        s.stream == 0 or not s.filter_groups,
        f"scheduler.stream={s.stream} hands groups on before it is known which of "
        "those that scheduler.filter_groups keeps are the round's first; the nearest valid stream is 0",
    )
    _need(
        s.stream == 0 or not a.adv_estimator.startswith("reinforce_plus_plus"),
        f"algorithm.adv_estimator="
        f"{a.adv_estimator!r} whitens over all tokens of a round, which scheduler.stream={s.stream} hands on in pieces; the "
        "nearest valid stream is 0",
    )


def _pipelines_make_sense(c: Config) -> None:
    s, piped = c.scheduler, c.scheduler.name == "pipeline"
    for name in ("max_staleness", "ahead", "max_unscored", "interleave"):
        _need(
            piped or getattr(s, name) == 0,
            f"scheduler.{name}={getattr(s, name)} is of scheduler.name='pipeline'; for {s.name!r} it must be 0",
        )
    _need(
        not piped or s.updates == 1,
        f"scheduler.name='pipeline' publishes after every optimizer step, on new answers each: "
        f"scheduler.mini_batches={s.mini_batches} and scheduler.ppo_epochs={s.ppo_epochs} must be 1",
    )
    _need(
        not piped or s.over == s.over_samples == 1,
        f"scheduler.name='pipeline' has no rounds to race in: scheduler.over="
        f"{s.over} and scheduler.over_samples={s.over_samples} must be 1, or the name tail_batching",
    )
    _need(
        not piped or s.stream == 0,
        f"scheduler.stream={s.stream} hands over pieces of a round, scheduler.name='pipeline' "
        "whole batches; the nearest valid stream is 0",
    )
    _need(
        not piped or s.placement in ("least_loaded", "divided"),
        f"scheduler.placement={s.placement!r} orders the answers of "
        "a round, which scheduler.name='pipeline' has not; the nearest valid value is 'divided'",
    )
    _need(
        not piped or not c.engine.layouts,
        f"engine.layouts={c.engine.layouts} are changed between rounds, which scheduler."
        "name='pipeline' has not; leave it empty",
    )
    e = c.engine
    _need(
        piped or (e.carry_over == "keep" and e.carry_share == 1),
        f"engine.carry_over={e.carry_over!r} and engine.carry_share="
        f"{e.carry_share} are of answers that run while weights are published: with scheduler.name={s.name!r} there are none; "
        "leave them at 'keep' and 1",
    )
    _need(
        s.max_unscored == 0 or s.max_unscored >= s.prompts,
        f"scheduler.max_unscored={s.max_unscored} never holds a batch: "
        f"it must be 0 or at least scheduler.prompts={s.prompts}, the nearest valid value",
    )


def _split_makes_sense(c: Config) -> None:
    own, tensor, s = c.mesh.engine, c.mesh.tensor, c.scheduler
    if own == 0:
        return
    _need(
        s.interleave == 0,
        f"scheduler.interleave={s.interleave} divides the time of shared devices, and mesh.engine={own} "
        "generate alone; the nearest valid interleave is 0",
    )
    _need(
        own % tensor == 0,
        f"mesh.engine={own} must be a multiple of mesh.tensor={tensor}, the devices of a replica; the "
        f"nearest valid value is {max(own // tensor, 1) * tensor}",
    )
    _need(
        c.engine.name == "rows",
        f"mesh.engine={own} devices would generate, and engine.name={c.engine.name!r} does not; the "
        "nearest valid value is 0",
    )
    _need(
        not c.engine.layouts,
        f"mesh.engine={own}: weights come in the midst of a round, and engine.layouts={c.engine.layouts} "
        "are changed between two; leave one of them empty",
    )
    _need(
        s.updates == s.long_batches == 1,
        f"mesh.engine={own} publishes after each optimizer step: scheduler.mini_batches="
        f"{s.mini_batches}, scheduler.ppo_epochs={s.ppo_epochs} and scheduler.long_batches={s.long_batches} must be 1",
    )


def _loans_make_sense(c: Config) -> None:
    s = c.scheduler
    if s.lend == 0:
        return
    told, none = f"scheduler.lend={s.lend:g} lends", "; the nearest valid lend is 0"
    _need(
        s.lend < 1,
        "scheduler.lend=1 is the share of a round's answers that is done before devices are lent to train on it, and "
        "of all of them none is left to wait for: it must be below 1; 0.4 is usual",
    )
    _need(
        s.name != "pipeline", f"{told} devices while a round drains, and scheduler.name='pipeline' has no rounds{none}"
    )
    _need(c.engine.name == "rows", f"{told} devices that generate, and engine.name={c.engine.name!r} does not{none}")
    _need(c.replicas > 1, f"{told} half of the engine's replicas, and it has one{none}")
    _need(
        not c.engine.layouts,
        f"{told} replicas within a round, and engine.layouts={c.engine.layouts} are changed between two: "
        "leave one of them empty or 0",
    )
    _need(
        s.stream > 0,
        f"{told} devices to a learner that gets groups while others are generated: scheduler.stream=0 gives it "
        "none before the round is over; the nearest valid stream is 1",
    )
    _need(
        s.placement == "least_loaded",
        f"{told} replicas in the midst of a round, of which scheduler.placement="
        f"{s.placement!r} keeps its own account; the nearest valid value is 'least_loaded'",
    )
    more = c.lent // c.mesh.tensor
    _need(
        c.batch.rows % more == 0,
        f"{told} {more} shards for micro-batches of batch.rows={c.batch.rows}, which must be a "
        f"multiple of it; the nearest valid value is {-(-c.batch.rows // more) * more}",
    )


def _rewards_make_sense(c: Config) -> None:
    r = c.reward
    _need(
        len(r.weights) in (0, len(r.functions)),
        f"reward.weights has {len(r.weights)} entries, reward.functions {len(r.functions)}: give none or one each",
    )
    _need(
        r.timeout_s >= r.limit_s,
        f"reward.timeout_s={r.timeout_s:g} ends a grader before the program that it judges reaches "
        f"its limit of {r.limit_s:g} s (reward.test_limit_s, reward.adaptive_limit); the nearest valid value is {r.limit_s:g}",
    )


_RULES = (
    _model_given,
    _rows_fit,
    _lengths_fit,
    _something_can_be_drawn,
    _shards_fit,
    _groups_make_sense,
    _rounds_divide,
    _loans_make_sense,
    _races_make_sense,
    _streams_make_sense,
    _pipelines_make_sense,
    _split_makes_sense,
    _loss_makes_sense,
    _thresholds_make_sense,
    _rewards_make_sense,
    _demonstrations_are_imitated,
    _evaluations_are_reached,
    _layouts_fit,
    _placements_know,
)


def default(schema: type = Config) -> ml_collections.ConfigDict:
    """Every field with its default, as a ConfigDict that refuses unknown names; mappings (a task's own arguments) take
    any. Fill `model` before `resolve`. `schema`: another one than a run's, made of the same kinds of field."""
    return _mirror(schema)


def _fields(schema) -> dict[str, tuple[Any, dataclasses.Field]]:
    hints = typing.get_type_hints(schema)
    return {f.name: (hints[f.name], f) for f in dataclasses.fields(schema)}


def _mirror(schema) -> ml_collections.ConfigDict:
    out, mappings = ml_collections.ConfigDict(type_safe=False), []
    for name, (kind, f) in _fields(schema).items():
        if dataclasses.is_dataclass(kind):
            out[name] = _mirror(kind)
        elif f.default is not dataclasses.MISSING:
            out[name] = f.default
        else:
            out[name] = ml_collections.ConfigDict()
            mappings.append(name)
    out.lock()  # and everything in it
    for name in mappings:
        out[name].unlock()
    return out


# Whatever Python itself raises while a config file runs; it is the user's own code, so its mistakes are the file's.
_MISTAKES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    ImportError,
    LookupError,
    NameError,
    OSError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
)


def load(path: str) -> ml_collections.ConfigDict:
    """What `get_config()` of a Python file returns; ValueError with the line of a mistake in it."""
    file = Path(path)
    if not (file.is_file() and file.suffix == ".py"):
        near = difflib.get_close_matches(f"{file.stem}.py", [p.name for p in file.parent.glob("*.py")], n=1)
        raise ValueError(
            f"--config={path}: no such Python file" + (f"; nearest is {file.parent / near[0]}" if near else "")
        )
    spec = importlib.util.spec_from_file_location(f"config_{file.stem}", file)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        given = module.get_config()
    except _MISTAKES as error:
        raise ValueError(_mistake(file, error)) from error
    _need(
        isinstance(given, ml_collections.ConfigDict),
        f"--config={path}: get_config() must return the ConfigDict of "
        f"jaxrl_post.config.default(), got {type(given).__name__}",
    )
    return given


def _mistake(file: Path, error: Exception) -> str:
    """One sentence on an error in a config file: its line, what it says, the nearest valid name."""
    lines = [str(frame.lineno) for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
    lines += [str(error.lineno)] if isinstance(error, SyntaxError) else []
    said = str(error if isinstance(error, OSError) or not error.args else error.args[0]).splitlines()
    text = said[0] if said and said[0] else type(error).__name__
    unknown = re.match(r"\W*(?:Key )?\W*(\w+)\W*($|does not exist|n?Did you mean)", text)  # as ml_collections puts it
    if unknown and isinstance(error, (AttributeError, KeyError)):
        near = _nearest(unknown[1], Config, "")
        text = f"unknown name {unknown[1]!r}" + (f"; nearest valid name is {near!r}" if near else "")
    return f"--config={file}{':' if lines else ''}{''.join(lines[-1:])}: {text}"


def resolve(given: ml_collections.ConfigDict | Mapping, overrides: Sequence[str] = (), schema: type = Config) -> Any:
    """The frozen Config (or `schema`) of a config file's dict and of `a.b=value` overrides, in order.

    Raises:
      ValueError: unknown name (with the nearest), wrong type, value out of range, or a cross-field rule broken.
    """
    values = given.to_dict() if isinstance(given, ml_collections.ConfigDict) else copy.deepcopy(dict(given))
    for override in overrides:
        _override(values, override, schema)
    return _build(schema, values, "")


def _override(values: dict, override: str, root: type) -> None:
    path, equals, text = override.partition("=")
    _need(bool(equals), f"--config.{override}: write --config.{path}=VALUE")
    *parents, leaf = path.split(".")
    schema, where = root, values
    for depth, name in enumerate(parents):
        if schema is not None:
            _known(schema, name, ".".join(parents[:depth]), root)
            kind = _fields(schema)[name][0]
            schema = kind if dataclasses.is_dataclass(kind) else None
        where = where.setdefault(name, {})
        _need(isinstance(where, dict), f"--config.{path}: {'.'.join(parents[: depth + 1])} has no fields")
    kind = None
    if schema is not None:  # else inside a mapping
        _known(schema, leaf, ".".join(parents), root)
        kind = _fields(schema)[leaf][0]
        if dataclasses.is_dataclass(kind):
            raise ValueError(
                f"--config.{path} is a section: set one of its fields, for example "
                f"--config.{path}.{dataclasses.fields(kind)[0].name}=VALUE"
            )
    where[leaf] = text if kind is str else _literal(text)


def _literal(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _known(schema, name: str, where: str, root: type) -> None:
    names = list(_fields(schema))
    if name not in names:
        near = _nearest(name, schema, where, root)
        raise ValueError(
            f"config: unknown name {(f'{where}.{name}' if where else name)!r}"
            + (f"; nearest valid name is {near!r}" if near else f"; valid names are {', '.join(names)}")
        )


def _nearest(name: str, schema, where: str, root: type = Config) -> str | None:
    """The full name most like `name`: of the same section first among equals, else of any section."""
    named = {f"{where}.{own}" if where else own: (own, 0.1) for own in _fields(schema)}
    for section, (kind, _) in _fields(root).items():
        if dataclasses.is_dataclass(kind):
            named.update({f"{section}.{leaf}": (leaf, 0.0) for leaf in _fields(kind) if section != where})
    score = {full: difflib.SequenceMatcher(None, name, leaf).ratio() + bonus for full, (leaf, bonus) in named.items()}
    best = max(score, key=score.get)
    return best if score[best] >= 0.6 else None


def _build(schema, values: Mapping, where: str, root: type | None = None):
    out, root = {}, root or schema
    for name, value in values.items():
        _known(schema, name, where, root)
        kind, f = _fields(schema)[name]
        full = f"{where}.{name}" if where else name
        if dataclasses.is_dataclass(kind):
            _need(isinstance(value, Mapping), f"config: {full} is a section, got {value!r}")
            out[name] = _build(kind, value, full, root)
        else:
            out[name] = _checked(full, kind, f, value)
    return schema(**out)


def _checked(full: str, kind, f: dataclasses.Field, value):
    value = _coerced(full, kind, value)
    low, high, choices = (f.metadata.get(key) for key in ("low", "high", "choices"))
    if choices is not None and value not in choices:
        near = difflib.get_close_matches(str(value), choices, n=1, cutoff=0.3)
        raise ValueError(
            f"config: {full}={value!r} is not one of {', '.join(choices)}"
            + (f"; nearest is {near[0]!r}" if near else "")
        )
    _need(low is None or value >= low, f"config: {full}={value!r} is below its bound; the nearest valid value is {low}")
    _need(
        high is None or value <= high, f"config: {full}={value!r} is above its bound; the nearest valid value is {high}"
    )
    return value


def _coerced(full: str, kind, value):
    wrong = f"config: {full} must be {getattr(kind, '__name__', kind)}, got {type(value).__name__} {value!r}"
    if kind is float:
        _need(isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value), wrong)
        return float(value)
    if kind is int:
        _need(isinstance(value, int) and not isinstance(value, bool), wrong)
        return value
    if kind in (bool, str):
        _need(isinstance(value, kind), wrong)
        return value
    if typing.get_origin(kind) is tuple:
        member = typing.get_args(kind)[0]
        _need(
            isinstance(value, (tuple, list)),
            f"config: {full} must be a list of {member.__name__}, got {value!r}; write [{value!r}]",
        )
        return tuple(_coerced(f"{full}[{i}]", member, v) for i, v in enumerate(value))
    _need(isinstance(value, Mapping), wrong)
    return types.MappingProxyType(dict(value))


def to_dict(config: Config) -> dict:
    """Plain nested dict, ready for JSON."""

    def plain(value):
        if dataclasses.is_dataclass(value):
            return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
        if isinstance(value, Mapping):
            return {k: plain(v) for k, v in value.items()}
        return [plain(v) for v in value] if isinstance(value, (tuple, list)) else value

    return plain(config)
