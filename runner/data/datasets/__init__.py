"""Data targets, one file each: functions that return Splits(train, val)."""
