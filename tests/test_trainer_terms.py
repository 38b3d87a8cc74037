"""The terms, rules and advantages of single papers: per leaf against plain code, and in which runs they are refused."""

import gradient_arms as arms
import made_groups
import numpy as np
import pytest
import term_arms as terms
from refusals import refused

from jaxrl_post.algorithms import losses
from jaxrl_post.trainer.old_logprobs import OldLogprobs

pytestmark = pytest.mark.usefixtures("quick_compilation")
FIRST = ("positive_nll", "optimal_token_baseline")  # the arm training-parity of the show suite compares all of them
SINGLE = 5e-6


@pytest.mark.parametrize(
    "name",
    [name if name in FIRST else pytest.param(name, marks=pytest.mark.shown("training-parity")) for name in terms.CASES],
)
def test_gradient_is_that_of_plain_code(name):
    groups, given = terms.groups(), terms.algorithm(**terms.CASES[name])
    assert arms.worst(terms.gradient(groups, given), terms.plain_gradient(groups, given)) <= SINGLE


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("kl_cov", marks=pytest.mark.extended),
        *(
            pytest.param(name, marks=pytest.mark.shown("variants"))
            for name in ("positive_nll", "m2po", "optimal_token_baseline")
        ),
    ],
)
def test_packing_and_pieces_of_the_gradient_change_nothing(name):
    groups, given = terms.groups(), terms.algorithm(**terms.CASES[name])
    how = dict(given=given, reference=False)
    whole = arms.gradient(groups, np.float64, rows=8, tokens=64, **how)
    assert arms.worst(arms.gradient(groups, np.float64, rows=2, tokens=48, parts=3, **how), whole) <= 1e-12


@pytest.mark.parametrize("name", ["clip_cov", "high_entropy", "m2po", "gdpo"])
def test_ranks_of_a_whole_round_are_refused_in_pieces(name):
    one = arms.learner(given=terms.algorithm(**terms.CASES[name]), reference=False)
    one.compile = lambda: None
    one._bare = lambda groups, noisy=False: groups
    one._over = lambda groups, run: {r.id: r.logprobs for group in groups for r in group.rollouts}
    one._programs = {"score": None}
    groups = terms.groups()
    one.prepare(groups[:2])
    refused("this round's groups came in pieces", one.prepare, groups[2:])


def test_gpg_reads_no_old_log_probs_and_its_gap_is_told_without_a_pass_of_its_own():
    assert not losses.NEEDS_OLD_LOGPROBS["gpg"]
    given = terms.algorithm(loss_mode="gpg")
    old = OldLogprobs(given)
    assert not old.needed and old.from_gradient
    one = arms.learner(given=given, reference=False)
    groups = made_groups.groups(2)
    one.compile()
    one._programs["score"] = None  # nobody may call it
    one.prepare(groups)
    one.accumulate(groups[:1])
    assert {"rollout_corr/kl", "actor/pg_loss"} <= one.commit().keys()
    one.accumulate(groups[1:])  # whose log-probs are no longer those of the round's start
    assert "rollout_corr/kl" not in one.commit()
