"""What plan, roofline and simulator predict of a run on this device, as JSON: `python scripts/rl/prediction.py CONFIG LENGTHS OPTION ...`

LENGTHS is a run's folder whose rollouts' lengths are taken, or "-" for the prior. A process of its own asks the device, so that none is
held while a run is measured. Costs are those by which a run decides: of engine.cost_table, or the analytic ones.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

import jax

from jaxrl_post import config as configs
from jaxrl_post.launch.parts import inputs
from jaxrl_post.launch.plan import chips, mode_choice, roofline, slice_plan
from jaxrl_post.simulate import observed

# The phases of a run by the parts of the roofline that they hold.
PHASES = {
    "gen_s": ("decode", "prefill", "collectives of decode", "host"),
    "update_actor_s": ("train", "collectives of training"),
    "update_weights_s": ("publish",),
}


def predicted(config: configs.Config, lengths: str) -> dict[str, Any]:
    """Returns the plan's word and MiB, the seconds of a step and its phases, and the device.

    `step_s` is the simulator's, of the run's own scheduler without drafts. `roofline_step_s` has no part that hides another.
    """
    start, cap = inputs.gather(config), config.sampling.max_tokens
    where = chips.found(jax.devices()[:1], jax.devices()[0])
    # One device sends nothing, so that any rate of links gives no seconds.
    where = dataclasses.replace(where, chip=dataclasses.replace(where.chip, link=where.chip.link or 1.0))
    seen = observed.read(lengths, cap) if lengths != "-" else observed.prior(cap)
    job = mode_choice.job(config, start, seen)
    plan = slice_plan.plan(config, start.model, where)
    parts = roofline.seconds(config, start.model, where, job.prompt_tokens, seen.told["mean"])
    context = seen.told["mean"] / 2 + job.prompt_tokens  # of a row, on average
    sizes = config.engine.row_sizes
    return {
        "device": jax.devices()[0].device_kind,
        "plan": plan.word,
        "plan_mib": plan.most / 2**20,
        "step_s": mode_choice.seconds(config, job)[1],
        "roofline_step_s": parts["all"],
        **{phase: sum(parts[name] for name in names) for phase, names in PHASES.items()},
        "steps_s": {str(size): float(job.replica.cost(size, size * context)) for size in sizes},
        "lengths": seen.told,
        "costs": job.replica.cost.source,
    }


if __name__ == "__main__":
    path, lengths, *options = sys.argv[1:]
    print(json.dumps(predicted(configs.resolve(configs.load(path), options, platform=jax.default_backend()), lengths)))
