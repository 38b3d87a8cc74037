"""The engine's tokens follow the exact law; scripts/shows/spec_law.py does the same with more samples and laws."""

from __future__ import annotations

import law_arms as arms
import numpy as np
import pytest

pytestmark = pytest.mark.usefixtures("quick_compilation")

LEVEL = 1e-4


def test_pearson_by_hand():
    """(12-10)^2/10 + (8-10)^2/10 = 0.8. The last two expected counts, 3 and 2, are pooled. An impossible id gives
    infinity."""
    assert arms.pearson(np.array([12, 8]), np.array([10.0, 10.0])) == (pytest.approx(0.8), 1)
    assert arms.pearson(np.array([3, 10, 2, 5]), np.array([3.0, 10, 2, 5])) == (0.0, 2)
    assert arms.pearson(np.array([3, 1]), np.array([4.0, 0.0]))[0] == np.inf


LAW = arms.LAWS["all_three"]


@pytest.fixture(scope="module")
def alone():
    return arms.answers(arms.engine(40), LAW, 1500, 2)


def test_tokens_with_candidates_follow_the_cut_law(alone):
    told = arms.answers(arms.engine(40), LAW, 1500, 2, attempt=1, drafts=arms.drafts(alone))
    assert arms.by_context(40, LAW, alone, 2) > LEVEL and arms.by_context(40, LAW, told, 2) > LEVEL


@pytest.mark.shown("spec-law")
@pytest.mark.parametrize("fault", arms.FAULTS, ids=lambda fault: fault.__name__)
def test_planted_faults_do_not(alone, monkeypatch, fault):
    with monkeypatch.context() as patch:
        fault(patch)
        faulty = arms.engine.__wrapped__(40)
    told = arms.answers(faulty, LAW, 1500, 2, attempt=1, drafts=arms.drafts(alone))
    assert arms.by_context(40, LAW, told, 2) < 1e-6
