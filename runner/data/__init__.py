"""Data targets: functions that return Splits(train, val)."""

from runner.data.base import Splits

__all__ = ["Splits"]
