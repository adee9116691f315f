"""Answer mode=advise: try a config in several precisions, and say which one to use.

Reading order: `advise_command` (the command, and the run or sweep in the baseline's place),
`schedule` (which trials, when, and Hydra's entry), `trials` (trials as jobs), `remedies` (why a
precision fails, and what to keep out of it). runner/sweeps/verdict ranks the precisions.
"""
