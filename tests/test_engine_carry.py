"""Running rollouts at a swap: each rule of the swap policy against references, within its share of rows."""

import engine_lab as lab
import pytest

from jaxrl_post.engine.host.swap_policy import SwapPolicy
from jaxrl_post.models import decoder
from jaxrl_post.parallel import mesh as meshes

pytestmark = pytest.mark.usefixtures("quick_compilation")


def placed(params):
    return meshes.put(params, meshes.param_shardings(meshes.make_mesh(), decoder.axes(lab.TINY), "engine"))


def near(step: int):
    """Returns weights close to those of the step before, so that candidates are accepted for a while."""
    old = lab.weights(0)
    return {**old, "final_norm": old["final_norm"] * (1 + 0.01 * step)}


def swapped_often(engine, asked, swaps: int, every: int = 2):
    """Returns every rollout of a run with `swaps` swaps, one after `every` dispatches, and the version at its end."""
    engine.submit(asked)
    out, ends = {}, {}
    for turn in range(10_000):
        if turn and turn % every == 0 and engine.version < swaps:
            engine.swap(placed(near(engine.version + 1)), engine.version + 1)
        for rollout in engine.step():
            out[rollout.id], ends[rollout.id] = rollout, engine.version
        if not engine.pending:
            return out, ends
    raise AssertionError("no end")


ASKED = lab.requests(48, samples=4, seed=11, longest=48)


@pytest.fixture(scope="module")
def whole():
    """Returns the rollouts under each version alone, from the start."""
    return {version: lab.run(lab.engine(near(version)), ASKED) for version in range(4)}


def test_verify_gives_what_the_last_weights_give_from_the_start(whole):
    engine = lab.engine(swap_policy=SwapPolicy("verify"))
    out, ends = swapped_often(engine, ASKED, 3)
    counts = engine.metrics()
    assert set(ends.values()) >= {1, 3} and counts["swap/num_verified"] > 20 and counts["rows/draft_accepted"] > 50
    assert counts["swap/rows"] > 100 and 0 < counts["swap/rows_share"] < 1
    for version in set(ends.values()):
        mine = {name: rollout for name, rollout in out.items() if ends[name] == version}
        assert lab.same_bits(mine, {name: whole[version][name] for name in mine})
        assert all((rollout.versions == version).all() for rollout in mine.values())


def test_recompute_keeps_tokens_and_computes_keys_and_values_anew():
    engine = lab.engine(swap_policy=SwapPolicy("recompute"))
    out, _ = swapped_often(engine, ASKED, 1, every=3)
    mixed = [r for r in ASKED if set(out[r.rollout_id].versions.tolist()) == {0, 1}]
    assert len(mixed) >= 4 and engine.metrics()["swap/num_recomputed"] >= len(mixed)
    assert [o for o in (lab.recomputed_after_swap(out[r.rollout_id], r, near(1), 1) for r in mixed) if o] == []


def test_keep_loses_no_step(whole):
    """The same weights under another version give the same bits in the same number of steps."""

    def once(swaps):
        engine = lab.engine()
        engine.submit(ASKED)
        out = {}
        while engine.pending:
            out.update((r.id, r) for r in engine.step())
            if engine.version < swaps:
                engine.swap(placed(near(0)), engine.version + 1)
        return out, engine

    plain, still = once(0)
    kept, moved = once(5)
    assert lab.same_bits(plain, kept) and moved.clock <= still.clock + 5
    assert moved.metrics()["swap/num_kept"] > 20


def test_a_share_bounds_what_is_computed_again():
    counts = {}
    for share in (0.0, 0.05, 1.0):
        engine = lab.engine(swap_policy=SwapPolicy("recompute", share))
        swapped_often(engine, ASKED, 3)
        counts[share] = engine.metrics()
        assert counts[share].get("swap/rows_share", 0.0) <= share
    assert "swap/rows" not in counts[0.0] and counts[0.0]["swap/num_beyond_share"] > 0
    assert 0 < counts[0.05]["swap/rows"] < counts[1.0]["swap/rows"] and "swap/num_beyond_share" not in counts[1.0]


def test_a_checkpoint_after_a_swap_goes_on_alike():
    """Saves right after a swap that verifies. The resumed engine gives the same bits and makes the same choices at the
    next swap."""

    def begun():
        engine = lab.engine(swap_policy=SwapPolicy("auto", 0.5))
        engine.submit(ASKED)
        out = {r.id: r for _ in range(2) for r in engine.step()}
        engine.swap(placed(near(1)), 1)
        return engine, out

    def ended(engine, out):
        for version in (2, 3):
            out |= {r.id: r for _ in range(2) for r in engine.step()}
            engine.swap(placed(near(version)), version)
        while engine.pending:
            out.update((r.id, r) for r in engine.step())
        return out, engine.metrics()

    engine, out = begun()
    state = engine.state_dict()
    want, told = ended(engine, dict(out))
    other = lab.engine(near(1), swap_policy=SwapPolicy("auto", 0.5), version=1)
    other.load_state_dict(state, {r.prompt.id: r.prompt for r in ASKED})
    got, again = ended(other, dict(out))
    assert lab.same_bits(want, got) and told == again and told["swap/num_verified"] > 0
