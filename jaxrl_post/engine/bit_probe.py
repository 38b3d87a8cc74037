"""The start-up probe: which row sizes give the same bits.

Compilers pick another matrix-product path for another row count, and then sums round differently. The probe sends the same
requests through every size, without drafts and with them, and keeps the sizes whose tokens, log-probs and entropies equal
the largest size's bit for bit.
What it cannot see: a difference that only other weights or longer texts would show.
"""

from __future__ import annotations

import numpy as np

from jaxrl_post.engine.row_engine import RowEngine
from jaxrl_post.types import Prompt, Request, Rollout, RolloutId, Sampling


def keep_equal_sizes(engine: RowEngine) -> dict[int, bool]:
    """Runs the probe, sets `engine.row_sizes` to the sizes kept, and says for every size whether it was. The engine must be
    idle; its clocks and counters start again afterwards."""
    sizes, drafting = engine.row_sizes, engine.drafting
    programs = (False, True) if drafting.drafter.width else (False,)
    results = {}
    for size in sizes:
        for drafting.forced in programs:
            engine.row_sizes = (size,)
            results[size, drafting.forced] = _bits(_answers(engine))
            engine.reset()
    drafting.forced = None
    whole = results[max(sizes), False]
    if results[max(sizes), programs[-1]] != whole:
        raise ValueError(
            f"speculation.drafter: with drafts a step of {max(sizes)} rows gives other bits here than without; "
            "the nearest valid value is off"
        )
    kept = {size: all(results[size, drafts] == whole for drafts in programs) for size in sizes}
    engine.row_sizes = tuple(size for size in sizes if kept[size])
    return kept


def _answers(engine: RowEngine) -> list[Rollout]:
    engine.submit(_requests(engine))
    out = []
    while engine.pending:
        out += engine.step()
    return sorted(out, key=lambda rollout: rollout.id)


def _requests(engine: RowEngine) -> list[Request]:
    """For each replica, prompts of several lengths with two answers each, over more slots than there are when it can."""
    sizes, noise = engine.sizes, np.random.default_rng(0)
    longest = max(1, min(sizes.max_length // 2, 3 * sizes.page))
    answer = min(sizes.max_length - longest, 3 * sizes.steps)
    out = []
    for replica in range(sizes.replicas):
        for index in range(min(sizes.slots, 24)):
            tokens = noise.integers(0, engine.vocab_size, noise.integers(1, longest + 1))
            prompt = Prompt(id=f"probe-{replica}-{index}", tokens=tokens)
            for sample in range(2):
                name = RolloutId(0, "eval", 0, prompt.id, sample)
                out.append(
                    Request(
                        rollout_id=name,
                        prompt=prompt,
                        seed=name.seed(),
                        max_tokens=max(1, answer),
                        sampling=Sampling(),
                        replica=replica,
                    )
                )
    return out


def _bits(rollouts: list[Rollout]) -> bytes:
    return b"".join(r.tokens.tobytes() + r.logprobs.tobytes() + r.entropies.tobytes() for r in rollouts)
