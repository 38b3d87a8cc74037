"""What the engine emits follows the exact law: temperature, top-k and top-p, with and without candidates.

Compares the real engine's tokens with numpy's exact law by chi-square, with fixed seeds, at a family-wise level of
0.001:

- over 40 ids, every context of the first two tokens;
- over 2,053 ids (three tiles of the law), the first token;
- on a 3-token model, whole rollouts against the product of conditionals, with an end token among the three.

Candidates are a few earlier rollouts of the same prompt, the same ones again and again. Then come planted faults, each
of which must be rejected at 1e-6.
"""

from __future__ import annotations

import law_arms as arms
import pytest

from jaxrl_post.ring.types import Sampling

MINUTES = 3.0
PLATFORM = "cpu"
LEVEL, REJECTED = 1e-3, 1e-6


def show(record) -> None:
    found = {}
    for name, law in arms.LAWS.items():
        found.update(_pair(record, name, 40, law, 6000, 3, lambda told, law=law: arms.by_context(40, law, told, 2)))
    for name, law in (("tiles_plain", Sampling()), ("tiles_top_p_0_6", Sampling(top_p=0.6))):
        found.update(
            _pair(record, name, 2053, law, 12000, 2, lambda told, law=law: arms.by_context(2053, law, told, 1))
        )
    for name, law in (
        ("sequence_plain", Sampling(eos_ids=(2,))),
        ("sequence_cut", Sampling(temperature=1.5, top_k=2, top_p=0.95, eos_ids=(2,))),
    ):
        found.update(_pair(record, name, 3, law, 12000, 4, lambda told, law=law: arms.by_sequence(3, law, told, 4)))
    for name, p in found.items():
        record.figure(f"p_{name}", p, at_least=LEVEL / len(found))
    _planted(record)


def _pair(record, name: str, vocab: int, law, count: int, length: int, test) -> dict[str, float]:
    """Returns p-values without candidates and with them, and how many candidates were right and wrong."""
    engine = arms.engine(vocab)
    alone = arms.answers(engine, law, count, length)
    drafted = arms.answers(engine, law, count, length, attempt=1, drafts=arms.drafts(alone))
    counts = engine.metrics()
    # of 2,053 ids a second is hardly ever guessed
    record.figure(f"right_candidates_{name}", counts["spec/num_accepted"], at_least=100 if vocab < 100 else None)
    record.figure(f"wrong_candidates_{name}", counts["spec/num_drafted"] - counts["spec/num_accepted"], at_least=100)
    return {name: test(alone), f"{name}_with_candidates": test(drafted)}


def _planted(record) -> None:
    law = arms.LAWS["all_three"]
    honest = arms.answers(arms.engine(40), law, 3000, 3)
    for fault in arms.FAULTS:
        with pytest.MonkeyPatch.context() as patch:
            fault(patch)
            faulty = arms.engine.__wrapped__(40)
        told = arms.answers(faulty, law, 3000, 3, attempt=1, drafts=arms.drafts(honest))
        record.figure(f"p_planted_{fault.__name__}", arms.by_context(40, law, told, 2), at_most=REJECTED)
