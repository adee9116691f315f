"""Judge a sweep's jobs: the numbers and verdicts below every page, table and sentence.

Reading order: `statistics` (spreads, ratios, tests), `compare` (groups of seeds against 32-true),
`settings` (advise.json: what a command with mode=advise asked and measured), `ranking` (the
verdicts of mode=advise, best first), `gate` (the answer of mode=gate). runner/sweeps/report
presents them, and runner/sweeps/advisor decides by them which trials to run.
"""
