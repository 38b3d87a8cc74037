"""Packed == unpacked, k accumulates == one batch, eight sharded devices == one: per leaf, in relative 2-norm.

The other side is always tests/made_groups.py: one sequence per row, dense attention, the papers' formulas with their
divisions written out. With x64 the bound is 1e-12; in float32 5e-6.
"""

import dataclasses
import functools

import gradient_arms as arms
import jax
import made_groups
import numpy as np
import pytest

from jaxrl_post import config
from jaxrl_post.algorithms import aggregation, credit, losses
from jaxrl_post.models import layer_loop
from jaxrl_post.models.model_config import LinearAttention
from jaxrl_post.trainer import attention, learner, programs

pytestmark = pytest.mark.usefixtures("quick_compilation")
EXACT, SINGLE = 1e-12, 5e-6
GROUPS = made_groups.groups()
ARMS = {
    "packed": dict(),
    "one_sequence_per_row": dict(tokens=26, rows=20),
    "three_accumulates": dict(parts=3),
    "other_micro_batches": dict(rows=2, tokens=30),
    "one_chunk": dict(head_chunk=100_000),
    "remat": dict(remat=True),
    "eight_devices": dict(sizes=(2, 2, 2)),
    "scanned": dict(scan_layers="yes", remat=True),
    "scanned_in_three_accumulates": dict(scan_layers="yes", parts=3),
    "scanned_and_split": dict(sizes=(2, 2, 2), scan_layers="yes", split_head="yes", remat=True),
    "offloaded": dict(scan_layers="yes", remat=True, remat_policy="offload"),
}


@pytest.fixture(scope="module")
def plain():
    return {mode: arms.plain_gradient(GROUPS, np.float64, mode=mode) for mode in arms.MODES}


@functools.cache
def learner_of(sizes=(1, 1, 1)):
    with arms.precision(np.float64):
        return arms.learner(np.float64, kind=arms.Uncommitted, sizes=sizes)


@pytest.mark.parametrize("mode", arms.MODES)
@pytest.mark.parametrize(
    "arm", ["packed", "three_accumulates", pytest.param("eight_devices", marks=pytest.mark.extended)]
)
def test_every_mode_in_x64(plain, arm, mode):
    how = dict(ARMS[arm])
    one = arms.again(learner_of(how.pop("sizes", (1, 1, 1))), np.float64, loss_agg_mode=mode)
    assert arms.worst(arms.gradient(GROUPS, np.float64, one=one, **how), plain[mode]) <= EXACT


@pytest.mark.shown("sums")
@pytest.mark.parametrize("loss_mode", ["gspo", "cispo", "sapo"])
def test_every_loss_in_x64(loss_mode):
    """gspo needs a sequence's mean inside a packed row."""
    mode = "prompt-mean" if loss_mode == "cispo" else "seq-mean-token-mean"
    plain = arms.plain_gradient(GROUPS, np.float64, mode=mode, loss_mode=loss_mode)
    for arm in ("packed", "three_accumulates", "eight_devices"):
        got = arms.gradient(GROUPS, np.float64, given=arms.algorithm(mode, loss_mode=loss_mode), **ARMS[arm])
        assert arms.worst(got, plain) <= EXACT, arm


@pytest.mark.parametrize(
    "arm",
    [
        "other_micro_batches",
        *(
            pytest.param(arm, marks=pytest.mark.extended)
            for arm in (
                "one_chunk",
                "remat",
                "scanned",
                "scanned_in_three_accumulates",
                "scanned_and_split",
                "offloaded",
            )
        ),
    ],
)
def test_what_must_not_matter_in_x64(plain, arm):
    mode = "seq-mean-token-mean"
    assert arms.worst(arms.gradient(GROUPS, np.float64, mode=mode, **ARMS[arm]), plain[mode]) <= EXACT


@pytest.mark.shown("exact-scale")
@pytest.mark.parametrize("arm", ["packed", "three_accumulates", "eight_devices", "scanned", "scanned_and_split"])
def test_float32(plain, arm):
    mode = "token-mean"
    packed = arms.gradient(GROUPS, mode=mode)
    assert arms.worst(packed, plain[mode]) <= SINGLE
    if arm != "packed":
        assert arms.worst(arms.gradient(GROUPS, mode=mode, **ARMS[arm]), packed) <= SINGLE


@pytest.mark.extended
def test_sums_in_bfloat16_are_rounded_once_for_each_micro_batch():
    """Each addition rounds by at most 2**-9 of the sum, so three parts stay within 2**-7 of the exact sum per leaf."""
    optimizer = config.OptimizerConfig(sums_dtype="bfloat16")
    exact = arms.gradient(GROUPS, parts=3)
    rounded = arms.gradient(GROUPS, parts=3, optimizer=optimizer)
    gap = arms.worst(rounded, exact)
    assert 1e-5 < gap <= 2**-7
    assert {leaf.dtype.name for leaf in jax.tree.leaves(rounded)} == {"float32"}


QUIET = arms.algorithm(kl_loss_coef=0.0)
TWELVE = dataclasses.replace(made_groups.MODEL, layers=12, windows=())  # "10" sorts before "2"


def one_commit(**how):
    """The weights after one step along the sum of three parts, on the host, and the leaves of the sums before it."""
    with arms.precision(np.float64):
        steep = config.OptimizerConfig(lr=0.05, eps=1.0)  # SGD-like
        one = arms.learner(np.float64, model=TWELVE, reference=False, given=QUIET, optimizer=steep, **how)
        one.prepare(GROUPS)
        for part in np.array_split(np.arange(len(GROUPS)), 3):
            one.accumulate([GROUPS[g] for g in part])
        leaves = len(jax.tree.leaves(one._sums.grads))
        one.commit()
        assert not any(np.any(leaf) for leaf in jax.tree.leaves(jax.device_get(one._sums)))
        return jax.device_get(one.params), leaves


@pytest.mark.shown("variants")
def test_a_step_along_stacked_sums_is_the_step_along_sums_by_layer():
    """Scanned layers have one array of sums for each name, whatever the depth. On eight devices against one."""
    (plain, by_layer), (scanned, stacked) = one_commit(), one_commit(sizes=(2, 2, 2), scan_layers="yes", remat=True)
    of_a_layer = len(jax.tree.leaves(plain["layers"]["0"]))
    assert by_layer - stacked == (TWELVE.layers - 1) * of_a_layer
    start = made_groups.weights(0, np.float64, TWELVE)
    moved = jax.tree.map(lambda a, b: a - b, plain, start)
    assert arms.worst(jax.tree.map(lambda a, b: a - b, scanned, start), moved) <= 1e-9


def test_gradients_in_stacks_of_several_kinds_are_those_by_layer():
    """Twice two layers with states, then one with attention: two stacks. On four devices against one."""
    model = dataclasses.replace(
        made_groups.MODEL, layers=6, windows=(), linear=LinearAttention(2, 4, 8, 8, 4, layers=(0, 1, 3, 4))
    )

    def gradient(**how):
        with arms.precision(np.float64):
            one = arms.learner(np.float64, model=model, kind=arms.Uncommitted, reference=False, given=QUIET, **how)
            one.prepare(GROUPS)
            one.accumulate(GROUPS)
            return jax.device_get(one._sums.grads), jax.device_get(one.gradient())

    (_, plain), (sums, scanned) = gradient(), gradient(sizes=(2, 2, 1), scan_layers="yes", remat=True)
    assert list(sums["layers"]) == ["0", "2"] and arms.worst(scanned, plain) <= EXACT


def test_layers_are_stacked_and_unstacked_by_number():
    """Layer 11 is a stack of its own, and layer 5 has no leaves."""
    layers = {
        str(index): {"q": np.full((2, 3), index), "norm": np.full(2, -index)} for index in range(12) if index != 5
    }
    groups = [(0, 1, 3, 4, 6, 7, 9, 10), (2, 8), (5,), (11,)]
    whole = layer_loop.stacked(layers, groups)
    np.testing.assert_array_equal(whole["0"]["q"][:, 0, 0], groups[0])
    back = layer_loop.unstacked(whole, groups)
    assert jax.tree.all(jax.tree.map(np.array_equal, back, layers))


def test_an_unscored_rollout_is_as_if_it_were_not_there():
    with_it = made_groups.groups(3)
    group = with_it[1]
    kept = np.flatnonzero(group.scored)
    assert kept.size == 3
    less = dataclasses.replace(
        group, rollouts=tuple(group.rollouts[i] for i in kept), rewards=group.rewards[kept], scored=group.scored[kept]
    )
    for mode in arms.MODES:
        a, b = (
            arms.gradient(g, np.float64, one=arms.again(learner_of(), np.float64, loss_agg_mode=mode))
            for g in (with_it, [with_it[0], less, with_it[2]])
        )
        assert arms.worst(a, b) <= EXACT


def test_directional_derivative_by_central_differences():
    """The gradient of the whole learner against differences of its own undivided loss, in x64."""
    with arms.precision(np.float64):
        one = arms.learner(
            np.float64,
            mode="seq-mean-token-mean",
            given=arms.algorithm("seq-mean-token-mean", clip_ratio_low=0.5, clip_ratio_high=0.5),
        )
        one.prepare(GROUPS)
        arms.shift(one, np.float64)
        one.accumulate(GROUPS)
        grads = jax.device_get(one.gradient())
        batches, _ = one._packed(GROUPS)
        policy = jax.device_get(one.params)
        loss = jax.jit(lambda p, b: programs.numerator(p, b, one._recipe))

        def whole(p):
            found = [loss(p, b) for b in batches]
            return sum(float(n) for n, _ in found) / sum(int(sums.count) for _, (sums, _) in found)

        rng, h = np.random.default_rng(0), 1e-5
        for _ in range(2):
            way = jax.tree.map(lambda x: rng.standard_normal(x.shape), policy)
            up, down = (whole(jax.tree.map(lambda x, d, s=s: x + s * h * d, policy, way)) for s in (1, -1))
            slope = sum(jax.tree.leaves(jax.tree.map(lambda g, d: float(np.sum(g * d)), grads, way)))
            np.testing.assert_allclose((up - down) / (2 * h), slope, rtol=1e-6)


# ---- groups without a gradient

ALIKE = [
    dataclasses.replace(group, rewards=np.ones_like(group.rewards)) if g % 2 else group
    for g, group in enumerate(GROUPS)
]


def trained(groups, loss_mode="vanilla", *, split=True, **terms):
    """The divided gradient, the metrics of the commit, and which programs ran."""
    with arms.precision(np.float64):
        given = arms.algorithm(loss_mode=loss_mode, **(dict(kl_loss_coef=0.0, entropy_coef=0.0) | terms))
        one = arms.learner(np.float64, given=given, reference=terms.get("kl_loss_coef", 0.0) > 0)
        if not split:
            one._has_no_gradient = lambda group: False
        one.prepare(groups)
        arms.shift(one, np.float64)
        ran = []
        for name in {"accumulate", "measure"} & one._programs.keys():
            one._programs[name] = functools.partial(
                lambda run, name, *args: (ran.append(name), run(*args))[1], one._programs[name], name
            )
        one.accumulate(groups)
        return jax.device_get(one.gradient()), jax.device_get(dict(one.commit())), set(ran)


@pytest.mark.parametrize(
    "loss_mode", ["vanilla", *(pytest.param(name, marks=pytest.mark.extended) for name in arms.LOSSES)]
)
def test_groups_without_advantages_are_only_measured(loss_mode):
    whole, told, programs_of_one = trained(ALIKE, loss_mode, split=False)
    split, same, ran = trained(ALIKE, loss_mode)
    assert programs_of_one == {"accumulate"} and ran == {"accumulate", "measure"}
    assert arms.worst(split, whole) <= EXACT
    fill = "training/packed_fill_ratio"
    assert same.keys() == told.keys() and fill in told
    np.testing.assert_allclose(
        *([row[name] for name in sorted(row) if name != fill] for row in (same, told)), rtol=1e-11
    )


def test_a_round_without_advantages_moves_nothing():
    gradient, told, ran = trained([dataclasses.replace(group, rewards=np.ones_like(group.rewards)) for group in GROUPS])
    assert (
        ran == {"measure"} and not any(leaf.any() for leaf in jax.tree.leaves(gradient)) and told["actor/entropy"] > 0
    )


@pytest.mark.parametrize(
    "terms",
    [
        dict(kl_loss_coef=0.1),
        *(pytest.param(terms, marks=pytest.mark.extended) for terms in (dict(entropy_coef=0.1), dict(loss_mode="sft"))),
    ],
)
def test_other_terms_of_the_loss_move_every_group(terms):
    assert trained(ALIKE, **terms)[2] == {"accumulate"}


def test_a_planted_measure_of_all_groups_is_found(monkeypatch):
    whole = trained(ALIKE, split=False)[0]
    monkeypatch.setattr(learner.Learner, "_has_no_gradient", lambda self, group: True)
    assert arms.worst(whole, trained(ALIKE)[0]) > EXACT


def no_segments(monkeypatch):
    packed = attention.packed
    monkeypatch.setattr(attention, "packed", lambda ids, *rest: packed(jax.numpy.ones_like(ids), *rest))


def lengths_with_observed_tokens(monkeypatch):
    """A sequence divided by all of its tokens, those that were not sampled too."""
    monkeypatch.setattr(
        credit,
        "_lengths",
        lambda group, filtering: group.scored * np.array([len(rollout) for rollout in group.rollouts]),
    )


def a_sequence_counted_per_token(monkeypatch):
    def faulty(lengths, max_tokens):
        return 1.0 / np.maximum(lengths, 1), lengths

    monkeypatch.setitem(aggregation.AGGREGATIONS, "seq-mean-token-mean", faulty)


def late_by_one(monkeypatch):
    """Log-probs left at the position that predicts instead of at the token."""
    right = programs.score
    monkeypatch.setattr(programs, "score", lambda p, b, r: tuple(jax.numpy.roll(x, -1, axis=1) for x in right(p, b, r)))


FAULTS = [
    arms.mean_per_micro_batch,
    no_segments,
    lengths_with_observed_tokens,
    a_sequence_counted_per_token,
    late_by_one,
]


@pytest.mark.shown("sums")
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_planted_faults_are_seen(plain, monkeypatch, fault):
    fault(monkeypatch)
    mode = "seq-mean-token-mean"
    assert arms.worst(arms.gradient(GROUPS, mode=mode), plain[mode]) > 1e-3


@pytest.mark.extended
def test_gspos_mean_over_a_row_is_seen(monkeypatch):
    mode, right = "seq-mean-token-mean", losses.sequence_mean
    plain = arms.plain_gradient(GROUPS, np.float64, mode=mode, loss_mode="gspo")
    monkeypatch.setattr(losses, "sequence_mean", lambda x, mask, ids: right(x, mask, jax.numpy.ones_like(ids)))
    assert arms.worst(arms.gradient(GROUPS, given=arms.algorithm(mode, loss_mode="gspo")), plain) > 1e-3


@pytest.mark.extended
def test_corrections_weigh_the_policys_loss_and_rejection_leaves_every_count():
    """Against the same batch with its advantages multiplied by hand; a rejected token leaves KL and entropy too."""
    given = arms.algorithm(
        "token-mean", rollout_is="token", rollout_is_threshold=(1.2,), kl_loss_coef=0.0, entropy_coef=0.0
    )
    with arms.precision(np.float64):
        one, two = (
            arms.learner(np.float64, kind=arms.Uncommitted, given=g)
            for g in (given, dataclasses.replace(given, rollout_is="none"))
        )
        for learner in (one, two):
            learner.prepare(GROUPS)
        weighed = {r.id: np.minimum(np.exp(one._old.of[r.id] - r.logprobs), 1.2) for g in GROUPS for r in g.rollouts}
        for name, own in two._credits.items():
            two._credits[name] = dataclasses.replace(own, advantages=own.advantages * weighed[name])
        for learner in (one, two):
            arms.shift(learner, np.float64)
            learner.accumulate(GROUPS)
        assert arms.worst(jax.device_get(one.gradient()), jax.device_get(two.gradient())) <= EXACT
        assert int(one._sums.count) == int(two._sums.count) == made_groups.unpacked(GROUPS)[1].sum()
        none = arms.learner(
            np.float64,
            kind=arms.Uncommitted,
            given=arms.algorithm("token-mean", rollout_rs="token_k2", rollout_rs_threshold=(1e-12,)),
        )
        none.prepare(GROUPS)
        none.accumulate(GROUPS)
        assert all(not np.any(leaf) for leaf in jax.tree.leaves(jax.device_get(none.gradient())))
        assert int(none._sums.count) == int(one._sums.count)
