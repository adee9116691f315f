"""Names and values are made to fit the limits of the installed MLflow, and stay distinct."""

import pytest
from mlflow.utils import validation

from runner.tracking.writer.names import distinct_names, legal_name, truncate


@pytest.mark.parametrize(
    ("name", "legal"),
    [
        ("train/loss", "train/loss"),
        ("a[0]@b(c),d=e%f+g", "a_0__b_c__d_e_f_g"),
        ("fp8/amax//x", "fp8/amax/x"),
        ("/a", "a"),
        ("../a", "a"),
        (".", "_"),
    ],
)
def test_names_become_legal(name, legal):
    assert legal_name(name) == legal


@pytest.mark.parametrize(
    "name", ["a/../..", "//", "", "a" * 300, "é ü", "a\nb", "..", "a/.", "./."]
)
def test_mlflow_accepts_every_legal_name(name):
    validation._validate_metric(legal_name(name), 1.0, 1, 1)
    validation._validate_param(legal_name(name), "x")


def test_names_that_become_equal_get_a_number():
    assert distinct_names({"a+b": "1", "a%b": "2", "a@b": "3"}) == {
        "a_b": "1",
        "a_b_2": "2",
        "a_b_3": "3",
    }


def test_a_truncated_text_ends_with_an_ellipsis():
    assert truncate("abc", 3) == "abc"
    assert truncate("abcd", 3) == "ab…"
