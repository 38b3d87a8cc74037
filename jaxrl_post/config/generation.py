"""The options of generation: the engine, its drafts, the sampling law, and the scheduler of rollouts."""

from __future__ import annotations

from dataclasses import dataclass

from jaxrl_post.config.fields import any_of_type, file_path, fraction, input_path, number, one_of, positive

_ENGINE = "engine.name=rows or eval.prompts>0"  # only then a row engine is built
_PIPED = "scheduler.name=pipeline|auto"
_ONE_BATCH = "without staleness no more than the groups of one step are open"
_STALE = f"scheduler.name=pipeline|auto and scheduler.max_staleness>0 because {_ONE_BATCH}"


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The engine that generates rollouts. Sizes are per replica.

    A replica that spans n times the devices in a further layout has n times the slots, pages and rows.
    """

    name: str = one_of(
        "rows|demonstrations|preferences",
        doc="What writes the training rollouts: the row engine, worked solutions of the data for supervised training, or its "
        "pairs of a chosen and a rejected completion.",
    )
    slots: int = positive(64, unit="slots", doc="Rollouts that one replica generates at the same time.")
    max_length: int = number(512, 2, unit="tokens", doc="The longest prompt and rollout together.")
    page_size: int = positive(
        16, unit="tokens", used_when=_ENGINE, accelerator=64, doc="Tokens in one page of the KV cache."
    )
    pages: int = number(
        0, unit="pages", used_when=_ENGINE, doc="Pages of the KV cache. 0: enough for every slot at `max_length`."
    )
    row_sizes: tuple[int, ...] = any_of_type(
        (64, 128),
        unit="rows",
        used_when=_ENGINE,
        doc="Rows per step that are compiled. At the start, sizes whose bits differ from the largest size are dropped.",
    )
    prompt_rows: int = number(
        0,
        0,
        1 << 15,
        unit="rows",
        used_when=_ENGINE,
        doc="Rows of a wide program that computes prompts before they are sampled from. It reads far less KV cache for long "
        "prompts. 0: the row program computes them. Tokens of the two differ at near ties.",
    )
    head_rows: int = number(
        0,
        unit="rows",
        used_when=_ENGINE,
        doc="Rows that may sample in one step. 0: as many as slots, or all rows with a drafter. No bits depend on it.",
    )
    steps_per_dispatch: int = positive(
        8,
        unit="steps",
        used_when=_ENGINE,
        doc="Engine steps that the device takes before the host looks at the results.",
    )
    refill_slots: int = positive(
        4, unit="slots", used_when=_ENGINE, doc="A dispatch ends early when this many slots are free and requests wait."
    )
    dtype: str = one_of(
        "float32|bfloat16",
        used_when=_ENGINE,
        accelerator="bfloat16",
        doc="Number format of the engine's weights, activations and KV cache.",
    )
    cost_table: str = input_path(
        "",
        used_when=f"{_ENGINE} or scheduler.placement=rank_groups",
        doc="File of step costs, written by scripts/bench.py cost. Empty: the analytic table of the device kind.",
    )
    layouts: tuple[int, ...] = any_of_type(
        (),
        unit="devices per replica",
        used_when="engine.name=rows because demonstrations lie on no devices",
        doc="Further tensor parallelisms, for example (2, 4), compiled at the start. "
        "A planner chooses one for each round by its forecasts.",
    )
    sleep: bool = any_of_type(
        False,
        used_when="engine.name=rows because demonstrations lie on no devices",
        doc="Whether the engine's own weights, its KV cache and the drafter's tables are freed while the learner works. "
        "Each publish makes them again.",
    )
    carry_over: str = one_of(
        "keep|recompute|verify|auto",
        used_when="scheduler.name=pipeline|auto and scheduler.max_staleness>0 "
        "because only a pipeline that allows staleness publishes weights while rollouts run",
        doc="What happens to running rollouts at a weight sync: keep tokens and KV cache, recompute the KV cache, "
        "or verify the tokens under the new weights.",
    )
    carry_share: float = fraction(
        1.0,
        unit="share of rows",
        used_when="engine.carry_over!=keep",
        doc="The most of all rows that may be computed again for `carry_over`. 1: any number.",
    )
    weights: str = one_of(
        "auto|int8|fp8",
        used_when=_ENGINE,
        doc="Number format of the matrices of layers: `dtype`, or 8 bits with a scale for each output, made at every publish. "
        "Embeddings, head, norms and routers keep `dtype`.",
    )
    kv: str = one_of(
        "auto|int8|fp8",
        used_when=_ENGINE,
        doc="Number format of the KV cache: `dtype`, or 8 bits with a scale for each key and each value.",
    )
    products: str = one_of(
        "auto|library|fixed",
        used_when=_ENGINE,
        doc="Products and norms of a step. `library`: XLA's own. `fixed`: ours, whose bits do not depend on the number of rows, on "
        "replicas of one device. `auto`: the library's, on GPUs in parts with one kernel between two of them, where there is one.",
    )
    uncorrected: bool = any_of_type(
        False,
        used_when="engine.weights!=auto or engine.kv!=auto or model.weights!=auto",
        doc="Whether a run may train on rollouts of 8 bits without importance weights, rejection, or model.weights.",
    )
    one_graph: bool = any_of_type(
        False,
        used_when=_ENGINE,
        doc="Whether a GPU runs all steps of a dispatch as one CUDA graph, and not each step as one. It compiles. No GPU has run "
        "it yet. Other devices have no graphs.",
    )


@dataclass(frozen=True, kw_only=True)
class SpeculationConfig:
    """Speculative decoding from past rollouts. Table sizes are per replica.

    An entry has 4 bytes, and 12 bytes with the drafters `histospec` and `histospec_rewards`.
    """

    drafter: str = one_of(
        "off|ngram|histospec|histospec_rewards|ours",
        used_when=_ENGINE,
        doc="What proposes draft tokens. `off` compiles no drafting at all.",
    )
    width: int = number(7, 2, unit="tokens", used_when="speculation.drafter!=off", doc="The most tokens of one draft.")
    prompt_entries: int = number(
        1 << 17,
        unit="entries",
        used_when="speculation.drafter=histospec|histospec_rewards|ours",
        doc="Table size for the past rollouts of the prompts in slots.",
    )
    shared_entries: int = number(
        3 << 15,
        unit="entries",
        used_when="speculation.drafter=ours",
        doc="Table size for the latest rollouts of all prompts.",
    )
    live_entries: int = number(
        1 << 11,
        16,
        unit="entries",
        used_when="speculation.drafter=ngram|ours",
        doc="Table size for the running rollouts: of one prompt with `ours`, of one slot with `ngram`.",
    )
    clones: bool = any_of_type(
        True,
        used_when="speculation.drafter!=off",
        doc="Whether free slots try other drafts for rollouts that still run. It does not always save steps.",
    )


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """The sampling law of training rollouts. Evaluation has its own: eval.temperature and eval.top_p.

    With `top_k` or `top_p` the rollout log-probs are of the cut distribution. With `keep_mask` the learner's are of the same
    one. Without it they are of the whole one, as verl's: the logged gap then holds the mass that was cut, and
    algorithm.rollout_is weighs by it.
    """

    temperature: float = number(
        1.0, doc="Divides the logits before sampling. 0: greedy, with the log-probs of temperature 1."
    )
    top_k: int = number(
        0,
        -1,
        unit="ids",
        used_when="engine.name=rows",
        doc="Only this many most likely ids may be drawn. 0 or -1: all of them.",
    )
    top_p: float = fraction(
        1.0,
        unit="share of probability",
        used_when="engine.name=rows",
        doc="Only the most likely ids that together hold this probability may be drawn. 1: all of them.",
    )
    keep_mask: bool = any_of_type(
        True,
        used_when="sampling.top_k>0 or sampling.top_p!=1.0",
        doc="Whether the engine records the ids that the cuts left of every token, at most `top_k`. Log-probs, KL and entropy of "
        "the learner are then of these ids alone (arXiv 2512.02556, section 3.1).",
    )
    keep_routes: bool = any_of_type(
        True,
        used_when="engine.name=rows",
        doc="Whether the engine of a model with experts records those of every sampled token, a byte each up to 255 experts.",
    )
    max_tokens: int = positive(256, unit="tokens", doc="The longest rollout, its prompt not counted.")
    stop_ids: tuple[int, ...] = any_of_type(
        (), unit="ids", doc="Token ids that end a rollout, beside the end tokens of the tokenizer."
    )
    stop_strings: tuple[str, ...] = any_of_type((), used_when=_ENGINE, doc="Texts that end a rollout.")

    @property
    def restricted(self) -> bool:
        return self.top_k > 0 or self.top_p < 1


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Which prompts are generated when, and when the learner gets them.

    - `sync` waits for every rollout of a round.
    - `tail_batching` starts `over` x `prompts` groups. It trains on the first `prompts` groups to finish and defers the
      others to a long round.
    - `rollpacker` starts `over` x `prompts` groups of `over_samples` x `group_size` rollouts. It drops the slow rollouts
      and draws slow prompts again, so it trains on shorter rollouts than the policy gives. It exists for comparison.
    - `pipeline` has no rounds: every slot stays full, each optimizer step trains on the oldest `prompts` whole groups,
      and new weights reach the rollouts that run.
    - `auto` simulates sync, tail batching and a pipeline before the run, and takes the one with the fewest seconds of an
      optimizer step. The choice is kept with the run and never made again.
    """

    name: str = one_of("sync|tail_batching|rollpacker|pipeline|auto", doc="How rollouts become training batches.")
    auto_history: str = file_path(
        "",
        used_when="scheduler.name=auto because the other schedulers choose nothing",
        doc="Where the lengths of rollouts come from: the folder of an earlier run, a rollout log, or a trace (.jsonl, .csv, "
        ".txt). Empty: RollPacker's fitted lengths, scaled to sampling.max_tokens.",
    )
    placement: str = one_of(
        "least_loaded|divided|longest_first|rank_groups",
        doc="Which replica gets a rollout. `least_loaded`: whole groups to the replica with the fewest rollouts. "
        "`divided`: a rollout at a time, when a slot is free. `longest_first`: the same, the longest expected first. "
        "`rank_groups`: prompts of like length on replicas of their own.",
    )
    over: float = number(
        1.0,
        1.0,
        unit="times prompts",
        used_when="scheduler.name=tail_batching|rollpacker "
        "because sync waits for all it launches, and a pipeline has no rounds to race in",
        doc="Groups that a short round starts for each group that it trains on. 1.25 is usual.",
    )
    over_samples: float = number(
        1.0,
        1.0,
        unit="times group_size",
        used_when="scheduler.name=rollpacker because only rollpacker drops rollouts",
        doc="Rollouts of a prompt that a short round starts for each one that it trains on.",
    )
    prefix_mode: str = one_of(
        "verify|recompute|restart",
        used_when="scheduler.name=tail_batching because only tail batching continues deferred groups",
        doc="How a deferred group continues under newer weights: verify its tokens, keep them and recompute the KV cache, "
        "or restart.",
    )
    long_batches: int = positive(
        1,
        unit="batches",
        used_when="scheduler.name=tail_batching because only tail batching has long rounds of several batches",
        doc="Batches of one long round. They are trained on one after the other.",
    )
    lane: float = fraction(
        0.0,
        unit="share of the surplus",
        used_when="scheduler.name=tail_batching because only tail batching can send a group to a long round at once",
        doc="How much of the surplus goes to a long round at once, where past rollouts of the prompt were long. "
        "This saves tokens, and not always time.",
    )
    stream: int = number(
        0,
        unit="groups",
        used_when="scheduler.name!=pipeline because a pipeline hands over whole batches, not pieces of a round",
        doc="Groups that are scored and handed to the learner together while others are generated. "
        "0: the whole round at its end.",
    )
    max_staleness: int = number(
        0,
        unit="optimizer steps",
        used_when=_PIPED,
        doc="No token that is trained on is older than this. `auto` chooses a pipeline, or tail batching with "
        "`recompute`, only where this allows it.",
    )
    ahead: int = number(0, unit="rollouts", used_when=_PIPED, doc="Requests that wait for a free slot.")
    max_unscored: int = number(
        0,
        unit="groups",
        used_when=_STALE,
        doc="The most whole groups whose graders are still at work. 0: those of one batch.",
    )
    max_ready: int = number(
        0,
        unit="groups",
        used_when=_STALE,
        doc="Whole groups that may wait for the learner before no more are begun. Tokens are fresher so where the learner "
        "is the slower side. 0: any number.",
    )
    interleave: float = number(
        0.0,
        unit="seconds per second",
        used_when=f"scheduler.name=pipeline and scheduler.max_staleness>0 because {_ONE_BATCH}",
        doc="On shared devices: seconds of generation for each second of training, in turns by micro-batch. "
        "0: the engine rests during an optimizer step.",
    )
    lend: float = fraction(
        0.0,
        unit="share of rollouts",
        doc="Half of the replicas are lent to the learner once this share of a round is done and the rest fits. "
        "0: never. It needs a streamed round.",
    )
    prompts: int = positive(32, unit="prompts", doc="Groups of one round (verl: train_batch_size).")
    group_size: int = positive(8, unit="rollouts", doc="Rollouts of one prompt (verl: rollout.n).")
    filter_groups: bool = any_of_type(
        False,
        doc="Whether groups whose rollouts all have one value of `filter_metric` are left out and replaced by other prompts.",
    )
    filter_metric: str = any_of_type(
        "seq_reward",
        used_when="scheduler.filter_groups=true because without filters no group is left out",
        doc="What tells the rollouts of a group apart (verl: algorithm.filter_groups.metric). seq_reward, score: the summed "
        "reward; acc: the accuracy; else the name of a reward function or of a component.",
    )
    max_waves: int = positive(
        10,
        unit="waves",
        used_when="scheduler.filter_groups=true because without filters one wave fills a round",
        doc="The most waves of prompts that may be drawn to fill one round. Beyond it the run ends with an error.",
    )
    mini_batches: int = positive(
        1, unit="optimizer steps", doc="Equal parts of a round, with one optimizer step for each."
    )
    ppo_epochs: int = positive(1, unit="passes", doc="How often a round is trained on before weights are published.")

    @property
    def updates(self) -> int:
        """Optimizer steps per round."""
        return self.mini_batches * self.ppo_epochs
