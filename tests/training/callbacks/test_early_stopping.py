import math

import pytest

from runner.training.callbacks.guard import EarlyStopping


def stopping_evaluation(values, direction, patience, evaluation):
    observer = EarlyStopping("val/loss", direction, patience)
    for number, value in enumerate(values, 1):
        observer.on_evaluation(evaluation(number, loss=value), None)
        if observer.stop_reason:
            return number
    return None


@pytest.mark.parametrize(
    ("values", "direction", "patience", "stop"),
    [
        ([3, 2, 1, 0], "min", 1, None),
        ([3, 2, 2], "min", 1, 3),
        ([3, 4, 2, 3, 3], "min", 2, 5),
        ([1, 2, 3], "max", 1, None),
        ([1, 2, 1, 1, 1], "max", 3, 5),
        ([math.nan, math.nan], "min", 2, 2),
        ([1, math.nan, 0.5, math.nan], "min", 2, None),
        ([math.nan, 1, 0.5], "min", 2, None),
        ([-math.inf, -math.inf], "max", 2, 2),
    ],
)
def test_when_the_quality_has_not_improved(values, direction, patience, stop, evaluation):
    assert stopping_evaluation(values, direction, patience, evaluation) == stop
