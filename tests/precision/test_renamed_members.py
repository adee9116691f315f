"""A precision class written with the member names of version 0.1 behaves as one with today's."""

from contextlib import contextmanager

import pytest
from torch import nn

from runner.precision.contract import Precision
from runner.precision.renamed_members import RENAMED_MEMBERS
from runner.precision.true import TruePrecision

entered = []


@contextmanager
def recorded(name):
    entered.append(name)
    yield


class OldNames(Precision):
    name = "old-names"
    unrepeatable = "its scales move"

    def __init__(self):
        self.whole = "its weights are packed"

    def building(self):
        return recorded("building")

    def evaluating(self, model):
        return recorded("evaluating")

    @property
    def stores(self):
        return f"packed {super().stores}"  # type: ignore[misc]

    @property
    def computes(self):
        return f"products of {super().computes}"  # type: ignore[misc]


class NewNames(Precision):
    name = "new-names"
    no_recompute_reason = "its scales move"

    def __init__(self):
        self.unshardable_reason = "its weights are packed"

    def init_context(self):
        return recorded("building")

    def eval_context(self, model):
        return recorded("evaluating")

    @property
    def storage_format(self):
        return f"packed {super().storage_format}"

    @property
    def compute_format(self):
        return f"products of {super().compute_format}"


class FromOldNames(OldNames):
    """A subclass of a user's class, which overrides one member by its new name."""

    @property
    def storage_format(self):
        return f"twice {super().stores}"


@pytest.mark.parametrize("kind", [OldNames, NewNames])
def test_both_classes_give_the_same_answers_under_today_s_names(kind):
    precision = kind()
    assert precision.storage_format == "packed float32"
    assert precision.compute_format == "products of float32"
    assert precision.no_recompute_reason == "its scales move"
    assert precision.unshardable_reason == "its weights are packed"
    entered.clear()
    with precision.init_context(), precision.eval_context(nn.Linear(1, 1)):
        assert entered == ["building", "evaluating"]


def test_a_subclass_may_mix_old_and_new_names():
    assert FromOldNames().storage_format == "twice packed float32"
    assert FromOldNames().stores == "twice packed float32"
    assert FromOldNames().computes == "products of float32"


def test_old_names_of_a_built_in_precision_can_be_read():
    precision = TruePrecision("bf16-true", "bfloat16")
    for old, new in RENAMED_MEMBERS.items():
        assert getattr(precision, old) == getattr(precision, new)
    assert precision.stores == precision.computes == "bfloat16"  # type: ignore[attr-defined]


def test_a_member_that_is_defined_under_both_names_has_the_new_value():
    class Both(Precision):
        name = "both"
        whole = "old"
        unshardable_reason = "new"

    assert Both().unshardable_reason == Both().whole == "new"


def test_an_old_name_from_a_class_that_is_no_precision_is_used():
    class NotSharded:
        whole = "its weights are packed"

    class Mine(NotSharded, Precision):
        pass

    assert Mine.unshardable_reason == Mine.whole == "its weights are packed"
