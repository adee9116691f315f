"""Hold the data targets, one file each: functions that return Splits(train, val).

conf/data names them as `_target_`; their keyword arguments are the keys of data=NAME.
"""
