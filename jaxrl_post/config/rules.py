"""The relations between the options of a run. Those of training are in learning.py, and those that
the simulator shares are in scheduling.py.

Each entry names the options, what must hold of their values, the sentence that refuses them, and where there is one the
nearest valid value. Nothing here imports the schema: options are named by section and name (relations.py).
"""

from __future__ import annotations

from jaxrl_post.config.fields import is_date
from jaxrl_post.config.learning import LEARNING
from jaxrl_post.config.relations import multiple_above, relation, rows
from jaxrl_post.config.scheduling import SCHEDULING
from jaxrl_post.config.scoring import JUDGING

_WRITTEN = {"sft": ("demonstrations", "ones")} | dict.fromkeys(
    ("dpo", "ipo", "bradley_terry"), ("preferences", "pairs")
)
_OF_A_ROUND = "of the {!scheduler.updates} optimizer steps of a round (scheduler.mini_batches * scheduler.ppo_epochs)"


def _belong(engine: str, loss: str, estimator: str) -> bool:
    """Returns whether the loss is of these advantages and of what this engine gives."""
    if loss == "gkd":
        return estimator == "distill" and engine != "preferences"
    return (engine, estimator) == _WRITTEN[loss] if loss in _WRITTEN else engine == "rows" and estimator != "pairs"


def _corrected(same: bool, weighs: str, rejects: str, prox: str, uncorrected: bool, tokens: int) -> bool:
    """Returns whether the learner knows of rollouts of 8 bits, or makes no batch at all, as a served policy."""
    return same or uncorrected or tokens == _NO_BATCH or not _plain(weighs, rejects, prox)


def _plain(weighs: str, rejects: str, prox: str) -> bool:
    """Returns whether nothing corrects: no weights, no rejection, and no ratio to the engine's own log-probs."""
    return weighs == rejects == "none" and prox != "rollout"


def _off(steps: tuple, updates: int) -> int | None:
    return next((step for step in steps if step % updates), None)


def _beyond(at: tuple, steps: int) -> list[int]:
    return [step for step in at if not 0 <= step <= steps][:1]


_WHITENS = "algorithm.adv_estimator=reinforce_plus_plus*|lite_ppo|gpg|gdpo"
_REMEMBERS = (
    "curriculum.interest=variance|failure and history.epochs>0 or curriculum.skip_epochs>0 and history.epochs>0"
)
_TILE = 64  # engine/host/wire.py: PROMPT_TILE
_MOST_KEPT, _USUAL_KEPT = 1024, 512  # ids of a token's record: 4 bytes each
_NO_BATCH = 1 << 30  # batch.tokens of launch/parts/saved_policy.py, which trains nothing
_LEAST_OF_LAW = 1e-30  # ring/types.py: LEAST_OF_LAW
_ROWS = rows(
    {
        "engine.head_rows>0 -> engine.head_rows >= engine.slots": "{engine.head_rows} must be 0 or at least "
        "{engine.slots}",
        "sampling.max_tokens < engine.max_length": "{sampling.max_tokens} must be below {engine.max_length}, which holds "
        "prompt and rollout",
        "batch.tokens >= engine.max_length": "{batch.tokens} cannot hold a rollout of {engine.max_length} tokens",
        "batch.shared_prompts=true -> algorithm.neftune_alpha is 0": "{algorithm.neftune_alpha} gives each rollout its own noise "
        "on the prompt, and batch.shared_prompts=True trains the prompt once for all",
        "batch.shared_prompts=true -> algorithm.router_aux_loss_coef is 0": "{algorithm.router_aux_loss_coef} balances experts "
        "over each rollout's prompt and answer, and batch.shared_prompts=True has the prompt once for all",
        "lora.rank>0 -> model.weights is auto": "{model.weights} rounds trained matrices, and with lora.rank above 0 they are frozen",
        "mesh.fsdp multiple_of mesh.context": "{mesh.fsdp} must be a multiple of {mesh.context}: its devices share rows",
        "mesh.context=1 -> batch.rows multiple_of mesh.shards": "{batch.rows} must be a multiple of mesh.data*mesh.fsdp*mesh.expert="
        "{!mesh.shards}",
        "mesh.context>1 -> batch.rows multiple_of mesh.shards": "{batch.rows} must be a multiple of "
        "mesh.data*mesh.fsdp*mesh.expert/mesh.context={!mesh.shards}",
        "batch.tokens multiple_of mesh.stretches": "{batch.tokens} must be a multiple of 2*mesh.context={!mesh.stretches}, the parts "
        "of a row",
        "mesh.context>1 -> scheduler.lend is 0": "{scheduler.lend} lends devices that take whole rows, and mesh.context divides rows",
        "environment.name!= -> engine.name is rows": "{environment.name} needs an engine that samples its turns, got "
        "{engine.name}",
        "scheduler.name=pipeline -> scheduler.lend is 0": "{scheduler.lend} lends devices while a round drains, and "
        "scheduler.name='pipeline' has no rounds",
        "engine.name!=rows -> scheduler.lend is 0": "{scheduler.lend} lends devices that generate, and {engine.name} "
        "does not",
        "replicas=0|1 -> scheduler.lend is 0": "{scheduler.lend} lends half of the engine's replicas, and it has one",
        "scheduler.lend>0 -> scheduler.stream >= 1": "{scheduler.lend} lends devices to a learner that gets groups while "
        "others are generated: {scheduler.stream} gives it none before the round is over",
        "scheduler.lend>0 -> scheduler.placement is least_loaded": "{scheduler.lend} lends replicas in the midst of a "
        "round, of which {scheduler.placement} keeps its own account",
        "scheduler.lend>0 -> batch.rows multiple_of lent_shards": "{scheduler.lend} lends "
        "{!lent_shards} shards for micro-batches of {batch.rows}, which must be a multiple of it",
        **{
            f"{name} multiple_of scheduler.updates": f"{{{name}}} must be a multiple {_OF_A_ROUND}"
            for name in ("steps", "eval.every")
        },
        "engine.name!=rows -> scheduler.name is sync": "{scheduler.name} needs rollouts that take their time: "
        "{engine.name} has none",
        "history.epochs=0 -> scheduler.lane is 0": "{scheduler.lane} asks the history which prompts are long, and "
        "{history.epochs} remembers nothing",
        "scheduler.name=rollpacker -> speculation.drafter is off": "scheduler.name='rollpacker' drops the rollouts that "
        "need most engine steps: with {speculation.drafter} those would be the rollouts that are hard to draft, not the "
        "long ones",
        f"{_WHITENS} -> scheduler.stream is 0": "{algorithm.adv_estimator} whitens over all tokens of a round, which "
        "{scheduler.stream} hands on in pieces",
        "algorithm.loss_mode=clip_cov|kl_cov -> scheduler.stream is 0": "{algorithm.loss_mode} ranks all tokens of a round, "
        "which {scheduler.stream} hands on in pieces",
        "algorithm.rollout_rs=m2po -> scheduler.stream is 0": "{algorithm.rollout_rs} ranks all tokens of a round, which "
        "{scheduler.stream} hands on in pieces",
        "algorithm.top_entropy_quantile!=1 -> scheduler.stream is 0": "{algorithm.top_entropy_quantile} ranks all tokens "
        "of a round, which {scheduler.stream} hands on in pieces",
        "engine.name!=rows -> mesh.engine is 0": "{mesh.engine} devices would generate, and {engine.name} does not",
        **{
            f"{name}{used} -> engine.sleep is False": f"{{engine.sleep}} frees the engine while the learner works, and with "
            f"{{{name}}} both work"
            for name, used in (
                ("mesh.engine", ">0"),
                ("scheduler.stream", ">0"),
                ("scheduler.interleave", ">0"),
                ("scheduler.lend", ">0"),
                ("engine.layouts", "!="),
            )
        },
        "scheduler.name=pipeline -> engine.sleep is False": "{engine.sleep} frees the engine while the learner works, "
        "and with scheduler.name='pipeline' rollouts run on",
        f"{_REMEMBERS} -> curriculum.groups <= history.epochs": "{curriculum.groups} is more than {history.epochs} keeps "
        "of a prompt",
        "environment.name= -> reward.timeout_s >= reward.limit_s": "{reward.timeout_s} ends a grader before the program "
        "that it judges reaches its limit of {!reward.limit_s} s (reward.test_limit_s, reward.adaptive_limit)",
    }
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
    *_ROWS,
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
        "engine.uncorrected",
        "algorithm.rollout_is",
        "algorithm.rollout_rs",
        "algorithm.prox_logp_method",
        need=lambda uncorrected, *how: not uncorrected or _plain(*how),
        says="{engine.uncorrected} asks for no correction, and {algorithm.rollout_is}, {algorithm.rollout_rs} or "
        "{algorithm.prox_logp_method} corrects: leave engine.uncorrected at its default",
    ),
    relation(
        "same_formats",
        "algorithm.rollout_is",
        "algorithm.rollout_rs",
        "algorithm.prox_logp_method",
        "engine.uncorrected",
        "batch.tokens",
        when="engine.name=rows and algorithm.loss_mode!=gkd",
        need=_corrected,
        says="{engine.weights} and {engine.kv} sample by other numbers than {model.weights} trains, and nothing corrects it: "
        "algorithm.rollout_is=token weighs tokens, engine.uncorrected=True goes on without, and with engine.kv='auto' and equal "
        "engine.dtype and model.compute_dtype, model.weights={!engine.weights} trains through the engine's rounding",
    ),
    relation(
        "engine.pages",
        "engine.max_length",
        "engine.page_size",
        need=lambda pages, length, size: pages == 0 or pages * size >= length,
        says="{engine.pages} cannot hold one rollout of {engine.max_length} tokens in pages of {!engine.page_size} tokens",
        nearest=lambda pages, length, size: multiple_above(length, size) // size,
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
        "sampling.top_k",
        "sampling.top_p",
        when="sampling.keep_mask=true and sampling.top_p!=1.0 and engine.name=rows and algorithm.loss_mode!=gkd",
        need=lambda top_k, top_p: top_k > 0,
        says="{sampling.top_p} leaves any number of ids, and sampling.keep_mask=True records them: a sampling.top_k from 1 to "
        f"{_MOST_KEPT} bounds them, and sampling.keep_mask=False records none and trains on the whole law",
        nearest=lambda top_k, top_p: _USUAL_KEPT,
    ),
    relation(
        "sampling.top_k",
        when="sampling.keep_mask=true and engine.name=rows and algorithm.loss_mode!=gkd",
        need=lambda top_k: top_k <= _MOST_KEPT,
        says=f"{{sampling.top_k}} records up to so many ids a token (sampling.keep_mask=True): at most {_MOST_KEPT} are; "
        "sampling.keep_mask=False records none and trains on the whole law",
        nearest=lambda top_k: _MOST_KEPT,
    ),
    relation(
        "sampling.keep_routes",
        when="algorithm.router_replay=true",
        need=lambda there: there,
        says="{sampling.keep_routes} records no route, and algorithm.router_replay=True repeats recorded ones",
        nearest=lambda there: True,
    ),
    relation(
        "engine.name",
        when="algorithm.router_replay=true",
        need=lambda name: name == "rows",
        says="{engine.name} records no route, and algorithm.router_replay=True repeats recorded ones",
        nearest=lambda name: "rows",
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
    relation(
        "eval.at",
        "scheduler.updates",
        need=lambda at, updates: _off(at, updates) is None,
        culprit=_off,
        says=f"{{eval.at}}: {{culprit}} must be a multiple {_OF_A_ROUND}",
        nearest=lambda at, updates: tuple(dict.fromkeys(multiple_above(step, updates) for step in at)),
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
    relation(
        "scheduler.lend",
        need=lambda share: share < 1,
        says="{scheduler.lend} is the share of a round's rollouts that is done before devices are lent to train on it, and of "
        "all of them none is left to wait for: it must be below 1; 0.4 is usual",
    ),
    relation(
        "engine.layouts",
        when="scheduler.lend>0",
        need=lambda layouts: not layouts,
        says="{scheduler.lend} lends replicas within a round, and {engine.layouts} are changed between two: leave one of them "
        "empty or 0",
    ),
    relation(
        "history.epochs",
        when="scheduler.placement=rank_groups",
        need=lambda epochs: epochs > 0,
        says="scheduler.placement='rank_groups' ranks prompts by their past rollouts: {history.epochs} must be at least 1",
    ),
    *SCHEDULING,
    relation(
        "mesh.engine",
        "mesh.replica",
        need=lambda engine, replica: engine % replica == 0,
        says="{mesh.engine} must be a multiple of {!mesh.replica}, the devices of a replica "
        "(mesh.engine_tensor, or mesh.tensor, times mesh.engine_expert, or mesh.expert)",
        nearest=lambda engine, replica: max(engine // replica, 1) * replica,
    ),
    *(
        relation(
            name,
            "mesh.replica",
            "generating",
            need=lambda own, replica, devices: own == 0 or devices % replica == 0,
            says=f"{{{name}}} makes replicas of {{!mesh.replica}} devices, which must divide the {{!generating}} that generate",
            nearest=lambda own, replica, devices: max(
                (n for n in range(1, own) if devices % (replica // own * n) == 0), default=0
            ),
        )
        for name in ("mesh.engine_tensor", "mesh.engine_expert")
    ),
    relation(
        "mesh.engine_tensor",
        "mesh.tensor",
        when="scheduler.lend>0",
        need=lambda replica, tensor: replica in (0, tensor),
        says="{scheduler.lend} lends replicas to the learner, so that {mesh.engine_tensor} must be {mesh.tensor}",
        nearest=lambda replica, tensor: 0,
    ),
    *(
        relation(
            name,
            when="scheduler.lend>0",
            need=lambda ways: ways <= 1,
            says=f"{{scheduler.lend}} lends replicas to the learner, which divides no experts there: {{{name}}} must be {valid}",
            nearest=lambda ways, valid=valid: valid,
        )
        for name, valid in (("mesh.expert", 1), ("mesh.engine_expert", 0))
    ),
    *LEARNING,
    *JUDGING,
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
)
