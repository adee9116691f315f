"""Answer mode=advise: try a config in several precisions, and say which one to use.

Reading order: `sweeper` (Hydra's entry), `request` (the command), `schedule` (which trials, when),
`trials` (trials as jobs), `remedies` (why a precision fails, and what to keep out of it),
`recorded_baseline` (a run or sweep in the baseline's place). runner/sweeps/verdict ranks the
precisions.
"""
