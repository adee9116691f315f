"""Data targets: functions that return Splits(train, val)."""

from runner.data.splits import Splits

__all__ = ["Splits"]
