"""The sequential test accepts and rejects with the error rates that it states."""

import math
import random
from collections import Counter

import pytest

from runner.sweeps.verdict.gate import look_error_rate, look_until_decided
from runner.sweeps.verdict.statistics import ERROR_RATE

DRAWS = 3000
THREE_STANDARD_ERRORS = 3 * math.sqrt(ERROR_RATE * (1 - ERROR_RATE) / DRAWS)


def decisions(true_gap: float, max_seeds: int, bar: float = 1.0) -> Counter[str]:
    """Count the decisions on normal gaps of deviation 1."""
    draw = random.Random(3)
    counts: Counter[str] = Counter()
    for _ in range(DRAWS):
        gaps = [draw.gauss(true_gap, 1) for _ in range(max_seeds)]
        counts[look_until_decided(gaps, bar, max_seeds)[-1].decision] += 1
    return counts


@pytest.mark.parametrize("max_seeds", [3, 5, 10])
def test_a_gap_of_exactly_the_bar_is_accepted_and_rejected_as_often_as_stated(max_seeds):
    counts = decisions(true_gap=1.0, max_seeds=max_seeds)
    for decision in ("accepted", "rejected"):
        assert counts[decision] / DRAWS == pytest.approx(ERROR_RATE, abs=THREE_STANDARD_ERRORS)


def test_without_the_correction_for_several_looks_errors_would_be_more_frequent():
    assert look_error_rate(3) == pytest.approx(ERROR_RATE, abs=0.002)  # a single look
    assert look_error_rate(10) < look_error_rate(5) < 0.6 * ERROR_RATE


def test_clear_gaps_are_decided_early():
    assert [look.seeds for look in look_until_decided([0.01, 0.02, 0.03, 0.02], 0.5, 4)] == [3]
    assert look_until_decided([0.9, 1.0, 1.1], 0.5, 10)[-1].decision == "rejected"
    unclear = look_until_decided([0.1, 0.9, 0.5, 0.4], 0.5, 10)
    assert [look.decision for look in unclear] == ["undecided", "undecided"]
    assert unclear[-1].gap == pytest.approx(0.475)


def test_equal_losses_in_every_seed_are_within_any_bar():
    assert look_until_decided([0.0] * 3, 0.0, 5)[-1].decision == "accepted"


def test_two_seeds_decide_nothing():
    assert look_until_decided([0.0, 0.0], 1.0, 5) == []


def test_no_seed_beyond_the_largest_number_is_looked_at():
    assert [look.seeds for look in look_until_decided([0.5, -0.5] * 10, 0.1, 6)] == [3, 4, 5, 6]
