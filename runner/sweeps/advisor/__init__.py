"""Answer mode=advise: try a config in several precisions, and say which one to use.

Reading order: `sweeper` (Hydra's entry), `request` (the command), `schedule` (which trials, when),
`trials` (trials as jobs), `diagnosis` and `fp32_search` with `minimal_set` (what to keep out of a
precision that fails), `settings` (the file advise.json, from which runner/sweeps/report ranks the
precisions), `system_load` (other programs on the machine).
"""
