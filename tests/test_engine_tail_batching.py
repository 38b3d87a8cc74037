"""Tail batching on the real engine: it trains on the rollouts of synchronous rounds, and verify equals restart to the
bit.
"""

import engine_lab as lab
import numpy as np
import pytest
from frozen_rounds import multiset, rounds

pytestmark = pytest.mark.usefixtures("quick_compilation")

STEPS = 7


@pytest.fixture(scope="module")
def sync():
    return rounds("sync", steps=STEPS)[0]


@pytest.mark.parametrize(
    "mode, engine, more",
    [
        ("verify", {}, {}),
        ("recompute", {}, {}),
        ("restart", {}, {}),
        pytest.param("verify", {"pages": 14}, {}, marks=pytest.mark.extended),
        pytest.param("recompute", {"slots": 5}, {"long_batches": 2}, marks=pytest.mark.extended),
        pytest.param("verify", {"steps_per_dispatch": 1}, {"long_batches": 2}, marks=pytest.mark.extended),
    ],
)
def test_frozen_weights_train_on_what_sync_trains_on(sync, mode, engine, more):
    found, counts = rounds("tail_batching", steps=STEPS, over=1.5, prefix_mode=mode, engine=engine, **more)
    assert counts["sched/num_groups_deferred"] >= 8 and counts["sched/num_tokens_deferred"] > 100
    assert counts["sched/num_groups_queued"] == 0
    assert counts["sched/num_tokens_discarded"] == (counts["sched/num_tokens_deferred"] if mode == "restart" else 0)
    assert multiset(found) == multiset(sync)
    assert [r.id for r in found[0]] != [r.id for r in sync[0]] or [r.id for r in found[1]] != [r.id for r in sync[1]]
    bits = {r.id: (r.logprobs.tobytes(), r.entropies.tobytes(), r.finish) for rollouts in sync for r in rollouts}
    assert all(
        bits[r.id] == (r.logprobs.tobytes(), r.entropies.tobytes(), r.finish) for rollouts in found for r in rollouts
    )


@pytest.mark.extended
def test_frozen_weights_with_drafts(sync):
    """Drafts decide which rollout wins a race, never which tokens a rollout has."""
    asked = lab.requests(4)
    groups = lab.groups_of(asked, lab.run(lab.engine(), asked))
    found, counts = rounds(
        "tail_batching",
        steps=STEPS,
        over=1.5,
        engine=dict(drafting=lab.drafting("ours", groups), cost=lab.FREE_ROWS, row_sizes=(64,)),
    )
    assert counts["sched/num_groups_deferred"] >= 8
    assert multiset(found) == multiset(sync)


def moving(version):
    """Returns nearly equal weights, so that prefixes agree for a while."""
    one, two = lab.weights(0), lab.weights(1)
    return {
        name: leaf if isinstance(leaf, dict) else leaf * (1 - 0.01 * version) + 0.01 * version * two[name]
        for name, leaf in one.items()
    }


def test_when_weights_move_verify_is_restart_to_the_bit():
    verify, counts = rounds("tail_batching", steps=STEPS, weights=moving, over=1.5, prefix_mode="verify")
    restart, again = rounds("tail_batching", steps=STEPS, weights=moving, over=1.5, prefix_mode="restart")
    assert 0 < counts["sched/num_tokens_discarded"] < again["sched/num_tokens_discarded"]
    for step, (one, two) in enumerate(zip(verify, restart, strict=True)):
        assert [r.id for r in one] == [r.id for r in two]
        for a, b in zip(one, two, strict=True):
            assert set(a.versions.tolist()) == set(b.versions.tolist()) == {step}
            assert a.tokens.tobytes() == b.tokens.tobytes() and a.logprobs.tobytes() == b.logprobs.tobytes()


def test_when_weights_move_recompute_keeps_versions_and_mixes_them():
    found, _ = rounds("tail_batching", steps=STEPS, weights=moving, over=1.5, prefix_mode="recompute")
    kinds = [len(set(r.versions.tolist())) for rollouts in found for r in rollouts]
    assert max(kinds) == 2 and np.mean(np.array(kinds) == 1) > 0.5
    assert sorted(r.id for rollouts in found for r in rollouts) == sorted(
        r.id for rollouts in rounds("sync", steps=STEPS, weights=moving)[0] for r in rollouts
    )
