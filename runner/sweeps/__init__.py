"""Run many jobs as one sweep: a parent run in MLflow, a job for each config, one report at the end.

Hydra composes the jobs; what is ours hangs on three of its plugin points. `hydra_callback` opens
the sweep before the first job (`sweep.Sweep`), `launcher/` runs each job in a process of its own,
and `advisor/` is the sweeper of mode=advise, which chooses jobs as results come in. Every job
leaves `result.json` in its folder, also one that died (`manifest`); `verdict/` compares these
results, `report/` reads and presents them; the command line then calls `sweep.finish_sweep`.

Why a job is a process, and in which order to read: `launcher/__init__.py`. A sweep that was stopped
is resumed from its folder: `manifest` (the file sweep.json) and `sweep_resume`.
"""
