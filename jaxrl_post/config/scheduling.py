"""The relations of a scheduler and its devices, which hold in a run and, under its own names, in the simulator.

Each entry names the options, what must hold of their values, the sentence that refuses them, and where there is one the
nearest valid value. Options are named by section and name (relations.py).
"""

from __future__ import annotations

from jaxrl_post.config.relations import relation, rows

_ONE_STEP = "{scheduler.mini_batches} and {scheduler.ppo_epochs} must be 1"


def _fitting(own: int, devices: int) -> list[int]:
    """Returns the tensor parallelisms above `own` that divide the devices."""
    return [n for n in range(2 * own, devices + 1, own) if devices % n == 0]


def _unfit(layouts: tuple, own: int, devices: int) -> int | None:
    """Returns the first layout that does not divide the devices; None where all do."""
    return next((n for n in layouts if n not in _fitting(own, devices)), None)


def _nearest_layouts(layouts: tuple, own: int, devices: int) -> tuple:
    fitting = _fitting(own, devices)
    near = (min(fitting, key=lambda n: (abs(n - tensor), n)) for tensor in layouts if fitting)
    return tuple(dict.fromkeys(near))


_ROWS = rows(
    {
        "scheduler.stream <= scheduler.prompts": "{scheduler.stream} is above {scheduler.prompts}, which is the whole "
        "round",
        "scheduler.filter_groups=true -> scheduler.stream is 0": "{scheduler.stream} hands groups on before it is known "
        "which of those that scheduler.filter_groups keeps are the round's first",
        "scheduler.name=pipeline -> engine.layouts is ()": "{engine.layouts} are changed between rounds, which "
        "scheduler.name='pipeline' has not",
        "scheduler.max_unscored>0 -> scheduler.max_unscored >= scheduler.prompts": "{scheduler.max_unscored} never holds "
        "a batch: it must be 0 or at least {scheduler.prompts}",
        "mesh.engine>0 -> scheduler.interleave is 0": "{scheduler.interleave} divides the time of shared devices, and "
        "with {mesh.engine} none are shared",
        "scheduler.placement=rank_groups and replicas=0|1 -> scheduler.placement is least_loaded": "scheduler.placement='rank_groups' "
        "needs replicas to choose from, and there is one",
    }
)

SCHEDULING = (
    *_ROWS,
    relation(
        "scheduler.mini_batches",
        "scheduler.prompts",
        need=lambda parts, prompts: prompts % parts == 0,
        says="{scheduler.mini_batches} must divide {scheduler.prompts}",
        nearest=lambda parts, prompts: max(n for n in range(1, parts + 1) if prompts % n == 0),
    ),
    relation(
        "scheduler.over",
        when="scheduler.name=tail_batching",
        need=lambda over: over > 1,
        says="scheduler.name='tail_batching' races prompts and drops no rollout: {scheduler.over} must be above 1, 1.25 is "
        "usual",
    ),
    relation(
        "scheduler.over",
        "scheduler.over_samples",
        when="scheduler.name=rollpacker",
        need=lambda over, over_samples: over > 1 or over_samples > 1,
        says="scheduler.name='rollpacker' races nobody with {scheduler.over} and {scheduler.over_samples}: the paper has 1.25 "
        "for both",
    ),
    relation(
        "scheduler.long_batches",
        "scheduler.stream",
        need=lambda batches, stream: batches == 1 or stream == 0,
        says="{scheduler.long_batches} makes several batches of a long round, of which only the last one could be streamed: with "
        "{scheduler.stream} it must be 1",
    ),
    relation(
        "scheduler.updates",
        when="scheduler.stream>0",
        need=lambda updates: updates == 1,
        says="{scheduler.stream} adds up a gradient while rollouts are generated, so weights stand still until the round's one "
        f"commit: {_ONE_STEP}, or the stream 0",
    ),
    relation(
        "scheduler.filter_metric",
        need=lambda metric: metric.strip() not in ("", "seq_final_reward"),
        says="{scheduler.filter_metric} must name the reward or a part of it; verl's 'seq_final_reward' holds the KL, which the "
        "learner alone knows",
        nearest=lambda metric: "seq_reward",
    ),
    relation(
        "scheduler.updates",
        when="scheduler.name=pipeline",
        need=lambda updates: updates == 1,
        says=f"scheduler.name='pipeline' publishes after every optimizer step, on new rollouts each: {_ONE_STEP}",
    ),
    relation(
        "scheduler.placement",
        when="scheduler.name=pipeline",
        need=lambda placement: placement in ("least_loaded", "divided"),
        says="{scheduler.placement} orders the rollouts of a round, which scheduler.name='pipeline' has not",
        nearest=lambda placement: "divided",
    ),
    relation(
        "scheduler.max_ready",
        "scheduler.prompts",
        "scheduler.max_unscored",
        need=lambda most, prompts, unscored: most == 0 or most >= max(prompts, unscored),
        says="{scheduler.max_ready} stops admission before a batch is whole and scored: it must be 0 or at least "
        "{scheduler.prompts} and {scheduler.max_unscored}",
        nearest=lambda most, prompts, unscored: max(prompts, unscored),
    ),
    relation(
        "engine.layouts",
        when="mesh.engine>0",
        need=lambda layouts: not layouts,
        says="{mesh.engine}: weights come in the midst of a round, and {engine.layouts} are changed between two; leave one of "
        "them empty",
    ),
    relation(
        "scheduler.updates",
        "scheduler.long_batches",
        when="mesh.engine>0",
        need=lambda updates, batches: updates == batches == 1,
        says="{mesh.engine} publishes after each optimizer step: {scheduler.mini_batches}, {scheduler.ppo_epochs} and "
        "{scheduler.long_batches} must be 1",
    ),
    relation(
        "engine.layouts",
        "mesh.replica",
        "generating",
        need=lambda *given: _unfit(*given) is None,
        culprit=_unfit,
        says="{engine.layouts}: {culprit} devices a replica must be a multiple of {!mesh.replica} above it that divides the "
        "{!generating} devices",
        nearest=_nearest_layouts,
    ),
    relation(
        "engine.layouts",
        need=lambda layouts: len(set(layouts)) == len(layouts),
        says="{engine.layouts} names a layout twice",
        nearest=lambda layouts: tuple(dict.fromkeys(layouts)),
    ),
    relation(
        "engine.layouts",
        "engine.cost_table",
        need=lambda layouts, table: not (layouts and table),
        says="{engine.cost_table} was measured in one layout and {engine.layouts} compares several: leave one of them empty",
    ),
)
