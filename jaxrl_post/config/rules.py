"""The relations between the options of a run. Those of training are in learning.py, and those that
the simulator shares are in scheduling.py.

Each entry names the options, what must hold of their values, the sentence that refuses them, and where there is one the
nearest valid value. Nothing here imports the schema: options are named by section and name (relations.py).
"""

from __future__ import annotations

from jaxrl_post.config.conditions import is_date
from jaxrl_post.config.estimators import ESTIMATORS
from jaxrl_post.config.judging import JUDGING
from jaxrl_post.config.learning import LEARNING
from jaxrl_post.config.relations import relation
from jaxrl_post.config.scheduling import SCHEDULING

_WRITTEN = {"sft": ("demonstrations", "ones")} | dict.fromkeys(
    ("dpo", "ipo", "bradley_terry"), ("preferences", "pairs")
)
_OF_A_ROUND = "of the {!scheduler.updates} optimizer steps of a round (scheduler.mini_batches * scheduler.ppo_epochs)"


def _up(number: int, step: int) -> int:
    """Returns the smallest multiple of `step` that is not below `number`."""
    return -(-number // step) * step


def _belong(engine: str, loss: str, estimator: str) -> bool:
    """Returns whether the loss is of these advantages and of what this engine gives."""
    if loss == "gkd":
        return estimator == "distill" and engine != "preferences"
    return (engine, estimator) == _WRITTEN[loss] if loss in _WRITTEN else engine == "rows" and estimator != "pairs"


def _off(steps: tuple, updates: int) -> int | None:
    return next((step for step in steps if step % updates), None)


def _beyond(at: tuple, steps: int) -> list[int]:
    return [step for step in at if not 0 <= step <= steps][:1]


_TILE = 64  # engine/host/wire.py: PROMPT_TILE
_LEAST_OF_LAW = 1e-30  # types.py: LEAST_OF_LAW
_SIZES = (
    relation(
        "model.path",
        "model.preset",
        need=lambda path, preset: bool(path or preset),
        says="model.path and model.preset are both empty: name a checkpoint (model.path) or a preset for random weights "
        "(model.preset)",
    ),
    relation(
        "engine.row_sizes",
        need=lambda sizes: min(sizes, default=0) > 0,
        says="engine.row_sizes must hold at least one positive size, got {!engine.row_sizes}",
    ),
    relation(
        "engine.row_sizes",
        "engine.slots",
        need=lambda sizes, slots: max(sizes) >= slots,
        says="{engine.row_sizes} must reach {engine.slots}: every running slot needs a row",
        nearest=lambda sizes, slots: (*(size for size in sizes if size != max(sizes)), slots),
    ),
    relation(
        "engine.prompt_rows",
        need=lambda rows: rows % _TILE == 0,
        says=f"{{engine.prompt_rows}} must be a multiple of {_TILE}, the rows of a tile of one prompt",
        nearest=lambda rows: max(round(rows / _TILE), 1) * _TILE,
    ),
    relation(
        "engine.head_rows",
        "engine.slots",
        need=lambda rows, slots: rows == 0 or rows >= slots,
        says="{engine.head_rows} must be 0 or at least {engine.slots}",
        nearest=lambda rows, slots: slots,
    ),
    relation(
        "sampling.max_tokens",
        "engine.max_length",
        need=lambda tokens, length: tokens < length,
        says="{sampling.max_tokens} must be below {engine.max_length}, which holds prompt and rollout",
        nearest=lambda tokens, length: length - 1,
    ),
    relation(
        "batch.tokens",
        "engine.max_length",
        need=lambda tokens, length: tokens >= length,
        says="{batch.tokens} cannot hold a rollout of {engine.max_length} tokens",
        nearest=lambda tokens, length: length,
    ),
    relation(
        "engine.pages",
        "engine.max_length",
        "engine.page_size",
        need=lambda pages, length, size: pages == 0 or pages * size >= length,
        says="{engine.pages} cannot hold one rollout of {engine.max_length} tokens in pages of {!engine.page_size} tokens",
        nearest=lambda pages, length, size: _up(length, size) // size,
    ),
    *(
        relation(
            name,
            need=lambda top_p: top_p >= _LEAST_OF_LAW,
            says=f"{{{name}}} leaves nothing to draw: it must be at least {_LEAST_OF_LAW:g} and at most 1; 1 keeps every id",
        )
        for name in ("sampling.top_p", "eval.top_p")
    ),
    *(
        relation(
            name,
            need=lambda temperature: temperature == 0 or _LEAST_OF_LAW <= temperature <= 1 / _LEAST_OF_LAW,
            says=f"{{{name}}} must be 0, which is greedy, or from {_LEAST_OF_LAW:g} to {1 / _LEAST_OF_LAW:g}",
            nearest=lambda temperature: 1 / _LEAST_OF_LAW if temperature > 1 else 0.0,
        )
        for name in ("sampling.temperature", "eval.temperature")
    ),
    relation(
        "batch.rows",
        "mesh.shards",
        need=lambda rows, shards: rows % shards == 0,
        says="{batch.rows} must be a multiple of mesh.data*mesh.fsdp={!mesh.shards}",
        nearest=_up,
    ),
    relation(
        "engine.name",
        "environment.name",
        when="environment.name!=",
        need=lambda engine, name: engine == "rows",
        says="{environment.name} needs an engine that samples its turns, got {engine.name}",
        nearest=lambda engine, name: "rows",
    ),
    relation(
        "sampling.stop_strings",
        "environment.name",
        when="environment.name!=",
        need=lambda strings, name: not strings,
        says="{sampling.stop_strings} cannot end the turns of a conversation: name tokens in sampling.stop_ids",
    ),
    relation(
        "scheduler.group_size",
        when="algorithm.adv_estimator!=ones|reinforce_plus_plus|rae|gae|gae_turn|distill",
        need=lambda size: size >= 2,
        says="{algorithm.adv_estimator} compares the rollouts of a group: {scheduler.group_size} must be at least 2",
    ),
)

_STEPS = (
    *(
        relation(
            name,
            "scheduler.updates",
            need=lambda step, updates: step % updates == 0,
            says=f"{{{name}}} must be a multiple {_OF_A_ROUND}",
            nearest=_up,
        )
        for name in ("steps", "eval.every")
    ),
    relation(
        "eval.at",
        "scheduler.updates",
        need=lambda at, updates: _off(at, updates) is None,
        culprit=_off,
        says=f"{{eval.at}}: {{culprit}} must be a multiple {_OF_A_ROUND}",
        nearest=lambda at, updates: tuple(dict.fromkeys(_up(step, updates) for step in at)),
    ),
    relation(
        "eval.at",
        "steps",
        need=lambda at, steps: not _beyond(at, steps),
        culprit=lambda at, steps: _beyond(at, steps)[0],
        says="{eval.at}: {culprit} is never reached: it must be at least 0 and at most {steps}, where there is an evaluation "
        "anyway",
        nearest=lambda at, steps: tuple(step for step in at if 0 <= step <= steps),
    ),
)

_LOANS = (
    relation(
        "scheduler.lend",
        need=lambda share: share < 1,
        says="{scheduler.lend} is the share of a round's rollouts that is done before devices are lent to train on it, and of "
        "all of them none is left to wait for: it must be below 1; 0.4 is usual",
    ),
    relation(
        "scheduler.lend",
        "scheduler.name",
        when="scheduler.lend>0",
        need=lambda share, name: name != "pipeline",
        says="{scheduler.lend} lends devices while a round drains, and scheduler.name='pipeline' has no rounds",
        nearest=lambda share, name: 0,
    ),
    relation(
        "scheduler.lend",
        "engine.name",
        when="scheduler.lend>0",
        need=lambda share, name: name == "rows",
        says="{scheduler.lend} lends devices that generate, and {engine.name} does not",
        nearest=lambda share, name: 0,
    ),
    relation(
        "scheduler.lend",
        "replicas",
        when="scheduler.lend>0",
        need=lambda share, replicas: replicas > 1,
        says="{scheduler.lend} lends half of the engine's replicas, and it has one",
        nearest=lambda share, replicas: 0,
    ),
    relation(
        "engine.layouts",
        when="scheduler.lend>0",
        need=lambda layouts: not layouts,
        says="{scheduler.lend} lends replicas within a round, and {engine.layouts} are changed between two: leave one of them "
        "empty or 0",
    ),
    relation(
        "scheduler.stream",
        when="scheduler.lend>0",
        need=lambda stream: stream > 0,
        says="{scheduler.lend} lends devices to a learner that gets groups while others are generated: {scheduler.stream} "
        "gives it none before the round is over",
        nearest=lambda stream: 1,
    ),
    relation(
        "scheduler.placement",
        when="scheduler.lend>0",
        need=lambda placement: placement == "least_loaded",
        says="{scheduler.lend} lends replicas in the midst of a round, of which {scheduler.placement} keeps its own account",
        nearest=lambda placement: "least_loaded",
    ),
    relation(
        "batch.rows",
        "lent_shards",
        when="scheduler.lend>0",
        need=lambda rows, shards: shards == 0 or rows % shards == 0,
        says="{scheduler.lend} lends {!lent_shards} shards for micro-batches of {batch.rows}, which must be a multiple of it",
        nearest=_up,
    ),
)

_HISTORY = (
    relation(
        "scheduler.name",
        "engine.name",
        need=lambda name, engine: name == "sync" or engine == "rows",
        says="{scheduler.name} needs rollouts that take their time: {engine.name} has none",
        nearest=lambda name, engine: "sync",
    ),
    relation(
        "scheduler.lane",
        "history.epochs",
        need=lambda lane, epochs: lane == 0 or epochs > 0,
        says="{scheduler.lane} asks the history which prompts are long, and {history.epochs} remembers nothing",
        nearest=lambda lane, epochs: 0,
    ),
    relation(
        "speculation.drafter",
        when="scheduler.name=rollpacker",
        need=lambda drafter: drafter == "off",
        says="scheduler.name='rollpacker' drops the rollouts that need most engine steps: with {speculation.drafter} those "
        "would be the rollouts that are hard to draft, not the long ones",
        nearest=lambda drafter: "off",
    ),
    relation(
        "history.epochs",
        when="scheduler.placement=rank_groups",
        need=lambda epochs: epochs > 0,
        says="scheduler.placement='rank_groups' ranks prompts by their past rollouts: {history.epochs} must be at least 1",
    ),
)

_WHITENED = (
    relation(
        "scheduler.stream",
        when="algorithm.adv_estimator=reinforce_plus_plus*|lite_ppo|gpg|gdpo",
        need=lambda stream: stream == 0,
        says="{algorithm.adv_estimator} whitens over all tokens of a round, which {scheduler.stream} hands on in pieces",
        nearest=lambda stream: 0,
    ),
    *(
        relation(
            "scheduler.stream",
            option,
            when=when,
            need=lambda stream, chosen: stream == 0,
            says=f"{{{option}}} ranks all tokens of a round, which {{scheduler.stream}} hands on in pieces",
            nearest=lambda stream, chosen: 0,
        )
        for option, when in (
            ("algorithm.loss_mode", "algorithm.loss_mode=clip_cov|kl_cov"),
            ("algorithm.rollout_rs", "algorithm.rollout_rs=m2po"),
        )
    ),
    relation(
        "scheduler.stream",
        "algorithm.top_entropy_quantile",
        need=lambda stream, share: stream == 0 or share == 1,
        says="{algorithm.top_entropy_quantile} ranks all tokens of a round, which {scheduler.stream} hands on in pieces",
        nearest=lambda stream, share: 0,
    ),
)

_DEVICES = (
    relation(
        "mesh.engine",
        "mesh.replica",
        need=lambda engine, replica: engine % replica == 0,
        says="{mesh.engine} must be a multiple of {!mesh.replica}, the devices of a replica (mesh.engine_tensor, or mesh.tensor)",
        nearest=lambda engine, replica: max(engine // replica, 1) * replica,
    ),
    relation(
        "mesh.engine_tensor",
        "generating",
        need=lambda replica, devices: replica == 0 or devices % replica == 0,
        says="{mesh.engine_tensor} must divide the {!generating} devices that generate",
        nearest=lambda replica, devices: max(n for n in range(1, replica) if devices % n == 0),
    ),
    relation(
        "mesh.engine_tensor",
        "mesh.tensor",
        when="scheduler.lend>0",
        need=lambda replica, tensor: replica in (0, tensor),
        says="{scheduler.lend} lends replicas to the learner, so that {mesh.engine_tensor} must be {mesh.tensor}",
        nearest=lambda replica, tensor: 0,
    ),
    relation(
        "mesh.engine",
        "engine.name",
        need=lambda engine, name: engine == 0 or name == "rows",
        says="{mesh.engine} devices would generate, and {engine.name} does not",
        nearest=lambda engine, name: 0,
    ),
)

_SLEEP = (
    *(
        relation(
            "engine.sleep",
            name,
            need=lambda sleep, other, idle=idle: not sleep or other == idle,
            says=f"{{engine.sleep}} frees the engine while the learner works, and with {{{name}}} both work",
            nearest=lambda sleep, other: False,
        )
        for name, idle in (
            ("mesh.engine", 0),
            ("scheduler.stream", 0),
            ("scheduler.interleave", 0.0),
            ("scheduler.lend", 0),
            ("engine.layouts", ()),
        )
    ),
    relation(
        "engine.sleep",
        when="scheduler.name=pipeline",
        need=lambda sleep: not sleep,
        says="{engine.sleep} frees the engine while the learner works, and with scheduler.name='pipeline' rollouts run on",
        nearest=lambda sleep: False,
    ),
)

_PARTS = (
    relation(
        "data.weights",
        "data.sources",
        when="data.sources!=",
        need=lambda weights, sources: len(weights) in (0, len(sources)),
        says="data.weights has {#data.weights} entries, data.sources {#data.sources}: give none or one each",
    ),
    relation(
        "data.weights",
        when="data.sources!=",
        need=lambda weights: all(0 < weight < float("inf") for weight in weights),
        says="{data.weights} must all be finite and above 0: leave a source of weight 0 out of data.sources",
    ),
    relation(
        "curriculum.groups",
        "history.epochs",
        when="curriculum.interest=variance|failure and history.epochs>0 or curriculum.skip_epochs>0 and history.epochs>0",
        need=lambda groups, epochs: groups <= epochs,
        says="{curriculum.groups} is more than {history.epochs} keeps of a prompt",
        nearest=lambda groups, epochs: epochs,
    ),
    relation(
        "curriculum.hopeless",
        "curriculum.solved",
        when="curriculum.skip_epochs>0",
        need=lambda hopeless, solved: hopeless < solved,
        says="{curriculum.hopeless} must be below {curriculum.solved}",
        nearest=lambda hopeless, solved: 0.0,
    ),
    relation(
        "data.date",
        need=is_date,
        says="{data.date} must be a date or a time in ISO form, such as 2026-07-31 or 2026-07-31T12:00",
    ),
    relation(
        "reward.weights",
        "reward.functions",
        need=lambda weights, functions: len(weights) in (0, len(functions)),
        says="reward.weights has {#reward.weights} entries, reward.functions {#reward.functions}: give none or one each",
    ),
    relation(
        "reward.timeout_s",
        "reward.limit_s",
        when="environment.name=",
        need=lambda timeout, limit: timeout >= limit,
        says="{reward.timeout_s} ends a grader before the program that it judges reaches its limit of {!reward.limit_s} s "
        "(reward.test_limit_s, reward.adaptive_limit)",
        nearest=lambda timeout, limit: limit,
    ),
)

_KINDS = (  # first, because other relations speak of one of these alone
    relation(
        "engine.name",
        "algorithm.loss_mode",
        "algorithm.adv_estimator",
        need=_belong,
        says="{engine.name} with {algorithm.loss_mode} and {algorithm.adv_estimator}: supervised training is 'demonstrations' "
        "with 'sft' and 'ones' (configs/sft.py), training on preferences is 'preferences' with 'dpo', 'ipo' or 'bradley_terry' and "
        "'pairs', 'gkd' is with 'distill', and 'rows' has other losses",
    ),
)

RUN = (
    *_KINDS,
    *_SIZES,
    *_STEPS,
    *_LOANS,
    *_HISTORY,
    *_WHITENED,
    *ESTIMATORS,
    *SCHEDULING,
    *_DEVICES,
    *_SLEEP,
    *LEARNING,
    *JUDGING,
    *_PARTS,
)
