"""Examples of both tiers: some for `make test`, and the others for `make test-all`."""

import pytest


def counts(few, many):
    """Return a mark that gives a test its number of examples."""
    return pytest.mark.parametrize("count", [few, pytest.param(many, marks=pytest.mark.extended)])


def crossed(rows, columns):
    """Return all pairs; those without the first row or the first column are of the second tier."""
    first_row, first_column = next(iter(rows)), next(iter(columns))
    return [
        pytest.param(row, column, marks=_tier(row == first_row or column == first_column))
        for row in rows
        for column in columns
    ]


def _tier(is_first):
    return () if is_first else pytest.mark.extended
