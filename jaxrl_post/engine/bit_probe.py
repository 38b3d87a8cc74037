"""The start-up probe: finds the row sizes that give the same bits.

Compilers choose another matrix-product path for another number of rows, and then sums round differently. The probe runs
the same requests with every size, without drafts and with them. It keeps the sizes whose tokens, log-probs and
entropies equal those of the largest size bit for bit. With a wide prompt program, it runs them once more in the
opposite order, so that the prompts lie elsewhere in its passes. It cannot see a difference that only other weights or
longer texts show.
"""

from __future__ import annotations

import numpy as np

from jaxrl_post.engine.host.wire import PROMPT_TILE
from jaxrl_post.engine.row_engine import RowEngine
from jaxrl_post.ring.types import Prompt, Request, Rollout, RolloutId, Sampling


def keep_equal_sizes(engine: RowEngine) -> dict[int, bool]:
    """Runs the probe and sets `engine.row_sizes` to the kept sizes. Returns for every size whether it was kept.

    The engine must be idle. Its clocks and counters are reset.

    Raises:
      ValueError: with drafts, the largest size gives other bits than without. Or the place of a prompt in a pass of
        the wide prompt program changes bits.
    """
    sizes, drafting = engine.row_sizes, engine.drafting
    programs = (False, True) if drafting.drafter.width else (False,)
    results = {}
    for size in sizes:
        for drafting.forced in programs:
            engine.row_sizes = (size,)
            results[size, drafting.forced] = _bits(engine)
    engine.row_sizes, drafting.forced = (max(sizes),), False
    whole = results[max(sizes), False]
    rows = engine.sizes.prompt_rows
    if rows and _bits(engine, backwards=True) != whole:
        raise ValueError(
            f"engine.prompt_rows={rows}: here the bits of a prompt depend on its place among the rows; the nearest "
            "valid value is 0"
        )
    drafting.forced = None
    if results[max(sizes), programs[-1]] != whole:
        raise ValueError(
            f"speculation.drafter: with drafts a step of {max(sizes)} rows gives other bits here than without; "
            "the nearest valid value is off"
        )
    kept = {size: all(results[size, drafts] == whole for drafts in programs) for size in sizes}
    engine.row_sizes = tuple(size for size in sizes if kept[size])
    return kept


def _bits(engine: RowEngine, backwards: bool = False) -> bytes:
    """Runs the probe's requests and resets the engine. Returns the bytes of tokens, log-probs and entropies, by id."""
    requests = _requests(engine)
    engine.submit(requests[::-1] if backwards else requests)
    out: list[Rollout] = []
    while engine.pending:
        out += engine.step()
    engine.reset()
    out.sort(key=lambda rollout: rollout.id)
    return b"".join(r.tokens.tobytes() + r.logprobs.tobytes() + r.entropies.tobytes() for r in out)


def _requests(engine: RowEngine) -> list[Request]:
    """Returns the probe's requests: for every replica up to 24 prompts of several lengths, with two samples each."""
    sizes, noise = engine.sizes, np.random.default_rng(0)
    longest = max(1, min(sizes.max_length // 2, 3 * max(sizes.page_size, PROMPT_TILE * (sizes.prompt_rows > 0))))
    length = min(sizes.max_length - longest, 3 * sizes.steps_per_dispatch)
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
                        max_tokens=max(1, length),
                        sampling=Sampling(),
                        replica=replica,
                    )
                )
    return out
